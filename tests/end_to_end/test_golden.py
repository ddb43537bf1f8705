"""50 losses of a tiny run, recorded once: a refactor must show the same ones.

To record anew, on purpose: pytest tests/end_to_end/test_golden.py --record-golden, and say in the
commit why they changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).with_name("golden_losses.json")

# Measured on one machine: torch's AVX-512, AVX2 and scalar kernels and MKL's compatible mode agree
# to 3e-7 here; a learning rate that is 1 % off differs by 4e-2.
RELATIVE = 1e-4


@pytest.mark.slow
def test_losses_are_the_recorded_ones(
    altered: Callable[..., Any],
    command: Any,
    losses: Callable[[str], dict[int, float]],
    request: pytest.FixtureRequest,
) -> None:
    config = altered(
        {
            "model.preset": "llama",
            "model.kv_heads": 2,
            "model.dropout": 0.0,
            "training.max_steps": 50,
            "training.z_loss": 1e-4,
            "deepspeed.zero_optimization": {"stage": 2},
            "deepspeed.scheduler.params.total_num_steps": 50,
        }
    )
    done = command.train(config)
    assert done.returncode == 0, done.stderr[-3000:]
    found = list(losses(config["training"]["run_folder"]).values())
    if request.config.getoption("--record-golden"):
        GOLDEN.write_text(json.dumps(found, indent=0) + "\n")
    expected = json.loads(GOLDEN.read_text())
    assert len(expected) == 50
    assert found == pytest.approx(expected, rel=RELATIVE)
