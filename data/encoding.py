"""Documents to tokens, in the folder of one chunk: what a worker process does.

train.bin, validation.bin          tokens, each document ended by its token
train.lengths, validation.lengths  int32: tokens of each document
train.hashes, validation.hashes    16 bytes a document, where duplicates are to be dropped
invalid.txt                        one line for each invalid document
record.json                        counts, written last
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.files import SyncedFile
from data.manifest import TRAIN, VALIDATION, Record, Skipped
from data.sources import Chunk, Invalid, Reading, read_chunk
from data.token_file import check_ids, token_dtype
from data.tokenizer import Tokenizer

HASH_BYTES = 16
MAX_DOCUMENT_TOKENS = 2**31 - 1
"""The format stores lengths as int32."""

# Text given to the tokenizer at once, in characters. A tokenizer needs some 30 bytes a character
# for it, in Python's integers above all.
_BATCH_CHARACTERS = 1 << 21

# What a piece costs beside its characters, so that millions of short ones fill a batch as well.
_PIECE_CHARACTERS = 32


@dataclass(frozen=True)
class Options:
    """How documents become tokens, beside the tokenizer."""

    reading: Reading
    validation_fraction: float
    skip_invalid: bool
    deduplicate: bool

    @property
    def splits(self) -> tuple[str, ...]:
        return (TRAIN, VALIDATION) if self.validation_fraction > 0 else (TRAIN,)


class ChunkRecord(Record):
    """Counts of one chunk."""

    unknown_tokens: int
    skipped: Skipped


Report = Callable[[int, int, int], None]
"""Is told of documents, tokens and bytes of text so far."""


def encode_chunks(
    chunks: Sequence[Chunk],
    tokenizer: Tokenizer,
    options: Options,
    folder: Path,
    report: Report,
) -> ChunkRecord:
    """Writes the documents of chunks into a new folder, flushed to the disk.

    Memory: a batch of text and its tokens, however long a document is.

    Raises:
        ValueError: a document is invalid (without skip_invalid) or longer than the format can say,
            or the tokenizer gave an id outside its vocabulary.
        OSError: a file cannot be read or written.
    """
    folder.mkdir()
    writer = _DocumentWriter(tokenizer, options, folder, report)
    with SyncedFile(folder / "invalid.txt") as invalid:
        count = 0
        for chunk in chunks:
            writer.place = chunk.path
            for item in read_chunk(chunk, options.reading):
                if not isinstance(item, Invalid):
                    writer.add(item.text, item.last)
                    continue
                if not options.skip_invalid:
                    raise item.problem
                writer.void()
                count += 1
                invalid.write(" ".join(str(item.problem).splitlines()).encode() + b"\n")
    record = writer.close(invalid=count)
    with SyncedFile(folder / "record.json") as stream:
        stream.write(record.model_dump_json().encode())
    return record


@dataclass
class _Open:
    """The document whose pieces are coming."""

    held_out: bool
    digest: hashlib.blake2b | None
    pieces: int = 0
    """In the batch."""
    flushed: bool = False
    """Whether earlier pieces are in the file."""
    unknown_tokens: int = 0
    """Among those in the file."""


@dataclass
class _Batch:
    """Pieces of text to be encoded together."""

    texts: list[str] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)
    held_out: list[bool] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Of the documents that end in the batch."""
    cost: int = 0

    def drop(self, pieces: int) -> None:
        for column in (self.texts, self.last, self.held_out):
            del column[len(column) - pieces :]


