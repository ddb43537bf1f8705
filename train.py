"""Pretrain a GPT with DeepSpeed: parse, check, build, loop, save.

    deepspeed train.py --config configs/quickstart.json
    torchrun --nproc_per_node 2 train.py --config configs/quickstart.json
    python train.py --config configs/quickstart.json --set training.max_steps=20

Run again on the same run folder, it continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.deepspeed import BATCH_KEYS, Hardware, resolve, tensor_parallel_size, warnings_of
from configs.schema import ConfigError, RunConfig, load_config
from data.dataset import Blend, Corpus, VocabularyError, require_one_tokenizer
from data.loader import Loader, evaluation_batches
from data.token_file import unigram_entropy
from memory.checkpointing import checkpoint_blocks
from memory.policies import Policy, block_policies, describe_policies
from memory.recompute import explain_recomputation
from model.flops import training_flops_per_token
from training import checkpoint, metrics
from training.engine import (
    Ranks,
    build_engine,
    leave,
    precision,
    read_ranks,
    seed_step,
    start_process_group,
    usable_cores,
)
from training.evaluate import validation_loss
from training.extensions import BuildError


@dataclass(frozen=True)
class Run:
    """Everything that is settled before the ranks first talk to each other."""

    config: RunConfig
    section: dict[str, Any]
    """The resolved DeepSpeed section."""
    policies: tuple[Policy, ...]
    """Of each block."""
    ranks: Ranks
    train_data: Blend
    validation_data: Corpus
    start: checkpoint.Progress
    checkpoint: Path | None
    """Where `start` comes from; None for a new run."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ranks = None
    try:
        ranks = read_ranks(options.local_rank)
        config = load_config(options.config, options.overrides)
        if options.check:
            return check(config, options.gpus)
        run = prepare(config, ranks)
    except (ValueError, OSError) as error:
        return fail(error, 2, ranks)
    if run.start.step >= config.training.max_steps:
        say(ranks, f"{config.training.run_folder}: done, at step {run.start.step}")
        return 0
    try:
        start_process_group(ranks, expandable_segments=config.training.expandable_segments)
        train(run)
    except ConnectionError as error:
        return fail(error, 1)
    except ConfigError as error:
        return fail(error, 2, ranks)
    except BuildError as error:
        return fail(error, 1, ranks)
    except VocabularyError as error:
        return fail(error, 2)
    torch.distributed.destroy_process_group()
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: deepspeed train.py --config configs/quickstart.json",
    )
    parser.add_argument("--config", required=True, help="the run's JSON file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a key of the config, as in training.max_steps=20 (repeatable)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="print the resolved config and exit")
    parser.add_argument("--gpus", type=int, default=1, help="with --check: the number of ranks")
    # DeepSpeed's launcher writes the first spelling, older torch launchers the second.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def check(config: RunConfig, gpus: int) -> int:
    """Print what a run on `gpus` GPUs would be, without needing one."""
    hardware = Hardware(gpus, "cuda", bf16=True)
    section = resolve(config, hardware)
    policies = block_policies(config.activation_checkpointing, config.model.layers, "cuda")
    resolved = config.model_dump() | {"deepspeed": section}
    tokens = section["train_batch_size"] * config.training.sequence_length
    flops = training_flops_per_token(config.model, config.training.sequence_length)
    steps = config.training.max_steps
    print(json.dumps(resolved, indent=2))
    print(
        f"{config.model.parameter_count():,} parameters; {tokens:,} tokens a step, {steps:,} steps"
    )
    print(f"{tokens * steps:,} tokens in all, {flops * tokens * steps:.3g} FLOPs")
    print(f"blocks: {describe_policies(policies)}")
    for line in warnings_of(config, section, hardware):
        print(f"warning: {line}")
    return 0


def prepare(config: RunConfig, ranks: Ranks) -> Run:
    """Resolve the config, open the data and claim the run folder; all mistakes at once."""
    problems: list[str] = []
    try:
        section = resolve(config, ranks.hardware())
    except ConfigError as error:
        problems += error.problems
    try:
        policies = block_policies(
            config.activation_checkpointing, config.model.layers, ranks.device.type
        )
    except ConfigError as error:
        problems += error.problems
    try:
        train_data, validation_data = open_data(config)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    ranks = replace(ranks, tensor_parallel=tensor_parallel_size(section))
    found = checkpoint.claim_run_folder(config)
    start = checkpoint.Progress(0, 0, train_data.fingerprint, ranks.world_size)
    if found:
        start = checkpoint.read_progress(found, start)
    return Run(config, section, policies, ranks, train_data, validation_data, start, found)


def open_data(config: RunConfig) -> tuple[Blend, Corpus]:
    length, seed = config.training.sequence_length, config.training.seed
    vocabulary = config.model.vocabulary_size
    corpora = [
        Corpus(corpus.path, length, seed, vocabulary_size=vocabulary)
        for corpus in config.data.train
    ]
    validation = Corpus(
        config.data.validation, length, seed, vocabulary_size=vocabulary, shuffle=False
    )
    require_one_tokenizer([*corpora, validation])
    return Blend(corpora, [corpus.weight for corpus in config.data.train]), validation


def train(run: Run) -> None:
    config, ranks, training = run.config, run.ranks, run.config.training
    engine = build_engine(config, run.section, ranks)
    checkpoint_blocks(engine, config, run.policies)
    if ranks.rank == 0:
        checkpoint.save_config(config)
    if run.checkpoint:
        checkpoint.load_checkpoint(engine, run.checkpoint)
    describe(run, engine)
    loader = Loader(
        run.train_data,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        accumulation_steps=engine.gradient_accumulation_steps(),
        rank=ranks.data_rank,
        world_size=ranks.data_ranks,
        device=ranks.device,
        samples_consumed=run.start.samples_consumed,
    )
    writer = metrics.MetricsWriter(
        Path(training.run_folder),
        start_step=run.start.step,
        max_steps=training.max_steps,
        enabled=ranks.rank == 0,
    )
    with loader, writer:
        loss = loop(run, engine, loader, writer)
    conclude(run, loss)


def loop(run: Run, engine: Any, loader: Loader, writer: metrics.MetricsWriter) -> float:
    """Train, log, evaluate and save up to max_steps; returns the last validation loss."""
    training, ranks = run.config.training, run.ranks
    validation = math.nan
    if not run.checkpoint:
        validation = evaluate(run, engine, 0, writer)
    speed = measure_speed(run)
    for step in range(run.start.step + 1, training.max_steps + 1):
        seed_step(training.seed, step, ranks.data_rank)
        lr = engine.get_lr()[0]
        loss = train_step(engine, loader)
        speed.steps += 1
        writer.step(step)
        last = step == training.max_steps
        if last or step % training.log_interval == 0:
            writer.training(
                {
                    "step": step,
                    "samples": loader.samples_consumed,
                    "tokens": loader.samples_consumed * training.sequence_length,
                    "loss": mean_over_ranks(loss),
                    "lr": lr,
                    "grad_norm": gradient_norm(engine),
                    **speed.read(loader.wait_seconds),
                }
            )
        if last or step % training.evaluation_interval == 0:
            with speed.paused():
                validation = evaluate(run, engine, step, writer)
        if last or step % training.save_interval == 0:
            with speed.paused():
                progress = replace(run.start, step=step, samples_consumed=loader.samples_consumed)
                checkpoint.save_checkpoint(engine, run.config, progress)
    return validation


def train_step(engine: Any, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """One optimizer step; returns this rank's mean loss, left on the device.

    DeepSpeed counts the micro-batches: it divides each loss by the accumulation steps, and only
    the last engine.step() of them reduces, clips and updates.
    """
    accumulation_steps = engine.gradient_accumulation_steps()
    total = torch.zeros((), device=engine.device)
    for _ in range(accumulation_steps):
        inputs, targets = next(batches)  # each [micro-batch, sequence length]
        loss = engine(inputs, targets)
        with explain_recomputation(engine.module):
            engine.backward(loss)
        engine.step()
        total += loss.detach()
    return total / accumulation_steps


def mean_over_ranks(value: Tensor) -> float:
    torch.distributed.all_reduce(value)
    return value.item() / torch.distributed.get_world_size()


def gradient_norm(engine: Any) -> float | None:
    """Global L2 norm of the last update's gradients, before clipping."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def evaluate(run: Run, engine: Any, step: int, writer: metrics.MetricsWriter) -> float:
    samples = min(run.config.training.evaluation_samples, run.validation_data.samples_per_epoch)
    batches = evaluation_batches(
        run.validation_data,
        samples,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        rank=run.ranks.data_rank,
        world_size=run.ranks.data_ranks,
        device=run.ranks.device,
    )
    loss = validation_loss(engine, batches)
    writer.evaluation(step, loss)
    return loss


def measure_speed(run: Run) -> metrics.Speed:
    training, ranks = run.config.training, run.ranks
    peak = metrics.device_peak_flops(ranks.device, precision(run.section))
    total = torch.tensor(peak or math.nan, dtype=torch.float64, device=ranks.device)
    torch.distributed.all_reduce(total)
    return metrics.Speed(
        ranks.device,
        tokens_per_step=run.section["train_batch_size"] * training.sequence_length,
        flops_per_token=training_flops_per_token(run.config.model, training.sequence_length),
        peak_flops=None if total.isnan() else total.item(),
    )


def describe(run: Run, engine: Any) -> None:
    """Say what really runs: the optimizer and precision that were chosen, not those asked for."""
    config, section, ranks = run.config, run.section, run.ranks
    micro, accumulation = (section[key] for key in BATCH_KEYS[1:])
    length = config.training.sequence_length
    copies = "replicas" if ranks.tensor_parallel > 1 else "ranks"
    lines = [
        f"model      {config.model.parameter_count():,} parameters in {precision(section)}",
        f"ranks      {ranks.world_size} on {ranks.device.type}, each with "
        f"{torch.get_num_threads()} threads",
        f"batch      {section['train_batch_size'] * length:,} tokens a step: {length} tokens x "
        f"{micro} samples x {accumulation} accumulation steps x {ranks.data_ranks} {copies}",
        f"optimizer  {describe_optimizer(engine)}",
        f"blocks     {describe_policies(run.policies)}",
    ]
    if ranks.tensor_parallel > 1:
        lines.append(f"replicas   {ranks.data_ranks}, tensor parallel size {ranks.tensor_parallel}")
    lines += [f"warning    {line}" for line in warnings_of(config, section, ranks.hardware())]
    if ranks.local_world_size > usable_cores():
        lines.append(f"warning    {ranks.local_world_size} ranks share {usable_cores()} cores")
    if run.checkpoint:
        lines.append(f"resuming   {run.checkpoint} at step {run.start.step}")
    elif (Path(config.training.run_folder) / "metrics.jsonl").exists():
        lines.append("restarting at step 0: the run folder holds no checkpoint yet")
    say(ranks, "\n".join(lines))


def describe_optimizer(engine: Any) -> str:
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    groups = optimizer.param_groups
    shown = {key: groups[0][key] for key in ("betas", "eps", "momentum") if key in groups[0]}
    shown["weight_decay"] = sorted({group["weight_decay"] for group in groups})
    settings = ", ".join(f"{key}={value}" for key, value in shown.items())
    name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    clipping = engine.gradient_clipping()
    clipped = f"clipped at {clipping}" if 0 < clipping < math.inf else "not clipped"
    return f"{name}({settings}), ZeRO stage {engine.zero_optimization_stage()}, {clipped}"


def conclude(run: Run, validation: float) -> None:
    """Put the final loss beside what knowing nothing and knowing only frequencies would score."""
    if run.ranks.rank != 0:
        return
    vocabulary, folder = run.config.model.vocabulary_size, run.config.training.run_folder
    entropy = unigram_entropy(run.validation_data.file, vocabulary)
    print(
        f"\nvalidation loss {validation:.3f} nats a token; token frequencies alone would give "
        f"{entropy:.3f}, a uniform guess ln {vocabulary} = {math.log(vocabulary):.3f}\n"
        f"checkpoint in {folder}/checkpoints, metrics in {folder}/metrics.jsonl; see the curves\n"
        f"  tensorboard --logdir {folder}\n"
        "or generate text\n"
        f"  python -m training.generate --checkpoint {folder} --prompt 'def '"
    )


def fail(error: Exception, code: int, ranks: Ranks | None = None) -> int:
    if ranks is None or ranks.local_rank == 0:  # all ranks of a host find the same mistakes
        print(f"error: {error}", file=sys.stderr, flush=True)
    return code


def say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    leave(main())
