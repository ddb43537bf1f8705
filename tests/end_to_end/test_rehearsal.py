"""A rehearsal changes nothing: training after it is training without it, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

OFFLOAD = {"device": "cpu"}
ZERO: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2, offloaded": {"stage": 2, "offload_optimizer": OFFLOAD},
    "3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "3, small parameters held": {"stage": 3},
    "3, offloaded": {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_as_if_nothing_had_been(
    ranks: int, altered: Callable[..., Any], train_all: Callable[..., Any]
) -> None:
    configs = {}
    for name, zero in ZERO.items():
        for rehearses in (False, True):
            changes = {
                "training.max_steps": 3,
                "training.rehearse": rehearses,
                "deepspeed.zero_optimization": zero,
                "activation_checkpointing": {"policies": {"full": "first-1"}},
            }
            if "offload_optimizer" in zero:  # DeepSpeed's own has to be compiled
                changes["deepspeed.optimizer.params.torch_adam"] = True
            configs[f"{name}: {rehearses}"] = altered(changes)
    names = list(ZERO)
    if ranks == 2:
        names.append("tensor parallel")
        for rehearses in (False, True):
            configs[f"tensor parallel: {rehearses}"] = altered(
                {
                    "training.max_steps": 3,
                    "training.rehearse": rehearses,
                    "deepspeed.zero_optimization": {"stage": 1},
                    "deepspeed.tensor_parallel": {"autotp_size": 2},
                }
            )
    results = train_all(configs, ranks)
    for name in names:
        assert results[f"{name}: True"] == results[f"{name}: False"], name
