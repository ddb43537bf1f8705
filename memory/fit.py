"""The blocks' policies that cost least time and fit.

Blocks differ in nothing but their place: at a block's backward only the blocks before it still keep
anything. So what a policy needs at a place is known from one replay in which every block has that
policy, and what a mixture needs is a sum. Mixtures are tried from the cheapest on, and the one that
is chosen is replayed in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from memory.cost import SPEEDS, block_seconds
from memory.planner import Place, Plan, Planner
from memory.policies import Policy

CHUNK = 512
"""Numbers of blocks per policy that are tried at once."""


@dataclass(frozen=True)
class Fit:
    plan: Plan
    """The cheapest that fits; where none does, the one that needs least memory."""
    next_best: Plan | None
    """The cheapest that fits with other numbers of blocks."""


def fit(planner: Planner, *, alternatives: bool = True) -> Fit:
    """Choose a policy for each block so that the step takes least time and fits the machine.

    Without `alternatives`, `next_best` is not looked for.
    """
    nothing = planner.plan(uniform(planner, "none"))
    if nothing.fits and not alternatives:
        return Fit(nothing, None)
    if _elsewhere(nothing) > _limit(nothing.gpu) or _states_on_host(nothing) > _limit(nothing.host):
        return Fit(planner.plan(uniform(planner, candidates(planner)[-1])), None)
    mixtures = _Mixtures(planner, nothing)
    found: list[Plan] = []
    for policies in mixtures.fitting():
        plan = planner.plan(policies)
        if plan.fits:
            found.append(plan)
            if len(found) == 1 + alternatives:
                break
    if not found:
        return Fit(planner.plan(mixtures.smallest()), None)
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


class _Mixtures:
    """Peak and time of every number of blocks per policy, in every order of the policies."""

    def __init__(self, planner: Planner, nothing: Plan) -> None:
        self.nothing = nothing
        self.policies = candidates(planner)
        self.layers = layers = planner.config.model.layers
        traced = planner.traced
        speeds, element = SPEEDS[planner.machine.kind], planner.setup.element
        self.seconds = np.array(
            [block_seconds(traced, policy, speeds, element) for policy in self.policies]
        )
        self.kept = np.array(
            [0 if policy == "offload" else traced.blocks[policy].kept for policy in self.policies]
        )
        self.on_host = np.array([p == "offload" for p in self.policies]) * traced.hidden
        others = [planner.plan(uniform(planner, policy)) for policy in self.policies[1:]]
        plans = [nothing, *others]
        peaks = [_peaks(plan) for plan in plans]
        # What block i needs under each policy, beyond what the blocks before it keep.
        self.at_block = np.array(
            [
                [
                    max(peak[f"block {i} forward"], peak[f"block {i} backward"]) - i * kept
                    for i in range(layers)
                ]
                for peak, kept in zip(peaks, self.kept, strict=True)
            ]
        )
        loss = max(peaks[0]["loss forward"], peaks[0]["loss backward"])
        self.at_loss = loss - layers * self.kept[0]
        self.elsewhere = _elsewhere(nothing)
        self.host = _states_on_host(nothing)

    def fitting(self) -> Iterator[tuple[Policy, ...]]:
        """Those that fit, the cheapest first, one for each number of blocks per policy."""
        limit, host_limit = _limit(self.nothing.gpu), _limit(self.nothing.host)
        ranks = self.nothing.machine.ranks_per_node
        counts = self._counts()
        counts = counts[np.argsort(counts @ self.seconds, kind="stable")]
        for start in range(0, len(counts), CHUNK):
            chunk = counts[start : start + CHUNK]
            peaks, orders = self._best_orders(chunk)
            host = self.host + chunk @ self.on_host * ranks
            for index in np.flatnonzero((peaks <= limit) & (host <= host_limit)):
                yield self._expand(chunk[index], orders[index])

    def smallest(self) -> tuple[Policy, ...]:
        counts = self._counts()
        peaks, orders = self._best_orders(counts)
        least = int(np.argmin(peaks))
        return self._expand(counts[least], orders[least])

    def _counts(self) -> np.ndarray:
        """[mixtures, policies]: every way to share the blocks out."""
        rows: list[tuple[int, ...]] = [()]
        for _ in self.policies[:-1]:
            rows = [(*row, n) for row in rows for n in range(self.layers - sum(row) + 1)]
        return np.array([(*row, self.layers - sum(row)) for row in rows])

    def _best_orders(self, counts: np.ndarray) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        """Least peak over the orders of the policies, for each row of counts, and that order."""
        orders = list(permutations(range(len(self.policies))))
        peaks = np.stack([self._peak(counts, order) for order in orders])
        return peaks.min(0), [orders[index] for index in peaks.argmin(0)]

    def _peak(self, counts: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
        ends = counts[:, order].cumsum(1)  # [mixtures, policies]
        block = np.arange(self.layers)
        runs = (block[None, :, None] >= ends[:, None, :]).sum(2)  # [mixtures, blocks]
        policy = np.array(order)[runs]
        kept = self.kept[policy]
        before = kept.cumsum(1) - kept
        at_blocks = (self.at_block[policy, block] + before).max(1)
        return np.maximum(np.maximum(at_blocks, self.at_loss + kept.sum(1)), self.elsewhere)

    def _expand(self, counts: Sequence[int], order: tuple[int, ...]) -> tuple[Policy, ...]:
        return tuple(self.policies[index] for index in order for _ in range(counts[index]))


def _limit(place: Place) -> float:
    return np.inf if place.limit is None else place.limit


def _elsewhere(plan: Plan) -> int:
    """The peak at the moments that no policy changes."""
    moments = ("block", "loss")
    return max(total for name, total in _peaks(plan).items() if not name.startswith(moments))


def _states_on_host(plan: Plan) -> int:
    return plan.host.peak.total if plan.machine.device == "cuda" else 0


def _peaks(plan: Plan) -> dict[str, int]:
    """Highest total of each moment, over micro-batches and steps."""
    found: dict[str, int] = {}
    for sample in plan.gpu.timeline:
        found[sample.moment] = max(sample.total, found.get(sample.moment, 0))
    return found
