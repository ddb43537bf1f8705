"""One rank of test_stage3.py: what each hook of DeepSpeed's stage 3 allocates and releases.

Arguments: a JSON file of configurations by name, and the file rank 0 writes to: for each, in order,
[hook, its module or parameter, bytes held before, most bytes held during, bytes held after].
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch.profiler import record_function

from configs.deepspeed import resolve
from configs.schema import RunConfig
from memory.checkpointing import checkpoint_blocks
from memory.policies import block_policies
from training.engine import build_engine, leave, read_ranks, start_process_group

BEGIN, END = "hook: ", "end of hook"
names: dict[int, str] = {}
"""Of modules and parameters, by id."""


def hooked(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        subject = arguments[1] if len(arguments) > 1 else None
        name = names.get(id(subject), "")
        backward = "_backward" if options.get("forward") is False else ""
        with record_function(f"{BEGIN}{kind}{backward} {name}"):
            pass
        result = function(*arguments, **options)
        with record_function(END):
            pass
        return result

    return call


def at_once(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Over when it returns, gloo's thread having dropped its tensors.

    Else it is chance when they are released, and a release by that thread is not in the profile.
    """

    @functools.wraps(collective)
    def call(*arguments: Any, **options: Any) -> Any:
        asynchronous = options.pop("async_op", False)
        given = [a for a in (*arguments, *options.values()) if isinstance(a, torch.Tensor)]
        before = uses(given)
        collective(*arguments, **options)
        while uses(given) != before:
            time.sleep(1e-5)
        return Done() if asynchronous else None

    return call


def uses(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """References to the tensors, and to their storages, which views of them hold, too."""
    return [
        (t._use_count(), torch._C._storage_Use_Count(t.untyped_storage()._cdata)) for t in tensors
    ]


class Done:
    def wait(self) -> None:
        """Waited for already."""


def reduce_scatter(output: torch.Tensor, given: torch.Tensor, **options: Any) -> None:
    """gloo's: a copy, reduced, and a share of it. Its own drops the copy in a thread unseen."""
    del options["async_op"]
    copy = given.clone()
    torch.distributed.all_reduce(copy, **options)
    output.copy_(copy.chunk(options["group"].size())[options["group"].rank()])


def install() -> None:
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor"):
        setattr(torch.distributed, name, at_once(getattr(torch.distributed, name)))
    torch.distributed.reduce_scatter_tensor = reduce_scatter
    coordinator, optimizer = PartitionedParameterCoordinator, DeepSpeedZeroOptimizer_Stage3
    coordinator.fetch_sub_module = hooked(coordinator.fetch_sub_module, "enter")
    coordinator.release_sub_module = hooked(coordinator.release_sub_module, "leave")
    reduction = "reduce_independent_p_g_buckets_and_remove_grads"
    setattr(optimizer, reduction, hooked(getattr(optimizer, reduction), "gradient"))


def train(config: RunConfig, steps: int) -> None:
    ranks = read_ranks()
    section = resolve(config, ranks.hardware())
    engine = hooked(build_engine, "initialise")(config, section, ranks)
    names.clear()
    for name, subject in [*engine.module.named_modules(), *engine.module.named_parameters()]:
        names[id(subject)] = name
    policies = block_policies(config.activation_checkpointing, config.model.layers, "cpu")
    checkpoint_blocks(engine, config, policies)
    shape = section["train_micro_batch_size_per_gpu"], config.training.sequence_length
    tokens = torch.randint(config.model.vocabulary_size, shape)
    end = hooked(engine._backward_epilogue, "end_micro_batch")
    engine._backward_epilogue = end
    for _ in range(steps):
        for number in range(section["gradient_accumulation_steps"]):
            engine.backward(engine(tokens, tokens))
            last = number == section["gradient_accumulation_steps"] - 1
            hooked(engine.step, "step" if last else "count")()
    engine.destroy()


def measured(config: RunConfig) -> list[tuple[str, str, int, int, int]]:
    gc.collect()  # an earlier engine is held by cycles
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        train(config, steps=3)
    records, open_hooks, total = [], [], 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            total += event.nbytes()
            for hook in open_hooks:
                hook[3] = max(hook[3], total)
        elif event.name().startswith(BEGIN):
            kind, _, name = event.name().removeprefix(BEGIN).partition(" ")
            open_hooks.append([kind, name, total, total, 0])
        elif event.name() == END:
            hook = open_hooks.pop()
            records.append((*hook[:4], total))
    return records


if __name__ == "__main__":
    install()
    start_process_group(read_ranks())
    configs = json.loads(Path(sys.argv[1]).read_text())
    results = {name: measured(RunConfig.model_validate(raw)) for name, raw in configs.items()}
    if read_ranks().rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
    leave(0)
