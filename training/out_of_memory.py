"""What a run does when memory runs out: it says where, what was held, and what would help."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memory.diagnosis import Observation, Report
from memory.doctor import diagnose, show
from memory.messages import Figures, kind_of, read_cgroup, read_message
from memory.planner import CUDA_CONTEXT
from model.gpt import GPT, Context
from training.engine import Ranks
from training.metrics import alive_memory_bytes
from training.setup import Run

# Where DeepSpeed's optimizers (0.19) keep what is neither a parameter nor in the state of the torch
# optimizer inside them: ZeRO 1 and 2, ZeRO 3, bf16, fp16.
MASTER_WEIGHTS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)
GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "accumulated_grads_in_cpu",
    "grad_partitions_flat_buffer",
    "fp32_groups_gradients_flat",
    "fp32_groups_gradients",
)


class OutOfMemory(Exception):
    """Memory ran out, on this rank or on another."""

    def __init__(self, run: Run, observation: Observation | None) -> None:
        super().__init__(run, observation)
        self.run = run
        self.observation = observation
        """None on a rank whose own memory sufficed."""

    def bare(self) -> OutOfMemory:
        """Without the frames that raised it and the allocator's error: they hold tensors alive."""
        self.__context__ = None
        return self.with_traceback(None)


@contextmanager
def explained(where: Whereabouts, run: Run) -> Iterator[None]:
    """Observe the rank's memory when it runs out.

    Raises:
        OutOfMemory: in place of the allocator's error.
    """
    observation = None
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        observation = observe(where.engine, error, where.moment, run.ranks)
    if observation is not None:
        raise OutOfMemory(run, observation)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's or the host's memory, or the shared memory, ran out.

    torch has a class of its own for the GPU's allocator only.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and kind_of(str(error)) is not None


def observe(engine: Any, error: BaseException, moment: str, ranks: Ranks) -> Observation:
    """What this rank's memory holds; to be called while the error is handled.

    By then the operation that failed has let go of what it had, and its callers have not.

    Args:
        engine: DeepSpeed's; None before there is one.
        moment: of `Whereabouts`.
    """
    device = ranks.device
    message = f"{type(error).__name__}: {error}"  # a MemoryError often has no text
    figures = read_message(message)
    alive = alive_memory_bytes(device)
    if device.type == "cuda":
        figures = _complete(figures, device)
        # A caller may have let go already: the message knows what was held.
        alive = figures.allocated if figures.allocated is not None else alive
    held = bytes_by_category(engine) if engine is not None else {}
    membership = Path("/proc/self/cgroup")
    return Observation(
        message=message,
        moment=moment,
        rank=ranks.rank,
        device=device.type,
        figures=figures,
        held=held | {"rest": max(0, alive - sum(held.values()))},
        others=_others(figures) if device.type == "cuda" else None,
        cgroup=read_cgroup(Path("/sys/fs/cgroup"), membership.read_text())
        if membership.exists()
        else None,
    )


def _complete(figures: Figures, device: torch.device) -> Figures:
    """What the message does not say, from the driver and torch's allocator."""
    free, capacity = torch.cuda.mem_get_info(device)
    measured: dict[str, Any] = {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "free": free,
        "capacity": capacity,
    }
    missing = {name: size for name, size in measured.items() if getattr(figures, name) is None}
    return replace(figures, **missing)


def _others(figures: Figures) -> int | None:
    """Bytes of other processes: what is neither free nor this process's."""
    if figures.others is not None:
        return figures.others
    if figures.capacity is None or figures.free is None or figures.reserved is None:
        return None
    own = figures.process or figures.reserved + CUDA_CONTEXT
    return max(0, figures.capacity - figures.free - own)


def bytes_by_category(engine: Any) -> dict[str, int]:
    """Bytes on the engine's device of what outlives a step; each storage counts once.

    Views of one flat buffer are the buffer, and a float32 parameter that is its own master weight
    is a parameter.
    """
    wrapper = engine.optimizer
    optimizer = getattr(wrapper, "optimizer", wrapper)
    parameters = list(engine.module.parameters())
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    masters = [*updated, *_tensors([getattr(wrapper, name, None) for name in MASTER_WEIGHTS])]
    found: dict[str, Any] = {
        # ZeRO 3 leaves a parameter empty between its uses, and this rank's part of it beside it.
        "parameters": [parameters, [getattr(p, "ds_tensor", None) for p in parameters]],
        "master_weights": masters,
        "optimizer_states": list(optimizer.state.values()),
        "gradients": [
            [tensor.grad for tensor in (*parameters, *masters)],
            [getattr(parameter, "grad_accum", None) for parameter in parameters],
            [getattr(wrapper, name, None) for name in GRADIENTS],
        ],
    }
    seen: set[int] = set()
    sizes = dict.fromkeys(found, 0)
    for category, nested in found.items():
        for tensor in _tensors(nested):
            storage = tensor.untyped_storage()
            if tensor.device.type == engine.device.type and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[category] += storage.nbytes()
    return sizes


