"""Readers: from the name of a source to its documents.

A source is
    a .txt file: one document
    a .jsonl, .jsonl.gz or .jsonl.zst file: one document a line
    a .parquet or .arrow file (also those of `datasets.save_to_disk`): one document a row
    a folder of such files, or a pattern: `corpus/**/*.jsonl`
    hf:NAME or hf:NAME:CONFIG: a dataset, from a folder or the hub, as `datasets` loads it
    python-stdlib: the source code of the running interpreter's standard library, which every
        machine has

Files are read in the order of their paths. Text is UTF-8 whatever the locale, and kept to the byte:
only a byte-order mark at the start of a file is dropped, and newlines are never translated.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from data.columnar import arrow_batches, parquet_groups, read_arrow, read_parquet
from data.hugging_face import HF, plan_dataset, read_dataset, saved_dataset
from data.json_lines import read_json_lines
from data.pieces import PIECE_CHARACTERS, Invalid, Piece
from data.source_files import PYTHON_STDLIB, SUFFIXES, source_files
from data.text_files import read_text

__all__ = [
    "PIECE_CHARACTERS",
    "PYTHON_STDLIB",
    "SUFFIXES",
    "Chunk",
    "Invalid",
    "Piece",
    "Reading",
    "plan_chunks",
    "raise_problem",
    "read_chunk",
    "read_documents",
    "source_files",
]

# Small text files are read many at a time: chunks of their own would cost more than they hold.
_GROUPS_PER_CHUNK = 64


@dataclass(frozen=True)
class Chunk:
    """A part of the sources that one worker reads by itself; the plan of chunks depends on the
    sources alone."""

    source: int
    """Index in the sources as given."""
    reader: str
    """text, json_lines, parquet, arrow or datasets."""
    path: str
    """A file, or the dataset's name."""
    start: int
    """First byte (json_lines), row group (parquet), record batch (arrow), row (datasets) or shard
    (datasets streamed)."""
    stop: int
    """End, exclusive."""
    size: int
    """Bytes on disk; those of the chunks of a file add up to the file's. 0 where not known, as of
    a streamed dataset."""
    others: tuple[str, ...] = ()
    """Further text files, read after `path`."""


@dataclass(frozen=True)
class Reading:
    """What the documents are a function of, beside the files."""

    sources: tuple[str, ...]
    text_key: str = "text"
    """Key of a JSON line, or column of a table, that holds the text."""
    split: str = "train"
    """Of hf: datasets."""
    streaming: bool = False
    """Of hf: datasets."""


