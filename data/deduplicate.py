"""Exact duplicates among any number of documents, in bounded memory.

Documents are told apart by a 128-bit hash of their text. The hashes are sorted into files by their
first bits, each small enough to be sorted in memory; all documents of equal text meet in one file,
and all but the first are duplicates. Their numbers are sorted into files by range, which the writer
of the output reads one after another.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.encoding import HASH_BYTES
from data.files import naming_file
from data.partial import PartialFolder

FOLDER = "duplicates"

# Documents whose hashes are sorted at once, at some 100 bytes each.
_PARTITION_DOCUMENTS = 1 << 20
# Documents whose marks, a byte each, are in memory at once.
_RANGE_DOCUMENTS = 1 << 22
_BLOCK_BYTES = HASH_BYTES << 18

_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<i8")])


class Duplicates:
    """Which documents of a split are duplicates of earlier ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._range = -1
        self._marks = np.empty(0, np.bool_)

    def __call__(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """[stop - start], whether each of these documents is one. Quick when asked in order."""
        parts = []
        while start < stop:
            number, offset = divmod(start, _RANGE_DOCUMENTS)
            if number != self._range:
                self._range, self._marks = number, self._load(number)
            end = min(stop - start, _RANGE_DOCUMENTS - offset)
            parts.append(self._marks[offset : offset + end])
            start += end
        return np.concatenate([np.empty(0, np.bool_), *parts])

    def _load(self, number: int) -> npt.NDArray[np.bool_]:
        marks = np.zeros(_RANGE_DOCUMENTS, np.bool_)
        path = self._folder / f"range-{number}"
        if path.exists():
            marks[np.fromfile(path, "<i8") - number * _RANGE_DOCUMENTS] = True
        return marks


def find_duplicates(folder: PartialFolder, hashes: dict[str, list[Path]]) -> None:
    """Finds the duplicates of each split, for Duplicates(folder / FOLDER / split).

    Args:
        folder: gets the subfolder, all of it or nothing.
        hashes: by split, files of 16 bytes a document, in the order of the documents.
    """
    folder.remove(f"{FOLDER}.new")
    work = folder.path / f"{FOLDER}.new"
    for split, paths in hashes.items():
        (work / split).mkdir(parents=True)
        size = sum(path.stat().st_size for path in paths)
        _find(work / split, paths, size // HASH_BYTES)
    for path in work.rglob("range-*"):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    work.rename(folder.path / FOLDER)


def _find(folder: Path, paths: Iterable[Path], documents: int) -> None:
    bits = max(0, math.ceil(math.log2(max(1, documents) / _PARTITION_DOCUMENTS)))
    start = 0
    for content in _blocks(paths):
        halves = np.frombuffer(content, "<u8").reshape(-1, 2)
        entries = np.empty(len(halves), _ENTRY)
        entries["high"], entries["low"] = halves[:, 0], halves[:, 1]
        entries["number"] = np.arange(start, start + len(halves))
        start += len(halves)
        # Here already, so that a text which is there a million times does not fill one file.
        entries = _first_ones(entries, folder)
        _scatter(
            entries, (entries["high"] >> np.uint64(32)) >> np.uint64(32 - bits), folder, "hash"
        )
    for path in sorted(folder.glob("hash-*")):
        _first_ones(np.fromfile(path, _ENTRY), folder)
        path.unlink()


def _first_ones(entries: npt.NDArray[np.void], folder: Path) -> npt.NDArray[np.void]:
    """The entries without those that repeat an earlier one's hash, whose numbers go to files."""
    entries = entries[np.lexsort((entries["number"], entries["low"], entries["high"]))]
    repeats = np.zeros(len(entries), np.bool_)
    repeats[1:] = (entries["high"][1:] == entries["high"][:-1]) & (
        entries["low"][1:] == entries["low"][:-1]
    )
    later = np.sort(entries["number"][repeats])
    _scatter(later, later // _RANGE_DOCUMENTS, folder, "range")
    return entries[~repeats]


def _blocks(paths: Iterable[Path]) -> Iterator[bytes]:
    """The content of the files, one after another, some 4 MB at a time."""
    block = bytearray()
    for path in paths:
        with path.open("rb") as stream:
            while content := stream.read(_BLOCK_BYTES):
                block += content
                if len(block) >= _BLOCK_BYTES:
                    yield bytes(block)
                    block.clear()
    if block:
        yield bytes(block)


def _scatter(
    entries: npt.NDArray[np.generic], keys: npt.NDArray[np.integer], folder: Path, name: str
) -> None:
    """Appends each entry to the file of its key. The keys are sorted."""
    changes = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    for part, key in zip(
        np.split(entries, changes), keys[[0, *changes]] if len(keys) else [], strict=False
    ):
        path = folder / f"{name}-{int(key)}"
        with naming_file(path), path.open("ab") as stream:
            stream.write(part.tobytes())