def _tensors(nested: Any) -> Iterator[Tensor]:
    """Of lists, tuples and dictionaries of them, at any depth."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, dict | list | tuple):
        for value in nested.values() if isinstance(nested, dict) else nested:
            yield from _tensors(value)


def report_out_of_memory(run: Run, observation: Observation) -> Report:
    """Explain on this rank: printed, and written to the run folder.

    To be called when the error has been handled and what it held is gone: the planner needs 75 MiB
    of main memory. Without them the cures are general ones, and if not even Python can go on, those
    are what the file has. Of several ranks each has a file of its own.
    """
    report = diagnose(observation)
    _write(report, run)
    try:
        report = diagnose(observation, run.config, run.plan())
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    _write(report, run)
    show(report)
    return report


def _write(report: Report, run: Run) -> None:
    ranks, folder = run.ranks, Path(run.config.training.run_folder)
    name = "out_of_memory" if ranks.world_size == 1 else f"out_of_memory_rank{ranks.rank}"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.as_json(), indent=2) + "\n"
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


class Whereabouts:
    """What a rank is doing, in the planner's words, at the cost of an attribute write a moment.

    Nothing waits for a GPU, so there a moment is what was being queued: as torch's allocator works
    when a kernel is queued, too, it is what ran out of memory.
    """

    def __init__(self) -> None:
        self.moment = "initialisation"
        """May be set from outside: what is done without gradients leaves it alone."""
        self.engine: Any = None
        """The engine that is watched; None before there is one."""
        self._hooks: list[Any] = []

    def release_engine(self) -> None:
        """Take the engine apart, for another or for none."""
        if self.engine is not None:
            self.engine.destroy()
        self.engine, self.moment = None, "initialisation"

    def watch(self, engine: Any) -> None:
        """Follow the model's passes and engine.step().

        Again after `checkpoint_blocks`, which puts a new runner into the block loop's seam; this
        wraps whatever is there.
        """
        for hook in self._hooks:
            hook.remove()
        self.engine = engine
        model: GPT = engine.module
        model.run_block = self._following(model)
        self._hooks = [
            model.register_forward_pre_hook(self._before_model),
            # First of all hooks: ZeRO 3's gathers the norm's parameters.
            model.final_norm.register_forward_pre_hook(self._before_loss, prepend=True),
            model.register_forward_hook(self._after_model),
        ]
        engine.step = partial(self._step, _inside(engine.step, self._step))

    def _following(self, model: GPT) -> Callable[..., Tensor]:
        count = len(model.blocks)
        return partial(
            self._run_block,
            _inside(model.run_block, self._run_block),
            [f"block {index} forward" for index in range(count)],
            [self._setter(f"block {index} backward") for index in range(count)],
            self._setter("embedding backward"),
        )

    def _run_block(
        self,
        installed: Callable[..., Tensor],
        forward: list[str],
        backward: list[Callable[[Tensor], None]],
        embedding_backward: Callable[[Tensor], None],
        index: int,
        block: nn.Module,
        x: Tensor,
        context: Context,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return installed(index, block, x, context)
        self.moment = forward[index]
        if index == 0 and x.requires_grad:
            x.register_hook(embedding_backward)
        y = installed(index, block, x, context)
        if y.requires_grad:
            # It runs when the gradient is complete: that is when the block's backward begins.
            y.register_hook(backward[index])
        return y

    def _step(self, installed: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.moment = "optimizer step"
        result = installed(*arguments, **options)
        self.moment = "between steps"
        return result

    def _setter(self, moment: str) -> Callable[[Tensor], None]:
        def begin(gradient: Tensor) -> None:
            self.moment = moment

        return begin

    def _before_model(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.moment = "embedding forward"

    def _before_loss(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.moment = "loss forward"

    def _after_model(self, model: nn.Module, arguments: Any, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.register_hook(self._setter("loss backward"))


def _inside(function: Any, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """What a partial of `wrapper` wraps; anything else is returned as it is."""
    if isinstance(function, partial) and function.func == wrapper:
        return function.args[0]
    return function
