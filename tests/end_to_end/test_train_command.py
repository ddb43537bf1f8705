"""train.py as users start it: launchers, mistakes, what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port

DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))


def short(config: dict[str, Any], steps: int = 2) -> list[str]:
    return ["--set", f"training.max_steps={steps}", "--set", "training.save_interval=100"]


@pytest.mark.slow
def test_one_process_leaves_a_complete_run_folder(
    run_config: dict[str, Any], command: Any, losses: Callable[..., Any]
) -> None:
    done = command.train(run_config, *short(run_config, 4), "--local-rank=0")
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(run_config["training"]["run_folder"])
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4]
    assert set(training[0]) == {
        "step", "samples", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "mfu",
        "step_seconds", "data_wait_seconds", "memory_peak_bytes", "memory_alive_bytes",
        "skipped_steps",
    }  # fmt: skip
    (event,) = [line for line in lines if "event" in line]
    assert (event["step"], event["kind"]) == (0, "start")
    assert event["event"] == "started: 1 rank, ZeRO 0; blocks none: 0-1"
    assert [line["samples"] for line in training] == [8, 16, 24, 32]
    assert training[0]["tokens"] == 8 * 16
    for line in training:
        assert line["tokens_per_second"] == pytest.approx(8 * 16 / line["step_seconds"])
        assert 0 < line["mfu"] < 1
    evaluations = {
        line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line
    }
    assert list(evaluations) == [0, 4]
    assert evaluations[0] == pytest.approx(math.log(67), abs=0.05), "untrained, it guesses"
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000004"
    assert json.loads((folder / "config.json").read_text())["training"]["seed"] == 1234
    assert "torch.optim.adamw.AdamW" in done.stdout
    assert "tensorboard --logdir" in done.stdout


@pytest.mark.slow
def test_launchers_agree(
    altered: Callable[..., Any], command: Any, losses: Callable[..., Any], tmp_path: Path
) -> None:
    """`deepspeed` and `torchrun` on two ranks give the losses of each other; only rank 0 writes."""
    found = {}
    for launcher in ("deepspeed", "torchrun"):
        folder = tmp_path / launcher
        config = altered({"training.run_folder": str(folder)})
        path = tmp_path / f"{launcher}.json"
        path.write_text(json.dumps(config))
        arguments = ["train.py", "--config", str(path), *short(config)]
        if launcher == "deepspeed":
            port = ["--master_port", str(free_port())]
            done = command.run(DEEPSPEED, "--num_accelerators", "2", *port, *arguments)
        else:
            done = command.python(*arguments, ranks=2)
        assert done.returncode == 0, done.stderr[-3000:]
        assert (
            f"ranks      2 on cpu, each with {max(1, os.cpu_count() // 2)} threads" in done.stdout
        )
        assert done.stdout.count("ranks      2") == 1
        assert len(list((folder / "tensorboard").iterdir())) == 1
        found[launcher] = losses(str(folder))
    assert found["deepspeed"] == found["torchrun"]
    assert list(found["deepspeed"]) == [1, 2]


@pytest.mark.slow
def test_a_run_folder_of_another_config_is_refused_and_kept(
    altered: Callable[..., Any], command: Any
) -> None:
    config = altered({})
    assert command.train(config, *short(config)).returncode == 0
    metrics = Path(config["training"]["run_folder"]) / "metrics.jsonl"
    before = metrics.read_text()
    done = command.train(altered({"model.layers": 3, "training.seed": 5}), *short(config))
    assert done.returncode == 2
    assert "model.layers: the run has 2, the config 3" in done.stderr
    assert "training.seed: the run has 1234, the config 5" in done.stderr
    two = command.train(config, "--set", "training.max_steps=3", ranks=2)
    assert "written by 1 rank, ZeRO 0, and this run has 2 ranks, ZeRO 0" in two.stderr
    assert metrics.read_text() == before


def mistakes() -> list[Any]:
    """(name, changes to the config, arguments, what the message must hold)"""
    return [
        ("no such config", None, ["--config", "absent.json"], ["absent.json", "No such file"]),
        (
            "several at once",
            {
                "deepspeed.train_batch_size": 16,
                "deepspeed.train_micro_batch_size_per_gpu": 4,
                "data.validation": "nowhere/validation",
                "deepspeed.fp16": {"enabled": True},
            },
            [],
            ["train_batch_size=16", "nowhere/validation", "no float16 on a CPU"],
        ),
        (
            "sequence longer than the corpus",
            {"training.sequence_length": 9000, "model.max_sequence_length": 9000},
            [],
            ["9,001"],
        ),
        ("a folder in the way", {"training.run_folder": "configs"}, [], ["not a run folder"]),
        ("a file in the way", {"training.run_folder": "README.md/x"}, [], ["README.md"]),
        ("contradicting ranks", {}, ["--local_rank=1"], ["--local_rank=1", "LOCAL_RANK=0"]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes", "arguments", "expected"), mistakes())
def test_a_mistake_is_one_message_and_exit_2(
    name: str,
    changes: dict[str, Any] | None,
    arguments: list[str],
    expected: list[str],
    altered: Callable[..., Any],
    command: Any,
) -> None:
    env = {"LOCAL_RANK": "0"} if name == "contradicting ranks" else {}
    if changes is None:
        done = command.python("train.py", *arguments, env=env)
    else:
        done = command.train(altered(changes), *arguments, env=env)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    for part in expected:
        assert part in done.stderr
    assert not (command.folder / "run").exists()


@pytest.mark.slow
def test_ids_above_the_vocabulary_are_named_when_they_are_read(
    altered: Callable[..., Any], command: Any, write_split: Callable[..., Path]
) -> None:
    config = altered({"data.train": [{"path": str(write_split("foreign", [900] * 400))}]})
    done = command.train(config, *short(config))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search(r"foreign/train\.bin: token \d+ is 900.*vocabulary is 67", done.stderr)


@pytest.mark.slow
def test_check_needs_no_accelerator_and_starts_nothing(
    run_config: dict[str, Any], command: Any
) -> None:
    done = command.train(run_config, "--check", "--gpus", "4")
    assert done.returncode == 0
    assert '"train_micro_batch_size_per_gpu": 1' in done.stdout
    assert "tokens a step" in done.stdout
    assert not Path(run_config["training"]["run_folder"]).exists()


@pytest.mark.slow
def test_a_taken_master_port_is_named(run_config: dict[str, Any], command: Any) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        done = command.train(run_config, env=env | {"MASTER_PORT": port}, timeout=60)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(altered: Callable[..., Any], tmp_path: Path) -> None:
    processes = []
    for name in ("first", "second"):
        config = altered({"training.run_folder": str(tmp_path / name)})
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        arguments = ["train.py", "--config", str(path), *short(config)]
        processes.append(subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL))
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_killed_rank_ends_the_run(
    launcher: str, altered: Callable[..., Any], tmp_path: Path
) -> None:
    config = altered({"training.max_steps": 100_000, "deepspeed.scheduler": ...})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    if launcher == "deepspeed":
        start = [DEEPSPEED, "--num_accelerators", "2", "--master_port", str(free_port())]
    else:
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    run = subprocess.Popen(
        [*start, "train.py", "--config", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = Path(config["training"]["run_folder"]) / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 2,' in metrics.read_text(), 90)
    ranks = training_processes(path)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert run.wait(timeout=30) != 0
    wait_until(lambda: not training_processes(path), 30)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)


def training_processes(config: Path) -> list[int]:
    """Process ids of ranks (not launchers) that train this config."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        scripts = [argument for argument in arguments[:3] if not argument.startswith(b"-")]
        if str(config).encode() in arguments and b"train.py" in scripts:
            found.append(int(folder.name))
    return sorted(found)
