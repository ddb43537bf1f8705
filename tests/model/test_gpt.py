"""The model's own laws: causality, gradients everywhere, initialisation, groups, the seam."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.config import PRESETS, ModelConfig
from model.gpt import (
    GPT,
    Context,
    build,
    causal_attention,
    initialise,
    parameter_groups,
    parameter_rules,
    rotary_tables,
    rotate,
)

SIZES: dict[str, Any] = dict(
    layers=2, width=32, heads=4, mlp_width=40, vocabulary_size=29, max_sequence_length=8
)


def tiny(**switches: Any) -> ModelConfig:
    return ModelConfig(**SIZES | switches)


def randomise(model: GPT) -> GPT:
    """No parameter at 0 or 1, and weights large enough for every path to matter."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.3, generator=random)
    return model


def random_tokens(seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randint(29, (batch, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("mlp", ["gelu", "gelu_tanh", "swiglu", "relu_squared"])
def test_every_switch_trains_every_parameter_and_stays_causal(
    norm: str, position: str, mlp: str
) -> None:
    booleans = ["parallel_residual", "biases", "qk_norm", "tied_embeddings"]
    tokens, targets = random_tokens(0), random_tokens(1)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 29
    for *values, kv_heads in itertools.product(*[(False, True)] * 4, (2, 4)):
        switches = dict(zip(booleans, values, strict=True), kv_heads=kv_heads)
        model = randomise(GPT(tiny(norm=norm, position=position, mlp=mlp, **switches)))

        model(tokens, targets).backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, (switches, name)
            assert gradient.isfinite().all(), (switches, name)
            # Equal shifts of all keys shift a query's scores equally: no effect unless rotated.
            if not (name.endswith("key_norm.bias") and position == "learned"):
                assert gradient.any(), (switches, name)

        with torch.no_grad():
            difference = (model(changed) - model(tokens)).abs().amax(dim=(0, 2))  # [time]
        assert (difference[:5] < 1e-5).all(), switches
        assert (difference[5:] > 1e-3).all(), switches


def test_rotation_makes_scores_depend_on_distance_only() -> None:
    config = tiny(preset="neox", rotary_fraction=0.5)
    q, k = torch.randn(2, 1, 1, 1, config.head_width).unbind()

    def score(query_position: int, key_position: int) -> Tensor:
        tables = rotary_tables(config, torch.tensor([query_position, key_position]))
        at = [tuple(table[i : i + 1] for table in tables) for i in range(2)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert (score(9, 4) - score(9, 5)).abs() > 1e-4
    # Channel pair 1 of 2 at position 3: angle 3 / 10000^(1/2), by hand.
    cos, _ = rotary_tables(config, torch.tensor([3]))
    torch.testing.assert_close(cos[0, 1], torch.tensor(3 / 100.0).cos())


def test_rotary_angles_are_not_rounded_with_the_model() -> None:
    """bfloat16 has 8 bits: positions 256 and 257 would be one."""
    tables = rotary_tables(tiny(preset="llama"), torch.tensor([256, 257]))
    assert all(table.dtype == torch.float32 for table in tables)
    model = build(tiny(preset="llama", max_sequence_length=300), seed=0, dtype=torch.bfloat16)
    _, rotary = model.embed(torch.zeros(1, 2, dtype=torch.long), torch.tensor([256, 257]))
    assert rotary is not None
    assert (rotary[0][0] != rotary[0][1]).any()


@pytest.mark.parametrize("parallel", [False, True])
def test_dropout_acts_in_training_on_each_of_its_places(
    parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(tiny(dropout=0.5, parallel_residual=parallel), seed=0)
    tokens = random_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))

    active: list[str] = []
    real_dropout, real_attention = F.dropout, F.scaled_dot_product_attention

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        active.extend(["branch"] * (training and p == 0.5))
        return real_dropout(x, p, training)

    def attention(*tensors: Tensor, dropout_p: float, **options: Any) -> Tensor:
        active.extend(["attention"] * (dropout_p == 0.5))
        return real_attention(*tensors, dropout_p=dropout_p, **options)

    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    model(tokens)
    assert active == []
    model.train()(tokens)
    assert active == ["branch"] + ["attention", "branch", "branch"] * 2  # the embeddings first


def test_z_loss_counts_in_training_only() -> None:
    model = build(tiny(), seed=0, z_loss=0.5)
    tokens, targets = random_tokens(0), random_tokens(1)
    logits = model(tokens)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    penalty = 0.5 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(model(tokens, targets), plain + penalty)
    torch.testing.assert_close(model.eval()(tokens, targets), plain)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_sequence_that_is_too_long_is_refused(preset: str) -> None:
    model = build(tiny(preset=preset, rotary_fraction=1.0), seed=0)
    with pytest.raises(ValueError, match=r"9 tokens.*8"):
        model(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize("tied", [True, False])
def test_padding_rows_have_probability_zero_and_no_gradient(tied: bool) -> None:
    plain = build(tiny(tied_embeddings=tied), seed=0)
    padded = build(tiny(tied_embeddings=tied, vocabulary_multiple=16), seed=0)
    tokens, targets = random_tokens(0), random_tokens(1)
    logits = padded(tokens)
    assert logits.shape == (2, 8, 32)
    assert (logits.softmax(-1)[..., 29:] == 0).all()
    torch.testing.assert_close(logits[..., :29], plain(tokens))

    losses = plain(tokens, targets), padded(tokens, targets)
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    expected = dict(plain.named_parameters())
    for name, parameter in padded.named_parameters():
        assert parameter.grad is not None
        rows = 29 if parameter.shape[0] == 32 and name.startswith(("token", "head")) else None
        torch.testing.assert_close(parameter.grad[:rows], expected[name].grad)
        if rows:
            assert (parameter.grad[rows:] == 0).all()


# Initialisation


def test_initial_values_follow_their_rules() -> None:
    sizes = dict(layers=8, width=256, mlp_width=512, vocabulary_size=500)
    model = build(tiny(**sizes, init_std=0.03, tied_embeddings=False), seed=0)
    residual = 0.03 / 4  # sqrt(2 x 8 layers) = 4
    stds = {"token_embedding": 0.03, "head": 0.03, "attention.qkv": 0.03, "mlp.up": 0.03}
    stds |= {"attention.output": residual, "mlp.down": residual}
    checked = set()
    for name, parameter in model.named_parameters():
        kind = next((kind for kind in stds if name.endswith(f"{kind}.weight")), None)
        if kind is not None:
            checked.add(kind)
            # The standard error of a deviation from n values is std / sqrt(2 n): here < 0.3 %.
            assert parameter.std().item() == pytest.approx(stds[kind], rel=0.015), name
            assert abs(parameter.mean().item()) < 0.02 * stds[kind], name
        elif name != "position_embedding.weight":
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
    assert checked == stds.keys()


def test_initial_values_depend_on_seed_and_name_only() -> None:
    config = tiny(tied_embeddings=False)
    torch.manual_seed(1)
    first = build(config, seed=0).state_dict()
    torch.manual_seed(2)
    assert all(torch.equal(first[n], t) for n, t in build(config, seed=0).state_dict().items())

    reordered = GPT(config)
    reordered._modules = dict(reversed(reordered._modules.items()))
    initialise(reordered, seed=0)
    assert next(iter(reordered.state_dict())) == "head.weight"
    assert all(torch.equal(first[n], t) for n, t in reordered.state_dict().items())

    other = build(config, seed=1).state_dict()
    matrices = [name for name, tensor in first.items() if tensor.ndim == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    by_shape = itertools.combinations(matrices, 2)
    assert not any(torch.equal(first[a], first[b]) for a, b in by_shape)


@pytest.mark.parametrize("preset", PRESETS)
def test_vocabulary_padding_changes_no_other_value(preset: str) -> None:
    # 40 padded rows, as many as the MLP is wide.
    plain = build(tiny(preset=preset), seed=0)
    padded = build(tiny(preset=preset, vocabulary_multiple=40), seed=0)
    for name, tensor in plain.state_dict().items():
        found = padded.state_dict()[name]
        if name in ("token_embedding.weight", "head.weight"):
            assert found.shape[0] == 40
            assert (found[29:] == 0).all()
            found = found[:29]
        assert torch.equal(found, tensor), name


def test_gather_surrounds_the_writing_of_each_parameter() -> None:
    """What a partitioned parameter needs: it is written only while whole."""
    model = GPT(tiny())
    written: list[int] = []

    class Gather:
        def __init__(self, parameter: Tensor) -> None:
            self.parameter = parameter

        def __enter__(self) -> None:
            self.version = self.parameter._version

        def __exit__(self, *_: object) -> None:
            assert self.parameter._version > self.version
            self.parameter.requires_grad_(False)
            written.append(id(self.parameter))

    initialise(model, 0, gather=Gather)
    assert written == [id(p) for p in model.parameters()]


# Weight decay


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_each_parameter_is_in_one_group(preset: str, decay_embeddings: bool) -> None:
    model = build(tiny(preset=preset, rotary_fraction=1.0, qk_norm=True), seed=0)
    groups = parameter_groups(model, weight_decay=0.1, decay_embeddings=decay_embeddings)
    members = [id(p) for group in groups for p in group["params"]]
    assert len(members) == len(set(members))
    assert set(members) == {id(p) for p in model.parameters()}

    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        decays = parameter.ndim == 2 and (decay_embeddings or "embedding" not in name)
        assert decay[id(parameter)] == (0.1 if decays else 0.0), name


def test_a_tied_matrix_has_one_rule() -> None:
    rules = parameter_rules(build(tiny(tied_embeddings=True), seed=0))
    assert "token_embedding.weight" in rules
    assert "head.weight" not in rules


def test_a_step_without_gradients_only_shrinks_matrices() -> None:
    model = randomise(build(tiny(preset="gpt2"), seed=0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = parameter_groups(model, weight_decay=0.1, decay_embeddings=True)
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.5 * 0.1 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0)


# The seam


def test_a_replaced_runner_sees_every_block_once_in_order() -> None:
    model = build(tiny(preset="llama", layers=3), seed=0)
    tokens = random_tokens()
    expected, names = model(tokens), [name for name, _ in model.named_parameters()]
    seen: list[tuple[int, nn.Module]] = []

    def runner(index: int, block: nn.Module, x: Tensor, context: Context) -> Tensor:
        seen.append((index, block))
        return block(x, *context)

    model.run_block = runner
    assert torch.equal(model(tokens), expected)
    assert seen == list(enumerate(model.blocks))
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == list(build(model.config, seed=0).state_dict())


@pytest.mark.parametrize("preset", PRESETS)
def test_checkpointing_through_the_seam_gives_the_same_bits(preset: str) -> None:
    config = tiny(preset=preset, rotary_fraction=1.0, layers=3, dropout=0.3)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    def runner(index: int, block: nn.Module, x: Tensor, context: Context) -> Tensor:
        if index == 1:
            return block(x, *context)
        return checkpoint(block, x, *context, use_reentrant=False)

    def gradients(model: GPT) -> list[Tensor | None]:
        torch.manual_seed(0)
        model(random_tokens(0), random_tokens(1)).backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(build(config, seed=0))
    model = build(config, seed=0)
    model.run_block = runner
    for block in model.blocks:
        block.register_forward_pre_hook(count)
    assert all(map(torch.equal, gradients(model), expected))
    assert forwards == 3 + 2  # two of three blocks ran again


def test_attention_is_replaceable_per_block() -> None:
    """What the key-value cache relies on: keys and values arrive rotated, dropout as in force."""
    block = build(tiny(preset="llama", kv_heads=2, dropout=0.5), seed=0).blocks[0]
    shapes: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        shapes.append((q.shape, k.shape, v.shape, dropout))
        return causal_attention(q, k, v, dropout)

    x = torch.randn(2, 8, 32)
    rotary = rotary_tables(tiny(preset="llama"), torch.arange(8))
    for training, dropout in ((True, 0.5), (False, 0.0)):
        block.train(training)(x, rotary, attend)
        assert shapes.pop() == ((2, 4, 8, 8), (2, 2, 8, 8), (2, 2, 8, 8), dropout)
