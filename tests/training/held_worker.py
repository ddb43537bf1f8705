"""What engines of several configurations hold, as training.out_of_memory counts it.

Arguments: a JSON file of configurations by name, and the file to write to: by name and moment
("start", "backward", "step"), bytes by category.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from configs.deepspeed import resolve
from configs.schema import RunConfig
from training.engine import build_engine, leave, read_ranks, start_process_group
from training.out_of_memory import bytes_by_category


def held(config: RunConfig) -> dict[str, dict[str, int]]:
    engine = build_engine(config, resolve(config, ranks.hardware()), ranks)
    found = {"start": bytes_by_category(engine)}
    shape = engine.train_micro_batch_size_per_gpu(), config.training.sequence_length
    tokens = torch.randint(config.model.vocabulary_size, shape)
    engine.backward(engine(tokens, tokens))
    found["backward"] = bytes_by_category(engine)
    engine.step()
    found["step"] = bytes_by_category(engine)
    return found


if __name__ == "__main__":
    ranks = read_ranks()
    start_process_group(ranks)
    given = json.loads(Path(sys.argv[1]).read_text())
    results = {name: held(RunConfig.model_validate(raw)) for name, raw in given.items()}
    if ranks.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    leave(0)
