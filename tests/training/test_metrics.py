"""Metrics: the arithmetic of rates, and logs that hold each step once."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training import metrics

CPU = torch.device("cpu")


def test_speed_counts_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    speed = metrics.Speed(CPU, tokens_per_step=1000, flops_per_token=6, peak_flops=24_000.0)
    for _ in range(4):
        clock[0] += 0.5
        speed.steps += 1
    with speed.paused():
        clock[0] += 60.0  # an evaluation
    reading = speed.read(wait_seconds=0.2)
    assert reading["step_seconds"] == pytest.approx(0.5)
    assert reading["tokens_per_second"] == pytest.approx(2000.0)
    assert reading["mfu"] == pytest.approx(2000 * 6 / 24_000)
    assert reading["data_wait_seconds"] == pytest.approx(0.05)
    clock[0] += 2.0
    speed.steps += 1
    again = speed.read(wait_seconds=0.5)
    assert again["step_seconds"] == pytest.approx(2.0)
    assert again["data_wait_seconds"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.float16, 756e12),
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("Unheard of", torch.bfloat16, None),
    ],
)
def test_peaks_by_name(
    name: str, dtype: torch.dtype, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert metrics.device_peak_flops(torch.device("cuda", 0), dtype) == expected


def test_memory_is_the_peak_and_in_bytes() -> None:
    before = metrics.peak_memory_bytes(CPU)
    block = torch.ones(64, 2**20)  # 256 MiB
    grown = metrics.peak_memory_bytes(CPU)
    del block
    assert metrics.peak_memory_bytes(CPU) == pytest.approx(grown, rel=0.01)
    assert before < 2**40
    assert grown >= 256 * 2**20


def fresh_memory(size: int) -> mmap.mmap:
    """Memory from the system: the allocator may hand out what another test has left."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"1" * size)
    return block


def test_alive_memory_is_neither_the_peak_nor_a_file(tmp_path: Path) -> None:
    size = 64 * 2**20
    (tmp_path / "corpus").write_bytes(bytes(size))
    before = metrics.alive_memory_bytes(CPU)
    block = fresh_memory(size)
    assert metrics.alive_memory_bytes(CPU) - before == pytest.approx(size, rel=0.1)
    block.close()
    corpus = np.memmap(tmp_path / "corpus", np.uint8, "r")
    assert corpus.sum() == 0, "every page of the file is resident now"
    assert metrics.alive_memory_bytes(CPU) - before < size // 8


def test_a_growing_list_is_a_leak_and_told_once() -> None:
    watch, kept, told = metrics.LeakWatch(), [], []
    for step in range(40):
        kept.append(fresh_memory(4 * MIB))
        sentence = watch.read(metrics.alive_memory(CPU, {"optimizer_states": 2**30}))
        told += [(step, sentence)] if sentence else []
    # 16 sizes after 5 that are not looked at; the last quarter starts 9 steps above the first.
    ((step, sentence),) = told
    assert step == 20
    assert re.search(r"host memory by (3[5-7]) MiB$", sentence), sentence


def test_what_rises_and_falls_is_no_leak() -> None:
    watch, kept = metrics.LeakWatch(), []
    for _ in range(200):
        kept.append(fresh_memory(4 * MIB))
        assert watch.read(metrics.alive_memory(CPU)) is None
        if len(kept) == 7:
            kept.clear()


MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "leaks"),
    [
        ([100 * MIB] * 10 + [300 * MIB] * 190, False),  # a first save
        ([100 * MIB + n for n in range(100)] + [300 * MIB + n for n in range(100)], False),
        ([100 * MIB + n * MIB // 2 for n in range(200)], True),  # too slow for any 20 lines
        ([80_000 * MIB + n * MIB for n in range(200)], False),  # a thousandth of what there is
        ([80_000 * MIB + n * 10 * MIB for n in range(200)], True),
        ([300 * MIB - n * MIB for n in range(200)], False),
    ],
    ids=["jump", "creeping pages and a jump", "slow", "under 1 %", "over 1 %", "falling"],
)
def test_leaks_by_their_shape(sizes: list[int], leaks: bool) -> None:
    watch = metrics.LeakWatch()
    told = [sentence for size in sizes if (sentence := watch.read({"device memory": size}))]
    assert len(told) == leaks


def line(step: int, loss: float) -> dict[str, float | int | None]:
    return {
        "step": step, "samples": step, "tokens": step, "loss": loss, "lr": 0.1, "grad_norm": None,
        "tokens_per_second": 1.0, "mfu": None, "step_seconds": 1.0, "data_wait_seconds": 0.0,
        "memory_peak_bytes": 1, "memory_alive_bytes": 1,
    }  # fmt: skip


def writer(folder: Path, start: int) -> metrics.MetricsWriter:
    return metrics.MetricsWriter(folder, start_step=start, max_steps=10, enabled=True)


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
    with metrics.MetricsWriter(tmp_path, start_step=0, max_steps=1, enabled=False) as silent:
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
        first.event(4, "something happened")
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
        metrics.drop_lines_from(path, 2)
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
