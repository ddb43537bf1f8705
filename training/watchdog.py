"""A thread that ends a run which hangs, and tells where each rank was."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path
from types import TracebackType

from training.out_of_memory import Whereabouts
from training.pulse import Pulse
from training.setup import Run
from training.stop import tell

TIMES_USUAL = 10
"""A step is late when it takes this many times the usual."""
TIMES_OTHERWISE = 6
"""Longer than a step may take what is slow and rare: the first steps, evaluations, saves."""
WARM_UP = 3
"""Steps before there is a usual one."""
OTHERS = 5.0
"""Seconds that ranks wait for each other's reports."""


class Watchdog:
    """Exits with 1 when the main thread stays in a phase for too long. A context manager.

    Each rank watches itself. One that is stopped or gone writes no report, which tells it apart.

    training.hang_seconds is what a step may take at least.
    """

    def __init__(self, pulse: Pulse, where: Whereabouts, run: Run) -> None:
        self._pulse, self._where = pulse, where
        self._seconds = run.config.training.hang_seconds
        self._folder = Path(run.config.training.run_folder)
        self._rank, self._world_size = run.ranks.rank, run.ranks.world_size
        self._closed = threading.Event()

    def limit(self, phase: str) -> float:
        """Seconds that a phase may take."""
        assert self._seconds is not None
        if phase != "step" or self._pulse.count("step") < WARM_UP:
            return TIMES_OTHERWISE * self._seconds
        return max(self._seconds, TIMES_USUAL * self._pulse.usual("step"))

    def _watch(self, seconds: float) -> None:
        while not self._closed.wait(min(1.0, seconds / 10)):
            phase, spent = self._pulse.phase, time.monotonic() - self._pulse.since
            if spent > self.limit(phase):
                self._end(phase, spent)

    def _end(self, phase: str, spent: float) -> None:
        began = time.time()
        told = (
            f"rank {self._rank} hangs: {spent:.0f} s in this {phase}, at {self._where.moment}, "
            f"where {self._pulse.usual(phase):.1f} s are usual"
        )
        with report_of(self._folder, self._rank).open("w", encoding="utf-8") as file:
            file.write(f"{told}\n")
            file.flush()
            faulthandler.dump_traceback(file)
        tell(f"error: {told}; stacks of all threads:")
        faulthandler.dump_traceback(2)
        time.sleep(OTHERS)
        silent = [
            rank
            for rank in range(self._world_size)
            if not _written_since(report_of(self._folder, rank), began - self.limit(phase))
        ]
        if silent:
            tell(f"error: no report from rank {', '.join(map(str, silent))}: stopped, or gone")
        os._exit(1)

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            watch = threading.Thread(target=self._watch, args=(self._seconds,), daemon=True)
            watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()


def report_of(folder: Path, rank: int) -> Path:
    return folder / f"hang_rank{rank}.txt"


def _written_since(path: Path, when: float) -> bool:
    return path.exists() and path.stat().st_mtime >= when
