"""Tensor parallelism without an engine: what DeepSpeed is told, what is refused, the masks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.utils import groups

from configs.deepspeed import BATCH_KEYS, Hardware, resolve, tensor_parallel_size
from configs.reading import ConfigError
from configs.schema import RunConfig
from model.config import ModelConfig
from model.gpt import build
from training.engine import Ranks
from training.tensor_parallel import layer_specs, separate_attention_masks

SPLIT = {"deepspeed.tensor_parallel": {"autotp_size": 2}}


def two_ranks(raw: dict[str, Any], world_size: int = 2) -> dict[str, Any]:
    return resolve(RunConfig.model_validate(raw), Hardware(world_size, "cpu", bf16=False))


def test_each_pattern_finds_its_layer_in_every_block_and_nothing_else() -> None:
    config = ModelConfig(
        layers=11, width=16, heads=4, kv_heads=2, vocabulary_size=67, max_sequence_length=8,
        preset="llama", qk_norm=True, mlp_width=24,
    )  # fmt: skip
    names = list(build(config, seed=1).state_dict())
    found = {}
    for spec in layer_specs(config):
        (pattern,) = spec["patterns"]
        matches = [name for name in names if re.match(pattern, name)]  # as DeepSpeed does
        assert len(matches) == 11
        found[matches[0].removeprefix("blocks.0.")] = (spec["partition_type"], spec.get("shape"))
    assert found == {
        "attention.qkv.weight": ("column", [[16, 8, 8], -1]),
        "attention.output.weight": ("row", None),
        "mlp.up.weight": ("column", [[24, 24], -1]),
        "mlp.down.weight": ("row", None),
        "attention.query_norm.weight": ("skip", None),
        "attention.key_norm.weight": ("skip", None),
    }


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model.heads": 1}, ["autotp_size=2 does not divide model.heads (1)"]),
        ({"model.kv_heads": 1}, ["autotp_size=2 does not divide model.kv_heads (1)"]),
        ({"model.mlp_width": 33}, ["autotp_size=2 does not divide model.mlp_width (33)"]),
        (
            {"deepspeed.tensor_parallel": {"autotp_size": 4}},
            ["autotp_size=4 does not divide the number of ranks (2)"],
        ),
        ({"deepspeed.tensor_parallel": {"autotp_size": -1}}, ["autotp_size", "got -1"]),
        ({"deepspeed.tensor_parallel": {"autotp_size": "2"}}, ["autotp_size", "quotes"]),
        ({"deepspeed.tensor_parallel": 2}, ["tensor_parallel", "expected"]),
        (
            {"deepspeed.tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}},
            ["tensor_parallel", "no other key", "model/partition.py"],
        ),
        ({"deepspeed.bf16": {"enabled": True}}, ["stage 0", "zero_optimization.stage to 1"]),
    ],
)
def test_what_cannot_be_split_is_refused(
    altered: Callable[..., Any], changes: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        two_ranks(altered(SPLIT | changes))
    line = next(line for line in caught.value.problems if "deepspeed.tensor_parallel" in line)
    assert all(part in line for part in parts), line


def test_batches_are_counted_over_replicas(altered: Callable[..., Any]) -> None:
    for world_size, micro in ((2, 4), (4, 2), (8, 1)):
        section = two_ranks(altered(SPLIT), world_size)
        assert tuple(section[key] for key in BATCH_KEYS) == (8, micro, 2)
        assert tensor_parallel_size(section) == 2


def test_a_batch_problem_counts_replicas_and_knows_of_the_launcher(
    altered: Callable[..., Any],
) -> None:
    wrong = {"deepspeed.train_batch_size": 9, "deepspeed.bf16": []}
    with pytest.raises(ConfigError) as caught:
        two_ranks(altered(SPLIT | wrong))
    line = next(line for line in caught.value.problems if "train_batch_size=9" in line)
    assert "ranks=1 (= 8)" in line
    assert "launcher" not in line
    assert any("bf16: expected an object" in line for line in caught.value.problems)


def test_neighbours_form_a_replica() -> None:
    ranks = [Ranks(rank, rank, 4, 4, torch.device("cpu")) for rank in range(4)]
    assert [(r.data_rank, r.data_ranks) for r in ranks] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    split = [replace(r, tensor_parallel=2) for r in ranks]
    assert [(r.data_rank, r.data_ranks) for r in split] == [(0, 2), (0, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_only_attention_draws_differently(
    monkeypatch: pytest.MonkeyPatch, checkpointed: bool
) -> None:
    config = ModelConfig(
        layers=1, width=16, heads=2, vocabulary_size=67, max_sequence_length=8, dropout=0.5
    )
    tokens = torch.arange(8)[None]
    attention, outside, gradients = [], [], []
    for rank in (0, 1, 1):
        model = build(config, seed=1)
        monkeypatch.setattr(groups, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        separate_attention_masks(model, torch.device("cpu"))
        if checkpointed:
            model.run_block = lambda index, block, x, context: torch.utils.checkpoint.checkpoint(
                block, x, *context, use_reentrant=False
            )
        model.blocks[0].attention.register_forward_hook(lambda *a: attention.append(a[-1].detach()))
        torch.manual_seed(7)
        model(tokens, tokens).backward()
        outside.append(torch.rand(4))
        gradients.append(model.blocks[0].attention.qkv.weight.grad)
    step = 2 if checkpointed else 1  # a checkpointed block is computed again
    first, second, again = attention[::step]
    assert torch.equal(outside[0], outside[1]), "the generators have to stay together"
    assert not torch.equal(first, second)
    assert torch.equal(second, again)
    assert torch.equal(gradients[1], gradients[2])
    if checkpointed:
        assert torch.equal(attention[0], attention[1]), "recomputed with other masks"
