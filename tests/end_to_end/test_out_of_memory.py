"""A real lack of memory: the allocator fails, and the run explains itself or adapts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RunConfig
from memory.machine import Machine
from memory.planner import Planner
from memory.policies import Policy

WORKER = str(Path(__file__).with_name("limited_train.py"))
# The limit is on address space, of which glibc keeps what was freed in blocks of up to 32 MB.
ENV = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "1"}
# What DeepSpeed, autograd's threads and the planner itself take beside torch's allocator.
BESIDE = 120 * 2**20


@pytest.fixture
def tight(altered: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A run whose activations are most of its memory: 270 MB of 350 without recomputation."""

    def write(**changes: Any) -> tuple[Path, dict[str, Any]]:
        raw = altered(
            {
                "model.layers": 6,
                "model.width": 256,
                "model.max_sequence_length": 128,
                "training.sequence_length": 128,
                "training.max_steps": 2,
                "training.evaluation_samples": 1,
                "training.rehearse": True,
                "deepspeed.train_batch_size": 64,
                "deepspeed.gradient_accumulation_steps": 2,
                "deepspeed.zero_optimization": {"stage": 0},
                **changes,
            }
        )
        path = tmp_path / "config.json"
        path.write_text(json.dumps(raw))
        return path, raw

    return write


def peak(raw: dict[str, Any], policy: Policy, ranks: int = 1) -> int:
    config = RunConfig.model_validate(raw)
    planner = Planner(config, Machine(gpus=ranks, kind="CPU"))
    return planner.plan((policy,) * config.model.layers).gpu.peak.total


def losses_of(raw: dict[str, Any]) -> list[float]:
    lines = Path(raw["training"]["run_folder"], "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapting_ends_in_the_losses_of_the_settings_it_ends_with(
    ranks: int, tight: Callable[..., Any], command: Any, tmp_path: Path
) -> None:
    """On two ranks only the last has too little, and both go on with less."""
    path, raw = tight(
        **{"training.on_out_of_memory": "adapt", "deepspeed.train_batch_size": 64 * ranks}
    )
    # Between what the run needs as it is and with every block recomputed.
    extra = (peak(raw, "none", ranks) + peak(raw, "full", ranks)) // 2 + BESIDE
    arguments = (str(ranks - 1), str(extra), "--config", str(path))
    done = command.python(WORKER, *arguments, ranks=ranks, env=ENV, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-16000:]
    assert "adapting" in done.stdout
    plan = json.loads(Path(raw["training"]["run_folder"], "memory_plan.json").read_text())
    assert set(plan["policies"]) != {"none"}
    adapted = losses_of(raw)

    chosen = {
        p: [n for n, own in enumerate(plan["policies"]) if own == p] for p in plan["policies"]
    }
    path, raw = tight(
        **{
            "training.run_folder": str(tmp_path / "other"),
            "deepspeed.train_batch_size": 64 * ranks,
            "activation_checkpointing": {"policies": chosen},
        }
    )
    roomy = ("nobody", "0", "--config", str(path))
    done = command.python(WORKER, *roomy, ranks=ranks, env=ENV, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(adapted) == 2
    assert losses_of(raw) == adapted


@pytest.mark.slow
def test_stopping_explains_and_the_first_cure_cures(
    tight: Callable[..., Any], command: Any
) -> None:
    path, raw = tight()
    extra = (peak(raw, "none") + peak(raw, "full")) // 2 + BESIDE
    arguments = ("0", str(extra), "--config", str(path))
    done = command.python(WORKER, *arguments, env=ENV, timeout=300)
    assert done.returncode == 1, done.stdout[-6000:] + done.stderr[-16000:]
    assert "Traceback" not in done.stderr
    report = json.loads(Path(raw["training"]["run_folder"], "out_of_memory.json").read_text())
    assert "block" in report["observation"]["moment"] or "loss" in report["observation"]["moment"]
    sets = [
        text
        for key, value in report["cures"][0]["changes"].items()
        for text in ("--set", f"{key}={json.dumps(value)}")
    ]
    done = command.python(WORKER, *arguments, *sets, env=ENV, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-16000:]
    assert len(losses_of(raw)) == 2
