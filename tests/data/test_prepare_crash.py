"""Preparation that is killed, stopped or cut off, and called again."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data.partial import PartialFolder

SmallSteps = Any
pytestmark = pytest.mark.slow


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def expected(small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path) -> Any:
    """Runs to the end without a crash: (files, number of steps)."""

    def run(*options: str) -> tuple[dict[str, bytes], int]:
        output = tmp_path / "expected"
        count = small_steps.steps(small_steps.prepare(mixed_sources, output, *options))
        return files(output), count

    return run


@pytest.mark.parametrize("options", [["--skip-invalid"], ["--skip-invalid", "--deduplicate"]])
def test_killed_at_any_step(
    small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path, expected: Any, options: Any
) -> None:
    whole, count = expected(*options)
    # Plan, additions, commits and the publication are all among them.
    choice = random.Random(len(options))
    steps = [choice.randrange(1, count), count - 2, *(count * i // 5 for i in range(2, 5))]
    for step in steps:
        output = tmp_path / f"out-{step}"
        line = small_steps.prepare(mixed_sources, output, *options, step=step)
        small_steps.run(line, code=-signal.SIGKILL)
        assert not (output / "train.idx").exists() or files(output).keys() >= whole.keys()
        small_steps.run(small_steps.prepare(mixed_sources, output, *options))
        assert files(output) == whole, f"step {step} of {count}"
        assert not output.with_name(f"{output.name}.partial").exists()


def test_killed_with_its_workers_again_and_again(
    small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path, expected: Any
) -> None:
    whole, _ = expected("--skip-invalid")
    output = tmp_path / "out"
    line = small_steps.prepare(mixed_sources, output, "--skip-invalid", "--workers", "2")
    partial = tmp_path / "out.partial"
    kills = 0
    for number in (1, 2, 4, 8, 16):
        process = small_steps.start(line, start_new_session=True)
        while process.poll() is None:
            done = len(list(partial.glob("chunks/*"))) + len(list(partial.glob("journal.*")))
            if done >= number % 5:
                time.sleep(0.01 * (number % 3))
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
                break
        process.communicate()
    small_steps.run(line)
    assert kills > 0
    assert files(output) == whole


def test_interrupted(
    small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path, expected: Any
) -> None:
    whole, count = expected("--skip-invalid")
    output = tmp_path / "out"
    line = small_steps.prepare(
        mixed_sources, output, "--skip-invalid", step=count // 2, number=signal.SIGINT
    )
    message = small_steps.run(line, code=130)
    assert f"interrupted; {output}.partial keeps what is done: the same command goes" in message
    assert "Traceback" not in message
    # Another call's inputs do not go on from there.
    other = small_steps.prepare(mixed_sources, output)
    assert "its skip_invalid is True, not False" in small_steps.run(other, code=2)
    other = small_steps.prepare(mixed_sources[:2], output, "--skip-invalid")
    assert "out.partial holds the work of another call: its sources is" in small_steps.run(
        other, code=2
    )
    path = mixed_sources[1]
    before = path.stat().st_mtime_ns
    os.utime(path, ns=(before, before + 1))
    again = small_steps.prepare(mixed_sources, output, "--skip-invalid")
    assert f"the sources have changed since, from {path} on" in small_steps.run(again, code=2)
    os.utime(path, ns=(before, before))
    assert "continuing from" in small_steps.run(again)
    assert files(output) == whole


def test_an_invalid_document_found_late(
    small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path, expected: Any
) -> None:
    whole, _ = expected("--skip-invalid")
    output = tmp_path / "out"
    message = small_steps.run(small_steps.prepare(mixed_sources, output), code=2)
    assert "a.jsonl:8: broken JSON" in message
    assert "goes on from it, also with --skip-invalid added" in message
    line = small_steps.prepare(mixed_sources, output, "--skip-invalid")
    assert "continuing" in small_steps.run(line)
    assert files(output) == whole


def test_a_worker_that_is_killed(
    small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path
) -> None:
    line = small_steps.prepare(mixed_sources, tmp_path / "out", "--skip-invalid")
    process = small_steps.start(line)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        for child in children.read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
                break
        else:
            continue
        break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "error: a worker was killed by SIGKILL while at work on " in errors
    assert str(tmp_path) in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_sources_that_change_while_they_are_read(
    small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path, expected: Any
) -> None:
    _, count = expected("--skip-invalid")
    line = small_steps.prepare(
        mixed_sources, tmp_path / "out", "--skip-invalid", step=count // 2, number=signal.SIGSTOP
    )
    process = small_steps.start(line)
    os.waitpid(process.pid, os.WUNTRACED)
    with mixed_sources[0].open("a") as stream:
        stream.write('\n{"text": "one more"}')
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"error: {mixed_sources[0]} changed while it was being read" in errors
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_two_at_once(small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path) -> None:
    line = small_steps.prepare(mixed_sources, tmp_path / "out", "--skip-invalid")
    with PartialFolder(tmp_path / "out"):
        message = small_steps.run(line, code=2)
    assert f"error: another process is writing {tmp_path}/out.partial" in message
    small_steps.run(line)


def test_a_full_disk(
    small_steps: SmallSteps, mixed_sources: list[Path], tmp_path: Path, expected: Any
) -> None:
    whole, _ = expected("--skip-invalid")
    output = tmp_path / "out"
    line = small_steps.prepare(mixed_sources, output, "--skip-invalid")

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    message = small_steps.run(line, code=2, preexec_fn=small_files)
    assert f"File too large: '{output}.partial/train.bin'" in message
    assert "keeps what is done" in message
    assert not output.exists()
    small_steps.run(line)
    assert files(output) == whole


def test_memory_does_not_grow_with_the_corpus(model_path: Path, tmp_path: Path) -> None:
    text = "def add(a, b):\\n    return a + b  # the quick brown fox jumps\\n"
    with (tmp_path / "x.jsonl").open("w") as stream:
        for i in range(100_000):
            stream.write(f'{{"text": "{i} {text * (i % 8)}"}}\n')
        stream.write('{"text": "')
        for i in range(1000):
            stream.write(f"{i} {text * 700}")
        stream.write('"}\n')
    assert (tmp_path / "x.jsonl").stat().st_size > 60_000_000
    script = (
        "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode; "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    done = subprocess.run(
        [
            sys.executable, "-c", script, sys.executable, "-m", "data.prepare", "--source",
            tmp_path / "x.jsonl", "--tokenizer", model_path, "--output", tmp_path / "out",
            "--workers", "2", "--deduplicate",
        ],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    # Of the largest process: the interpreter and its libraries take 130 MB of it.
    assert int(done.stdout.splitlines()[-1]) < 230_000
