"""Measure what each block keeps, needs and takes in a few real steps of a run.

    python -m training.profile --config configs/quickstart.json --steps 3

Random tokens of the run's shape stand for its corpus, and no checkpoint is written. Steps that are
timed are not profiled, and the other way round. On a CPU every allocation is seen. On a GPU
torch's allocator is asked wherever a moment begins, and CUDA events give the times; this has been
written from torch's documentation and not yet run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.deepspeed import resolve, tensor_parallel_size
from configs.schema import load_config
from memory.checkpointing import checkpoint_blocks
from memory.moments import Moment, allocator_profile, mark, moments
from memory.plan import positive
from memory.planner import Planner
from model.gpt import GPT, Context
from training.documents import separator_of
from training.engine import (
    Ranks,
    build_engine,
    leave,
    read_ranks,
    start_process_group,
    train_step,
)
from training.profile_report import (
    UPDATE,
    make_profile,
    phases,
    planned_phases,
    plot,
    show,
    write_json,
)
from training.say import fail
from training.setup import machine_of, policies_of

Batch = tuple[Tensor, Tensor]
Mark = Callable[[str], None]
Step = Callable[[Mark], None]
"""One step of training, which names each moment as it begins."""
SMALLER = "profile it with a smaller micro-batch: --set deepspeed.train_micro_batch_size_per_gpu=1"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ranks = None
    try:
        ranks = read_ranks(options.local_rank)
        config = load_config(options.config, options.overrides)
        section = resolve(config, ranks.hardware())
        machine = machine_of(ranks, config)
        policies = policies_of(config, machine)
        separator_of(config.data)
        ranks = replace(ranks, tensor_parallel=tensor_parallel_size(section))
        planner = Planner(config, machine)
        output = options.output or Path(config.training.run_folder) / "profile"
        output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        return fail(error, 2, ranks)
    try:
        start_process_group(ranks)
        engine = build_engine(config, section, ranks)
        checkpoint_blocks(engine, config, policies)
        step = partial(take_step, engine, random_batch(planner, ranks))
        seconds = measure_seconds(step, ranks.device, options.steps)
        measured = measure_memory(step, ranks.device, output if ranks.rank == 0 else None)
    except ConnectionError as error:
        return fail(error, 1)
    except torch.OutOfMemoryError as error:
        return fail(f"{error}; {SMALLER}", 1)
    if ranks.rank == 0:
        hidden = planner.traced.hidden
        planned = planned_phases(planner.replay(policies))
        profile = make_profile(policies, phases(measured), planned, hidden, seconds)
        show(profile)
        write_json(profile, output / "profile.json")
        plot(profile, output / "blocks.png")
        print(f"in {output}: {', '.join(sorted(path.name for path in output.iterdir()))}")
    torch.distributed.destroy_process_group()
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.profile",
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m training.profile --config configs/quickstart.json --steps 3",
    )
    parser.add_argument("--config", required=True, help="the run's JSON file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a key of the config, as in training.loss=full (repeatable)",
    )  # fmt: skip
    parser.add_argument("--steps", type=positive, default=3, help="to time; two more are profiled")
    parser.add_argument("--output", type=Path, help="a folder; default: profile/ in the run folder")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def random_batch(planner: Planner, ranks: Ranks) -> Batch:
    """Inputs and targets of a micro-batch; the ranks of a replica have the same."""
    generator = torch.Generator().manual_seed(ranks.data_rank)
    shape = (
        planner.section["train_micro_batch_size_per_gpu"],
        planner.config.training.sequence_length,
    )
    inputs, targets = (
        torch.randint(planner.config.model.vocabulary_size, shape, generator=generator)
        for _ in range(2)
    )
    return inputs.to(ranks.device), targets.to(ranks.device)


def take_step(engine: Any, batch: Batch, mark: Mark) -> None:
    """A step as train.py takes it, with every moment named to `mark` as it begins."""
    update = engine.step

    def marked_update() -> None:
        mark(UPDATE)
        update()

    engine.step = marked_update
    try:
        with observed(engine.module, mark):
            train_step(engine, copies(batch, mark))
    finally:
        del engine.step
    mark("end")


def copies(batch: Batch, mark: Mark) -> Iterator[Batch]:
    """A micro-batch again and again, each copied to the device as a loader's would be."""
    while True:
        mark("embedding forward")
        yield batch[0].clone(), batch[1].clone()


