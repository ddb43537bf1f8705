"""Stopping early and well: on a signal, or before the time is up, with a checkpoint.

SIGTERM, SIGINT or SIGUSR1 to any rank, or to a launcher that passes it on, ends the run behind the
step it is in: that step is finished, saved, and every rank exits with RESUMABLE. Another signal
exits at once; what is saved stays whole, as a checkpoint gets its name when it is complete.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import psutil

from configs.schema import seconds_of
from training.engine import job_end
from training.pulse import Pulse
from training.setup import Run

RESUMABLE = 75
"""Exit code: stopped early with a checkpoint; the same command continues. EX_TEMPFAIL of sysexits.h
("temporary failure, try again")."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ONE_REQUEST = 5.0
"""Seconds in which signals are one request: launchers repeat a signal, or add another to it."""
REASONS = ("signal", "time limit")


class Stop:
    """Whether this rank wants the run to end. A context manager: signals are heard inside it.

    A thread hears them, by way of a pipe: Python calls handlers between two instructions of its
    main thread, which may be waiting for a rank that is gone.

    Args:
        ends_at: seconds since the epoch at which the process will be gone; None where it may stay.
    """

    def __init__(self, pulse: Pulse, ends_at: float | None) -> None:
        self._pulse = pulse
        self._ends_at = ends_at
        self._limit = ends_at - started_at() if ends_at is not None else 0.0
        self._asked_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def wishes(self) -> tuple[bool, bool]:
        """One for each of REASONS."""
        return self._asked_at is not None, self._time_is_up()

    def _time_is_up(self) -> bool:
        return self._ends_at is not None and time.time() + self.reserve() >= self._ends_at

    def reserve(self) -> float:
        """Seconds that ending takes: the step under way and the next, which is when ranks agree, an
        evaluation, a save, and a margin. What has not happened yet is guessed from the limit."""
        pulse = self._pulse
        save = 1.5 * pulse.longest("save in all") or min(300.0, 0.1 * self._limit)
        margin = min(60.0, 0.05 * self._limit)
        return 2 * pulse.longest("step") + pulse.longest("evaluation") + save + margin

    def _listen(self, pipe: int) -> None:
        while received := os.read(pipe, 1):
            if received[0] in SIGNALS:
                self._receive(signal.Signals(received[0]))
        os.close(pipe)

    def _receive(self, received: signal.Signals) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            tell(f"{received.name}: saving after this step; another signal exits at once")
        elif now - self._asked_at > ONE_REQUEST:
            tell(f"{received.name}: exit, without a save")
            os._exit(128 + received)

    def __enter__(self) -> Stop:
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        threading.Thread(target=self._listen, args=(reading,), daemon=True).start()
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, _heard) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            # Launchers signal ranks that are slower to exit: all is saved, let them.
            signal.signal(number, signal.SIG_IGN if self._asked_at is not None else handler)
        os.close(self._writing)


def _heard(number: int, frame: FrameType | None) -> None:
    """A handler: without one, nothing is written to the pipe."""


def ends_at(run: Run) -> float | None:
    """Seconds since the epoch, by the run's time limit or SLURM's."""
    limit = run.config.training.time_limit
    if limit is None:
        return job_end()
    return started_at() + (seconds_of(limit) or 0)


def started_at() -> float:
    """Seconds since the epoch at which this process began."""
    return psutil.Process().create_time()


def tell(text: str) -> None:
    """To stderr from any thread, also while the main thread is printing."""
    sys.stderr.flush()
    os.write(2, f"{text}\n".encode())
