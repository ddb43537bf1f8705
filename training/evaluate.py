"""Validation loss over a fixed set of samples, the same at any world size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from data.dataset import Corpus
from data.loader import evaluation_batches
from training.setup import Run


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


def validation_batches(
    run: Run, engine: Any, corpus: Corpus
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """This rank's part of the first samples of a validation set."""
    return evaluation_batches(
        corpus,
        min(run.config.training.evaluation_samples, corpus.samples_per_epoch),
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        rank=run.ranks.data_rank,
        world_size=run.ranks.data_ranks,
        device=run.ranks.device,
    )


def mean(losses: Mapping[str, float]) -> float:
    """Of the validation sets, each counting the same whatever its size."""
    return sum(losses.values()) / len(losses)
