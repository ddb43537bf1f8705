"""Text files: one document each."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from data.json_scanner import invalid_utf8
from data.pieces import Cutter, Invalid, Piece
from data.streams import BLOCK_BYTES, opened

_BYTE_ORDER_MARK = "\ufeff"


def read_text(path: str, block_bytes: int = BLOCK_BYTES) -> Iterator[Piece | Invalid]:
    """The document of one file. Raises OSError if the file cannot be read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    cutter = Cutter()
    offset = 0
    at_start = True
    with opened(path) as stream:
        while True:
            block = stream.read(block_bytes)
            undecoded = len(decoder.getstate()[0])
            try:
                part = decoder.decode(block, final=not block)
            except UnicodeDecodeError as problem:
                message = invalid_utf8(problem, offset - undecoded)
                yield Invalid(ValueError(f"{path}: {message}"))
                return
            offset += len(block)
            if at_start and part:
                at_start = False
                part = part.removeprefix(_BYTE_ORDER_MARK)
            yield from cutter.feed(part)
            if not block:
                yield cutter.finish()
                return
