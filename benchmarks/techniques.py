"""What each technique of configs/techniques/ saves and costs, on the quickstart's model.

    python -m benchmarks.techniques --output benchmarks/results/techniques_CPU_DATE.md

And what each checkpointing policy keeps of one wide block. Every contender has its own process.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import (
    Contender,
    interleave,
    kept_bytes,
    parse_options,
    peak_bytes,
    ratio,
    report,
)
from configs.deepspeed import resolve
from configs.reading import ConfigError
from configs.schema import load_config
from memory.checkpointing import checkpoint_blocks
from memory.policies import Policy
from memory.recompute import apply_policies
from model.config import ModelConfig
from model.gpt import build
from training.engine import build_engine, read_ranks, start_process_group, train_step
from training.setup import machine_of, policies_of

REFERENCE = "quickstart"
WIDE: dict[str, Any] = {"width": 1024, "heads": 16, "max_sequence_length": 512}
BATCH = 4


def config_paths() -> list[Path]:
    return [Path("configs/quickstart.json"), *sorted(Path("configs/techniques").glob("*.json"))]


def runnable(path: Path) -> str | None:
    """Why a configuration cannot run on this device; None if it can."""
    config, ranks = load_config(path), read_ranks()
    try:
        resolve(config, ranks.hardware())
        policies_of(config, machine_of(ranks, config))
    except ConfigError as error:
        return str(error)
    return None


def prepare_training(path: Path) -> Callable[[], Any]:
    """An engine of this configuration after three steps, and its next step."""
    config, ranks = load_config(path), read_ranks()
    start_process_group(ranks)
    section = resolve(config, ranks.hardware())
    engine = build_engine(config, section, ranks)
    checkpoint_blocks(engine, config, policies_of(config, machine_of(ranks, config)))
    shape = section["train_micro_batch_size_per_gpu"], config.training.sequence_length + 1
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocabulary_size, shape, generator=generator)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    step = functools.partial(train_step, engine, itertools.repeat(batch))
    for _ in range(3):
        step()
    return lambda: step().item()


def wide_block(preset: str, policy: Policy) -> Callable[[], torch.Tensor]:
    config = ModelConfig.model_validate(
        {"preset": preset, "layers": 1, "vocabulary_size": 64} | WIDE
    )
    model = build(config, seed=0)
    apply_policies(model, (policy,))
    time = config.max_sequence_length
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, time, config.width, generator=generator, requires_grad=True)
    _, context = model.begin(torch.zeros(BATCH, time, dtype=torch.int64))
    return lambda: model.run_block(0, model.blocks[0], x, context)


def prepare_block(preset: str, policy: Policy) -> Callable[[], Any]:
    forward = wide_block(preset, policy)
    return lambda: forward().sum().backward()


def rows(contenders: Mapping[str, Contender], reference: str, rounds: int) -> dict[str, str]:
    """Time relative to the reference, by contender."""
    timings = interleave(contenders, rounds)
    for contender in contenders.values():
        contender.close()
    return {name: str(ratio(own, timings[reference])) for name, own in timings.items()}


def technique_lines(rounds: int) -> list[str]:
    paths = config_paths()
    # Elsewhere, as it claims a rank's place in the environment, which each contender does itself.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        reasons = pool.map(runnable, paths)
    refused = {path: reason for path, reason in zip(paths, reasons, strict=True) if reason}
    contenders = {
        path.stem: Contender(functools.partial(prepare_training, path))
        for path in paths
        if path not in refused
    }
    times = rows(contenders, REFERENCE, rounds)
    base = contenders[REFERENCE].peak_bytes
    lines = ["| configuration | peak MB | against the quickstart | time of a step |"]
    lines += ["|---|---|---|---|"]
    for name, contender in contenders.items():
        peak = contender.peak_bytes
        lines.append(f"| {name} | {peak / 1e6:.0f} | {peak / base:.2f} | {times[name]} |")
    lines += [f"\n{path.stem} does not run here: {reason}" for path, reason in refused.items()]
    return lines


def block_lines(rounds: int) -> list[str]:
    lines = []
    for preset in ("gpt2", "llama"):
        policies: tuple[Policy, ...] = ("none", "selective", "full")
        kept = {policy: kept_bytes(wide_block(preset, policy)) for policy in policies}
        peaks = {policy: peak_bytes(prepare_block(preset, policy)) for policy in policies}
        contenders: dict[str, Contender] = {
            policy: Contender(functools.partial(prepare_block, preset, policy))
            for policy in policies
        }
        times = rows(contenders, "none", rounds)
        lines += ["", f"One {preset} block, {WIDE}, batch {BATCH}, float32, without dropout:", ""]
        lines += ["| policy | kept MB | against none | peak MB | time, forward and backward |"]
        lines += ["|---|---|---|---|---|"]
        for policy in policies:
            lines.append(
                f"| {policy} | {kept[policy] / 1e6:.1f} | {kept[policy] / kept['none']:.3f} "
                f"| {peaks[policy] / 1e6:.1f} | {times[policy]} |"
            )
    return lines


def main() -> None:
    options = parse_options(__doc__)
    lines = technique_lines(options.rounds) + block_lines(options.rounds)
    lines += ["", "Peak: torch's allocator, from building to the third step, or of one call."]
    lines += ["Times relative to the quickstart (ZeRO 2, no checkpointing) or to none."]
    report("Techniques for memory", lines, options.output)


if __name__ == "__main__":
    main()
