"""What a run on described hardware would be: `train.py --check` and `--dry-run`."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import torch

from configs.deepspeed import resolve, warnings_of
from configs.schema import RunConfig, TrainingConfig
from data.loader import read_batch
from memory.cost import SPEEDS
from memory.dry_run import run_dry
from memory.fit import plan as plan_of
from memory.machine import Machine, show_bytes
from memory.plan import DOES_NOT_FIT, show
from memory.planner import Plan, Planner
from model.flops import training_flops_per_token
from training.setup import open_data, uncovered

SECONDS_PER_DAY = 86_400


class Amounts(NamedTuple):
    """Of a whole run."""

    tokens_per_step: int
    steps: int
    flops: int
    """Model FLOPs, without recomputation."""
    mfu: float
    """Model FLOPs over what all devices' data sheets have in the estimated time."""
    days: float
    """Of steps alone, as estimated: without evaluation, saves and restarts."""
    kept_checkpoints: int
    """Complete ones, as the last step leaves them."""

    @property
    def tokens(self) -> int:
        return self.tokens_per_step * self.steps


def check(config: RunConfig, machine: Machine, *, dry_run: bool = False) -> int:
    """Print the resolved config and what it means, and read or start nothing; an exit code.

    Args:
        dry_run: read the first batch, and take the whole model through forward and backward on
            tensors without memory.

    Raises:
        ConfigError, OSError: mistakes in the config, or in the data of a dry run.
    """
    resolve(config, machine.hardware)  # a plan by itself does not ask DeepSpeed
    plan = plan_of(config, machine)
    planner = Planner(config, plan.machine)
    amounts = amounts_of(planner, plan)
    print(json.dumps(config.model_dump() | {"deepspeed": planner.section}, indent=2))
    print("\n".join(describe(config, plan, amounts)) + "\n")
    show(plan)
    for line in warnings_of(config, planner.section, machine.hardware):
        print(f"warning: {line}")
    if dry_run:
        print("\n" + describe_batch(config, planner))
        start = time.perf_counter()
        count = run_dry(planner, plan.policies)
        print(
            f"{count:,} parameters of a rank went through forward and backward at full shape, and "
            f"each has its gradient ({time.perf_counter() - start:.0f} s)"
        )
    return 0 if plan.fits else DOES_NOT_FIT


def amounts_of(planner: Planner, plan: Plan) -> Amounts:
    training, machine = planner.config.training, planner.machine
    tokens = planner.section["train_batch_size"] * training.sequence_length
    flops = training_flops_per_token(planner.config.model, training.sequence_length) * tokens
    speeds = SPEEDS[machine.kind]
    peak = speeds.single if planner.setup.element == 4 else speeds.half
    return Amounts(
        tokens,
        training.max_steps,
        flops * training.max_steps,
        flops / (plan.step.total * machine.gpus * peak),
        training.max_steps * plan.step.total / SECONDS_PER_DAY,
        kept_checkpoints(training),
    )


def kept_checkpoints(training: TrainingConfig) -> int:
    """How many of a run's saves are there at its end; the last step saves, too."""
    saved = {*range(training.save_interval, training.max_steps, training.save_interval)}
    saved.add(training.max_steps)
    if training.keep_last is None:
        return len(saved)
    kept = set(sorted(saved)[-training.keep_last :])
    every = training.keep_every
    return len(kept | {step for step in saved if every and step % every == 0})


def describe(config: RunConfig, plan: Plan, amounts: Amounts) -> list[str]:
    machine, each = plan.machine, plan.checkpoint_bytes
    devices = f"{machine.gpus} x {machine.kind}"
    return [
        f"{config.model.parameter_count():,} parameters",
        f"{amounts.tokens_per_step:,} tokens a step, {amounts.steps:,} steps: "
        f"{amounts.tokens:,} tokens, {amounts.flops:.3g} FLOPs",
        f"{show_duration(amounts.days)} on {devices} at the estimated MFU of {amounts.mfu:.0%}",
        f"{show_bytes(each)} a checkpoint; {amounts.kept_checkpoints:,} are kept at the end: "
        f"{show_bytes(each * amounts.kept_checkpoints)} of disk, and one more while it is written",
    ]


def show_duration(days: float) -> str:
    """Such as "12.5 days", in the largest of three units that leaves a number of at least one."""
    for unit, per_day in (("days", 1), ("hours", 24)):
        if days * per_day >= 1:
            return f"{days * per_day:.3g} {unit}"
    return f"{days * SECONDS_PER_DAY:.3g} seconds"


def describe_batch(config: RunConfig, planner: Planner) -> str:
    """Read the first micro-batch of the first rank."""
    data, validation = open_data(config)
    if problems := uncovered(config, planner.section):
        raise ValueError("\n".join(problems))
    size = planner.section["train_micro_batch_size_per_gpu"]
    tokens = read_batch(data, range(size), torch.device("cpu"))
    files = ", ".join(entry.path for entry in config.data.train)
    return (
        f"first batch: {len(tokens)} x {tokens.shape[1] - 1:,} tokens of {files}, ids "
        f"{tokens.min()} to {tokens.max()}; {len(validation)} validation sets opened"
    )
