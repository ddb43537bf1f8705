"""The plan's peak against torch's allocator in real training, on one and on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_events import measure
from benchmarks.plan_accuracy import SETUP_MOMENTS, Case, base_config, case, cases, step_peak
from memory.machine import Machine
from memory.planner import Plan, Planner
from memory.policies import block_policies

# Each model, policy and stage on one rank and on two, offloads, accumulation and bf16.
CHOSEN = (
    "gpt2 tied, none, ZeRO 0, 1 ranks",
    "llama GQA, selective, ZeRO 1, 1 ranks",
    "gpt2 tied, full, ZeRO 2, 1 ranks",
    "llama GQA, mixed, ZeRO 3, 1 ranks",
    "neox untied, full, optimizer offloaded, ZeRO 2, 1 ranks",
    "llama GQA, none, bf16, ZeRO 1, 1 ranks",
    "neox untied, selective, ZeRO 0, 2 ranks",
    "gpt2 dropout, full, ZeRO 1, 2 ranks",
    "neox untied, mixed, ZeRO 2, 2 ranks",
    "gpt2 dropout, none, ZeRO 3, 2 ranks",
    "neox untied, full, optimizer and param offloaded, ZeRO 3, 2 ranks",
    "gpt2 tied, none, accumulation 2, ZeRO 2, 2 ranks",
    "llama GQA, none, bf16, ZeRO 2, 2 ranks",
)
TOLERANCE = 0.01
"""The worst of the 56 runs of benchmarks/plan_accuracy.py was off by 0.05 %. In bf16 a CPU's matrix
products borrow room that the plan knows only roughly."""
MASKED = {
    "gpt2 tied, none": ("gpt2 tied", 0, {}),
    "llama GQA, selective": ("llama GQA", 2, {"selective": "all"}),
    "neox untied, full": ("neox untied", 3, {"full": "all"}),
}
"""Runs with masked documents: model, ZeRO stage and policies."""
LENGTH, MICRO_BATCH = 256, 4


@pytest.fixture(scope="module")
def masked(corpus_of_documents: Path) -> dict[str, Case]:
    base = base_config()
    settings = {
        "data.train": [{"path": str(corpus_of_documents / "train")}],
        "data.validation": str(corpus_of_documents / "validation"),
        "data.document_masking": True,
        "training.sequence_length": LENGTH,
        "deepspeed.train_micro_batch_size_per_gpu": MICRO_BATCH,
    }
    return {
        name: case(
            base, name, model, {"stage": stage}, 1,
            {**settings, "activation_checkpointing.policies": policies},
        )
        for name, (model, stage, policies) in MASKED.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def measured(masked: dict[str, Case]) -> dict[str, int]:
    """Bytes at the peak of the steps."""
    configs = {entry.name: entry for entry in cases(base_config())}
    found = {}
    for ranks in (1, 2):
        chosen = {name: configs[name].config for name in CHOSEN if configs[name].ranks == ranks}
        if ranks == 1:
            chosen |= {name: entry.config for name, entry in masked.items()}
        for name, run in measure(chosen, ranks).items():
            found[name] = max(m.peak for m in run if m.name not in SETUP_MOMENTS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_plan_meets_the_allocator(name: str, measured: dict[str, int]) -> None:
    (entry,) = [each for each in cases(base_config()) if each.name == name]
    peak = step_peak(plan_of(entry, None).gpu.timeline).total
    assert peak == pytest.approx(measured[name], rel=TOLERANCE)
    # What was measured not to fit by more than the tolerance is not planned to.
    assert not plan_of(entry, int(measured[name] * (1 - TOLERANCE))).fits


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED)
def test_plan_counts_the_mask_once(
    name: str, masked: dict[str, Case], measured: dict[str, int]
) -> None:
    peak = step_peak(plan_of(masked[name], None).gpu.timeline).total
    assert peak == pytest.approx(measured[name], rel=TOLERANCE / 10)
    assert TOLERANCE / 2 * peak < 4 * MICRO_BATCH * LENGTH**2, "a mask too small to be missed"


def plan_of(entry: Case, memory: int | None) -> Plan:
    planner = Planner(entry.config, Machine(gpus=entry.ranks, kind="CPU", gpu_memory=memory))
    settings, layers = entry.config.activation_checkpointing, entry.config.model.layers
    return planner.plan(block_policies(settings, layers, "cpu"))
