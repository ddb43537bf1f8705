"""One rank of test_parity.py: trains each configuration through the real engine and step.

Arguments: a JSON file of configurations by name, and the file rank 0 writes the results to. Beside
losses it records what each update did to the weights, where they are not partitioned, and a digest
of the weights at the end.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

import train
from configs.deepspeed import resolve, tensor_parallel_size
from configs.schema import RunConfig
from data.loader import Loader
from memory.checkpointing import checkpoint_blocks
from training.engine import (
    Ranks,
    build_engine,
    leave,
    read_ranks,
    seed_step,
    start_process_group,
    train_step,
)
from training.rehearse import rehearse
from training.setup import machine_of, open_data, policies_of


def mean_over_ranks(value: Tensor) -> float:
    torch.distributed.all_reduce(value)
    return value.item() / torch.distributed.get_world_size()


def steps_of(engine: Any, config: RunConfig, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Train to the end through the real step; yields each step's loss, norm and learning rate."""
    data, _ = open_data(config)
    with Loader(
        data,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        accumulation_steps=engine.gradient_accumulation_steps(),
        rank=ranks.data_rank,
        world_size=ranks.data_ranks,
        device=ranks.device,
    ) as loader:
        for step in range(1, config.training.max_steps + 1):
            seed_step(config.training.seed, step, ranks.data_rank)
            lr = engine.get_lr()[0]
            loss = mean_over_ranks(train_step(engine, loader))
            yield {"losses": loss, "norms": train.gradient_norm(engine), "lrs": lr}


def run(config: RunConfig, ranks: Ranks) -> dict[str, list[Any]]:
    section = resolve(config, ranks.hardware())
    ranks = replace(ranks, tensor_parallel=tensor_parallel_size(section))
    engine = build_engine(config, section, ranks)
    checkpoint_blocks(engine, config, policies_of(config, machine_of(ranks, config)))
    if config.training.rehearse:
        rehearse(engine, config.model.vocabulary_size, config.training.sequence_length)
    result: dict[str, list[Any]] = {"losses": [], "norms": [], "lrs": [], "updates": [], "row": []}
    whole = engine.zero_optimization_stage() < 3
    weights = all_weights(engine)
    for step in steps_of(engine, config, ranks):
        for key, value in step.items():
            result[key].append(value)
        if whole:
            before, weights = weights, all_weights(engine)
            result["updates"].append((weights - before).norm().item())
            result["row"].append(engine.module.blocks[0].mlp.up.weight[:1].flatten().tolist())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=not whole):
        weights = all_weights(engine)
    result["weights"] = [hashlib.sha256(weights.float().numpy().tobytes()).hexdigest()]
    engine.destroy()
    return result


def all_weights(engine: Any) -> torch.Tensor:
    parameters = [parameter.detach().flatten() for parameter in engine.module.parameters()]
    return torch.cat(parameters).clone()


if __name__ == "__main__":
    ranks = read_ranks()
    start_process_group(ranks)
    configs = json.loads(Path(sys.argv[1]).read_text())
    results = {name: run(RunConfig.model_validate(raw), ranks) for name, raw in configs.items()}
    if ranks.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
    leave(0)
