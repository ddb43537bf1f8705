"""One rank of test_bad_steps.py: trains each configuration with something non-finite in one step.

Arguments: a JSON file of [configuration, what to inject] by name, and the file rank 0 writes to.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import RunConfig
from data.loader import read_batch
from memory.checkpointing import checkpoint_blocks
from training.engine import (
    build_engine,
    leave,
    read_ranks,
    seed_step,
    start_process_group,
    train_step,
)
from training.out_of_memory import MASTER_WEIGHTS
from training.pulse import Pulse
from training.replicas import ReplicasDiffer, check_replicas
from training.saver import Saver
from training.session import open_session
from training.setup import Run, prepare
from training.stop import Stop

STEP, BLOCK, RANK = 3, 1, 1


def inject(run: Run, engine: Any, kind: str) -> None:
    """Into one block, on one rank, in the pass over one micro-batch: STEP's first or last."""
    steps, size = run.section["train_batch_size"], engine.train_micro_batch_size_per_gpu()
    micro_steps = engine.gradient_accumulation_steps()
    late = (micro_steps - 1) * run.ranks.data_ranks * size if "last" in kind else 0
    first = (STEP - 1) * steps + late + run.ranks.data_rank * size
    wanted = read_batch(run.samples, range(first, first + size), engine.device)[:, :-1]
    active = False

    def look(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        nonlocal active
        active = run.ranks.rank == RANK and torch.equal(arguments[0], wanted)

    def spoil(module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
        if active and "forward" in kind:
            return output * torch.nan
        if active and "gradient" in kind and output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.inf)
        return None

    def spoil_loss(module: nn.Module, arguments: Any, loss: Tensor) -> Tensor | None:
        # A constant: its gradient is finite.
        return loss + torch.inf if active and "loss" in kind else None

    engine.module.register_forward_pre_hook(look, prepend=True)
    engine.module.blocks[BLOCK].register_forward_hook(spoil)
    engine.module.head.register_forward_hook(spoil_loss)


def everything(engine: Any) -> list[Tensor]:
    """What an update changes: weights or this rank's part of them, master weights, moments."""
    wrapper = engine.optimizer
    optimizer = getattr(wrapper, "optimizer", wrapper)
    nested = [
        [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()],
        [getattr(wrapper, name, None) for name in MASTER_WEIGHTS],
        [state for _, state in sorted_states(optimizer)],
        [[group.get("step") for group in optimizer.param_groups]],
    ]
    return list(tensors(nested))


def sorted_states(optimizer: Any) -> list[Any]:
    order = [p for group in optimizer.param_groups for p in group["params"]]
    return [(i, optimizer.state[p]) for i, p in enumerate(order) if p in optimizer.state]


def tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested.detach()
    elif isinstance(nested, int | float):
        yield torch.tensor(nested)
    elif isinstance(nested, dict | list | tuple):
        for value in nested.values() if isinstance(nested, dict) else nested:
            yield from tensors(value)


def digest(engine: Any) -> str:
    content = hashlib.sha256()
    for tensor in everything(engine):
        content.update(tensor.contiguous().view(-1).float().numpy().tobytes())
    return content.hexdigest()


def train(run: Run, kind: str) -> dict[str, Any]:
    engine = build_engine(run.config, run.section, run.ranks)
    checkpoint_blocks(engine, run.config, run.policies)
    inject(run, engine, kind)
    result: dict[str, Any] = {"digests": [], "losses": [], "lrs": [], "skipped": []}
    pulse = Pulse()
    with open_session(run, engine, Stop(pulse, None), Saver(engine, run, pulse)) as session:
        for step in range(1, run.config.training.max_steps + 1):
            seed_step(run.config.training.seed, step, run.ranks.data_rank)
            result["lrs"].append(engine.get_lr()[0])
            before = session.loader.samples_consumed
            session.guard.spikes.recent.clear()
            if "spike" in kind and step == STEP:
                session.guard.spikes.recent.extend([1.0, 1.1] * 8)
            train_step(engine, session.loader, session.guard.judge)
            outcome = session.guard.outcome(step, before, session.loader.samples_consumed)
            result["digests"].append(digest(engine))
            result["losses"].append(outcome.loss)
            result["skipped"].append(engine.skipped_steps)
    if engine.zero_optimization_stage() < 3 and run.ranks.tensor_parallel == 1:
        result["differing"] = differing_replicas(run, engine)
    result["finite"] = all(bool(tensor.isfinite().all()) for tensor in everything(engine))
    engine.destroy()
    return result


def differing_replicas(run: Run, engine: Any) -> str:
    check_replicas(engine, run.ranks, 6)
    if run.ranks.rank == RANK:
        bits = engine.module.blocks[BLOCK].mlp.up.weight.data.view(torch.int16)
        bits[0, 0] ^= 1
    try:
        check_replicas(engine, run.ranks, 7)
    except ReplicasDiffer as error:
        return str(error)
    return ""


if __name__ == "__main__":
    ranks = read_ranks()
    start_process_group(ranks)
    configs = json.loads(Path(sys.argv[1]).read_text())
    results = {}
    for name, (raw, kind) in configs.items():
        run = prepare(RunConfig.model_validate(raw), ranks)
        own = train(run, kind)
        gathered: list[Any] = [None] * ranks.world_size
        torch.distributed.all_gather_object(gathered, own)
        results[name] = gathered
    if ranks.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
    leave(0)
