"""torch's AdamW implementations on this device: why "fused" is the default.

python -m benchmarks.optimizer --output benchmarks/results/optimizer_CPU_DATE.md
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.measure import interleave, parse_options, ratio, report
from model.config import ModelConfig
from model.gpt import build

KINDS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "one by one": {"foreach": False}}


def step_of(config: ModelConfig, arguments: dict[str, bool]) -> Callable[[], None]:
    model = build(config, seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), **arguments)  # type: ignore[arg-type]

    def step() -> None:
        optimizer.step()

    return step


def main() -> None:
    options = parse_options(__doc__, rounds=40)
    config = ModelConfig(  # type: ignore[call-arg]
        preset="gpt2", layers=6, width=384, heads=6, vocabulary_size=8192, max_sequence_length=256
    )
    timings = interleave(
        {name: step_of(config, arguments) for name, arguments in KINDS.items()}, options.rounds
    )
    lines = ["| AdamW | time against fused |", "|---|---|"]
    lines += [f"| {name} | {ratio(own, timings['fused'])} |" for name, own in timings.items()]
    report(f"AdamW step, {config.parameter_count():,} float32 parameters", lines, options.output)


if __name__ == "__main__":
    main()
