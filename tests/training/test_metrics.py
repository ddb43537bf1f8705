"""Metrics: the arithmetic of rates, memory and leaks."""

from __future__ import annotations

import mmap
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

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
