"""What a run measures of itself: speed, MFU, memory, and whether that leaks."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

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
