"""A corpus that grows by parts, in order, and can be continued after a crash at any moment.

Parts are the chunks of data/prepare.py and the shards of data/merge.py. In the folder are

    NAME.bin, NAME.lengths, NAME.hashes  of each split, growing
    invalid.txt                          growing
    journal.jsonl                        a line after each commit: what of these is whole

What lies beyond the journal's last line is cut off when the output is opened again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from data.encoding import HASH_BYTES
from data.files import BLOCK_BYTES, HashedFile, SyncedFile
from data.manifest import TRAIN, VALIDATION, Record, Skipped, SplitRecord
from data.token_file import write_index

JOURNAL = "journal.jsonl"
INVALID = "invalid.txt"
SCRATCH = (JOURNAL, *(f"{split}.lengths" for split in (TRAIN, VALIDATION)))
"""What no reader of the corpus needs."""

_BLOCK_DOCUMENTS = 1 << 20

Mask = Callable[[int, int], npt.NDArray[np.bool_]]
"""Of the documents of a split from one to another, as they were read, which are dropped."""


class SplitState(Record):
    """What of a split has been written."""

    read: int = 0
    """Documents taken from parts, dropped ones included."""
    documents: int = 0
    tokens: int = 0
    end_of_document_tokens: int = 0


class State(Record):
    """What a line of the journal says."""

    parts: int
    splits: dict[str, SplitState]
    skipped: Skipped
    unknown_tokens: int
    invalid_bytes: int


@dataclass(frozen=True)
class PartSplit:
    """Where a part has one of its splits."""

    bin: Path
    lengths: Path
    lengths_offset: int
    """In bytes: the index of a token file holds them behind its header."""
    documents: int
    hashes: Path | None
    sha256: str | None = None
    """Of the .bin, to be checked; None if it need not be."""


@dataclass(frozen=True)
class Part:
    splits: dict[str, PartSplit]
    invalid: Path
    skipped: Skipped
    unknown_tokens: int


class CorpusOutput:
    """The growing files of a folder.

    Args:
        folder: is continued if it holds a journal.
        splits: names.
        dtype: of the tokens.
        end_of_document: its token, to be counted.
        hashes: whether parts have hashes of their documents, to be kept.
        drop: by split, which documents are left out as duplicates.

    Raises:
        ValueError: the files are not what the journal says.
        OSError: they cannot be read or written.
    """

    def __init__(
        self,
        folder: Path,
        splits: tuple[str, ...],
        dtype: np.dtype[np.integer],
        end_of_document: int,
        *,
        hashes: bool = False,
        drop: Mapping[str, Mask] | None = None,
    ) -> None:
        self.folder = folder
        state = _last_state(folder / JOURNAL) or State(
            parts=0,
            splits={split: SplitState() for split in splits},
            skipped=Skipped(empty=0, invalid=0),
            unknown_tokens=0,
            invalid_bytes=0,
        )
        self.parts, self.skipped = state.parts, state.skipped
        self.unknown_tokens = state.unknown_tokens
        self._splits = {
            split: _SplitOutput(
                folder / split,
                state.splits[split],
                dtype,
                end_of_document,
                hashes,
                (drop or {}).get(split),
            )
            for split in splits
        }
        self._invalid = SyncedFile(folder / INVALID, state.invalid_bytes)
        journal = folder / JOURNAL
        self._journal = SyncedFile(journal, _whole_lines(journal))
        self.uncommitted_bytes = 0

    def append(self, part: Part) -> None:
        """Adds a part; commit() makes it last."""
        duplicates = 0
        for split, content in part.splits.items():
            output = self._splits[split]
            before = output.state
            output.append(content)
            read = output.state.read - before.read
            duplicates += read - (output.state.documents - before.documents)
            self.uncommitted_bytes += content.bin.stat().st_size
        if part.invalid.exists():
            with part.invalid.open("rb") as stream:
                while block := stream.read(BLOCK_BYTES):
                    self._invalid.write(block)
        self.skipped += part.skipped + Skipped(empty=0, invalid=0, duplicate=duplicates)
        self.unknown_tokens += part.unknown_tokens
        self.parts += 1

    def commit(self) -> None:
        """Flushes all to the disk and says so in the journal."""
        for output in self._splits.values():
            output.sync()
        self._invalid.sync()
        state = State(
            parts=self.parts,
            splits={split: output.state for split, output in self._splits.items()},
            skipped=self.skipped,
            unknown_tokens=self.unknown_tokens,
            invalid_bytes=self._invalid.bytes,
        )
        self._journal.write(state.model_dump_json().encode() + b"\n")
        self._journal.sync()
        self.uncommitted_bytes = 0

    def finish(self) -> dict[str, SplitRecord]:
        """Writes the indices, after the last commit."""
        self._invalid.close()
        self._journal.close()
        if self._invalid.bytes == 0:
            self._invalid.path.unlink()
        return {split: output.finish() for split, output in self._splits.items()}

    @property
    def documents(self) -> int:
        return sum(output.state.documents for output in self._splits.values())

    def split_documents(self) -> dict[str, int]:
        return {split: output.state.documents for split, output in self._splits.items()}


class _SplitOutput:
    def __init__(
        self,
        prefix: Path,
        state: SplitState,
        dtype: np.dtype[np.integer],
        end_of_document: int,
        hashes: bool,
        drop: Mask | None,
    ) -> None:
        self._prefix, self._dtype, self._end, self._drop = prefix, dtype, end_of_document, drop
        self._read, self._documents, self._ends = state.read, state.documents, 0
        self._bin = HashedFile(f"{prefix}.bin", state.tokens * dtype.itemsize)
        for block in self._bin.kept():
            self._count_ends(block)
        if self._ends != state.end_of_document_tokens:
            raise ValueError(
                f"{self._bin.path}: {self._ends:,} end-of-document tokens, not "
                f"{state.end_of_document_tokens:,} as were written: damaged"
            )
        self._lengths = SyncedFile(f"{prefix}.lengths", 4 * state.documents)
        self._hashes = None
        if hashes:
            self._hashes = HashedFile(f"{prefix}.hashes", HASH_BYTES * state.documents)
            for _ in self._hashes.kept():
                pass

    @property
    def state(self) -> SplitState:
        return SplitState(
            read=self._read,
            documents=self._documents,
            tokens=self._bin.bytes // self._dtype.itemsize,
            end_of_document_tokens=self._ends,
        )

    def append(self, part: PartSplit) -> None:
        checksum = hashlib.sha256()
        with (
            part.bin.open("rb") as tokens,
            part.lengths.open("rb") as lengths,
            (part.hashes or part.lengths).open("rb") as hashes,
        ):
            lengths.seek(part.lengths_offset)
            for start in range(0, part.documents, _BLOCK_DOCUMENTS):
                count = min(_BLOCK_DOCUMENTS, part.documents - start)
                sizes = np.frombuffer(_read(lengths, 4 * count), "<i4")
                dropped = np.zeros(count, np.bool_)
                if self._drop is not None:
                    dropped = self._drop(self._read, self._read + count)
                self._copy(tokens, sizes, dropped, checksum if part.sha256 else None)
                self._lengths.write(sizes[~dropped].tobytes())
                if self._hashes is not None:
                    content = np.frombuffer(_read(hashes, HASH_BYTES * count), f"V{HASH_BYTES}")
                    self._hashes.write(content[~dropped].tobytes())
                self._read += count
                self._documents += count - int(dropped.sum())
            if tokens.read(1):
                raise ValueError(f"{part.bin}: longer than its documents: damaged")
        if part.sha256 not in (None, checksum.hexdigest()):
            raise ValueError(f"{part.bin}: its checksum is not the manifest's: damaged")

    def _copy(
        self,
        tokens: BinaryIO,
        sizes: npt.NDArray[np.int32],
        dropped: npt.NDArray[np.bool_],
        checksum: hashlib._Hash | None,
    ) -> None:
        # Runs of documents that are kept or dropped together.
        first = np.flatnonzero(np.diff(dropped, prepend=~dropped[:1]))
        runs = np.add.reduceat(sizes, first, dtype=np.int64) * self._dtype.itemsize
        for drop, run in zip(dropped[first].tolist(), runs.tolist(), strict=True):
            left = run
            while left:
                block = _read(tokens, min(left, BLOCK_BYTES))
                left -= len(block)
                if checksum is not None:
                    checksum.update(block)
                if not drop:
                    self._bin.write(block)
                    self._count_ends(block)

    def _count_ends(self, block: bytes) -> None:
        self._ends += int((np.frombuffer(block, self._dtype) == self._end).sum())

    def sync(self) -> None:
        for file in (self._bin, self._lengths, self._hashes):
            if file is not None:
                file.sync()

    def finish(self) -> SplitRecord:
        for file in (self._bin, self._lengths, self._hashes):
            if file is not None:
                file.close()
        state = self.state
        return SplitRecord(
            documents=state.documents,
            tokens=state.tokens,
            end_of_document_tokens=state.end_of_document_tokens,
            bin=self._bin.record,
            hashes=self._hashes.record if self._hashes else None,
            idx=write_index(Path(f"{self._prefix}.idx"), self._lengths.path, self._dtype),
        )


def _read(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) != size:
        raise ValueError(f"{stream.name}: shorter than its documents: truncated")
    return content


def _lines(journal: Path) -> Iterator[bytes]:
    """The lines that were written to their end."""
    if journal.exists():
        with journal.open("rb") as stream:
            for line in stream:
                if line.endswith(b"\n"):
                    yield line


def _last_state(journal: Path) -> State | None:
    last = deque(_lines(journal), maxlen=1)
    return State.model_validate_json(last[0]) if last else None


def _whole_lines(journal: Path) -> int:
    return sum(map(len, _lines(journal)))
