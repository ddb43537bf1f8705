"""One rank of test_tensor_parallel.py: trains each configuration through the real engine and step.

Arguments: a JSON file of configurations by name, and the prefix of one result file per rank.
Weights are recorded where ZeRO does not partition them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from configs.deepspeed import resolve, tensor_parallel_size
from configs.schema import RunConfig
from memory.checkpointing import checkpoint_blocks
from memory.policies import block_policies
from tests.end_to_end.parity_worker import steps_of
from training.engine import Ranks, build_engine, leave, read_ranks, start_process_group


def run(config: RunConfig, ranks: Ranks, stage: int) -> dict[str, Any]:
    section = resolve(config, ranks.hardware())
    section["zero_optimization"]["stage"] = stage
    ranks = replace(ranks, tensor_parallel=tensor_parallel_size(section))
    engine = build_engine(config, section, ranks)
    policies = block_policies(
        config.activation_checkpointing, config.model.layers, ranks.device.type
    )
    checkpoint_blocks(engine, config, policies)
    result: dict[str, Any] = {"losses": [], "norms": [], "lrs": [], "start": weights(engine)}
    for step in steps_of(engine, config, ranks):
        for key, value in step.items():
            result[key].append(value)
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
        results[name] = run(config, ranks, wanted if stage is None else stage)
    torch.save(results, f"{sys.argv[2]}.{ranks.rank}")
    torch.distributed.destroy_process_group()
    leave(0)
