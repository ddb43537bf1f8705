"""What the policies need of DeepSpeed: its own checkpointing backend, and offload to the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import deepspeed
from deepspeed.runtime.activation_checkpointing.offload_activations import _ActivationOffloadEngine
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from configs.reading import ConfigError
from configs.schema import RunConfig
from memory.policies import Policy
from memory.recompute import Block, apply_policies, recompute
from model.gpt import GPT, Context


def checkpoint_blocks(engine: Any, config: RunConfig, policies: Sequence[Policy]) -> None:
    """Make each block of an engine's GPT keep what its policy says, from the next step on.

    Raises:
        ConfigError: reentrant checkpoints, and the model and ZeRO stage do not go with them.
    """
    settings = config.activation_checkpointing
    if settings.backend == "torch":
        offload = None
        if "offload" in policies:
            offload = partial(_offload, engine=_ActivationOffloadEngine(min_offload_bytes=0))
        apply_policies(engine.module, policies, offload=offload)
        return
    if settings.reentrant and engine.zero_optimization_stage() >= 2:
        _refuse_shared_parameters(engine.module, policies)
    options = config.deepspeed.get("activation_checkpointing", {})
    configure_deepspeed(options, engine.mpu, policies.count("full"))
    apply_policies(engine.module, policies, full=_reentrant if settings.reentrant else _deepspeed)


def _refuse_shared_parameters(model: GPT, policies: Sequence[Policy]) -> None:
    """Reentrant checkpoints run a backward pass of their own, which counts as a use of its own."""
    checkpointed = {
        parameter
        for block, policy in zip(model.blocks, policies, strict=True)
        for parameter in (block.parameters() if policy == "full" else ())
    }
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if first != name and parameter in checkpointed:
            raise ConfigError(
                [
                    f"activation_checkpointing.reentrant: {first} is also {name}, and from ZeRO "
                    "stage 2 on DeepSpeed asserts that a parameter's gradient comes once a step; "
                    "reentrant checkpoints give one for each use: set it to false"
                ]
            )


def _offload(block: Block, x: Tensor, context: Context, engine: _ActivationOffloadEngine) -> Tensor:
    """The checkpoint's saved input goes to the host on DeepSpeed's side stream, and comes back."""

    def pack(tensor: Tensor) -> int | Tensor:
        if tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            return tensor  # of the context, which all blocks share
        ticket = engine.offload_input(tensor)
        return tensor if ticket is None else ticket

    def unpack(packed: int | Tensor) -> Tensor:
        return packed if isinstance(packed, Tensor) else engine.restore_input(packed)

    with saved_tensors_hooks(pack, unpack):
        return recompute(block, x, context)


def configure_deepspeed(options: dict[str, Any], mpu: Any, checkpointed_blocks: int) -> None:
    """Hand over the deepspeed section's block of options, which DeepSpeed itself only parses.

    `number_checkpoints` is the number of blocks that are checkpointed.
    """
    deepspeed.checkpointing.configure(
        mpu,
        partition_activations=options.get("partition_activations", False),
        contiguous_checkpointing=options.get("contiguous_memory_optimization", False),
        num_checkpoints=checkpointed_blocks,
        checkpoint_in_cpu=options.get("cpu_checkpointing", False),
        synchronize=options.get("synchronize_checkpoint_boundary", False),
        profile=options.get("profile", False),
    )


def _deepspeed(block: Block, x: Tensor, context: Context) -> Tensor:
    # The context is no argument: its tensors would be partitioned over ranks, too.
    return deepspeed.checkpointing.non_reentrant_checkpoint(lambda x: block(x, *context), x)


def _reentrant(block: Block, x: Tensor, context: Context) -> Tensor:
    return deepspeed.checkpointing.checkpoint(lambda x: block(x, *context), x)