@contextmanager
def observed(model: GPT, mark: Mark) -> Iterator[None]:
    """Name the moments of forward and backward passes as memory/timeline.py does.

    The block runner that is installed, with its policies, runs as before. A block that it calls a
    second time is recomputed. Hooks on hidden states tell when their gradients are complete.
    """
    installed: Any = model.run_block

    def run(index: int, block: nn.Module, x: Tensor, context: Context) -> Tensor:
        calls = 0

        def call(x: Tensor, *context: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                return block(x, *context)
            mark(f"block {index} recomputation")
            try:
                return block(x, *context)
            finally:  # torch leaves a block by an exception once backward has all it needs
                mark(f"block {index} backward")

        if index == 0 and x.requires_grad:
            x.register_hook(lambda _: mark("embedding backward"))
        mark(f"block {index} forward")
        y = installed(index, call, x, context)
        if y.requires_grad:
            y.register_hook(lambda _: mark(f"block {index} backward"))
        return y

    def after(model: nn.Module, arguments: Any, loss: Tensor) -> None:
        loss.register_hook(lambda _: mark("loss backward"))

    hooks = [
        # Before ZeRO 3 gathers the norm's parameters, and after GPT.forward has let go of what no
        # block's backward needs.
        model.final_norm.register_forward_pre_hook(lambda *_: mark("loss forward"), prepend=True),
        model.register_forward_hook(after),
    ]
    model.run_block = run
    try:
        yield
    finally:
        model.run_block = installed
        for hook in hooks:
            hook.remove()


def measure_seconds(step: Step, device: torch.device, steps: int) -> dict[str, float]:
    """Median over steps of what each moment takes, all micro-batches of a step together."""
    step(lambda name: None)  # optimizer states are created, kernels chosen
    per_step = [seconds_of(step, device) for _ in range(steps)]
    return {name: statistics.median(each[name] for each in per_step) for name in per_step[0]}


def seconds_of(step: Step, device: torch.device) -> dict[str, float]:
    stamps: list[tuple[str, Any]] = []

    def mark(name: str) -> None:
        stamp: Any = time.perf_counter()
        if device.type == "cuda":
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        stamps.append((name, stamp))

    step(mark)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds: Counter[str] = Counter()
    for (name, start), (_, end) in pairwise(stamps):
        lasted = start.elapsed_time(end) / 1000 if device.type == "cuda" else end - start
        seconds[name] += lasted
    return dict(seconds)


def measure_memory(step: Step, device: torch.device, output: Path | None) -> list[Moment]:
    """One step's moments; a trace of two, and on a GPU a snapshot, are written to `output`."""
    gc.collect()
    on_gpu = device.type == "cuda"
    allocator = CudaAllocator(device) if on_gpu else None
    if on_gpu:
        torch.cuda.memory._record_memory_history()
    with allocator_profile(device.type) as profile:
        # The profiler sees no release of what was allocated before it: a step's gradients may be.
        for _ in range(2):
            step(allocator or mark)
    if on_gpu:
        if output:
            torch.cuda.memory._dump_snapshot(str(output / "memory_snapshot.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
    if output:
        profile.export_chrome_trace(str(output / "trace.json"))
    found = allocator.moments if allocator else moments(profile)
    first_end = next(n for n, moment in enumerate(found) if moment.name == "end")
    return found[first_end + 1 :]


class CudaAllocator:
    """Asks torch's allocator where moments begin: it counts on the host, so nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moments: list[Moment] = []

    def __call__(self, name: str) -> None:
        held = torch.cuda.memory_allocated(self.device)
        if self.moments:
            last = self.moments[-1]
            peak = torch.cuda.max_memory_allocated(self.device)
            last.changes[:] = [peak - last.start, held - peak]
        torch.cuda.reset_peak_memory_stats(self.device)
        self.moments.append(Moment(name, held, []))
        mark(name)  # in the trace, too


if __name__ == "__main__":
    leave(main())
