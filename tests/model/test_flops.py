"""The FLOP formula against torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.config import ModelConfig
from model.flops import training_flops_per_token
from model.gpt import build


@pytest.mark.parametrize(
    "switches",
    [
        {"preset": "gpt2"},
        {"preset": "neox"},
        {"preset": "llama", "kv_heads": 2},
        {"preset": "llama", "kv_heads": 1, "mlp_width": 72, "vocabulary_multiple": 64},
        {"preset": "gpt2", "mlp": "relu_squared", "qk_norm": True, "tied_embeddings": False},
    ],
)
def test_formula_equals_torchs_counter(switches: dict[str, Any]) -> None:
    config = ModelConfig(
        layers=3, width=64, heads=4, vocabulary_size=97, max_sequence_length=40, **switches
    )
    model = build(config, seed=0, loss="full")
    tokens = torch.randint(97, (2, 33))
    # Only plain matrix products are counted, so attention must be made of them.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert training_flops_per_token(config, sequence_length=33) == pytest.approx(counted, rel=5e-3)
