"""The copies that background saves keep, against the files that they are written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RunConfig
from memory.machine import Machine
from memory.planner import Planner
from memory.staging import Staged, staged
from training import store


def test_a_host_has_the_first_rank_once() -> None:
    assert Staged(10, 3).on_host(8, 1) == 83
    assert Staged(10, 3).on_host(8, 2) == 86, "two tensor-parallel parts"
    assert Staged(10, 3).on_host(4, 8) == 52, "other parts are on other hosts"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_copies_are_as_large_as_the_files(
    stage: int, altered: Callable[..., Any], command: Any, tmp_path: Path
) -> None:
    raw = altered(
        {
            "model.width": 256,
            "training.max_steps": 1,
            "training.evaluation_samples": 1,
            "deepspeed.scheduler": ...,
            "deepspeed.zero_optimization.stage": stage,
        }
    )
    done = command.train(raw, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = store.read_manifest(
        Path(raw["training"]["run_folder"]) / "checkpoints/step-00000001"
    )
    written = sum(file.bytes for file in manifest.files.values())
    planner = Planner(RunConfig.model_validate(raw), Machine(gpus=2, kind="CPU"))
    ledger = planner.replay(("none",) * planner.config.model.layers)
    expected = staged(ledger, planner.setup).on_host(2, 1)
    # Beside tensors the files hold their names and shapes.
    assert expected < written < expected + 100_000
    assert expected > 10_000_000
