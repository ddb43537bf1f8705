"""A checkpoint for other machines: other ranks, ZeRO stage, offload or tensor parallelism.

DeepSpeed's shards fit only the layout that wrote them. Its universal format holds each parameter's
float32 weight and Adam moments whole, under the parameter's name; DeepSpeed's converter writes it
and its engine loads it. Added here is what they leave out (0.19.8): a source or a target without
ZeRO, a target of another stage (the files that describe the run have other names and keys there),
Adam's step from stage 3, and the hyperparameters of the second parameter group, which stage 3
overwrites with those of the first.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import RunConfig
from memory.machine import show_bytes
from model.gpt import GPT, parameter_rules
from training import store
from training.unpickling import load_states, values_only

MOMENTS = ("exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = 24
"""On disk: weight and moments in float32, and as much again while the converter runs."""
PARTIAL = ".partial"


@dataclass(frozen=True)
class Layout:
    """What DeepSpeed's shards depend on."""

    world_size: int
    tensor_parallel: int
    zero_stage: int

    @classmethod
    def of(cls, manifest: store.Manifest) -> Layout:
        stage = manifest.zero_stage
        return cls(manifest.progress["world_size"], manifest.tensor_parallel, stage)

    def __str__(self) -> str:
        split = f", tensor parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks}, ZeRO {self.zero_stage}{split}"


class NotConverted(RuntimeError):
    """There was no way to write a checkpoint's universal form."""


