"""The run folder and its checkpoints: claim, save, find, load."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.deepspeed import tensor_parallel_size
from configs.schema import RunConfig, load_config
from model.gpt import GPT, build
from model.partition import join

# Keys that may differ when a run is continued: they do not change what is computed at a step.
FREE_KEYS = {
    "training.max_steps",
    "training.run_folder",
    "training.log_interval",
    "training.evaluation_interval",
    "training.evaluation_samples",
    "training.save_interval",
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
    "data.validation",
}
FREE_SECTIONS = ("activation_checkpointing", "training.skip_samples")


@dataclass(frozen=True)
class Progress:
    """Everything a run needs to continue, beside the engine's own state."""

    step: int
    """Optimizer steps done."""
    samples_consumed: int
    data_fingerprint: str
    world_size: int
    skipped_samples: list[list[int]] = field(default_factory=list)
    """[first, last] numbers of the samples that were stepped over so far."""
    recent_losses: list[float] = field(default_factory=list)
    """What a spike is told by."""


def claim_run_folder(config: RunConfig) -> Path | None:
    """The newest checkpoint of this run; None for a run that has none yet.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: it holds something else, another run, or checkpoints without `latest`.
    """
    folder = Path(config.training.run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder}: no permission to write into this run folder")
    # Of training/profile.py and of a rehearsal that did not fit.
    before_training = re.compile(r"profile|out_of_memory(_rank\d+)?\.json")
    if all(before_training.fullmatch(entry.name) for entry in folder.iterdir()):
        return None
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: not empty and not a run folder; choose another run_folder")
    differences = config_differences(load_config(folder / "config.json"), config)
    if differences:
        raise ValueError(
            f"{folder} holds a run of another config; choose another training.run_folder or set "
            "these back:\n" + "\n".join(differences)
        )
    return latest_checkpoint(folder)


def config_differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The keys that keep a run from being continued, with both values."""
    before, after = _flatten(old.model_dump()), _flatten(new.model_dump())
    return [
        f"{key}: the run has {json.dumps(before.get(key))}, the config {json.dumps(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if key not in FREE_KEYS
        and not key.startswith(FREE_SECTIONS)
        and before.get(key) != after.get(key)
    ]


def _flatten(node: Any, path: str = "") -> dict[str, Any]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    flat: dict[str, Any] = {}
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        flat |= _flatten(value, name) if isinstance(value, dict | list) else {name: value}
    return flat


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `latest` names.

    Raises:
        ValueError: there are checkpoints, but `latest` does not name a complete one.
    """
    checkpoints = folder / "checkpoints"
    pointer = checkpoints / "latest"
    if pointer.exists():
        path = checkpoints / pointer.read_text(encoding="utf-8").strip()
        if (path / "progress.json").exists():
            return path
        raise ValueError(f"{pointer} names {path.name!r}, which is not a complete checkpoint")
    found = sorted(path.name for path in checkpoints.glob("step-*"))
    if found:
        raise ValueError(f"{pointer} is missing; write one of {', '.join(found)} into it")
    return None


def save_config(config: RunConfig) -> None:
    folder = Path(config.training.run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_atomically(folder / "config.json", config.model_dump_json(indent=2) + "\n")


def save_plan(config: RunConfig, plan: dict[str, Any]) -> None:
    path = Path(config.training.run_folder) / "memory_plan.json"
    _write_atomically(path, json.dumps(plan, indent=2) + "\n")


def save_checkpoint(engine: Any, config: RunConfig, progress: Progress) -> Path:
    """Called by every rank. The folder gets its name, and `latest` follows, when all is written."""
    checkpoints = Path(config.training.run_folder) / "checkpoints"
    name = f"step-{progress.step:08}"
    unfinished = checkpoints / f"unfinished-{name}"
    final = checkpoints / name
    if engine.global_rank == 0 and unfinished.exists():
        shutil.rmtree(unfinished)
    torch.distributed.barrier()
    engine.save_checkpoint(str(checkpoints), tag=unfinished.name, save_latest=False)
    torch.distributed.barrier()
    if engine.global_rank == 0:
        (unfinished / "config.json").write_text(config.model_dump_json(indent=2), encoding="utf-8")
        (unfinished / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        _write_atomically(checkpoints / "latest", name)
    torch.distributed.barrier()
    return final


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_progress(checkpoint: Path, expected: Progress) -> Progress:
    """Where a checkpoint's run stood.

    Raises:
        ValueError: it is of other data or another number of ranks than `expected`.
    """
    progress = Progress(**json.loads((checkpoint / "progress.json").read_text(encoding="utf-8")))
    if progress.data_fingerprint != expected.data_fingerprint:
        raise ValueError(f"{checkpoint}: data.train does not hold the data it was trained on")
    if progress.world_size != expected.world_size:
        raise ValueError(
            f"{checkpoint}: written by {progress.world_size} ranks, but this run has "
            f"{expected.world_size}"
        )
    return progress


def load_checkpoint(engine: Any, checkpoint: Path) -> None:
    """Restore model, optimizer and schedule on every rank."""
    path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise RuntimeError(f"DeepSpeed could not load {checkpoint}")


def load_model(run_folder: Path) -> tuple[GPT, RunConfig]:
    """The newest checkpoint's weights in a float32 model on the CPU, without an engine."""
    config_path = run_folder / "config.json"
    if not config_path.exists():
        raise ValueError(f"{run_folder}: not a run folder (no config.json)")
    config = load_config(config_path)
    checkpoint = latest_checkpoint(run_folder)
    if checkpoint is None:
        raise ValueError(f"{run_folder}: holds no checkpoint yet")
    model = build(config.model, seed=0)
    parts = range(tensor_parallel_size(config.deepspeed))
    weights = [_float32_weights(checkpoint, part) for part in parts]
    model.load_state_dict(join(config.model, weights))
    model.tie_embeddings()
    return model, config


def _float32_weights(checkpoint: Path, part: int) -> dict[str, torch.Tensor]:
    """Weights of one tensor-parallel rank: DeepSpeed's mp_rank."""
    files = list(checkpoint.glob(f"*mp_rank_{part:02}_*.pt"))
    if not any("zero_pp_rank" in file.name for file in files):
        path = checkpoint / f"mp_rank_{part:02}_model_states.pt"
        states = torch.load(path, map_location="cpu", weights_only=True)
        return {name: weight.float() for name, weight in states["module"].items()}
    # Imported here: weights of an unpartitioned run can be read without DeepSpeed.
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # It reads a folder's every file as data-parallel shards of part 0.
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            name = file.name.replace(f"mp_rank_{part:02}", "mp_rank_00")
            (Path(folder) / name).symlink_to(file.resolve())
        weights = get_fp32_state_dict_from_zero_checkpoint(folder, tag="")
        return {name: weight.contiguous() for name, weight in weights.items()}
