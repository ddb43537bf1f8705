"""What looking after memory costs: a rehearsal against a step, and the readings of a logged step.

    python -m benchmarks.rehearsal --output benchmarks/results/rehearsal_CPU_DATE.md

On the quickstart's model; a rehearsal runs once a start, the readings once a log interval.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Contender, interleave, parse_options, ratio, report
from configs.deepspeed import resolve
from configs.schema import load_config
from training.engine import build_engine, read_ranks, start_process_group, train_step
from training.metrics import alive_memory_bytes, peak_memory_bytes
from training.out_of_memory import Whereabouts
from training.rehearse import rehearse

CONFIG = "configs/quickstart.json"


def engine_and_batch() -> tuple[Any, Any]:
    config, ranks = load_config(CONFIG), read_ranks()
    start_process_group(ranks)
    section = resolve(config, ranks.hardware())
    shape = section["train_micro_batch_size_per_gpu"], config.training.sequence_length
    tokens = torch.randint(config.model.vocabulary_size, shape)
    return build_engine(config, section, ranks), (tokens, tokens)


def prepare_step(watched: bool) -> Callable[[], Any]:
    engine, batch = engine_and_batch()
    if watched:
        Whereabouts().watch(engine)
    step = functools.partial(train_step, engine, itertools.repeat(batch))
    step()
    return lambda: step().item()


def prepare_rehearsal() -> Callable[[], Any]:
    """Undone to the bit, it can be taken again and again."""
    engine, _ = engine_and_batch()
    config = load_config(CONFIG)
    return lambda: rehearse(engine, config.model.vocabulary_size, config.training.sequence_length)


def reading_seconds() -> float:
    """Median time of what is read of the memory for one logged line."""
    cpu, seconds = torch.device("cpu"), []
    for _ in range(1000):
        started = time.perf_counter()
        alive_memory_bytes(cpu)
        peak_memory_bytes(cpu)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    options = parse_options(__doc__)
    contenders = {
        "step": Contender(functools.partial(prepare_step, False)),
        "watched step": Contender(functools.partial(prepare_step, True)),
        "rehearsal": Contender(prepare_rehearsal),
    }
    timings = interleave(contenders, options.rounds)
    for contender in contenders.values():
        contender.close()
    step = statistics.median(timing.seconds for timing in timings["step"])
    reading = reading_seconds()
    lines = [
        "| | time, relative to a step |",
        "|---|---|",
        f"| a rehearsal | {ratio(timings['rehearsal'], timings['step'])} |",
        f"| a step that knows where it is | {ratio(timings['watched step'], timings['step'])} |",
        f"| the readings of a logged step | {reading / step:.5f} |",
        "",
        f"A step takes {step * 1e3:.0f} ms, the readings {reading * 1e6:.0f} microseconds.",
    ]
    report("What looking after memory costs", lines, options.output)


if __name__ == "__main__":
    main()
