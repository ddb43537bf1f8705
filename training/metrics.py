"""What a run reports: speed, MFU and memory, to the console, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from training.store import naming, write_durably

Line = Mapping[str, float | int | None]

# Dense peak FLOP/s (bf16 or fp16 with float32 accumulation, float32), from NVIDIA's data sheets.
# A name is found by substring, so the more specific one stands first.
DEVICE_PEAKS: dict[str, tuple[float, float]] = {
    "A100": (312e12, 19.5e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "L40S": (362e12, 91.6e12),
    "RTX 4090": (165.2e12, 82.6e12),
}


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that MFU is measured against; None for a GPU that is not in the table.

    A CPU has no useful data sheet: there it is the rate of float32 matrix products, measured now.
    """
    if device.type == "cpu":
        return measured_gemm_flops()
    name = torch.cuda.get_device_name(device)
    for known, (half, single) in DEVICE_PEAKS.items():
        if known in name:
            return single if dtype == torch.float32 else half
    return None


def measured_gemm_flops(repeats: int = 20) -> float:
    """Median FLOP/s of a [1024, 3072] x [3072, 768] float32 product on this process's threads."""
    left, right = torch.randn(1024, 3072), torch.randn(3072, 768)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - start)
    return 2 * 1024 * 3072 * 768 / sorted(seconds)[repeats // 2]


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the device's allocator; on a CPU, the peak resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def alive_memory_bytes(device: torch.device) -> int:
    """What the device's allocator has given out; on a CPU, the process's own resident memory.

    Own: without pages of files, which grow with every sample that is read of a mapped corpus.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        return peak_memory_bytes(device)  # only Linux tells more
    resident, shared = (int(pages) for pages in statistics.read_text().split()[1:3])
    return (resident - shared) * resource.getpagesize()


class LeakWatch:
    """Finds memory that grows slowly and never comes back, over a run of any length.

    The sizes of the whole run, thinned out, are cut into four quarters. A leak is where each lies
    above the one before: a single jump (a first evaluation, a first save) parts two of them only,
    and what rises and falls overlaps.
    """

    WARM_UP = 5
    """Logged lines that are not looked at: allocators and caches fill."""
    FEWEST = 16
    """Sizes, before anything is said."""

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = {}
        self._lines = -self.WARM_UP
        self._stride = 1
        self._told = False

    def read(self, sizes: Mapping[str, int]) -> str | None:
        """Take the sizes between two steps, by kind; a sentence, once, where some of them leak.

        Kinds are what may grow by itself: see `alive_memory`.
        """
        self._lines += 1
        if self._told or self._lines <= 0 or self._lines % self._stride:
            return None
        for kind, size in sizes.items():
            self.sizes.setdefault(kind, []).append(size)
        grown = {kind: growth(history) for kind, history in self.sizes.items()}
        if len(next(iter(self.sizes.values()))) == 2 * self.FEWEST:
            self.sizes = {kind: history[1::2] for kind, history in self.sizes.items()}
            self._stride *= 2
        found = [f"{kind} by {size / 2**20:,.0f} MiB" for kind, size in grown.items() if size]
        if not found:
            return None
        self._told = True
        return f"suspected leak: alive between steps grows steadily, {', '.join(found)}"


def growth(sizes: Sequence[int]) -> int:
    """Bytes that the last quarter lies above the first, if it is a steady rise; otherwise 0."""
    quarter = len(sizes) // 4
    if len(sizes) < LeakWatch.FEWEST:
        return 0
    parts = [sizes[i * quarter : (i + 1) * quarter] for i in range(4)]
    total = min(parts[3]) - max(parts[0])
    gaps = [min(later) - max(earlier) for earlier, later in pairwise(parts)]
    # Of a straight rise each gap is about a tenth of the whole.
    steady = min(gaps) > total / 30
    return total if steady and total > max(0.01 * max(parts[0]), 16 * 2**20) else 0


def alive_memory(device: torch.device, held: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bytes alive now by kind: of the device's allocator, of the process in main memory.

    `held` is the device's by category (training.out_of_memory.bytes_by_category), where wanted.
    """
    kinds = {"host memory": alive_memory_bytes(torch.device("cpu"))}
    if device.type == "cuda":
        kinds = {"device memory": alive_memory_bytes(device), **kinds}
    return {**kinds, **{kind.replace("_", " "): size for kind, size in (held or {}).items()}}


class Speed:
    """Rates of training steps, without the evaluations and saves between them.

    Steps are only queued on an accelerator: time is read after waiting for the device, and that
    happens when a line is logged, not at every step.

    Args:
        tokens_per_step: over all ranks.
        flops_per_token: of the model, see model/flops.py.
        peak_flops: FLOP/s of all ranks' devices together; None where unknown.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        tokens_per_step: int,
        flops_per_token: int,
        peak_flops: float | None,
    ) -> None:
        self.device = device
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.steps = 0
        """Steps since the last reading; the training loop counts them up."""
        self._elapsed = 0.0
        self._wait_seconds = 0.0
        self._started = time.perf_counter()

    def _stop(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._elapsed += time.perf_counter() - self._started

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._stop()
        yield
        self._started = time.perf_counter()

    def read(self, wait_seconds: float) -> dict[str, float | int | None]:
        """Means per step since the last reading; `wait_seconds` is the loader's total."""
        self._stop()
        step_seconds = self._elapsed / self.steps
        rate = self.tokens_per_step / step_seconds
        waited = (wait_seconds - self._wait_seconds) / self.steps
        self.steps, self._elapsed, self._wait_seconds = 0, 0.0, wait_seconds
        self._started = time.perf_counter()
        return {
            "tokens_per_second": rate,
            "mfu": rate * self.flops_per_token / self.peak_flops if self.peak_flops else None,
            "step_seconds": step_seconds,
            "data_wait_seconds": waited,
            "memory_peak_bytes": peak_memory_bytes(self.device),
            "memory_alive_bytes": alive_memory_bytes(self.device),
        }


class MetricsWriter:
    """Writes lines on rank 0; on other ranks it does nothing.

    Opened at a resumed step, it drops what an interrupted run had logged beyond it. Each method
    raises OSError, naming the file, where it cannot be written.
    """

    def __init__(self, run_folder: Path, *, start_step: int, max_steps: int, enabled: bool) -> None:
        self.enabled = enabled
        if not enabled:
            return
        # Imported here: only rank 0 pays for it.
        from torch.utils.tensorboard import SummaryWriter

        self._path, self._events = run_folder / "metrics.jsonl", run_folder / "tensorboard"
        first_step = start_step + 1 if start_step else 0
        drop_lines_from(self._path, first_step)
        self._lines = self._path.open("a", encoding="utf-8")
        with naming(self._events):
            self._tensorboard = SummaryWriter(
                str(self._events), purge_step=first_step, flush_secs=10
            )
        self._max_steps = max_steps
        console = Console(soft_wrap=True)
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=max_steps, completed=start_step)

    def training(self, line: Line) -> None:
        """One optimizer step: step, samples, tokens, loss, lr, grad_norm and what Speed reads."""
        self._write(line)
        if self.enabled:
            self._print(console_line(line, self._max_steps))

    def evaluation(self, step: int, losses: float | Mapping[str, float]) -> None:
        """The validation loss, or that of each set by name; their mean is then the validation loss.

        A single set has the name "".
        """
        if not isinstance(losses, Mapping):
            losses = {"": losses}
        loss = sum(losses.values()) / len(losses)
        named = {f"validation_loss/{name}": value for name, value in losses.items() if name}
        self._write({"step": step, "validation_loss": loss, **named})
        if self.enabled:
            perplexity = math.exp(min(loss, 700))
            each = ", ".join(f"{name} {value:.4f}" for name, value in losses.items() if name)
            self._print(
                f"step {step:>6}  validation loss {loss:.4f}"
                f"{f', the mean of {each}' if each else ''}  perplexity {perplexity:,.1f}"
            )

    def event(self, step: int, event: str) -> None:
        """Something that happened at a step, in words."""
        if self.enabled:
            self._append({"step": step, "event": event})
            self._print(f"step {step:>6}  {event}")

    def step(self, step: int) -> None:
        """Move the progress bar."""
        if self.enabled:
            self._bar.update(self._task, completed=step)

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def _write(self, line: Line) -> None:
        if not self.enabled:
            return
        # NaN and infinity are no JSON.
        finite = {k: None if v is None or not math.isfinite(v) else v for k, v in line.items()}
        self._append(finite)
        with naming(self._events):
            for name, value in line.items():
                if name != "step" and value is not None:
                    group = "evaluation" if name.startswith("validation_loss") else "training"
                    self._tensorboard.add_scalar(f"{group}/{name}", value, line["step"])
            self._tensorboard.flush()

    def _append(self, line: Mapping[str, Any]) -> None:
        with naming(self._path):
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()

    def sync(self) -> None:
        """Onto the disk, before a checkpoint that continues behind these lines."""
        if self.enabled:
            with naming(self._path):
                os.fsync(self._lines.fileno())

    def close(self) -> None:
        if self.enabled:
            self._bar.stop()
            with naming(self._path):
                self._lines.close()
            with naming(self._events):
                self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drop_lines_from(path: Path, step: int) -> None:
    """Drop the lines of this step and later ones, and what a crash left of a line.

    The file is replaced: a crash meanwhile leaves the old one.
    """
    if not path.exists():
        return
    kept = [
        text
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        if text.endswith("\n") and _step_of(text) < step
    ]
    write_durably(path, "".join(kept))


def _step_of(text: str) -> float:
    """Infinite for what is not a line of ours."""
    try:
        return int(json.loads(text)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def console_line(line: Mapping[str, Any], max_steps: int) -> str:
    mfu = "" if line["mfu"] is None else f"  mfu {line['mfu']:.1%}"
    norm = "" if line["grad_norm"] is None else f"  grad norm {line['grad_norm']:.3f}"
    remaining = int((max_steps - line["step"]) * line["step_seconds"])
    return (
        f"step {line['step']:>6}/{max_steps}  loss {line['loss']:.4f}  lr {line['lr']:.2e}{norm}"
        f"  {line['tokens_per_second']:,.0f} tokens/s{mfu}"
        f"  memory {line['memory_peak_bytes'] / 2**30:.2f} GiB"
        f"  left {remaining // 3600}:{remaining // 60 % 60:02}:{remaining % 60:02}"
    )
