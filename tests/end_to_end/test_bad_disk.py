"""Trouble with files that one of two ranks meets: both end, and what was saved stays whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RunConfig
from tests.end_to_end.test_stopping import ENDLESS, Running
from training import store
from training.checkpoint import Search, verify_alone
from training.stop import ONE_REQUEST

SCRIPT = str(Path(__file__).with_name("bad_disk_train.py"))
SOON = 15.0
"""Seconds: the ranks end within three or four, torchrun looks now and then."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB: room for one checkpoint and the next one's beginning."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    tried = subprocess.run(mount, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no file system may be mounted: {tried.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def end_soon(run: Running) -> str:
    """What the run has printed; it ends with 1 on both ranks, in one line."""
    began = time.monotonic()
    told = run.end()
    assert time.monotonic() - began < SOON
    assert told.count("exitcode  : 1 ") == 2, told
    assert len(re.findall("^error: ", told, re.MULTILINE)) == 1, told
    assert told.count("Traceback") == 1, "torchrun has one of its own"
    return told


def newest(run: Running, config: dict[str, Any]) -> tuple[str, dict[Path, str]]:
    """The checkpoint that the run would continue from, and what is wrong with newer ones."""
    search = Search(run.run_folder)
    search.run(RunConfig.model_validate(config), verify_alone)
    assert search.found
    return search.found.name, search.refused


@pytest.mark.slow
def test_a_full_disk_ends_all_ranks_and_the_run_continues_when_there_is_room(
    altered: Callable[..., Any],
    command: Any,
    losses: Callable[[str], dict[int, float]],
    small_disk: Path,
    tmp_path: Path,
) -> None:
    folder = small_disk / "run"
    config = altered({**ENDLESS, "training.run_folder": str(folder), "training.save_interval": 20})
    run = Running(config, tmp_path)
    run.wait(lambda: (folder / "checkpoints" / "latest").exists())
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1000)):
                pass
        except OSError:
            pass
    told = end_soon(run)
    assert re.search(
        rf"error: rank 0: \[Errno 28\] No space left on device: '{folder}/.*'; free space", told
    )
    saved, refused = newest(run, config)
    assert not refused
    ballast.unlink()
    end = store.step_of(folder / "checkpoints" / saved) + 5
    resumed = command.train(config, "--set", f"training.max_steps={end}", ranks=2)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert f"checkpoints/{saved} at step {end - 5}" in resumed.stdout
    assert list(losses(str(folder))) == list(range(1, end + 1))


@pytest.mark.slow
def test_a_disk_that_one_rank_cannot_read_ends_all(
    altered: Callable[..., Any], tmp_path: Path
) -> None:
    run = Running(altered(ENDLESS), tmp_path, SCRIPT, "1", "unreadable")
    run.wait(lambda: "error: " in run.log.read_text())
    told = end_soon(run)
    assert "error: rank 1: [Errno 5] Input/output error: 'train.bin'; free space or mend" in told


@pytest.mark.slow
def test_a_disk_that_one_rank_cannot_fill_ends_a_run_that_asks_for_it(
    altered: Callable[..., Any], tmp_path: Path
) -> None:
    config = altered({**ENDLESS, "training.save_interval": 4, "training.on_failed_save": "stop"})
    run = Running(config, tmp_path, SCRIPT, "1", "full")
    run.wait(lambda: "error: " in run.log.read_text())
    told = end_soon(run)
    shard = "unfinished-step-00000004/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    assert re.search(rf"failed: rank 1: \[Errno 27\] File too large: '.*{shard}'; newest", told)
    assert os.listdir(run.run_folder / "checkpoints") == []


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [True, False])
def test_another_signal_ends_a_save_at_once(
    altered: Callable[..., Any], tmp_path: Path, in_background: bool
) -> None:
    changes = {"training.save_interval": 4, "training.save_in_background": in_background}
    config = altered({**ENDLESS, **changes})
    run = Running(config, tmp_path, SCRIPT, "0", "slow")
    ranks = run.reach(4)
    unfinished = run.run_folder / "checkpoints" / "unfinished-step-00000008"
    run.wait(unfinished.exists)
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)
    run.wait(lambda: run.log.read_text().count("another signal exits at once") == 2)
    time.sleep(ONE_REQUEST + 0.5)
    assert run.process.poll() is None, "it saves"
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)
    began = time.monotonic()
    told = run.end()
    assert time.monotonic() - began < SOON
    assert told.count("exit, without a save") == 2
    assert told.count(f"exitcode  : {128 + signal.SIGTERM} ") == 2, told
    assert unfinished.exists()
    assert newest(run, config) == ("step-00000004", {})
