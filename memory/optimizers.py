"""What an optimizer keeps and borrows beside the weights and gradients it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

# Tensors of a weight's size that each keeps, by lower-case type; settings that add one are below.
STATES = {
    "adadelta": 2, "adagrad": 1, "adam": 2, "adamax": 2, "adamw": 2, "asgd": 1, "lamb": 2,
    "lion": 1, "nadam": 2, "radam": 2, "rmsprop": 1, "rprop": 2, "sgd": 0,
}  # fmt: skip
ADDING_ONE = ("amsgrad", "centered", "momentum")
FLOAT32 = 4
UNKNOWN = 2
"""Assumed of a type that is not listed: as many as Adam."""


class Optimizer(NamedTuple):
    """Counted in elements of the weights that it updates."""

    states: int
    copies: int
    """Alive at once during an update."""
    at_once: bool
    """Whether the copies are of all the weights of a group, or of one weight after the other."""
    wide: int = 0
    """Bytes of an element of its states, where that is not of the weights' type."""

    def borrowed(self, sizes: Sequence[int]) -> int:
        """Most elements that an update of one group borrows."""
        if self.at_once or not self.copies:
            return sum(sizes) * self.copies
        # The last copy of a weight is alive until that of the next has been made.
        return max(before + size * self.copies for before, size in pairwise([0, *sizes]))


def optimizer_of(section: Mapping[str, Any], device: str) -> Optimizer:
    """The optimizer of a resolved section, which updates weights on `device`.

    Adam's copies were read in torch.optim.adam and measured on a CPU: the fused kernel and
    DeepSpeed's own have none, foreach the square roots of the second moments, the loop over weights
    these and their quotient. Adam's L2 decay and SGD's add the decayed gradients. Of other types
    one copy is assumed.
    """
    block = section["optimizer"]
    kind, params = block["type"].lower(), block.get("params", {})
    states = STATES.get(kind, UNKNOWN) + sum(bool(params.get(key)) for key in ADDING_ONE)
    # torch.optim.optimizer._default_to_fused_or_foreach: foreach by default on a GPU only
    foreach = device == "cuda" if params.get("foreach") is None else bool(params["foreach"])
    decays = bool(params.get("weight_decay"))
    if kind not in ("adam", "adamw"):
        return Optimizer(states, decays if kind == "sgd" else 1, foreach)
    if not params.get("torch_adam"):
        narrow = section.get("bf16", {}).get("bf16_optimizer_states")
        wide = device == "cpu" and not narrow and params.get("fp32_optimizer_states", True)
        return Optimizer(states, 0, True, FLOAT32 if wide else 0)
    if params.get("fused"):
        return Optimizer(states, 0, True)
    adds_decay = decays and kind == "adam" and not params.get("adam_w_mode")
    return Optimizer(states, (1 if foreach else 2) + adds_decay, foreach)
