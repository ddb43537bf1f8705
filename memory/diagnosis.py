"""Why memory ran out: what was seen, and the rule that explains it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from memory.ledger import Category
from memory.machine import show_bytes
from memory.messages import Cgroup, Figures

Rule = Literal[
    "fragmentation", "other_process", "loss", "optimizer_step", "save", "host", "host_killed",
    "shared_memory", "capacity",
]  # fmt: skip
HELD: tuple[Category, ...] = ("parameters", "master_weights", "gradients", "optimizer_states")
"""Categories of the planner that can be measured; all else is "rest"."""
FRAGMENTED_SHARE = 0.1
OTHERS_SHARE = 0.05
"""Of a GPU's capacity: less is not what a run fails for."""


@dataclass(frozen=True)
class Observation:
    """What was seen when memory ran out."""

    message: str
    moment: str = ""
    """As the planner names it: "block 3 backward", "loss forward", "optimizer step"; also
    "checkpoint save", "evaluation", and from a traceback alone "forward" or "backward"."""
    rank: int | None = None
    device: str = ""
    """"cuda", "cpu", or "" where a log does not tell."""
    figures: Figures = field(default_factory=Figures)
    held: dict[str, int] | None = None
    """Bytes on the rank's device by category, measured: HELD and "rest". On a CPU the rest counts
    the interpreter and its libraries."""
    others: int | None = None
    """Bytes of other processes on the device."""
    cgroup: Cgroup | None = None
    """The limit on the process's main memory."""


@dataclass(frozen=True)
class Proposal:
    """One cure, with figures where there is a plan."""

    changes: dict[str, Any]
    """To the config, by dotted key, as --set takes them; None: the key goes. May be empty."""
    advice: str = ""
    """What no change to the config does."""
    saving: int | None = None
    """Bytes that the peak of a rank's device (or of a host, where that is short) falls by."""
    slowdown: float | None = None
    """Times the estimated time of a step."""
    fits: bool | None = None
    """Whether it is enough by itself; None: unknown."""
    gpus: int | None = None
    """Where it takes another number of them."""


@dataclass(frozen=True)
class Report:
    rule: Rule
    explanation: str
    observation: Observation
    planned: dict[str, int] | None
    """Bytes by category that the plan has at this moment, as in Observation.held."""
    missing: int | None
    """Bytes that have to be saved."""
    cures: tuple[Proposal, ...]
    """The one to try first first."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_report(raw: dict[str, Any]) -> Report:
    """A report from its JSON.

    Raises:
        ValueError: it is not one.
    """
    try:
        seen = dict(raw["observation"])
        seen["figures"] = Figures(**seen["figures"])
        seen["cgroup"] = None if seen["cgroup"] is None else Cgroup(**seen["cgroup"])
        cures = tuple(Proposal(**cure) for cure in raw["cures"])
        return Report(**raw | {"observation": Observation(**seen), "cures": cures})
    except (KeyError, TypeError) as error:
        raise ValueError(f"no report of an out-of-memory error: {error}") from None


def rule_of(observation: Observation, *, expandable_segments: bool = False) -> Rule:
    """The rule that explains an observation; with expandable segments there is no fragmentation."""
    figures, moment = observation.figures, observation.moment
    if figures.kind == "host_killed" or figures.kind == "shared_memory":
        return figures.kind
    requested, capacity = figures.requested or 0, figures.capacity or 0
    if not expandable_segments and _unallocated(figures) >= max(
        requested, FRAGMENTED_SHARE * capacity, 1
    ):
        return "fragmentation"
    if (observation.others or 0) >= max(requested, OTHERS_SHARE * capacity, 1):
        return "other_process"
    if moment.startswith("checkpoint"):
        return "save"
    if figures.kind == "host" and observation.device != "cpu":
        return "host"
    if moment.startswith("loss"):
        return "loss"
    return "optimizer_step" if moment == "optimizer step" else "capacity"


def _unallocated(figures: Figures) -> int:
    if figures.reserved is None or figures.allocated is None:
        return 0
    return figures.reserved - figures.allocated


def explain(rule: Rule, observation: Observation) -> str:
    """One sentence."""
    figures = observation.figures
    requested = "memory" if figures.requested is None else show_bytes(figures.requested)
    where = f"in {observation.moment}" if observation.moment else "here"
    group = observation.cgroup
    limit = show_bytes(group.limit) if group and group.limit else None
    if rule == "fragmentation":
        return (
            f"{show_bytes(_unallocated(figures))} of torch's memory were unused, but in pieces: "
            f"no one of them had room for {requested}."
        )
    if rule == "other_process":
        return (
            f"Other processes hold {show_bytes(observation.others or 0)} of this GPU: without "
            f"them there would have been room for {requested}."
        )
    if rule == "loss":
        return (
            f"The loss asked for {requested}: logits are tokens x vocabulary numbers, and "
            "checkpointing blocks does not make them smaller."
        )
    if rule == "optimizer_step":
        return (
            f"The update asked for {requested}: Adam's states are made at the first step and stay, "
            "and an update needs room to work in."
        )
    if rule == "save":
        return f"The {observation.moment} asked for {requested}: it copies what training holds."
    if rule == "host":
        have = f", which may have {limit}" if limit else ""
        return f"Main memory ran out {where}: {requested} could not be had{have}."
    if rule == "host_killed":
        why = f": its control group may have {limit}" if limit else ""
        counted = f" and has seen {group.kills} kills" if group and group.kills else ""
        return f"It was killed from outside, as the kernel does for main memory{why}{counted}."
    if rule == "shared_memory":
        return (
            "A data-loader worker found no room in shared memory (/dev/shm), of which a container "
            "has 64 MiB unless told otherwise."
        )
    return f"The run needs more than the device has: {requested} could not be had {where}."
