"""What torch's CPU allocator gives and takes back, moment by moment, read from torch's profiler."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

MARK = "moment: "


class Moment(NamedTuple):
    """A time from its beginning to the next moment's."""

    name: str
    start: int
    """Bytes held when it begins."""
    changes: list[int]
    """Bytes of each allocation and (negative) release, in order."""

    @property
    def totals(self) -> list[int]:
        """Bytes held at the start and after each change."""
        return list(itertools.accumulate(self.changes, initial=self.start))

    @property
    def peak(self) -> int:
        return max(self.totals)

    @property
    def end(self) -> int:
        return self.totals[-1]


def allocator_profile(device: str = "cpu") -> Any:
    """To be entered; sees every allocation from then on. What is held before counts as nothing."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, profile_memory=True)


def mark(name: str) -> None:
    """Begin a moment."""
    # record_function is an operator: selective checkpointing would see it, and see it only once.
    with torch._C._profiler._RecordFunctionFast(MARK + name):
        pass


def moments(profile: Any) -> list[Moment]:
    """Those of a profile that has been left, the first being what came before any mark."""
    found = [Moment("before", 0, [])]
    total = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name().startswith(MARK):
            found.append(Moment(event.name().removeprefix(MARK), total, []))
        elif event.name() == "[memory]":
            total += event.nbytes()
            found[-1].changes.append(event.nbytes())
    return found
