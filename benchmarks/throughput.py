"""Training steps of one GPT: ours against transformers, with and without DeepSpeed.

    python -m benchmarks.throughput --output benchmarks/results/throughput_CPU_DATE.md

All contenders start from the same weights, see the same batch and use torch's fused AdamW without
clipping. Ours under DeepSpeed is train.py's own step. Its ZeRO 0 engine takes the gradient norm at
every step, which the plain loops do not.

Each contender lives in a process of its own, as in use, and they take turns. In one process they
would share one heap, and each would train in the memory that another had just freed: that hides
what allocating large tensors costs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from benchmarks.measure import (
    Contender,
    interleave,
    operator_shares_of,
    parse_options,
    ratio,
    report,
    share_of_probe,
)
from configs.deepspeed import resolve
from configs.schema import RunConfig
from model.flops import training_flops_per_token
from model.gpt import build
from model.huggingface import export_state_dict, to_transformers_config
from training.engine import build_engine, read_ranks, start_process_group, train_step

BATCH, LENGTH = 8, 256
Step = Callable[[], Tensor]


def run_config(stage: int, loss: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {
                "preset": "gpt2",
                "layers": 6,
                "width": 384,
                "heads": 6,
                "vocabulary_size": 8192,
                "max_sequence_length": LENGTH,
            },
            "data": {"train": [{"path": "unused"}], "validation": "unused"},
            "training": {
                "max_steps": 1,
                "sequence_length": LENGTH,
                "run_folder": "unused",
                "loss": loss,
            },
            "deepspeed": {
                "train_batch_size": BATCH,
                "gradient_clipping": 0,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "zero_optimization": {"stage": stage},
            },
        }
    )


@functools.cache
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(8192, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours_deepspeed(stage: int) -> Step:
    config, ranks = run_config(stage, "auto"), read_ranks()
    engine = build_engine(config, resolve(config, ranks.hardware()), ranks)
    return functools.partial(train_step, engine, itertools.repeat(batch()))


def ours_plain(loss: str) -> Step:
    config = run_config(0, loss)
    return plain_loop(build(config.model, seed=config.training.seed, loss=config.training.loss))


class Transformers(nn.Module):
    """GPT2LMHeadModel with our model's weights, called as ours is."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2LMHeadModel

        config = run_config(0, "full")
        ours = build(config.model, seed=config.training.seed)
        self.model = GPT2LMHeadModel(to_transformers_config(config.model))
        self.model.load_state_dict(export_state_dict(ours), strict=False)
        self.model.tie_weights()
        self.train()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model(input_ids=inputs, labels=targets, shift_labels=targets).loss


def transformers_plain() -> Step:
    return plain_loop(Transformers())


def transformers_deepspeed() -> Step:
    model = Transformers()
    section = {"train_batch_size": BATCH, "gradient_clipping": 0, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=fused_adamw(model), config=section, dist_init_required=False
    )
    return functools.partial(train_step, engine, itertools.repeat(batch()))


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)


def plain_loop(model: nn.Module) -> Step:
    optimizer = fused_adamw(model)

    def step() -> Tensor:
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


CONTENDERS: dict[str, Callable[[], Step]] = {
    "ours, DeepSpeed ZeRO 0": functools.partial(ours_deepspeed, 0),
    "ours, DeepSpeed ZeRO 2": functools.partial(ours_deepspeed, 2),
    "ours, plain loop": functools.partial(ours_plain, "auto"),
    "ours, plain loop, full logits": functools.partial(ours_plain, "full"),
    "transformers, plain loop": transformers_plain,
    "transformers, DeepSpeed ZeRO 0": transformers_deepspeed,
}
REFERENCE = "transformers, plain loop"
OPERATORS_SHOWN = 10


def prepare(make: Callable[[], Step]) -> Callable[[], float]:
    """In the contender's own process: its step, built and run three times, returning the loss."""
    start_process_group(read_ranks())
    step = make()
    for _ in range(3):
        step()
    return lambda: step().item()


def check_equal_losses(steps: dict[str, Any]) -> None:
    losses = {name: step() for name, step in steps.items()}
    for name, loss in losses.items():
        if abs(loss - losses[REFERENCE]) > 1e-5 * losses[REFERENCE]:
            raise SystemExit(f"{name} is at loss {loss}, {REFERENCE} at {losses[REFERENCE]}")


def main() -> None:
    options = parse_options(__doc__)
    steps = {name: Contender(functools.partial(prepare, make)) for name, make in CONTENDERS.items()}
    check_equal_losses(steps)
    timings = interleave(steps, options.rounds)
    for step in steps.values():
        step.close()

    tokens = BATCH * LENGTH
    flops = training_flops_per_token(run_config(0, "auto").model, LENGTH) * tokens
    lines = [
        "| contender | tokens/s | speed against transformers | share of GEMM probe | peak MB |"
    ]
    lines += ["|---|---|---|---|---|"]
    for name, own in timings.items():
        seconds = sorted(timing.seconds for timing in own)[len(own) // 2]
        lines.append(
            f"| {name} | {tokens / seconds:,.0f} | {ratio(timings[REFERENCE], own)} "
            f"| {share_of_probe(own, flops).median:.3f} | {steps[name].peak_bytes / 1e6:.0f} |"
        )
    plain = timings["ours, plain loop"]
    lines += ["", "Time against our own plain loop:", ""]
    for name in ("ours, DeepSpeed ZeRO 0", "ours, DeepSpeed ZeRO 2"):
        lines.append(f"- {name}: {ratio(timings[name], plain)}")
    lines += ["", "Where a step goes (self time of torch's operators, with the profiler on):", ""]
    for name in ("ours, plain loop", REFERENCE):
        shares = operator_shares_of(functools.partial(prepare, CONTENDERS[name])).items()
        shown = ", ".join(f"{key} {share:.1%}" for key, share in list(shares)[:OPERATORS_SHOWN])
        lines.append(f"- {name}: {shown}")
    lines += [
        "",
        "Medians with quartiles. Peak: torch's allocator, from building to the third step.",
    ]
    report("Training throughput, 6 x 384 GPT, 8 x 256 tokens, float32", lines, options.output)


if __name__ == "__main__":
    main()
