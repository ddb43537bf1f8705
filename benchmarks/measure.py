"""Timing on machines whose speed swings: alternate, probe, pair, and report medians.

A figure is a ratio of two things that ran in the same round. The rate of a matrix product is probed
before and after each; pairs whose probes differ by more than 15 % are dropped.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from memory.moments import allocator_profile, moments

GEMM_FLOPS = 2 * 1024 * 3072 * 768
LARGEST_PROBE_DIFFERENCE = 0.15


@dataclass(frozen=True)
class Timing:
    seconds: float
    probe: float
    """FLOP/s of the probe around it."""


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    count: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, {self.count} pairs)"


def spread(values: list[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, low, high, len(values))


class Contender:
    """Something to be timed that lives in a process, and so in a heap, of its own."""

    def __init__(self, prepare: Callable[[], Callable[[], Any]]) -> None:
        """`prepare` (a module's function or a partial of one) builds it there."""
        # What the profiler leaves on a heap changes the speed, so the peak is another process's.
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            self.peak_bytes: int = pool.apply(peak_bytes, [prepare])
            """Most bytes of torch's CPU allocator while it is prepared."""
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(prepare, remote), daemon=True)
        self._process.start()
        self._pipe.recv()

    def __call__(self) -> Any:
        self._pipe.send(True)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def _serve(prepare: Callable[[], Callable[[], Any]], pipe: Any) -> None:
    run = prepare()
    pipe.send(True)
    while pipe.recv():
        pipe.send(run())


def interleave(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Timing]]:
    """Run every contender once a round, after two rounds that are not counted."""
    left, right = torch.randn(1024, 3072), torch.randn(3072, 768)

    def probe() -> float:
        start = time.perf_counter()
        for _ in range(4):
            left @ right
        return 4 * GEMM_FLOPS / (time.perf_counter() - start)

    timings: dict[str, list[Timing]] = {name: [] for name in contenders}
    for number in range(rounds + 2):
        for name, run in contenders.items():
            before = probe()
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            if number >= 2:
                timings[name].append(Timing(seconds, (before + probe()) / 2))
    return timings


def ratio(slower: list[Timing], faster: list[Timing]) -> Spread:
    """How many times as long the first takes, over pairs of one round at one machine speed."""
    ratios = [
        a.seconds / b.seconds
        for a, b in zip(slower, faster, strict=True)
        if abs(a.probe / b.probe - 1) <= LARGEST_PROBE_DIFFERENCE
    ]
    return spread(ratios)


def share_of_probe(timings: list[Timing], flops: float) -> Spread:
    return spread([flops / timing.seconds / timing.probe for timing in timings])


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that torch's CPU allocator held at once during a call.

    What was allocated before the call does not count: build the model inside it.
    """
    return max(accumulate(_allocations(run), initial=0))


def kept_bytes(run: Callable[[], Any]) -> int:
    """Bytes allocated in a call of torch code and still held when it returns, its result's too."""
    run()  # buffers that are made once
    return sum(_allocations(run))


def _allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes that a call takes from torch's CPU allocator and (negative) gives back, in order."""
    gc.collect()
    with allocator_profile() as profile:
        kept = run()
    changes = [change for moment in moments(profile) for change in moment.changes]
    del kept
    return changes


def operator_shares_of(prepare: Callable[[], Callable[[], Any]]) -> dict[str, float]:
    """Share of a call's time that each of torch's operators takes, measured in another process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_operator_shares, [prepare])


def _operator_shares(prepare: Callable[[], Callable[[], Any]]) -> dict[str, float]:
    run = prepare()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    seconds = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    total = sum(seconds.values())
    return {key: seconds[key] / total for key in sorted(seconds, key=seconds.get, reverse=True)}  # type: ignore[arg-type]


def parse_options(description: str | None, rounds: int = 20) -> argparse.Namespace:
    """--rounds and --output; the description's first line is the command's help."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def report(title: str, lines: list[str], output: Path | None) -> None:
    """Print a result, and write it with command, date, machine and versions."""
    text = "\n".join([f"# {title}", "", *_origin(), "", *lines, ""])
    print(text)
    if output is not None:
        output.write_text(text, encoding="utf-8")


def _origin() -> list[str]:
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
        cpu = names[0].split(":")[1].strip() if names else cpu
    packages = ("torch", "deepspeed", "transformers")
    return [
        f"- command: `python -m benchmarks.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}`",
        f"- date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        f"- machine: {cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, no GPU used",
        f"- versions: python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in packages),
    ]
