"""Trains three steps in a process that may have only so much memory.

Arguments: a config's JSON file, and how many bytes it may have beyond what a process that has
trained a small model has. Exit code 3 when they did not suffice: the report is in the run folder.
"""

from __future__ import annotations

import gc
import itertools
import re
import resource
import sys
from pathlib import Path

import torch

from configs.deepspeed import resolve
from configs.schema import RunConfig, changed, load_config
from memory.checkpointing import checkpoint_blocks
from memory.policies import block_policies
from training.engine import (
    Ranks,
    build_engine,
    leave,
    read_ranks,
    start_process_group,
    train_step,
)
from training.out_of_memory import (
    Whereabouts,
    is_out_of_memory,
    observe,
    report_out_of_memory,
)
from training.setup import prepare


def data_bytes() -> int:
    """What RLIMIT_DATA counts: private writable memory."""
    text = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmData:\s+(\d+) kB", text)[0]) * 1024


class Training:
    """As train.py's, on random tokens."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.whereabouts = Whereabouts()
        self.engine = None

    def run(self) -> None:
        config = self.config
        self.engine = engine = build_engine(
            config, resolve(config, self.ranks.hardware()), self.ranks
        )
        policies = block_policies(config.activation_checkpointing, config.model.layers, "cpu")
        checkpoint_blocks(engine, config, policies)
        self.whereabouts.watch(engine)
        shape = engine.train_micro_batch_size_per_gpu(), config.training.sequence_length
        tokens = torch.randint(config.model.vocabulary_size, shape)
        for _ in range(3):
            train_step(engine, itertools.repeat((tokens, tokens)))


def main(path: str, allowed: int) -> int:
    ranks = read_ranks()
    torch.set_num_threads(1)
    start_process_group(ranks)
    config = load_config(path)
    small = {"model.layers": 1, "model.width": 8, "model.vocabulary_size": 16}
    warm_up = Training(changed(config, small), ranks)
    warm_up.run()  # loads what is loaded at first use
    warm_up.engine.destroy()
    del warm_up
    gc.collect()
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + allowed,) * 2)
    training = Training(config, ranks)
    observation = None
    try:
        training.run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        observation = observe(training.engine, error, training.whereabouts.moment, ranks)
    if observation is None:
        return 0
    if training.engine is not None:
        training.engine.destroy()
    training.engine = None
    gc.collect()
<<<<<<< HEAD
    # The planner loads torch's compiler for its tracing: that is no part of the training.
    resource.setrlimit(resource.RLIMIT_DATA, unlimited)
    report_out_of_memory(prepare(config, ranks), observation)
=======
    report_out_of_memory(config.training.run_folder, observation, config, ranks)
>>>>>>> doctor
    return 3


if __name__ == "__main__":
    leave(main(sys.argv[1], int(sys.argv[2])))
