"""Validation loss over a fixed set of samples, the same at any world size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def validation_loss(engine: Any, batches: Iterable[tuple[Tensor, Tensor, int]]) -> float:
    """Mean loss per token over all ranks' batches; a collective call.

    Args:
        batches: (inputs, targets, samples), where samples is the weight of the batch's mean loss.
            Every rank has equally many: under ZeRO 3 all ranks gather parameters together.
    """
    device = engine.device
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, samples
    was_training = engine.training
    engine.eval()
    try:
        with torch.no_grad():
            for inputs, targets, count in batches:
                total[0] += engine(inputs, targets).double() * count
                total[1] += count
    finally:
        engine.train(was_training)
    torch.distributed.all_reduce(total)
    return (total[0] / total[1]).item()
