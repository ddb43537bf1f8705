"""Plain and compressed files as streams of bytes, in bounded memory whatever they hold."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

BLOCK_BYTES = 1 << 18

# zstd shrinks repetitions up to 30,000 times: what larger blocks hold could be gigabytes, and comes
# out at once.
_ZSTANDARD_BYTES = 1 << 8


@contextmanager
def opened(path: str | Path) -> Iterator[io.BufferedReader]:
    """The content of a file, decompressed if its name ends in .gz or .zst.

    Raises ValueError in the `with` block where the compressed content is damaged or cut.
    """
    try:
        with open(path, "rb", BLOCK_BYTES) as raw:
            suffix = Path(path).suffix
            if suffix in (".gz", ".zst") and os.fstat(raw.fileno()).st_size == 0:
                raise EOFError("it is empty")
            yield _decompressed(raw, suffix)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as problem:
        raise ValueError(f"{path}: truncated or damaged compressed file: {problem}") from None


def _decompressed(raw: BinaryIO, suffix: str) -> io.BufferedReader:
    if suffix == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw)), BLOCK_BYTES)
    if suffix == ".zst":
        return io.BufferedReader(_ZstandardFile(raw), BLOCK_BYTES)
    return cast(io.BufferedReader, raw)


class _ZstandardFile(io.RawIOBase):
    """Decompresses; unlike zstandard's own reader it does not take a cut file for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
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


def _decompressed_blocks(raw: BinaryIO) -> Iterator[bytes]:
    frame = None
    while block := raw.read(_ZSTANDARD_BYTES):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(block)
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends within a frame")
