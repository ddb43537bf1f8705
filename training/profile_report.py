"""What a profile says of each part of the model, as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from memory.ledger import Ledger
from memory.machine import show_bytes
from memory.moments import Moment
from memory.policies import Policy

ALIKE = 0.05
"""Blocks this close to the largest, as a share of it, use as much."""
SHOWN = 3
"""Names in a line."""
UPDATE = "optimizer step"
Column = str
"""A field of Use."""
COLUMNS: dict[Column, str] = {
    "saved": "saved", "forward_peak": "forward peak", "backward_peak": "backward peak"
}  # fmt: skip


class Phase(NamedTuple):
    """A moment of a step, a recomputation being part of its backward. Bytes held."""

    name: str
    start: int
    peak: int
    end: int


@dataclass(frozen=True)
class Use:
    """Bytes of one part of the model in one micro-batch."""

    saved: int
    """Kept from forward to backward, the part's input included, its output not."""
    forward_peak: int
    """Most bytes above what was held as forward began: what will be saved, and the output, too."""
    backward_peak: int
    """Most bytes above what was held as backward began, the output's gradient being held then."""


@dataclass(frozen=True)
class Seconds:
    """Of all micro-batches of a step together."""

    forward: float
    recomputation: float
    backward: float
    """Without the recomputation."""


@dataclass(frozen=True)
class Row:
    name: str
    policy: Policy | None
    measured: Use
    planned: Use
    seconds: Seconds


@dataclass(frozen=True)
class Update:
    """The optimizer's step: most bytes above what was held as it began."""

    measured_peak: int
    planned_peak: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    rows: tuple[Row, ...]
    update: Update

    @property
    def blocks(self) -> list[Row]:
        return [row for row in self.rows if row.policy is not None]

    def most(self, column: Column) -> list[Row]:
        """The blocks that use most; none where all use the same."""
        used = {row.name: getattr(row.measured, column) for row in self.blocks}
        bar = (1 - ALIKE) * max(used.values())
        found = [row for row in self.blocks if used[row.name] >= bar]
        return found if len(found) < len(used) else []


def make_profile(
    policies: Sequence[Policy],
    measured: Iterable[Phase],
    planned: Iterable[Phase],
    hidden: int,
    seconds: Mapping[str, float],
) -> Profile:
    """Put together what was found, `seconds` by the moments' names."""
    parts: dict[str, Policy | None] = {"embedding": None}
    parts |= {f"block {number}": policy for number, policy in enumerate(policies)}
    parts["loss"] = None
    found, expected = list(measured), list(planned)
    rows = [
        Row(
            name,
            policy,
            use_of(name, found, hidden),
            use_of(name, expected, hidden),
            Seconds(
                seconds[f"{name} forward"],
                seconds.get(f"{name} recomputation", 0.0),
                seconds[f"{name} backward"],
            ),
        )
        for name, policy in parts.items()
    ]
    return Profile(
        tuple(rows), Update(_rise(UPDATE, found), _rise(UPDATE, expected), seconds[UPDATE])
    )


def phases(moments: Iterable[Moment]) -> list[Phase]:
    found: list[Phase] = []
    for moment in moments:
        name = moment.name.replace("recomputation", "backward")
        if found and found[-1].name == name:
            before = found.pop()
            found.append(Phase(name, before.start, max(before.peak, moment.peak), moment.end))
        else:
            found.append(Phase(name, moment.start, moment.peak, moment.end))
    return found


def planned_phases(ledger: Ledger) -> list[Phase]:
    """Of a replay's last step: as in the steps that are measured, optimizer states exist."""
    samples, starts = ledger.timeline["gpu"], ledger.starts["gpu"]
    ends = [*starts[1:], ledger.alive["gpu"].total()]
    found = [
        Phase(sample.moment, start, sample.total, end)
        for sample, start, end in zip(samples, starts, ends, strict=True)
    ]
    first_update = next(n for n, phase in enumerate(found) if phase.name == UPDATE)
    return found[first_update + 1 :]


