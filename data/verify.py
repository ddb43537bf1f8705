"""Is a corpus whole? Checksums, token ids and the ends of documents, in one pass each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.manifest import FileRecord, SplitRecord
from data.token_file import TokenArray, TokenFile

_BLOCK = 1 << 20  # tokens or bytes

ReportBytes = Callable[[int], None]
"""Is called with the number of bytes passed."""


def check_files(prefix: Path, split: SplitRecord, progress: ReportBytes) -> list[str]:
    """What differs from the manifest's sizes and checksums."""
    problems = []
    for suffix, record in ((".bin", split.bin), (".idx", split.idx)):
        problem = _check_file(Path(f"{prefix}{suffix}"), record, progress)
        if problem:
            problems.append(problem)
    return problems


def _check_file(path: Path, record: FileRecord, progress: ReportBytes) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    if size != record.bytes:
        return f"{path}: {size:,} bytes, but manifest.json says {record.bytes:,}: truncated?"
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            progress(len(block))
    if digest.hexdigest() != record.sha256:
        return f"{path}: its checksum is not that of manifest.json: damaged or changed"
    return None


def check_tokens(
    file: TokenFile, vocabulary_size: int, end_of_document: int, progress: ReportBytes
) -> str | None:
    """The first id outside the vocabulary, or the first document that does not end with exactly one
    end-of-document token. Raises ValueError if the index is damaged."""
    start = document = 0
    for lengths in file.document_lengths():
        if (empty := np.flatnonzero(lengths == 0)).size:
            return f"{file.bin_path}: document {document + empty[0]:,} has no tokens"
        last = start + np.cumsum(lengths) - 1  # of each document, its place in the file
        for first in range(start, int(last[-1]) + 1, _BLOCK):
            count = min(_BLOCK, int(last[-1]) + 1 - first)
            tokens = file.tokens(first, count)
            problem = _check_ids(file, tokens, first, vocabulary_size)
            if problem:
                return problem
            expected = last[np.searchsorted(last, first) : np.searchsorted(last, first + count)]
            found = np.flatnonzero(tokens == end_of_document) + first
            if not np.array_equal(expected, found):
                place = int(np.setxor1d(expected, found)[0])
                number = document + int(np.searchsorted(last, place))
                return _wrong_end(file, number, place, end_of_document)
            progress(tokens.nbytes)
        start = int(last[-1]) + 1
        document += len(lengths)
    return None


def _check_ids(file: TokenFile, tokens: TokenArray, first: int, size: int) -> str | None:
    if 0 <= tokens.min() <= tokens.max() < size:
        return None
    place = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
    return (
        f"{file.bin_path}: token {first + place:,} is {int(tokens[place])}, outside the vocabulary "
        f"of {size:,}"
    )


def _wrong_end(file: TokenFile, document: int, place: int, end_of_document: int) -> str:
    token = int(file.tokens(place, 1)[0])
    if token == end_of_document:
        return (
            f"{file.bin_path}: document {document:,} holds the end-of-document token "
            f"{end_of_document} before its end, at token {place:,} of the file"
        )
    return (
        f"{file.bin_path}: document {document:,} ends with the token {token}, not with the "
        f"end-of-document token {end_of_document}"
    )
