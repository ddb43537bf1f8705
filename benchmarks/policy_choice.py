"""Whether the policies that "auto" chooses are as fast as the best uniform ones that fit.

    OMP_NUM_THREADS=1 python -m benchmarks.policy_choice --rounds 12 \\
        --output benchmarks/results/policy_choice_CPU_DATE.md

Per model, the uniform policies and the mixtures chosen under caps between the least and the most
memory that the uniform ones need take steps in turns, each in a process of its own.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import (
    Contender,
    Spread,
    Timing,
    interleave,
    parse_options,
    ratio,
    report,
)
from benchmarks.plan_accuracy import PRESET_SWITCHES
from benchmarks.techniques import prepare_training
from configs.schema import RunConfig, changed, load_config
from memory.fit import fit, uniform
from memory.machine import Machine
from memory.planner import Plan, Planner
from memory.policies import Policy, as_names, describe_policies

MODELS: dict[str, dict[str, Any]] = {
    "gpt2, 6 blocks of 256": {"preset": "gpt2", "layers": 6, "width": 256, "heads": 4},
    "neox, 8 blocks of 256": {"preset": "neox", "layers": 8, "width": 256, "heads": 4},
    "llama, 6 blocks of 320": {"preset": "llama", "layers": 6, "width": 320, "heads": 5},
}
CAPS = (0.15, 0.4, 0.65, 0.9)
"""Where between the least and the most that the uniform policies need."""
UNIFORM: tuple[Policy, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Run:
    """Some policies of one model."""

    policies: tuple[Policy, ...]
    planned: Plan
    measured: int
    """Most bytes of torch's allocator."""
    timings: list[Timing]


@dataclass(frozen=True)
class Pair:
    model: str
    cap: int
    chosen: Run
    uniform: list[Run]

    @property
    def best(self) -> Run:
        """Of the uniform ones that fit, as measured, the fastest relative to "none"."""
        fitting = [run for run in self.uniform if run.measured <= self.cap]
        return min(fitting, key=lambda run: ratio(run.timings, self.uniform[0].timings).median)

    @property
    def ratio(self) -> Spread:
        return ratio(self.chosen.timings, self.best.timings)


def config_of(model: dict[str, Any]) -> RunConfig:
    """The quickstart's run at ZeRO 0 in float32 with another model."""
    sizes = {f"model.{key}": value for key, value in model.items()}
    switches = {f"model.{name}": None for name in ("tied_embeddings", *PRESET_SWITCHES)}
    others = {
        "model.vocabulary_size": 2048,
        "training.sequence_length": 256,
        "deepspeed.train_batch_size": None,
        "deepspeed.train_micro_batch_size_per_gpu": 2,
        "deepspeed.bf16.enabled": False,
        "deepspeed.zero_optimization": {"stage": 0},
    }
    return changed(load_config("configs/quickstart.json"), switches | sizes | others)


def pairs_of(name: str, rounds: int) -> list[Pair]:
    """The caps of one model, all of whose policies take steps in turns."""
    config = config_of(MODELS[name])
    planner = Planner(config, Machine(kind="CPU"))
    plans = [planner.plan(uniform(planner, policy)) for policy in UNIFORM]
    peaks = [plan.gpu.peak.total for plan in plans]
    caps = [int(min(peaks) + share * (max(peaks) - min(peaks))) for share in CAPS]
    for cap in caps:
        machine = Machine(kind="CPU", gpu_memory=cap)
        plans.append(fit(Planner(config, machine), alternatives=False).plan)
    measured = runs(config, plans, rounds)
    uniform_runs, mixtures = measured[: len(UNIFORM)], measured[len(UNIFORM) :]
    return [Pair(name, cap, run, uniform_runs) for cap, run in zip(caps, mixtures, strict=True)]


def runs(config: RunConfig, plans: list[Plan], rounds: int) -> list[Run]:
    with tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, Contender] = {}
        for plan in plans:
            label = describe_policies(plan.policies)
            path = Path(folder) / f"{len(contenders)}.json"
            changes = {"activation_checkpointing.policies": as_names(plan.policies)}
            path.write_text(changed(config, changes).model_dump_json(), encoding="utf-8")
            if label not in contenders:
                contenders[label] = Contender(functools.partial(prepare_training, path))
        timings = interleave(contenders, rounds)
        for contender in contenders.values():
            contender.close()
    labels = [describe_policies(plan.policies) for plan in plans]
    return [
        Run(plan.policies, plan, contenders[label].peak_bytes, timings[label])
        for plan, label in zip(plans, labels, strict=True)
    ]


def choice_lines(pairs: list[Pair]) -> list[str]:
    table = [
        "| model | cap MB | chosen | its peak MB | best uniform that fits | time, chosen/best |"
    ]
    table += ["|---|---|---|---|---|---|"]
    for pair in pairs:
        table.append(
            f"| {pair.model} | {pair.cap / 1e6:.1f} | {describe_policies(pair.chosen.policies)} "
            f"| {pair.chosen.measured / 1e6:.1f} | {pair.best.policies[0]} | {pair.ratio} |"
        )
    over = sum(pair.chosen.measured > pair.cap for pair in pairs)
    medians = [pair.ratio.median for pair in pairs]
    return [
        *table,
        f"\n{len(pairs)} pairs, {over} of which needed more than their cap. Of the ratios the "
        f"median is {median(medians):.3f} and the worst {max(medians):.3f}.",
    ]


def cost_lines(pairs: list[Pair]) -> list[str]:
    table = ["\nSteps relative to those of no recomputation, measured and by the cost model:\n"]
    table += ["| model | policy | peak MB | planned MB | time | estimate |"]
    table += ["|---|---|---|---|---|---|"]
    for pair in pairs[:: len(CAPS)]:
        nothing = pair.uniform[0]
        for run in pair.uniform:
            estimate = run.planned.step.total / nothing.planned.step.total
            table.append(
                f"| {pair.model} | {run.policies[0]} | {run.measured / 1e6:.1f} "
                f"| {run.planned.gpu.peak.total / 1e6:.1f} "
                f"| {ratio(run.timings, nothing.timings)} | {estimate:.3f} |"
            )
    return table


def main() -> None:
    options = parse_options(__doc__, rounds=12)
    found = [pair for name in MODELS for pair in pairs_of(name, options.rounds)]
    lines = choice_lines(found) + cost_lines(found)
    report("The choice of policies under a cap", lines, options.output)


if __name__ == "__main__":
    main()
