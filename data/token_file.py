"""The on-disk format: Megatron's indexed dataset (MMIDIDX, version 1), with a manifest beside it.

    PREFIX.bin  the tokens of all sequences, one after another
    PREFIX.idx  little-endian, unaligned:
        9 bytes   b"MMIDIDX" and two zeros
        uint64    version: 1
        uint8     dtype code of the tokens
        uint64    S: number of sequences
        uint64    D: number of documents + 1
        int32[S]  tokens of each sequence
        int64[S]  where it begins in PREFIX.bin, in bytes
        int64[D]  the sequence that each document begins with; the last entry is S

Files written here hold one sequence per document; files with several can be read. manifest.json
(data/manifest.py) names the tokenizer and checksums; corpora from other tools have none.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from data.files import HashedFile, SyncedFile
from data.manifest import FileRecord, SplitRecord, read_manifest

TokenArray = npt.NDArray[np.integer]

_HEADER = struct.Struct("<9sQBQQ")
LENGTHS_OFFSET = _HEADER.size
"""Where an index holds the lengths, in bytes."""
_MAGIC = b"MMIDIDX\0\0"
_VERSION = 1

# Codes 6 and 7 are floating point: not tokens.
_DTYPES = {
    code: np.dtype(name)
    for code, name in {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_BLOCK = 1 << 20  # elements handled at once where a file is passed over

# Without checksums, both ends of a file tell corpora of equal sizes apart.
_FINGERPRINT_BYTES = 1 << 16


def token_dtype(vocabulary_size: int) -> np.dtype[np.integer]:
    """uint16 up to 65,535 ids, int32 above: Megatron has no uint32."""
    return np.dtype("<u2") if vocabulary_size <= 65_535 else np.dtype("<i4")


class TokenFileWriter:
    """Writes PREFIX.bin as documents come, and PREFIX.idx on leaving the `with` block without an
    error; then both are on the disk and `record` describes them.

    Memory does not grow with the documents: their lengths wait in PREFIX.lengths.
    """

    record: SplitRecord

    def __init__(self, prefix: str | Path, vocabulary_size: int) -> None:
        self.token_count = 0
        self.dtype = token_dtype(vocabulary_size)
        self._prefix = prefix
        self._vocabulary_size = vocabulary_size
        self._documents = 0
        self._bin = HashedFile(f"{prefix}.bin")
        self._lengths = SyncedFile(f"{prefix}.lengths")

    def append(self, tokens: TokenArray, lengths: npt.NDArray[np.int32]) -> None:
        """Adds documents.

        Args:
            tokens: [sum of lengths], the documents one after another.
            lengths: [documents], tokens of each.

        Raises:
            ValueError: an id is negative or not below the vocabulary size.
            OSError: the disk is full or unwritable.
        """
        assert len(tokens) == lengths.sum(), "lengths do not add up to the tokens"
        check_ids(tokens, self._vocabulary_size, f"{self._prefix}.bin")
        self._bin.write(tokens.astype(self.dtype).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        self._documents += len(lengths)
        self.token_count += len(tokens)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bin.close()
        self._lengths.close()
        lengths = Path(f"{self._prefix}.lengths")
        if kind is None:
            self.record = SplitRecord(
                documents=self._documents,
                tokens=self.token_count,
                bin=self._bin.record,
                idx=write_index(Path(f"{self._prefix}.idx"), lengths, self.dtype),
            )
        lengths.unlink()


def write_index(path: Path, lengths_path: Path, dtype: np.dtype[np.integer]) -> FileRecord:
    """Writes a .idx for documents whose lengths, int32, are all that `lengths_path` holds.

    Memory: a few blocks, whatever the number of documents.
    """
    count = lengths_path.stat().st_size // 4
    with HashedFile(path) as index:
        _write_index(index, count, lengths_path, dtype)
    return index.record


def _write_index(
    index: HashedFile, count: int, lengths_path: Path, dtype: np.dtype[np.integer]
) -> None:
    index.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], count, count + 1))
    with lengths_path.open("rb") as stream:
        while block := stream.read(4 * _BLOCK):
            index.write(block)
        stream.seek(0)
        start = np.int64(0)
        while block := stream.read(4 * _BLOCK):
            ends = start + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64)
            index.write((np.concatenate(([start], ends[:-1])) * dtype.itemsize).tobytes())
            start = ends[-1]
    for i in range(0, count + 1, _BLOCK):
        index.write(np.arange(i, min(i + _BLOCK, count + 1), dtype=np.int64).tobytes())


class TokenFile:
    """A memory-mapped token file. Opening reads a few bytes, whatever the size.

    Attributes:
        document_count, token_count: totals.
        dtype: of the tokens.
        manifest: the one beside it, or None.
        fingerprint: equal for equal content: from the manifest's checksums, or without a manifest
            from sizes and both ends of the files.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: they are damaged, truncated, of another format, or not what the manifest says.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin_path, self._idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self.dtype, sequences, entries = self._read_header()
        bin_bytes = self.bin_path.stat().st_size
        offset = _HEADER.size
        self._lengths = _mapped(self._idx_path, np.dtype("<i4"), sequences, offset)
        offset += 4 * sequences
        self._pointers = _mapped(self._idx_path, np.dtype("<i8"), sequences, offset)
        offset += 8 * sequences
        self._first_sequences = _mapped(self._idx_path, np.dtype("<i8"), entries, offset)
        described = 0
        if sequences:
            described = int(self._pointers[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        if bin_bytes != described:
            raise ValueError(
                f"{self.bin_path}: {bin_bytes:,} bytes, but its index describes {described:,}: "
                "truncated or damaged; copy or prepare it again"
            )
        if self._first_sequences[0] != 0 or self._first_sequences[-1] != sequences:
            raise ValueError(
                f"{self._idx_path}: documents span the sequences {self._first_sequences[0]} to "
                f"{self._first_sequences[-1]}, expected 0 to {sequences:,}: damaged"
            )
        self.document_count = entries - 1
        self.token_count = bin_bytes // self.dtype.itemsize
        self._tokens = _mapped(self.bin_path, self.dtype, self.token_count, 0)
        self.manifest = read_manifest(prefix)
        self.fingerprint = self._fingerprint(Path(prefix).name)

    def _read_header(self) -> tuple[np.dtype[np.integer], int, int]:
        """(token dtype, number of sequences, entries of the document index)."""
        path = self._idx_path
        size = path.stat().st_size
        with path.open("rb") as stream:
            content = stream.read(_HEADER.size)
        if content[: len(_MAGIC)] != _MAGIC[: len(content)] or not content:
            raise ValueError(f"{path}: not a Megatron index: it begins with {content[:9]!r}")
        if size < _HEADER.size:
            raise ValueError(f"{path}: {size} bytes, shorter than its header: truncated")
        _, version, code, sequences, entries = _HEADER.unpack(content)
        if version != _VERSION:
            raise ValueError(f"{path}: format version {version}, expected {_VERSION}")
        if code not in _DTYPES:
            raise ValueError(f"{path}: dtype code {code} is not an integer type of the format")
        expected = _HEADER.size + 12 * sequences + 8 * entries
        if size != expected or entries < 1:
            raise ValueError(
                f"{path}: {size:,} bytes, but its header ({sequences:,} sequences, {entries:,} "
                f"document entries) describes {expected:,}: truncated or damaged"
            )
        return _DTYPES[code], sequences, entries

    def _fingerprint(self, name: str) -> str:
        if self.manifest is None:
            digest = hashlib.sha256()
            for path in (self._idx_path, self.bin_path):
                size = path.stat().st_size
                with path.open("rb") as stream:
                    digest.update(b"%d " % size + stream.read(_FINGERPRINT_BYTES))
                    stream.seek(max(0, size - _FINGERPRINT_BYTES))
                    digest.update(stream.read())
            return digest.hexdigest()
        split = self.manifest.splits[name]
        if (split.documents, split.tokens) != (self.document_count, self.token_count):
            raise ValueError(
                f"{self.bin_path}: {self.document_count:,} documents and {self.token_count:,} "
                f"tokens, but manifest.json says {split.documents:,} and {split.tokens:,}"
            )
        return split.fingerprint

    def tokens(self, start: int, count: int) -> TokenArray:
        """[count] tokens of the concatenated documents from token `start`, without a copy."""
        if not 0 <= start <= start + count <= self.token_count:
            raise IndexError(
                f"{self.bin_path}: tokens {start:,} to {start + count:,} of {self.token_count:,}"
            )
        return self._tokens[start : start + count]

    def document(self, number: int) -> TokenArray:
        """The tokens of one document, its end-of-document token included, without a copy."""
        if not 0 <= number < self.document_count:
            raise IndexError(f"{self.bin_path}: document {number:,} of {self.document_count:,}")
        first, end = (int(sequence) for sequence in self._first_sequences[number : number + 2])
        if first == end:
            return self._tokens[:0]
        start = int(self._pointers[first]) // self.dtype.itemsize
        stop = int(self._pointers[end - 1]) // self.dtype.itemsize + int(self._lengths[end - 1])
        return self._tokens[start:stop]

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens of every document, for about a million documents at a time.

        Raises ValueError if the index is damaged.
        """
        for start in range(0, self.document_count, _BLOCK):
            first = self._first_sequences[start : start + _BLOCK + 1].astype(np.int64)
            if first[0] < 0 or first[-1] > len(self._lengths) or (np.diff(first) < 0).any():
                raise ValueError(f"{self._idx_path}: its documents are out of order: damaged")
            ends = np.cumsum(self._lengths[first[0] : first[-1]], dtype=np.int64)
            yield np.diff(np.concatenate(([0], ends))[first - first[0]])

    def blocks(self) -> Iterator[TokenArray]:
        """All tokens, about a million at a time."""
        for start in range(0, self.token_count, _BLOCK):
            yield self._tokens[start : start + _BLOCK]


def _mapped(path: Path, dtype: np.dtype[np.integer], count: int, offset: int) -> TokenArray:
    if count == 0:  # the system cannot map nothing
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))


def check_ids(tokens: TokenArray, vocabulary_size: int, where: str) -> None:
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary_size:
        raise ValueError(
            f"{where}: token ids from {tokens.min()} to {tokens.max()} do not fit a vocabulary of "
            f"{vocabulary_size:,}"
        )


def unigram_entropy(token_file: TokenFile, vocabulary_size: int) -> float:
    """Entropy of the token frequencies in nats per token: the loss of the best model that ignores
    context, hence what a trained one must beat.

    Raises ValueError if the file holds an id of `vocabulary_size` or above, or no token.
    """
    counts = np.zeros(vocabulary_size, np.int64)
    for block in token_file.blocks():
        check_ids(block, vocabulary_size, str(token_file.bin_path))
        counts += np.bincount(block, minlength=vocabulary_size)
    if token_file.token_count == 0:
        raise ValueError(f"{token_file.bin_path}: holds no tokens")
    shares = counts[counts > 0] / token_file.token_count
    return math.fsum(-shares * np.log(shares))
