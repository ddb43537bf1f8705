"""What a GPT allocates, keeps and frees around each block: its real code, run on fake tensors.

Nothing is computed and nothing is large: a block of any size is traced in a fraction of a second.
The result is a tape, the sequence of allocations and releases of one forward and one backward pass,
so nothing here can drift from the model. Identical blocks under one policy share a tape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from memory.kernels import use_cuda_kernels
from memory.policies import Policy
from memory.recompute import apply_policies
from memory.tape import Event, Tape, record
from model.config import ModelConfig
from model.documents import Attend, takes_packed
from model.gpt import GPT, Context, causal_attention
from model.loss import LossMethod
from model.partition import cuts


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
    document_masking: bool = False


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
    one_block = config.model_copy(update={"layers": 1})
    with fake_model(one_block, shape, loss, z_loss) as model, set_checkpoint_early_stop(early_stop):
        tokens = torch.zeros(shape.micro_batch, shape.sequence_length, dtype=torch.int64)
        play = partial(record, model, scratches=shape.device == "cpu")
        shared: list[Context] = []

        def embed(_: None) -> Tensor:
            x, context = model.begin(tokens)
            shared.append(context)  # the blocks hold it, until the last has its gradient
            x.register_hook(lambda _: shared.clear())
            return x

        x, context = model.begin(tokens)
        shape_of_x, hidden = x.shape, x.nbytes
        del x
        embedding = play(None, embed)
        head = play(shape_of_x, lambda x: model.head(model.final_norm(x), tokens))
        head = replace(head, forward=_as_loss(head.forward), backward=_as_loss(head.backward))
        blocks = {}
        for policy in policies:
            apply_policies(model, (policy,))
            blocks[policy] = play(
                shape_of_x, lambda x: model.run_block(0, model.blocks[0], x, context)
            )
    return Traced(embedding, blocks, head, hidden, batch=2 * tokens.nbytes)


def _as_loss(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(
        event._replace(subject="loss") if event.kind in ("allocate", "free") else event
        for event in events
    )


@contextmanager
def fake_model(config: ModelConfig, shape: Shape, loss: LossMethod, z_loss: float) -> Iterator[GPT]:
    """One rank's model on fake tensors, which every tensor made in here is: nothing has memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with FakeTensorMode(), torch.device("cpu"):
            separator = 0 if shape.document_masking else None
            model = GPT(config, loss=loss, z_loss=z_loss, separator=separator)
            _as_on_its_rank(model, shape)
            yield model
    finally:
        torch.set_default_dtype(before)


def _as_on_its_rank(model: GPT, shape: Shape) -> None:
    if shape.tensor_parallel > 1:
        _cut(model, shape.tensor_parallel)
    if shape.device == "cuda":
        for module in (*model.blocks, model.final_norm, model.head):
            use_cuda_kernels(module)
        if takes_packed(shape.dtype, model.config.head_width):
            model.attention_within = _packed


def _packed(documents: Tensor, x: Tensor, head_width: int) -> Attend:
    """FlashAttention for documents keeps what it keeps for whole rows, and a few integers."""
    return causal_attention


def _cut(model: GPT, size: int) -> None:
    """One rank's share of every layer that model/partition.py cuts."""
    for block, (name, cut) in product(model.blocks, cuts(model.config).items()):
        parent, _, child = name.rpartition(".")
        layer = block.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        rows, columns = layer.out_features, layer.in_features
        if cut.by == "columns":
            share: nn.Module = nn.Linear(columns, rows // size, bias=layer.bias is not None)
        else:
            share = _SummedLinear(columns // size, rows, bias=layer.bias is not None)
        setattr(block.get_submodule(parent), child, share)


class _SummedLinear(nn.Linear):
    """A row-cut layer as training/tensor_parallel.py runs it: the product's sum is a copy."""

    def forward(self, x: Tensor) -> Tensor:
        product = (x @ self.weight.t()).clone()
        return product if self.bias is None else product + self.bias
