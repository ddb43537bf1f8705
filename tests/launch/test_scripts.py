"""The scripts in launch/: what they start, what the console ends with, signals."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.run import split
from tests.conftest import ROOT, find_tool
from tests.launch.conftest import ENDLESS

SCRIPTS = ["single_node", "torchrun"]
RAISE = """
import os, signal
def fail(number, frame):
    raise ZeroDivisionError("made by a test")
if os.environ.get("RANK") == "1":
    signal.signal(signal.SIGUSR2, fail)
"""


def test_the_scripts_are_clean() -> None:
    shellcheck = find_tool("shellcheck")
    scripts = sorted(map(str, (ROOT / "launch").glob("*.sh")))
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_only_the_first_separator_splits() -> None:
    assert split(["a", "--", "b", "--", "c"]) == (["a"], ["b", "--", "c"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_print_shows_the_command_and_starts_nothing(
    name: str, run_config: dict[str, Any], shell: Callable[..., Any], tmp_path: Path
) -> None:
    config = tmp_path / "a config.json"
    config.write_text(json.dumps(run_config))
    options = {"single_node": "--include=localhost:0", "torchrun": "--nnodes=2"}[name]
    given = ["--print", options, "--", "--config", str(config), "--set", "training.seed=2"]
    done = shell(name, *given, env={"NCCL_SOCKET_IFNAME": "eth1 eth2"})
    assert done.returncode == 0, done.stderr
    place, *environment, command = done.stdout.splitlines()
    assert place == f"cd {ROOT}"
    assert "export NCCL_SOCKET_IFNAME='eth1 eth2'" in environment
    assert options in command
    assert command.endswith(f" --config '{config}' --set training.seed=2")
    assert not Path(run_config["training"]["run_folder"]).exists()


@pytest.mark.slow
def test_a_mistake_in_the_config_is_told_before_anything_starts(
    altered: Callable[..., Any], shell: Callable[..., Any], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(altered({"training.max_step": 3})))
    done = shell("single_node", "--config", str(config))
    assert done.returncode == 2
    assert "max_step" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_console_ends_with_the_error_of_the_rank_that_failed(
    name: str, altered: Callable[..., Any], launch: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RAISE)
    run = launch(name, altered(ENDLESS), PYTHONPATH=str(tmp_path))
    run.reach(3)
    run.ranks()[1].send_signal(signal.SIGUSR2)
    console = run.end()
    assert run.code == 1
    assert console.endswith("ZeroDivisionError: made by a test\n")
    assert "\nrank 1 failed first (" in console
    assert "ranks      2 on cpu" in console, "rank 0 writes to the console"
    logs = sorted(run.run_folder.glob("logs/*/rank*.log"))
    assert [log.name for log in logs] == ["rank0.log", "rank1.log"]
    assert "ranks      2 on cpu" in logs[0].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_rank_is_named(
    name: str, altered: Callable[..., Any], launch: Callable[..., Any]
) -> None:
    run = launch(name, altered(ENDLESS))
    run.reach(3)
    run.ranks()[1].kill()
    last = run.end().splitlines()[-1]
    assert run.code != 0
    assert last == "rank 1 ended without an error of its own: killed, or out of memory?"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_signal_to_the_script_saves(
    name: str, altered: Callable[..., Any], launch: Callable[..., Any]
) -> None:
    run = launch(name, altered(ENDLESS))
    run.reach(3)
    run.process.send_signal(signal.SIGTERM)
    console = run.end()
    assert run.code == 75, console[-3000:]
    assert "stopped by signal; a checkpoint is saved" in console
    latest = (run.run_folder / "checkpoints" / "latest").read_text()
    assert int(latest.removeprefix("step-")) >= 3
