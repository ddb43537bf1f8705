"""The blocks' policies that cost least time and fit.

Blocks differ in nothing but their place: at a block's backward only the blocks before it still keep
anything. So what a policy needs at a place is known from one replay in which every block has that
policy, and what a mixture needs is a sum. Of all orders of some numbers of blocks per policy, the
one that needs least is found block by block. Mixtures are tried from the cheapest on, and the one
that is chosen is replayed in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import numpy as np

from configs.reading import ConfigError
from configs.schema import RunConfig
from memory.cost import SPEEDS, block_seconds
from memory.ledger import rounded
from memory.machine import Machine, parse_bytes
from memory.planner import Place, Plan, Planner
from memory.policies import Policy, block_policies
from memory.timeline import OFFLOADS_IN_FLIGHT


@dataclass(frozen=True)
class Fit:
    plan: Plan
    """The cheapest that fits; where none does, the one that lacks least memory."""
    next_best: Plan | None
    """The cheapest that fits with other numbers of blocks."""


def plan(config: RunConfig, machine: Machine) -> Plan:
    """The plan of a run as it is: with its policies or, for "auto", with those chosen for it.

    Raises:
        ConfigError: mistakes in the configuration, all of them.
    """
    planner = Planner(config, within_budget(config, machine))
    settings = config.activation_checkpointing
    if settings.policies == "auto":
        return fit(planner, alternatives=False).plan
    return planner.plan(block_policies(settings, config.model.layers, machine.device))


def within_budget(config: RunConfig, machine: Machine) -> Machine:
    """A GPU with no more memory than the run's memory_budget.

    Raises:
        ConfigError: the budget is no size.
    """
    text = config.activation_checkpointing.memory_budget
    if text is None:
        return machine
    try:
        budget = parse_bytes(text)
    except ValueError as error:
        raise ConfigError([f"activation_checkpointing.memory_budget: {error}"]) from None
    memory = budget if machine.gpu_memory is None else min(budget, machine.gpu_memory)
    return machine._replace(gpu_memory=memory)


def fit(planner: Planner, *, alternatives: bool = True) -> Fit:
    """Choose a policy for each block so that the step takes least time and fits the machine.

    Without `alternatives`, `next_best` is not looked for.
    """
    nothing = planner.plan(uniform(planner, "none"))
    if nothing.fits and not alternatives:
        return Fit(nothing, None)
    mixtures = _Mixtures(planner, nothing)
    found: list[Plan] = []
    for policies in mixtures.fitting():
        plan = planner.plan(policies)
        if plan.fits:
            found.append(plan)
            if len(found) == 1 + alternatives:
                break
    if not found:
        return Fit(planner.plan(mixtures.nearest()), None)
    return Fit(found[0], found[1] if len(found) > 1 else None)


def uniform(planner: Planner, policy: Policy) -> tuple[Policy, ...]:
    return (policy,) * planner.config.model.layers


def candidates(planner: Planner) -> tuple[Policy, ...]:
    """What the run's device and backend can do, from the fastest to what keeps least."""
    if planner.config.activation_checkpointing.backend == "deepspeed":
        return ("none", "full")
    selective: tuple[Policy, ...] = () if planner.config.training.compile_blocks else ("selective",)
    offload: tuple[Policy, ...] = ("offload",) if planner.machine.device == "cuda" else ()
    return ("none", *selective, "full", *offload)


class _Option(NamedTuple):
    """A policy that every block can have. Bytes of the GPU, by block."""

    policy: Policy
    seconds: float
    kept: int
    """From a block's forward to its backward."""
    forward: np.ndarray
    """At the block's forward, beyond what other blocks have there."""
    backward: np.ndarray


