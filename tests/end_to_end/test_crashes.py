"""SIGKILL at any moment: the run goes on as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = str(Path(__file__).with_name("crash_worker.py"))
BATCH = 8


@pytest.fixture
def train_through(
    altered: Callable[..., Any], command: Any, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Train to the end through deaths; what the worker reports."""

    def run(name: str, ranks: int, deaths: list[Any], changes: dict[str, Any]) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        changes = {"training.run_folder": str(folder / "run"), **changes}
        config = folder / "config.json"
        config.write_text(json.dumps(altered(changes)))
        arguments = [WORKER, str(config), str(ranks), json.dumps(deaths), str(folder / "result")]
        done = command.python(*arguments, env={"OMP_NUM_THREADS": "1"}, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        report: dict[str, Any] = json.loads((folder / "result").read_text())
        return report | {"output": done.stdout}

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "in_background", "operations", "moments"),
    [
        pytest.param(1, True, 25, 5, id="background"),
        pytest.param(2, True, 6, 2, id="background-2ranks"),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(
    ranks: int,
    in_background: bool,
    operations: int,
    moments: int,
    train_through: Callable[..., dict[str, Any]],
    losses: Callable[[str], dict[int, float]],
    tmp_path: Path,
) -> None:
    draw = random.Random(1)
    steps = 2 * operations + 30 * moments
    changes = {
        "training.max_steps": steps,
        "training.save_interval": 2,
        "training.keep_last": 2,
        "training.evaluation_interval": 1000,
        "training.save_in_background": in_background,
        "deepspeed.zero_optimization.stage": 2,
        "deepspeed.scheduler": ...,
    }
    # First lives that leave checkpoints to be deleted, then one for each operation of a save.
    deaths: list[dict[str, Any]] = [
        {"rank": draw.randrange(ranks), "seconds": 0.2 + draw.random() / 3} for _ in range(moments)
    ]
    for number in range(1, operations + 1):
        deaths.append({"rank": number % ranks, "operation": number // ranks + 1})
    report = train_through("killed", ranks, deaths, changes)
    assert report["ends"] == [-9] * len(deaths) + [0], report["notes"]
    if ranks == 1:
        assert {"open", "write", "fsync", "mkdir", "rename", "replace"} <= set(report["notes"])
    samples = [sample for each in report["samples"] for sample in each]
    assert sorted(samples) == list(range(steps * BATCH))

    train_through("whole", ranks, [], changes)
    expected = losses(str(tmp_path / "whole" / "run"))
    assert list(expected) == list(range(1, steps + 1))
    assert losses(str(tmp_path / "killed" / "run")) == expected
    left = {path.name for path in (tmp_path / "killed" / "run" / "checkpoints").iterdir()}
    assert left == {"latest", f"step-{steps:08}", f"step-{steps - 2:08}"}
