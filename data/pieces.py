"""Documents in pieces: what readers yield, so that a document of any length passes in a few MB.

A document longer than PIECE_CHARACTERS is cut where no pre-tokenizer in use lets a token cross:
before a space between an ASCII letter or digit and an ASCII letter, at the last such place of the
piece. A piece without such a place is cut at PIECE_CHARACTERS. Where a document is cut depends on
its text alone, never on the blocks in which it was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

PIECE_CHARACTERS = 1 << 20

# Greedy, hence the last place. `re` looks backwards for the one character after the repetition much
# faster than for a class of characters.
_PAST_LAST_PLACE = re.compile("(?s:.)+ (?<=[A-Za-z0-9] )(?=[A-Za-z])")


class Piece(NamedTuple):
    """A part of a document's text; `last` ends the document."""

    text: str
    last: bool


class Invalid(NamedTuple):
    """A document that cannot be used. Its pieces so far are void; reading goes on after it."""

    problem: ValueError


def cut(text: str, limit: int = PIECE_CHARACTERS) -> Iterator[Piece]:
    """The pieces of a whole document, each of at most `limit` characters."""
    start = 0
    while len(text) - start > limit:
        end = _piece_end(text, start, limit)
        yield Piece(text[start:end], False)
        start = end
    yield Piece(text[start:] if start else text, True)


class Cutter:
    """The pieces of a document that comes in parts: those that `cut` yields of the whole."""

    def __init__(self, limit: int = PIECE_CHARACTERS) -> None:
        self._limit = limit
        self._text = ""

    def feed(self, part: str) -> Iterator[Piece]:
        """Must be exhausted before the next call."""
        text = self._text + part
        start = 0
        while len(text) - start > self._limit:
            end = _piece_end(text, start, self._limit)
            yield Piece(text[start:end], False)
            start = end
        self._text = text[start:]

    def finish(self) -> Piece:
        return Piece(self._text, True)


def _piece_end(text: str, start: int, limit: int) -> int:
    place = _PAST_LAST_PLACE.match(text, start, start + limit)
    return place.end() - 1 if place else start + limit
