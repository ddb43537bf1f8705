"""lr(step): right at its corners, and of DeepSpeed's shapes in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from configs.deepspeed import Hardware, resolve
from configs.reading import ConfigError
from configs.schedule import learning_rate
from configs.schema import RunConfig

PEAK = 0.01


@pytest.fixture
def schedule(altered: Callable[..., Any]) -> Callable[..., Callable[[int], float]]:
    def make(kind: str, **params: Any) -> Callable[[int], float]:
        raw = altered({"deepspeed.scheduler": {"type": kind, "params": params}})
        section = resolve(RunConfig.model_validate(raw), Hardware(1, "cpu", bf16=False))
        return lambda step: learning_rate(section, step)

    return make


@pytest.mark.parametrize("warmup", [0, 1, 3, 20])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_corners(schedule: Any, kind: str, warmup: int) -> None:
    lr = schedule(kind, warmup_num_steps=warmup, warmup_type="linear")
    assert lr(1) == pytest.approx(PEAK / max(1, warmup), rel=0.06 if warmup == 0 else 1e-12)
    if warmup:
        assert lr(warmup) == pytest.approx(PEAK, rel=1e-12)
        assert [lr(k) / lr(1) for k in range(1, warmup + 1)] == pytest.approx(range(1, warmup + 1))
    if warmup < 20:
        least = {"WarmupLR": PEAK, "WarmupDecayLR": 0.0, "WarmupCosineLR": PEAK * 0.0001}[kind]
        assert lr(20) == pytest.approx(least)
        assert lr(21) == lr(20), "past its end a schedule stays where it is"


def test_log_warmup_reaches_the_peak(schedule: Any) -> None:
    lr = schedule("WarmupLR", warmup_num_steps=7)
    assert lr(3) == pytest.approx(PEAK * math.log(4) / math.log(8))
    assert lr(7) == pytest.approx(PEAK)


def test_shapes_are_deepspeeds(schedule: Any) -> None:
    from deepspeed.runtime import lr_schedules

    def deepspeeds(scheduler: Any, index: int) -> float:
        scheduler.step(index)
        return scheduler.get_last_lr()[0]

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)

    linear = {"warmup_num_steps": 4, "warmup_type": "linear"}
    theirs = lr_schedules.WarmupDecayLR(optimizer(), 20, warmup_max_lr=PEAK, **linear)
    ours = schedule("WarmupDecayLR", total_num_steps=20, **linear)
    for step in range(1, 25):
        assert ours(step) == pytest.approx(deepspeeds(theirs, step)), step
    theirs = lr_schedules.WarmupCosineLR(optimizer(), 20, cos_min_ratio=0.1, **linear)
    ours = schedule("WarmupCosineLR", total_num_steps=20, cos_min_ratio=0.1, **linear)
    for step in range(5, 25):
        # DeepSpeed's cosine runs one step ahead, so that it never has the peak itself.
        assert ours(step) == pytest.approx(deepspeeds(theirs, step - 1)), step


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"warmup_num_steps": 21}, "warmup_num_steps=21 is more than total_num_steps=20"),
        ({"warmup_num_steps": -1}, "whole number of at least 0, got -1"),
        ({"warmup_num_steps": 1.5}, "whole number of at least 0, got 1.5"),
        ({"warmup_steps": 3}, "warmup_steps: unknown key"),
        ({"warmup_type": "cosine"}, 'expected "linear" or "log"'),
        ({"cos_min_ratio": -0.1}, "expected a number of at least 0"),
    ],
)
def test_mistakes(schedule: Any, params: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        schedule("WarmupCosineLR", **params)


def test_an_unknown_schedule_lists_the_known(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="WarmupLR, WarmupDecayLR, WarmupCosineLR"):
        schedule("Cosine")