def plan_chunks(reading: Reading, chunk_bytes: int = 1 << 26) -> list[Chunk]:
    """The parts of the sources, in the order of their documents, each of about `chunk_bytes` where
    files can be cut.

    Raises:
        ValueError: a source matches nothing, a file twice, or a table without the text.
        OSError: a file is missing or unreadable.
    """
    chunks: list[Chunk] = []
    seen: dict[str, str] = {}
    for number, source in enumerate(reading.sources):
        if source.startswith(HF) and (folder := saved_dataset(source, reading.split)) is None:
            planned = _dataset_chunks(number, reading, chunk_bytes)
            _check_new([source], source, seen)
        else:
            files = source_files(str(folder) if source.startswith(HF) else source)
            _check_new([os.path.realpath(path) for path in files], source, seen)
            planned = itertools.chain.from_iterable(
                _file_chunks(number, str(path), reading.text_key, chunk_bytes) for path in files
            )
        chunks += _grouped(planned, chunk_bytes // _GROUPS_PER_CHUNK)
    return chunks


def read_chunk(chunk: Chunk, reading: Reading) -> Iterator[Piece | Invalid]:
    """The documents of one chunk, in pieces (data/pieces.py).

    Raises:
        ValueError: a file is damaged as a whole, as by a cut in compressed content.
        OSError: a file is missing or unreadable.
    """
    if chunk.reader == "text":
        for path in (chunk.path, *chunk.others):
            yield from read_text(path)
    elif chunk.reader == "json_lines":
        stop = None if _is_compressed(chunk.path) else chunk.stop
        yield from read_json_lines(chunk.path, reading.text_key, chunk.start, stop)
    elif chunk.reader == "parquet":
        yield from read_parquet(chunk.path, reading.text_key, chunk.start, chunk.stop)
    elif chunk.reader == "arrow":
        yield from read_arrow(chunk.path, reading.text_key, chunk.start, chunk.stop)
    else:
        yield from read_dataset(
            chunk.path,
            reading.text_key,
            reading.split,
            reading.streaming,
            chunk.start,
            chunk.stop,
        )


def raise_problem(problem: ValueError) -> NoReturn:
    """The default for `on_invalid`: the first invalid document ends the reading."""
    raise problem


def read_documents(
    reading: Reading, on_invalid: Callable[[ValueError], None] = raise_problem
) -> Iterator[str]:
    """Yields the whole documents of all sources, in an order fixed by the names of the files.

    Args:
        reading: see there.
        on_invalid: is called with a message naming file and line for every document that is not
            valid UTF-8 or JSON, or lacks the text; reading goes on when it returns.

    Raises:
        ValueError: a source matches nothing, a file is damaged, or (by default) a document is
            invalid.
        OSError: a file is missing or unreadable.
    """
    for chunk in plan_chunks(reading):
        pieces: list[str] = []
        for item in read_chunk(chunk, reading):
            if isinstance(item, Invalid):
                on_invalid(item.problem)
                pieces = []
            else:
                pieces.append(item.text)
                if item.last:
                    yield "".join(pieces)
                    pieces = []


def _check_new(identities: Sequence[str], source: str, seen: dict[str, str]) -> None:
    """Reading a file twice would weigh its documents double, in silence."""
    for identity in identities:
        if identity in seen and source != PYTHON_STDLIB:
            raise ValueError(
                f"source {source!r}: {identity} is read already by source {seen[identity]!r}: each "
                "file may be given once"
            )
        seen[identity] = source


def _dataset_chunks(source: int, reading: Reading, chunk_bytes: int) -> Iterator[Chunk]:
    name = reading.sources[source]
    for start, stop, size in plan_dataset(
        name, reading.text_key, reading.split, reading.streaming, chunk_bytes
    ):
        yield Chunk(source, "datasets", name, start, stop, size)


def _file_chunks(source: int, path: str, text_key: str, chunk_bytes: int) -> Iterator[Chunk]:
    size = os.path.getsize(path)
    if path.endswith(".parquet"):
        file = Chunk(source, "parquet", path, 0, 0, size)
        yield from _shares(file, parquet_groups(path, text_key), chunk_bytes)
    elif path.endswith(".arrow"):
        file = Chunk(source, "arrow", path, 0, 0, size)
        yield from _shares(file, arrow_batches(path, text_key), chunk_bytes)
    elif _is_compressed(path):
        yield Chunk(source, "json_lines", path, 0, size, size)
    elif path.endswith(".jsonl"):
        for start in range(0, size, chunk_bytes):
            stop = min(start + chunk_bytes, size)
            yield Chunk(source, "json_lines", path, start, stop, stop - start)
    else:
        yield Chunk(source, "text", path, 0, size, size)


def _is_compressed(path: str) -> bool:
    return path.endswith((".gz", ".zst"))


def _shares(file: Chunk, weights: Sequence[int], chunk_bytes: int) -> Iterator[Chunk]:
    """Cuts a file between parts of these weights into chunks of about `chunk_bytes` each."""
    total = max(1, sum(weights))
    start = first_byte = passed = 0
    for part, weight in enumerate(weights, start=1):
        passed += weight
        byte = file.size * passed // total if part < len(weights) else file.size
        if byte - first_byte >= chunk_bytes or part == len(weights):
            yield replace(file, start=start, stop=part, size=byte - first_byte)
            start, first_byte = part, byte


def _grouped(chunks: Iterator[Chunk], group_bytes: int) -> Iterator[Chunk]:
    """Joins text files that follow one another, up to `group_bytes` together."""
    group: Chunk | None = None
    for chunk in chunks:
        if group is not None:
            size = group.size + chunk.size
            if group.reader == chunk.reader == "text" and size <= group_bytes:
                group = replace(group, stop=size, size=size, others=(*group.others, chunk.path))
                continue
            yield group
        group = chunk
    if group is not None:
        yield group