class _Mixtures:
    """Every number of blocks per policy, the cheapest first, and the order that needs least."""

    def __init__(self, planner: Planner, nothing: Plan) -> None:
        self.planner, self.nothing = planner, nothing
        self.layers = planner.config.model.layers
        self.hidden = rounded(planner.traced.hidden, planner.granularity)
        self.options = [self._option(policy) for policy in candidates(planner)]
        self.offloads = self.options[-1].policy == "offload"
        axes = len(self.options) - 1
        states = np.argwhere(np.indices([self.layers + 1] * axes).sum(0) <= self.layers)
        self.states = states[np.argsort(states.sum(1), kind="stable")]
        """[states, options but the last]: counts of the blocks before one. The first block has the
        first state, the second the first states, and so on."""
        self.numbers = np.zeros([self.layers + 1] * axes, int)
        """Of the states."""
        self.numbers[tuple(self.states.T)] = np.arange(len(self.states))
        self.before: list[np.ndarray] = []
        """For each block and state after it: its policy and the offloaded blocks to come."""
        peaks = self._least_peaks()
        counts = np.column_stack([self.states, self.layers - self.states.sum(1)])
        seconds = counts @ [option.seconds for option in self.options]
        self.order = np.argsort(seconds, kind="stable")
        """Of the states after the last block, which are the mixtures."""
        self.counts = counts[self.order]
        self.peaks = np.maximum(peaks[self.order], self._outside_blocks())
        self.host = self._on_host()

    def fitting(self) -> Iterator[tuple[Policy, ...]]:
        for index in np.flatnonzero(self._lacking() == 0):
            yield self._policies(index)

    def nearest(self) -> tuple[Policy, ...]:
        return self._policies(np.argmin(self._lacking()))

    def _lacking(self) -> np.ndarray:
        gpu = np.maximum(self.peaks - _limit(self.nothing.gpu), 0)
        return gpu + np.maximum(self.host - _limit(self.nothing.host), 0)

    def _option(self, policy: Policy) -> _Option:
        planner, blocks = self.planner, np.arange(self.layers)
        tape = planner.traced.blocks[policy]
        signs = {"allocate": 1, "free": -1}
        kept = sum(
            signs.get(event.kind, 0) * rounded(event.size, planner.granularity)
            for event in tape.forward
        )
        kept = 0 if policy == "offload" else kept
        plan = self.nothing if policy == "none" else planner.plan(uniform(planner, policy))
        peaks = _peaks(plan.gpu)
        forward = np.array([peaks[f"block {n} forward"] for n in blocks]) - blocks * kept
        backward = np.array([peaks[f"block {n} backward"] for n in blocks]) - blocks * kept
        if policy == "offload":
            forward -= self._waiting(blocks, 0)
            backward -= self._waiting(blocks, self.layers - blocks)
        speeds = SPEEDS[planner.machine.kind]
        seconds = block_seconds(planner.traced, policy, speeds, planner.setup.element)
        return _Option(policy, seconds, kept, forward, backward)

    def _waiting(self, offloaded: np.ndarray, coming: np.ndarray | int) -> np.ndarray:
        """Bytes of offloaded inputs that are on the GPU still.

        Those of the last blocks stay there, `coming` of which are not among those `offloaded`.
        """
        return np.minimum(offloaded, np.maximum(OFFLOADS_IN_FLIGHT - coming, 0)) * self.hidden

    def _least_peaks(self) -> np.ndarray:
        """Least peak in the blocks over all orders, by state after the last.

        It depends on the blocks before one, and on how many offloaded ones are to come: their
        number is guessed before the first block, as 0, 1 or more, and must come true.
        """
        most = OFFLOADS_IN_FLIGHT if self.offloads else 0
        least = np.zeros((most + 1, 1))
        for block in range(self.layers):
            states = self.states[: least.shape[1]]
            last = block - states.sum(1)
            counts = np.column_stack([states, last])
            kept = counts @ [option.kept for option in self.options]
            offloaded = last if self.offloads else np.zeros_like(last)
            size = comb(block + 1 + states.shape[1], states.shape[1])
            after = np.full((most + 1, size), np.inf)
            before = np.zeros(after.shape, np.int8)
            for index, option in enumerate(self.options):
                moved = states + (np.arange(states.shape[1]) == index)
                targets = self.numbers[tuple(moved.T)]
                forward = option.forward[block] + self._waiting(offloaded, 0)
                for coming in range(most + 1):
                    backward = option.backward[block] + self._waiting(offloaded, coming)
                    peaks = np.maximum(least[coming], kept + np.maximum(forward, backward))
                    for left in _left(coming, most) if option.policy == "offload" else [coming]:
                        better = peaks < after[left, targets]
                        after[left, targets[better]] = peaks[better]
                        before[left, targets[better]] = index * (most + 1) + coming
            least = after
            self.before.append(before)
        return least[0]

    def _policies(self, index: np.intp) -> tuple[Policy, ...]:
        """Back from the last block."""
        state, coming, found = self.states[self.order[index]].copy(), 0, []
        for before in reversed(self.before):
            code = int(before[coming, self.numbers[tuple(state)]])
            option, coming = divmod(code, len(before))
            found.append(self.options[option].policy)
            state[option : option + 1] -= 1  # the last option is in no state
        return tuple(reversed(found))

    def _outside_blocks(self) -> np.ndarray:
        peaks = _peaks(self.nothing.gpu)
        elsewhere = max(
            total for name, total in peaks.items() if not name.startswith(("block", "loss"))
        )
        kept = self.counts @ [option.kept for option in self.options]
        if self.offloads:
            kept = kept + self._waiting(self.counts[:, -1], 0)
        loss = max(peaks["loss forward"], peaks["loss backward"])
        return np.maximum(elsewhere, loss - self.layers * self.options[0].kept + kept)

    def _on_host(self) -> np.ndarray:
        """At least; a replay says what is there while gradients arrive."""
        ranks = self.nothing.machine.ranks_per_node
        if self.nothing.machine.device == "cpu":
            return self.peaks * ranks
        offloaded = self.counts[:, -1] * self.hidden * ranks if self.offloads else 0
        at_loss = _peaks(self.nothing.host)["loss forward"] + offloaded
        return np.maximum(self.nothing.host.peak.total, at_loss)


def _left(coming: int, most: int) -> list[int]:
    """How many offloaded blocks are to come after one, of which `most` means that or more."""
    return [left for left in {coming - 1, coming} if left >= 0 and (left != coming or left == most)]


def _limit(place: Place) -> float:
    return np.inf if place.limit is None else place.limit


def _peaks(place: Place) -> dict[str, int]:
    """Highest total of each moment, over micro-batches and steps."""
    found: dict[str, int] = {}
    for sample in place.timeline:
        found[sample.moment] = max(sample.total, found.get(sample.moment, 0))
    return found
