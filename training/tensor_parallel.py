"""Tensor parallelism: the model's cuts (model/partition.py) in the words of DeepSpeed's AutoTP.

The ranks of one group are neighbours and hold one replica together: they read the same samples and
draw the same dropout masks, except inside attention, where each has heads of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.module_inject import layers
from deepspeed.utils import groups
from torch import Tensor, nn

from model.config import ModelConfig
from model.documents import Attend
from model.gpt import Attention
from model.partition import cuts, summed_parameters


def layer_specs(config: ModelConfig) -> list[dict[str, Any]]:
    """`tensor_parallel.partition_config.layer_specs`, patterns of parameter names."""
    specs: list[dict[str, Any]] = []
    for layer, cut in cuts(config).items():
        spec: dict[str, Any] = {"patterns": [_pattern(f"{layer}.weight")]}
        spec["partition_type"] = "column" if cut.by == "columns" else "row"
        if len(cut.fused) > 1:
            spec |= {"shape": [list(cut.fused), -1], "partition_dim": 0}
        specs.append(spec)
    # "skip" leaves the parameter whole; the sum of its gradient is asked for separately.
    for name in summed_parameters(config):
        specs.append(
            {"patterns": [_pattern(name)], "partition_type": "skip", "grad_allreduce": True}
        )
    return specs


def _pattern(name: str) -> str:
    return rf"blocks\.\d+\.{re.escape(name)}$"


def configure(
    config: ModelConfig, section: dict[str, Any], size: int
) -> tuple[dict[str, Any], Any]:
    """The section and mpu for deepspeed.initialize and zero.Init.

    Left to itself, DeepSpeed 0.19.8 makes the groups only after it has checked the batch sizes, and
    then counts every rank as a data-parallel one.
    """
    groups._init_tp_mesh_device(tensor_model_parallel_size=size)
    layers.RowParallel = _RowParallel
    partition = {"use_default_specs": False, "layer_specs": layer_specs(config)}
    block = {**section["tensor_parallel"], "partition_config": partition}
    return {**section, "tensor_parallel": block}, groups


_SumInPlace: Any = layers.RowParallel


class _RowParallel(_SumInPlace):  # type: ignore[misc]
    """The sum over ranks of a matrix product, in a tensor of its own.

    DeepSpeed's sums in place. A product kept by selective activation checkpointing would then be
    the sum already, be summed again when the block is recomputed, and give wrong gradients.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, product: Tensor, is_inference: bool) -> Tensor:
        # Contiguous, or DeepSpeed sums a copy and returns the tensor it was given.
        total = product.clone(memory_format=torch.contiguous_format)
        summed: Tensor = _SumInPlace.forward(ctx, group, total, is_inference)
        return summed


def separate_attention_masks(model: nn.Module, device: torch.device) -> None:
    """Give each rank attention dropout of its own; everything else draws the same on all of them.

    With generators in the same state, which replicated tensors need, the ranks' heads would repeat
    each other's masks. The fork is seeded from the CPU's generator: that needs no synchronisation
    with a GPU, and a recomputed block draws the same again.
    """
    rank = groups.get_tensor_model_parallel_rank()
    devices = [device] if device.type == "cuda" else []

    def wrap(attend: Attend) -> Attend:
        def attend_with_own_mask(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
            if dropout == 0:
                return attend(q, k, v, dropout)
            seed = int(torch.randint(2**62, ()))
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed + rank)
                return attend(q, k, v, dropout)

        return attend_with_own_mask

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        *others, attend = arguments
        return (*others, wrap(attend))

    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(hook)


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Global L2 norm: cut gradients are summed over the group, replicated ones counted once."""
    cut: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            is_cut = getattr(parameter, layers.DS_TENSOR_MODEL_PARALLEL, False)
            (cut if is_cut else whole).append(parameter.grad)
    square = torch.nn.utils.get_total_norm(cut).square()
    torch.distributed.all_reduce(square, group=groups.get_tensor_model_parallel_group())
    return (square + torch.nn.utils.get_total_norm(whole).square()).sqrt()
