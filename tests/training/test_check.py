"""What --check and --dry-run say of a run, against sums by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RunConfig
from memory.cost import SPEEDS
from memory.fit import plan
from memory.machine import Machine
from memory.planner import Planner
from tests.conftest import Command
from training.check import amounts_of, check, kept_checkpoints, show_duration


@pytest.mark.parametrize(
    ("steps", "interval", "last", "every", "kept"),
    [
        (100, 10, None, None, 10),
        (105, 10, None, None, 11),  # the last step's, too
        (5, 10, None, None, 1),
        (100, 10, 3, None, 3),
        (100, 10, 3, 50, 4),  # 80, 90, 100, and 50
        (100, 10, 20, None, 10),
    ],
)
def test_checkpoints_at_the_end(
    steps: int, interval: int, last: int | None, every: int | None, kept: int,
    altered: Callable[..., Any],
) -> None:  # fmt: skip
    changes = {
        "max_steps": steps,
        "save_interval": interval,
        "keep_last": last,
        "keep_every": every,
    }
    raw = altered({f"training.{key}": value for key, value in changes.items() if value})
    assert kept_checkpoints(RunConfig.model_validate(raw).training) == kept


@pytest.mark.parametrize(
    ("days", "text"), [(12.54, "12.5 days"), (0.5, "12 hours"), (0.01, "864 seconds")]
)
def test_durations_are_shown(days: float, text: str) -> None:
    assert show_duration(days) == text


def test_amounts_by_hand(altered: Callable[..., Any]) -> None:
    raw = altered({"deepspeed.train_batch_size": 64, "training.max_steps": 30})
    raw["deepspeed"]["gradient_accumulation_steps"] = "auto"
    config, machine = RunConfig.model_validate(raw), Machine(gpus=4, kind="A100")
    planned = plan(config, machine)
    amounts = amounts_of(Planner(config, machine), planned)
    assert amounts.tokens == 64 * 16 * 30
    # 2 blocks of 12 w², 72 rows of the head: 2 FLOPs each; 4 w T of attention. Backward as much
    # again, twice.
    width = 32
    per_token = 3 * (2 * (2 * 12 * width**2 + 72 * width) + 2 * 4 * 16 * width)
    assert amounts.flops == per_token * amounts.tokens
    seconds = planned.step.total * 30
    assert amounts.days == pytest.approx(seconds / 86400)
    peak = 4 * SPEEDS["A100"].single  # the fixture trains in float32
    assert amounts.mfu == pytest.approx(amounts.flops / seconds / peak)


def test_too_little_memory_is_an_exit_code(
    altered: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of automatic policies, too: no mistake of the config's."""
    config = RunConfig.model_validate(altered({"activation_checkpointing.policies": "auto"}))
    assert check(config, Machine(gpu_memory=2**29)) == 3
    assert "does not fit: each GPU lacks" in capsys.readouterr().out
    assert check(config, Machine(gpu_memory=2**30)) == 0


@pytest.mark.slow
def test_dry_run_reads_the_first_batch(run_config: dict[str, Any], command: Command) -> None:
    done = command.train(run_config, "--dry-run", "--gpus", "2", "--gpu-memory", "80GiB")
    assert done.returncode == 0, done.stderr
    assert f"first batch: 2 x 16 tokens of {run_config['data']['train'][0]['path']}" in done.stdout
    assert "each has its gradient" in done.stdout
    assert not Path(run_config["training"]["run_folder"]).exists()
    run_config["data"]["train"][0]["path"] += "-missing"
    done = command.train(run_config, "--dry-run")
    assert done.returncode == 2
    assert "-missing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_20b_is_checked_and_run_dry_in_seconds(corpus: Path, command: Command) -> None:
    options = ["--gpus", "8", "--gpu-memory", "80GiB", "--host-memory", "2TiB"]
    train = ["train.py", "--config", "configs/20b.json"]
    done = command.python(*train, "--check", *options)
    assert done.returncode == 0, done.stderr
    assert "20,554,567,680 parameters" in done.stdout
    data = json.dumps([{"path": str(corpus / "train")}])
    done = command.python(
        *train, "--dry-run", *options, "--set", f"data.train={data}",
        "--set", f"data.validation={corpus / 'train'}", "--set", "training.max_steps=1",
        "--set", "deepspeed.scheduler.params.warmup_num_steps=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "20,554,567,680 parameters of a rank went through" in done.stdout
