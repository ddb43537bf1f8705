"""A run goes on with other ranks, ZeRO stages, offload and policies, and trains the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
def test_other_ranks_stages_offload_and_policies_give_the_same_losses(
    stretches: Callable[..., dict[int, float]],
) -> None:
    whole = stretches("whole", (2, zero(2)))
    full = {"activation_checkpointing": {"policies": {"full": "all"}}}
    offload = zero(1, offload_optimizer={"device": "cpu"})
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
