"""What a run says of itself at its start and at its end."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch

from configs.deepspeed import BATCH_KEYS, precision, warnings_of
from data.token_file import unigram_entropy
from memory.policies import describe_policies
from training.engine import Ranks, usable_cores
from training.setup import Run


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
    lines += describe_data(run)
    if engine.module.separator is not None:
        lines.append(f"documents  masked; token {engine.module.separator} begins each")
    if ranks.tensor_parallel > 1:
        lines.append(f"replicas   {ranks.data_ranks}, tensor parallel size {ranks.tensor_parallel}")
    lines += [f"warning    {line}" for line in warnings_of(config, section, ranks.hardware())]
    if ranks.local_world_size > usable_cores():
        lines.append(f"warning    {ranks.local_world_size} ranks share {usable_cores()} cores")
    if run.checkpoint:
        lines.append(f"resuming   {run.checkpoint} at step {run.start.step}")
    elif run.initial_weights:
        lines.append(f"weights    {run.initial_weights}")
    elif (Path(config.training.run_folder) / "metrics.jsonl").exists():
        lines.append("restarting at step 0: the run folder holds no checkpoint yet")
    say(ranks, "\n".join(lines))


def describe_data(run: Run) -> list[str]:
    """What the whole run reads of each corpus: a line each, and what is worth a second look."""
    data, total, length = run.train_data, run.total_samples, run.train_data.sequence_length
    lines, notices = [], []
    counts = data.counts(total).tolist()
    for entry, corpus, samples in zip(run.config.data.train, data.corpora, counts, strict=True):
        made_by = "" if corpus.file.manifest else ", no manifest, ids as of data.tokenizer"
        epochs = samples / corpus.samples_per_epoch
        lines.append(
            f"data       {entry.path}: {samples / total:.2%} of the samples and tokens, "
            f"{samples * length:,} tokens, {epochs:.3g} epochs of {corpus.file.token_count:,} "
            f"in {corpus.file.document_count:,} documents{made_by}"
        )
        if not samples:
            notices.append(f"notice     {entry.path}: skipped, the run reads nothing of it")
        if epochs > entry.max_epochs:
            notices.append(
                f"warning    {entry.path}: read {epochs:.3g} times, more than its max_epochs of "
                f"{entry.max_epochs:g}: repeated tokens teach less and less (arXiv 2305.16264)"
            )
    for stage in data.stages[1:]:
        shares = ", ".join(f"{float(share):.2%}" for share in stage.shares)
        lines.append(f"schedule   from {stage.first * length:,} tokens: {shares}")
        if stage.first >= total:
            notices.append(f"notice     the run ends at {total * length:,} tokens, before that")
    return lines + notices


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


def describe_milder(run: Run, milder: Run) -> str:
    """What an adaptation changes."""
    batches = [config.section for config in (run, milder)]
    changes = [
        f"{key} {before[key]} -> {after[key]}"
        for before, after in [batches]
        for key in BATCH_KEYS[1:]
        if before[key] != after[key]
    ]
    changes.append(f"blocks {describe_policies(milder.policies)}")
    return "; ".join(changes)


def conclude(run: Run, validation: float) -> None:
    """Put the final loss beside what knowing nothing and knowing only frequencies would score."""
    if run.ranks.rank != 0:
        return
    vocabulary, folder = run.config.model.vocabulary_size, run.config.training.run_folder
    files = [corpus.file for corpus in run.validation_data.values()]
    entropy = sum(unigram_entropy(file, vocabulary) for file in files) / len(files)
    print(
        f"\nvalidation loss {validation:.3f} nats a token; token frequencies alone would give "
        f"{entropy:.3f}, a uniform guess ln {vocabulary} = {math.log(vocabulary):.3f}\n"
        f"checkpoint in {folder}/checkpoints, metrics in {folder}/metrics.jsonl; see the curves\n"
        f"  tensorboard --logdir {folder}\n"
        "or generate text\n"
        f"  python -m training.generate --checkpoint {folder} --prompt 'def '"
    )


def say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


def fail(error: Exception | str, code: int, ranks: Ranks | None = None) -> int:
    """One line for a mistake; returns the exit code."""
    if ranks is None or ranks.local_rank == 0:  # all ranks of a host find the same mistakes
        print(f"error: {error}", file=sys.stderr, flush=True)
    return code
