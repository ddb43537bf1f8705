"""Closed-form sizes against models that are built, by hand, and against mistakes."""

from __future__ import annotations

import itertools
import resource
from typing import Any

import pytest
import torch

from model.config import PRESETS, ModelConfig
from model.gpt import GPT, parameter_rules

SIZES = dict(layers=3, width=64, heads=4, vocabulary_size=61, max_sequence_length=10)


def count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())  # a tied matrix comes once


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("changes", [{}, {"vocabulary_multiple": 64}, {"mlp_width": 72}])
def test_closed_form_count_of_presets(preset: str, changes: dict[str, Any]) -> None:
    config = ModelConfig(preset=preset, **SIZES | changes)
    assert config.parameter_count() == count(config)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("mlp", ["gelu", "gelu_tanh", "swiglu", "relu_squared"])
def test_closed_form_count_and_rules_of_every_switch(norm: str, position: str, mlp: str) -> None:
    booleans = ["parallel_residual", "biases", "qk_norm", "tied_embeddings"]
    for values in itertools.product((False, True), repeat=len(booleans)):
        for kv_heads in (1, 2, 4):
            switches = dict(zip(booleans, values, strict=True), kv_heads=kv_heads)
            config = ModelConfig(**SIZES, norm=norm, position=position, mlp=mlp, **switches)
            assert config.parameter_count() == count(config), switches
            with torch.device("meta"):
                model = GPT(config)
            rules = parameter_rules(model)  # asserts that every parameter has one
            assert all(
                rules[name].decay == (p.ndim == 2) for name, p in model.named_parameters()
            ), switches


def test_a_20b_model_counted_by_hand_and_built_without_memory() -> None:
    config = ModelConfig(
        preset="neox",
        layers=44,
        width=6144,
        heads=64,
        vocabulary_size=50_277,
        vocabulary_multiple=256,
        max_sequence_length=2048,
    )
    d = 6144
    attention = (3 * d * d + 3 * d) + (d * d + d)
    mlp = (4 * d * d + 4 * d) + (4 * d * d + d)
    norms = 2 * (d + d)
    expected = 44 * (attention + mlp + norms) + 2 * d + 2 * 50_432 * d
    assert expected == 20_554_567_680  # as published for GPT-NeoX-20B
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert config.parameter_count() == count(config) == expected
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 100 * 1024


def test_defaults_of_sizes() -> None:
    gpt2 = ModelConfig(**SIZES)
    assert (gpt2.kv_heads, gpt2.mlp_width, gpt2.padded_vocabulary_size) == (4, 256, 61)
    # Llama 7B: 8/3 x 4096 = 10922.67, to the 64 below 10880; its own 11008 must be given.
    llama = ModelConfig(preset="llama", **SIZES | {"width": 4096, "heads": 32})
    assert llama.mlp_width == 10_880
    assert ModelConfig(**SIZES, vocabulary_multiple=64).padded_vocabulary_size == 64
    assert ModelConfig(**SIZES | {"vocabulary_size": 64}, vocabulary_multiple=64) == ModelConfig(
        **SIZES | {"vocabulary_size": 64}, vocabulary_multiple=64, kv_heads=0, mlp_width=0
    )


def test_a_config_survives_json() -> None:
    for preset in PRESETS:
        config = ModelConfig(preset=preset, **SIZES, vocabulary_multiple=8)
        assert ModelConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads=5 does not divide width=64"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"heads": 5, "kv_heads": 3}, "heads=5 .*kv_heads=3"),
        ({"preset": "neox", "width": 48}, "rotary_fraction=0.25 of head width 12 is 3 channels"),
        ({"preset": "llama", "rotary_fraction": 0.01}, "leaves no channel"),
        ({"preset": "gpt3"}, "preset"),
        ({"depth": 3}, "depth"),
        ({"layers": 0}, "layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"width": "wide"}, "width"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SIZES | changes)
