"""Bytes alive on a device and on its host, by category, along the timeline of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Place = Literal["gpu", "host"]
Category = Literal[
    "parameters",
    "master_weights",
    "gradients",
    "optimizer_states",
    "buffers",
    "activations",
    "transient",
    "loss",
    "allowance",
]


class Sample(NamedTuple):
    """The most bytes alive at once during one moment, and what they were."""

    moment: str
    total: int
    by_category: dict[Category, int]


@dataclass
class Ledger:
    """What is alive, and the peak of each moment.

    Every allocation and every release is booked in the order in which it happens; a moment ("block
    3 backward", "optimizer step") lasts until the next one begins.
    """

    granularity: int = 1
    """The allocator's unit in bytes: 512 on CUDA, 1 on a CPU."""
    places: tuple[Place, ...] = ("gpu", "host")
    """Where the device is the CPU there is one place, "gpu", and the host's bytes are in it."""
    alive: dict[Place, Counter[Category]] = field(default_factory=dict)
    timeline: dict[Place, list[Sample]] = field(default_factory=dict)
    starts: dict[Place, list[int]] = field(default_factory=dict)
    """Bytes alive as each moment of the timeline began."""
    slack: Counter[Category] = field(default_factory=Counter)
    """Of what is alive, the bytes that page-locked memory was rounded up by."""

    def __post_init__(self) -> None:
        self.alive = {place: Counter() for place in self.places}
        self.timeline = {place: [] for place in self.places}
        self.starts = {place: [] for place in self.places}
        self._totals = dict.fromkeys(self.places, 0)
        self._peaks = dict.fromkeys(self.places, 0)
        self.begin("start")

    def begin(self, moment: str) -> None:
        for place in self.places:
            self.timeline[place].append(Sample(moment, 0, {}))
            self.starts[place].append(self._totals[place])
            self._sample(place)

    def allocate(self, category: Category, size: int, place: Place = "gpu") -> None:
        """Book `size` bytes of one allocation."""
        place = place if place in self.alive else "gpu"
        size = rounded(size, self.granularity)
        self.alive[place][category] += size
        self._totals[place] += size
        if self._totals[place] > self._peaks[place]:
            self._sample(place)

    def free(self, category: Category, size: int, place: Place = "gpu") -> None:
        """Release one allocation of `size` bytes."""
        place = place if place in self.alive else "gpu"
        size = rounded(size, self.granularity)
        self.alive[place][category] -= size
        self._totals[place] -= size
        assert self.alive[place][category] >= 0, f"{category} below zero: {size} bytes too many"

    def lock(self, category: Category, size: int) -> None:
        """Book page-locked memory of the host: a copy of what was allocated first."""
        self.allocate("transient", size, "host")
        self.allocate(category, page_locked(size), "host")
        self.free("transient", size, "host")
        self.slack[category] += page_locked(size) - size

    def unlock(self, category: Category, size: int) -> None:
        self.free(category, page_locked(size), "host")
        self.slack[category] -= page_locked(size) - size

    def move(self, source: Category, target: Category, size: int, place: Place = "gpu") -> None:
        """Book what is alive already under another category."""
        self.free(source, size, place)
        self.allocate(target, size, place)

    def total(self, place: Place = "gpu") -> int:
        return self._totals[place]

    def peak(self, place: Place = "gpu") -> Sample:
        return max(self.timeline[place], key=lambda sample: sample.total)

    def _sample(self, place: Place) -> None:
        """A new peak of this moment."""
        self._peaks[place] = self._totals[place]
        moment = self.timeline[place][-1].moment
        self.timeline[place][-1] = Sample(moment, self._totals[place], dict(self.alive[place]))


def rounded(size: int, granularity: int) -> int:
    """What an allocator takes for `size` bytes."""
    return -(-size // granularity) * granularity


def page_locked(size: int) -> int:
    """Bytes that torch takes: a power of two (ATen/core/CachingHostAllocator.h; read)."""
    return 1 << (size - 1).bit_length() if size else 0
