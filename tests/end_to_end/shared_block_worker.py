"""One rank of test_checkpointing.py: gradients of a GPT whose block 1 is its block 0.

Arguments: a JSON file of configurations by name, and the file rank 0 writes to: for each, how far
its gradients are from the first one's (the largest relative difference), or the exception.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad

from configs.deepspeed import resolve
from configs.schema import RunConfig
from memory import checkpointing
from memory.policies import block_policies
from model.gpt import GPT
from training import engine as trainer

build = trainer.build


def build_shared(*arguments: Any, **options: Any) -> GPT:
    model = build(*arguments, **options)
    model.blocks[1] = model.blocks[0]
    return model


def gradients(config: RunConfig, ranks: trainer.Ranks) -> dict[str, torch.Tensor]:
    engine = trainer.build_engine(config, resolve(config, ranks.hardware()), ranks)
    policies = block_policies(config.activation_checkpointing, config.model.layers, "cpu")
    checkpointing.checkpoint_blocks(engine, config, policies)
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(config.model.vocabulary_size, (4, 17), generator=generator)
    trainer.seed_step(1, 1, ranks.rank)
    engine.backward(engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}


if __name__ == "__main__":
    ranks = trainer.read_ranks()
    trainer.start_process_group(ranks)
    trainer.build = build_shared
    found: dict[str, Any] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, raw in json.loads(Path(sys.argv[1]).read_text()).items():
        if "unchecked" in name:
            checkpointing._refuse_shared_parameters = lambda *_: None
        try:
            result = gradients(RunConfig.model_validate(raw), ranks)
        except (AssertionError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        expected = expected or result
        found[name] = max(
            ((result[key] - expected[key]).norm() / expected[key].norm()).item() for key in expected
        )
    if ranks.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    trainer.leave(0)
