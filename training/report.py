"""Runs side by side on one page: plots, results, and what their configs differ in.

    python -m training.report runs/quickstart runs/other --output report/report.html

The page holds its plots and opens anywhere; they also lie beside it as PNG files.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from memory.machine import show_bytes
from training.report_plots import Across, Panel, colour_of, plots
from training.run_log import RunLog, read_runs

Row = tuple[str, Sequence[str]]
"""What it is, and that of each run."""
LAST = 10
"""Logged losses that a final loss is the mean of: one batch says little."""
NONE = "-"

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto;
  max-width: 1100px; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 1.2rem 0.3rem 0; }
tr { border-bottom: 1px solid #ddd; }
tbody th { font-weight: 500; color: #555; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.run::before { content: ""; display: inline-block; width: 0.8em; height: 0.8em;
  margin-right: 0.4em; background: var(--colour); }
figure { margin: 1.8rem 0; } img { width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: 0.9rem; }
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if options.output.suffix != ".html":
            raise ValueError(f"--output {options.output}: expected a file that ends in .html")
        runs = read_runs(options.runs)
        drawn = plots(runs, options.x)
        write(options.output, page(runs, drawn), drawn)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {len(runs)} run{'s' * (len(runs) > 1)}, {len(drawn)} plots")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.report",
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m training.report runs/quickstart --output report/report.html",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE",
        help="the page to write, an .html file; the plots go beside it",
    )  # fmt: skip
    across: list[Across] = ["step", "tokens"]
    parser.add_argument(
        "--x", choices=across, default="step",
        help="what the plots count: tokens compare runs of different batch sizes (default: step)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def write(output: Path, html: str, drawn: Mapping[Panel, bytes]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    for panel, png in drawn.items():
        (output.parent / f"{panel.name}.png").write_bytes(png)
    output.write_text(html, encoding="utf-8")


def page(runs: Sequence[RunLog], drawn: Mapping[Panel, bytes]) -> str:
    title = " and ".join(run.name for run in runs)
    heading, rows = ("Config", config_rows(runs))
    if len(runs) > 1:
        heading, rows = "Where the configs differ", different(rows)
    body = [
        f"<h1>{escape(title)}</h1>",
        table(runs, results(runs)),
        *(figure(panel, png) for panel, png in drawn.items()),
        f"<h2>{heading}</h2>",
        table(runs, rows) if rows else '<p class="note">Nowhere but in their folders.</p>',
        events(runs),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        + "\n".join(body)
        + "\n</html>\n"
    )


def table(runs: Sequence[RunLog], rows: Iterable[Row]) -> str:
    """A column a run."""
    head = "".join(
        f'<th class="run" style="--colour: {colour_of(number)}">{escape(run.name)}</th>'
        for number, run in enumerate(runs)
    )
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
        for name, cells in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(panel: Panel, png: bytes) -> str:
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    caption = f"<figcaption>{escape(panel.caption)}</figcaption>" if panel.caption else ""
    return f'<figure><img alt="{escape(panel.title)}" src="{source}">{caption}</figure>'


def events(runs: Sequence[RunLog]) -> str:
    """What happened, in a table of three columns."""
    rows = "".join(
        f"<tr><td>{escape(run.name)}</td><td>{event['step']:,}</td>"
        f"<td>{escape(event['event'])}</td></tr>\n"
        for run in runs
        for event in run.events
    )
    head = "<thead><tr><th>run</th><th>step</th><th>what happened</th></tr></thead>"
    return (
        f'<h2>Events</h2>\n<div class="scroll"><table>{head}\n<tbody>{rows}</tbody></table></div>'
        if rows
        else ""
    )


def results(runs: Sequence[RunLog]) -> list[Row]:
    """How far each run came, how well, how fast and in how much memory."""
    rows: list[tuple[str, Callable[[RunLog], str]]] = [
        ("steps", steps),
        ("tokens", lambda run: f"{run.training[-1]['tokens']:,}"),
        (f"training loss, mean of the last {LAST} logged", final_loss),
    ]
    for key in sorted({key for run in runs for key in run.sets}):
        rows.append((key.replace("_", " ") + ", last", last_of(key)))
    rows += [
        ("lowest validation loss", lowest),
        ("tokens a second, median", lambda run: median(run, "tokens_per_second", ",.0f")),
        ("MFU, median", lambda run: median(run, "mfu", ".1%")),
        ("time in steps", lambda run: duration(step_seconds(run))),
        ("peak memory of rank 0", lambda run: show_bytes(peak(run))),
        ("planned", lambda run: show_bytes(run.planned_bytes) if run.plan else NONE),
        ("events", counted_events),
        ("versions", lambda run: ", ".join(map(" ".join, run.versions.items())) or NONE),
    ]
    return [(name, [cell(run) for run in runs]) for name, cell in rows]


def steps(run: RunLog) -> str:
    return f"{run.training[-1]['step']:,} of {run.config['training.max_steps']:,}"


def last_of(key: str) -> Callable[[RunLog], str]:
    def last(run: RunLog) -> str:
        _, losses = run.values(key) if key in run.sets else ([], [])
        return f"{losses[-1]:.4f}" if losses else NONE

    return last


def final_loss(run: RunLog) -> str:
    _, losses = run.values("loss")
    return f"{statistics.fmean(losses[-LAST:]):.4f}"


def lowest(run: RunLog) -> str:
    found = [
        (line["validation_loss"], line["step"])
        for line in run.evaluations
        if line["validation_loss"] is not None
    ]
    return "{:.4f} at step {:,}".format(*min(found)) if found else NONE


def median(run: RunLog, key: str, form: str) -> str:
    numbers = [line[key] for line in run.training if line.get(key) is not None]
    return format(statistics.median(numbers), form) if numbers else NONE


def step_seconds(run: RunLog) -> float:
    """Of all steps up to the last one logged: each line holds the mean since the one before."""
    total, before = 0.0, 0
    for line in run.training:
        total += line["step_seconds"] * (line["step"] - before)
        before = line["step"]
    return total


def duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def peak(run: RunLog) -> int:
    return max(line["memory_peak_bytes"] for line in run.training)


def counted_events(run: RunLog) -> str:
    counts = Counter(event.get("kind", "other") for event in run.events)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items()) or NONE


def config_rows(runs: Sequence[RunLog]) -> list[Row]:
    """Every key but that of the run folder."""
    keys = {key: None for run in runs for key in run.config}
    keys.pop("training.run_folder", None)
    return [
        (key, [json.dumps(run.config[key]) if key in run.config else NONE for run in runs])
        for key in keys
    ]


def different(rows: Iterable[Row]) -> list[Row]:
    return [(name, cells) for name, cells in rows if len(set(cells)) > 1]


if __name__ == "__main__":
    sys.exit(main())
