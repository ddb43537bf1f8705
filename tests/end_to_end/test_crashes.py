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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "in_background", "operations", "moments"),
    [
        pytest.param(1, True, 30, 5, id="background"),
        pytest.param(2, True, 6, 2, id="background-2ranks"),
        pytest.param(2, False, 4, 3, id="foreground-2ranks"),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(
    ranks: int,
    in_background: bool,
    operations: int,
    moments: int,
    altered: Callable[..., Any],
    command: Any,
    losses: Callable[[str], dict[int, float]],
    tmp_path: Path,
) -> None:
    draw = random.Random(1)
    steps = 2 * operations + 10 * moments
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
        {"rank": draw.randrange(ranks), "seconds": 0.1 + draw.random() / 5} for _ in range(moments)
    ]
    for number in range(1, operations + 1):
        deaths.append({"rank": number % ranks, "operation": number // ranks + 1})
    for name in ("whole", "killed"):
        config = altered({**changes, "training.run_folder": str(tmp_path / name)})
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    done = command.python(
        WORKER, str(tmp_path / "whole.json"), str(tmp_path / "killed.json"),
        str(ranks), json.dumps(deaths), str(tmp_path / "result"),
        env={"OMP_NUM_THREADS": "1"}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    report = json.loads((tmp_path / "result").read_text())
    assert report["ends"] == [-9] * len(deaths) + [0], report["notes"]
    if ranks == 1:
        assert {"open", "write", "fsync", "mkdir", "rename", "replace"} <= set(report["notes"])
    samples = [sample for each in report["samples"] for sample in each]
    assert sorted(samples) == list(range(steps * BATCH))

    expected = losses(str(tmp_path / "whole"))
    assert list(expected) == list(range(1, steps + 1))
    assert losses(str(tmp_path / "killed")) == expected
    left = {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()}
    assert left == {"latest", f"step-{steps:08}", f"step-{steps - 2:08}"}
