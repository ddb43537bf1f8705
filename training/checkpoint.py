"""The run folder and its checkpoints: claim, find, load. training/saver.py saves them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from configs.reading import flatten
from configs.schema import RunConfig, load_config
from model.gpt import GPT, build
from training import store
from training.unpickling import values_only
from training.weights import open_weights

if TYPE_CHECKING:
    from training.engine import Ranks  # weights can be read without DeepSpeed

# Keys that may differ when a run is continued: they do not change what is computed at a step.
FREE_KEYS = {
    "training.max_steps",
    "training.run_folder",
    "training.log_interval",
    "training.evaluation_interval",
    "training.evaluation_samples",
    "training.save_interval",
    "training.keep_last",
    "training.keep_every",
    "training.save_in_background",
    "training.on_failed_save",
    "training.loss",
    "training.expandable_segments",
    "training.rehearse",
    "training.on_out_of_memory",
    "training.time_limit",
    "training.max_bad_steps",
    "training.spike_deviations",
    "training.on_spike",
    "training.hang_seconds",
    "training.replica_check_interval",
}
# How the ranks share the work may change: the samples of a step and their order stay the same.
# What data may change depends on how much of it has been read: see setup.require_same_past.
FREE_SECTIONS = (
    "activation_checkpointing",
    "data.",
    "deepspeed.zero_optimization",
    "deepspeed.tensor_parallel",
    "deepspeed.train_batch_size",
    "deepspeed.train_micro_batch_size_per_gpu",
    "deepspeed.gradient_accumulation_steps",
    "training.skip_samples",
)


@dataclass(frozen=True)
class Progress:
    """Everything a run needs to continue, beside the engine's own state."""

    step: int
    """Optimizer steps done."""
    samples_consumed: int
    data_fingerprint: str
    """Of these samples: data.dataset.Blend.fingerprint."""
    world_size: int
    skipped_samples: list[list[int]] = field(default_factory=list)
    """[first, last] numbers of the samples that were stepped over so far."""
    recent_losses: list[float] = field(default_factory=list)
    """What a spike is told by."""


def claim_run_folder(config: RunConfig, *, restart: bool = False) -> None:
    """See that a run may be started or continued here, or, with `restart`, begun anew.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: it holds something else, or a run of another config.
    """
    store.forbid_world_writing()
    folder = Path(config.training.run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder}: no permission to write into this run folder")
    store.close_to_the_world(folder)
    # Of training/profile.py, launch/, a rehearsal that did not fit, and of --restart.
    before_training = re.compile(r"profile|logs|out_of_memory(_rank\d+)?\.json|before-restart-\d+")
    if all(before_training.fullmatch(entry.name) for entry in folder.iterdir()):
        return
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: not empty and not a run folder; choose another run_folder")
    if restart:
        return
    differences = config_differences(load_config(folder / "config.json"), config)
    if differences:
        raise ValueError(
            f"{folder} holds a run of another config; choose another training.run_folder, set "
            "these back, or begin anew with --restart:\n" + "\n".join(differences)
        )


def config_differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The keys that keep a run from being continued, with both values."""
    before, after = flatten(old.model_dump()), flatten(new.model_dump())
    return [
        f"{key}: the run has {json.dumps(before.get(key))}, the config {json.dumps(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if key not in FREE_KEYS
        and not key.startswith(FREE_SECTIONS)
        and before.get(key) != after.get(key)
    ]


class NoCheckpoint(RuntimeError):
    """There are checkpoints, or were, and none that can be used."""


@dataclass
class Search:
    """For the newest complete checkpoint of a run folder."""

    run_folder: Path
    found: Path | None = None
    """None as long as the search goes on, and in a folder that never had one."""
    manifest: store.Manifest | None = None
    refused: dict[Path, str] = field(default_factory=dict)
    """Newer ones, and what is wrong with each."""

    @property
    def checkpoints(self) -> Path:
        return self.run_folder / "checkpoints"

    def run(self, config: RunConfig, verify: Verify) -> None:
        """
        Raises:
            NoCheckpoint: there is none to go on from, and step 0 is not where the run stands.
        """
        candidates = store.candidates(self.checkpoints)
        for path in candidates:
            reason = verify(path, config)
            if reason is None:
                self.found, self.manifest = path, store.read_manifest(path)
                return
            self.refused[path] = reason
        aside = sorted(self.checkpoints.glob(f"{store.DAMAGED}*"))
        pointer = store.pointed_at(self.checkpoints)
        if candidates or aside or pointer is not None:
            lines = [*self.warnings(), *(f"{path}: set aside earlier" for path in aside)]
            raise NoCheckpoint(
                f"{self.checkpoints}: holds no complete checkpoint of this run\n"
                + "".join(f"  {line}\n" for line in lines)
                + "put one back, or begin anew with --restart, which keeps these files"
            )

    def warnings(self) -> list[str]:
        """What is not as a run leaves it, a line each."""
        lines = [f"{path} is not used: {reason}" for path, reason in self.refused.items()]
        pointer, latest = store.pointed_at(self.checkpoints), self.checkpoints / "latest"
        if pointer is None:
            lines += [f"{latest} is missing"] if self.found else []
        elif not pointer:
            lines.append(f"{latest} is empty")
        elif not (self.checkpoints / pointer).is_dir():
            lines.append(f"{latest} names {pointer!r}, which is not there")
        elif self.found and self.checkpoints / pointer not in [self.found, *self.refused]:
            lines.append(f"{latest} names {pointer!r}, which is not the newest complete checkpoint")
        return lines


Verify = Callable[[Path, RunConfig], str | None]
"""What is wrong with a checkpoint of this run; None: nothing."""


def verify_alone(path: Path, config: RunConfig, *, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with it as far as this rank looks: at one file of `ranks`."""
    try:
        manifest = store.read_manifest(path)
        if differences := foreign(manifest, config):
            return f"it is of another run: {differences[0]}"
        store.verify(path, manifest, rank=rank, ranks=ranks)
    except store.Damaged as error:
        return str(error)
    return None


