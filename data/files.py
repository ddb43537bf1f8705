"""Files that are on the disk when they are closed, and whose errors name them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from data.manifest import FileRecord

BLOCK_BYTES = 1 << 23
"""Read at once where a file is passed over."""


File = TypeVar("File", bound="SyncedFile")


class SyncedFile:
    """A new file, or one continued after its first `kept` bytes; what follows them is cut off.

    Raises:
        OSError: naming the file, as a failed write on a full disk alone does not.
        ValueError: the file is shorter than `kept`.
    """

    def __init__(self, path: str | Path, kept: int = 0) -> None:
        self.path = Path(path)
        self.bytes = kept
        if kept and self.path.stat().st_size < kept:
            raise ValueError(f"{path}: shorter than the {kept:,} bytes written to it: damaged")
        with naming_file(self.path):
            self._stream = open(path, "r+b" if kept else "w+b")  # noqa: SIM115  closed by close()
            self._stream.truncate(kept)
            self._stream.seek(kept)

    def write(self, content: bytes) -> None:
        with naming_file(self.path):
            self._stream.write(content)
        self.bytes += len(content)

    def truncate(self, size: int) -> None:
        with naming_file(self.path):
            self._stream.truncate(size)
            self._stream.seek(size)
        self.bytes = size

    def sync(self) -> None:
        with naming_file(self.path):
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        with naming_file(self.path), self._stream:
            if self.bytes:  # thousands of empty ones would each wait for the disk
                self.sync()

    def __enter__(self: File) -> File:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class HashedFile(SyncedFile):
    """Knows its checksum. Of a file that is continued, kept() must be read first."""

    def __init__(self, path: str | Path, kept: int = 0) -> None:
        super().__init__(path, kept)
        self._sha256 = hashlib.sha256()

    def kept(self) -> Iterator[bytes]:
        self._stream.seek(0)
        while content := self._stream.read(BLOCK_BYTES):
            self._sha256.update(content)
            yield content

    def write(self, content: bytes) -> None:
        super().write(content)
        self._sha256.update(content)

    @property
    def record(self) -> FileRecord:
        return FileRecord(bytes=self.bytes, sha256=self._sha256.hexdigest())


@contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from None


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
