"""OUTPUT.partial: the folder that a command fills and then renames to OUTPUT.

A command that was killed finds there what it had done; a reader never finds half a corpus.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from data.files import SyncedFile, sync_folder
from data.manifest import MANIFEST_NAME, TRAIN, Manifest, read_manifest
from data.workers import WorkerDied

_LOCK = "lock"


class PartialFolder:
    """The folder, for this process alone.

    Attributes:
        path: the folder, made if there was none.

    Raises:
        ValueError: another process is at work in it.
        OSError: it cannot be made or written.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path = output.with_name(f"{output.name}.partial")
        self._descriptor = self._lock()

    def _lock(self) -> int:
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            path = self.path / _LOCK
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # renamed away just now, by one that has finished
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise ValueError(
                    f"another process is writing {self.path}: wait for it, or choose another "
                    "--output"
                ) from None
            except OSError as problem:
                print(
                    f"warning: {path} cannot be locked ({problem.strerror}): make sure that no "
                    "other process writes this output",
                    file=sys.stderr,
                )
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
            os.close(descriptor)

    def write(self, name: str, content: Iterable[bytes]) -> None:
        """A file of the folder, all of it or nothing."""
        with SyncedFile(self.path / f"{name}.new") as stream:
            for block in content:
                stream.write(block)
        (self.path / f"{name}.new").replace(self.path / name)

    def manifest(self) -> Manifest | None:
        """That of a call which was killed when all that was left to do was publish()."""
        return read_manifest(self.path / TRAIN)

    def publish(self, manifest: Manifest, scratch: tuple[str, ...]) -> None:
        """Writes the manifest, removes the names in `scratch` and renames the folder.

        Called again after a crash, it goes on from where that happened.
        """
        self.write(MANIFEST_NAME, [manifest.to_json()])
        for name in scratch:
            self.remove(name)
        sync_folder(self.path)
        self.path.rename(self.output)
        # Only now: while the lock has a name, no other process begins the folder anew.
        remove_lock(self.output)
        sync_folder(self.output.parent)

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> PartialFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)


def remove_lock(output: Path) -> None:
    """A process killed right after it published the folder has left its lock there."""
    (output / _LOCK).unlink(missing_ok=True)


class UselessError(ValueError):
    """A mistake that makes what was done worthless."""


class Unfinished(Exception):
    """A failure whose partial folder is worth keeping; `how` says how to go on."""

    def __init__(self, cause: BaseException, partial: Path, how: str) -> None:
        super().__init__(cause, partial, how)
        self.cause, self.partial, self.how = cause, partial, how


def run_command(run: Callable[[], None]) -> int:
    """Runs a command to its exit code: 2 for a mistake, 1 for a failure, 130 or 143 if a signal
    ended it; each with one line that says what happened and, where it can, how to go on."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        run()
        return 0
    except Unfinished as unfinished:
        if not isinstance(unfinished.cause, _EXPECTED):
            raise
        code, message = _explained(unfinished.cause)
        message += f"; {unfinished.partial} keeps what is done: {unfinished.how}"
    except _EXPECTED as problem:
        code, message = _explained(problem)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"error: {message}", file=sys.stderr)
    return code


_EXPECTED = (ValueError, OSError, MemoryError, WorkerDied, KeyboardInterrupt)


class _Terminated(KeyboardInterrupt):
    pass


def _terminate(*_: object) -> None:
    raise _Terminated


def _explained(problem: BaseException) -> tuple[int, str]:
    if isinstance(problem, _Terminated):
        return 143, "terminated"
    if isinstance(problem, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(problem, WorkerDied):
        hint = ", most likely for want of memory: use fewer --workers" * (problem.exit_code == -9)
        return 1, f"a worker {problem.cause} while at work on {problem.job}{hint}"
    if isinstance(problem, MemoryError):
        return 1, "out of memory: use fewer --workers"
    return 2, str(problem)
