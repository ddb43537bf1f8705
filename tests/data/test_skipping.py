"""Samples that are stepped over: against lists from which they are deleted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from data.order import Numbers
from data.skipping import Skipping, merged


class Counting:
    """A dataset whose samples are their numbers."""

    sequence_length = 0

    def places(self, numbers: Numbers) -> Numbers:
        return np.stack([numbers, numbers], axis=1)

    def read(self, places: Numbers, out: Numbers) -> None:
        out[:, 0] = places[:, 1]


@pytest.mark.parametrize("seed", range(20))
def test_positions_are_what_a_list_has_left(seed: int) -> None:
    draw = random.Random(seed)
    starts = [draw.randrange(200) for _ in range(draw.randrange(8))]
    ranges = [[start, start + draw.randrange(20)] for start in starts]
    left = [n for n in range(300) if not any(first <= n <= last for first, last in ranges)]
    order = Skipping(Counting(), ranges)
    assert [order.number(position) for position in range(60)] == left[:60]
    read = np.empty((60, 1), np.int64)
    order.read(order.places(np.arange(60)), read)
    assert read[:, 0].tolist() == left[:60]
    for position in range(60):
        passed = {n for first, last in order.passed(position) for n in range(first, last + 1)}
        assert passed == set(range(left[position])) - set(left)


def test_nothing_is_skipped_without_ranges() -> None:
    order = Skipping(Counting(), [])
    assert [order.number(position) for position in (0, 1, 10**12)] == [0, 1, 10**12]


def test_ranges_that_overlap_or_touch_are_one() -> None:
    assert merged([[7, 9], [0, 3], [4, 4], [8, 12], [20, 20]]) == [[0, 4], [7, 12], [20, 20]]
    order = Skipping(Counting(), [[5, 9]])
    assert order.leaves_out(5, 9)
    assert order.leaves_out(6, 6)
    assert not order.leaves_out(4, 6)
    assert not order.leaves_out(9, 10)
