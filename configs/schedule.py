"""The learning rate of each update, a pure function of the step, from DeepSpeed's scheduler block.

The shapes are those of DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR. The counting is not:
DeepSpeed's objects make the first update, or the first two, at a learning rate of zero, never reach
the cosine's peak, and refuse a warm-up of zero steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def learning_rate(section: Mapping[str, Any], step: int) -> float:
    """The learning rate of update `step` (the first is 1) under a resolved DeepSpeed section.

    The first update has peak / warmup_num_steps (linear warm-up from zero), update
    warmup_num_steps has the peak, and update total_num_steps the minimum.
    """
    lr = section["optimizer"]["params"]["lr"]
    block = section.get("scheduler")
    return SCHEDULES[block["type"]](block["params"], lr, step) if block else lr


def resolve_scheduler(section: dict[str, Any], max_steps: int) -> list[str]:
    """ "auto" in a schedule: all of the run's steps, and the optimizer's learning rate as peak."""
    block = section.get("scheduler")
    if block is None:
        return []
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        return [
            'deepspeed.scheduler: expected {"type": "WarmupCosineLR", "params": {...}}, got '
            f"{block!r}"
        ]
    params = block.setdefault("params", {})
    if block["type"] not in SCHEDULES:
        return [f"deepspeed.scheduler.type: expected one of {', '.join(SCHEDULES)}"]
    if not isinstance(params, dict):
        return [f"deepspeed.scheduler.params: expected an object {{...}}, got {params!r}"]
    defaults: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log"}
    if block["type"] != "WarmupLR":
        defaults["total_num_steps"] = max_steps
    if block["type"] == "WarmupCosineLR":
        defaults |= {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001}
    else:
        defaults |= {"warmup_min_lr": 0.0, "warmup_max_lr": _peak(section)}
    unknown = [key for key in params if key not in defaults]
    if unknown:
        known = ", ".join(sorted(defaults))
        return [f"deepspeed.scheduler.params.{key}: unknown key; known: {known}" for key in unknown]
    params.update({k: v for k, v in defaults.items() if params.get(k, "auto") == "auto"})
    return _check_schedule(block)


def _peak(section: Mapping[str, Any]) -> Any:
    """The optimizer's learning rate; None where there is none, which is reported elsewhere."""
    node: Any = section
    for key in ("optimizer", "params", "lr"):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _check_schedule(block: dict[str, Any]) -> list[str]:
    params, prefix = block["params"], "deepspeed.scheduler.params"
    problems = [
        f"{prefix}.{key}: expected a whole number of at least {least}, got {params[key]!r}"
        for key, least in (("warmup_num_steps", 0), ("total_num_steps", 1))
        if key in params and (type(params[key]) is not int or params[key] < least)
    ]
    problems += [
        f"{prefix}.{key}: expected a number of at least 0, got {params[key]!r}"
        for key in ("warmup_min_lr", "warmup_max_lr", "warmup_min_ratio", "cos_min_ratio")
        if key in params and not (type(params[key]) in (int, float) and params[key] >= 0)
    ]
    if params["warmup_type"] not in ("log", "linear"):
        problems.append(f'{prefix}.warmup_type: expected "linear" or "log"')
    if not problems and params["warmup_num_steps"] > params.get("total_num_steps", math.inf):
        problems.append(
            f"{prefix}.warmup_num_steps={params['warmup_num_steps']} is more than "
            f"total_num_steps={params['total_num_steps']}"
        )
    return problems


def _warmup(params: Mapping[str, Any], step: int) -> float:
    """Share of the peak reached at a step, 1 from the last warm-up step on."""
    steps = params["warmup_num_steps"]
    if step >= steps:
        return 1.0
    if params["warmup_type"] == "log":
        return math.log(step + 1) / math.log(steps + 1)
    return step / steps


def _decay_progress(params: Mapping[str, Any], step: int) -> float:
    """0 at the last warm-up step, 1 at the last step of the schedule."""
    window = params["total_num_steps"] - params["warmup_num_steps"]
    return min(1.0, max(0, step - params["warmup_num_steps"]) / max(1, window))


def _warmup_lr(params: Mapping[str, Any], lr: float, step: int) -> float:
    low, high = params["warmup_min_lr"], params["warmup_max_lr"]
    return low + (high - low) * _warmup(params, step)


def _warmup_decay_lr(params: Mapping[str, Any], lr: float, step: int) -> float:
    if step < params["warmup_num_steps"]:
        return _warmup_lr(params, lr, step)
    return params["warmup_max_lr"] * (1 - _decay_progress(params, step))


def _warmup_cosine_lr(params: Mapping[str, Any], lr: float, step: int) -> float:
    if step < params["warmup_num_steps"]:
        low = params["warmup_min_ratio"]
        return lr * (low + (1 - low) * _warmup(params, step))
    low = params["cos_min_ratio"]
    cosine = (1 + math.cos(math.pi * _decay_progress(params, step))) / 2
    return lr * (low + (1 - low) * cosine)


SCHEDULES: dict[str, Callable[[Mapping[str, Any], float, int], float]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
}
