"""Every path of the loss against torch's cross entropy and autograd on plain logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import model.loss
from model.loss import next_token_loss

VOCABULARY = 37
WIDTH = 12
CHUNK = 8
# One token, one chunk, an exact multiple, and a remainder.
TOKENS = [1, CHUNK, 3 * CHUNK, 3 * CHUNK + 5]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(model.loss, "CHUNK_TOKENS", CHUNK)
    model.loss._torch_options.cache_clear()
    yield
    model.loss._torch_options.cache_clear()


@pytest.fixture(params=["full", "torch", "own"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """full logits; torch's chunked op (absent before torch 2.13); our own chunks in its place."""
    if request.param == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    if request.param == "own":
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    return "full" if request.param == "full" else "chunked"


def inputs(tokens: int, padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight with `padding` further rows, targets; logits spread over about +-10."""
    random = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=random)
    weight = torch.randn(VOCABULARY + padding, WIDTH, generator=random)
    targets = torch.randint(VOCABULARY, (tokens,), generator=random)
    return hidden, weight, targets


def with_gradients(loss: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value = loss(hidden, weight)
    value.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return value.detach(), hidden.grad, weight.grad


def assert_close(ours: tuple[Tensor, ...], reference: tuple[Tensor, ...], rtol: float) -> None:
    """Differences at most rtol of each tensor's largest value."""
    for mine, expected in zip(ours, reference, strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(mine, expected, rtol=0, atol=rtol * scale)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("padding", [0, 3])
def test_value_and_gradients(method: Any, tokens: int, padding: int) -> None:
    hidden, weight, targets = inputs(tokens, padding)
    reference = with_gradients(
        lambda h, w: F.cross_entropy(h @ w.T, targets), hidden, weight[:VOCABULARY]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it does not take its chunked path
        value, hidden_grad, weight_grad = with_gradients(
            lambda h, w: next_token_loss(h, w, targets, vocabulary_size=VOCABULARY, method=method),
            hidden,
            weight,
        )
    assert_close((value, hidden_grad, weight_grad[:VOCABULARY]), reference, rtol=1e-6)
    assert (weight_grad[VOCABULARY:] == 0).all()


@pytest.mark.parametrize("tokens", TOKENS)
def test_z_loss_against_its_formula(method: Any, tokens: int) -> None:
    hidden, weight, targets = inputs(tokens, padding=3)
    coefficient = 0.1

    def formula(h: Tensor, w: Tensor) -> Tensor:
        z = (h @ w.T).exp().sum(-1)  # the partition function; PaLM adds c log^2 z
        return F.cross_entropy(h @ w.T, targets) + coefficient * (z.log() ** 2).mean()

    value, hidden_grad, weight_grad = with_gradients(
        lambda h, w: next_token_loss(
            h, w, targets, vocabulary_size=VOCABULARY, method=method, z_loss=coefficient
        ),
        hidden,
        weight,
    )
    reference = with_gradients(formula, hidden, weight[:VOCABULARY])
    assert_close((value, hidden_grad, weight_grad[:VOCABULARY]), reference, rtol=2e-6)
    assert (weight_grad[VOCABULARY:] == 0).all()


def test_auto_chunks_beyond_one_chunk_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    calls: list[int] = []
    own = model.loss._ChunkedCrossEntropy.apply

    def spy(hidden: Tensor, *rest: Any) -> Tensor:
        calls.append(len(hidden))
        return own(hidden, *rest)

    monkeypatch.setattr(model.loss._ChunkedCrossEntropy, "apply", spy)
    for tokens in (CHUNK, CHUNK + 1):
        hidden, weight, targets = inputs(tokens)
        next_token_loss(hidden, weight, targets, vocabulary_size=VOCABULARY)
    assert calls == [CHUNK + 1]


def test_chunks_never_hold_all_logits(method: Any) -> None:
    """The purpose of chunks: nothing of the size of all logits is saved for backward."""
    hidden, weight, targets = inputs(10 * CHUNK)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    largest = 0

    def record(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        next_token_loss(hidden, weight, targets, vocabulary_size=VOCABULARY, method=method)
    assert (largest >= 10 * CHUNK * VOCABULARY) == (method == "full")


@pytest.mark.parametrize("padding", [0, 3])
def test_bfloat16_rounds_logits_but_not_the_loss(method: Any, padding: int) -> None:
    hidden, weight, targets = inputs(CHUNK + 3, padding)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logits = (hidden @ weight[:VOCABULARY].T).float()
    expected = F.cross_entropy(logits, targets).item()
    assert abs(expected - F.cross_entropy(logits.bfloat16(), targets).item()) > 1e-4 * expected
    loss = next_token_loss(hidden, weight, targets, vocabulary_size=VOCABULARY, method=method)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_bfloat16_gradients(method: Any) -> None:
    hidden, weight, targets = inputs(CHUNK + 3, padding=3)
    rounded, rounded_weight = hidden.bfloat16(), weight.bfloat16()
    _, *reference = with_gradients(
        lambda h, w: F.cross_entropy(h @ w[:VOCABULARY].T, targets),
        rounded.float(),
        rounded_weight.float(),
    )
    _, *gradients = with_gradients(
        lambda h, w: next_token_loss(h, w, targets, vocabulary_size=VOCABULARY, method=method),
        rounded,
        rounded_weight,
    )
    assert all(g.dtype == torch.bfloat16 for g in gradients)
    # 8 bits of logits up to 10 are off by up to 0.03, hence probabilities by up to 3 %.
    assert_close(tuple(g.float() for g in gradients), tuple(reference), rtol=0.03)


def test_float16_gradients_do_not_vanish_before_the_loss_is_scaled(method: Any) -> None:
    """softmax / tokens of unlikely tokens is below float16's smallest number, 6e-8."""
    tokens, scale = 512, 2.0**14
    weight = torch.tensor([[10.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    hidden = torch.ones(tokens, 2)
    targets = torch.zeros(tokens, dtype=torch.long)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return scale * next_token_loss(h, w, targets, vocabulary_size=3, method=method)

    _, *reference = with_gradients(
        lambda h, w: scale * F.cross_entropy(h @ w.T, targets), hidden, weight
    )
    _, *gradients = with_gradients(loss, hidden.half(), weight.half())
    assert_close(tuple(g.float() for g in gradients), tuple(reference), rtol=0.01)


def test_without_gradients_only_the_loss_is_computed(method: Any) -> None:
    hidden, weight, targets = inputs(CHUNK + 3, padding=3)
    expected = F.cross_entropy(hidden @ weight[:VOCABULARY].T, targets)
    weight.requires_grad_()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss = next_token_loss(hidden, weight, targets, vocabulary_size=VOCABULARY, method=method)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    if method == "full" or not hasattr(F, "linear_cross_entropy"):  # torch's op is opaque to it
        assert counter.get_total_flops() == 2 * len(hidden) * weight.numel()


def test_inputs_are_left_as_they_were(method: Any) -> None:
    hidden, weight, targets = inputs(CHUNK + 3)
    before = hidden.clone(), weight.clone(), targets.clone()
    with_gradients(
        lambda h, w: next_token_loss(h, w, targets, vocabulary_size=VOCABULARY, method=method),
        hidden,
        weight,
    )
    assert all(map(torch.equal, (hidden, weight, targets), before))
