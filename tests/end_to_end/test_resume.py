"""Interrupted and resumed equals uninterrupted, to the bit, through the real command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CASES = [
    pytest.param(1, {"stage": 0}, {}, id="zero0"),
    pytest.param(1, {"stage": 1}, {}, id="zero1"),
    pytest.param(1, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}, id="zero2-offload"),
    pytest.param(1, {"stage": 3}, {}, id="zero3"),
    pytest.param(1, {"stage": 2}, {"deepspeed.bf16": {"enabled": True}}, id="zero2-bf16"),
    pytest.param(2, {"stage": 0}, {}, id="zero0-2ranks"),
    pytest.param(2, {"stage": 2}, {}, id="zero2-2ranks"),
    pytest.param(2, {"stage": 3}, {}, id="zero3-2ranks"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "zero", "changes"), CASES)
def test_resumed_losses_are_identical(
    ranks: int,
    zero: dict[str, Any],
    changes: dict[str, Any],
    altered: Callable[..., Any],
    command: Any,
    losses: Callable[[str], dict[int, float]],
    tmp_path: Path,
) -> None:
    changes = {"deepspeed.zero_optimization": zero, **changes}
    if "offload_optimizer" in zero:
        changes["deepspeed.optimizer.params.torch_adam"] = True
    whole = altered({**changes, "training.run_folder": str(tmp_path / "whole")})
    done = command.train(whole, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]

    # Stopped at step 13 after the save at 10, so that three logged steps have to be undone.
    halved = altered({**changes, "training.run_folder": str(tmp_path / "halved")})
    stopped = command.train(halved, "--set", "training.max_steps=10", ranks=ranks)
    assert stopped.returncode == 0, stopped.stderr[-3000:]
    path = tmp_path / "halved" / "metrics.jsonl"
    stale = [json.dumps({"step": step, "loss": 0.0}) for step in (11, 12, 13)]
    path.write_text(path.read_text() + "\n".join(stale) + '\n{"step": 14, "lo')
    resumed = command.train(halved, ranks=ranks)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "step-00000010" in resumed.stdout

    expected, found = losses(str(tmp_path / "whole")), losses(str(tmp_path / "halved"))
    assert list(found) == list(range(1, 21))
    assert found == expected

    events = EventAccumulator(str(tmp_path / "halved" / "tensorboard")).Reload()
    steps = [event.step for event in events.Scalars("training/loss")]
    assert steps == list(range(1, 21))
    again = command.train(halved, ranks=ranks)
    assert again.returncode == 0
    assert "done, at step 20" in again.stdout
    assert losses(str(tmp_path / "halved")) == expected