def use_of(name: str, found: Sequence[Phase], hidden: int) -> Use:
    """The most over micro-batches. `hidden` is the size of one hidden state."""
    grown = max(phase.end - phase.start for phase in found if phase.name == f"{name} forward")
    # A block gives back a hidden state for the one it got; the ends of the model only do half.
    exchanged = {"embedding": -hidden, "loss": hidden}.get(name, 0)
    return Use(grown + exchanged, _rise(f"{name} forward", found), _rise(f"{name} backward", found))


def _rise(name: str, found: Iterable[Phase]) -> int:
    return max(phase.peak - phase.start for phase in found if phase.name == name)


def show(profile: Profile) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("policy")
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
        table.add_column("planned", justify="right", no_wrap=True, style="dim")
    for title in ("forward", "recompute", "backward"):
        table.add_column(title, justify="right", no_wrap=True)
    most = {column: profile.most(column) for column in COLUMNS}
    for row in profile.rows:
        sizes = []
        for column in COLUMNS:
            star = "*" if row in most[column] else " "
            sizes.append(show_bytes(getattr(row.measured, column)) + star)
            sizes.append(show_bytes(getattr(row.planned, column)))
        seconds = row.seconds
        again = _milliseconds(seconds.recomputation) if seconds.recomputation else ""
        times = (_milliseconds(seconds.forward), again, _milliseconds(seconds.backward))
        table.add_row(row.name, row.policy or "", *sizes, *times)
    update = profile.update
    peaks = (show_bytes(update.measured_peak) + " ", show_bytes(update.planned_peak))
    table.add_row(UPDATE, "", "", "", "", "", *peaks, "", "", _milliseconds(update.seconds))
    # Wider than a terminal, lines are cut by the terminal, not by rich.
    Console(width=160, soft_wrap=True).print(table)
    for line in verdict(profile):
        print(line)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def verdict(profile: Profile) -> list[str]:
    """Which blocks use most of what."""
    lines = []
    for column, title in COLUMNS.items():
        found = profile.most(column)
        if found:
            largest = max(getattr(row.measured, column) for row in found)
            usual = median(getattr(row.measured, column) for row in profile.blocks)
            names = ", ".join(row.name for row in found[:SHOWN])
            names += f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            lines.append(
                f"* most {title}: {names}, {show_bytes(largest)}; a block's median is "
                f"{show_bytes(usual)}"
            )
    return lines or ["all blocks use the same"]


def write_json(profile: Profile, path: Path) -> None:
    """Bytes and seconds."""
    most = {column: [row.name for row in profile.most(column)] for column in COLUMNS}
    path.write_text(json.dumps({**asdict(profile), "most": most}, indent=2), encoding="utf-8")


def plot(profile: Profile, path: Path) -> None:
    """Of each block what it saves and, on top, its peak in backward; the plan's beside it."""
    from matplotlib.figure import Figure  # takes a second

    figure = Figure(figsize=(max(6.0, 0.5 * len(profile.blocks) + 3), 4.5), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(profile.blocks))
    for side, kind, colours in ((-0.2, "measured", ("C0", "C1")), (0.2, "planned", ("0.6", "0.8"))):
        uses: list[Use] = [getattr(row, kind) for row in profile.blocks]
        saved = [use.saved / 2**20 for use in uses]
        peaks = [use.backward_peak / 2**20 for use in uses]
        at = [place + side for place in places]
        axes.bar(at, saved, 0.4, color=colours[0], label=f"saved, {kind}")
        axes.bar(at, peaks, 0.4, bottom=saved, color=colours[1], label=f"backward peak, {kind}")
    axes.set_xticks(places, [f"{row.name}\n{row.policy}" for row in profile.blocks], fontsize=7)
    axes.set_ylabel("MiB")
    figure.legend(loc="outside upper center", ncols=2, fontsize=7)
    figure.savefig(path, dpi=120)
