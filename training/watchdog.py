"""A thread that ends a run which hangs, and tells where each rank was."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
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
LAST = 30.0
"""Seconds more until faulthandler's own thread, which needs no Python, ends the process."""


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
            # For where Python itself stands still, as when a mapped file's page does not come.
            last = TIMES_OTHERWISE * seconds + LAST
            faulthandler.dump_traceback_later(last, exit=True, file=2)
            phase, spent = self._pulse.phase, time.monotonic() - self._pulse.since
            if spent > self.limit(phase):
                self._end(phase, spent)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, phase: str, spent: float) -> None:
        """Exit; a file system that hangs, too, keeps the report for no more than some seconds."""
        report = threading.Thread(target=self._report, args=(phase, spent), daemon=True)
        report.start()
        report.join(2 * OTHERS)
        os._exit(1)

    def _report(self, phase: str, spent: float) -> None:
        began, stacks = time.time(), stacks_of_all_threads()
        told = (
            f"rank {self._rank} hangs: {spent:.0f} s in this {phase}, at {self._where.moment}, "
            f"where {self._pulse.usual(phase):.1f} s are usual"
        )
        tell(f"error: {told}; stacks of all threads:\n{stacks}")
        try:
            report_of(self._folder, self._rank).write_text(f"{told}\n{stacks}", encoding="utf-8")
        except OSError as error:
            tell(f"warning    rank {self._rank} writes no report: {error}")
        time.sleep(OTHERS)
        silent = [
            rank
            for rank in range(self._world_size)
            if not _written_since(report_of(self._folder, rank), began - self.limit(phase))
        ]
        if silent:
            tell(f"error: no report from rank {', '.join(map(str, silent))}: stopped, or gone")

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            threading.Thread(
                target=self._watch, args=(self._seconds,), name="watchdog", daemon=True
            ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()


def stacks_of_all_threads() -> str:
    """Innermost call first. By no file: source lines may lie on what hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for thread, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(thread, thread)}:\n")
        lines += [
            f'  File "{call.f_code.co_filename}", line {number} in {call.f_code.co_name}\n'
            for call, number in traceback.walk_stack(frame)
        ]
    return "".join(lines)


def report_of(folder: Path, rank: int) -> Path:
    return folder / f"hang_rank{rank}.txt"


def _written_since(path: Path, when: float) -> bool:
    return path.exists() and path.stat().st_mtime >= when
