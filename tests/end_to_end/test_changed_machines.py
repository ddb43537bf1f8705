"""A run goes on with other ranks, ZeRO stages, offload and policies, and trains the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training.universal import Layout, refusal
from training.verify_resume import differing_tensors

# Sums over ranks and micro-batches are taken in another order.
TOLERANCE = 2e-6


@pytest.fixture
def stretches(
    altered: Callable[..., Any],
    command: Any,
    losses: Callable[[str], dict[int, float]],
    tmp_path: Any,
) -> Callable[..., dict[int, float]]:
    """Train one run in stretches of five steps, each with its own ranks and changes; its losses.

    No dropout: its masks are drawn per rank.
    """

    def train(name: str, *parts: tuple[int, dict[str, Any]]) -> dict[int, float]:
        folder = str(tmp_path / name)
        for number, (ranks, changes) in enumerate(parts, start=1):
            config = altered(
                {
                    "model.dropout": 0.0,
                    "deepspeed.optimizer.params.torch_adam": True,
                    "training.run_folder": folder,
                    "training.save_interval": 5,
                    **changes,
                }
            )
            last = 20 if number == len(parts) else 5 * number
            flags = ["--change-layout"] if number > 1 else []
            done = command.train(config, "--set", f"training.max_steps={last}", *flags, ranks=ranks)
            assert done.returncode == 0, done.stderr[-3000:]
        return losses(folder)

    return train


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"deepspeed.zero_optimization": {"stage": stage, **more}}


@pytest.mark.slow
def test_other_ranks_stages_offload_policies_and_micro_batches_give_the_same_losses(
    stretches: Callable[..., dict[int, float]],
) -> None:
    whole = stretches("whole", (2, zero(2)))
    full = {"activation_checkpointing": {"policies": {"full": "all"}}}
    offload = zero(1, offload_optimizer={"device": "cpu"})
    offload |= {"deepspeed.gradient_accumulation_steps": 4}
    changed = stretches("changed", (2, zero(2)), (1, zero(3) | full), (2, offload), (2, zero(0)))
    assert list(changed) == list(whole) == list(range(1, 21))
    assert changed == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.slow
def test_another_tensor_parallel_size_gives_the_same_losses(
    stretches: Callable[..., dict[int, float]],
) -> None:
    """Untied and with grouped queries: what is split by rows, by columns and within heads."""
    llama = {
        "model.preset": "llama",
        "model.kv_heads": 2,
        "model.max_sequence_length": 16,
    }
    split = {"deepspeed.tensor_parallel": {"autotp_size": 2}}
    whole = stretches("whole", (1, llama | zero(0)))
    changed = stretches(
        "changed", (1, llama | zero(0)), (2, llama | split | zero(2)), (2, llama | split | zero(3))
    )
    assert changed == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.slow
def test_another_layout_or_batch_is_refused_by_name(
    altered: Callable[..., Any], command: Any
) -> None:
    before = altered({"training.max_steps": 2, **zero(1)})
    assert command.train(before).returncode == 0
    other = command.train(before, "--set", "deepspeed.zero_optimization.stage=2")
    assert other.returncode == 2
    assert "written by 1 rank, ZeRO 1, and this run has 1 rank, ZeRO 2" in other.stderr
    assert "--change-layout" in other.stderr
    batch = command.train(before, "--set", "deepspeed.train_batch_size=16", "--change-layout")
    assert batch.returncode == 2
    assert "train_batch_size=8, but this run has 16 on 1 ranks" in batch.stderr
    assert "Traceback" not in other.stderr + batch.stderr


def test_what_deepspeed_cannot_convert_is_refused() -> None:
    adam = {"optimizer": {"type": "AdamW"}}
    one, two = Layout(1, 1, 1), Layout(2, 1, 2)
    assert refusal(one, two, adam) is None
    assert "Lion" in str(refusal(one, two, {"optimizer": {"type": "Lion"}}))
    assert "use stage 1" in str(refusal(one, Layout(1, 1, 0), adam | {"bf16": {"enabled": True}}))
    assert refusal(one, Layout(1, 1, 0), adam) is None
    for stage in (0, 3):
        assert "ZeRO 1 and 2 only" in str(refusal(Layout(2, 2, stage), two, adam))


@pytest.mark.slow
def test_verify_resume_proves_it_on_the_users_config(
    altered: Callable[..., Any], command: Any, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(altered({})))
    done = command.python("-m", "training.verify_resume", "--config", str(path), "--steps", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming at step 2 of 4 is exact" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"], "all of it was scratch"


def test_verify_resume_finds_one_bit(tmp_path: Path) -> None:
    weights = torch.tensor([0.0, 1.0, float("nan")])
    for name, first in (("whole", 0.0), ("same", 0.0), ("other", -0.0)):
        folder = tmp_path / name / "checkpoints" / "step-00000004"
        folder.mkdir(parents=True)
        weights[0] = first
        torch.save({"module": {"w": weights}, "optimizer": [weights]}, folder / "states.pt")
        (folder.parent / "latest").write_text(folder.name)
    assert list(differing_tensors(tmp_path / "whole", tmp_path / "same")) == []
    assert list(differing_tensors(tmp_path / "whole", tmp_path / "other")) == [
        "states.pt: module.w",
        "states.pt: optimizer.0",
    ]
