"""What an optimizer keeps and borrows beside the weights and gradients it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# Tensors of a weight's size that each keeps, by lower-case type; settings that add one are below.
STATES = {
    "adadelta": 2, "adagrad": 1, "adam": 2, "adamax": 2, "adamw": 2, "asgd": 1, "lamb": 2,
    "lion": 1, "nadam": 2, "radam": 2, "rmsprop": 1, "rprop": 2, "sgd": 0,
}  # fmt: skip
ADDING_ONE = ("amsgrad", "centered", "momentum")
UNKNOWN = 2
"""Assumed of a type that is not listed: as many as Adam."""


class Optimizer(NamedTuple):
    """Counted in elements of the weights that it updates."""

    states: int
    temporaries: int
    """Copies alive at once during an update."""
    at_once: bool
    """Whether the copies are of all the weights of a group, or of one weight after the other."""
    wide: bool
    """States are float32 whatever the weights that are updated are."""


def optimizer_of(section: Mapping[str, Any], device: str) -> Optimizer:
    """The optimizer of a resolved section, which updates weights on `device`.

    Adam's temporaries were read in torch.optim.adam and measured on a CPU: the fused kernel and
    DeepSpeed's have none, foreach holds the square roots of the second moments, the loop over
    weights the same and its quotient. Adam with L2 decay adds the decayed gradients. For other
    types one copy is assumed.
    """
    block = section["optimizer"]
    kind, params = block["type"].lower(), block.get("params", {})
    states = STATES.get(kind, UNKNOWN) + sum(bool(params.get(key)) for key in ADDING_ONE)
    if kind not in ("adam", "adamw"):
        return Optimizer(states, 1, _is_foreach(params, device), wide=False)
    if not params.get("torch_adam"):
        narrow = section.get("bf16", {}).get("bf16_optimizer_states")
        wide = device == "cpu" and not narrow and params.get("fp32_optimizer_states", True)
        return Optimizer(states, 0, True, wide)
    if params.get("fused"):
        return Optimizer(states, 0, True, wide=False)
    foreach = _is_foreach(params, device)
    adds_decay = not params.get("adam_w_mode", kind == "adamw") and params.get("weight_decay")
    return Optimizer(states, (1 if foreach else 2) + bool(adds_decay), foreach, wide=False)


def _is_foreach(params: Mapping[str, Any], device: str) -> bool:
    """torch.optim.optimizer._default_to_fused_or_foreach: by default on a GPU only."""
    foreach = params.get("foreach")
    return device == "cuda" if foreach is None else bool(foreach)
