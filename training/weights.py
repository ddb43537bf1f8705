"""A checkpoint's float32 weights, one at a time: its files are mapped into memory, not read.

What is held is the weight asked for; pages of the files that were read are the system's to drop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.reading import ConfigError
from model.config import ModelConfig
from model.gpt import GPT
from model.partition import join
from training import store
from training.shards import Shards
from training.unpickling import load_states

Read = Callable[[str], Tensor]
"""A weight by our name of it; a tied matrix goes by its embedding's."""


def open_weights(checkpoint: Path, manifest: store.Manifest, config: ModelConfig) -> Read:
    """Float32 weights of any ZeRO stage and tensor-parallel size.

    At stages 1 to 3 they are the optimizer's, at stage 0 the model's own: rounded where it computes
    in 16 bits.

    Raises:
        Refused: a file holds more than values.
    """
    open_part = _open_shards if manifest.zero_stage else _open_whole
    parts = [
        open_part(checkpoint, manifest.zero_stage, part) for part in range(manifest.tensor_parallel)
    ]

    def read(name: str) -> Tensor:
        return join(config, [{name: part[name]()} for part in parts if name in part])[name]

    return read


@torch.no_grad()
def start_from(
    model: GPT,
    folder: Path,
    gather: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Fill every parameter from safetensors files under our names, rounded to its dtype.

    Args:
        gather: as of model.gpt.initialise.

    Raises:
        ConfigError: they are not there, or damaged.
    """
    try:
        shards = Shards(folder)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    for name, parameter in model.named_parameters():
        with gather(parameter):
            parameter.copy_(shards.read(name))


def _describe(checkpoint: Path, stage: int, part: int) -> Mapping[str, Any]:
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    states: Mapping[str, Any] = load_states(
        checkpoint / f"{prefix}mp_rank_{part:02}_model_states.pt", mmap=True
    )
    return states


def _open_whole(checkpoint: Path, stage: int, part: int) -> dict[str, Callable[[], Tensor]]:
    module = _describe(checkpoint, stage, part)["module"]
    return {name: weight.float for name, weight in module.items()}


def _open_shards(checkpoint: Path, stage: int, part: int) -> dict[str, Callable[[], Tensor]]:
    """Where in the data-parallel ranks' flat float32 groups each weight lies.

    Stages 1 and 2 lay a group's weights end to end and cut that vector into a partition per rank;
    stage 3 cuts each weight, and every rank lays its pieces of all of them end to end.
    """
    files = checkpoint.glob(f"*zero_pp_rank_*_mp_rank_{part:02}_optim_states.pt")
    ranked = sorted(files, key=_data_rank)
    shards = [load_states(path, mmap=True)["optimizer_state_dict"] for path in ranked]
    groups = _describe(checkpoint, stage, part)["param_shapes"]
    found: dict[str, Callable[[], Tensor]] = {}
    if stage == 3:
        ranks = [shard["fp32_flat_groups"] for shard in shards]
        start = 0
        for name, shape in (item for shapes in groups for item in shapes.items()):
            share = -(-shape.numel() // len(ranks))
            found[name] = partial(_gather, ranks, start, share, shape)
            start += share
        return found
    for number, shapes in enumerate(groups):
        partitions = [shard["single_partition_of_fp32_groups"][number] for shard in shards]
        # Behind each weight, where DeepSpeed's round-robin order of gradients is on.
        padded = shards[0].get("param_alignment_paddings")
        paddings = padded[number] if padded else [0] * len(shapes)
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            found[name] = partial(_gather, [partitions], start, shape.numel(), shape)
            start += shape.numel() + padding
    return found


def _data_rank(path: Path) -> int:
    match = re.search(r"zero_pp_rank_(\d+)", path.name)
    assert match
    return int(match[1])


def _gather(
    vectors: Sequence[Sequence[Tensor]], start: int, length: int, shape: torch.Size
) -> Tensor:
    """A tensor of this shape, from elements start to start + length of each vector.

    A vector is given in pieces; what the last one has beyond the shape is padding.
    """
    cut = []
    for pieces in vectors:
        first = start
        for piece in pieces:
            cut.append(piece[max(0, first) : max(0, first + length)])
            first -= piece.numel()
    flat = torch.cat(cut)[: shape.numel()]
    if flat.numel() < shape.numel():
        raise store.Damaged("its optimizer files hold no float32 weights: kept on NVMe?")
    return flat.view(shape)
