"""The command `python -m data.tokenizer train`.

The tokenizers trained here are lossless: decode(encode(text)) == text for every valid text. There
is no normalisation, no prefix and no removal of whitespace, and characters without a piece of their
own are spelled in bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.sources import Reading, plan_chunks, raise_problem, read_documents
from data.tokenizer import load_tokenizer, write_atomically

SENTENCEPIECE_BPE, SENTENCEPIECE_UNIGRAM = "sentencepiece-bpe", "sentencepiece-unigram"
BYTE_LEVEL_BPE = "byte-level-bpe"
KINDS = (SENTENCEPIECE_BPE, SENTENCEPIECE_UNIGRAM, BYTE_LEVEL_BPE)

SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2, "pad": 3}

END_OF_DOCUMENT = "<|endoftext|>"
"""Of byte-level tokenizers."""

# sentencepiece's trainer skips texts that hold these: a terminator, its space and its mark for
# unknowns.
_UNTRAINABLE = re.compile("[\0\u2581\u2585]")

# Characters given to a trainer at once. sentencepiece skips longer texts than it is told to expect,
# and its positions within a word are 16-bit numbers. A cut through a word teaches a wrong word, so
# there are no more of them than must be.
_CHARACTERS = {SENTENCEPIECE_BPE: 4096, SENTENCEPIECE_UNIGRAM: 4096, BYTE_LEVEL_BPE: 1 << 16}

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

    def __init__(self, documents: Iterable[str], fraction: float, kind: str) -> None:
        self.documents = documents
        self.fraction = fraction
        self.characters = _CHARACTERS[kind]
        self.untrainable = None if kind == BYTE_LEVEL_BPE else _UNTRAINABLE
        self.read_bytes = self.used_bytes = 0
        self.sample: list[str] = []

    def __iter__(self) -> Iterator[str]:
        position = 0.0
        for document in self.documents:
            for start in range(0, len(document), self.characters):
                text = document[start : start + self.characters]
                self.read_bytes += len(text.encode())
                position += self.fraction
                if position < 1:
                    continue
                position -= 1
                if len(self.sample) < 256:
                    self.sample.append(text[: _CHARACTERS[SENTENCEPIECE_BPE]])
                for part in self.untrainable.split(text) if self.untrainable else [text]:
                    self.used_bytes += len(part.encode())
                    yield part


def train_tokenizer(
    documents: Iterable[str],
    vocabulary_size: int,
    output: str | Path,
    *,
    kind: str = SENTENCEPIECE_BPE,
    fraction: float = 1.0,
) -> TrainingReport:
    """Trains on an evenly spaced `fraction` of the text, and writes the tokenizer to `output`.

    The same documents give the same file, to the byte.

    Args:
        documents: are read once, and not kept.
        vocabulary_size: special tokens included; the tokenizer has exactly this many ids.
        output: a .json file for byte-level BPE, which gets a tokenizer_config.json beside it where
            it is named tokenizer.json: transformers' AutoTokenizer then loads its folder.
        kind: one of KINDS.
        fraction: above 0, at most 1.

    Raises:
        ValueError: there is no text, or too little for, or too many characters in it for, a
            vocabulary of this size; the message states the nearest size that works.
        OSError: a file cannot be written.
    """
    output = Path(output)
    if (output.suffix == ".json") != (kind == BYTE_LEVEL_BPE):
        raise ValueError(
            f"--output {output}: a {kind} tokenizer is a "
            + (".json file" if kind == BYTE_LEVEL_BPE else "sentencepiece .model, not a .json file")
        )
    texts = _TrainingTexts(documents, fraction, kind)
    if kind == BYTE_LEVEL_BPE:
        content = _train_byte_level(texts, vocabulary_size)
        if output.name == "tokenizer.json":
            write_atomically(output.with_name("tokenizer_config.json"), _transformers_config())
    else:
        content = _train_sentencepiece(texts, vocabulary_size, kind)
    write_atomically(output, content)
    tokenizer = load_tokenizer(output, fast=False)
    unchanged = sum(tokenizer.decode(tokenizer.encode(text)) == text for text in texts.sample)
    return TrainingReport(texts.read_bytes, texts.used_bytes, len(texts.sample), unchanged)


def _train_sentencepiece(texts: _TrainingTexts, vocabulary_size: int, kind: str) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    ids: dict[str, Any] = {f"{name}_id": token for name, token in SENTENCEPIECE_IDS.items()}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=kind.removeprefix("sentencepiece-"),
            vocab_size=vocabulary_size,
            max_sentence_length=4 * texts.characters,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            # Indentation becomes pieces: four spaces and a word need not be five tokens.
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            minloglevel=2,
            **ids,
        )
    except RuntimeError as problem:
        raise _explained(problem, vocabulary_size, texts.used_bytes) from None
    return model.getvalue()


def _explained(problem: RuntimeError, vocabulary_size: int, used_bytes: int) -> ValueError:
    """The trainer's failure in the user's terms; it states limits only in its message."""
    message = str(problem)
    if found := re.search(r"set it to a value <= (\d+)", message):
        return _too_large(vocabulary_size, used_bytes, int(found[1]))
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return ValueError(
            f"a vocabulary of {vocabulary_size:,} is too small: 256 bytes, "
            f"{len(SENTENCEPIECE_IDS)} special tokens and the text's own characters need at least "
            f"{int(found[1]):,}"
        )
    if "!sentences_.empty()" in message:
        return ValueError("the sources hold no text to train on")
    return ValueError(f"sentencepiece cannot train on this text: {message}")


def _too_large(vocabulary_size: int, used_bytes: int, largest: int) -> ValueError:
    return ValueError(
        f"a vocabulary of {vocabulary_size:,} is too large for {used_bytes:,} bytes of text: "
        f"the largest it supports is {largest:,}; lower --vocab-size or add text"
    )


def _train_byte_level(texts: _TrainingTexts, vocabulary_size: int) -> bytes:
    """GPT-2's kind: words of its regular expression, spelled in bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 1
    if vocabulary_size < smallest:
        raise ValueError(
            f"a vocabulary of {vocabulary_size:,} is too small: {len(alphabet)} bytes and "
            f"{END_OF_DOCUMENT} need at least {smallest:,}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=sorted(alphabet),
        special_tokens=[END_OF_DOCUMENT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    if texts.used_bytes == 0:
        raise ValueError("the sources hold no text to train on")
    learnt = tokenizer.get_vocab_size()
    if learnt < vocabulary_size:
        raise _too_large(vocabulary_size, texts.used_bytes, learnt)
    return (tokenizer.to_str(pretty=True) + "\n").encode()


def _transformers_config() -> bytes:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT,
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
    }
    return (json.dumps(config, indent=2) + "\n").encode()


def _train_command(arguments: argparse.Namespace) -> None:
    reading = Reading(
        tuple(arguments.source), arguments.text_key, arguments.split, arguments.streaming
    )
    if arguments.sample_bytes < 1:
        raise ValueError(f"--sample-bytes {arguments.sample_bytes}: expected 1 or more")
    sizes = [chunk.size for chunk in plan_chunks(reading)]
    skipped: list[ValueError] = []
    documents = read_documents(
        reading, on_invalid=skipped.append if arguments.skip_invalid else raise_problem
    )
    if 0 in sizes:
        documents = _first_bytes(documents, arguments.sample_bytes)
    kind = arguments.kind or (
        BYTE_LEVEL_BPE if arguments.output.suffix == ".json" else SENTENCEPIECE_BPE
    )
    report = train_tokenizer(
        documents,
        arguments.vocab_size,
        arguments.output,
        kind=kind,
        fraction=min(1.0, arguments.sample_bytes / max(1, sum(sizes))),
    )
    print(
        f"{arguments.output}: {arguments.vocab_size:,} pieces ({kind}) learnt from "
        f"{report.used_bytes:,} of {report.read_bytes:,} bytes, {len(skipped):,} invalid documents "
        f"skipped; round trip {report.unchanged / report.sampled:.2%} of {report.sampled} texts"
    )


def _first_bytes(documents: Iterable[str], limit: int) -> Iterator[str]:
    for document in documents:
        yield document
        limit -= len(document.encode())
        if limit <= 0:
            return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data.tokenizer", description=__doc__)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser(
        "train",
        help="train a lossless tokenizer",
        epilog="example: python -m data.tokenizer train --source python-stdlib --vocab-size 8192 "
        "--output tokenizer.model",
    )
    train.add_argument(
        "--source",
        action="append",
        required=True,
        help="as of data.prepare: files, folders, patterns, hf:DATASET or python-stdlib; may be "
        "given repeatedly",
    )
    train.add_argument("--vocab-size", type=int, required=True)
    train.add_argument("--output", type=Path, required=True)
    train.add_argument(
        "--kind",
        choices=KINDS,
        help=f"default: {BYTE_LEVEL_BPE} for a .json --output, else {SENTENCEPIECE_BPE}",
    )
    train.add_argument("--text-key", default="text", help="key or column that holds the text")
    train.add_argument("--split", default="train", help="split of hf: datasets")
    train.add_argument(
        "--streaming", action="store_true", help="read hf: datasets without downloading them first"
    )
    train.add_argument("--skip-invalid", action="store_true", help="count invalid documents")
    train.add_argument(
        "--sample-bytes",
        type=int,
        default=_SAMPLE_BYTES,
        help="learn from about this many bytes, evenly spaced over the sources' files; of a "
        "streamed dataset, whose size is not known, from its first (default: %(default)s)",
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
