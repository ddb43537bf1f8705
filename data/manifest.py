"""manifest.json: what a folder of token files was made of, and what it holds.

It has no dates and no machine's names: the same sources and tokenizer give the same manifest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

MANIFEST_NAME = "manifest.json"
TRAIN, VALIDATION = "train", "validation"


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(Record):
    bytes: int
    sha256: str


class SplitRecord(Record):
    """One token file: its .bin and .idx."""

    documents: int
    tokens: int
    """End-of-document tokens included."""
    end_of_document_tokens: int | None = None
    """Counted in the .bin; None in a corpus prepared before they were."""
    bin: FileRecord
    idx: FileRecord
    hashes: FileRecord | None = None
    """Of a shard whose duplicates are to be dropped: 16 bytes a document."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.bin.sha256} {self.idx.sha256}".encode()).hexdigest()


class TokenizerRecord(Record):
    kind: Literal["sentencepiece", "huggingface"]
    sha256: str
    """Of tokenizer.model or tokenizer.json, a copy of which lies beside the manifest."""
    vocabulary_size: int
    """The largest id and one."""
    special_tokens: dict[str, int]
    """By role; eos ends the documents."""


class SourceRecord(Record):
    source: str
    """As given on the command line."""
    files: int
    bytes: int
    """On disk: compressed where the files are."""


class Inputs(Record):
    """Everything the token files are a function of."""

    sources: tuple[SourceRecord, ...]
    tokenizer: TokenizerRecord
    text_key: str
    split: str = "train"
    """Of sources that are Hugging Face datasets."""
    streaming: bool = False
    skip_invalid: bool
    deduplicate: bool = False
    validation_fraction: float


class ShardRecord(Record):
    """The part of a corpus that a folder holds, to be joined by data/merge.py."""

    number: int
    """From 0."""
    count: int
    plan: str
    """Checksum of the list of all shards' chunks: files, ranges and sizes."""


class Skipped(Record):
    """Documents left out."""

    empty: int
    invalid: int
    duplicate: int = 0

    def __add__(self, other: Skipped) -> Skipped:
        return Skipped(
            empty=self.empty + other.empty,
            invalid=self.invalid + other.invalid,
            duplicate=self.duplicate + other.duplicate,
        )


class Manifest(Record):
    format_version: Literal[1] = 1
    inputs: Inputs
    shard: ShardRecord | None = None
    """None for a whole corpus."""
    dtype: str
    splits: dict[str, SplitRecord]
    """By the name of the token file: train and, where asked for, validation."""
    skipped: Skipped
    unknown_tokens: int = 0
    """How often the tokenizer had no token for a text, duplicates included."""

    @property
    def vocabulary_size(self) -> int:
        return self.inputs.tokenizer.vocabulary_size

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2).encode() + b"\n"


def read_manifest(prefix: str | Path) -> Manifest | None:
    """The manifest beside the token file PREFIX, or None if there is none that lists it.

    Raises ValueError if the manifest is damaged or of another version.
    """
    path = Path(prefix).with_name(MANIFEST_NAME)
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path}: {place}: {first['msg']}; prepare the corpus again") from None
    return manifest if Path(prefix).name in manifest.splits else None
