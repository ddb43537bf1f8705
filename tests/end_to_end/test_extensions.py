"""DeepSpeed's CPU Adam is compiled once a host before training, or one line says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OFFLOAD = {
    "training.max_steps": 1,
    "deepspeed.scheduler.params.warmup_num_steps": 1,
    "deepspeed.zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
COMPILER = """#!/bin/sh
case "$1" in
  -dump*) echo 13.2.0 ;;
  *) echo COLLECT_GCC=g++; echo gcc version 13.2.0 ;;
esac
"""
NINJA = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo started >> "${0%/*}/builds"
echo "[1/3] g++ -c cpu_adam.cpp"
echo "cpu_adam.cpp:1:10: fatal error: Python.h: No such file or directory"
exit 1
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with a compiler and a ninja that fails; as PATH it holds nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("c++", COMPILER), ("ninja", NINJA)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


def reason(done: Any) -> str:
    """The one line of a run that could not start."""
    assert done.returncode == 1, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.endswith("or set deepspeed.optimizer.params.torch_adam to true")
    assert "ds_opt_adam" not in done.stderr, "a destructor"
    return str(line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        ("ninja", "ninja is not on the PATH: activate the environment, or pip install ninja"),
        ("c++", "there is no C++ compiler 'c++' on the PATH: install g++"),
        ("", "(cpu_adam.cpp:1:10: fatal error: Python.h: No such file or directory)"),
    ],
)
def test_what_is_missing_is_named(
    absent: str,
    expected: str,
    altered: Callable[..., Any],
    command: Any,
    tools: Path,
    tmp_path: Path,
) -> None:
    if absent:
        (tools / absent).unlink()
    env = {"PATH": str(tools), "CXX": "c++", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = command.train(altered(OFFLOAD), env=env)
    assert expected in reason(done)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_named(
    altered: Callable[..., Any], command: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "file" / "extensions")}
    done = command.train(altered(OFFLOAD), env=env)
    assert f"{tmp_path}/file/extensions cannot be written" in reason(done)
    assert "set TORCH_EXTENSIONS_DIR" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_one_rank_of_a_host_compiles_and_all_learn_of_its_failure(
    altered: Callable[..., Any], command: Any, tools: Path, tmp_path: Path
) -> None:
    env = {"PATH": str(tools), "CXX": "c++", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = command.train(altered(OFFLOAD), ranks=2, env=env)
    assert "Python.h" in reason(done)
    assert done.stdout.count("compiling cpu_adam in ") == 1
    assert (tools / "builds").read_text() == "started\n"


@pytest.mark.slow
def test_all_ranks_load_what_one_has_compiled(altered: Callable[..., Any], command: Any) -> None:
    done = command.train(altered(OFFLOAD), ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DeepSpeedCPUAdam" in done.stdout
