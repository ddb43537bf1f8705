"""The plan's peak against the measured one, and against what else estimates memory.

    python -m benchmarks.plan_accuracy --output benchmarks/results/plan_accuracy_CPU_DATE.md

Every configuration is trained for real, three steps through the project's engine, on one rank and
on two. Measured is the most that torch's allocator held from the first forward pass on; on a CPU
that includes what is offloaded to the host.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.measure import report
from benchmarks.memory_events import measure
from configs.schema import RunConfig, changed, load_config
from memory.ledger import Sample
from memory.machine import Machine
from memory.planner import Planner
from memory.policies import Policy, block_policies
from memory.recompute import apply_policies
from model.gpt import GPT

SETUP_MOMENTS = ("before", "build", "initialize", "ready", "start", "initialisation")
MODELS: dict[str, dict[str, Any]] = {
    "gpt2 tied": {"preset": "gpt2"},
    "neox untied": {"preset": "neox", "tied_embeddings": False},
    "llama GQA": {"preset": "llama", "kv_heads": 2, "heads": 4},
    "gpt2 dropout": {"preset": "gpt2", "dropout": 0.1, "tied_embeddings": False},
}
PRESET_SWITCHES = (
    "norm", "position", "rotary_fraction", "mlp", "parallel_residual", "biases", "kv_heads",
    "mlp_width", "tied_embeddings",
)  # fmt: skip
POLICIES: dict[str, dict[str, str]] = {
    "none": {},
    "selective": {"selective": "all"},
    "full": {"full": "all"},
    "mixed": {"full": "first-2", "selective": "range-2-3"},
}
TORCH_ADAM = {"deepspeed.optimizer.params.torch_adam": True}
OFFLOAD = {"device": "cpu"}


@dataclass(frozen=True)
class Case:
    name: str
    config: RunConfig
    ranks: int


@dataclass(frozen=True)
class Row:
    name: str
    measured: int
    planned: int
    moment: str
    deepspeed: int
    megatron: int
    tracker: int

    def errors(self) -> list[float]:
        """Of the plan, DeepSpeed's estimate, Megatron-LM's formula and MemTracker."""
        figures = (self.planned, self.deepspeed, self.megatron, self.tracker)
        return [figure / self.measured - 1 for figure in figures]


def cases(base: RunConfig) -> Iterator[Case]:
    """Policies by ZeRO stages by ranks, with models in turn; then offload, accumulation, bf16."""
    models = list(MODELS)
    for ranks in (1, 2):
        for stage in range(4):
            for number, (name, policies) in enumerate(POLICIES.items()):
                model = models[(number + stage) % len(models)]
                changes: dict[str, Any] = {"activation_checkpointing.policies": policies}
                yield case(base, f"{model}, {name}", model, {"stage": stage}, ranks, changes)
        for stage, offload in ((1, ("optimizer",)), (2, ("optimizer",)), (3, ("optimizer",)),
                               (3, ("optimizer", "param"))):  # fmt: skip
            zero = {"stage": stage} | {f"offload_{what}": OFFLOAD for what in offload}
            name = f"neox untied, full, {' and '.join(offload)} offloaded"
            changes = {**TORCH_ADAM, "activation_checkpointing.policies": {"full": "all"}}
            yield case(base, name, "neox untied", zero, ranks, changes)
        for stage in range(4):
            changes = {"deepspeed.gradient_accumulation_steps": 2}
            yield case(
                base, "gpt2 tied, none, accumulation 2", "gpt2 tied", {"stage": stage}, ranks,
                changes,
            )  # fmt: skip
            bf16 = {"deepspeed.bf16.enabled": True}
            yield case(base, "llama GQA, none, bf16", "llama GQA", {"stage": stage}, ranks, bf16)


def case(
    base: RunConfig,
    name: str,
    model: str,
    zero: dict[str, Any],
    ranks: int,
    changes: dict[str, Any],
) -> Case:
    # The base has every switch filled in; the case's own preset is to fill them in anew.
    shape: dict[str, Any] = {f"model.{key}": None for key in PRESET_SWITCHES}
    shape |= {f"model.{key}": value for key, value in MODELS[model].items()}
    config = changed(base, {**shape, "deepspeed.zero_optimization": zero, **changes})
    return Case(f"{name}, ZeRO {zero['stage']}, {ranks} ranks", config, ranks)


def base_config() -> RunConfig:
    """The quickstart's run with a smaller model whose positions any preset can have."""
    model = {"layers": 4, "width": 192, "heads": 6, "vocabulary_size": 2048}
    sizes = {f"model.{key}": value for key, value in model.items()}
    batch = {
        "deepspeed.train_batch_size": None,
        "deepspeed.train_micro_batch_size_per_gpu": 2,
        "deepspeed.bf16.enabled": False,
    }
    return changed(
        load_config("configs/quickstart.json"),
        {**sizes, **batch, "training.sequence_length": 128},
    )