def refusal(before: Layout, after: Layout, section: Mapping[str, Any]) -> str | None:
    """Why a checkpoint of one layout cannot be continued in another; None where it can."""
    kind = section["optimizer"]["type"]
    if kind.lower() not in ("adam", "adamw"):
        return f"a universal checkpoint holds Adam's states, and this optimizer is {kind}"
    half = any(section.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    if after.zero_stage == 0 and (half or after.tensor_parallel > 1):
        return "ZeRO 0 can take over a float32 run without tensor parallelism only; use stage 1"
    if before.tensor_parallel > 1 and before.zero_stage in (0, 3):
        # At stage 0 there are no shards to convert; at 3 DeepSpeed records the norms as empty.
        return "how weights are split over tensor-parallel ranks is on record at ZeRO 1 and 2 only"
    return None


def load_converted(engine: Any, config: RunConfig, checkpoint: Path, before: Layout) -> None:
    """Convert a checkpoint of another layout, load it, and remove what was written for it.

    A collective call. Ranks wait for the first one's conversion by looking for its folder: it may
    take longer than a collective operation is given.

    Raises:
        NotConverted: the converted checkpoint cannot be written.
    """
    converted = checkpoint.with_name(f"{store.UNIVERSAL}{checkpoint.name}")
    if engine.global_rank == 0:
        needed = BYTES_PER_PARAMETER * config.model.parameter_count()
        free = shutil.disk_usage(checkpoint).free
        if free < needed:
            raise NotConverted(
                f"{checkpoint}: its conversion takes {show_bytes(needed)} beside it, "
                f"{show_bytes(free)} are free"
            )
        partial = converted.with_name(converted.name + PARTIAL)
        try:
            with store.reading(checkpoint):
                convert(checkpoint, partial, before, optimizer_order(config))
        except OSError as error:
            raise NotConverted(f"{checkpoint}: cannot be converted: {error}") from None
        partial.rename(converted)
    while not converted.exists():
        time.sleep(0.2)
    load(engine, converted)
    torch.distributed.barrier()
    if engine.global_rank == 0:
        shutil.rmtree(converted)


def convert(checkpoint: Path, output: Path, before: Layout, names: Sequence[str]) -> None:
    """Write the universal form of a checkpoint. Memory: one rank's shard of the optimizer.

    Args:
        names: of the parameters, in the optimizer's order.
    """
    if before.zero_stage == 0:
        states = load_states(_description(checkpoint, before))
        step = _write_unpartitioned(states, output, names)
    else:
        _run_converter(checkpoint, output)
        step = _adam_step(output, names[0])
        if before.zero_stage == 3 and before.tensor_parallel == 1:
            _shape_parameters(_description(checkpoint, before), output)
    _describe(checkpoint, output, before, step)


def _run_converter(checkpoint: Path, output: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    options = argparse.Namespace(
        input_folder=str(checkpoint),
        output_folder=str(output),
        # Forked workers would inherit this rank's process group.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), values_only():
        ds_to_universal.main(options)
    (output.parent / "latest_universal").unlink()  # of no use to us: folders go by name


def _adam_step(output: Path, name: str) -> Tensor:
    """Updates done: skipped steps are none, and some wrappers count one before the first."""
    path = output / "zero" / name / "step.pt"
    if path.exists():
        return torch.as_tensor(load_states(path))
    common = load_states(output / "zero" / "optimizer_state.pt", mmap=True)
    step = torch.as_tensor(common["optimizer_state_dict"]["state"][0]["step"])
    return step.clone()  # the mapped file is about to be replaced


def _shape_parameters(description: Path, output: Path) -> None:
    """From stage 3 the parameters come flat and bare: only stage 3 reads them so."""
    groups = load_states(description, mmap=True)["param_shapes"]
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        for key in ("fp32", *MOMENTS):
            path = output / "zero" / name / f"{key}.pt"
            torch.save({"param": load_states(path).view(shape)}, path)


def optimizer_order(config: RunConfig) -> list[str]:
    """The parameters' names as the optimizer numbers them: a group after the other."""
    with torch.device("meta"):
        model = GPT(config.model)
    rules = parameter_rules(model, decay_embeddings=config.training.decay_embeddings)
    return sorted(rules, key=lambda name: not rules[name].decay)


def _write_unpartitioned(states: Mapping[str, Any], output: Path, names: Sequence[str]) -> Tensor:
    """Without ZeRO the states go by the parameter's number. Returns Adam's step.

    In 16 bits DeepSpeed wraps it, and keeps the float32 weights beside its states.
    """
    optimizer = states["optimizer"]
    masters = [weight for group in optimizer.get("fp32_groups", ()) for weight in group]
    optimizer = optimizer.get("optimizer_state_dict", optimizer)
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    for place, (number, name) in enumerate(zip(numbers, names, strict=True)):
        folder = output / "zero" / name
        folder.mkdir(parents=True)
        weight = masters[place] if masters else states["module"][name]
        torch.save({"param": weight}, folder / "fp32.pt")
        for moment in MOMENTS:
            torch.save({"param": optimizer["state"][number][moment]}, folder / f"{moment}.pt")
    return torch.as_tensor(optimizer["state"][numbers[0]]["step"])


def _describe(checkpoint: Path, output: Path, before: Layout, step: Tensor) -> None:
    """The files beside the parameters, under the names and keys that every stage looks for."""
    for part in range(before.tensor_parallel):
        states = load_states(_description(checkpoint, before, part), mmap=True)
        described = {
            key: value for key, value in states.items() if key not in ("module", "optimizer")
        }
        for stale in output.glob(f"*mp_rank_{part:02}_model_states.pt"):
            stale.unlink()
        for prefix in ("", "zero_pp_rank_0_"):
            torch.save(described, output / f"{prefix}mp_rank_{part:02}_model_states.pt")
    for folder in (output / "zero").iterdir():
        if folder.is_dir():
            torch.save(step, folder / "step.pt")
    groups: list[dict[str, Any]] = [{"params": []}] * 2
    torch.save(
        {
            "ds_version": states["ds_version"],
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
        },
        output / "zero" / "optimizer_state.pt",
    )


def _description(checkpoint: Path, layout: Layout, part: int = 0) -> Path:
    prefix = "zero_pp_rank_0_" if layout.zero_stage == 3 else ""
    return checkpoint / f"{prefix}mp_rank_{part:02}_model_states.pt"


def load(engine: Any, folder: Path) -> None:
    """Restore every rank's part of model, optimizer and schedule; a collective call."""
    if engine.zero_optimization_stage() == 0:
        _load_unpartitioned(engine, folder)
        return
    groups = engine.optimizer.param_groups
    kept = [{key: value for key, value in g.items() if key != "params"} for g in groups]
    engine._config.load_universal_checkpoint = True
    try:
        with values_only():
            path, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    finally:
        engine._config.load_universal_checkpoint = False
    if path is None:
        raise RuntimeError(f"DeepSpeed could not load {folder}")
    for group, values in zip(engine.optimizer.param_groups, kept, strict=True):
        group.update(values)
    for state in engine.optimizer.state.values():
        # Stage 3 gives all of them one tensor, which each parameter's update would advance.
        state["step"] = torch.as_tensor(state["step"]).clone()
    _set_learning_rate(engine)


def _load_unpartitioned(engine: Any, folder: Path) -> None:
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            states = _states(folder / "zero" / names[id(parameter)])
            parameter.data.copy_(states["fp32"])
            device = parameter.device
            engine.optimizer.state[parameter] = {
                "step": states["step"].to(device if group.get("fused") else "cpu"),
                **{moment: states[moment].to(device) for moment in MOMENTS},
            }
    described = load_states(folder / "mp_rank_00_model_states.pt")
    engine.lr_scheduler.load_state_dict(described["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, described[name])
    _set_learning_rate(engine)


def _states(folder: Path) -> dict[str, Tensor]:
    """One parameter's weight, moments and step, in host memory."""
    found = {path.stem: load_states(path) for path in folder.glob("*.pt")}
    return {name: value["param"] if name != "step" else value for name, value in found.items()}


def _set_learning_rate(engine: Any) -> None:
    for group, lr in zip(engine.optimizer.param_groups, engine.lr_scheduler.get_lr(), strict=True):
        group["lr"] = lr
