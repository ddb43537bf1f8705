"""Readers: from the name of a source to its documents.

A source is a `.txt` file (one document), a `.jsonl`, `.jsonl.gz` or `.jsonl.zst` file (one document
a line), a folder of such files, or `python-stdlib`: the source code of the running interpreter's
standard library, which every machine has.

Text is UTF-8 whatever the locale, and kept to the byte: only a byte-order mark at the start of a
file is dropped, and newlines are never translated.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NoReturn

import zstandard

PYTHON_STDLIB = "python-stdlib"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")

# Tests hold invalid encodings on purpose, and distributions package them apart; the rest is not the
# standard library's own.
_STDLIB_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})

_BLOCK_BYTES = 1 << 18


def raise_problem(problem: ValueError) -> NoReturn:
    """The default for `on_invalid`: the first invalid document ends the reading."""
    raise problem


def read_documents(
    sources: Sequence[str],
    *,
    text_key: str = "text",
    on_invalid: Callable[[ValueError], None] = raise_problem,
) -> Iterator[str]:
    """Yields the documents of all sources, in an order fixed by the names of the files.

    Args:
        sources: see the module's text.
        text_key: the key of a JSON line that holds the text.
        on_invalid: is called with a message naming file, line and byte for every document that is
            not valid UTF-8 or JSON, or lacks the text; reading goes on when it returns.

    Raises:
        ValueError: a source matches nothing, a compressed file is damaged, or (by default) a
            document is invalid.
        OSError: a file is missing or unreadable.
    """
    for source in sources:
        for path in source_files(source):
            if ".jsonl" in path.suffixes:
                yield from _read_json_lines(path, text_key, on_invalid)
            else:
                yield from _read_text(path, on_invalid)


def source_files(source: str) -> list[Path]:
    """The files of one source, sorted by path. Raises ValueError or OSError if there are none."""
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            path
            for path in root.rglob("*.py")
            if path.is_file() and _STDLIB_EXCLUDED.isdisjoint(path.relative_to(root).parts)
        ]
    elif (root := Path(source)).is_dir():
        files = [path for path in root.rglob("*") if path.is_file() and _is_supported(path)]
    elif not root.exists():
        raise FileNotFoundError(
            f"source {source!r} does not exist: expected a file, a folder or {PYTHON_STDLIB!r}"
        )
    elif not _is_supported(root):
        raise ValueError(f"source {source!r}: expected a file ending in {', '.join(SUFFIXES)}")
    else:
        files = [root]
    if not files:
        raise ValueError(f"source {source!r}: {root} holds no file ending in {', '.join(SUFFIXES)}")
    return sorted(files, key=Path.as_posix)


def _is_supported(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _read_text(path: Path, on_invalid: Callable[[ValueError], None]) -> Iterator[str]:
    try:
        document = _decode(path.read_bytes(), str(path), offset=0)
    except ValueError as problem:
        on_invalid(problem)
    else:
        yield document


def _read_json_lines(
    path: Path, text_key: str, on_invalid: Callable[[ValueError], None]
) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                document = _parse(line, text_key, f"{path}:{number}", offset)
            except ValueError as problem:
                on_invalid(problem)
            else:
                yield document
        offset += len(line)


def _parse(line: bytes, text_key: str, where: str, offset: int) -> str:
    # Without its newline, where the parser would place the fault of a line cut short.
    content = _decode(line.rstrip(b"\r\n"), where, offset)
    try:
        record = json.loads(content)
    except json.JSONDecodeError as problem:
        raise ValueError(f"{where}: broken JSON at column {problem.colno}: {problem.msg}") from None
    except RecursionError:
        raise ValueError(f"{where}: broken JSON: nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if text_key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"{where}: no key {text_key!r}; its keys are: {keys}")
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: {text_key!r} must hold a string, found {type(text).__name__} "
            f"({json.dumps(text)[:40]})"
        )
    try:
        text.encode()
    except UnicodeEncodeError as problem:  # JSON can escape half a surrogate pair, UTF-8 cannot
        raise ValueError(
            f"{where}: {text_key!r} holds the lone surrogate {text[problem.start]!r} at character "
            f"{problem.start}, which is not valid Unicode text"
        ) from None
    return text


def _decode(content: bytes, where: str, offset: int) -> str:
    """UTF-8 to text; `offset` is the place of `content` in its (decompressed) file, in bytes."""
    if offset == 0 and content.startswith(codecs.BOM_UTF8):
        offset = len(codecs.BOM_UTF8)
        content = content[offset:]
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"{where}: not valid UTF-8: byte 0x{content[problem.start]:02x} at byte offset "
            f"{offset + problem.start} ({problem.reason}); convert the file to UTF-8"
        ) from None


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain or compressed file, each with its newline."""
    try:
        with path.open("rb") as raw, _decompressed(raw, path.suffix) as stream:
            yield from stream
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as problem:
        raise ValueError(f"{path}: truncated or damaged compressed file: {problem}") from None


def _decompressed(raw: IO[bytes], suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]  # GzipFile is an IO[bytes] but in name
    if suffix == ".zst":
        return io.BufferedReader(_ZstandardFile(raw), _BLOCK_BYTES)
    return raw


class _ZstandardFile(io.RawIOBase):
    """Decompresses; unlike zstandard's own reader it does not take a cut file for a whole one."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._blocks = _decompressed_blocks(raw)
        self._unread = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._unread:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._unread = memoryview(block)
        count = min(len(buffer), len(self._unread))
        buffer[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count


def _decompressed_blocks(raw: IO[bytes]) -> Iterator[bytes]:
    frame = None
    while block := raw.read(_BLOCK_BYTES):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(block)
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends within a frame")
