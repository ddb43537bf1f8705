"""Every byte that torch's CPU allocator gives and takes back in a training, moment by moment.

    python -m benchmarks.memory_events --config configs/quickstart.json --ranks 2

Trains for real through the project's engine and step, on random tokens, from before the model is
built. What a rank holds is then known to the byte at any moment; the batch itself is not counted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from configs.deepspeed import resolve, tensor_parallel_size
from configs.schema import RunConfig, load_config
from memory.moments import Moment, allocator_profile, mark, moments

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter",
)  # fmt: skip


def measure(
    configs: Mapping[str, RunConfig],
    ranks: int = 1,
    steps: int = 3,
    gradients: bool = False,
    of_rank: int = 0,
) -> dict[str, list[Moment]]:
    """Train each configuration on `ranks` processes of this machine; one rank's moments by name.

    The moments: "build"; "initialize", deepspeed.initialize; "ready"; then "forward 1.0",
    "backward 1.0", "reduce 1.0" (after the model's backward) and "step 1.0" for step 1 and
    micro-batch 0, each with what happens until the next; and "end". engine.step() after a
    micro-batch that is not the last only counts it. With `gradients`, also what DeepSpeed does as a
    gradient is complete ("gradient NAME"), until the model's backward goes on ("after NAME").
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    given = {name: config.model_dump_json() for name, config in configs.items()}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        workers = [
            context.Process(target=_work, args=(rank, ranks, port, given, steps, gradients, output))
            for rank, output in enumerate(outputs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        codes = [worker.exitcode for worker in workers]
        if any(codes):
            raise RuntimeError(f"exit codes of the ranks: {codes}")
        found = json.loads(outputs[of_rank].read_text())
    return {name: [Moment(*moment) for moment in run] for name, run in found.items()}


def _work(
    rank: int,
    ranks: int,
    port: int,
    given: dict[str, str],
    steps: int,
    gradients: bool,
    output: Path,
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    # Imported in the ranks only: it takes seconds.
    from training.engine import leave, read_ranks, start_process_group

    for name in COLLECTIVES:
        setattr(torch.distributed, name, _staged(getattr(torch.distributed, name)))
    setattr(torch.distributed, "reduce_scatter_tensor", _reduce_scatter)  # noqa: B010
    torch.set_num_threads(1)  # the models are small, and the ranks share the cores
    start_process_group(read_ranks())
    configs = {name: RunConfig.model_validate_json(text) for name, text in given.items()}
    found = {name: _moments(config, steps, gradients) for name, config in configs.items()}
    output.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    leave(0)


def _staged(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective on copies of its tensors in memory that is not from torch's allocator.

    Gloo's threads hold the tensors for a while after it is over. If a thread's reference is by
    chance the last one, the release is not in the profile.
    """

    @functools.wraps(collective)
    def call(*arguments: Any, **options: Any) -> Any:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def stage(value: Any) -> Any:
            if isinstance(value, list):
                return [stage(member) for member in value]
            if not isinstance(value, torch.Tensor) or not value.numel():
                return value
            memory = torch.from_numpy(numpy.empty(value.nbytes, numpy.uint8))
            copy = memory.view(value.dtype).view(value.shape).copy_(value.detach())
            pairs.append((value.detach(), copy))
            return copy

        def finish() -> None:
            for tensor, copy in pairs:
                tensor.copy_(copy)
            pairs.clear()

        named = {name: stage(value) for name, value in options.items()}
        work = collective(*map(stage, arguments), **named)
        return finish() if work is None else _Work(work, finish)

    return call


def _reduce_scatter(
    output: torch.Tensor, given: torch.Tensor, async_op: bool = False, **options: Any
) -> None:
    """As gloo does: reduce a copy and take a share. Its own copy, gloo's threads would drop."""
    assert not async_op  # no caller in DeepSpeed asks for it
    copy = given.clone()
    torch.distributed.all_reduce(copy, **options)
    group = options["group"]
    output.copy_(copy.chunk(group.size())[group.rank()])


class _Work:
    """The handle of an asynchronous collective."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()


def _moments(config: RunConfig, steps: int, gradients: bool) -> list[Moment]:
    gc.collect()  # an earlier engine is held by cycles
    with allocator_profile() as profile:
        engine = _train(config, steps, gradients)
    engine.destroy()
    return moments(profile)


def _train(config: RunConfig, steps: int, gradients: bool) -> Any:
    """Some steps as train.py takes them, with the moments marked; returns the engine."""
    from memory.checkpointing import checkpoint_blocks
    from memory.policies import block_policies
    from training import engine as project

    ranks = project.read_ranks()
    section = resolve(config, ranks.hardware())
    ranks = replace(ranks, tensor_parallel=tensor_parallel_size(section))
    shape = section["train_micro_batch_size_per_gpu"], config.training.sequence_length + 1
    tokens = torch.randint(config.model.vocabulary_size, shape)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    mark("build")
    initialize = project.deepspeed.initialize

    def marked_initialize(model: torch.nn.Module, **options: Any) -> Any:
        if gradients:
            _mark_gradients(model, "gradient")  # hooks run in the order in which they were set
        mark("initialize")
        return initialize(model=model, **options)

    project.deepspeed.initialize = marked_initialize
    engine = project.build_engine(config, section, ranks)
    project.deepspeed.initialize = initialize
    if gradients:
        _mark_gradients(engine.module, "after")
    policies = block_policies(
        config.activation_checkpointing, config.model.layers, ranks.device.type
    )
    checkpoint_blocks(engine, config, policies)
    methods = ("forward", "backward", "_backward_epilogue", "step")
    for kind, method in zip(("forward", "backward", "reduce", "step"), methods, strict=True):
        setattr(engine, method, _marked(getattr(engine, method), _counter(engine, kind)))
    mark("ready")
    for _ in range(steps):
        project.train_step(engine, itertools.repeat(batch))
    mark("end")
    return engine


def _mark_gradients(model: torch.nn.Module, kind: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: mark(f"{kind} {name}")  # type: ignore[misc]
        )


def _marked(function: Callable[..., Any], name: Callable[[], str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        mark(name())
        return function(*arguments, **options)

    return call


def _counter(engine: Any, kind: str) -> Callable[[], str]:
    """Names the calls of an engine's method: "forward 1.0" is step 1, micro-batch 0."""
    calls = itertools.count()

    def name() -> str:
        step, micro_batch = divmod(next(calls), engine.gradient_accumulation_steps())
        return f"{kind} {step + 1}.{micro_batch}"

    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gradients", action="store_true", help="each gradient as a moment")
    parser.add_argument("--changes", action="store_true", help="each allocation and release too")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    (found,) = measure({"run": config}, options.ranks, options.steps, options.gradients).values()
    print(f"{'moment':<48}{'start':>16}{'peak':>16}{'end':>16}  bytes")
    for moment in found:
        print(f"{moment.name:<48}{moment.start:>16,}{moment.peak:>16,}{moment.end:>16,}")
        if options.changes:
            print("  " + " ".join(f"{change:+,}" for change in moment.changes))


if __name__ == "__main__":
    main()
