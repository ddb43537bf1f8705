"""The hardware a plan is for, described rather than found: a laptop plans for a cluster."""

from __future__ import annotations

import re
from typing import NamedTuple

from configs.deepspeed import Hardware

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Machine(NamedTuple):
    gpus: int = 1
    """Ranks, over all nodes."""
    gpus_per_node: int = 8
    gpu_memory: int | None = None
    """Bytes of one GPU; None: unknown, everything fits."""
    host_memory: int | None = None
    """Bytes of one node's main memory."""
    kind: str = "H100"
    """A row of memory.cost.SPEEDS. On "CPU" a rank's device is the host itself."""
    bf16: bool = True
    """Whether a GPU multiplies bfloat16 matrices; what "auto" as precision depends on."""

    @property
    def device(self) -> str:
        return "cpu" if self.kind == "CPU" else "cuda"

    @property
    def hardware(self) -> Hardware:
        return Hardware(self.gpus, self.device, self.bf16 and self.device == "cuda")

    @property
    def ranks_per_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)


def parse_bytes(text: str) -> int:
    """Bytes of "80GiB", "24 GB" or a plain number.

    Raises:
        ValueError: another unit, or no number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r}: expected a size such as 80GiB, 24GB or 1TiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def show_bytes(size: float) -> str:
    """Such as "1.25 GiB", in the largest unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
