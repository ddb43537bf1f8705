"""From a config to everything that is settled before the ranks first talk to each other."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from configs.deepspeed import resolve, tensor_parallel_size
from configs.reading import ConfigError
from configs.schema import RunConfig, changed
from data.dataset import Blend, Corpus
from data.foreign import require_one_tokenizer
from data.skipping import Skipping
from memory.cost import SPEEDS
from memory.cures import cures, milder
from memory.fit import plan, within_budget
from memory.machine import Machine, show_bytes
from memory.planner import Plan, Planner
from memory.policies import Policy, block_policies
from training import checkpoint, store
from training.documents import separator_of, tokenizer_record
from training.engine import Ranks
from training.universal import Layout, refusal

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
    validation_data: dict[str, Corpus]
    """By name; a single one has the name ""."""
    start: checkpoint.Progress
    checkpoint: Path | None
    """Where `start` comes from; None for a new run, and until `resume` has looked for one."""

    converted_from: Layout | None = None
    """The layout of `checkpoint`, where it is not the run's own."""

    @property
    def layout(self) -> Layout:
        stage = self.section["zero_optimization"].get("stage", 0)
        return Layout(self.ranks.world_size, self.ranks.tensor_parallel, stage)

    @property
    def total_samples(self) -> int:
        """Of the whole run, from step 1."""
        return self.config.training.max_steps * int(self.section["train_batch_size"])

    @property
    def initial_weights(self) -> Path | None:
        """Of an imported model, in a run without a checkpoint."""
        folder = Path(self.config.training.run_folder) / store.INITIAL
        return folder if folder.exists() and not self.checkpoint else None

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


def prepare(config: RunConfig, ranks: Ranks, *, restart: bool = False) -> Run:
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
        separator_of(config.data)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    if not problems:
        problems += uncovered(config, section)
    if problems:
        raise ConfigError(problems)
    ranks = replace(ranks, tensor_parallel=tensor_parallel_size(section))
    checkpoint.claim_run_folder(config, restart=restart)
    start = checkpoint.Progress(0, 0, train_data.fingerprint(0), ranks.world_size)
    return Run(config, config, section, policies, ranks, train_data, validation_data, start, None)


def resume(run: Run, *, restart: bool = False, change_layout: bool = False) -> Run:
    """The run from its newest complete checkpoint on; a collective call.

    Args:
        change_layout: whether that may be of other ranks, ZeRO stage or tensor parallelism.

    Raises:
        ConfigError: the checkpoint is of other data, another batch or another layout.
        NoCheckpoint: there are some, and none can be used.
    """
    search = checkpoint.find_together(run.config, run.ranks, restart=restart)
    if search.found is None or search.manifest is None:
        return run
    start = checkpoint.Progress(**search.manifest.progress)
    require_same_past(run.train_data, start)
    require_untrained(run.config.training.skip_samples, run.train_data, start)
    batch = search.manifest.deepspeed["train_batch_size"]
    if batch != run.section["train_batch_size"]:
        raise ConfigError(
            [
                f"{search.found}: written with deepspeed.train_batch_size={batch:,}, but this run "
                f"has {run.section['train_batch_size']:,} on {run.ranks.world_size} ranks"
            ]
        )
    start = replace(start, world_size=run.ranks.world_size)
    run = replace(run, start=start, checkpoint=search.found)
    before, after = Layout.of(search.manifest), run.layout
    if before == after:
        return run
    if reason := refusal(before, after, run.section):
        raise ConfigError([f"{search.found}: of {before}, and this run is of {after}: {reason}"])
    if not change_layout:
        raise ConfigError(
            [
                f"{search.found}: written by {before}, and this run has {after}: set them back, or "
                "let --change-layout convert it (losses then agree to rounding, not to the bit)"
            ]
        )
    return replace(run, converted_from=before)


def require_untrained(ranges: list[list[int]], data: Blend, start: checkpoint.Progress) -> None:
    """Raises ConfigError if samples to step over were trained on before the checkpoint."""
    done = Skipping(data, start.skipped_samples)
    problems = [
        f"training.skip_samples: [{first}, {last}] begins with samples that were trained on before "
        f"step {start.step}; continue from an earlier checkpoint"
        for first, last in ranges
        if first < done.number(start.samples_consumed) and not done.leaves_out(first, last)
    ]
    if problems:
        raise ConfigError(problems)


def policies_of(config: RunConfig, machine: Machine) -> tuple[Policy, ...]:
    """Each block's policy: as named, or for "auto" those of least step time that fit.

    Raises:
        ConfigError: a name is wrong, or nothing fits.
    """
    settings = config.activation_checkpointing
    if settings.policies != "auto":
        return block_policies(settings, config.model.layers, machine.device)
    chosen = plan(config, machine)
    if chosen.fits:
        return chosen.policies
    lacking = show_bytes(chosen.gpu.shortfall or chosen.host.shortfall)
    found = cures(config, chosen.machine, chosen)
    helping = [cure.describe(chosen) for cure in found if cure.plan.fits]
    raise ConfigError(
        [
            f'activation_checkpointing.policies: "auto" finds none that fit: {lacking} are lacking '
            f"at {chosen.gpu.peak.moment}",
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
    bf16 = ranks.hardware().bf16
    machine = Machine(ranks.world_size, ranks.local_world_size, memory, host, kind, bf16)
    return within_budget(config, machine)


def open_data(config: RunConfig) -> tuple[Blend, dict[str, Corpus]]:
    """Training data, and validation data by name, of one tokenizer.

    Raises:
        OSError, ValueError: a file is missing, damaged, or not of the model's vocabulary.
    """
    length, seed = config.training.sequence_length, config.training.seed
    named = tokenizer_record(config.data.tokenizer)

    def corpus(path: str, shuffle: bool) -> Corpus:
        vocabulary = config.model.vocabulary_size
        return Corpus(
            path, length, seed, vocabulary_size=vocabulary, shuffle=shuffle, tokenizer=named
        )

    corpora = [corpus(entry.path, True) for entry in config.data.train]
    validation = {name: corpus(path, False) for name, path in config.data.validation_sets.items()}
    files = [opened.file for opened in (*corpora, *validation.values())]
    require_one_tokenizer(files, named, config.data.tokenizer)
    schedule = [(-(-stage.from_tokens // length), stage.weights) for stage in config.data.schedule]
    return Blend(corpora, [entry.share for entry in config.data.train], schedule), validation


def uncovered(config: RunConfig, section: dict[str, Any]) -> list[str]:
    """What is wrong with token budgets that are smaller than the run."""
    budgets = [corpus.tokens for corpus in config.data.train if corpus.tokens is not None]
    steps, length = config.training.max_steps, config.training.sequence_length
    read = steps * int(section["train_batch_size"]) * length
    if not budgets or sum(budgets) >= read:
        return []
    return [
        f"data.train: the budgets add up to {sum(budgets):,} tokens, but {steps:,} steps read "
        f"{read:,}; raise data.train.N.tokens or lower training.max_steps"
    ]


def require_same_past(data: Blend, start: checkpoint.Progress) -> None:
    """Raises ConfigError if the samples trained on so far are not those the data would give."""
    read = Skipping(data, start.skipped_samples).number(start.samples_consumed)
    if data.fingerprint(read) == start.data_fingerprint:
        return
    tokens = read * data.sequence_length
    raise ConfigError(
        [
            f"data.train: not the corpora, weights and seed that the first {tokens:,} tokens were "
            "read with, up to the checkpoint; set them back. To change the mix from here on, add "
            f'a stage to data.schedule: {{"from_tokens": {tokens}, "weights": [...]}}'
        ]
    )
