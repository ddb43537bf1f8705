"""Sampling with the cache against plain forwards, and against the distribution it samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.generate import generate
from model.gpt import GPT, build

VOCABULARY = 29
SWITCHES: dict[str, dict[str, Any]] = {
    "gpt2": {"preset": "gpt2"},
    "neox": {"preset": "neox", "rotary_fraction": 0.5},
    "llama-gqa": {"preset": "llama", "kv_heads": 2},
    "qk-norm": {"preset": "llama", "qk_norm": True, "parallel_residual": True},
}


def tiny(name: str = "gpt2", **changes: Any) -> GPT:
    sizes = dict(layers=2, width=32, heads=4, vocabulary_size=VOCABULARY, max_sequence_length=32)
    # Wide enough weights for a continuation that varies from token to token.
    config = ModelConfig(
        **sizes | {"vocabulary_multiple": 16, "init_std": 0.4} | SWITCHES[name] | changes
    )
    return build(config, seed=0)


def prompts(batch: int, time: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def without_cache(
    model: GPT, tokens: Tensor, new: int, temperature: float, seed: int = 0
) -> Tensor:
    """The same, one whole forward a token; a full window starts over from its later half."""
    model.eval()
    longest = model.config.max_sequence_length
    random = torch.Generator().manual_seed(seed)
    start = max(0, tokens.shape[1] - longest)
    for _ in range(new):
        if tokens.shape[1] - start > longest:
            start = tokens.shape[1] - longest // 2
        logits = model(tokens[:, start:])[:, -1, :VOCABULARY]
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
        tokens = torch.cat((tokens, chosen), dim=1)
    return tokens


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("time", [1, 5])
def test_the_cache_changes_no_token(name: str, temperature: float, time: int) -> None:
    model, prompt = tiny(name), prompts(3, time)
    expected = without_cache(model, prompt, 20, temperature)
    assert len(expected[:, time:].unique()) > 5
    found = generate(model, prompt, max_new_tokens=20, temperature=temperature)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("time", [3, 31, 32, 33, 70])
def test_generation_goes_on_beyond_the_window(name: str, time: int) -> None:
    model, prompt = tiny(name), prompts(2, time)
    found = generate(model, prompt, max_new_tokens=100)
    assert torch.equal(found, without_cache(model, prompt, 100, 1.0))


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_the_smallest_windows(longest: int) -> None:
    model = tiny(max_sequence_length=longest)
    assert generate(model, prompts(2, 2), max_new_tokens=9).shape == (2, 11)


def test_each_token_is_read_once_while_the_window_lasts() -> None:
    model = tiny()
    read: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    generate(model, prompts(2, 30), max_new_tokens=5)
    assert read == [30, 1, 1, 16, 1]  # 32 seen: start over from the last 16


@pytest.fixture(scope="module")
def drawn() -> tuple[Tensor, Tensor]:
    """The first new token of 20,000 equal prompts: counts [vocabulary], and the logits."""
    model = tiny(init_std=0.1)
    prompt = torch.tensor([[3, 1, 4]])
    tokens = generate(model, prompt.expand(20_000, 3), max_new_tokens=1, temperature=0.5)
    with torch.no_grad():
        logits = model.eval()(prompt)[0, -1, :VOCABULARY]
    return tokens[:, -1].bincount(minlength=VOCABULARY), logits


def assert_drawn_from(counts: Tensor, probabilities: Tensor) -> None:
    n = counts.sum()
    spread = (n * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - n * probabilities).abs() <= 4.5 * spread).all()


def test_tokens_are_drawn_from_the_tempered_distribution(drawn: tuple[Tensor, Tensor]) -> None:
    counts, logits = drawn
    assert_drawn_from(counts, (logits / 0.5).softmax(-1))
    with pytest.raises(AssertionError):  # precise enough to tell
        assert_drawn_from(counts, (logits / 0.6).softmax(-1))


def test_top_k_draws_from_the_k_likeliest(drawn: tuple[Tensor, Tensor]) -> None:
    _, logits = drawn
    prompt = torch.tensor([[3, 1, 4]]).expand(20_000, 3)
    tokens = generate(tiny(init_std=0.1), prompt, max_new_tokens=1, top_k=4)[:, -1]
    kept = logits.topk(4).indices
    assert set(tokens.tolist()) == set(kept.tolist())
    probabilities = torch.zeros(VOCABULARY)
    probabilities[kept] = logits[kept].softmax(-1)
    assert_drawn_from(tokens.bincount(minlength=VOCABULARY), probabilities)


def test_top_k_beyond_the_vocabulary_is_no_limit() -> None:
    model, prompt = tiny(), prompts(2, 3)
    found = generate(model, prompt, max_new_tokens=9, top_k=1000)
    assert torch.equal(found, generate(model, prompt, max_new_tokens=9))
    greedy = generate(model, prompt, max_new_tokens=9, temperature=0)
    assert torch.equal(generate(model, prompt, max_new_tokens=9, top_k=1), greedy)


def test_padding_is_never_sampled() -> None:
    model = tiny(vocabulary_size=5, vocabulary_multiple=64)
    prompt = torch.zeros(50, 1, dtype=torch.long)
    tokens = generate(model, prompt, max_new_tokens=20, temperature=1e6)  # all but uniform
    assert set(tokens.unique().tolist()) == {0, 1, 2, 3, 4}


def test_seed() -> None:
    model, prompt = tiny(), prompts(2, 3)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generate(model, prompt, max_new_tokens=20, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(generate(model, prompt, max_new_tokens=20, seed=5), first)
    assert not torch.equal(generate(model, prompt, max_new_tokens=20, seed=6), first)


def test_a_model_in_training_stays_in_training() -> None:
    model, prompt = tiny(dropout=0.5), prompts(2, 3)
    expected = generate(model.eval(), prompt, max_new_tokens=20)
    assert not model.training
    model.train()
    assert torch.equal(generate(model, prompt, max_new_tokens=20), expected)  # no dropout
    assert all(module.training for module in model.modules())
    with pytest.raises(IndexError):
        generate(model, torch.tensor([[9999]]), max_new_tokens=1)
    assert model.training

    tokens = generate(model, prompt, max_new_tokens=20)
    model(tokens[:, :-1], tokens[:, 1:]).backward()  # its result is an ordinary tensor
    assert all(p.grad is not None for p in model.parameters())


def test_nothing_to_generate() -> None:
    prompt = prompts(2, 3)
    assert torch.equal(generate(tiny(), prompt, max_new_tokens=0), prompt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, r"\[1, 0\]"),
        ({"tokens": torch.zeros(3, dtype=torch.long)}, r"\[3\]"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"tokens": prompts(1, 3), "max_new_tokens": 1}
    with pytest.raises(ValueError, match=message):
        generate(tiny(), **options | changes)


@pytest.fixture(scope="module")
def cyclist() -> tuple[GPT, float]:
    """A model trained on 0 1 .. 15 0 1 .., as the trainer would: targets are the next tokens."""
    config = ModelConfig(
        preset="gpt2", layers=1, width=32, heads=2, vocabulary_size=16, max_sequence_length=16
    )
    model = build(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(150):
        start = torch.arange(8)[:, None] + step
        cycle = (start + torch.arange(17)) % 16  # [8, 17]
        loss = model(cycle[:, :-1], cycle[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, loss.item()


def test_a_model_learns_the_next_token_and_not_the_one_after(cyclist: tuple[GPT, float]) -> None:
    model, loss = cyclist
    assert loss < 0.05
    tokens = generate(model, torch.tensor([[5]]), max_new_tokens=12, temperature=0)
    assert tokens[0].tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1]


def test_rows_stop_at_the_stop_token_and_all_of_them_end_it(cyclist: tuple[GPT, float]) -> None:
    prompt = torch.tensor([[6, 7], [9, 10]])
    options: dict[str, Any] = {"temperature": 0, "stop_token": 12}
    tokens = generate(cyclist[0], prompt, max_new_tokens=50, **options)
    assert tokens.tolist() == [[6, 7, 8, 9, 10, 11, 12], [9, 10, 11, 12, 12, 12, 12]]
    # A stop token in the prompt is no stop.
    tokens = generate(cyclist[0], torch.tensor([[12]]), max_new_tokens=3, **options)
    assert tokens.tolist() == [[12, 13, 14, 15]]
