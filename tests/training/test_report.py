"""The report: what it reads, what it computes, and that a browser shows it."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from tests.conftest import find_tool
from training.report import duration, final_loss, lowest, main, step_seconds
from training.report_plots import PANELS, smoothed
from training.run_log import read_run, read_runs


def training_line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "samples": 8 * step, "tokens": 128 * step, "loss": 5.0 - 0.01 * step,
        "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 1280.0, "mfu": None,
        "step_seconds": 0.1, "data_wait_seconds": 0.02, "memory_peak_bytes": 2**30 + step,
        "memory_alive_bytes": 2**29,
    } | more  # fmt: skip


@pytest.fixture
def write_run(tmp_path: Path, run_config: dict[str, Any]) -> Callable[..., Path]:
    """Writes a run folder of a name, with these lines of metrics."""

    def write(name: str, lines: list[dict[str, Any]], **training: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = {**run_config, "training": {**run_config["training"], **training}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        plan = {"gpu": {"peak_bytes": 2**29, "limit_bytes": None}}
        (folder / "memory_plan.json").write_text(json.dumps(plan))
        return folder

    return write


def long_run(seed: int) -> list[dict[str, Any]]:
    losses = 5 * np.random.default_rng(seed).uniform(0.9, 1.0, 100)
    return [
        {"step": 0, "kind": "start", "event": "started"},
        *(training_line(step, loss=loss) for step, loss in enumerate(losses.tolist(), 1)),
        {"step": 50, "validation_loss": 4.0, "validation_loss/<web>": 4.5,
         "validation_loss/code": 3.5},
        {"step": 60, "kind": "skipped", "event": "update skipped, <loss> & more"},
        {"step": 100, "validation_loss": 4.25, "validation_loss/<web>": 5.0,
         "validation_loss/code": 3.5},
    ]  # fmt: skip


def test_a_page_holds_all_of_two_runs(write_run: Callable[..., Path], tmp_path: Path) -> None:
    first = write_run("first", long_run(1))
    second = write_run("second", [training_line(1)], seed=7)
    output = tmp_path / "new" / "report.html"
    assert main([str(first), str(second), "--output", str(output), "--x", "tokens"]) == 0
    html = output.read_text()
    assert not re.search(r'(src|href)="(?!data:)', html), "nothing is fetched"
    # MFU is None throughout: it has no plot.
    drawn = {panel.name for panel in PANELS} - {"mfu"}
    assert {path.stem for path in output.parent.glob("*.png")} == drawn
    assert html.count("data:image/png;base64,") == len(drawn)
    assert all(imread(path).shape[1] > 1000 for path in output.parent.glob("*.png"))
    assert "update skipped, &lt;loss&gt; &amp; more" in html
    assert "<web>" not in html
    _, _, differences = html.partition("Where the configs differ")
    keys = re.findall(r"<tr><th>([^<]*)</th><td>", differences)
    assert keys == ["training.seed"], "the only difference"
    assert "<td>7</td>" in differences


def test_results_by_hand(write_run: Callable[..., Path]) -> None:
    lines = [
        training_line(10, loss=None, step_seconds=1.0),
        *(training_line(10 + n, loss=float(n), step_seconds=2.0) for n in range(1, 13)),
        {"step": 5, "validation_loss": None},
        {"step": 15, "validation_loss": 2.5},
        {"step": 20, "validation_loss": 3.5},
    ]
    run = read_run(write_run("run", lines), "run")
    assert final_loss(run) == "7.5000", "the mean of 3 to 12"
    assert lowest(run) == "2.5000 at step 15"
    assert step_seconds(run) == 10 * 1.0 + 12 * 2.0
    assert duration(3600 + 2 * 60 + 3.4) == "1:02:03"
    assert [run.tokens_at(step) for step in (0, 5, 10, 22)] == [0, 640, 1280, 2816]
    steps, losses = run.values("loss")
    assert steps[:2] == [10, 11]
    assert math.isnan(losses[0])


def test_smoothing_leaves_gaps_out() -> None:
    values = [1.0] * 30 + [math.nan, 3.0] + [5.0] * 28
    assert smoothed(values)[29:33] == [1.0, 1.0, 3.0, 4.0]


def test_a_line_cut_off_is_left_out_and_a_foreign_one_named(
    write_run: Callable[..., Path],
) -> None:
    folder = write_run("run", [training_line(1)])
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "lo')
    assert [line["step"] for line in read_run(folder, "run").training] == [1]
    path.write_text('{"step": 1, "loss": 1}\n[]\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: expected a JSON object"):
        read_run(folder, "run")


def test_runs_of_one_name_are_told_apart(write_run: Callable[..., Path]) -> None:
    folders = [write_run(name, [training_line(1)]) for name in ("a/run", "b/run", "c")]
    assert [run.name for run in read_runs(folders)] == [str(folders[0]), str(folders[1]), "c"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["absent", "--output", "out/r.html"], "absent: no run folder (it has no config.json)"),
        (["empty", "--output", "out/r.html"], "holds no training step yet"),
        (["good", "good", "--output", "out/r.html"], "given twice"),
        (["good", "--output", "out"], "--output out: expected a file that ends in .html"),
        (["good", "--output", "good/config.json/r.html"], "config.json"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str],
    expected: str,
    write_run: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run("good", [training_line(1)])
    write_run("empty", [{"step": 0, "kind": "start", "event": "started"}])
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert expected in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_browser_shows_the_page(write_run: Callable[..., Path], tmp_path: Path) -> None:
    browser = find_tool("chromium", "google-chrome")
    output, shot = tmp_path / "report.html", tmp_path / "page.png"
    runs = [str(write_run(name, long_run(seed))) for seed, name in enumerate(("one", "two"))]
    assert main([*runs, "--output", str(output)]) == 0
    # A page without its plots, to compare with.
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"<img[^>]*>", "", output.read_text()))
    inked = {}
    for page in (output, bare):
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--screenshot={shot}", "--window-size=1200,4000", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        pixels = imread(shot)[..., :3]
        inked[page] = float((pixels < 0.9).any(axis=-1).mean())
    assert inked[bare] > 0.002, "the text"
    assert inked[output] > 2 * inked[bare], "the plots"
