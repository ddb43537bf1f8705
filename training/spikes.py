"""Loss spikes: what one is, by the losses before it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence


class Spikes:
    """Of the losses, averaged over ranks, of the last steps whose updates were made.

    Args:
        deviations: standard deviations above the mean that make a spike; None for no spikes.
        recent: losses that a resumed run has seen before.
    """

    WINDOW = 64
    FEWEST = 16
    """Losses, before anything is a spike."""

    def __init__(self, deviations: float | None, recent: Sequence[float] = ()) -> None:
        self._deviations = deviations
        self.recent = deque(recent, maxlen=self.WINDOW)

    @property
    def bound(self) -> float:
        """The loss at which a spike begins; infinite where there is nothing to tell it by."""
        if self._deviations is None or len(self.recent) < self.FEWEST:
            return math.inf
        mean = statistics.fmean(self.recent)
        return mean + self._deviations * statistics.stdev(self.recent, mean)

    def add(self, loss: float) -> None:
        self.recent.append(loss)
