"""The plots of training/report.py: one PNG each, every run a colour in all of them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from training.run_log import RunLog

Across = Literal["step", "tokens"]
"""What the x axis counts."""

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS: dict[str, Any] = {"resume": "--", "rollback": "-", "policy": "-.", "skipped": ":"}
"""How events are drawn, by their kind. The start needs no mark."""
LINE_STYLES = ("-", "--", ":", "-.")
STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 9,
    "legend.frameon": False,
}
SMOOTHED = 60
"""Logged losses from which on their mean is drawn over them: of each and those before it."""


@dataclass(frozen=True)
class Panel:
    name: str
    """Of its file."""
    title: str
    unit: str
    """Of its y axis."""
    caption: str
    draw: Callable[[Axes, RunLog, str, Across], None]
    """Draws a run in a colour, or nothing of it."""
    from_zero: bool = False
    one_run_each: bool = False
    """Whether each run has axes of its own."""


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def plots(runs: Sequence[RunLog], across: Across) -> dict[Panel, bytes]:
    """PNG files, of the panels that any run has something for."""
    with mpl.rc_context(STYLE):
        drawn = {panel: plot(panel, runs, across) for panel in PANELS}
    return {panel: png for panel, png in drawn.items() if png is not None}


def plot(panel: Panel, runs: Sequence[RunLog], across: Across) -> bytes | None:
    """None where no run has anything to draw."""
    rows = len(runs) if panel.one_run_each else 1
    figure = Figure(figsize=(11, 1.6 + 3 * rows), layout="constrained")
    grid = list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0])
    for number, run in enumerate(runs):
        axes = grid[number % rows]
        if panel.one_run_each and len(runs) > 1:
            axes.set_title(run.name, fontsize=11, fontweight="normal")
        panel.draw(axes, run, colour_of(number), across)
    if not any(axes.has_data() for axes in grid):
        return None
    for number, run in enumerate(runs):
        mark_events(grid[number % rows], run, colour_of(number), across)
    for axes in grid:
        finish(axes, panel)
    grid[-1].set_xlabel("optimizer step" if across == "step" else "tokens")
    if across == "tokens":
        grid[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(panel.title, x=0.01, ha="left", fontweight="bold", fontsize=13)
    legend(figure, grid, runs)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def finish(axes: Axes, panel: Panel) -> None:
    axes.set_ylabel(panel.unit)
    axes.margins(x=0.01)
    if panel.from_zero:
        axes.set_ylim(bottom=0)


def legend(figure: Figure, grid: Sequence[Axes], runs: Sequence[RunLog]) -> None:
    """Each label once; events below the curves."""
    handles: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    kinds = {event.get("kind") for run in runs for event in run.events}
    for kind, style in MARKS.items():
        if kind in kinds:
            handles[kind] = Line2D([], [], color="0.4", linestyle=style)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)


def mark_events(axes: Axes, run: RunLog, colour: str, across: Across) -> None:
    for event in run.events:
        if style := MARKS.get(event.get("kind", "")):
            place = event["step"] if across == "step" else run.tokens_at(event["step"])
            axes.axvline(place, color=colour, linestyle=style, linewidth=1, alpha=0.5, zorder=1)


def places(run: RunLog, steps: Sequence[int], across: Across) -> list[float]:
    return [step if across == "step" else run.tokens_at(step) for step in steps]


def draw_loss(axes: Axes, run: RunLog, colour: str, across: Across) -> None:
    steps, losses = run.values("loss")
    at = places(run, steps, across)
    if len(losses) < SMOOTHED:
        axes.plot(at, losses, color=colour, label=run.name)
        return
    axes.plot(at, losses, color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(at, smoothed(losses), color=colour, linewidth=1.8, label=run.name)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each and those before it, as many as are a thirtieth of all; NaN is left out."""
    width = max(1, len(values) // 30)
    means = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if not math.isnan(value)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def draw_validation(axes: Axes, run: RunLog, colour: str, across: Across) -> None:
    for number, key in enumerate(run.sets):
        steps, losses = run.values(key)
        _, _, name = key.partition("/")
        mean = " (mean)" if len(run.sets) > 1 else ""
        axes.plot(
            places(run, steps, across), losses, color=colour, marker="o", markersize=3,
            linestyle=LINE_STYLES[number % len(LINE_STYLES)],
            label=f"{run.name}: {name}" if name else f"{run.name}{mean}",
        )  # fmt: skip


def draw_series(key: str, scale: float = 1.0) -> Callable[[Axes, RunLog, str, Across], None]:
    """Of one kind of number, multiplied by `scale`."""

    def draw(axes: Axes, run: RunLog, colour: str, across: Across) -> None:
        steps, values = run.values(key)
        if not all(math.isnan(value) for value in values):
            at = places(run, steps, across)
            axes.plot(at, [scale * value for value in values], color=colour, label=run.name)

    return draw


def draw_memory(axes: Axes, run: RunLog, colour: str, across: Across) -> None:
    draw_series("memory_peak_bytes", 2**-30)(axes, run, colour, across)
    if run.plan:
        label = f"{run.name}: planned"
        axes.axhline(run.planned_bytes / 2**30, color=colour, linestyle="--", label=label)


def draw_step_time(axes: Axes, run: RunLog, colour: str, across: Across) -> None:
    """Every *_seconds that the lines hold, stacked, and what is left of step_seconds."""
    steps, whole = run.values("step_seconds")
    keys = sorted({key for line in run.training for key in line if key.endswith("_seconds")})
    parts = {
        key.removesuffix("_seconds").replace("_", " "): run.values(key)[1]
        for key in keys
        if key != "step_seconds"
    }
    parts = {name: values for name, values in parts.items() if len(values) == len(whole)}
    known = [sum(values) for values in zip(*parts.values(), strict=True)] or [0.0] * len(whole)
    parts["rest of the step"] = [max(0.0, a - b) for a, b in zip(whole, known, strict=True)]
    milliseconds = [[1000 * value for value in values] for values in parts.values()]
    axes.stackplot(places(run, steps, across), milliseconds, labels=list(parts), alpha=0.8)


PANELS = (
    Panel(
        "loss", "Training loss", "nats a token",
        "Mean over all ranks of each logged step; the strong line of a long run smooths it over a "
        "thirtieth of its lines.",
        draw_loss,
    ),
    Panel(
        "validation", "Validation loss", "nats a token",
        "Of each validation set; where there are several, their mean, each counting the same.",
        draw_validation,
    ),
    Panel("learning_rate", "Learning rate", "learning rate", "", draw_series("lr"), True),
    Panel(
        "gradient_norm", "Gradient norm", "L2 norm", "Over all parameters, before clipping.",
        draw_series("grad_norm"), True,
    ),
    Panel(
        "throughput", "Throughput", "tokens a second",
        "All ranks together, without evaluations and saves.",
        draw_series("tokens_per_second"), True,
    ),
    Panel(
        "mfu", "Model FLOPs utilisation", "% of the devices' peak", "", draw_series("mfu", 100.0),
        True,
    ),
    Panel(
        "memory", "Memory against plan", "GiB of rank 0",
        "On a GPU, the peak of torch's allocator. On a CPU, that of the whole process, which also "
        "holds Python and the libraries: the plan has neither.",
        draw_memory, True,
    ),
    Panel(
        "step_time", "What a step waits for", "milliseconds a step", "Means between two log lines.",
        draw_step_time, True, True,
    ),
)  # fmt: skip
