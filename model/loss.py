"""Next-token cross-entropy from hidden states, without full-vocabulary logits where large.

The logits of one micro-batch hold tokens x vocabulary numbers, often more than all blocks save
together. The chunked paths compute loss and gradients a few tokens at a time inside the forward
pass, so that only the gradients (the size of the hidden states and of the weight) are kept.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossMethod = Literal["auto", "full", "chunked"]

# Measured on a CPU at 2048 tokens, width 384, vocabulary 8192 (benchmarks/loss.py): no other size
# is faster than 512 tokens a chunk by more than 1 %, and full logits are a quarter slower.
CHUNK_TOKENS = 512


def next_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocabulary_size: int,
    method: LossMethod = "auto",
    z_loss: float = 0.0,
) -> Tensor:
    """Mean over tokens of -log softmax(hidden @ weight.T)[target], a float32 scalar.

    Args:
        hidden: [tokens, width], any floating dtype; the loss is computed in float32.
        weight: [padded vocabulary, width]; rows from `vocabulary_size` on have probability zero.
        targets: [tokens], token ids below `vocabulary_size`.
        method: "full" keeps the logits, "chunked" does not; "auto" chunks once there are more
            tokens than one chunk.
        z_loss: coefficient of mean(logsumexp(logits)^2), which keeps the logits' scale from
            drifting (PaLM, https://arxiv.org/abs/2204.02311, section 5).
    """
    if not torch.is_grad_enabled():  # both chunked paths would compute gradients for nothing
        hidden, weight = hidden.detach(), weight.detach()
    bias = padding_bias(weight, vocabulary_size)
    if method == "full" or (method == "auto" and len(hidden) <= CHUNK_TOKENS):
        logits = F.linear(hidden, weight, bias).float()  # [tokens, vocabulary]
        loss = F.cross_entropy(logits, targets)
        return loss + z_loss * logits.logsumexp(-1).square().mean() if z_loss else loss
    # torch's own chunked op is faster, but rounds the loss itself to the weight's dtype.
    if z_loss == 0 and weight.dtype == torch.float32 and hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, options=_torch_options()
        )
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, z_loss)


def padding_bias(weight: Tensor, vocabulary_size: int) -> Tensor | None:
    """[padded vocabulary]: zero, and -inf for padding rows; None when there is no padding."""
    if len(weight) == vocabulary_size:
        return None
    bias = weight.new_zeros(len(weight))
    bias[vocabulary_size:] = -torch.inf
    return bias


@functools.cache
def _torch_options() -> Any:
    return torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK_TOKENS, chunking_method=None)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one pass over chunks of tokens; softmax and sums in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        z_loss: float,
    ) -> Tensor:
        tokens = len(hidden)
        needs_gradient = any(ctx.needs_input_grad)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        if needs_gradient:
            hidden_grad = torch.empty_like(hidden)
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, tokens, CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            target = targets[chunk, None]  # [chunk, 1]
            logits = F.linear(hidden[chunk], weight, bias).float()  # [chunk, vocabulary]
            log_z = logits.logsumexp(-1, keepdim=True)  # [chunk, 1]
            loss += (log_z - logits.gather(1, target) + z_loss * log_z.square()).sum()
            if not needs_gradient:
                continue
            # d/dlogits of (log_z - logit[target] + z log_z^2) = (1 + 2 z log_z) softmax - onehot
            gradient = logits.sub_(log_z).exp_()
            if z_loss:
                gradient.mul_(1 + 2 * z_loss * log_z)
            gradient.scatter_add_(1, target, torch.full_like(log_z, -1.0))
            # Divided by tokens here, unlikely tokens' gradients would be below float16's smallest
            # number, before the loss scale that comes with backward could save them.
            gradient = gradient.to(weight.dtype)
            torch.mm(gradient, weight, out=hidden_grad[chunk])
            weight_grad += gradient.T @ hidden[chunk]
        if needs_gradient:
            ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
            ctx.tokens = tokens
        return loss / tokens

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grad_outputs[0] / ctx.tokens
        return hidden_grad * scale, weight_grad * scale, None, None, None
