"""Samples that are stepped over: a mapping of positions to sample numbers, as a pure function."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from data.loader import Dataset
from data.order import Numbers


class Skipping:
    """A dataset without some of its samples: position p is the p-th sample that is left.

    Args:
        ranges: [first, last] sample numbers to leave out, both included, in any order.
    """

    def __init__(self, dataset: Dataset, ranges: Sequence[Sequence[int]]) -> None:
        self.sequence_length = dataset.sequence_length
        self.ranges = merged(ranges)
        self._dataset = dataset
        self._starts: list[int] = []  # first position behind each range
        self._skipped = [0]  # samples left out by the ranges before
        for first, last in self.ranges:
            self._starts.append(first - self._skipped[-1])
            self._skipped.append(self._skipped[-1] + last - first + 1)

    def number(self, position: int) -> int:
        """The sample at a position."""
        return position + self._skipped[bisect_right(self._starts, position)]

    def places(self, positions: Numbers) -> Numbers:
        """As of the dataset's samples at these positions."""
        skipped = np.array(self._skipped)
        return self._dataset.places(
            positions + skipped[np.searchsorted(self._starts, positions, "right")]
        )

    def read(self, places: Numbers, out: Numbers) -> None:
        self._dataset.read(places, out)

    def leaves_out(self, first: int, last: int) -> bool:
        return any(start <= first and last <= end for start, end in self.ranges)

    def passed(self, position: int) -> list[list[int]]:
        """The ranges that lie before the sample at a position, and are over with it."""
        return self.ranges[: bisect_right(self._starts, position)]


def merged(ranges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sorted, and joined where they overlap or touch."""
    joined: list[list[int]] = []
    for first, last in sorted(map(list, ranges)):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined
