"""What the log of a run begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RunConfig, changed
from training import store
from training.session import beginning
from training.setup import Run
from training.universal import Layout


@pytest.fixture
def run(run_config: dict[str, Any], tmp_path: Path) -> Run:
    """Without what no event tells of."""
    config = RunConfig.model_validate(run_config)
    section = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "run").mkdir()
    absent: Any = None

    class Alone(Run):
        layout = Layout(2, 1, 2)  # type: ignore[assignment]

    return Alone(config, config, section, ("none", "full"), absent, absent, {}, absent, None)


def with_checkpoint(run: Run) -> Run:
    folder = Path(run.config.training.run_folder) / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    manifest = store.Manifest(
        progress={}, zero_stage=2, tensor_parallel=1, precision="float32", versions={},
        config=store.as_json(run.config.model_dump()), deepspeed={}, files={},
    )  # fmt: skip
    store.write_manifest(folder, manifest)
    return replace(run, checkpoint=folder)


def test_a_start_names_the_runs_it_follows(run: Run, tmp_path: Path) -> None:
    (event,) = beginning(run)
    assert event == ("start", "started: 2 ranks, ZeRO 2; blocks none: 0; full: 1")
    (tmp_path / "run" / "before-restart-1").mkdir()
    (event,) = beginning(run)
    assert event.words.endswith("; earlier runs are in before-restart-1")


def test_a_resumption_tells_what_changed(run: Run) -> None:
    run = with_checkpoint(run)
    (event,) = beginning(run)
    assert event.kind == "resume"
    assert event.words.startswith("resumed from step-00000010: 2 ranks, ZeRO 2; blocks none: 0")
    policies = {"activation_checkpointing.policies": {"full": "last-1"}}
    other = changed(run.config, policies)
    events = beginning(replace(run, asked=other, config=other))
    assert [event.kind for event in events] == ["resume", "policy"]


def test_what_memory_forced_is_told(run: Run) -> None:
    policies = {"activation_checkpointing.policies": {"full": "last-1"}}
    _, event = beginning(replace(run, config=changed(run.asked, policies)))
    assert event.kind == "policy"
    assert "micro_batch_size_per_gpu 4, gradient_accumulation_steps 2" in event.words
