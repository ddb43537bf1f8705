"""Logs that hold each step once, in metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.tracking import Event, MetricsWriter, drop_lines_from


def line(step: int, loss: float) -> dict[str, float | int | None]:
    return {
        "step": step, "samples": step, "tokens": step, "loss": loss, "lr": 0.1, "grad_norm": None,
        "tokens_per_second": 1.0, "mfu": None, "step_seconds": 1.0, "data_wait_seconds": 0.0,
        "memory_peak_bytes": 1, "memory_alive_bytes": 1,
    }  # fmt: skip


def writer(folder: Path, start: int) -> MetricsWriter:
    return MetricsWriter(folder, start_step=start, max_steps=10, enabled=True)


def test_steps_after_a_resume_are_neither_doubled_nor_stale(tmp_path: Path) -> None:
    exact = 0.1 + 0.2
    with writer(tmp_path, 0) as first:
        for step in range(1, 9):
            first.training(line(step, exact))
        first.evaluation(5, 2.0)
        first.evaluation(8, 3.0)
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 9, "lo')
    with writer(tmp_path, 5) as second:
        for step in range(6, 11):
            second.training(line(step, 7.0))
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["loss"]) for entry in lines if "loss" in entry] == [
        *((step, exact) for step in range(1, 6)),
        *((step, 7.0) for step in range(6, 11)),
    ], "full precision, each step once"
    assert [entry["step"] for entry in lines if "validation_loss" in entry] == [5]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("training/loss")]
    assert [step for step, _ in found] == list(range(1, 11))
    assert [value for _, value in found[5:]] == [7.0] * 5


def test_a_run_without_a_checkpoint_starts_its_log_over(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        with writer(tmp_path, 0) as open_writer:
            open_writer.evaluation(0, loss)
            open_writer.training(line(1, loss))
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry.get("loss")) for entry in lines] == [(0, None), (1, 2.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("evaluation/validation_loss")] == [2.0]


def test_each_validation_set_has_its_own_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with writer(tmp_path, 0) as open_writer:
        open_writer.evaluation(4, {"code": 1.0, "web": 2.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 4, "validation_loss": 1.75, "validation_loss/code": 1.0,
        "validation_loss/web": 2.5,
    }  # fmt: skip
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == [
        "evaluation/validation_loss",
        "evaluation/validation_loss/code",
        "evaluation/validation_loss/web",
    ]
    shown = capsys.readouterr().out
    assert "validation loss 1.7500, the mean of code 1.0000, web 2.5000" in shown


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    with writer(tmp_path, 0) as open_writer:
        open_writer.training(line(1, 1.0))
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert [event.step for event in events.Scalars("training/loss")] == [1]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, start_step=0, max_steps=1, enabled=False) as silent:
        silent.training(line(1, 1.0))
        silent.evaluation(1, 1.0)
        silent.step(1)
    assert not list(tmp_path.iterdir())


def test_a_diverged_loss_can_still_be_printed(tmp_path: Path) -> None:
    with writer(tmp_path, 0) as open_writer:
        open_writer.training(line(1, math.nan))
        open_writer.evaluation(1, math.inf)


def test_a_log_that_was_torn_anywhere_is_mended(tmp_path: Path) -> None:
    with writer(tmp_path, 0) as first:
        for step in range(1, 9):
            first.training(line(step, 1.0))
        first.event(4, Event("skipped", "something happened"))
    path = tmp_path / "metrics.jsonl"
    # A line within, as power that fails leaves it, and the end of both files.
    lines = path.read_bytes().splitlines(keepends=True)
    lines[6] = b"\0" * 20 + b'\xff"}\n'
    path.write_bytes(b"".join(lines) + b'{"step": 9, "los\xc3')
    (events_file,) = (tmp_path / "tensorboard").iterdir()
    events_file.write_bytes(events_file.read_bytes()[:-25])
    with writer(tmp_path, 6) as second:
        for step in range(7, 11):
            second.training(line(step, 2.0))
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert [entry["step"] for entry in found] == [1, 2, 3, 4, 5, 6, 4, 7, 8, 9, 10]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("training/loss")] == list(range(1, 11))


def test_a_log_is_whole_when_its_mending_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def fail(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        drop_lines_from(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_what_is_not_finite_is_no_number_in_the_log(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with writer(tmp_path, 0) as open_writer:
        open_writer.training(line(1, math.nan))
        open_writer.evaluation(1, math.inf)
    text = (tmp_path / "metrics.jsonl").read_text()
    found = [json.loads(entry, parse_constant=refuse) for entry in text.splitlines()]
    assert found[0]["loss"] is None
    assert found[1]["validation_loss"] is None


@pytest.mark.parametrize(("logged", "named"), [(10, "metrics.jsonl"), (0, "tensorboard")])
def test_a_file_without_room_is_named(tmp_path: Path, logged: int, named: str) -> None:
    """TensorBoard's file grows faster; the other one has lines of an earlier life."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0, "event": "{"x" * 350}"}}\n' * logged)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))

    def log() -> None:
        with writer(tmp_path, 1) as full:
            for step in range(1, 100):
                full.training(line(step, 1.0))

    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/{named}'"):
            log()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
