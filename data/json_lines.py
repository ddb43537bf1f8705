"""Files with one JSON object a line, the text under one of its keys.

A line is valid JSON if Python's json module takes it; orjson, which is stricter, reads the usual
line, and json those that it refuses.
"""

from __future__ import annotations

import codecs
import io
import json
import math
from collections import deque
from collections.abc import Iterator
from itertools import chain

import orjson

from data.json_scanner import invalid_utf8, lone_surrogate, missing_key, scan_text
from data.pieces import PIECE_CHARACTERS, Cutter, Invalid, Piece, cut
from data.streams import BLOCK_BYTES, opened

# A longer line is scanned block by block: parsed at once it takes several times its size.
LONG_LINE_BYTES = 1 << 22


def read_json_lines(
    path: str,
    text_key: str,
    start: int = 0,
    stop: int | None = None,
    long_line_bytes: int = LONG_LINE_BYTES,
) -> Iterator[Piece | Invalid]:
    """The documents of the lines that begin at bytes start <= b < stop of the decompressed file.

    Raises ValueError if a compressed file is damaged, OSError if the file cannot be read.
    """
    with opened(path) as stream:
        lines = _Lines(path, stream, start, stop, long_line_bytes)
        while line := lines.next():
            try:
                text = orjson.loads(line)[text_key] if lines.ended else None
            except (ValueError, KeyError, TypeError):
                text = None  # _parsed has the message, or takes it
            if type(text) is str:
                if len(text) <= PIECE_CHARACTERS:
                    yield Piece(text, True)
                else:
                    yield from cut(text)
            elif not lines.ended:
                yield from _long_document(lines, line, text_key)
            elif line.strip():
                try:
                    text = _parsed(line, text_key, lines.offset)
                except ValueError as problem:
                    yield lines.invalid(problem)
                else:
                    yield from cut(text)


def _long_document(lines: _Lines, beginning: bytes, text_key: str) -> Iterator[Piece | Invalid]:
    cutter = Cutter()
    blocks = chain(
        (beginning[i : i + BLOCK_BYTES] for i in range(0, len(beginning), BLOCK_BYTES)),
        iter(lines.rest, b""),
    )
    try:
        for part in scan_text(blocks, text_key, lines.offset):
            yield from cutter.feed(part)
    except ValueError as problem:
        deque(blocks, maxlen=0)
        yield lines.invalid(problem)
    else:
        yield cutter.finish()


def _parsed(line: bytes, text_key: str, offset: int) -> str:
    """Raises ValueError, without the place of the line, if it is invalid or lacks the text."""
    # Without its newline, where the parser would place the fault of a line cut short.
    content = line.rstrip(b"\r\n")
    try:
        record = json.loads(content.decode())
    except UnicodeDecodeError as problem:
        raise ValueError(invalid_utf8(problem, offset)) from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"broken JSON at column {problem.colno}: {problem.msg}") from None
    except RecursionError:
        raise ValueError("broken JSON: nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    if text_key not in record:
        raise ValueError(missing_key(text_key, list(record)))
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(
            f"{text_key!r} must hold a string, found {type(text).__name__} "
            f"({json.dumps(text)[:40]})"
        )
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise ValueError(lone_surrogate(text_key, text[problem.start], problem.start)) from None
    return text


class _Lines:
    """Reads line after line, and knows where it is."""

    def __init__(
        self,
        path: str,
        stream: io.BufferedReader,
        start: int,
        stop: int | None,
        long_line_bytes: int,
    ) -> None:
        self.offset = 0  # of the line last read, in bytes
        self.ended = True  # whether all of it was read
        self._path = path
        self._stream = stream
        self._stop = math.inf if stop is None else stop
        self._limit = long_line_bytes
        self._next_offset = start
        self._number = 0  # among the lines of this chunk
        if start:
            # If the line before ends where the chunk starts, the chunk starts with a line.
            self._next_offset = stream.seek(start - 1)
            self.ended = False
            while self._next_offset < self._stop and self.rest():
                pass
        self._first_offset = self._next_offset
        self._lines_before: int | None = None if start else 0

    def next(self) -> bytes:
        """The next line with its newline, if it is long only its beginning; b"" at the end."""
        self.offset = self._next_offset
        if self.offset >= self._stop:
            return b""
        line = self._read(self._limit)
        self._number += 1
        if self.offset == 0 and line.startswith(codecs.BOM_UTF8):
            self.offset = len(codecs.BOM_UTF8)
            return line[self.offset :]
        return line

    def rest(self) -> bytes:
        """A further block of a line that has not ended; b"" at its end."""
        return b"" if self.ended else self._read(BLOCK_BYTES)

    def _read(self, limit: int) -> bytes:
        block = self._stream.readline(limit)
        self._next_offset += len(block)
        self.ended = len(block) < limit or block.endswith(b"\n")
        return block

    def invalid(self, problem: ValueError) -> Invalid:
        """Names the line last read. Counts the lines before the chunk when first called."""
        if self._lines_before is None:
            self._lines_before = _count_lines(self._path, self._first_offset)
        number = self._lines_before + self._number
        return Invalid(ValueError(f"{self._path}:{number}: {problem}"))


def _count_lines(path: str, stop: int) -> int:
    """Newlines in the first `stop` bytes."""
    count = 0
    with open(path, "rb") as stream:
        for start in range(0, stop, BLOCK_BYTES):
            count += stream.read(min(BLOCK_BYTES, stop - start)).count(b"\n")
    return count
