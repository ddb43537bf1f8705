"""A run's whole model, at its full shape, through one step's passes on any machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from memory.activations import fake_model
from memory.planner import Planner
from memory.policies import Policy
from memory.recompute import apply_policies, recompute


def run_dry(planner: Planner, policies: Sequence[Policy]) -> int:
    """One micro-batch forward and backward on fake tensors: shapes and types of the real ones.

    Offloaded blocks are recomputed in full; where their input waits is not a matter of shapes.

    Returns:
        Parameters of one rank, each of which has its gradient afterwards.

    Raises:
        AssertionError: one has none.
    """
    config, shape = planner.config, planner.shape
    training = config.training
    early_stop = config.activation_checkpointing.backend == "torch"
    with (
        fake_model(config.model, shape, training.loss, training.z_loss) as model,
        set_checkpoint_early_stop(early_stop),
    ):
        apply_policies(model, policies, offload=recompute)
        tokens = torch.zeros(shape.micro_batch, shape.sequence_length, dtype=torch.int64)
        model(tokens, tokens).backward()
        without = [name for name, weight in model.named_parameters() if weight.grad is None]
        assert not without, f"no gradient: {', '.join(without)}"
        return sum(weight.numel() for weight in model.parameters())
