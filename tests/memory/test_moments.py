"""Moments hold what the allocator did between two marks, which no operator of torch shows."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memory.moments import Moment, allocator_profile, mark, moments


def test_starts_peaks_and_ends_in_bytes() -> None:
    with allocator_profile() as profile:
        early = torch.empty(1000, dtype=torch.uint8)
        mark("one")
        kept = torch.empty(300, dtype=torch.uint8)
        passing = torch.empty(50, dtype=torch.uint8)
        del passing, early
        mark("two")
        late = torch.empty(7, dtype=torch.uint8)
    assert moments(profile) == [
        Moment("before", 0, [1000]),
        Moment("one", 1000, [300, 50, -50, -1000]),
        Moment("two", 300, [7]),
    ]
    one = moments(profile)[1]
    assert (one.start, one.peak, one.end) == (1000, 1350, 300)
    del kept, late


def test_a_mark_is_no_operator() -> None:
    """Selective checkpointing follows operators, and fails where a recomputation has another."""
    seen: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with allocator_profile() as profile, Seen():
        mark("here")
    assert not seen
    assert [moment.name for moment in moments(profile)] == ["before", "here"]