def rows(found: list[Case]) -> tuple[list[Row], float, float]:
    """Rows, and the median seconds of a plan whose block is traced and of MemTracker."""
    measured: dict[str, int] = {}
    for ranks in (1, 2):
        configs = {entry.name: entry.config for entry in found if entry.ranks == ranks}
        for name, moments in measure(configs, ranks).items():
            measured[name] = max(m.peak for m in moments if m.name not in SETUP_MOMENTS)
    result, planning, tracking = [], [], []
    for entry in found:
        planner = Planner(entry.config, Machine(gpus=entry.ranks, kind="CPU"))
        layers = entry.config.model.layers
        policies = block_policies(entry.config.activation_checkpointing, layers, "cpu")
        planner.plan(policies)  # traces the block
        started = time.perf_counter()
        plan = planner.plan(policies)
        planning.append(time.perf_counter() - started)
        started = time.perf_counter()
        tracker = tracked_peak(entry.config, planner, policies)
        tracking.append(time.perf_counter() - started)
        peak = step_peak(plan.gpu.timeline)
        result.append(
            Row(
                entry.name, measured[entry.name], peak.total, peak.moment,
                deepspeed_estimate(planner), megatron_estimate(planner, policies), tracker,
            )
        )  # fmt: skip
    return result, statistics.median(planning), statistics.median(tracking)


def step_peak(timeline: tuple[Sample, ...]) -> Sample:
    samples = [sample for sample in timeline if sample.moment not in SETUP_MOMENTS]
    return max(samples, key=lambda sample: sample.total)


def deepspeed_estimate(planner: Planner) -> int:
    """DeepSpeed's own helpers: GPU and this rank's share of the host. They know no activations."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    zero, ranks = planner.section["zero_optimization"], planner.machine.gpus
    sizes = [parameter.size for parameter in planner.setup.parameters]
    offload = {key: bool(zero.get(f"offload_{key}")) for key in ("optimizer", "param")}
    if zero["stage"] < 3:
        host, gpu = zero2(sum(sizes), ranks, 1, cpu_offload=offload["optimizer"])
    else:
        host, gpu, _ = zero3(
            sum(sizes), max(sizes), ranks, 1,
            cpu_offload=offload["optimizer"], cpu_offload_params=offload["param"],
        )  # fmt: skip
    return gpu + (host // ranks if offload["optimizer"] else 0)


def megatron_estimate(planner: Planner, policies: tuple[Policy, ...]) -> int:
    """Model states of 18 bytes a parameter, optimizer cut over ranks, and s b h (34 + 5 a s / h).

    Narayanan et al. (arXiv 2104.04473) and Korthikanti et al. (arXiv 2205.05198, equations 1 and
    2, and 2 s b h for a block recomputed in full), for 16 bits; doubled in float32.
    """
    model, training = planner.config.model, planner.config.training
    parameters = sum(parameter.size for parameter in planner.setup.parameters)
    cut = planner.machine.gpus if planner.section["zero_optimization"]["stage"] else 1
    states = parameters * (6 + 12 / cut)
    s, h, a = training.sequence_length, model.width, model.heads
    b = planner.section["train_micro_batch_size_per_gpu"]
    per_policy = {"none": 34 + 5 * a * s / h, "selective": 34, "full": 2}
    activations = sum(s * b * h * per_policy[policy] for policy in policies)
    return int(states + activations * planner.setup.element / 2)


def tracked_peak(config: RunConfig, planner: Planner, policies: tuple[Policy, ...]) -> int:
    """torch's MemTracker on two plain steps with AdamW under fake tensors: no ZeRO, no offload."""
    training = config.training
    shape = planner.section["train_micro_batch_size_per_gpu"], training.sequence_length
    before = torch.get_default_dtype()
    torch.set_default_dtype(planner.dtype)
    with FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
        model = GPT(config.model, loss=training.loss)
        apply_policies(model, policies)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(shape, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, tokens)
        with tracker:
            for _ in range(2):
                model(tokens, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        peaks = tracker.get_tracker_snapshot("peak")
    torch.set_default_dtype(before)
    return int(peaks[torch.device("cpu")]["Total"])


def lines(found: list[Row], planning: float, tracking: float) -> list[str]:
    table = ["| run | measured MB | plan | DeepSpeed | Megatron-LM | MemTracker | plan's moment |"]
    table += ["|---|---|---|---|---|---|---|"]
    for row in found:
        shown = " | ".join(f"{error:+.2%}" for error in row.errors())
        table.append(f"| {row.name} | {row.measured / 1e6:.2f} | {shown} | {row.moment} |")
    names = ("plan", "DeepSpeed's estimate", "Megatron-LM's formula", "MemTracker")
    table += ["", "| estimate | median error | worst | lowest |", "|---|---|---|---|"]
    for index, name in enumerate(names):
        errors = [row.errors()[index] for row in found]
        sizes = [abs(error) for error in errors]
        table.append(
            f"| {name} | {statistics.median(sizes):.2%} | {max(sizes):.2%} | {min(errors):+.2%} |"
        )
    worst = max(found, key=lambda row: abs(row.errors()[0]))
    table += ["", f"{len(found)} runs. The plan's worst: {worst.name}, {worst.errors()[0]:+.2%}."]
    table.append(
        f"A plan takes {planning * 1e3:.1f} ms once its block is traced, MemTracker "
        f"{tracking * 1e3:.0f} ms: {tracking / planning:.0f} times as long (medians)."
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found, planning, tracking = rows(list(cases(base_config())))
    report("Accuracy of the memory plan", lines(found, planning, tracking), options.output)


if __name__ == "__main__":
    main()
