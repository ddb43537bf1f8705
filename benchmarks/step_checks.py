"""What it costs a step to be checked: loss and gradients finite, no spike, no signal, time left.

    python -m benchmarks.step_checks --output benchmarks/results/step_checks_CPU_DATE.md

On the quickstart's model. The checks are timed alone, as a difference of two steps drowns in the
machine's swings, and whole steps with and without them beside each other.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Contender, interleave, parse_options, ratio, report
from configs.deepspeed import resolve
from configs.schema import load_config
from training.engine import build_engine, read_ranks, start_process_group, train_step
from training.guard import Agreement, Guard
from training.pulse import Pulse
from training.spikes import Spikes
from training.stop import Stop
from training.tracking import MetricsWriter

CONFIG = "configs/quickstart.json"
CALLS = 2000


def watched_spikes() -> Spikes:
    return Spikes(8.0, [4.0 + 0.01 * (n % 7) for n in range(Spikes.WINDOW)])


def prepare_step(checked: bool) -> Callable[[], Any]:
    config, ranks = load_config(CONFIG), read_ranks()
    start_process_group(ranks)
    section = resolve(config, ranks.hardware())
    shape = section["train_micro_batch_size_per_gpu"], config.training.sequence_length
    tokens = torch.randint(config.model.vocabulary_size, shape)
    engine = build_engine(config, section, ranks)
    batches = itertools.repeat((tokens, tokens))
    if not checked:
        return lambda: train_step(engine, batches).item()
    folder, pulse = Path(), Pulse()
    guard = Guard(
        engine,
        Stop(pulse, time.time() + 1e6),
        Spikes(None),
        MetricsWriter(folder, start_step=0, max_steps=1, enabled=False),
        investigate=lambda *_: [],
        limit=20,
        rolls_back=False,
        folder=folder,
    )

    def step() -> float:
        pulse.enter("step")
        train_step(engine, batches, guard.judge)
        return guard.outcome(1, 0, 0).loss

    return step


def check_seconds(rank: int, ranks: int, store: str, results: Any) -> None:
    """Median seconds of all that a step's checks add, on one of `ranks` ranks."""
    torch.set_num_threads(1)
    shared = torch.distributed.FileStore(store, ranks)
    torch.distributed.init_process_group("gloo", store=shared, rank=rank, world_size=ranks)
    pulse, spikes = Pulse(), watched_spikes()
    agreement = Agreement(torch.device("cpu"), Stop(pulse, time.time() + 1e6))
    norm, loss = torch.ones(()), torch.full((), 4.0, requires_grad=True)
    seconds = []
    for number in range(CALLS):
        started = time.perf_counter()
        pulse.enter("step")
        (loss * agreement.reach(loss.detach(), spikes.bound)).backward()
        assert bool(norm.isfinite())
        mean, _, _ = agreement.read()
        spikes.add(mean + 0.01 * (number % 7))
        assert mean < spikes.bound
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        results.put(statistics.median(seconds))
    torch.distributed.barrier()


def check_alone(ranks: int) -> float:
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ranks, f"{folder}/store", results
        torch.multiprocessing.start_processes(check_seconds, arguments, nprocs=ranks)
    return float(results.get())


def main() -> None:
    options = parse_options(__doc__)
    contenders = {
        "plain": Contender(functools.partial(prepare_step, False)),
        "checked": Contender(functools.partial(prepare_step, True)),
    }
    timings = interleave(contenders, options.rounds)
    for contender in contenders.values():
        contender.close()
    step = statistics.median(timing.seconds for timing in timings["plain"])
    lines = ["| checks of one step | microseconds | of a step |", "|---|---|---|"]
    for ranks in (1, 2):
        alone = check_alone(ranks)
        lines.append(
            f"| {ranks} rank{'s' * (ranks > 1)} | {alone * 1e6:.0f} | {alone / step:.3%} |"
        )
    lines += [
        "",
        f"A step takes {step * 1e3:.0f} ms. With the checks it takes "
        f"{ratio(timings['checked'], timings['plain'])} times as long.",
    ]
    report("What checking each step costs", lines, options.output)


if __name__ == "__main__":
    main()
