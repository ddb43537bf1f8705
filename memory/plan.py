"""Predict what a run needs of each GPU and host, and find policies that fit.

    python -m memory.plan --config configs/quickstart.json --gpus 8 --gpu-memory 80GiB --fit

Exits with 0 when the run fits, 3 when it does not, 2 on a mistake.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from configs.deepspeed import warnings_of
from configs.schema import RunConfig, load_config
from memory.cost import SPEEDS
from memory.cures import SEARCHED, Cure, cures, search
from memory.fit import fit, plan, within_budget
from memory.ledger import Sample
from memory.machine import Machine, parse_bytes, show_bytes
from memory.planner import Place, Plan, Planner, categories
from memory.policies import describe_policies

DOES_NOT_FIT = 3
TICKS = 30
"""Labels that a plot has room for."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        config = load_config(options.config, options.overrides)
        machine = within_budget(config, machine_of(options))
        now = plan(config, machine)
        chosen, notes = now, []
        if options.search:
            found = search(config, machine, options.search)
            chosen, notes = found.plan, [found.describe(now)]
        elif options.fit:
            result = fit(Planner(config, machine))
            chosen = result.plan
            if result.next_best:
                notes = [_next_best(chosen, result.next_best)]
        notes += [f"warning: {line}" for line in warnings(config, machine)]
        others = [] if chosen.fits else cures(config, machine, chosen)
        if options.plot:
            plot(chosen, options.plot)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(chosen.as_json(), indent=2))
    else:
        show(chosen, notes, others)
    return 0 if chosen.fits else DOES_NOT_FIT


def warnings(config: RunConfig, machine: Machine) -> list[str]:
    return warnings_of(config, Planner(config, machine).section, machine.hardware)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m memory.plan --config configs/quickstart.json --gpus 8 "
        "--gpu-memory 80GiB --fit",
    )
    parser.add_argument("--config", required=True, help="the run's JSON file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    add_machine(parser)
    parser.add_argument("--fit", action="store_true", help="choose each block's policy")
    parser.add_argument(
        "--search", type=_search, metavar="SETTINGS",
        help=f"choose these, too, comma-separated: {', '.join(SEARCHED)}",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="sizes in bytes, times in seconds")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="the timeline, stacked")
    return parser.parse_args(arguments)


def add_machine(parser: argparse._ActionsContainer) -> None:
    """Options that describe hardware."""
    parser.add_argument("--gpus", type=positive, default=1, help="ranks, over all nodes")
    parser.add_argument("--gpus-per-node", type=positive, default=8)
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of one GPU, as in 80GiB")
    parser.add_argument("--host-memory", metavar="SIZE", help="of one node, as in 1TiB")
    parser.add_argument("--gpu", choices=SPEEDS, default="H100", help="for the step's time")


def machine_of(options: argparse.Namespace) -> Machine:
    gpu_memory, host_memory = (
        None if text is None else parse_bytes(text)
        for text in (options.gpu_memory, options.host_memory)
    )
    return Machine(options.gpus, options.gpus_per_node, gpu_memory, host_memory, options.gpu)


