"""One rank of test_tensor_parallel.py: trains each configuration through the real engine and step.

Arguments: a JSON file of configurations by name, and the prefix of one result file per rank.
Weights are recorded where ZeRO does not partition them, and with DeepSpeed's checkpointing what
this rank keeps of one block for its backward pass.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.measure import kept_bytes
from configs.deepspeed import resolve, tensor_parallel_size
from configs.schema import RunConfig
from memory.checkpointing import checkpoint_blocks
from memory.policies import block_policies
from model.gpt import Context
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
    if config.activation_checkpointing.backend == "deepspeed":
        result["kept"] = kept_of_a_block(engine)
    engine.destroy()
    return result


def weights(engine: Any) -> dict[str, torch.Tensor]:
    if engine.zero_optimization_stage() == 3:
        return {}
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def kept_of_a_block(engine: Any) -> dict[str, int]:
    """Bytes of a block's input, and those allocated and kept between its forward and backward."""
    model = engine.module
    leaf = torch.zeros(512, 16, model.config.width, requires_grad=True)

    def forward() -> torch.Tensor:
        # The input is made here, so that what is given up of it counts.
        return model.run_block(0, model.blocks[0], leaf * 1, Context(None))

    def no_sum(**_: Any) -> None:
        """gloo's threads hold a tensor a little longer, and the count does not see them free it."""

    with mock.patch("torch.distributed.all_reduce", no_sum):
        return {"input": leaf.nbytes, "kept": kept_bytes(forward) - leaf.nbytes}  # less its output


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
