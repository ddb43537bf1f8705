"""A failed rank ends the others; without a failure nothing does."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from training import alarm
from training.alarm import Alarm


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """In a process group, exit codes of this process, which stays."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(alarm, "INTERVAL", 0.01)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    handler = signal.getsignal(signal.SIGTERM)
    yield codes
    signal.signal(signal.SIGTERM, handler)
    torch.distributed.destroy_process_group()


def test_a_ring_ends_the_other_ranks_and_says_why(
    exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    with Alarm(0):
        with Alarm(1) as failing:
            time.sleep(0.05)
            assert exits == []
        assert failing.ring(OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")) == 1
        assert set(exits) == {1}
    told = capfd.readouterr().err
    assert "error: rank 1: [Errno 28] No space left on device: 'metrics.jsonl'; free space" in told


def test_no_rank_is_ended_after_it_is_done(exits: list[int]) -> None:
    with Alarm(0):
        pass
    with Alarm(1) as failing:
        pass
    failing.ring(OSError("late"))
    assert exits == []


def test_an_error_before_the_ranks_have_met_is_told_all_the_same(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert Alarm(3).ring(OSError(errno.EIO, "Input/output error", "x")) == 1
    assert "error: rank 3: [Errno 5] Input/output error: 'x'" in capfd.readouterr().err


def test_threads_still_tell_what_nothing_else_would(
    exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> None:
        raise error

    with Alarm(0):
        for error in (OSError("of TensorBoard's thread"), ValueError("of ours")):
            thread = threading.Thread(target=fail, args=(error,))
            thread.start()
            thread.join()
    told = capfd.readouterr().err
    assert "of ours" in told
    assert "of TensorBoard's thread" not in told
