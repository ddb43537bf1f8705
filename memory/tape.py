"""The tape of a part of a model: what it allocates and frees in one forward and backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
MATRIX_PRODUCTS = (aten.mm.default, aten.addmm.default)


class Event(NamedTuple):
    kind: str
    """allocate, free, gradient (of a parameter is complete), and of a module: enter, leave (its
    forward or recomputation), enter_backward, leave_backward."""
    subject: str
    """Of an allocation its category; else the parameter's or module's name."""
    size: int
    """Bytes; 0 for a module."""


class Work(NamedTuple):
    flops: int
    """Of matrix products and attention, as torch.utils.flop_counter counts them."""
    moved: int
    """Bytes that all other operators read and write."""

    def minus(self, other: Work) -> Work:
        return Work(self.flops - other.flops, self.moved - other.moved)


@dataclass(frozen=True)
class Tape:
    """One segment of the model. Its input is alive when forward begins, its output when it ends.

    The gradient of the output is alive when backward begins, that of the input when it ends.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    kept: int
    """Bytes alive between forward and backward, the input's included, the output's not."""
    forward_work: Work
    backward_work: Work
    """A recomputation's included."""


class _Recorder(TorchDispatchMode):
    """Follows every storage that an operator makes until it dies."""

    def __init__(self, scratches: bool) -> None:
        super().__init__()
        self.scratches = scratches
        """Whether matrix products are oneDNN's in bf16."""
        self.log: list[tuple[str, Any, int]] = []
        """What happened, to which slot (a storage's number) or name, and bytes."""
        self.work = Work(0, 0)
        self._slots: dict[int, int] = {}  # by the address of a living storage
        self._watched: list[weakref.ref[Any] | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        body = _python_body(func)
        if body is not None:
            with self:
                return body(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        made = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        if made:
            given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
            # Autograd adds two gradients of one tensor up in place, except under a mode like this.
            if not torch.is_grad_enabled() and func is aten.add.Tensor:
                self._replace(given[0], made[0])
            known = {tensor.untyped_storage()._cdata for tensor in given}
            if self.scratches and func in MATRIX_PRODUCTS:
                self._borrow(onednn_scratch(*args[-2:]))
            fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
            for tensor in fresh:
                self._follow(tensor)
            flops, moved = self.work
            if count := _flop_count(func._overloadpacket):
                flops += count(*args, **(kwargs or {}), out_val=result)
            elif fresh or func._schema.is_mutable:
                moved += sum(tensor.nbytes for tensor in given + fresh)
            self.work = Work(flops, moved)
        return result

    def slot(self, tensor: Tensor) -> int:
        return self._slots[tensor.untyped_storage()._cdata]

    def mark(self, kind: str, subject: Any = None, size: int = 0) -> None:
        self.log.append((kind, subject, size))

    def _follow(self, tensor: Tensor, slot: int | None = None) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._slots:
            return
        if slot is None:
            slot = len(self._watched)
            self.mark("allocate", slot, storage.nbytes())
        self._slots[address] = slot
        self._watched.append(weakref.ref(storage, lambda _: self._die(address)))

    def _borrow(self, size: int) -> None:
        slot = len(self._watched)
        self._watched.append(None)
        self.mark("allocate", slot, size)
        self.mark("free", slot)

    def _replace(self, old: Tensor, new: Tensor) -> None:
        """`new` goes on under the slot of `old`, whose own death then says nothing."""
        self._follow(new, self._slots.pop(old.untyped_storage()._cdata))

    def _die(self, address: int) -> None:
        slot = self._slots.pop(address, None)
        if slot is not None:
            self.mark("free", slot)


def onednn_scratch(left: Tensor, right: Tensor) -> int:
    """Bytes that a product of bf16 matrices on a CPU allocates and frees within.

    A transposed left operand is copied; of the right one a block of at most 129 KiB is packed.
    Approximately: measured with oneDNN of PyTorch 2.13 (one thread) on products of 64 to 4096 rows
    and columns, it was between 150 KiB too high and 1.6 MiB too low.
    """
    copied = 0 if left.is_contiguous() else left.nbytes
    return copied + min(right.nbytes + 2**14, 129 * 2**10)


def _flop_count(operator: Any) -> Callable[..., int] | None:
    """torch's own count; it has none for the CPU's flash attention, whose arguments are alike."""
    alike = {
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            aten._scaled_dot_product_flash_attention_backward
        ),
    }
    return flop_registry.get(alike.get(operator, operator))


def _python_body(operator: Any) -> Callable[..., Any] | None:
    """Of torch's chunked loss, which is one operator with many inside."""
    name = "_linear_cross_entropy_batch_chunked"
    if operator.name() != f"torch_nn::{name}":
        return None
    from torch.nn.modules import linear_cross_entropy

    body: Callable[..., Any] = getattr(linear_cross_entropy, name)._init_fn
    return body


class _Begin(torch.autograd.Function):
    """Stands for the segment before: hands on a hidden state, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, shape: torch.Size, recorder: _Recorder) -> Tensor:
        ctx.recorder = recorder
        x = torch.empty(shape)
        recorder.mark("forward begins", recorder.slot(x))
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.recorder.mark("backward ends", ctx.recorder.slot(gradients[0]))
        return None, None, None


class _End(torch.autograd.Function):
    """Stands for the segment after."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, recorder: _Recorder) -> Tensor:
        ctx.shape, ctx.recorder = output.shape, recorder
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = torch.empty(ctx.shape)
        ctx.recorder.mark("backward begins", ctx.recorder.slot(gradient))
        return gradient, None


class _Mark(torch.autograd.Function):
    """The identity, which notes when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, name: str, recorder: _Recorder) -> Tensor:
        ctx.mark = partial(recorder.mark, kind, name)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.mark()
        return gradients[0], None, None, None


@contextmanager
def _markers(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Note where modules with parameters begin and end, and where gradients are complete."""
    hooks = []

    def completed(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        recorder.mark("gradient", name, recorder.slot(parameter.grad))
        parameter.grad = None

    def enter(name: str, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        recorder.mark("enter", name)
        x, *others = arguments
        if x.requires_grad:
            x = _Mark.apply(x, "leave_backward", name, recorder)
        return (x, *others)

    def leave(name: str, module: nn.Module, arguments: tuple[Any, ...], y: Tensor) -> Tensor:
        recorder.mark("leave", name)
        return _Mark.apply(y, "enter_backward", name, recorder) if y.requires_grad else y

    for name, parameter in model.named_parameters():
        hooks.append(parameter.register_post_accumulate_grad_hook(partial(completed, name)))
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(partial(enter, name)))
            hooks.append(module.register_forward_hook(partial(leave, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def record(
    model: nn.Module,
    shape: torch.Size | None,
    run: Callable[[Any], Tensor],
    *,
    scratches: bool = False,
) -> Tape:
    """The tape of `run`, a part of the model that takes a hidden state, or the first, without.

    `scratches`: with what a CPU's matrix products allocate within.
    """
    parameter = next(model.parameters())
    recorder = _Recorder(scratches and parameter.dtype == torch.bfloat16)
    with _markers(model, recorder), recorder:
        x = None
        if shape is None:
            recorder.mark("forward begins")
        else:
            x = _Begin.apply(torch.zeros((), requires_grad=True), shape, recorder)
        y = run(x)
        del x
        recorder.mark("forward ends", recorder.slot(y))
        forward_work = recorder.work
        loss = _End.apply(y, recorder)
        del y
        loss.backward()
        if shape is None:
            recorder.mark("backward ends")
        del loss
    return Tape(*_events(recorder.log), forward_work, recorder.work.minus(forward_work))


def _events(
    log: list[tuple[str, Any, int]],
) -> tuple[tuple[Event, ...], tuple[Event, ...], int]:
    """Forward, backward and the bytes kept: a log cut at the seams to the segments around."""
    places = {kind: number for number, (kind, _, _) in enumerate(log)}
    forward_log = log[places["forward begins"] : places["forward ends"]]
    backward_log = log[places["backward begins"] : places["backward ends"]]
    sizes = {slot: size for kind, slot, size in log if kind == "allocate"}
    freed = {slot for kind, slot, _ in forward_log if kind == "free"}
    forward, alive = [], {}
    if (arriving := forward_log[0][1]) is not None:
        alive[arriving] = "activations"
    for kind, subject, _ in forward_log[1:]:
        if kind == "allocate":
            alive[subject] = "transient" if subject in freed else "activations"
            forward.append(Event("allocate", alive[subject], sizes[subject]))
        elif kind != "free":
            forward.append(Event(kind, subject, 0))
        elif subject in alive:
            forward.append(Event("free", alive.pop(subject), sizes[subject]))
    alive.pop(log[places["forward ends"]][1])
    kept = sum(sizes[slot] for slot in alive)
    backward = []
    alive[backward_log[0][1]] = "transient"
    for kind, subject, slot in backward_log[1:]:
        if kind == "allocate":
            alive[subject] = "transient"
            backward.append(Event("allocate", "transient", sizes[subject]))
        elif kind == "gradient":
            # From here on it is the optimizer's.
            backward.append(Event("free", alive.pop(slot), sizes[slot]))
            backward.append(Event("gradient", subject, sizes[slot]))
        elif kind != "free":
            backward.append(Event(kind, subject, 0))
        elif subject in alive:
            backward.append(Event("free", alive.pop(subject), sizes[subject]))
    alive.pop(log[places["backward ends"]][1], None)
    backward += [Event("free", category, sizes[slot]) for slot, category in alive.items()]
    return tuple(forward), tuple(backward), kept
