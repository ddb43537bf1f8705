"""Document masking: tokens of a packed sequence attend within their document, from position 0 on.

A separator, the token that ends every document of the corpus, begins the next one here: it sees
nothing of the document before it and predicts the first token of its own, while the last token
before it still predicts the separator. So every prediction depends on its own document only, and
none has to be left out of the loss. Megatron-LM's reset_attention_mask and reset_position_ids leave
the token to the document it ends; from there it predicts the first token of a document that has
nothing to do with what it sees, unless eod_mask_loss drops that prediction.

What comes before a row's first separator is one document, too: the rest of one that was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def document_numbers(tokens: Tensor, separator: int) -> Tensor:
    """[batch, time]: tokens of one document have one number, which grows along the row."""
    return (tokens == separator).cumsum(-1)


def positions_within(documents: Tensor) -> Tensor:
    """[batch, time]: how many tokens each is after the first of its document."""
    places = torch.arange(documents.shape[-1], device=documents.device)
    begins = documents.diff(dim=-1, prepend=documents[:, :1])  # 1 where a document does
    return places - (places * begins).cummax(-1).values


def attention_within(documents: Tensor, x: Tensor, head_width: int) -> Attend:
    """Causal attention within documents [batch, time], for hidden states of the dtype of x.

    Built once a forward pass, for all blocks.
    """
    # GPUs before compute capability 8 have no FlashAttention.
    new = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)
    if new and takes_packed(x.dtype, head_width):
        return partial(packed_attention, offsets=document_offsets(documents))
    return partial(dense_attention, mask=document_mask(documents, x.dtype))


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, 1, time, time], to be added to the scores: 0 where attention may go, else -inf.

    In the dtype of the scores: each block would make, and keep, a copy of a mask of booleans.
    """
    forbidden = (documents[:, :, None] == documents[:, None, :]).tril_().logical_not_()
    mask = torch.zeros_like(forbidden, dtype=dtype).masked_fill_(forbidden, -torch.inf)
    return mask[:, None]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, *, mask: Tensor) -> Tensor:
    """The score of every pair is computed, of those that are masked too."""
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=grouped
    )


def takes_packed(dtype: torch.dtype, head_width: int) -> bool:
    """Whether FlashAttention has a kernel for it."""
    return dtype in (torch.float16, torch.bfloat16) and head_width % 8 == 0 and head_width <= 256


def document_offsets(documents: Tensor) -> Tensor:
    """[number of documents + 1], int32: where each begins, all rows laid end to end, and the end.

    How many there are is known to the GPU only: the host waits for it, once a forward pass.
    """
    begins = F.pad(documents.diff(dim=-1), (1, 0), value=1).flatten()  # every row begins one
    return F.pad(begins, (0, 1), value=1).nonzero().flatten().int()


def packed_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, *, offsets: Tensor) -> Tensor:
    """FlashAttention for sequences of different lengths: no mask, and no work across documents.

    torch's public varlen_attn has no dropout, and other arguments from version to version. Written
    from torch 2.13's source, where it calls the same operator, and not yet run on a GPU.
    """
    batch, _, time, _ = q.shape
    rows = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))  # [tokens, heads, head width]
    y, *_ = torch.ops.aten._flash_attention_forward(
        *rows, offsets, offsets, time, time, dropout, True, False
    )
    return y.unflatten(0, (batch, time)).transpose(1, 2)
