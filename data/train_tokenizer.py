"""The command that trains a tokenizer; data/tokenizer.py is its name."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from data.sentencepiece_tokenizer import SPECIAL_TOKENS
from data.sources import raise_problem, read_documents, source_files
from data.tokenizer import load_tokenizer, write_atomically

# The trainer skips texts that hold these: a terminator, its space and its mark for unknowns.
_UNTRAINABLE = re.compile("[\0\u2581\u2585]")

# Characters given to the trainer at once. It skips longer texts than it is told to expect, and its
# positions within a word are 16-bit numbers.
_TRAINING_CHARACTERS = 4096

# Above this BPE training takes minutes and gigabytes for pieces that hardly change.
_SAMPLE_BYTES = 100_000_000


@dataclass(frozen=True)
class TrainingReport:
    """Bytes of text read and learnt from, and how many of `sampled` texts came back unchanged."""

    read_bytes: int
    used_bytes: int
    sampled: int
    unchanged: int


class _TrainingTexts:
    """Cuts documents to the trainer's measure, keeping an evenly spaced share of the cuts."""

    def __init__(self, documents: Iterable[str], fraction: float) -> None:
        self.documents = documents
        self.fraction = fraction
        self.read_bytes = self.used_bytes = 0
        self.sample: list[str] = []

    def __iter__(self) -> Iterator[str]:
        position = 0.0
        for document in self.documents:
            for start in range(0, len(document), _TRAINING_CHARACTERS):
                text = document[start : start + _TRAINING_CHARACTERS]
                self.read_bytes += len(text.encode())
                position += self.fraction
                if position < 1:
                    continue
                position -= 1
                if len(self.sample) < 256:
                    self.sample.append(text)
                for part in _UNTRAINABLE.split(text):
                    self.used_bytes += len(part.encode())
                    yield part


def train_tokenizer(
    documents: Iterable[str], vocabulary_size: int, output: str | Path, *, fraction: float = 1.0
) -> TrainingReport:
    """Trains a BPE model on an evenly spaced `fraction` of the text, and writes it to `output`.

    The same documents give the same file, to the byte.

    Raises:
        ValueError: there is no text, or too little for, or too many characters in it for, a
            vocabulary of this size; the message states the nearest size that works.
        OSError: the file cannot be written.
    """
    texts = _TrainingTexts(documents, fraction)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary_size,
            max_sentence_length=4 * _TRAINING_CHARACTERS,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            # Indentation becomes pieces: four spaces and a word need not be five tokens.
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            minloglevel=2,
            unk_id=SPECIAL_TOKENS["unk"],
            bos_id=SPECIAL_TOKENS["bos"],
            eos_id=SPECIAL_TOKENS["eos"],
            pad_id=SPECIAL_TOKENS["pad"],
        )
    except RuntimeError as problem:
        raise _explained(problem, vocabulary_size, texts.used_bytes) from None
    output = Path(output)
    write_atomically(output, model.getvalue())
    tokenizer = load_tokenizer(output, fast=False)
    unchanged = sum(tokenizer.decode(tokenizer.encode(text)) == text for text in texts.sample)
    return TrainingReport(texts.read_bytes, texts.used_bytes, len(texts.sample), unchanged)


def _explained(problem: RuntimeError, vocabulary_size: int, used_bytes: int) -> ValueError:
    """The trainer's failure in the user's terms; it states limits only in its message."""
    message = str(problem)
    if found := re.search(r"set it to a value <= (\d+)", message):
        return ValueError(
            f"a vocabulary of {vocabulary_size:,} is too large for {used_bytes:,} bytes of text: "
            f"the largest it supports is {int(found[1]):,}; lower --vocab-size or add text"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return ValueError(
            f"a vocabulary of {vocabulary_size:,} is too small: 256 bytes, {len(SPECIAL_TOKENS)} "
            f"special tokens and the text's own characters need at least {int(found[1]):,}"
        )
    if "!sentences_.empty()" in message:
        return ValueError("the sources hold no text to train on")
    return ValueError(f"sentencepiece cannot train on this text: {message}")


def _train_command(arguments: argparse.Namespace) -> None:
    total_bytes = sum(
        path.stat().st_size for source in arguments.source for path in source_files(source)
    )
    skipped: list[ValueError] = []
    documents = read_documents(
        arguments.source,
        text_key=arguments.text_key,
        on_invalid=skipped.append if arguments.skip_invalid else raise_problem,
    )
    report = train_tokenizer(
        documents,
        arguments.vocab_size,
        arguments.output,
        fraction=min(1.0, arguments.sample_bytes / max(1, total_bytes)),
    )
    print(
        f"{arguments.output}: {arguments.vocab_size:,} pieces learnt from {report.used_bytes:,} of "
        f"{report.read_bytes:,} bytes, {len(skipped):,} invalid documents skipped; "
        f"round trip {report.unchanged / report.sampled:.2%} of {report.sampled} texts"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data.tokenizer", description=__doc__)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser(
        "train",
        help="train a lossless sentencepiece model",
        epilog="example: python -m data.tokenizer train --source python-stdlib --vocab-size 8192 "
        "--output tokenizer.model",
    )
    train.add_argument("--source", action="append", required=True, help="may be given repeatedly")
    train.add_argument("--vocab-size", type=int, required=True)
    train.add_argument("--output", type=Path, required=True)
    train.add_argument("--text-key", default="text", help="key of the text in JSON lines")
    train.add_argument("--skip-invalid", action="store_true", help="count invalid documents")
    train.add_argument(
        "--sample-bytes",
        type=int,
        default=_SAMPLE_BYTES,
        help="learn from about this many bytes, evenly spaced over the sources' files",
    )
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    try:
        _train_command(arguments)
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
