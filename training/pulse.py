"""What a run is at, since when, and how long it usually takes: for time limits and the watchdog."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque


class Pulse:
    """Phases follow one another: "start", then "step", "evaluation" and "save".

    "save in all" is what a save takes until it is complete, in the background or not.

    The main thread enters them; other threads may read `phase` and `since`.
    """

    KEPT = 100
    """Latest durations of each phase."""

    def __init__(self) -> None:
        self.phase = "start"
        self.since = time.monotonic()
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self.KEPT))

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        self.add(self.phase, now - self.since)
        self.phase, self.since = phase, now

    def add(self, phase: str, seconds: float) -> None:
        """Of one that went on beside others."""
        self._seconds[phase].append(seconds)

    def count(self, phase: str) -> int:
        return len(self._seconds[phase])

    def longest(self, phase: str) -> float:
        return max(self._seconds[phase], default=0.0)

    def usual(self, phase: str) -> float:
        """Median seconds; 0 where it has never ended."""
        return statistics.median(self._seconds[phase] or [0.0])
