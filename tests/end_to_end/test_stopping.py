"""Runs that are stopped, hang or spike, through the real command on two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.dataset import Corpus
from data.token_file import TokenFileWriter
from tests.conftest import ROOT, write_manifest
from training import store

TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
    "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
]  # fmt: skip
ENDLESS = {
    "training.max_steps": 1_000_000,
    "training.save_interval": 1_000_000,
    "training.evaluation_interval": 1_000_000,
    "deepspeed.scheduler": ...,
    "deepspeed.zero_optimization.stage": 2,
}


class Running:
    """A run under torchrun, in the background. `script` may be one around train.py."""

    def __init__(self, config: dict[str, Any], folder: Path, *script: str) -> None:
        self.config = folder / "config.json"
        self.config.write_text(json.dumps(config))
        self.run_folder = Path(config["training"]["run_folder"])
        self.log = folder / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*TORCHRUN, *(script or ["train.py"]), "--config", str(self.config)],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )

    def reach(self, step: int) -> list[int]:
        """Wait for a step; returns the ranks' process ids."""
        metrics = self.run_folder / "metrics.jsonl"
        self.wait(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text())
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(self.config).encode() in arguments and b"torch.distributed.run" not in arguments:
                rank = next((v for v in variables if v.startswith(b"RANK=")), None)
                if rank:
                    found[int(rank[5:])] = int(folder.name)
        return [found[0], found[1]]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def end(self) -> str:
        """What it has printed, when it is over."""
        self.code = self.process.wait(timeout=180)
        return self.log.read_text()


@pytest.mark.slow
def test_a_signal_to_one_rank_and_a_time_limit_end_all_with_a_checkpoint(
    altered: Callable[..., Any],
    command: Any,
    losses: Callable[[str], dict[int, float]],
    tmp_path: Path,
) -> None:
    stopped = altered(ENDLESS)
    run = Running(stopped, tmp_path)
    os.kill(run.reach(3)[1], signal.SIGTERM)
    told = run.end()
    assert run.code != 0
    assert told.count("exitcode  : 75") == 2, told
    assert "stopped by signal" in told
    first = newest(run.run_folder)
    assert first == max(losses(str(run.run_folder))) >= 3

    limited = altered({**ENDLESS, "training.time_limit": "0:00:20"})
    run = Running(limited, tmp_path)
    told = run.end()
    assert told.count("exitcode  : 75") == 2, told
    assert "stopped by time limit" in told
    second = newest(run.run_folder)
    assert second > first

    whole = altered({**ENDLESS, "training.run_folder": str(tmp_path / "whole")})
    done = command.train(whole, "--set", f"training.max_steps={second}", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = losses(str(tmp_path / "whole"))
    assert losses(str(run.run_folder)) == expected
    assert list(expected) == list(range(1, second + 1))


def newest(run_folder: Path) -> int:
    return int((run_folder / "checkpoints" / "latest").read_text().removeprefix("step-"))


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_the_run(altered: Callable[..., Any], tmp_path: Path) -> None:
    run = Running(altered({**ENDLESS, "training.hang_seconds": 6.0}), tmp_path)
    ranks = run.reach(5)
    os.kill(ranks[1], signal.SIGSTOP)
    run.wait(lambda: "no report from rank 1: stopped, or gone" in run.log.read_text())
    # torchrun would wait for half a minute before it kills a rank that does not end.
    os.kill(ranks[1], signal.SIGKILL)
    told = run.end()
    assert run.code != 0
    assert "rank 0 hangs: " in told
    report = (run.run_folder / "hang_rank0.txt").read_text()
    assert "in this step" in report
    assert "in train_step" in report, "the stack of the main thread"
    assert not (run.run_folder / "hang_rank1.txt").exists()


SAMPLES = 900


@pytest.fixture
def spoilt(tmp_path: Path) -> tuple[str, int]:
    """A corpus that is learnt soon but for one sample, and a seed that has it in step 85 to 95."""
    random = np.random.default_rng(0)
    prefix = tmp_path / "prepared" / "spoilt"
    prefix.parent.mkdir()
    tokens = np.arange(SAMPLES * 16 + 1) % 67
    tokens[200 * 16 : 201 * 16] = random.integers(67, size=16)
    with TokenFileWriter(prefix, 67) as writer:
        writer.append(tokens, np.array([len(tokens)], np.int32))
    write_manifest(prefix.parent, {"spoilt": writer.record})
    for seed in range(1000):
        order = Corpus(prefix, 16, seed, vocabulary_size=67)
        if 200 in order.positions(np.arange(84 * 8, 95 * 8)):
            return str(prefix), seed
    raise AssertionError("no such seed")


@pytest.mark.slow
def test_after_a_rollback_the_run_is_one_that_never_saw_the_samples(
    altered: Callable[..., Any],
    command: Any,
    losses: Callable[[str], dict[int, float]],
    spoilt: tuple[str, int],
    tmp_path: Path,
) -> None:
    changes = {
        **ENDLESS,
        "training.max_steps": 110,
        "training.save_interval": 20,
        "training.seed": spoilt[1],
        "data.train": [{"path": spoilt[0]}],
    }
    spiking = altered(
        {**changes, "training.spike_deviations": 6.0, "training.on_spike": "rollback"}
    )
    done = command.train(spiking, "--set", "training.max_steps=100", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    run_folder = Path(spiking["training"]["run_folder"])
    events = [json.loads(t) for t in (run_folder / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in events if line.get("kind") == "rollback"]
    resumed = command.train(spiking, ranks=2)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    latest = (run_folder / "checkpoints" / "latest").read_text()
    manifest = store.read_manifest(run_folder / "checkpoints" / latest)
    ((first, last),) = manifest.progress["skipped_samples"]
    assert first == event["step"] * 8
    assert f"samples {first} to {last} are stepped over" in event["event"]

    spared = altered(
        {
            **changes,
            "training.run_folder": str(tmp_path / "spared"),
            "training.skip_samples": [[first, last]],
        }
    )
    done = command.train(spared, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(str(run_folder)) == losses(str(tmp_path / "spared"))
