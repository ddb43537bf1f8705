"""What masking documents costs a training step, in time and memory.

    python -m benchmarks.document_masking --output benchmarks/results/document_masking_CPU_DATE.md

The quickstart's model on tokens of its corpus, 2048 a step in rows of different lengths. A CPU's
attention takes as long whatever the documents' lengths are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Contender, interleave, parse_options, ratio, report
from configs.deepspeed import resolve
from configs.schema import changed, load_config
from training.engine import build_engine, read_ranks, start_process_group, train_step
from training.setup import open_data

TOKENS = 2048
LENGTHS = (256, 1024)


def prepare(length: int, masked: bool) -> Callable[[], Any]:
    """An engine after three steps, and its next step."""
    config = changed(
        load_config("configs/quickstart.json"),
        {
            "model.max_sequence_length": length,
            "training.sequence_length": length,
            "data.document_masking": masked,
            "deepspeed.train_batch_size": TOKENS // length,
        },
    )
    ranks = read_ranks()
    start_process_group(ranks)
    engine = build_engine(config, resolve(config, ranks.hardware()), ranks)
    data, _ = open_data(config)
    rows = torch.tensor([data.sample(n).tolist() for n in range(TOKENS // length)])
    batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    step = functools.partial(train_step, engine, itertools.repeat(batch))
    for _ in range(3):
        step()
    return lambda: step().item()


def main() -> None:
    options = parse_options(__doc__)
    lines = [
        "| rows | step, masked against not | peak MB, not masked | masked |",
        "|---|---|---|---|",
    ]
    for length in LENGTHS:
        contenders = {
            masked: Contender(functools.partial(prepare, length, masked))
            for masked in (False, True)
        }
        timings = interleave({str(key): run for key, run in contenders.items()}, options.rounds)
        peaks = {masked: run.peak_bytes / 1e6 for masked, run in contenders.items()}
        for run in contenders.values():
            run.close()
        lines.append(
            f"| {TOKENS // length} x {length} tokens | {ratio(timings['True'], timings['False'])} "
            f"| {peaks[False]:.1f} | {peaks[True]:.1f} |"
        )
    report("Masked documents, float32", lines, options.output)


if __name__ == "__main__":
    main()