def foreign(manifest: store.Manifest, config: RunConfig) -> list[str]:
    try:
        return config_differences(RunConfig.model_validate(manifest.config), config)
    except ValidationError as error:
        return [f"its config is not valid: {error.errors()[0]['msg']}"]


def find_together(config: RunConfig, ranks: Ranks, *, restart: bool = False) -> Search:
    """The checkpoint that all ranks continue from; each verifies a share of the files.

    Rank 0 says what was wrong with newer ones and puts them aside, out of the way of what the run
    will write, and removes what crashes have left. With `restart` it moves all files of the run.

    Raises:
        NoCheckpoint: see Search.
        OSError: on rank 0.
    """
    folder = Path(config.training.run_folder)
    if ranks.rank == 0 and restart and (aside := store.begin_anew(folder)):
        print(f"restarting at step 0: what {folder} held is in {aside}", flush=True)
    torch.distributed.barrier()

    def verify(path: Path, config: RunConfig) -> str | None:
        reasons: list[str | None] = [None] * ranks.world_size
        reason = verify_alone(path, config, rank=ranks.rank, ranks=ranks.world_size)
        torch.distributed.all_gather_object(reasons, reason)
        return next((reason for reason in reasons if reason), None)

    search = Search(folder)
    search.run(config, verify)
    warnings = search.warnings()
    torch.distributed.barrier()  # all have looked before anything is moved
    if ranks.rank == 0:
        for line in warnings:
            print(f"warning    {line}", flush=True)
        for path in search.refused:
            print(f"warning    {path} is now {store.set_aside(path).name}", flush=True)
        store.sweep(search.checkpoints)
    torch.distributed.barrier()
    return search


def save_config(config: RunConfig) -> None:
    folder = Path(config.training.run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    store.write_durably(folder / "config.json", config.model_dump_json(indent=2) + "\n")


def save_plan(config: RunConfig, plan: dict[str, Any]) -> None:
    path = Path(config.training.run_folder) / "memory_plan.json"
    store.write_durably(path, json.dumps(plan, indent=2) + "\n")


def load_checkpoint(engine: Any, checkpoint: Path) -> None:
    """Restore model, optimizer and schedule on every rank.

    Raises:
        Refused: a file holds more than values.
    """
    with store.reading(checkpoint), values_only():
        path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise RuntimeError(f"DeepSpeed could not load {checkpoint}")


def find_checkpoint(
    run_folder: Path, step: int | None = None
) -> tuple[Path, store.Manifest, RunConfig]:
    """A verified checkpoint, the newest or that of a step, and the run's config; for one process.

    Raises:
        ValueError: it is no run folder, has no such checkpoint, or it is damaged.
        NoCheckpoint: there are some, and none can be used.
    """
    config_path = run_folder / "config.json"
    if not config_path.exists():
        raise ValueError(f"{run_folder}: not a run folder (no config.json)")
    config = load_config(config_path)
    search = Search(run_folder)
    if step is not None:
        path = search.checkpoints / store.name_of(step)
        if not path.exists():
            known = ", ".join(str(store.step_of(p)) for p in store.candidates(search.checkpoints))
            raise ValueError(f"{path}: there is no such checkpoint; of steps: {known or 'none'}")
        if reason := verify_alone(path, config):
            raise ValueError(f"{path} is not used: {reason}")
        return path, store.read_manifest(path), config
    search.run(config, verify_alone)
    if search.found is None or search.manifest is None:
        raise ValueError(f"{run_folder}: holds no checkpoint yet")
    for line in search.warnings():
        print(f"warning    {line}", file=sys.stderr, flush=True)
    return search.found, search.manifest, config


@torch.no_grad()
def load_model(run_folder: Path) -> tuple[GPT, RunConfig]:
    """The newest checkpoint's weights in a float32 model on the CPU, without an engine."""
    found, manifest, config = find_checkpoint(run_folder)
    model = build(config.model, seed=0)
    with store.reading(found):
        read = open_weights(found, manifest, config.model)
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name))
    return model, config
