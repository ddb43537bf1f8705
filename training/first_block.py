"""Where a step became non-finite: it is repeated, block by block, with the same dropout.

Only a step that was bad is repeated. No gradient is kept, no weight changed, and blocks are run
plainly, whatever their policies: one at a time, they need no more memory than full checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from model.gpt import GPT, Context, run_block
from training.guard import Finding

NAMED = 3
"""Tensors that are named of one place."""


class _Part:
    """A stretch of the model: what went in, and the random state it began with."""

    def __init__(self, place: str, run: Callable[[Tensor], Tensor], x: Tensor, names: Any) -> None:
        self.place, self.run, self.x, self.parameters = place, run, x, names
        self.random = torch.get_rng_state()
        self.random_on_gpu = torch.cuda.get_rng_state(x.device) if x.is_cuda else None
        self.output_finite: Tensor = torch.ones((), dtype=torch.bool, device=x.device)

    def backward(self, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient of its input, and of each tensor whether it is finite."""
        torch.set_rng_state(self.random)
        if self.random_on_gpu is not None:
            torch.cuda.set_rng_state(self.random_on_gpu, self.x.device)
        x = self.x.detach().requires_grad_()
        with torch.enable_grad():
            y = self.run(x)
            wanted = [x, *self.parameters.values()]
            found = torch.autograd.grad(y, wanted, gradient.to(y.dtype), allow_unused=True)
        finite = {
            name: _finite(value)
            for name, value in zip(["its input", *self.parameters], found, strict=True)
            if value is not None
        }
        return found[0], finite


def first_non_finite(
    engine: Any,
    batches: Iterable[tuple[Tensor, Tensor, Sequence[int]]],
    *,
    rank: int,
    scale: float = 1.0,
) -> list[Finding]:
    """For each micro-batch of this rank the first place that is not finite, if there is one.

    All ranks call it, with equally many micro-batches: ZeRO 3's gather parameters together.

    Args:
        batches: (inputs, targets, sample numbers), with the random state as the step had it.
        scale: of the loss, as under fp16.
    """
    findings = []
    for micro_batch, (inputs, targets, samples) in enumerate(batches):
        parts = _forward(engine, inputs, targets)
        after = torch.get_rng_state(), torch.cuda.get_rng_state() if inputs.is_cuda else None
        place = _first_forward(parts)
        # All ranks go back, whatever they have found.
        behind = _first_backward(parts, scale)
        torch.set_rng_state(after[0])
        if after[1] is not None:
            torch.cuda.set_rng_state(after[1])
        if place:
            findings.append(Finding(rank, micro_batch, "forward", *place, list(samples)))
        elif behind:
            findings.append(Finding(rank, micro_batch, "backward", *behind, list(samples)))
    return findings


def _forward(engine: Any, inputs: Tensor, targets: Tensor) -> list[_Part]:
    """Of one micro-batch, without gradients: the blocks, and the head with the loss."""
    model: GPT = engine.module
    parts: list[_Part] = []

    def record(index: int, block: torch.nn.Module, x: Tensor, context: Context) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return run_block(index, block, x, context)

        parts.append(_Part(f"block {index}", run, x, dict(block.named_parameters())))
        y = run(x)
        parts[-1].output_finite = _finite(y)
        if index == len(model.blocks) - 1:
            head = dict(model.final_norm.named_parameters(prefix="final_norm"))
            head |= dict(model.head.named_parameters(prefix="head"))
            parts.append(_Part("head", lambda x: model.head(model.final_norm(x), targets), y, head))
        return y

    installed, model.run_block = model.run_block, record
    try:
        with torch.no_grad():
            parts[-1].output_finite = _finite(engine(inputs, targets))
    finally:
        model.run_block = installed
    return parts


def _first_forward(parts: list[_Part]) -> tuple[str, list[str]] | None:
    if not bool(_finite(parts[0].x)):
        return "embedding", ["its output"]
    for part in parts:
        if not bool(part.output_finite):
            return part.place, ["the loss" if part is parts[-1] else "its output"]
    return None


def _first_backward(parts: list[_Part], scale: float) -> tuple[str, list[str]] | None:
    """The last part, as backward comes to it first, with a gradient that is not finite."""
    gradient = torch.tensor(scale, device=parts[0].x.device)
    first = None
    for part in reversed(parts):
        gradient, finite = part.backward(gradient)
        wrong = [name for name, is_finite in finite.items() if not bool(is_finite)]
        if wrong and first is None:
            first = part.place, [f"gradient of {name}" for name in wrong[:NAMED]]
    return first


def _finite(x: Tensor) -> Tensor:
    return x.detach().isfinite().all()
