"""One step before the first, at full shape, to learn whether it fits. It changes nothing.

Ranks do not talk meanwhile: one that runs out of memory leaves no other waiting for it.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.comm import ReduceOp, comm
from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3
from torch import Tensor

from memory.planner import NCCL
from training.engine import train_step

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "_global_grad_norm")
THREADS = 64 * 2**20
"""Bytes of the stacks of the threads that load data and write logs."""
COMPARING: tuple[Any, ...] = (partition_parameters, partitioned_param_coordinator, stage3)
"""Where ranks compare their order of modules with rank 0's."""


def rehearse(engine: Any, vocabulary_size: int, sequence_length: int) -> None:
    """Take a whole optimizer step on random tokens, then undo it, to the bit.

    The engine must be new: without optimizer states, and before a checkpoint is loaded into it.

    Raises:
        torch.OutOfMemoryError, RuntimeError: as the allocator does; the engine is then of no use.
    """
    shape = engine.train_micro_batch_size_per_gpu(), sequence_length
    reserve = torch.empty(_only_in_training(engine), dtype=torch.uint8, device=engine.device)
    devices = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _ranks_apart(), _undone(engine):
        torch.manual_seed(0)  # ranks that share a replica are compared
        tokens = torch.randint(vocabulary_size, shape, device=engine.device)
        train_step(engine, itertools.repeat((tokens, tokens)))
    del reserve


def _only_in_training(engine: Any) -> int:
    """Bytes to hold meanwhile for what a rehearsal does not allocate."""
    if engine.device.type == "cpu":
        return THREADS
    return NCCL if torch.distributed.get_world_size() > 1 else 0


def any_rank(is_true: bool, device: torch.device) -> bool:
    """Whether it is true on at least one rank; all must ask."""
    votes = torch.tensor(float(is_true), device=device)
    torch.distributed.all_reduce(votes)
    return bool(votes)


def give_back_memory(device: torch.device) -> None:
    """Return what a destroyed engine had to the driver, or to the operating system."""
    gc.collect()  # engines are held by cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        # glibc keeps freed blocks of up to 32 MB for itself, and another model has other sizes.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim:
            trim(0)


@contextmanager
def _undone(engine: Any) -> Iterator[None]:
    """At learning rate 0 no weight changes; what else a step changes is set back."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    assert not optimizer.state, "the rehearsal comes before the first step"
    counters = {name: vars(engine)[name] for name in COUNTERS if name in vars(engine)}
    scheduler, scaler = engine.lr_scheduler, getattr(engine.optimizer, "loss_scaler", None)
    rates, epoch = [group["lr"] for group in optimizer.param_groups], scheduler.last_epoch
    scale = copy.copy(vars(scaler)) if hasattr(scaler, "__dict__") else {}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    yield
    vars(engine).update(counters)
    scheduler.last_epoch = epoch
    if scale:
        vars(scaler).update(scale)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.state.clear()
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False  # it points into the states
    persistent = getattr(engine.optimizer, "persistent_parameters", ())
    if persistent:
        persistent[0].partition(persistent)  # gathered from this rank alone


@contextmanager
def _ranks_apart() -> Iterator[None]:
    backend, compare = comm.cdb, stage3.assert_ints_same_as_other_ranks
    comm.cdb = _Alone(backend)
    for module in COMPARING:
        module.assert_ints_same_as_other_ranks = lambda _: None
    try:
        yield
    finally:
        comm.cdb = backend
        for module in COMPARING:
            module.assert_ints_same_as_other_ranks = compare


class _Done:
    """The handle of an asynchronous collective."""

    def wait(self) -> None:
        pass


class _Alone:
    """DeepSpeed's communication backend, each collective as if the other ranks sent the same."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _in_place(self, *_: Any, async_op: bool = False, **__: Any) -> _Done | None:
        return _Done() if async_op else None

    all_reduce_coalesced = reduce = broadcast = barrier = _in_place

    @torch.no_grad()
    def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> _Done | None:
        if op == ReduceOp.SUM:
            tensor.mul_(self._backend.get_world_size(group))
        return self._in_place(async_op=async_op)

    inference_all_reduce = all_reduce

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> _Done | None:
        for output in tensor_list:
            _repeat(output, tensor)
        return self._in_place(async_op=async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> _Done | None:
        _repeat(output_tensor, input_tensor)
        return self._in_place(async_op=async_op)

    all_gather_base = all_gather_into_tensor

    def all_gather_coalesced(
        self,
        output_tensors: list[Tensor],
        input_tensors: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> _Done | None:
        for output, given in zip(output_tensors, input_tensors, strict=True):
            _repeat(output, given)
        return self._in_place(async_op=async_op)

    def reduce_scatter_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        *_: Any,
        async_op: bool = False,
        **__: Any,
    ) -> _Done | None:
        output_tensor.copy_(input_tensor.flatten()[: output_tensor.numel()].view_as(output_tensor))
        return self._in_place(async_op=async_op)

    def reduce_scatter(
        self, output: Tensor, input_list: list[Tensor], *_: Any, async_op: bool = False, **__: Any
    ) -> _Done | None:
        output.copy_(input_list[0])
        return self._in_place(async_op=async_op)


@torch.no_grad()
def _repeat(output: Tensor, given: Tensor) -> None:
    """Fill new memory; updated weights are gathered where they lie, and stay as they were."""
    if output.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
        output.view(-1, given.numel()).copy_(given.flatten())
