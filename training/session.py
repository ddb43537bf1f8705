"""What a training loop works with, opened for one stretch of steps and closed behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.deepspeed import BATCH_KEYS, precision
from data.loader import Loader, read_batch
from memory.policies import describe_policies
from model.flops import training_flops_per_token
from training import checkpoint, metrics, store
from training.agreement import require_distinct_batches
from training.engine import seed_step
from training.first_block import first_non_finite
from training.guard import BadSteps, Finding, Guard, RollBack, loss_scale
from training.samples import excerpt
from training.saver import Saver
from training.setup import Run
from training.spikes import Spikes
from training.stop import Stop
from training.tracking import Event, MetricsWriter

EXCERPTS = 4
"""Samples whose text a report shows, of one micro-batch."""
ROLLBACKS = 3
"""To one checkpoint, before the run gives up."""


@dataclass
class Session:
    loader: Loader
    writer: MetricsWriter
    guard: Guard
    speed: metrics.Speed
    leaks: metrics.LeakWatch
    saver: Saver

    def progress(self, run: Run, step: int) -> checkpoint.Progress:
        consumed = self.loader.samples_consumed
        return replace(
            run.start,
            step=step,
            samples_consumed=consumed,
            data_fingerprint=run.train_data.fingerprint(run.samples.number(consumed)),
            skipped_samples=run.samples.passed(consumed),
            recent_losses=list(self.guard.spikes.recent),
        )


@contextmanager
def open_session(run: Run, engine: Any, stop: Stop, saver: Saver) -> Iterator[Session]:
    training, ranks = run.config.training, run.ranks
    folder = Path(training.run_folder)
    loader = Loader(
        run.samples,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        accumulation_steps=engine.gradient_accumulation_steps(),
        rank=ranks.data_rank,
        world_size=ranks.data_ranks,
        device=ranks.device,
        samples_consumed=run.start.samples_consumed,
    )
    end = run.samples.number(run.total_samples)
    require_distinct_batches(ranks, loader.first_samples, run.train_data.fingerprint(end))
    writer = MetricsWriter(
        folder,
        start_step=run.start.step,
        max_steps=training.max_steps,
        enabled=ranks.rank == 0,
    )
    guard = Guard(
        engine,
        stop,
        Spikes(training.spike_deviations, run.start.recent_losses),
        writer,
        investigate=partial(investigate, run, engine),
        limit=training.max_bad_steps,
        rolls_back=training.on_spike == "rollback",
        folder=folder,
    )
    guard.has_checkpoint = run.checkpoint is not None
    with loader, writer:
        yield Session(loader, writer, guard, measure_speed(run), metrics.LeakWatch(), saver)


def beginning(run: Run) -> list[Event]:
    """Where a run comes from, and what was changed since it was there or asked for."""
    blocks = f"blocks {describe_policies(run.policies)}"
    if run.checkpoint is None:
        folder = Path(run.config.training.run_folder)
        earlier = sorted(path.name for path in folder.glob("before-restart-*"))
        kept = f"; earlier runs are in {', '.join(earlier)}" if earlier else ""
        events = [Event("start", f"started: {run.layout}; {blocks}{kept}")]
    else:
        converted = f", converted from {run.converted_from}" if run.converted_from else ""
        words = f"resumed from {run.checkpoint.name}: {run.layout}{converted}; {blocks}"
        events = [Event("resume", words)]
        before = store.read_manifest(run.checkpoint).config["activation_checkpointing"]
        if before != store.as_json(run.asked.activation_checkpointing.model_dump()):
            events.append(Event("policy", f"activation checkpointing changed: {blocks}"))
    if run.config != run.asked:
        sizes = ", ".join(f"{key} {run.section[key]}" for key in BATCH_KEYS[1:])
        events.append(Event("policy", f"adapted to the memory there is: {sizes}, {blocks}"))
    return events


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


def investigate(run: Run, engine: Any, step: int, samples_before: int) -> list[Finding]:
    """A collective call: repeat a bad step; what all ranks found, the first of them first."""
    ranks, order, device = run.ranks, run.samples, run.ranks.device
    size = engine.train_micro_batch_size_per_gpu()
    batches = []
    for micro_step in range(engine.gradient_accumulation_steps()):
        start = samples_before + (micro_step * ranks.data_ranks + ranks.data_rank) * size
        positions = range(start, start + size)
        tokens = read_batch(order, positions, device).to(device)
        numbers = [order.number(position) for position in positions]
        batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), numbers))
    seed_step(run.config.training.seed, step, ranks.data_rank)
    own = first_non_finite(engine, batches, rank=ranks.rank, scale=loss_scale(engine) or 1.0)
    named = run.config.data.tokenizer
    own = [
        replace(
            finding, text=[excerpt(run.train_data, n, named) for n in finding.samples[:EXCERPTS]]
        )
        for finding in own
    ]
    gathered: list[Any] = [None] * ranks.world_size
    torch.distributed.all_gather_object(gathered, own)
    return sorted((finding for found in gathered for finding in found), key=lambda f: f.order)


def roll_back(
    run: Run, engine: Any, saver: Saver, spike: RollBack, earlier: list[int]
) -> tuple[Run, Event]:
    """The run at its last checkpoint, behind whose samples follow those behind the spike.

    A collective call.

    Args:
        earlier: steps that the run has been rolled back to; this one is added.

    Raises:
        BadSteps: it has been there too often, or no checkpoint could be written.
    """
    saver.settle()
    search = checkpoint.find_together(run.config, run.ranks)
    if search.found is None or search.manifest is None:
        raise BadSteps(f"step {spike.step} is a spike, and no checkpoint could be written before")
    start = replace(
        checkpoint.Progress(**search.manifest.progress), world_size=run.ranks.world_size
    )
    if earlier.count(start.step) == ROLLBACKS:
        raise BadSteps(
            f"step {spike.step} is a spike after {ROLLBACKS} rollbacks to step {start.step}: lower "
            "the learning rate, or continue from an earlier checkpoint"
        )
    earlier.append(start.step)
    checkpoint.load_checkpoint(engine, search.found)
    order = run.samples
    first, last = (order.number(n) for n in (start.samples_consumed, spike.samples_consumed - 1))
    skipped = [*order.ranges, [first, last]]
    news = Event(
        "rollback",
        f"rolled back from step {spike.step}, whose loss is a spike; samples {first} to {last} are "
        "stepped over",
    )
    start = replace(start, skipped_samples=skipped)
    return replace(run, start=start, checkpoint=search.found), news
