"""What DeepSpeed holds beside activations, per rank: parameters, gradients, master weights, states.

Each class replays one ZeRO stage of the installed DeepSpeed: the same allocations in the same order
as its engine and optimizer make, booked in a Ledger. Every size has its source in DeepSpeed's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memory.ledger import Ledger


class Parameter(NamedTuple):
    name: str
    size: int
    """Elements on this rank, after tensor parallelism and before ZeRO."""
    decays: bool
    """Which of the two optimizer groups it is in (model.gpt.parameter_groups)."""


@dataclass(frozen=True)
class Setup:
    """What of a run decides its states. Sizes of one element are in bytes."""

    parameters: Sequence[Parameter]
    """In the order of model.named_parameters()."""
    section: dict[str, Any]
    """The resolved DeepSpeed section."""
    data_ranks: int
    element: int
    """2 for bf16 and fp16, 4 for float32."""
    accumulation_steps: int
    device: str
    """"cpu" or "cuda"."""


class States:
    """The base of all stages: hooks that a replay of the timeline calls in order."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def initialise(self, ledger: Ledger) -> None:
        """From building the model to the end of deepspeed.initialize."""

    def enter(self, ledger: Ledger, module: str) -> None:
        """A module with parameters begins its forward (also in a recomputation)."""

    def leave(self, ledger: Ledger, module: str) -> None:
        """It ends its forward."""

    def enter_backward(self, ledger: Ledger, module: str) -> None:
        """The gradient of the module's output has arrived."""

    def leave_backward(self, ledger: Ledger, module: str) -> None:
        """The gradient of the module's input is computed."""

    def gradient(self, ledger: Ledger, parameter: Parameter) -> None:
        """A parameter's gradient of this micro-batch is complete.

        On entry its bytes (size x element) are alive as "gradients", in a tensor of its own.
        From here on they are this class's to free, now or later.
        """

    def end_micro_batch(self, ledger: Ledger, number: int) -> None:
        """After engine.backward() of micro-batch `number` (from 0), its last work included."""

    def step(self, ledger: Ledger, *, first: bool) -> None:
        """engine.step() that updates; `first` of the process: optimizer states are created."""
