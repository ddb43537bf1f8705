"""What a GPT allocates, keeps and frees around each block: its real code, run on fake tensors.

Nothing is computed and nothing is large: a block of any size is traced in a fraction of a second.
The result is a tape, the sequence of allocations and releases of one forward and one backward pass,
so nothing here can drift from the model. Identical blocks under one policy share a tape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import flop_registry

from memory.policies import Policy
from memory.recompute import apply_policies
from model.config import ModelConfig
from model.gpt import GPT
from model.loss import LossMethod
from model.partition import cuts

aten = torch.ops.aten


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


@dataclass(frozen=True)
class Traced:
    """The tapes of one model at one micro-batch."""

    embedding: Tape
    blocks: dict[Policy, Tape]
    head: Tape
    """Final norm, output projection and loss."""
    hidden: int
    """Bytes of one hidden state [batch, time, width]."""
    batch: int
    """Bytes of the tokens and targets."""


class Shape(NamedTuple):
    """What one forward pass of one rank sees."""

    micro_batch: int
    sequence_length: int
    dtype: torch.dtype
    device: str
    """"cpu" or "cuda": they differ in attention and dropout kernels."""
    tensor_parallel: int = 1


def trace(
    config: ModelConfig,
    shape: Shape,
    *,
    policies: Sequence[Policy] = ("none", "selective", "full"),
    loss: LossMethod = "auto",
    z_loss: float = 0.0,
    early_stop: bool = True,
) -> Traced:
    """Run embedding, one block per policy, and head with loss, on fake tensors.

    `early_stop` is whether a recomputation stops at the last tensor that backward needs, as torch's
    own checkpointing does and DeepSpeed's does not.
    """
    with _fake(shape), set_checkpoint_early_stop(early_stop):
        model = _one_block(config, shape, loss, z_loss)
        tokens = torch.zeros(shape.micro_batch, shape.sequence_length, dtype=torch.int64)
        embedded: list[Any] = []  # holds positions and rotary tables as long as GPT.forward does

        def embed(_: None) -> Tensor:
            embedded[:] = [torch.arange(shape.sequence_length)]
            x, rotary = model.embed(tokens, embedded[0])
            embedded.append(rotary)
            return x

        x = embed(None)
        shape_of_x, hidden = x.shape, x.nbytes
        del x
        embedding = _record(model, None, embed)
        rotary = embedded[1]
        head = _record(model, shape_of_x, lambda x: model.head(model.final_norm(x), tokens))
        head = replace(head, forward=_as_loss(head.forward), backward=_as_loss(head.backward))
        blocks = {}
        for policy in policies:
            apply_policies(model, (policy,))
            blocks[policy] = _record(
                model, shape_of_x, lambda x: model.run_block(0, model.blocks[0], x, rotary)
            )
    return Traced(embedding, blocks, head, hidden, batch=2 * tokens.nbytes)


def _as_loss(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(
        event._replace(subject="loss") if event.kind in ("allocate", "free") else event
        for event in events
    )


@contextmanager
def _fake(shape: Shape) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with FakeTensorMode(), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _use_cuda_kernels(module: nn.Module) -> None:
    """In its forward pass and wherever that is computed again: backward leaves function modes."""
    forward = module.forward

    def with_kernels(*arguments: Any) -> Any:
        with _CudaKernels():
            return forward(*arguments)

    module.forward = with_kernels


class _CudaKernels(TorchFunctionMode):
    """The kernels that torch chooses on CUDA, where they keep other tensors than the CPU's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and kwargs["training"] and kwargs["p"]:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]  # a mask of bytes
        if func is F.rms_norm:
            return _FusedRMSNorm.apply(args[0], kwargs["weight"])
        if func is F.scaled_dot_product_attention:
            dropout, grouped = kwargs["dropout_p"], kwargs["enable_gqa"]
            if args[0].dtype != torch.float32:
                flash = aten._scaled_dot_product_flash_attention
                return flash(*args, dropout, is_causal=True)[0]
            if grouped:  # in float32 no fused kernel takes it
                unfused = aten._scaled_dot_product_attention_math
                return unfused(*args, None, dropout, is_causal=True, enable_gqa=True)[0]
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(*args, None, True, dropout, is_causal=True)[0]
        return func(*args, **kwargs)


class _FusedRMSNorm(torch.autograd.Function):
    """What aten._fused_rms_norm's CUDA kernel allocates and saves; elsewhere it is many operators.

    See layer_norm_kernel.cu and derivatives.yaml in PyTorch 2.13 (read, not measured).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _one_block(config: ModelConfig, shape: Shape, loss: LossMethod, z_loss: float) -> GPT:
    model = GPT(config.model_copy(update={"layers": 1}), loss=loss, z_loss=z_loss)
    if shape.tensor_parallel > 1:
        _cut(model, shape.tensor_parallel)
    if shape.device == "cuda":
        for module in (model.blocks[0], model.final_norm, model.head):
            _use_cuda_kernels(module)
    return model


def _cut(model: GPT, size: int) -> None:
    """One rank's share of every layer that model/partition.py cuts."""
    for name, cut in cuts(model.config).items():
        parent, _, child = f"blocks.0.{name}".rpartition(".")
        layer = model.get_submodule(f"blocks.0.{name}")
        assert isinstance(layer, nn.Linear)
        rows, columns = layer.out_features, layer.in_features
        if cut.by == "columns":
            share: nn.Module = nn.Linear(columns, rows // size, bias=layer.bias is not None)
        else:
            share = _SummedLinear(columns // size, rows, bias=layer.bias is not None)
        setattr(model.get_submodule(parent), child, share)


class _SummedLinear(nn.Linear):
    """A row-cut layer as training/tensor_parallel.py runs it: the product's sum is a copy."""

    def forward(self, x: Tensor) -> Tensor:
        product = (x @ self.weight.t()).clone()
        return product if self.bias is None else product + self.bias


class _Recorder(TorchDispatchMode):
    """Follows every storage that an operator makes until it dies."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, Any, int]] = []
        """What happened, to which slot (a storage's number) or name, and bytes."""
        self.work = Work(0, 0)
        self._slots: dict[int, int] = {}  # by the address of a living storage
        self._watched: list[weakref.ref[Any]] = []

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

    def _replace(self, old: Tensor, new: Tensor) -> None:
        """`new` goes on under the slot of `old`, whose own death then says nothing."""
        self._follow(new, self._slots.pop(old.untyped_storage()._cdata))

    def _die(self, address: int) -> None:
        slot = self._slots.pop(address, None)
        if slot is not None:
            self.mark("free", slot)


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
def _markers(model: GPT, recorder: _Recorder) -> Iterator[None]:
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


def _record(model: GPT, shape: torch.Size | None, run: Callable[[Any], Tensor]) -> Tape:
    """The tape of `run`, a part of the model that takes a hidden state, or the first, without."""
    recorder = _Recorder()
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
