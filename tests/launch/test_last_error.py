"""Which rank's error a failed run ends with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.last_error import LINES, last_error

TRACEBACK = "Traceback (most recent call last):\n  File x\n"
RESET = f"{TRACEBACK}RuntimeError: [gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:4711\n"


def write(folder: Path, *texts: str) -> None:
    """Logs of ranks 0, 1, ..., each written a second after the one before."""
    for rank, text in enumerate(texts):
        path = folder / f"rank{rank}.log"
        path.write_text(text)
        os.utime(path, (1000 + rank, 1000 + rank))


def test_an_error_of_its_own_comes_before_a_lost_connection_that_is_older(tmp_path: Path) -> None:
    write(tmp_path, f"step 1\n{RESET}", f"{TRACEBACK}ZeroDivisionError: x\n", RESET)
    told = last_error(tmp_path)
    assert told.startswith(f"rank 1 failed first ({tmp_path}/rank1.log):")
    assert told.endswith("ZeroDivisionError: x")
    assert "step 1" not in told


def test_of_two_errors_the_older_one_is_told(tmp_path: Path) -> None:
    write(tmp_path, f"{TRACEBACK}KeyError: 'a'\n", f"{TRACEBACK}KeyError: 'b'\n")
    os.utime(tmp_path / "rank0.log", (5000, 5000))
    assert last_error(tmp_path).endswith("KeyError: 'b'")


def test_a_rank_that_says_nothing_is_named(tmp_path: Path) -> None:
    write(tmp_path, RESET, "a warning\n")
    told = last_error(tmp_path)
    assert "rank 1 ended without an error of its own" in told.splitlines()[-1]


def test_lost_connections_on_all_ranks_lead_to_another_host(tmp_path: Path) -> None:
    write(tmp_path, RESET, RESET)
    assert "on another host" in last_error(tmp_path).splitlines()[-1]


def test_a_long_traceback_keeps_its_first_line_and_its_end(tmp_path: Path) -> None:
    write(tmp_path, TRACEBACK + "  File y\n" * 200 + "MemoryError: z\n")
    lines = last_error(tmp_path).splitlines()
    assert len(lines) == 2 + LINES
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "MemoryError: z"


def test_ranks_without_errors_are_said_to_have_none(tmp_path: Path) -> None:
    write(tmp_path, "step 1\n", "")
    assert last_error(tmp_path) == f"no rank reports an error; logs in {tmp_path}"


@pytest.mark.slow
def test_a_folder_without_logs_is_a_mistake(command: object, tmp_path: Path) -> None:
    done = command.python("-m", "launch.last_error", str(tmp_path))  # type: ignore[attr-defined]
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
