"""Explain an out-of-memory error, from a run's report or from any log.

    python -m memory.doctor runs/quickstart/out_of_memory.json
    python -m memory.doctor slurm-1234.out --config configs/quickstart.json --gpus 8

Exits with 0 when it has an explanation, 2 when it has not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from configs.schema import RunConfig, load_config
from memory.diagnosis import Observation, Proposal, Report, explain, read_report, rule_of
from memory.fit import plan as plan_of
from memory.machine import show_bytes
from memory.messages import find_message, read_message
from memory.plan import add_machine, machine_of
from memory.planner import Plan
from memory.remedies import general, planned, proposals

SHOWN = 5
"""Cures."""


def diagnose(
    observation: Observation, config: RunConfig | None = None, plan: Plan | None = None
) -> Report:
    """Why memory ran out, and the cures, the first one being one that suffices if any does.

    `plan` is the run's as it is, on the machine that it ran on; without it and `config` the cures
    are general ones.
    """
    expandable = config is not None and config.training.expandable_segments
    rule = rule_of(observation, expandable_segments=expandable)
    cures, missing, beside = general(rule, observation), observation.figures.requested, None
    if config and plan:
        beside = planned(observation, plan)
        missing, specific = proposals(rule, observation, config, plan)
        if cures and cures[0].fits:  # it changes nothing of the run
            cures = [*cures, *specific]
        elif rule in ("loss", "optimizer_step", "capacity") and any(c.fits for c in specific):
            cures = specific  # what is general is among them
        else:
            cures = [*specific, *cures]
    explanation = explain(rule, observation)
    return Report(rule, explanation, observation, beside, missing, tuple(cures))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        report = read(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {options.file}: cannot read it: {error.strerror}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m memory.doctor slurm-1234.out --config configs/quickstart.json "
        "--gpus 8 --gpu-memory 80GiB",
    )
    parser.add_argument("file", type=Path, help="RUN/out_of_memory.json, or a log of any program")
    parser.add_argument("--config", help="the JSON file of the run that a log is of")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    add_machine(parser)
    parser.add_argument("--json", action="store_true", help="sizes in bytes")
    return parser.parse_args(arguments)


def read(options: argparse.Namespace) -> Report:
    """The report in a file, or one made of the last out-of-memory message in it.

    Raises:
        ValueError: there is nothing to explain, or the config or the machine is wrong.
        OSError: a file cannot be read.
    """
    text = options.file.read_text(encoding="utf-8", errors="replace")
    if text.lstrip().startswith("{"):
        try:
            return read_report(json.loads(text))
        except json.JSONDecodeError:
            pass  # a log may begin with a brace
    found = find_message(text)
    if found is None:
        raise ValueError(f"{options.file}: no out-of-memory message in it")
    figures = read_message(found.message)
    machine = machine_of(options)
    device = "cuda" if figures.kind == "device" else ""
    if options.config and machine.device == "cpu":
        device = "cpu"
    observation = Observation(
        found.message, found.moment, found.rank, device, figures, others=figures.others
    )
    if not options.config:
        return diagnose(observation)
    config = load_config(options.config, options.overrides)
    return diagnose(observation, config, plan_of(config, machine))


def show(report: Report) -> None:
    """Print a report so that it is understood in ten seconds."""
    console = Console(soft_wrap=True, highlight=False)
    seen = report.observation
    rank = "" if seen.rank is None else f" on rank {seen.rank}"
    console.print(f"out of memory{rank}: {report.rule.replace('_', ' ')}", style="bold")
    console.print(report.explanation, markup=False)
    if report.missing:
        console.print(f"to save   {show_bytes(report.missing)}")
    if seen.held or report.planned:
        console.print(_table(seen.held, report.planned))
    if report.cures:
        console.print("\ntry, in this order:")
    for number, cure in enumerate(report.cures[:SHOWN], 1):
        console.print(f"  {number}. {describe(cure)}", markup=False)


def _table(held: dict[str, int] | None, planned: dict[str, int] | None) -> Table:
    columns = {"held": held, "planned": planned}
    given = {name: sizes for name, sizes in columns.items() if sizes}
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in given:
        table.add_column(name, justify="right")
    for category in next(reversed(given.values())):
        sizes = [column.get(category, 0) for column in given.values()]
        if any(sizes):
            table.add_row(category.replace("_", " "), *(show_bytes(size) for size in sizes))
    return table


def describe(cure: Proposal) -> str:
    """What to do, what it saves and what it costs, on one line."""
    parts = [
        f"without {key}" if value is None else f"--set {_pasted(key, value)}"
        for key, value in cure.changes.items()
    ]
    parts += [f"on {cure.gpus} GPUs"] if cure.gpus else []
    parts += [cure.advice] if cure.advice else []
    line = " ".join(parts)
    if cure.saving is not None:
        line += f": {show_bytes(cure.saving)} less"
    if cure.slowdown is not None:
        line += f", {cure.slowdown:.2f} x the step time"
    return line if cure.fits is not False else f"{line}; not enough by itself"


def _pasted(key: str, value: object) -> str:
    """An argument for a shell: a name stands for itself, other JSON has quotes and braces."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{key}={text}" if text.replace(".", "").isalnum() else f"'{key}={text}'"


if __name__ == "__main__":
    raise SystemExit(main())
