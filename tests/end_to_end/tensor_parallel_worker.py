"""One rank of test_tensor_parallel.py: trains each configuration through the real engine and step.

Arguments: a JSON file of configurations by name, and the prefix of one result file per rank.
Weights are recorded where ZeRO does not partition them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import train
from configs.deepspeed import resolve, tensor_parallel_size
from configs.schema import RunConfig
from data.loader import Loader
from training.engine import Ranks, build_engine, read_ranks, seed_step, start_process_group

KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def keep_products(index: int, block: Any, x: torch.Tensor, rotary: Any) -> Any:
    """Selective activation checkpointing: matrix products are kept, all else is computed again."""
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    return checkpoint(block, x, rotary, use_reentrant=False, context_fn=contexts)


def recompute(index: int, block: Any, x: torch.Tensor, rotary: Any) -> Any:
    return checkpoint(block, x, rotary, use_reentrant=False)


RUNNERS = {"selective": keep_products, "full": recompute}


def run(config: RunConfig, ranks: Ranks, stage: int, runner: Any) -> dict[str, Any]:
    section = resolve(config, ranks.hardware())
    section["zero_optimization"]["stage"] = stage
    ranks = replace(ranks, tensor_parallel=tensor_parallel_size(section))
    engine = build_engine(config, section, ranks)
    engine.module.run_block = runner or engine.module.run_block
    data, _ = train.open_data(config)
    result: dict[str, Any] = {"losses": [], "norms": [], "lrs": [], "start": weights(engine)}
    with Loader(
        data,
        micro_batch=section["train_micro_batch_size_per_gpu"],
        accumulation_steps=section["gradient_accumulation_steps"],
        rank=ranks.data_rank,
        world_size=ranks.data_ranks,
        device=ranks.device,
    ) as loader:
        for step in range(1, config.training.max_steps + 1):
            seed_step(config.training.seed, step, ranks.data_rank)
            result["lrs"].append(engine.get_lr()[0])
            result["losses"].append(train.mean_over_ranks(train.train_step(engine, loader)))
            result["norms"].append(train.gradient_norm(engine))
    result["end"] = weights(engine)
    engine.destroy()
    return result


def weights(engine: Any) -> dict[str, torch.Tensor]:
    if engine.zero_optimization_stage() == 3:
        return {}
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


if __name__ == "__main__":
    ranks = read_ranks()
    start_process_group(ranks)
    results = {}
    for name, raw in json.loads(Path(sys.argv[1]).read_text()).items():
        config = RunConfig.model_validate(raw)
        # "as stage N" runs what the configuration's checks refuse.
        stage = int(name.split("as stage ")[1]) if "as stage" in name else None
        wanted = config.deepspeed["zero_optimization"]["stage"]
        runner = RUNNERS.get(name.split()[0])
        results[name] = run(config, ranks, wanted if stage is None else stage, runner)
    torch.save(results, f"{sys.argv[2]}.{ranks.rank}")
    torch.distributed.destroy_process_group()
