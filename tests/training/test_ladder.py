"""The configs of the ladder: published sizes, the tables of their README, and that each trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import load_config
from memory.fit import fit
from memory.planner import Planner
from model.gpt import GPT
from tests.conftest import Command, read_metrics
from training.ladder import LADDER, MARKS, README, VARIANTS, planned, tables, with_tables

CONFIGS = README.parent
NAMES = [row.name for row in LADDER]
WIDTHS = {  # width and blocks: GPT-3's table 2.1 (arXiv 2005.14165)
    "125m": (768, 12),
    "350m": (1024, 24),
    "1b": (2048, 24),
    "3b": (2560, 32),
    "7b": (4096, 32),
    "13b": (5120, 40),
}
PUBLISHED = {  # GPT-NeoX-20B (arXiv 2204.06745, section 2) and Llama's first 7B
    "20b": 20_554_567_680,
    "llama-7b": 6_738_415_616,
}
BATCHES = {  # tokens a step, and of the whole run, as published
    "125m": (0.5e6, 300e9),
    "350m": (0.5e6, 300e9),
    "1b": (1e6, 300e9),
    "3b": (1e6, 300e9),
    "7b": (2e6, 300e9),
    "13b": (2e6, 300e9),
    "20b": (3.15e6, 150_000 * 3.15e6),
    "llama-7b": (4e6, 1e12),
}


def by_hand(width: int, blocks: int) -> int:
    """12 w² of matrices in a block, 9 w of their biases, 4 w of two norms; 50,304 tokens padded."""
    return blocks * (12 * width**2 + 13 * width) + (50_304 + 2048) * width + 2 * width


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_published_ones(name: str) -> None:
    expected = PUBLISHED.get(name) or by_hand(*WIDTHS[name])
    config = load_config(str(CONFIGS / f"{name}.json"), [])
    with torch.device("meta"):
        model = GPT(config.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("name", NAMES)
def test_recipes_are_the_published_ones(name: str) -> None:
    config = load_config(str(CONFIGS / f"{name}.json"), [])
    length = config.training.sequence_length
    assert length == 2048
    batch, tokens = BATCHES[name]
    a_step = config.deepspeed["train_batch_size"] * length
    assert a_step == pytest.approx(batch, rel=0.06), "a power of two near it"
    assert config.training.max_steps * a_step == pytest.approx(tokens, rel=0.01)
    assert len((CONFIGS / f"{name}.json").read_text().splitlines()) <= 70


def test_readme_has_the_planners_tables() -> None:
    text = README.read_text()
    assert MARKS.format("begin") in text
    assert MARKS.format("end") in text
    assert with_tables(text, tables()) == text, "run python -m training.ladder"


def test_readme_names_each_config() -> None:
    files = {path.stem for path in CONFIGS.glob("*.json")} - {"quickstart"}
    assert files == set(NAMES)


@pytest.mark.parametrize("row", [*LADDER, *VARIANTS], ids=str)
def test_each_fits(row: Any) -> None:
    entry = planned(row)
    assert entry.plan.fits
    assert entry.plan.gpu.peak.total <= 76 * 2**30, "its own memory_budget"


def test_20b_recomputes_as_few_blocks_as_fit() -> None:
    """None with one block less: the same blocks, of which one more keeps everything."""
    entry = planned(LADDER[NAMES.index("20b")])
    policies, planner = list(entry.plan.policies), entry.planner
    assert 0 < policies.count("none") < len(policies)
    for number, policy in enumerate(policies):
        if policy != "none":
            fewer = [*policies[:number], "none", *policies[number + 1 :]]
            assert not planner.plan(fewer).fits, number


def test_20b_needs_offload_on_one_node() -> None:
    overrides = ["deepspeed.zero_optimization.offload_optimizer=null"]
    entry = planned(LADDER[NAMES.index("20b")])
    config = load_config(str(CONFIGS / "20b.json"), overrides)
    assert not fit(Planner(config, entry.plan.machine), alternatives=False).plan.fits


@pytest.mark.parametrize("name", ["1b", "13b", "20b"])
def test_checkpoints_have_14_bytes_a_parameter(name: str) -> None:
    """bfloat16 weights, float32 master weights and Adam's two moments: 2 + 4 + 4 + 4."""
    entry = planned(LADDER[NAMES.index(name)])
    expected = 14 * entry.config.model.parameter_count()
    assert entry.plan.checkpoint_bytes == pytest.approx(expected, rel=1e-6)


SCALED = [
    "model.layers=2", "model.width=64", "model.heads=4", "model.vocabulary_size=67",
    "model.max_sequence_length=16", "training.sequence_length=16", "training.max_steps=5",
    "training.evaluation_samples=8", "training.log_interval=1",
    "deepspeed.train_batch_size=8", "deepspeed.train_micro_batch_size_per_gpu=2",
    "deepspeed.bf16.enabled=false", "deepspeed.optimizer.params.lr=0.01",
    "deepspeed.scheduler.params.warmup_num_steps=2", "deepspeed.scheduler.params.total_num_steps=5",
]  # fmt: skip
"""Two small blocks in float32, as a CPU multiplies bf16 slowly; all else is the config's own."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_scaled_down_it_trains(name: str, corpus: Path, tmp_path: Path, command: Command) -> None:
    data = json.dumps([{"path": str(corpus / "train")}])
    overrides = [*SCALED, f"data.train={data}", f"data.validation={corpus / 'validation'}"]
    overrides.append(f"training.run_folder={tmp_path / 'run'}")
    if name == "llama-7b":
        overrides.append("model.mlp_width=192")
    arguments = [word for override in overrides for word in ("--set", override)]
    done = command.python(
        "train.py", "--config", f"configs/{name}.json", *arguments, ranks=2, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert "ZeRO stage 2" in done.stdout
    if name in ("13b", "20b"):
        assert "DeepSpeedCPUAdam" in done.stdout
