"""Signals, time limits and the watchdog, without an engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from configs.schema import RunConfig, seconds_of
from training import stop, watchdog
from training.engine import job_end
from training.pulse import Pulse
from training.stop import Stop, ends_at, started_at
from training.watchdog import Watchdog


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_and_another_exits(
    number: signal.Signals, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(number)
    with Stop(Pulse(), None) as asked:
        assert asked.wishes() == (False, False)
        os.kill(os.getpid(), number)
        wait_for(lambda: asked.wishes()[0])
        # Launchers repeat signals: at once, it is the same request.
        os.kill(os.getpid(), number)
        monkeypatch.setattr(stop, "ONE_REQUEST", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: bool(exits))
    assert exits[-1] == 128 + signal.SIGTERM
    assert signal.getsignal(number) == signal.SIG_IGN, "saved: a late signal changes nothing"
    signal.signal(number, handler)


def test_handlers_are_given_back() -> None:
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    with Stop(Pulse(), None):
        assert {number: signal.getsignal(number) for number in stop.SIGNALS} != before
    assert {number: signal.getsignal(number) for number in stop.SIGNALS} == before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of both clocks, to be moved by hand."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_end_comes_early_enough_for_the_longest_save(clock: list[float]) -> None:
    pulse = Pulse()
    for phase, seconds in (("step", 10), ("evaluation", 100), ("step", 20), ("save", 200)):
        pulse.enter(phase)
        clock[0] += seconds
    pulse.enter("step")
    pulse.add("save in all", 400)  # it went on in the background
    end = clock[0] + 1000
    asked = Stop(pulse, end)
    asked._limit = 36_000.0
    # Two steps of 20, an evaluation of 100, one and a half saves of 400, and a minute.
    assert asked.reserve() == pytest.approx(2 * 20 + 100 + 600 + 60)
    clock[0] = end - 801
    assert asked.wishes() == (False, False)
    clock[0] = end - 800
    assert asked.wishes() == (False, True)


def test_what_was_never_seen_is_a_share_of_the_limit() -> None:
    asked = Stop(Pulse(), time.time())
    asked._limit = 1000.0
    assert asked.reserve() == pytest.approx(100 + 50)
    asked._limit = 86_400.0
    assert asked.reserve() == pytest.approx(300 + 60)


def test_limits_are_read(altered: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_of("23:50:00") == 23 * 3600 + 50 * 60
    assert seconds_of("1-00:00:30") == 86_430
    assert seconds_of("100:00:00") == 360_000
    for wrong in ("", "90", "1:00", "1:60:00", "0:00:00", "a:00:00"):
        with pytest.raises(ValidationError, match="expected hours:minutes:seconds"):
            RunConfig.model_validate(altered({"training.time_limit": wrong}))

    def end(changes: dict[str, Any]) -> float | None:
        return ends_at(SimpleNamespace(config=RunConfig.model_validate(altered(changes))))

    assert end({"training.time_limit": "1:00:00"}) == pytest.approx(started_at() + 3600)
    monkeypatch.setattr(os, "environ", {"SLURM_JOB_END_TIME": "1800000000"})
    assert job_end() == 1_800_000_000.0
    assert end({}) == 1_800_000_000.0
    assert end({"training.time_limit": "1:00:00"}) == pytest.approx(started_at() + 3600)
    monkeypatch.setattr(os, "environ", {})
    assert end({}) is None


@pytest.fixture
def watched(tmp_path: Path) -> Callable[..., Watchdog]:
    def make(pulse: Pulse, seconds: float | None) -> Watchdog:
        training = SimpleNamespace(hang_seconds=seconds, run_folder=str(tmp_path))
        ranks = SimpleNamespace(rank=0, world_size=2)
        where = SimpleNamespace(moment="block 3 backward")
        run = SimpleNamespace(config=SimpleNamespace(training=training), ranks=ranks)
        return Watchdog(pulse, where, run)

    return make


def test_how_long_a_phase_may_take(watched: Callable[..., Watchdog], clock: list[float]) -> None:
    pulse = Pulse()
    dog = watched(pulse, 60.0)
    assert dog.limit("start") == 360
    for _ in range(3):
        pulse.enter("step")
        assert dog.limit("step") == 360, "the first steps compile, or build an optimizer"
        clock[0] += 2
    pulse.enter("save")
    assert dog.limit("step") == 60
    assert dog.limit("save") == dog.limit("evaluation") == 360
    for _ in range(3):
        pulse.enter("step")
        clock[0] += 30
    pulse.enter("step")
    assert dog.limit("step") == pytest.approx(10 * 16), "ten times the median of 2 2 2 30 30 30"


def test_a_hang_is_reported_with_stacks(
    watched: Callable[..., Watchdog],
    exits: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(watchdog, "OTHERS", 0.0)
    monkeypatch.setattr(watchdog, "TIMES_OTHERWISE", 1)
    threads = threading.active_count()
    with watched(Pulse(), 0.05):
        wait_for(lambda: bool(exits))
    assert exits[0] == 1
    report = watchdog.report_of(tmp_path, 0).read_text()
    assert "rank 0 hangs: " in report
    assert "block 3 backward" in report
    assert "test_a_hang_is_reported_with_stacks" in report, "the main thread's stack"
    assert "no report from rank 1: stopped, or gone" in capfd.readouterr().err
    wait_for(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize("trouble", [os.mkfifo, os.mkdir], ids=["hangs", "fails"])
def test_a_report_that_cannot_be_written_does_not_keep_the_run(
    watched: Callable[..., Watchdog],
    exits: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    trouble: Callable[[Path], None],
) -> None:
    """Opening a pipe that nobody reads waits for ever, as a dead server's file does."""
    monkeypatch.setattr(watchdog, "OTHERS", 0.1)
    monkeypatch.setattr(watchdog, "TIMES_OTHERWISE", 1)
    trouble(watchdog.report_of(tmp_path, 0))
    with watched(Pulse(), 0.05):
        wait_for(lambda: bool(exits))
    wait_for(lambda: all(thread.name != "watchdog" for thread in threading.enumerate()))
    assert exits[0] == 1
    assert "test_a_report_that_cannot_be_written" in capfd.readouterr().err


STUCK = """
import ctypes, sys
from types import SimpleNamespace as Of
from training import watchdog
from training.pulse import Pulse
watchdog.LAST = 1
training = Of(hang_seconds=0.2, run_folder=sys.argv[1])
run = Of(config=Of(training=training), ranks=Of(rank=0, world_size=1))
with watchdog.Watchdog(Pulse(), Of(moment="step"), run):
    ctypes.CDLL(None).usleep(500_000)
    ctypes.PyDLL(None).sleep(120)  # unlike CDLL, it keeps Python's lock
"""


@pytest.mark.slow
def test_python_that_stands_still_is_ended_too(command: Any, tmp_path: Path) -> None:
    done = command.python("-c", STUCK, str(tmp_path), timeout=60)
    assert done.returncode == 1
    assert 'File "<string>", line 11 in <module>' in done.stderr


def test_no_watchdog_without_a_limit(watched: Callable[..., Watchdog]) -> None:
    threads = threading.active_count()
    with watched(Pulse(), None):
        assert threading.active_count() == threads
