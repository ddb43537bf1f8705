"""Finds the text of a JSON object that is too long to be parsed at once.

The object passes block by block; nothing of it is kept but the string part at hand. What is valid
JSON here is so for Python's json module, and the other way round, with three exceptions: the key
of the text may occur but once, as the text has been handed on when a second is found, and
numbers and nesting have limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import orjson

_BLANKS = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]*")
_VALID_SCALAR = re.compile(
    rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null|NaN|-?Infinity"
)
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")

_MAXIMUM_SCALAR_BYTES = 4096
_MAXIMUM_DEPTH = 1000
_NAMED_KEYS = 20

_CLOSING = {b"{": b"}", b"[": b"]"}
_KINDS = {b"{": "dict", b"[": "list", b'"': "str", b"t": "bool", b"f": "bool", b"n": "NoneType"}


def scan_text(blocks: Iterator[bytes], text_key: str, offset: int = 0) -> Iterator[str]:
    """Yields the string under the top-level key `text_key`, in parts.

    Args:
        blocks: the bytes of one JSON object; none is empty.
        text_key: see above.
        offset: where the object begins in its file, in bytes.

    Raises ValueError, possibly after parts of the text, if the object is invalid or lacks the text.
    """
    scanner = _Scanner(blocks, offset)
    if (first := scanner.peek()) != b"{":
        raise ValueError(f"expected a JSON object, found {_KINDS.get(first, 'a number')}")
    scanner.advance()
    keys: list[str] = []
    found = False
    for key in scanner.members(len(text_key)):
        if key != text_key:
            keys.append(key)
            del keys[_NAMED_KEYS:]
            scanner.skip_value()
        elif found:
            raise ValueError(f"the key {text_key!r} occurs twice in one object")
        elif (first := scanner.peek()) != b'"':
            kind = _KINDS.get(first, "a number")
            raise ValueError(f"{text_key!r} must hold a string, found {kind}")
        else:
            found = True
            yield from _valid_unicode(scanner.string(), text_key)
    if scanner.peek():
        raise scanner.broken("extra data")
    if not found:
        raise ValueError(missing_key(text_key, keys))


def missing_key(text_key: str, keys: list[str]) -> str:
    return f"no key {text_key!r}; its keys are: {', '.join(map(repr, keys)) or 'none'}"


def lone_surrogate(text_key: str, character: str, position: int) -> str:
    """JSON can escape half a surrogate pair, UTF-8 cannot."""
    return (
        f"{text_key!r} holds the lone surrogate {character!r} at character {position}, which is "
        "not valid Unicode text"
    )


def invalid_utf8(problem: UnicodeDecodeError, offset: int) -> str:
    """`offset`: where the bytes decoded begin in their file."""
    return (
        f"not valid UTF-8: byte 0x{problem.object[problem.start]:02x} at byte offset "
        f"{offset + problem.start} ({problem.reason}); convert the file to UTF-8"
    )


def _valid_unicode(parts: Iterator[str], text_key: str) -> Iterator[str]:
    characters = 0
    for part in parts:
        try:
            part.encode()
        except UnicodeEncodeError as problem:
            position = characters + problem.start
            raise ValueError(lone_surrogate(text_key, part[problem.start], position)) from None
        characters += len(part)
        yield part


class _Scanner:
    """A position in the object, moved over one token after another."""

    def __init__(self, blocks: Iterator[bytes], offset: int) -> None:
        self._blocks = blocks
        self._buffer = b""
        self._at = 0
        self._dropped = 0  # bytes of the object before the buffer
        self._offset = offset

    def broken(self, reason: str, at: int | None = None) -> ValueError:
        column = self._dropped + (self._at if at is None else at) + 1
        return ValueError(f"broken JSON at byte {column:,} of the line: {reason}")

    def _more(self) -> bool:
        block = next(self._blocks, b"")
        self._dropped += self._at
        self._buffer = self._buffer[self._at :] + block
        self._at = 0
        return bool(block)

    def peek(self) -> bytes:
        """The byte that begins the next token; b"" at the end."""
        while True:
            blanks = _BLANKS.match(self._buffer, self._at)
            assert blanks is not None
            self._at = blanks.end()
            if self._at < len(self._buffer) or not self._more():
                return self._buffer[self._at : self._at + 1]

    def advance(self) -> None:
        self._at += 1

    def members(self, longest_key: int) -> Iterator[str]:
        """The keys of the object whose brace was passed, of each at least `longest_key` + 1
        characters if it has them; the caller passes their values."""
        if self.peek() == b"}":
            self.advance()
            return
        while True:
            yield self._key(longest_key)
            if self._value_ends(b"}"):
                return

    def _key(self, longest: int) -> str:
        if self.peek() != b'"':
            raise self.broken("expected a key in double quotes")
        key = ""
        for part in self.string():
            key += part[: longest + 1 - len(key)] if len(key) <= longest else ""
        if self.peek() != b":":
            raise self.broken("expected ':'")
        self.advance()
        return key

    def _value_ends(self, closing: bytes) -> bool:
        """Passes what follows a value in a container; whether the container ends."""
        byte = self.peek()
        if byte not in (b",", closing) or not byte:
            raise self.broken(f"expected ',' or {closing.decode()!r}")
        self.advance()
        return byte == closing

    def skip_value(self) -> None:
        """Passes one value; nesting is kept as the brackets that end it."""
        open_containers: list[bytes] = []
        while True:
            byte = self.peek()
            if closing := _CLOSING.get(byte):
                self.advance()
                if self.peek() == closing:
                    self.advance()
                else:
                    open_containers.append(closing)
                    if len(open_containers) > _MAXIMUM_DEPTH:
                        raise self.broken("nested too deeply")
                    if closing == b"}":
                        self._key(0)
                    continue
            elif byte == b'"':
                for _ in self.string():
                    pass
            else:
                self._skip_scalar()
            while open_containers and self._value_ends(open_containers[-1]):
                open_containers.pop()
            if not open_containers:
                return
            if open_containers[-1] == b"}":
                self._key(0)

    def _skip_scalar(self) -> None:
        while True:
            scalar = _SCALAR.match(self._buffer, self._at)
            assert scalar is not None
            if scalar.end() - self._at > _MAXIMUM_SCALAR_BYTES:
                raise self.broken(f"a number of more than {_MAXIMUM_SCALAR_BYTES} digits")
            if scalar.end() < len(self._buffer) or not self._more():
                break
        if not _VALID_SCALAR.fullmatch(self._buffer, self._at, scalar.end()):
            raise self.broken("expected a value")
        self._at = scalar.end()

    def string(self) -> Iterator[str]:
        """The content, in parts, of the string whose opening quote is next."""
        self.advance()
        while (end := _closing_quote(self._buffer, self._at)) < 0:
            content = self._buffer[self._at :]
            content = content[: len(content) - _unfinished(content)]
            if content:
                part = self._decoded(content)
                self._at += len(content)
                yield part
            if not self._more():
                raise self.broken("the string has no end")
        part = self._decoded(self._buffer[self._at : end])
        self._at = end + 1
        yield part

    def _decoded(self, content: bytes) -> str:
        """The string of escaped characters, which begin at the position."""
        try:
            part: str = orjson.loads(b'"%b"' % content)
        except orjson.JSONDecodeError:
            pass
        else:
            return part
        try:
            text = content.decode()
        except UnicodeDecodeError as problem:
            offset = self._offset + self._dropped + self._at
            raise ValueError(invalid_utf8(problem, offset)) from None
        try:
            part = json.loads(f'"{text}"')
        except json.JSONDecodeError as problem:
            before = len(text[: max(0, problem.pos - 1)].encode())
            raise self.broken(problem.msg, self._at + before) from None
        return part


def _closing_quote(content: bytes, start: int) -> int:
    """The index of the first quote from `start` that no backslash escapes, or -1."""
    end = content.find(b'"', start)
    while end > start and _is_backslash_escaping(content, end - 1, start):
        end = content.find(b'"', end + 1)
    return end


def _is_backslash_escaping(content: bytes, index: int, start: int) -> bool:
    """Whether a run of backslashes that ends at `index` is of odd length: they escape in pairs."""
    first = index
    while first >= start and content[first] == 0x5C:
        first -= 1
    return (index - first) % 2 == 1


def _unfinished(content: bytes) -> int:
    """How many bytes at the end may belong to a character that goes on in the next block.

    A character is up to 4 bytes of UTF-8, an escape, or two: a surrogate pair."""
    escape = content.rfind(b"\\", max(0, len(content) - 6))
    if escape >= 0 and _is_backslash_escaping(content, escape, 0):
        tail = content[escape:]
        if len(tail) < (6 if tail[1:2] == b"u" else 2):
            high = escape - 6
            if high < 0 or not _HIGH_SURROGATE.match(content, high, escape):
                return len(tail)
            return len(tail) + (6 if _is_backslash_escaping(content, high, 0) else 0)
        if _HIGH_SURROGATE.fullmatch(tail):
            return len(tail)
    for back in range(1, min(3, len(content)) + 1):
        byte = content[-back]
        if byte >= 0xC0:
            return back if back < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
        if byte < 0x80:
            break
    return 0
