"""How long a step would take: a model good for comparing settings, not a promise.

Matrix products run at a share of the device's peak, all else at the speed of its memory, and
communication at the speed of the links. Kernels are not overlapped with each other; ZeRO's
communication is overlapped with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memory.activations import Traced
from memory.policies import Policy
from memory.tape import Work


class Speeds(NamedTuple):
    """Of one device of a kind. FLOP/s and bytes/s."""

    half: float
    """Dense peak in bf16 or fp16."""
    single: float
    """Dense peak in float32 (TF32 is off in PyTorch unless asked for)."""
    memory: float
    link: float
    """To each other GPU of the node, one direction."""
    host_link: float
    host_memory: float
    """One rank's share."""


# NVIDIA's data sheets of A100 SXM 80GB, H100 SXM and H200 SXM; PCIe 4.0 and 5.0 x16. A host's
# memory: 200 and 300 GB/s for eight GPUs. Of the CPU's row only the ratio of arithmetic to memory
# matters. It is such that "selective" costs a wide block as much as was measured on two cores in
# benchmarks/results/techniques_CPU_2026-12-01.md: 2.9 % (gpt2) and 5.6 % (llama), here 2.0 and 5.8.
# So little memory speed, as every result is in pages that the kernel first has to provide. In bf16
# the quickstart's step takes half the time there.
SPEEDS = {
    "A100": Speeds(312e12, 19.5e12, 2.04e12, 300e9, 32e9, 25e9),
    "H100": Speeds(989e12, 67e12, 3.35e12, 450e9, 64e9, 37e9),
    "H200": Speeds(989e12, 67e12, 4.8e12, 450e9, 64e9, 37e9),
    "CPU": Speeds(200e9, 100e9, 2e9, 5e9, 10e9, 10e9),
}
ATTAINED = 0.6
"""Share of the peak that large matrix products attain."""


class StepTime(NamedTuple):
    compute: float
    communication: float
    update: float

    @property
    def total(self) -> float:
        return sum(self)


def seconds(work: Work, speeds: Speeds, element: int) -> float:
    peak = speeds.single if element == 4 else speeds.half
    return work.flops / (ATTAINED * peak) + work.moved / speeds.memory


def block_seconds(traced: Traced, policy: Policy, speeds: Speeds, element: int) -> float:
    """One block's forward, backward and recomputation, of one micro-batch."""
    tape = traced.blocks[policy]
    # Offloading is meant to be hidden behind the arithmetic; its traffic is not.
    copies = 2 * traced.hidden / speeds.memory if policy == "offload" else 0
    return (
        copies
        + seconds(tape.forward_work, speeds, element)
        + seconds(tape.backward_work, speeds, element)
    )


def step_time(
    traced: Traced,
    policies: Sequence[Policy],
    section: dict[str, Any],
    *,
    parameters: int,
    data_ranks: int,
    element: int,
    accumulation_element: int,
    speeds: Speeds,
) -> StepTime:
    """One optimizer step of one rank. `parameters` are those it holds before ZeRO cuts them.

    Args:
        element: bytes of one parameter.
        accumulation_element: bytes in which gradients are summed up over micro-batches.
    """
    accumulation = section["gradient_accumulation_steps"]
    outer = [traced.embedding, traced.head]
    passes = sum(
        seconds(tape.forward_work, speeds, element) + seconds(tape.backward_work, speeds, element)
        for tape in outer
    )
    passes += sum(block_seconds(traced, policy, speeds, element) for policy in policies)
    zero = section["zero_optimization"]
    stage = zero.get("stage", 0)
    share = parameters / (data_ranks if stage else 1)
    offloads = {
        what: (zero.get(f"offload_{what}") or {}).get("device", "none") != "none"
        for what in ("optimizer", "param")
    }
    communication = _communication(stage, accumulation, parameters * element, data_ranks, speeds)
    if stage == 3 and offloads["param"]:  # this rank's share, for each forward and each backward
        communication += 2 * accumulation * share * element / speeds.host_link
    if stage in (1, 2) and offloads["optimizer"] and accumulation_element == element:
        # async_accumulate_grad_in_cpu_via_gpu: each micro-batch's share goes to the host, the sum
        # so far comes from there first. Float32 sums stay on the GPU.
        communication += 2 * (accumulation - 1) * share * element / speeds.host_link
    return StepTime(
        compute=accumulation * passes,
        communication=communication,
        update=_update(share, element, offloads["optimizer"], speeds),
    )


def _communication(stage: int, accumulation: int, size: int, ranks: int, speeds: Speeds) -> float:
    """Bytes through each rank's link, by ring collectives: (ranks - 1) / ranks of the whole each.

    Stages 0 and 1 reduce gradients once a step, 2 and 3 once a micro-batch; stage 3 also gathers
    parameters for each forward and each backward (arXiv 1910.02054, section 7).
    """
    passes = {0: 2, 1: 2, 2: accumulation + 1, 3: 3 * accumulation}[stage]
    return passes * size * (ranks - 1) / ranks / speeds.link


def _update(share: float, element: int, offloads: bool, speeds: Speeds) -> float:
    """Adam reads gradient, master weight and two moments, and writes the last three."""
    traffic = share * (4 * 4 + 3 * 4 + element)
    if not offloads:
        return traffic / speeds.memory
    return traffic / speeds.host_memory + 2 * share * element / speeds.host_link
