"""Runs in the background, started by the scripts in launch/ as a user would."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import CLEAN, ROOT, Command, free_port

ENDLESS = {
    "training.max_steps": 1_000_000,
    "training.save_interval": 1_000_000,
    "training.evaluation_interval": 1_000_000,
    "deepspeed.scheduler": ...,
}
TWO_RANKS = {
    "single_node": ["--num_accelerators", "2"],
    "torchrun": ["--nproc-per-node", "2"],
}


class Launched:
    """A run of launch/NAME.sh, its output in a file."""

    def __init__(
        self, command: list[str], config: dict[str, Any], folder: Path, env: dict[str, str]
    ) -> None:
        path = folder / "launched.json"
        path.write_text(json.dumps(config))
        self.run_folder = Path(config["training"]["run_folder"])
        self.console = folder / "console.txt"
        with self.console.open("w") as console:
            self.process = subprocess.Popen(
                [*command, "--", "--config", str(path)],
                cwd=ROOT,
                env={**CLEAN, "OMP_NUM_THREADS": "1", **env},
                stdout=console,
                stderr=console,
            )

    def reach(self, step: int) -> None:
        metrics = self.run_folder / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
            assert time.monotonic() < deadline, self.console.read_text()[-3000:]
            assert self.process.poll() is None, self.console.read_text()[-3000:]
            time.sleep(0.1)

    def ranks(self) -> dict[int, psutil.Process]:
        """The running ranks of this host, by rank."""
        return {
            int(process.environ()["RANK"]): process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if str(ROOT / "train.py") in process.cmdline()[:3]
        }

    def end(self, timeout: float = 60) -> str:
        """What the console shows, when it is over."""
        self.code = self.process.wait(timeout=timeout)
        return self.console.read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Any:
    """launch(NAME, config) starts two ranks of it under launch/NAME.sh."""
    started: list[Launched] = []

    def start(name: str, config: dict[str, Any], **env: str) -> Launched:
        command = [str(ROOT / f"launch/{name}.sh"), *TWO_RANKS[name]]
        if name == "single_node":
            command += ["--master_port", str(free_port())]
        started.append(Launched(command, config, tmp_path, env))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            for process in psutil.Process(run.process.pid).children(recursive=True):
                process.kill()
            run.process.kill()
            run.process.wait()


@pytest.fixture
def shell(command: Command) -> Callable[..., Any]:
    """shell(NAME, ARGUMENTS...) runs launch/NAME.sh to its end."""
    return lambda name, *arguments, **options: command.run(
        str(ROOT / f"launch/{name}.sh"), *arguments, **options
    )
