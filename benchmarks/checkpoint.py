"""What a save costs the step loop, how fast it writes, and how fast it is verified.

    python -m benchmarks.checkpoint [--gib 1] [--pairs 20] [--folder DIR]

States of `gib` GiB, in tensors of 64 MiB, are saved through training.writer in turn in the
foreground (what the loop waits for: writing, checksum and fsync) and in the background (what it
waits for: the copy). `dd` with conv=fsync writes as many bytes to the same disk beside each pair.
Medians and quartiles of the ratios within a pair; disks and neighbours make single times worthless.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from training import store
from training.writer import Writer

PIECE = 64 << 20


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def stage(writer: Writer, state: Any, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    writer.create(None)
    writer.save(state, str(folder / "states.pt"))
    writer.commit(None)


def dd(folder: Path, size: int) -> None:
    target, source = folder / "dd", folder / "source"
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    assert target.stat().st_size == size
    target.unlink()


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of states")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--folder", help="on the disk to measure")
    options = parser.parse_args()
    pieces = max(1, int(options.gib * 2**30) // PIECE)
    size = pieces * PIECE
    state = {f"weight{i}": torch.randn(PIECE // 4) for i in range(pieces)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), state, size, options.pairs)


def measure(folder: Path, state: dict[str, torch.Tensor], size: int, pairs: int) -> None:
    torch.save(state, folder / "source")
    with (folder / "source").open("r+b") as file:
        file.truncate(size)
    here, aside = Writer(copies=False), Writer(copies=True)
    target = folder / "checkpoint"
    first = seconds(lambda: stage(aside, state, target))
    stalls, throughputs, speeds, raw, copies = [], [], [], [], []
    for _ in range(pairs):
        written: dict[str, store.Written] = {}
        stage(here, state, target)
        foreground = seconds(lambda: written.update(here.write()))  # noqa: B023
        copy = seconds(lambda: stage(aside, state, target))
        plain = seconds(lambda: dd(folder, size))
        path = target / "states.pt"
        torch.save(state, path)
        digest = seconds(lambda: store.checksum(path))  # noqa: B023
        copies.append(copy)
        stalls.append(copy / foreground)
        throughputs.append(plain / foreground)
        speeds.append(size / digest / 1e9)
        raw.append(size / plain / 1e9)
    print(f"{size / 2**30:.2f} GiB, {pairs} pairs, torch {torch.__version__}; median (quartiles)")
    print(f"stall of a background save, s            {quartiles(copies)}; the first {first:.3g}")
    print(f"  as a share of a foreground save        {quartiles(stalls)}")
    print(f"throughput as a share of dd's            {quartiles(throughputs)}")
    print(f"dd with fsync, GB/s                      {quartiles(raw)}")
    print(f"verification, GB/s of one process        {quartiles(speeds)}")


if __name__ == "__main__":
    main()
