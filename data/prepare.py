"""Command: from sources to token files.

    python -m data.prepare --source python-stdlib --tokenizer tokenizer.model --output corpus

writes corpus/train.bin and .idx, validation.bin and .idx, tokenizer.model (a copy) and
manifest.json. Every document ends with the end-of-document token. Documents of zero characters are
skipped and counted; whitespace is text like any other. Which documents are held out for validation
depends on their text alone. The output is the same, to the byte, for any number of workers.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import (
    FileSizeColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from data.encoding import TRAIN, VALIDATION, encode_chunks
from data.manifest import (
    MANIFEST_NAME,
    Inputs,
    Manifest,
    Skipped,
    SourceRecord,
    read_manifest,
)
from data.sources import Reading, raise_problem, read_documents, source_files
from data.token_file import TokenFile, TokenFileWriter
from data.tokenizer import Tokenizer, load_tokenizer, write_atomically

# Documents are handed to workers in chunks of at least this many characters: large enough that
# handing over costs nothing, small enough that two a worker cost no memory.
_CHUNK_CHARACTERS = 1 << 19


def prepare(inputs: Inputs, tokenizer: Tokenizer, output: Path, workers: int) -> Manifest:
    """Writes the folder `output`, all of it or nothing.

    Raises:
        ValueError: a source or document is invalid, or a split would be empty.
        OSError: a file cannot be read or written, or the disk is full.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        manifest = _write_splits(inputs, tokenizer, partial, workers)
        for name, content in tokenizer.files.items():
            write_atomically(partial / name, content)
        write_atomically(
            partial / MANIFEST_NAME, manifest.model_dump_json(indent=2).encode() + b"\n"
        )
        _flush_folder(partial)
        partial.rename(output)
        _flush_folder(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _write_splits(inputs: Inputs, tokenizer: Tokenizer, folder: Path, workers: int) -> Manifest:
    source = _Source(inputs)
    names = [TRAIN, VALIDATION] if inputs.validation_fraction > 0 else [TRAIN]
    with ExitStack() as stack, _progress() as progress:
        writers = {
            name: stack.enter_context(TokenFileWriter(folder / name, tokenizer.vocabulary_size))
            for name in names
        }
        task = progress.add_task("prepare", total=None, documents=0)
        for encoded in encode_chunks(
            source.chunks(), tokenizer.path, inputs.validation_fraction, workers
        ):
            for name, lengths in encoded.lengths.items():
                writers[name].append(encoded.tokens[name], lengths)
            progress.update(task, advance=encoded.text_bytes, documents=source.documents)
        if source.documents == 0:
            raise ValueError(
                f"the sources hold no text: {source.empty:,} documents are empty and "
                f"{source.invalid:,} invalid"
            )
        for name, writer in writers.items():
            if writer.token_count == 0:
                raise ValueError(
                    f"none of the {source.documents:,} documents falls into the {name} split at "
                    f"--validation-fraction {inputs.validation_fraction}: choose another fraction "
                    "(0 for no validation split), or cut the text into more documents"
                )
    return Manifest(
        inputs=inputs,
        dtype=writers[TRAIN].dtype.name,
        splits={name: writer.record for name, writer in writers.items()},
        skipped=Skipped(empty=source.empty, invalid=source.invalid),
    )


def _flush_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}: {task.fields[documents]:,} documents"),
        FileSizeColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


class _Source:
    """Reads documents in chunks, and counts them."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.documents = self.empty = self.invalid = 0

    def chunks(self) -> Iterator[list[str]]:
        chunk: list[str] = []
        characters = 0
        sources = tuple(record.source for record in self.inputs.sources)
        for document in read_documents(
            Reading(sources, self.inputs.text_key),
            on_invalid=self._skip if self.inputs.skip_invalid else raise_problem,
        ):
            if not document:
                self.empty += 1
                continue
            self.documents += 1
            chunk.append(document)
            characters += len(document)
            if characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        if chunk:
            yield chunk

    def _skip(self, problem: ValueError) -> None:
        self.invalid += 1
        print(f"skipped: {problem}", file=sys.stderr)


def find_prepared(output: Path, inputs: Inputs) -> Manifest | None:
    """The manifest of `output` if it was prepared from exactly these inputs; None if it is free.

    Raises ValueError if it holds anything else, or if its files are damaged.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    manifest = read_manifest(output / TRAIN)
    if manifest is None:
        raise ValueError(
            f"{output} exists but holds no prepared corpus: remove it or choose another --output"
        )
    found, wanted = manifest.inputs.model_dump(), inputs.model_dump()
    for key in wanted:
        if found[key] != wanted[key]:
            raise ValueError(
                f"{output} holds another corpus: its {key} is {found[key]}, not {wanted[key]}; "
                "remove it or choose another --output"
            )
    for name in manifest.splits:
        TokenFile(output / name)
    return manifest


def _summary(manifest: Manifest, output: Path) -> str:
    splits = "; ".join(
        f"{name} {split.documents:,} documents, {split.tokens:,} tokens"
        for name, split in manifest.splits.items()
    )
    return (
        f"{output}: {splits} ({manifest.dtype}); documents skipped: "
        f"{manifest.skipped.empty:,} empty, {manifest.skipped.invalid:,} invalid"
    )


def _inputs(arguments: argparse.Namespace, tokenizer: Tokenizer) -> Inputs:
    if not 0 <= arguments.validation_fraction < 1:
        raise ValueError(
            f"--validation-fraction {arguments.validation_fraction}: expected 0 or more, below 1"
        )
    if arguments.workers < 1:
        raise ValueError(f"--workers {arguments.workers}: expected 1 or more")
    sources = []
    for source in arguments.source:
        files = source_files(source)
        size = sum(path.stat().st_size for path in files)
        sources.append(SourceRecord(source=source, files=len(files), bytes=size))
    return Inputs(
        sources=tuple(sources),
        tokenizer=tokenizer.identity,
        text_key=arguments.text_key,
        skip_invalid=arguments.skip_invalid,
        validation_fraction=arguments.validation_fraction,
    )


def _run(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments.tokenizer)
    if not tokenizer.lossless:
        print(f"warning: {tokenizer.path} does not keep text to the byte", file=sys.stderr)
    inputs = _inputs(arguments, tokenizer)
    output = arguments.output
    manifest = find_prepared(output, inputs)
    if manifest is not None:
        print(f"already prepared: {_summary(manifest, output)}")
        return
    manifest = prepare(inputs, tokenizer, output, arguments.workers)
    print(_summary(manifest, output))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        description="Turns text into token files for training.",
        epilog="example: python -m data.prepare --source python-stdlib --tokenizer tokenizer.model "
        "--output corpus",
    )
    parser.add_argument(
        "--source",
        action="append",
        required=True,
        help=".txt, .jsonl, .jsonl.gz or .jsonl.zst file, a folder of them, or python-stdlib; "
        "may be given repeatedly",
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="sentencepiece model")
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.01,
        help="share of the documents held out (default: %(default)s)",
    )
    parser.add_argument("--text-key", default="text", help="key of the text in JSON lines")
    parser.add_argument(
        "--skip-invalid", action="store_true", help="leave out and list invalid documents"
    )
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    try:
        _run(arguments)
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print(
            "error: a worker was killed, most likely for want of memory; use fewer --workers",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
