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
(data/manifest.py) names the tokenizer and checksums; corpora from other tools have none: see
data/foreign.py. Megatron's multimodal files end in int8[S], a mode per sequence: they are refused.
"""

from __future__ import annotations

import functools
import hashlib
import math
import mmap
import resource
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
_OLDER_MAGIC = b"TNTIDX"
_VERSION = 1

# Codes 6 and 7 are floating point: not tokens.
_DTYPES = {
    code: np.dtype(name)
    for code, name in {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_BLOCK = 1 << 20  # elements handled at once where a file is passed over

# Reads in random order for which the system is told of the places beforehand, after one that had to
# wait for the disk. Telling costs 0.7 us a place, for nothing where the pages are in memory.
_ADVISED_READS = 64

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
    """A memory-mapped token file. Opening reads a few pages, whatever the size, and keeps one file
    open.

    Samples in random order are reads of (sequence length + 1) tokens, a few KB each, anywhere in
    PREFIX.bin. The index is not needed for them. From a cold cache, the system is told of a batch's
    places before they are touched, and reads them at once and nothing else. A page fault would wait
    for one after another, and fetch what the device reads ahead, 128 KiB or megabytes. That holds
    for network file systems too.

    Attributes:
        document_count, sequence_count, token_count: totals.
        dtype: of the tokens.
        manifest: the one beside it, or None.
        fingerprint: equal for equal content: from the manifest's checksums, or without a manifest
            from sizes and both ends of the files.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: they are damaged, truncated, of another format, or not what the manifest says.
    """

    def __init__(self, prefix: str | Path) -> None:
        if str(prefix).endswith((".bin", ".idx")):
            raise ValueError(f"{prefix}: leave out .bin and .idx, a corpus is both files")
        self.bin_path, self._idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        self.dtype, self.sequence_count, entries = self._read_header()
        self.document_count = entries - 1
        self._documents_at = _HEADER.size + 12 * self.sequence_count
        bin_bytes = self.bin_path.stat().st_size
        described, spanned = self._read_ends(entries)
        if bin_bytes != described:
            raise ValueError(
                f"{self.bin_path}: {bin_bytes:,} bytes, but its index describes {described:,}: "
                "truncated or damaged; copy or prepare it again"
            )
        if spanned != (0, self.sequence_count):
            raise ValueError(
                f"{self._idx_path}: documents span the sequences {spanned[0]} to "
                f"{spanned[1]}, expected 0 to {self.sequence_count:,}: damaged"
            )
        self.token_count = bin_bytes // self.dtype.itemsize
        self._map = _mapped(self.bin_path) if bin_bytes else None
        if self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)  # nothing beyond what is asked for
        self._tokens: TokenArray = np.frombuffer(self._map or b"", self.dtype)
        self._windows = self._tokens, 0
        self._advised_reads = 0
        self.manifest = read_manifest(prefix)
        self.fingerprint = self._fingerprint(Path(prefix).name)

    def _read_header(self) -> tuple[np.dtype[np.integer], int, int]:
        """(token dtype, number of sequences, entries of the document index)."""
        path = self._idx_path
        size = path.stat().st_size
        with path.open("rb") as stream:
            content = stream.read(_HEADER.size)
        if content.startswith(_OLDER_MAGIC):
            raise ValueError(
                f"{path}: not a Megatron index of the kind mmap, but of the older kinds lazy and "
                "cached; preprocess with --dataset-impl mmap"
            )
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
        if size == expected + sequences and sequences:
            raise ValueError(
                f"{path}: a multimodal corpus, with a mode for each sequence: only text is read"
            )
        if size != expected or entries < 1:
            raise ValueError(
                f"{path}: {size:,} bytes, but its header ({sequences:,} sequences, {entries:,} "
                f"document entries) describes {expected:,}: truncated or damaged"
            )
        return _DTYPES[code], sequences, entries

    def _read_ends(self, entries: int) -> tuple[int, tuple[int, int]]:
        """(bytes of PREFIX.bin that the index describes, first and last entry of its documents)."""
        with self._idx_path.open("rb") as stream:

            def number(letter: str, offset: int) -> int:
                stream.seek(offset)
                return int(struct.unpack(letter, stream.read(struct.calcsize(letter)))[0])

            described, count = 0, self.sequence_count
            if count:
                last_length = number("<i", _HEADER.size + 4 * (count - 1))
                last_pointer = number("<q", _HEADER.size + 4 * count + 8 * (count - 1))
                described = last_pointer + last_length * self.dtype.itemsize
            spanned = (
                number("<q", self._documents_at),
                number("<q", self._documents_at + 8 * (entries - 1)),
            )
        return described, spanned

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
        self._advise(start, count)
        return self._tokens[start : start + count]

    def rows(self, starts: npt.NDArray[np.int64], count: int) -> TokenArray:
        """[starts, count] tokens, of each start those that follow it: a copy, in one go."""
        if self._windows[1] != count:
            self._windows = np.lib.stride_tricks.sliding_window_view(self._tokens, count), count
        if self._advised_reads:
            self._advised_reads -= 1
            for start in starts.tolist():
                self._advise(start, count)
        faults = _faults_from_disk()
        rows: TokenArray = self._windows[0][starts]
        if _faults_from_disk() > faults:
            self._advised_reads = _ADVISED_READS
        return rows

    def _advise(self, start: int, count: int) -> None:
        """Have the system begin to read these tokens."""
        item = self.dtype.itemsize
        page = start * item // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and count:
            self._map.madvise(mmap.MADV_WILLNEED, page, (start + count) * item - page)

    def document(self, number: int) -> TokenArray:
        """The tokens of one document, its end-of-document token included, without a copy."""
        if not 0 <= number < self.document_count:
            raise IndexError(f"{self.bin_path}: document {number:,} of {self.document_count:,}")
        first, end = (int(sequence) for sequence in self._first_sequences[number : number + 2])
        if first == end:
            return self._tokens[:0]
        pointers, lengths = self._pointers, self._lengths
        start = int(pointers[first]) // self.dtype.itemsize
        stop = int(pointers[end - 1]) // self.dtype.itemsize + int(lengths[end - 1])
        self._advise(start, stop - start)
        return self._tokens[start:stop]

    # Mapped when documents are asked for: training never does, and each would keep a file open.
    @functools.cached_property
    def _lengths(self) -> TokenArray:
        return self._index("<i4", self.sequence_count, _HEADER.size)

    @functools.cached_property
    def _pointers(self) -> TokenArray:
        return self._index("<i8", self.sequence_count, _HEADER.size + 4 * self.sequence_count)

    @functools.cached_property
    def _first_sequences(self) -> TokenArray:
        return self._index("<i8", self.document_count + 1, self._documents_at)

    def _index(self, dtype: str, count: int, offset: int) -> TokenArray:
        return np.frombuffer(self._index_map, dtype, count, offset)

    @functools.cached_property
    def _index_map(self) -> mmap.mmap:
        return _mapped(self._idx_path)

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
            yield self.tokens(start, min(_BLOCK, self.token_count - start))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        try:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as problem:  # it does not say of which file
            size = path.stat().st_size
            reason = f"{problem.strerror}: cannot map its {size:,} bytes into the address space"
            raise OSError(problem.errno, reason, str(path)) from None


def _faults_from_disk() -> int:
    """Pages that this thread has waited for, so far, since they were not in memory."""
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # Linux counts per thread
    return resource.getrusage(who).ru_majflt


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
