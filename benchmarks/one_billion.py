"""configs/1b.json trained on a CPU: its peak against the plan, its time against the GEMM rate.

    python -m benchmarks.one_billion --output benchmarks/results/one_billion_CPU_DATE.md

The whole model, in float32 at ZeRO 0 and on short sequences, for 24 GiB of main memory to hold its
16 bytes a parameter. Random tokens; no block is recomputed. The peak is the process's resident
memory over what it had before the model: a profile of the allocator would not fit beside the run.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import time

import torch

from benchmarks.measure import GEMM_FLOPS, parse_options, report
from configs.deepspeed import resolve
from configs.schema import RunConfig, changed, load_config
from memory.fit import uniform
from memory.machine import Machine, show_bytes
from memory.planner import Planner
from model.flops import training_flops_per_token
from training.engine import build_engine, read_ranks, start_process_group, train_step

MICRO_BATCH, LENGTH = 1, 256
CHANGES = {
    "training.sequence_length": LENGTH,
    "training.save_in_background": False,
    "activation_checkpointing": {},
    "deepspeed.bf16.enabled": False,
    "deepspeed.train_batch_size": 2 * MICRO_BATCH,
    "deepspeed.train_micro_batch_size_per_gpu": MICRO_BATCH,
    "deepspeed.zero_optimization": {"stage": 0},
}


def timed_steps(config: RunConfig, steps: int) -> tuple[list[float], list[float], list[float], int]:
    """Seconds of each step, FLOP/s of the matrix-product probe around it, losses, peak bytes."""
    ranks = read_ranks()
    start_process_group(ranks)
    before_model = _peak_resident()
    engine = build_engine(config, resolve(config, ranks.hardware()), ranks)
    tokens = torch.randint(config.model.vocabulary_size, (MICRO_BATCH, LENGTH))
    batches = itertools.repeat((tokens, tokens.roll(-1, 1)))
    left, right = torch.randn(1024, 3072), torch.randn(3072, 768)
    seconds, rates, losses = [], [], []
    for _ in range(steps):
        before = _rate(left, right)
        start = time.perf_counter()
        losses.append(train_step(engine, batches).item())
        seconds.append(time.perf_counter() - start)
        rates.append((before + _rate(left, right)) / 2)
    return seconds, rates, losses, _peak_resident() - before_model


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rate(left: torch.Tensor, right: torch.Tensor, repeats: int = 50) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        left @ right
    return repeats * GEMM_FLOPS / (time.perf_counter() - start)


def main() -> None:
    options = parse_options(__doc__, rounds=3)
    config = changed(load_config("configs/1b.json"), CHANGES)
    planner = Planner(config, Machine(gpus=1, kind="CPU"))
    plan = planner.plan(uniform(planner, "none"))
    seconds, rates, losses, peak = timed_steps(config, options.rounds)
    accumulation = planner.section["gradient_accumulation_steps"]
    tokens = accumulation * MICRO_BATCH * LENGTH
    flops = training_flops_per_token(config.model, LENGTH) * tokens
    shares = [flops / took / rate for took, rate in zip(seconds, rates, strict=True)]
    report(
        "1b on a CPU",
        [
            f"{config.model.parameter_count():,} parameters in float32, ZeRO 0, "
            f"{options.rounds} steps of {accumulation} x {MICRO_BATCH} x {LENGTH} tokens; losses "
            f"{', '.join(f'{loss:.4f}' for loss in losses)}.",
            "",
            f"Peak: {show_bytes(plan.gpu.peak.total)} planned ({plan.gpu.peak.moment}), "
            f"{show_bytes(peak)} measured, {plan.gpu.peak.total / peak:.3f} of it.",
            "",
            f"A step takes {statistics.median(seconds):.1f} s, {flops / 1e12:.2f} TFLOP of model "
            f"FLOPs: {statistics.median(shares):.1%} of the matrix-product rate beside it "
            f"({', '.join(f'{share:.1%}' for share in shares)} by step).",
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
