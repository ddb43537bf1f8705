"""Applies a policy to each block of a GPT, through the block loop's seam: no parameter is renamed.

Evaluation is never checkpointed: without gradients there is no backward pass to save memory for.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointError, checkpoint

from memory.policies import Policy
from model.config import ModelConfig
from model.gpt import GPT, Context, run_block

aten = torch.ops.aten
MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default}
# At ZeRO stage 3 DeepSpeed's linear layer adds the bias to the product in place, so what is kept
# holds it already. A recomputation that did not skip this, too, would add it twice, unnoticed.
BIAS_IN_PLACE = aten.add_.Tensor
# Unfused attention is not here: its scores and masks would be larger than all else in the block.
FUSED_ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._flash_attention_forward.default,
}

Block = Callable[..., Tensor]  # called with x, *context
Runner = Callable[[Block, Tensor, Context], Tensor]


class RecomputationError(RuntimeError):
    """A block's second forward pass, in backward, was not like its first; names the block."""


def apply_policies(
    model: GPT,
    policies: Sequence[Policy],
    *,
    full: Runner | None = None,
    offload: Runner | None = None,
) -> None:
    """Make each block of the model keep what its policy says, from the next step on.

    `full` replaces torch's way of doing "full"; `offload` is needed where a policy asks for it.
    """
    assert len(policies) == len(model.blocks)
    if all(policy == "none" for policy in policies):
        model.run_block = run_block
        return
    runners: dict[Policy, Runner] = {
        "selective": partial(_selective, kept=kept_products(model.config)),
        "full": full or recompute,
    }
    if offload:
        runners["offload"] = offload

    model.run_block = PolicyRunner(policies, runners)


class PolicyRunner:
    """A GPT's block runner that does what each block's policy says."""

    def __init__(self, policies: Sequence[Policy], runners: Mapping[Policy, Runner]) -> None:
        self.policies = policies
        self.runners = runners
        self.last_entered: int | None = None
        """The checkpointed block that ran last, be it in forward or for its recomputation."""

    def __call__(self, index: int, block: nn.Module, x: Tensor, context: Context) -> Tensor:
        policy = self.policies[index]
        if policy == "none" or not torch.is_grad_enabled():
            return block(x, *context)

        def enter(x: Tensor, *context: Any) -> Tensor:
            self.last_entered = index
            return block(x, *context)

        return self.runners[policy](enter, x, context)


@contextmanager
def explain_recomputation(model: GPT) -> Iterator[None]:
    """Around a backward pass: name the block whose recomputation torch finds to be different.

    torch compares shapes and dtypes when the block has run again, outside of any code of the block.

    Raises:
        RecomputationError: in place of torch's error.
    """
    try:
        yield
    except CheckpointError as error:
        runner = inspect.unwrap(model.run_block)
        number = runner.last_entered if isinstance(runner, PolicyRunner) else "unknown"
        raise RecomputationError(
            f"block {number}: computed again in backward, it does not save what it "
            "saved in forward. A checkpointed block has to compute the same both times; likely "
            "causes: autocast that only the forward pass enters, a branch on state that changes "
            "in between (a counter, a cache, the training flag), a nondeterministic operation"
        ) from error


def recompute(block: Block, x: Tensor, context: Context, **options: Any) -> Tensor:
    """torch's non-reentrant checkpoint; it stops recomputing at the last tensor backward needs."""
    return checkpoint(block, x, *context, use_reentrant=False, **options)


def kept_products(config: ModelConfig) -> frozenset[int]:
    """Which of a block's matrix products (1 qkv, 2 attention output, 3 up, 4 down) to keep.

    A result that is only added to the residual stream is in no later formula: nothing needs it, not
    even a recomputation. With dropout on it is on the way to the mask, which is needed.
    """
    if config.dropout:
        return frozenset({1, 2, 3, 4})
    return frozenset({1, 3} if config.parallel_residual else {1, 2, 3})


def _selective(block: Block, x: Tensor, context: Context, kept: frozenset[int]) -> Tensor:
    results: list[tuple[Any, Any]] = []  # each with its operator

    def contexts() -> tuple[_Keep, _Restore]:
        return _Keep(kept, results), _Restore(kept, results)

    return recompute(block, x, context, context_fn=contexts)


class _Selective(TorchDispatchMode):
    """Sees every operation of a block below autograd, and counts its matrix products.

    torch's own selective checkpointing asks a policy at each operation, which costs more on small
    models, and can keep a result or compute it again, but not leave out one that nothing needs.
    """

    def __init__(self, kept: frozenset[int], results: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.kept, self.results = kept, results
        self.products = 0

    def keeps(self, operator: Any) -> bool:
        if operator in MATRIX_PRODUCTS:
            self.products += 1
        elif operator is not BIAS_IN_PLACE:
            return operator in FUSED_ATTENTION
        return self.products in self.kept


class _Keep(_Selective):
    """In the forward pass: results in their order, detached, or they would keep the graph alive."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if self.keeps(operator):
            self.results.append((operator, tree_map_only(Tensor, Tensor.detach, result)))
        return result


class _Restore(_Selective):
    """In the recomputation: results come back in their order, and other products are left out."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.keeps(operator):
            first, result = self.results.pop(0) if self.results else (None, None)
            if operator is not first:
                raise CheckpointError(f"{operator} is computed where the forward pass had {first}")
            return result
        if operator in MATRIX_PRODUCTS:
            # Not a number, so that a block that does need it is noticed at once.
            *_, left, right = args
            return left.new_full((left.shape[0], right.shape[1]), math.nan)
        return operator(*args, **(kwargs or {}))
