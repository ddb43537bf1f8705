"""Command: what a corpus holds, and whether it is whole.

    python -m data.inspect corpus
    python -m data.inspect corpus --document 0 --ids
    python -m data.inspect corpus --sample 3 --sequence-length 1024
    python -m data.inspect corpus --verify

prints the manifest and how long the documents are; one document, or one sample as training cuts
them, as text; or checks every byte. `corpus` is a prepared folder, or the path of a token file
without its .bin and .idx, as Megatron-LM's tools write it: these name no tokenizer, so that text is
shown only with --tokenizer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from data.lengths import Lengths, measure
from data.manifest import MANIFEST_NAME, Manifest, read_manifest
from data.token_file import TokenArray, TokenFile
from data.tokenizer import Tokenizer, load_tokenizer
from data.verify import ReportBytes, check_files, check_tokens

_BAR_CHARACTERS = 30


TRAIN = "train"


class DamagedManifestError(ValueError):
    pass


@dataclass(frozen=True)
class Corpus:
    prefixes: list[Path]
    manifest: Manifest | None

    @property
    def folder(self) -> Path:
        return self.prefixes[0].parent


def find_corpus(path: Path, split: str | None) -> Corpus:
    """The token files of a folder or prefix; with `split`, one of them.

    Raises ValueError or OSError if there is none.
    """
    if path.is_dir():
        names = sorted(file.stem for file in path.glob("*.idx"))
        manifest = _read_manifest(path / (split or TRAIN))
        if manifest is not None:
            names = list(manifest.splits)  # also one whose files are gone
        if split is not None and split not in names:
            listed = ", ".join(names) or "none"
            raise ValueError(f"{path} has no split {split!r}; its token files are: {listed}")
        names = [name for name in names if split in (None, name)]
        if not names:
            raise ValueError(f"{path} holds no token file (.bin and .idx)")
        return Corpus([path / name for name in names], manifest)
    if split is not None:
        raise ValueError(f"--split {split}: {path} is no folder, but one token file")
    if not Path(f"{path}.idx").exists() and not Path(f"{path}.bin").exists():
        raise FileNotFoundError(f"{path}: neither a folder nor a token file: no {path}.idx")
    return Corpus([path], _read_manifest(path))


def _read_manifest(prefix: Path) -> Manifest | None:
    try:
        return read_manifest(prefix)
    except ValueError as problem:
        raise DamagedManifestError(problem) from None


def find_tokenizer(corpus: Corpus, given: Path | None) -> Tokenizer | None:
    """The corpus' own tokenizer, or the one `given`; None for a corpus that has none.

    Raises ValueError or OSError if it cannot be read or is not the one the corpus was made with.
    """
    if corpus.manifest is None and given is None:
        return None
    tokenizer = load_tokenizer(given or corpus.folder, fast=False)
    if corpus.manifest is not None:
        made_with = corpus.manifest.inputs.tokenizer.sha256
        found = tokenizer.identity.sha256
        if found != made_with:
            raise ValueError(
                f"{tokenizer.path} ({found[:12]}) is not the tokenizer that {corpus.folder} was "
                f"made with ({made_with[:12]})"
            )
    return tokenizer


def show_manifest(console: Console, corpus: Corpus) -> None:
    if corpus.manifest is None:
        console.print(
            f"{corpus.folder}: no {MANIFEST_NAME}: made by another tool",
            markup=False,
            soft_wrap=True,
        )
        return
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in _leaves(corpus.manifest.model_dump()):
        table.add_row(key, f"{value:,}" if type(value) is int else str(value))
    console.print(table, markup=False)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    members: Any = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list | tuple):
        members = enumerate(value)
    else:
        yield key, value
    for name, inner in members:
        yield from _leaves(inner, f"{key}.{name}" if key else str(name))


def show_statistics(console: Console, prefix: Path) -> None:
    file = TokenFile(prefix)
    lengths = measure(file.document_lengths())
    console.print(
        f"\n{prefix}: {file.document_count:,} documents, {file.token_count:,} tokens "
        f"({file.dtype.name})",
        markup=False,
        soft_wrap=True,
    )
    if lengths is None:
        return
    console.print(
        f"tokens of a document: min {lengths.minimum:,}, median {lengths.median:,}, mean "
        f"{lengths.mean:,.1f}, p99 {lengths.p99:,}, max {lengths.maximum:,}",
        markup=False,
        soft_wrap=True,
    )
    console.print(_histogram(lengths))


def _histogram(lengths: Lengths) -> Table:
    table = Table(box=None)
    for title in ("tokens", "documents", "", "% of tokens"):
        table.add_column(title, justify="left" if title == "" else "right")
    most = max(documents for _, _, documents, _ in lengths.buckets)
    for start, end, documents, tokens in lengths.buckets:
        bar = "#" * -(-_BAR_CHARACTERS * documents // most)
        share = 100 * tokens / max(1, lengths.tokens)
        table.add_row(f"{start:,}-{end:,}", f"{documents:,}", bar, f"{share:.1f}")
    return table


def print_tokens(tokens: TokenArray, tokenizer: Tokenizer | None, ids: bool, first: int) -> None:
    """The text, where a document ends a line that says so; with `ids`, a line for every token:
    its place in the file from `first`, its id and its name."""
    if tokenizer is None and not ids:
        raise ValueError(
            f"no {MANIFEST_NAME} names the tokenizer of this corpus: give it with --tokenizer to "
            "see text, or --ids to see numbers"
        )
    if ids:
        for place, token in enumerate(tokens.tolist(), start=first):
            name = tokenizer.token_name(token) if tokenizer else ""
            print(f"{place:>12,} {token:>8}  {'NOT IN THE VOCABULARY' if name is None else name!r}")
        return
    assert tokenizer is not None
    document: list[int] = []
    for token in tokens.tolist():
        if token == tokenizer.end_of_document:
            print(f"{tokenizer.decode(document)}\n--- end of document ---")
            document = []
        else:
            document.append(token)
    if document:
        print(tokenizer.decode(document))


def _show_tokens(arguments: argparse.Namespace, corpus: Corpus) -> None:
    if len(corpus.prefixes) > 1 and corpus.manifest is None:
        names = ", ".join(prefix.name for prefix in corpus.prefixes)
        raise ValueError(f"{corpus.folder} holds {names}: choose one with --split")
    file = TokenFile(corpus.prefixes[0])
    tokenizer = find_tokenizer(corpus, arguments.tokenizer)
    if arguments.document is not None:
        number, count, first = arguments.document, file.document_count, 0
        if number < count:
            tokens = file.document(number)
            first = sum(int(lengths.sum()) for lengths in _before(file, number))
    else:
        length = arguments.sequence_length
        number, count = arguments.sample, (file.token_count - 1) // length
        first = number * length
        tokens = file.tokens(first, length + 1) if number < count else file.tokens(0, 0)
    what = "document" if arguments.document is not None else "sample"
    if number >= count:
        raise ValueError(f"--{what} {number}: {file.bin_path} has {count:,}, counted from 0")
    print(
        f"{what} {number:,} of {count:,} in {corpus.prefixes[0]}: tokens {first:,} to "
        f"{first + len(tokens) - 1:,}\n"
    )
    print_tokens(tokens, tokenizer, arguments.ids, first)


def _before(file: TokenFile, document: int) -> Iterator[Any]:
    """Lengths of the documents before this one."""
    for lengths in file.document_lengths():
        if document <= 0:
            return
        yield lengths[:document]
        document -= len(lengths)


def verify(corpus: Corpus, tokenizer: Tokenizer | None) -> list[str]:
    """What is wrong, naming the file; all token files are checked.

    Args:
        corpus: see there.
        tokenizer: of a corpus without a manifest; None: the corpus' own.
    """
    problems = []
    if corpus.manifest is not None:
        recorded = corpus.manifest.inputs.tokenizer
        vocabulary_size = recorded.vocabulary_size
        end_of_document = recorded.special_tokens["eos"]
        if tokenizer is None:
            try:
                find_tokenizer(corpus, None)
            except (ValueError, OSError) as damage:
                problems.append(str(damage))
    else:
        assert tokenizer is not None
        vocabulary_size = tokenizer.vocabulary_size
        end_of_document = tokenizer.end_of_document
    for prefix in corpus.prefixes:
        with _progress(prefix) as progress:
            found: list[str] = []
            if corpus.manifest is not None:
                found = check_files(prefix, corpus.manifest.splits[prefix.name], progress)
            if not found:
                found = _check_tokens(prefix, vocabulary_size, end_of_document, progress)
            problems += found
    return problems


def _check_tokens(
    prefix: Path, vocabulary_size: int, end_of_document: int, progress: ReportBytes
) -> list[str]:
    try:
        problem = check_tokens(TokenFile(prefix), vocabulary_size, end_of_document, progress)
    except (ValueError, OSError) as damage:
        problem = str(damage)
    return [problem] if problem else []


def _verify(arguments: argparse.Namespace) -> int:
    try:
        corpus = find_corpus(arguments.corpus, arguments.split)
    except DamagedManifestError as damage:
        print(f"error: {damage}", file=sys.stderr)
        return 1
    if corpus.manifest is None and arguments.tokenizer is None:
        raise ValueError(
            f"{corpus.folder}: no {MANIFEST_NAME} tells the vocabulary and the end-of-document "
            "token to verify against: give --tokenizer"
        )
    given = find_tokenizer(corpus, arguments.tokenizer) if arguments.tokenizer else None
    problems = verify(corpus, given)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        checked = "checksums, ids and ends of documents" if corpus.manifest else "ids and ends"
        print(f"{arguments.corpus}: whole ({checked} of {len(corpus.prefixes)} token files)")
    return 1 if problems else 0


@contextmanager
def _progress(prefix: Path) -> Iterator[ReportBytes]:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    sizes = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx", ".bin")]
    # The tokens are passed twice: for the checksum, and by documents.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        total = sum(path.stat().st_size for path in sizes if path.exists())
        task = bar.add_task(f"verify {prefix.name}", total=total)
        yield lambda count: bar.advance(task, count)


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.sample is None) != (arguments.sequence_length is None):
        raise ValueError("--sample N and --sequence-length L go together")
    if arguments.sequence_length is not None and arguments.sequence_length < 1:
        raise ValueError(f"--sequence-length {arguments.sequence_length}: expected 1 or more")
    if arguments.ids and arguments.document is None and arguments.sample is None:
        raise ValueError("--ids shows the tokens of a --document N or a --sample N")
    if arguments.verify:
        return _verify(arguments)
    corpus = find_corpus(arguments.corpus, arguments.split)
    if arguments.document is not None or arguments.sample is not None:
        _show_tokens(arguments, corpus)
    else:
        console = Console()
        show_manifest(console, corpus)
        for prefix in corpus.prefixes:
            show_statistics(console, prefix)
    return 0


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0, not {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.inspect",
        description="Shows what a corpus holds, or checks that it is whole.",
        epilog="example: python -m data.inspect corpus --document 0 --ids",
    )
    parser.add_argument(
        "corpus", type=Path, help="prepared folder, or path of a token file without .bin and .idx"
    )
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--document", type=_number, metavar="N", help="print document N, from 0")
    show.add_argument(
        "--sample", type=_number, metavar="N", help="print sample N, from 0, in the file's order"
    )
    show.add_argument(
        "--verify",
        action="store_true",
        help="check checksums, ids and ends of documents; exits 1 if a file is damaged",
    )
    parser.add_argument("--sequence-length", type=int, metavar="L", help="of the --sample")
    parser.add_argument("--split", help="only this one; shown text is of the first by default")
    parser.add_argument("--ids", action="store_true", help="a line for each token, with its id")
    parser.add_argument("--tokenizer", type=Path, help="for a corpus without manifest.json")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    # Not every terminal can show every character; the text is not to be lost for that.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
