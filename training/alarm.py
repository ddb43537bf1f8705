"""A rank that cannot go on alone ends all: the others would wait for it in a collective call."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from torch.distributed import distributed_c10d

from training.stop import tell

INTERVAL = 1.0
"""Seconds between two looks."""
KEY = "a rank has failed"


class Alarm:
    """Exits with 1 when another rank rings. A context manager, inside a process group.

    A thread looks, in the store that the ranks met by: it works whatever the main thread waits for,
    a GPU's collective call too, which no peer's end interrupts.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Any = None
        self._closed = threading.Event()

    def ring(self, error: OSError) -> int:
        """Say what has happened, end the others and return the exit code."""
        with suppress(OSError):  # where the log is on the same disk
            tell(
                f"error: rank {self._rank}: {error}; free space or mend the file system, then run "
                "the same command again: complete checkpoints are intact"
            )
        if self._store is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher's, as others end
            with suppress(RuntimeError):
                self._store.set(KEY, "")
            # Their collective calls with this rank would fail as soon as it is gone.
            time.sleep(3 * INTERVAL)
        return 1

    def _listen(self) -> None:
        while not self._closed.wait(INTERVAL):
            try:
                rung = self._store.check([KEY])
            except RuntimeError:
                return  # rank 0, which may hold the store, has ended: all is done
            if rung:
                os._exit(1)

    def __enter__(self) -> Alarm:
        self._store = distributed_c10d._get_default_store()
        threading.Thread(target=self._listen, name="alarm", daemon=True).start()
        threading.excepthook = _tell_unless_raised_again
        return self

    def __exit__(self, *_: object) -> None:
        threading.excepthook = threading.__excepthook__
        self._closed.set()


def _tell_unless_raised_again(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread prints an error that the next call to TensorBoard raises."""
    if not issubclass(failure.exc_type, OSError):
        threading.__excepthook__(failure)