class _DocumentWriter:
    """Takes documents piece by piece, encodes them in batches and writes their tokens."""

    def __init__(
        self, tokenizer: Tokenizer, options: Options, folder: Path, report: Report
    ) -> None:
        self.place = ""
        """What is being read, for messages."""
        self._tokenizer, self._options, self._report = tokenizer, options, report
        dtype = token_dtype(tokenizer.vocabulary_size)
        self._files = {
            split: _SplitFiles(folder / split, dtype, options.deduplicate)
            for split in options.splits
        }
        self._unknown = tokenizer.special_tokens.get("unk", -1)
        self._batch = _Batch()
        self._open: _Open | None = None
        self._carried = 0
        """Tokens in the file of the document whose pieces were cut by the last batch's end."""
        self.documents = self.tokens = self.text_bytes = self.empty = self.unknown_tokens = 0

    def add(self, text: str, last: bool) -> None:
        """Takes the next piece of a document; `last` ends it."""
        content = text.encode()
        if self._open is None:
            if last and not text:
                self.empty += 1
                return
            self._open = _Open(
                held_out(content, self._options.validation_fraction),
                hashlib.blake2b(digest_size=HASH_BYTES) if self._options.deduplicate else None,
            )
        self.text_bytes += len(content)
        self._open.pieces += 1
        batch = self._batch
        batch.texts.append(text)
        batch.last.append(last)
        batch.held_out.append(self._open.held_out)
        batch.cost += len(text) + _PIECE_CHARACTERS
        if self._open.digest is not None:
            self._open.digest.update(content)
            if last:
                batch.digests.append(self._open.digest.digest())
        if last:
            self._open = None
        if batch.cost >= _BATCH_CHARACTERS:
            self._flush()

    def void(self) -> None:
        """Takes back the pieces of the document that is open, if one is."""
        if self._open is None:
            return
        self._batch.drop(self._open.pieces)
        if self._open.flushed:
            self._files[self._split(self._open.held_out)].drop_open_document()
            self._carried = 0
            self.unknown_tokens -= self._open.unknown_tokens
        self._open = None

    def close(self, invalid: int) -> ChunkRecord:
        assert self._open is None, f"{self.place}: its last document has no end"
        self._flush()
        for files in self._files.values():
            files.close()
        return ChunkRecord(
            unknown_tokens=self.unknown_tokens,
            skipped=Skipped(empty=self.empty, invalid=invalid),
        )

    def _split(self, is_held_out: bool) -> str:
        return VALIDATION if is_held_out else TRAIN

    def _flush(self) -> None:
        batch, self._batch = self._batch, _Batch()
        if not batch.texts:
            return
        tokens, lengths = self._tokenizer.encode_batch(batch.texts)
        check_ids(tokens, self._tokenizer.vocabulary_size, self.place)
        unknown = tokens == self._unknown
        self.unknown_tokens += int(unknown.sum())
        ends = np.flatnonzero(batch.last)
        # After the last token of each document that ends here.
        cuts = np.cumsum(lengths, dtype=np.int64)[ends]
        sizes = np.diff(cuts, prepend=0)
        after = len(tokens) - (int(cuts[-1]) if len(cuts) else 0)
        if len(sizes):
            sizes[0] += self._carried
            self._carried = 0
        self._carried += after
        self._check_length(max(int(sizes.max(initial=0)), self._carried))
        if self._open is not None:
            self._open.pieces, self._open.flushed = 0, True
            self._open.unknown_tokens += int(unknown[len(tokens) - after :].sum())
        # A tokenizer that drops whitespace may leave nothing of a document.
        full = sizes > 0
        self.empty += int((~full).sum())
        ended = lengths.astype(np.int64)
        ended[ends] += full
        tokens = np.insert(tokens, cuts[full], self._tokenizer.end_of_document)
        self._write(batch, tokens, ended, ends[full], sizes[full] + 1, full)
        self.documents += int(full.sum())
        self.tokens += len(tokens)
        self._report(self.documents, self.tokens, self.text_bytes)

    def _check_length(self, tokens: int) -> None:
        if tokens >= MAX_DOCUMENT_TOKENS:  # and its end-of-document token
            raise ValueError(
                f"{self.place}: a document of more than {MAX_DOCUMENT_TOKENS:,} tokens, the most "
                "that the format can say: cut it into several"
            )

    def _write(
        self,
        batch: _Batch,
        tokens: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        full: npt.NDArray[np.bool_],
    ) -> None:
        """Sorts a batch into the splits.

        Args:
            tokens: [sum of lengths], the ends of documents in place.
            lengths: [pieces].
            ends: [documents], the number of each one's last piece.
            sizes: [documents], tokens of each one.
            full: [documents that ended], whether it is one of `documents`.
        """
        digests = np.frombuffer(b"".join(batch.digests), f"V{HASH_BYTES}")
        if self._options.deduplicate:
            digests = digests[full]
        pieces_held_out = np.array(batch.held_out)
        documents_held_out = pieces_held_out[ends]
        tokens_held_out = np.repeat(pieces_held_out, lengths)
        for split, files in self._files.items():
            chosen = documents_held_out == (split == VALIDATION)
            files.append(
                tokens[tokens_held_out == (split == VALIDATION)],
                sizes[chosen],
                digests[chosen] if self._options.deduplicate else digests,
            )


class _SplitFiles:
    """The files of one split of a chunk."""

    def __init__(self, prefix: Path, dtype: np.dtype[np.integer], hashes: bool) -> None:
        self._dtype = dtype
        self._bin = SyncedFile(f"{prefix}.bin")
        self._lengths = SyncedFile(f"{prefix}.lengths")
        self._hashes = SyncedFile(f"{prefix}.hashes") if hashes else None
        self._ended_tokens = 0

    def append(
        self,
        tokens: npt.NDArray[np.int32],
        sizes: npt.NDArray[np.int64],
        digests: npt.NDArray[np.void],
    ) -> None:
        self._bin.write(tokens.astype(self._dtype).tobytes())
        self._lengths.write(sizes.astype("<i4").tobytes())
        if self._hashes is not None:
            self._hashes.write(digests.tobytes())
        self._ended_tokens += int(sizes.sum())

    def drop_open_document(self) -> None:
        self._bin.truncate(self._ended_tokens * self._dtype.itemsize)

    def close(self) -> None:
        for file in (self._bin, self._lengths, self._hashes):
            if file is not None:
                file.close()


def held_out(first_piece: bytes, fraction: float) -> bool:
    """Whether a document belongs to validation: duplicates of it do as well."""
    digest = hashlib.blake2b(first_piece, digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
