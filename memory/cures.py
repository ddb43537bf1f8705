"""What would make a run fit, or fit better: changes to its config, each planned anew."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from configs.reading import ConfigError
from configs.schema import RunConfig, changed
from memory.fit import fit, uniform, within_budget
from memory.machine import Machine, show_bytes
from memory.planner import Plan, Planner
from memory.policies import Policy, as_names

ZERO = "deepspeed.zero_optimization"
MICRO_BATCH = "deepspeed.train_micro_batch_size_per_gpu"
ACCUMULATION = "deepspeed.gradient_accumulation_steps"
POLICIES = "activation_checkpointing.policies"
BUDGET = "activation_checkpointing.memory_budget"
LEAST_SAVING = 0.03
"""Of the predicted peak: a step towards less memory is at least this large."""
SEARCHED = ("micro_batch", "zero_stage", "offload")


@dataclass(frozen=True)
class Cure:
    """A change to the config, and the plan with it."""

    changes: dict[str, Any]
    """By dotted key, as --set takes them."""
    machine: Machine
    plan: Plan

    def rank(self, machine: Machine) -> tuple[bool, bool, float]:
        """What fits comes first, what needs no more hardware before what does, then by time."""
        return not self.plan.fits, self.machine != machine, self.plan.step.total

    def describe(self, now: Plan) -> str:
        """The change, what it saves and what it costs, on one line."""
        saved = now.gpu.peak.total - self.plan.gpu.peak.total
        slower = self.plan.step.total / now.step.total
        what = ", ".join(f"{key}={json.dumps(value)}" for key, value in self.changes.items())
        if self.machine.gpus != now.machine.gpus:
            what = ", ".join([*([what] if what else []), f"{self.machine.gpus} GPUs"])
        verdict = "fits" if self.plan.fits else "does not fit by itself"
        return f"{what}: {show_bytes(saved)} less, {slower:.2f} x the step time; {verdict}"


def cures(config: RunConfig, machine: Machine, now: Plan) -> list[Cure]:
    """Single changes that need less of what is short, the ones that fit first, then by step time.

    `now` is the plan of the run as it is.
    """
    found = [policy_cure(config, machine)]
    for changes, hardware in _single_changes(config, machine):
        try:
            planner = Planner(changed(config, changes), hardware)
        except ConfigError:
            continue  # not a legal setting of this run
        found.append(with_policies(planner, changes, now.policies))
    helping = [cure for cure in found if cure.plan.fits or _shortage(cure.plan) < _shortage(now)]
    return sorted(helping, key=lambda cure: cure.rank(machine))


def policy_cure(config: RunConfig, machine: Machine) -> Cure:
    """Other policies alone: the cheapest that fit, or else those that need least."""
    return _fitted(Planner(config, machine), {})


def milder(config: RunConfig, machine: Machine, now: Plan) -> Cure | None:
    """The next-cheapest settings that need less, for a run that turned out not to fit.

    Other policies first, then half the micro-batch with twice the accumulation, which leaves the
    global batch and the order of the samples as they are. None where nothing needs less.
    """
    less = int(now.gpu.peak.total * (1 - LEAST_SAVING))
    limit = less if machine.gpu_memory is None else min(less, machine.gpu_memory)
    below = machine._replace(gpu_memory=limit)
    cure = policy_cure(config, below)
    micro, steps = _batch(Planner(config, machine))
    while not cure.plan.fits and micro % 2 == 0:
        micro, steps = micro // 2, steps * 2
        changes = {MICRO_BATCH: micro, ACCUMULATION: steps}
        cure = _fitted(Planner(changed(config, changes), below), changes)
    return cure if cure.plan.fits else None


def search(config: RunConfig, machine: Machine, over: frozenset[str]) -> Cure:
    """The settings and policies of least step time that fit, over everything that was asked for.

    `over`: of SEARCHED. Micro-batches change with accumulation, so that the global batch stays.
    """
    best: Cure | None = None
    for bound, changes, planner in _by_least_time(config, machine, over):
        if best and best.plan.fits and bound >= best.plan.step.total:
            break
        cure = _fitted(planner, changes)
        if best is None or _lacking_then_time(cure.plan) < _lacking_then_time(best.plan):
            best = cure
    assert best is not None, "the run's own settings are among those searched"
    return best


def _by_least_time(
    config: RunConfig, machine: Machine, over: frozenset[str]
) -> list[tuple[float, dict[str, Any], Planner]]:
    """Settings with the step time that they would have if nothing had to be recomputed."""
    found = []
    for changes in _settings(config, machine, over):
        try:
            planner = Planner(changed(config, changes), machine)
        except ConfigError:
            continue
        found.append((planner.step_time(uniform(planner, "none")).total, changes, planner))
    return sorted(found, key=lambda entry: entry[0])


def _batch(planner: Planner) -> tuple[int, int]:
    """Samples of a micro-batch, and accumulation steps."""
    micro, steps = (planner.section[key.split(".")[1]] for key in (MICRO_BATCH, ACCUMULATION))
    return micro, steps


def _shortage(plan: Plan) -> int:
    return plan.gpu.shortfall + plan.host.shortfall


def _lacking_then_time(plan: Plan) -> tuple[int, float]:
    return _shortage(plan), plan.step.total


def with_policies(planner: Planner, changes: dict[str, Any], policies: Sequence[Policy]) -> Cure:
    """Changes, which `planner` has, with these policies as far as they fit, else with others.

    A run of policies "auto" does not keep any.
    """
    plan = planner.plan(policies)
    automatic = planner.config.activation_checkpointing.policies == "auto"
    if plan.fits and not automatic:
        return Cure(changes, planner.machine, plan)
    other = _fitted(planner, changes)
    if automatic or _shortage(other.plan) < _shortage(plan):
        return other
    return Cure(changes, planner.machine, plan)


def _fitted(planner: Planner, changes: dict[str, Any]) -> Cure:
    """Changes, which `planner` has, with the policies of least step time that fit.

    The config has them by name or, where they are "auto", by the memory that they are chosen for.
    """
    config, machine = planner.config, planner.machine
    plan = fit(planner, alternatives=False).plan
    if config.activation_checkpointing.policies != "auto":
        return Cure({**changes, POLICIES: as_names(plan.policies)}, machine, plan)
    limit = machine.gpu_memory
    if limit is not None and within_budget(config, machine._replace(gpu_memory=None)) != machine:
        changes = {**changes, BUDGET: f"{limit}B"}
    return Cure(changes, machine, plan)


def _single_changes(
    config: RunConfig, machine: Machine
) -> Iterator[tuple[dict[str, Any], Machine]]:
    planner = Planner(config, machine)
    zero, stage = planner.setup.zero, planner.setup.stage
    micro, steps = _batch(planner)
    if micro % 2 == 0:
        yield {MICRO_BATCH: micro // 2, ACCUMULATION: steps * 2}, machine
    if config.training.loss == "full":
        yield {"training.loss": "auto"}, machine
    if stage < 2 and machine.gpus > 1:
        yield {f"{ZERO}.stage": 2}, machine
    if stage < 3 and machine.gpus > 1:
        yield {f"{ZERO}.stage": 3, f"{ZERO}.allgather_bucket_size": None}, machine
    if machine.device == "cuda":
        offload = zero.get("offload_optimizer") or {"device": "cpu", "pin_memory": True}
        if "offload_optimizer" not in zero:
            yield {f"{ZERO}.stage": max(stage, 2), f"{ZERO}.offload_optimizer": offload}, machine
        if stage < 3 or "offload_param" not in zero:
            both = {f"{ZERO}.offload_{what}": offload for what in ("optimizer", "param")}
            yield {f"{ZERO}.stage": 3, **both, f"{ZERO}.allgather_bucket_size": None}, machine
        more = machine._replace(gpus=machine.gpus * 2)
        if steps % 2 == 0:
            yield {ACCUMULATION: steps // 2}, more
        elif micro % 2 == 0:
            yield {MICRO_BATCH: micro // 2}, more


def _settings(
    config: RunConfig, machine: Machine, over: frozenset[str]
) -> Iterator[dict[str, Any]]:
    planner = Planner(config, machine)
    micro, steps = _batch(planner)
    stage, samples = planner.setup.stage, micro * steps
    micro_batches: list[int | None] = [None]
    if "micro_batch" in over:
        micro_batches = [size for size in range(1, samples + 1) if samples % size == 0]
    stages = (0, 1, 2, 3) if "zero_stage" in over else (stage,)
    offloads = (False, True) if "offload" in over else (None,)
    for size, stage, offload in product(micro_batches, stages, offloads):
        changes: dict[str, Any] = {}
        if size is not None:
            changes |= {MICRO_BATCH: size, ACCUMULATION: samples // size}
        if "zero_stage" in over:
            changes[f"{ZERO}.stage"] = stage
        if offload is not None:
            if offload and stage == 0:
                continue
            given = {"device": "cpu", "pin_memory": True} if offload else None
            changes[f"{ZERO}.offload_optimizer"] = given
        yield changes
