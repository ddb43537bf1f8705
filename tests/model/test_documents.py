"""Masked documents: nothing of one reaches another, and each is computed as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memory.policies import Policy
from memory.recompute import apply_policies
from model.config import ModelConfig
from model.documents import (
    attention_within,
    dense_attention,
    document_mask,
    document_numbers,
    document_offsets,
    packed_attention,
    positions_within,
)
from model.gpt import GPT, build

SEPARATOR = 3
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {"preset": "gpt2"},
    "neox": {"preset": "neox", "rotary_fraction": 0.5},
    "llama": {"preset": "llama", "kv_heads": 2},
}
LENGTHS = ((5, 9, 6), (11, 1, 8))  # of the documents in each of two rows
TIME = 20


def make(preset: str, separator: int | None = SEPARATOR, **changes: Any) -> GPT:
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocabulary_size": 64, "max_sequence_length": 32}
    config = ModelConfig.model_validate({**sizes, **PRESETS[preset], **changes})
    # Weights larger than at the start of training: attention then is far from uniform.
    return build(config.model_copy(update={"init_std": 0.2}), seed=0, separator=separator)


def packed_rows() -> Tensor:
    """Documents of LENGTHS; the first of a row is the rest of one that began before it."""
    tokens = torch.randint(4, 64, (2, TIME), generator=torch.Generator().manual_seed(1))
    for row, lengths in enumerate(LENGTHS):
        tokens[row, [lengths[0], lengths[0] + lengths[1]]] = SEPARATOR
    return tokens


def documents_of(row: int) -> list[slice]:
    ends = torch.tensor(LENGTHS[row]).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, LENGTHS[row], strict=True)]


def test_a_separator_begins_the_document_after_it() -> None:
    tokens = torch.tensor([[7, 8, 3, 9, 9, 3, 3, 5], [3, 5, 5, 5, 5, 5, 5, 3]])
    numbers = document_numbers(tokens, separator=3)
    assert numbers.diff(dim=1).tolist() == [[0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]]
    assert positions_within(numbers).tolist() == [
        [0, 1, 0, 1, 2, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6, 0],
    ]
    assert document_offsets(numbers).tolist() == [0, 2, 5, 6, 8, 15, 16]
    assert document_offsets(numbers).dtype == torch.int32


def test_mask_of_four_tokens() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1]]), torch.float32)
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].isfinite().int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]


def embedding_gradient(model: GPT, tokens: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """[batch, time]: the largest gradient of chosen logits at each position's embedding."""
    embedded: list[Tensor] = []

    def keep(module: Any, arguments: Any, x: Tensor) -> Tensor:
        embedded.append(x.detach().requires_grad_())
        return embedded[0]

    hook = model.token_embedding.register_forward_hook(keep)
    torch.manual_seed(5)
    choose(model(tokens)).square().sum().backward()
    hook.remove()
    gradient = embedded[0].grad
    assert gradient is not None
    return gradient.abs().amax(-1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("preset", PRESETS)
def test_no_gradient_reaches_another_document(preset: str, policy: Policy, training: bool) -> None:
    model = make(preset, dropout=0.2).train(training)
    apply_policies(model, (policy, policy))
    tokens = packed_rows()
    for row in range(2):
        for document in documents_of(row):
            gradient = embedding_gradient(model, tokens, lambda y, r=row, d=document: y[r, d])
            inside = torch.zeros_like(gradient, dtype=torch.bool)
            inside[row, document] = True
            assert gradient[~inside].abs().max() == 0
            assert gradient[inside].min() > 0
    model.separator = None
    last = documents_of(0)[-1]
    assert embedding_gradient(model, tokens, lambda y: y[0, last])[0, : last.start].min() > 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("preset", PRESETS)
def test_no_token_changes_the_logits_of_another_document(
    preset: str, policy: Policy, training: bool
) -> None:
    model = make(preset, dropout=0.2).train(training)
    apply_policies(model, (policy, policy))

    def logits(tokens: Tensor) -> Tensor:
        torch.manual_seed(5)
        with torch.set_grad_enabled(training):
            return model(tokens).detach()

    tokens = packed_rows()
    before, position = logits(tokens), documents_of(0)[1].start + 2
    changed = tokens.clone()
    changed[0, position] = 4 if tokens[0, position] != 4 else 5
    moved = (logits(changed) - before).abs().amax(-1)
    assert (moved[0] > 0).tolist() == [
        position <= place < documents_of(0)[1].stop for place in range(TIME)
    ]
    assert moved[1].max() == 0
    model.separator = None
    before = logits(tokens)
    assert (logits(changed) - before).abs().amax(-1)[0, documents_of(0)[2]].min() > 0


def alone(model: GPT, tokens: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """What run makes of each document by itself, put together as they were."""
    rows = []
    for row in range(len(tokens)):
        parts = [run(tokens[row : row + 1, document])[0] for document in documents_of(row)]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("preset", PRESETS)
def test_packed_equals_each_document_alone(preset: str) -> None:
    model, tokens = make(preset), packed_rows()
    targets = torch.randint(64, tokens.shape, generator=torch.Generator().manual_seed(2))
    logits = model(tokens)
    loss = model(tokens, targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    model.separator = None
    expected = alone(model, tokens, model)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    expected_gradients = torch.autograd.grad(expected_loss, list(model.parameters()))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)


def test_packed_equals_transformers_on_each_document() -> None:
    transformers = pytest.importorskip("transformers")
    from model.huggingface import export_state_dict, to_transformers_config

    model, tokens = make("llama"), packed_rows()
    theirs = transformers.AutoModelForCausalLM.from_config(to_transformers_config(model.config))
    theirs.load_state_dict(export_state_dict(model), strict=False)
    with torch.no_grad():
        expected = alone(model, tokens, lambda part: theirs.eval()(part).logits)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_without_separators_it_is_the_unmasked_model(preset: str) -> None:
    model, tokens = make(preset), packed_rows()
    tokens[tokens == SEPARATOR] = 4
    masked = model(tokens)
    model.separator = None
    torch.testing.assert_close(masked, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_the_kernel_that_are_masked_as_a_whole(dtype: torch.dtype) -> None:
    """torch's CPU kernel takes up to 512 keys at a time; here the first of them are all masked."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 1300, 8, generator=generator).to(dtype) for _ in range(3))
    documents = torch.zeros(1, 1300, dtype=torch.int64)
    documents[0, 700:], documents[0, 1201:] = 1, 2
    y = dense_attention(q, k, v, 0.0, mask=document_mask(documents, dtype))
    for part in (slice(0, 700), slice(700, 1201), slice(1201, 1300)):
        one = F.scaled_dot_product_attention(*(x[:, :, part] for x in (q, k, v)), is_causal=True)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(y[:, :, part], one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_blocks_share_one_mask(preset: str) -> None:
    """A mask of booleans would be converted, and kept for backward, by every block."""
    masks: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] == (TIME, TIME):
            masks[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        make(preset)(packed_rows())
    assert list(masks.values()) == [2 * TIME * TIME * 4]


class FlashForSequences:
    """What aten._flash_attention_forward is documented to compute, a sequence at a time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, longest_q: int,
        longest_k: int, dropout: float, causal: bool, debug_mask: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (longest_q, longest_k, debug_mask) == (TIME, TIME, False)
        self.calls += 1
        parts = []
        for start, end in zip(offsets_q[:-1].tolist(), offsets_k[1:].tolist(), strict=True):
            one = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            y = F.scaled_dot_product_attention(
                *one, dropout_p=dropout, is_causal=causal, enable_gqa=True
            )
            parts.append(y[0].transpose(0, 1))
        return torch.cat(parts), torch.empty(0)


@pytest.mark.parametrize("preset", PRESETS)
def test_packed_attention_is_dense_attention(preset: str) -> None:
    """Its operator has no CPU kernel: a loop stands for it."""
    model, tokens, flash = make(preset), packed_rows(), FlashForSequences()
    expected = model(tokens)
    model.attention_within = lambda documents, x, head_width: partial(
        packed_attention, offsets=document_offsets(documents)
    )
    with mock.patch.object(torch.ops.aten, "_flash_attention_forward", flash):
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)
    assert flash.calls == 2


def test_the_operator_takes_the_arguments_of_packed_attention() -> None:
    """Shapes only, on the meta device, forward and backward, with grouped queries and dropout."""
    with torch.device("meta"):
        qkv = torch.empty(2, TIME, 8, 16, dtype=torch.bfloat16, requires_grad=True)
        q, k, v = (part.transpose(1, 2) for part in qkv.split([4, 2, 2], dim=2))
        offsets = torch.empty(5, dtype=torch.int32)
        y = packed_attention(q, k, v, 0.1, offsets=offsets)
    assert y.shape == q.shape
    y.sum().backward()
    assert qkv.grad is not None


def test_kernel_on_a_cpu_is_the_dense_one() -> None:
    documents = torch.zeros(1, 4, dtype=torch.int64)
    attend = attention_within(documents, torch.zeros(1, dtype=torch.bfloat16), 64)
    assert isinstance(attend, partial)
    assert attend.func is dense_attention
