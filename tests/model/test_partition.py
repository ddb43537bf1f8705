"""The parts of a block compute what the block does, without anything distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.config import ModelConfig
from model.gpt import Block, build, causal_attention, rotary_tables
from model.partition import cuts, join, summed_parameters

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {"preset": "gpt2"},
    "neox": {"preset": "neox"},
    "llama": {"preset": "llama", "kv_heads": 4, "mlp_width": 48},
    "qk norm": {"preset": "llama", "kv_heads": 4, "mlp_width": 48, "qk_norm": True},
    "qk layernorm": {"preset": "gpt2", "qk_norm": True},
}


def sizes(variant: str) -> ModelConfig:
    return ModelConfig(
        layers=2, width=64, heads=8, vocabulary_size=67, max_sequence_length=16, **VARIANTS[variant]
    )


def parts_of(config: ModelConfig, weights: dict[str, torch.Tensor], number: int) -> Any:
    """The parts, written out by head: part n has the n-th share of the heads and channels."""
    heads, kv_heads, channels = config.heads, config.kv_heads, config.mlp_width
    query = torch.arange(heads * config.head_width).view(number, -1)
    key = torch.arange(kv_heads * config.head_width).view(number, -1)
    hidden = torch.arange(channels).view(number, -1)
    found = []
    for n in range(number):
        first_key = heads * config.head_width
        first_value = first_key + kv_heads * config.head_width
        qkv = torch.cat([query[n], first_key + key[n], first_value + key[n]])
        gate_and_value = [hidden[n], channels + hidden[n]]
        up = torch.cat(gate_and_value) if config.mlp == "swiglu" else hidden[n]
        part = dict(weights)
        for name, weight in weights.items():
            if ".attention.qkv." in name:
                part[name] = weight[qkv]
            elif ".mlp.up." in name:
                part[name] = weight[up]
            elif name.endswith(".attention.output.weight"):
                part[name] = weight[:, query[n]]
            elif name.endswith(".mlp.down.weight"):
                part[name] = weight[:, hidden[n]]
        found.append(part)
    return found


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_joined_parts_are_the_whole(variant: str, number: int) -> None:
    config = sizes(variant)
    weights = build(config, seed=1).state_dict()
    joined = join(config, parts_of(config, weights, number))
    assert joined.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(joined[name], weight), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_summed_gradients_add_up(variant: str) -> None:
    """Attention and MLP of a block whose layers are replaced by one part's."""
    config = sizes(variant)
    model = build(config, seed=1)
    block = model.blocks[1]
    assert isinstance(block, Block)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    x = torch.randn(2, 16, 64)
    rotary = None
    if config.position == "rope":
        rotary = rotary_tables(config, torch.arange(16))
    expected = block.attention(x, rotary, causal_attention), block.mlp(x)
    (expected[0].sum() + expected[1].sum()).backward()
    gradients = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}

    totals = [torch.zeros_like(x), torch.zeros_like(x)]
    sums: dict[str, torch.Tensor] = {}
    for part in parts_of(config, model.state_dict(), 2):
        for layer in cuts(config):
            module = block.get_submodule(layer)
            module.weight = torch.nn.Parameter(part[f"blocks.1.{layer}.weight"])
            if config.biases:  # a row-parallel layer's bias is added once, after the sum
                share = part[f"blocks.1.{layer}.bias"]
                half = 1 if cuts(config)[layer].by == "columns" else 0.5
                module.bias = torch.nn.Parameter(half * share)
        block.zero_grad()
        outputs = block.attention(x, rotary, causal_attention), block.mlp(x)
        (outputs[0].sum() + outputs[1].sum()).backward()
        for total, output in zip(totals, outputs, strict=True):
            total += output
        for name in summed_parameters(config):
            sums[name] = sums.get(name, 0) + block.get_parameter(name).grad
    for total, whole in zip(totals, expected, strict=True):
        torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-4)
    assert sums.keys() == {name for name in gradients if "query_norm" in name or "key_norm" in name}
    for name, total in sums.items():
        torch.testing.assert_close(total, gradients[name], rtol=1e-4, atol=1e-4)
