"""Interrupted and resumed equals uninterrupted, to the bit, through the real command."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import read_metrics
from training import store

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

    events = [line for line in read_metrics(tmp_path / "halved") if "event" in line]
    assert [(line["step"], line["kind"]) for line in events] == [(0, "start"), (10, "resume")]
    assert events[1]["event"].startswith("resumed from step-00000010: ")

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


class Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.slow
def test_a_damaged_shard_of_one_rank_sends_all_ranks_to_the_checkpoint_before(
    altered: Callable[..., Any], command: Any, losses: Callable[[str], dict[int, float]]
) -> None:
    changes = {"deepspeed.zero_optimization.stage": 2, "training.save_interval": 4}
    config = altered({**changes, "training.max_steps": 8, "deepspeed.scheduler": ...})
    folder = Path(config["training"]["run_folder"])
    assert command.train(config, ranks=2).returncode == 0
    expected = losses(str(folder))
    newest = folder / "checkpoints" / "step-00000008"
    shard = newest / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(shard, shard.stat().st_size - 1)
    resumed = command.train(config, ranks=2)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert f"{newest} is not used: {shard.name}: " in resumed.stdout
    assert "checkpoints/step-00000004 at step 4" in resumed.stdout
    assert losses(str(folder)) == expected
    assert (folder / "checkpoints" / f"damaged-{newest.name}").is_dir()
    store.verify(newest, store.read_manifest(newest))


@pytest.mark.slow
def test_what_cannot_be_continued_is_refused_until_it_is_told_to_restart(
    altered: Callable[..., Any], command: Any, tmp_path: Path
) -> None:
    config = altered({"training.max_steps": 2, "deepspeed.scheduler": ...})
    folder = Path(config["training"]["run_folder"])
    assert command.train(config).returncode == 0
    checkpoint = folder / "checkpoints" / "step-00000002"

    # Someone puts a file there that runs a command, and makes the manifest agree with it.
    states, trace = checkpoint / "mp_rank_00_model_states.pt", tmp_path / "ran"
    torch.save({"module": Runs(f"touch {trace}")}, states)
    manifest = store.read_manifest(checkpoint)
    digest = hashlib.sha256(states.read_bytes()).hexdigest()
    written = store.Written(bytes=states.stat().st_size, sha256=digest)
    changed = manifest.model_copy(update={"files": {**manifest.files, states.name: written}})
    store.write_manifest(checkpoint, changed)
    more = ["--set", "training.max_steps=4"]
    refused = command.train(config, *more)
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert f"error: {states}: refused" in refused.stderr
    assert not trace.exists()

    states.unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    lost = command.train(config, *more)
    assert lost.returncode == 1
    assert "Traceback" not in lost.stderr
    assert f"{checkpoint} is not used: {states.name}: missing" in lost.stderr
    assert (folder / "metrics.jsonl").read_bytes() == before

    again = command.train(config, *more, "--restart")
    assert again.returncode == 0, again.stderr[-3000:]
    assert (folder / "before-restart-1" / "metrics.jsonl").read_bytes() == before
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000004"