def positive(text: str) -> int:
    """A command's whole number of at least 1."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 1")
    return int(text)


def _search(text: str) -> frozenset[str]:
    names = frozenset(text.split(","))
    if unknown := names - set(SEARCHED):
        raise argparse.ArgumentTypeError(
            f"{sorted(unknown)[0]!r}: expected some of {', '.join(SEARCHED)}"
        )
    return names


def _next_best(chosen: Plan, other: Plan) -> str:
    slower = other.step.total / chosen.step.total - 1
    return (
        f"next best: {describe_policies(other.policies)}, {slower:.2%} slower, "
        f"{show_bytes(other.gpu.peak.total)}"
    )


def show(chosen: Plan, notes: Sequence[str] = (), others: Sequence[Cure] = ()) -> None:
    """Print a plan so that it is understood in ten seconds."""
    console = Console(soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    places = {"each GPU": chosen.gpu, "each host": chosen.host}
    if chosen.machine.device == "cpu":
        places = {"each rank": chosen.gpu, "the host": chosen.host}
    for name in places:
        table.add_column(name, justify="right")
    columns = [categories(place.peak) for place in places.values()]
    for category in columns[0]:
        sizes = [column[category] for column in columns]
        if any(sizes):
            shown = [show_bytes(size) if size else "" for size in sizes]
            table.add_row(category.replace("_", " "), *shown)
    table.add_section()
    table.add_row("peak", *(show_bytes(place.peak.total) for place in places.values()))
    table.add_row("has", *(_limit(place) for place in places.values()))
    table.add_row("at", *(place.peak.moment for place in places.values()))
    console.print(table)
    verdicts = [
        f"{name} lacks {show_bytes(p.shortfall)}" for name, p in places.items() if p.shortfall
    ]
    console.print(f"\n{'does not fit: ' + '; '.join(verdicts) if verdicts else 'fits'}")
    console.print(f"blocks  {describe_policies(chosen.policies)}")
    console.print(
        f"step    {chosen.step.total:.3g} s: compute {chosen.step.compute:.3g}, communication "
        f"{chosen.step.communication:.3g}, update {chosen.step.update:.3g} (estimated)"
    )
    for note in notes:
        console.print(note)
    for line in chosen.assumptions:
        console.print(f"assumes {line}", style="dim")
    if others:
        console.print("\nwhat would help:")
    for cure in others:
        console.print(f"  {cure.describe(chosen)}", markup=False)


def _limit(place: Place) -> str:
    return "not given" if place.limit is None else show_bytes(place.limit)


def plot(chosen: Plan, path: Path) -> None:
    """The categories of one GPU, stacked, as a PNG file: initialisation and the second step.

    That step has optimizer states; of its micro-batches the first is shown.
    """
    from matplotlib.figure import Figure

    timeline = _second_step(chosen.gpu.timeline)
    stacked = {
        name: [categories(sample)[name] / 2**30 for sample in timeline]
        for name in categories(timeline[0])
    }
    used = {name: sizes for name, sizes in stacked.items() if any(sizes)}
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.stackplot(
        range(len(timeline)), list(used.values()), step="mid",
        labels=[name.replace("_", " ") for name in used],
        colors=[f"C{number}" for number, name in enumerate(stacked) if name in used],
    )  # fmt: skip
    if chosen.gpu.limit is not None:
        axes.axhline(chosen.gpu.limit / 2**30, color="black", linestyle="--", label="limit")
    marks = _ticks(timeline)
    axes.set_xticks(marks, [timeline[n].moment for n in marks], rotation=45, ha="right", fontsize=8)
    axes.margins(x=0)
    axes.set_ylabel("GiB of one rank" if chosen.machine.device == "cpu" else "GiB of one GPU")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, reverse=True)
    figure.savefig(path, dpi=120)


def _second_step(timeline: Sequence[Sample]) -> list[Sample]:
    moments = [sample.moment for sample in timeline]
    begin = moments.index("optimizer step") + 1
    end = moments.index("embedding backward", begin) + 1
    return [timeline[moments.index("initialisation")], *timeline[begin:end], timeline[-1]]


def _ticks(timeline: Sequence[Sample]) -> list[int]:
    """As far apart as labels need; the ends and moments outside the blocks come first."""
    apart = max(1, len(timeline) // TICKS)
    outside = [n for n, sample in enumerate(timeline) if not sample.moment.startswith("block")]
    marks: list[int] = []
    for n in (outside[0], outside[-1], *outside, *range(len(timeline))):
        if all(abs(n - mark) >= apart for mark in marks):
            marks.append(n)
    return marks


if __name__ == "__main__":
    raise SystemExit(main())
