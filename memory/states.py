"""What DeepSpeed holds beside activations, per rank: parameters, gradients, master weights, states.

Each class replays one ZeRO stage of the installed DeepSpeed: the same allocations in the same order
as its engine and optimizer make, booked in a Ledger. Every size has its source in DeepSpeed's code.
Left out are scalars, such as norms and Adam's step counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from memory.ledger import Category, Ledger, Place
from memory.optimizers import FLOAT32, Optimizer, optimizer_of

ALIGNMENT = 2
"""Elements: nccl_start_alignment_factor in stage_1_and_2.py and bf16_optimizer.py."""
ALL_REDUCE_ELEMENTS = 500_000_000
"""MEMORY_OPT_ALLREDUCE_SIZE in engine.py."""
WIDE_TYPES = ("fp32", "float32", "float")
"""DeepSpeed's names of float32 (DtypeEnum in runtime/config.py)."""


class Parameter(NamedTuple):
    name: str
    size: int
    """Elements on this rank, after tensor parallelism and before ZeRO."""
    decays: bool
    """Which of the two optimizer groups it is in (model.gpt.parameter_groups)."""


@dataclass(frozen=True)
class Group:
    """One optimizer group, flattened into one tensor of which each rank updates an equal share."""

    parameters: tuple[Parameter, ...]
    """In the order in which they are laid out."""
    ranks: int
    rank: int

    @cached_property
    def flat(self) -> int:
        """Elements, padded so that the shares are equal and aligned (align_dense_tensors)."""
        unit = ALIGNMENT * self.ranks
        return -(-sum(parameter.size for parameter in self.parameters) // unit) * unit

    @property
    def share(self) -> int:
        return self.flat // self.ranks

    @property
    def padding(self) -> int:
        """Elements of this rank's share that belong to no parameter."""
        return self.share - sum(self.own_pieces.values())

    @cached_property
    def pieces(self) -> dict[str, dict[int, int]]:
        """Elements of each parameter in the share of each rank that has some."""
        found: dict[str, dict[int, int]] = {}
        start = 0
        for parameter in self.parameters:
            end = start + parameter.size
            ranks = range(start // self.share, -(-end // self.share))
            bounds = {rank: (rank * self.share, (rank + 1) * self.share) for rank in ranks}
            found[parameter.name] = {
                rank: min(end, high) - max(start, low) for rank, (low, high) in bounds.items()
            }
            start = end
        return found

    @property
    def own_pieces(self) -> dict[str, int]:
        """Elements of each parameter in this rank's share."""
        return {name: by[self.rank] for name, by in self.pieces.items() if self.rank in by}


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
    device_memory: int | None = None
    """Bytes that torch can have of the device; None: as many as it asks for."""
    data_rank: int = 0
    """Ranks differ by which parameters their share has a piece of."""

    @property
    def zero(self) -> dict[str, Any]:
        return self.section.get("zero_optimization", {})

    @property
    def stage(self) -> int:
        return self.zero.get("stage", 0)

    @property
    def accumulation_element(self) -> int:
        """Of the sum of the micro-batches' gradients."""
        return self._element(self.section.get("data_types", {}).get("grad_accum_dtype"))

    @property
    def communication_element(self) -> int:
        return self._element(self.section.get("communication_data_type"))

    @property
    def master_element(self) -> int:
        """Of the weights that the optimizer updates, and of their gradients."""
        low = any(
            self.section.get(kind, {}).get(f"{kind}_master_weights_and_grads")
            for kind in ("bf16", "fp16")
        )
        return self.element if low else FLOAT32

    def _element(self, dtype: str | None) -> int:
        if dtype in (None, "auto"):
            return self.element
        return FLOAT32 if dtype in WIDE_TYPES else 2

    @property
    def offloads_optimizer(self) -> bool:
        return (self.zero.get("offload_optimizer") or {}).get("device", "none") != "none"

    @property
    def optimizer(self) -> Optimizer:
        device = "cpu" if self.offloads_optimizer else self.device
        return optimizer_of(self.section, device)

    @property
    def groups(self) -> list[Group]:
        """Those with weight decay first, as DeepSpeed is given them; it drops an empty group."""
        groups = []
        for decays in (True, False):
            members = [p for p in self.parameters if p.decays == decays]
            if self.zero.get("round_robin_gradients"):
                strides = [members[first :: self.data_ranks] for first in range(self.data_ranks)]
                members = list(itertools.chain.from_iterable(strides))
            groups.append(Group(tuple(members), self.data_ranks, self.data_rank))
        return [group for group in groups if group.parameters]


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


def states_of(setup: Setup) -> States:
    """The class of the optimizer that DeepSpeed wraps around the one that is configured.

    DeepSpeedEngine._do_optimizer_sanity_check and _configure_fp16_optimizer.
    """
    # Imported here: these modules import this one.
    from memory import replicated, stages12

    if setup.stage == 3:
        from memory.stage3 import Stage3States

        return Stage3States(setup)
    block = setup.section["optimizer"]
    is_adam = block["type"].lower() in ("adam", "adamw")
    bf16 = setup.section.get("bf16", {}).get("enabled")
    if setup.offloads_optimizer:
        return stages12.OffloadedStates(setup)
    if setup.stage == 1 and bf16 and setup.accumulation_element == FLOAT32:
        return replicated.Bf16States(setup)
    if setup.stage:
        return stages12.ZeroStates(setup)
    if setup.element == FLOAT32:
        return replicated.Float32States(setup)
    if is_adam and not block.get("params", {}).get("torch_adam"):
        return replicated.FusedStates(setup)
    return replicated.UnfusedStates(setup)


@contextmanager
def borrowed(ledger: Ledger, size: int, place: Place = "gpu") -> Iterator[None]:
    """A temporary that is alive while the block runs."""
    ledger.allocate("transient", size, place)
    yield
    ledger.free("transient", size, place)


def borrow(ledger: Ledger, size: int, place: Place = "gpu") -> None:
    """A temporary that is gone again before anything else is allocated."""
    with borrowed(ledger, size, place):
        pass


def replace(ledger: Ledger, category: Category, old: Sequence[int], new: int) -> None:
    """Several tensors copied into one and then released, one after the other."""
    ledger.allocate(category, new)
    for size in old:
        ledger.free(category, size)


def flatten_weights(ledger: Ledger, group: Group, element: int, room: int | None = None) -> None:
    """The parameters of a group become views of one tensor.

    ZeRO 1 and 2 make it in host memory where there is no `room` left for both on the device (read).
    """
    sizes = [parameter.size * element for parameter in group.parameters]
    flat = group.flat * element
    if room is None or flat <= room - ledger.total():
        replace(ledger, "parameters", sizes, flat)
        return
    for size in sizes:
        ledger.free("parameters", size)
        ledger.allocate("transient", size, "host")
    with borrowed(ledger, flat, "host"):
        for size in sizes:
            ledger.free("transient", size, "host")
        ledger.allocate("parameters", flat)


def gather_weights(ledger: Ledger, setup: Setup, groups: Sequence[Group]) -> None:
    """all_gather_into_tensor_dp_groups in runtime/utils.py.

    Gloo gathers into a tensor of its own and copies; NCCL gathers in place.
    """
    if setup.device == "cpu" and setup.data_ranks > 1:
        for group in groups:
            borrow(ledger, group.flat * setup.element)


def all_reduce(ledger: Ledger, sizes: Sequence[int], element: int, communication: int) -> None:
    """DeepSpeedEngine.allreduce_no_retain: tensors are flattened into buckets that are reduced.

    A bucket is full once it holds more than ALL_REDUCE_ELEMENTS. It takes a copy if it is in
    another type than what is sent, and is none of its own if it holds one tensor.
    """
    for bucket in buckets(sizes, ALL_REDUCE_ELEMENTS):
        with borrowed(ledger, sum(bucket) * element if len(bucket) > 1 else 0):
            borrow(ledger, sum(bucket) * communication if communication != element else 0)


def buckets(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Consecutive sizes, cut after the one that exceeds the limit."""
    bucket: list[int] = []
    for size in sizes:
        bucket.append(size)
        if sum(bucket) > limit:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def update(
    ledger: Ledger, setup: Setup, groups: Sequence[Sequence[int]], element: int, *, first: bool
) -> None:
    """One call of the optimizer's step on groups of weights of these sizes, with gradients."""
    optimizer = setup.optimizer
    place: Place = "host" if setup.offloads_optimizer else "gpu"
    for sizes in groups:
        if first:
            for size in sizes:
                for _ in range(optimizer.states):
                    ledger.allocate("optimizer_states", size * (optimizer.wide or element), place)
        borrow(ledger, optimizer.borrowed(sizes) * element, place)
