"""From a config to everything that is settled before the ranks first talk to each other."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from configs.deepspeed import resolve, tensor_parallel_size
from configs.schema import ConfigError, RunConfig, changed
from data.dataset import Blend, Corpus, require_one_tokenizer
from data.skipping import Skipping
from memory.cost import SPEEDS
from memory.cures import cures, milder
from memory.fit import fit
from memory.machine import Machine, parse_bytes, show_bytes
from memory.planner import Plan, Planner
from memory.policies import Policy, block_policies
from training import checkpoint
from training.engine import Ranks

CURES_SHOWN = 3


@dataclass(frozen=True)
class Run:
    asked: RunConfig
    """As the user wrote it; the run folder keeps this."""
    config: RunConfig
    """As it runs: the same, but for what an adaptation to the memory changed."""
    section: dict[str, Any]
    """The resolved DeepSpeed section."""
    policies: tuple[Policy, ...]
    """Of each block."""
    ranks: Ranks
    train_data: Blend
    validation_data: Corpus
    start: checkpoint.Progress
    checkpoint: Path | None
    """Where `start` comes from; None for a new run."""

    @property
    def samples(self) -> Skipping:
        """The training data in the order it is read, without what is stepped over."""
        by_hand = self.config.training.skip_samples
        return Skipping(self.train_data, self.start.skipped_samples + by_hand)

    @property
    def rehearses(self) -> bool:
        """NVMe is written to in a step, which nothing would undo."""
        zero = self.section["zero_optimization"]
        on_nvme = any(
            (zero.get(key) or {}).get("device") == "nvme"
            for key in ("offload_optimizer", "offload_param")
        )
        training = self.config.training
        if training.rehearse is not None:
            return training.rehearse
        adapts = training.on_out_of_memory == "adapt"
        return adapts or (self.ranks.device.type == "cuda" and not on_nvme)

    def plan(self) -> Plan:
        machine = machine_of(self.ranks, self.config)
        return Planner(self.config, machine).plan(self.policies)

    def milder(self) -> Run | None:
        """The run with the next settings that need less memory; None where there are none."""
        machine = machine_of(self.ranks, self.config)
        cure = milder(self.config, machine, self.plan())
        if cure is None:
            return None
        config = changed(self.config, cure.changes)
        section = resolve(config, self.ranks.hardware())
        return replace(self, config=config, section=section, policies=cure.plan.policies)


def prepare(config: RunConfig, ranks: Ranks) -> Run:
    """Resolve the config, open the data and claim the run folder.

    Raises:
        ConfigError: all mistakes at once.
        ValueError, OSError: the run folder cannot be used.
    """
    problems: list[str] = []
    try:
        section = resolve(config, ranks.hardware())
        policies = policies_of(config, machine_of(ranks, config))
    except ConfigError as error:
        problems += error.problems
    try:
        train_data, validation_data = open_data(config)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    ranks = replace(ranks, tensor_parallel=tensor_parallel_size(section))
    found = checkpoint.claim_run_folder(config)
    start = checkpoint.Progress(0, 0, train_data.fingerprint, ranks.world_size)
    if found:
        start = checkpoint.read_progress(found, start)
        require_untrained(config.training.skip_samples, train_data, start)
    return Run(config, config, section, policies, ranks, train_data, validation_data, start, found)


def require_untrained(ranges: list[list[int]], data: Blend, start: checkpoint.Progress) -> None:
    """Raises ValueError if samples to step over were trained on before the checkpoint."""
    done = Skipping(data, start.skipped_samples)
    for first, last in ranges:
        if first < done.number(start.samples_consumed) and not done.leaves_out(first, last):
            raise ValueError(
                f"training.skip_samples: [{first}, {last}] begins with samples that were trained "
                f"on before step {start.step}; continue from an earlier checkpoint"
            )


def policies_of(config: RunConfig, machine: Machine) -> tuple[Policy, ...]:
    """Each block's policy: as named, or for "auto" those of least step time that fit.

    Raises:
        ConfigError: a name is wrong, or nothing fits.
    """
    settings = config.activation_checkpointing
    if settings.policies != "auto":
        return block_policies(settings, config.model.layers, machine.device)
    plan = fit(Planner(config, machine), alternatives=False).plan
    if plan.fits:
        return plan.policies
    lacking = show_bytes(plan.gpu.shortfall or plan.host.shortfall)
    helping = [cure.describe(plan) for cure in cures(config, machine, plan) if cure.plan.fits]
    raise ConfigError(
        [
            f'activation_checkpointing.policies: "auto" finds none that fit: {lacking} are lacking '
            f"at {plan.gpu.peak.moment}",
            *(f"  would fit: {line}" for line in helping[:CURES_SHOWN]),
        ]
    )


def machine_of(ranks: Ranks, config: RunConfig) -> Machine:
    """What the ranks run on, for the planner. On a CPU the ranks of a host share its memory."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind, memory = "CPU", host // ranks.local_world_size
    if ranks.device.type == "cuda":
        properties = torch.cuda.get_device_properties(ranks.device)
        kind = next((kind for kind in SPEEDS if kind in properties.name), "H100")
        memory = properties.total_memory
    if (budget := config.activation_checkpointing.memory_budget) is not None:
        memory = parse_bytes(budget)
    bf16 = ranks.hardware().bf16
    return Machine(ranks.world_size, ranks.local_world_size, memory, host, kind, bf16)


def open_data(config: RunConfig) -> tuple[Blend, Corpus]:
    """Training and validation data, of one tokenizer."""
    length, seed = config.training.sequence_length, config.training.seed
    vocabulary = config.model.vocabulary_size
    corpora = [
        Corpus(corpus.path, length, seed, vocabulary_size=vocabulary)
        for corpus in config.data.train
    ]
    validation = Corpus(
        config.data.validation, length, seed, vocabulary_size=vocabulary, shuffle=False
    )
    require_one_tokenizer([*corpora, validation])
    return Blend(corpora, [corpus.weight for corpus in config.data.train]), validation
