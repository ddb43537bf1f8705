from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.token_file import TokenFileWriter
from data.tokenizer import Tokenizer, load_tokenizer
from data.train_tokenizer import train_tokenizer

REPOSITORY = Path(__file__).parents[2]

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def training_text() -> list[str]:
    return [
        "def add(a, b):\n    return a + b\n\n\nclass Point:\n    def init(self, x):\n" * 3,
        "The quick brown fox jumps over the lazy dog. " * 5,
        "\tindented with a tab\r\nand ended like on Windows\r\n",
    ]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory, training_text: list[str]) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(training_text, 320, path)
    return path


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return load_tokenizer(model_path)


@pytest.fixture
def command() -> Command:
    """Runs `python -m MODULE ARGUMENTS`; of a mistake, checks what holds for all of them."""

    def run(
        *arguments: str | Path,
        mistake: bool = False,
        prefix: Sequence[str] = (),
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*prefix, sys.executable, "-m", *map(str, arguments)],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == (2 if mistake else 0), done.stderr
        if mistake:
            assert "Traceback" not in done.stderr
            assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
        return done

    return run


@pytest.fixture
def write_corpus(tmp_path: Path) -> Callable[..., Path]:
    """Writes documents of token ids; returns the prefix."""

    def write(
        documents: Sequence[Sequence[int]], vocabulary_size: int, name: str = "corpus"
    ) -> Path:
        with TokenFileWriter(tmp_path / name, vocabulary_size) as writer:
            for document in documents:
                writer.append(np.array(document), np.array([len(document)], np.int32))
        return tmp_path / name

    return write


class SmallSteps:
    """Runs `data.prepare` or `data.merge` with tiny chunks, to its end or to a crash."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path

    def prepare(
        self,
        sources: Sequence[Path],
        output: Path,
        *options: str,
        step: int = 0,
        number: int = signal.SIGKILL,
    ) -> list[str]:
        """The command line; see tests/data/crash.py."""
        arguments = [item for source in sources for item in ("--source", str(source))]
        arguments += ["--tokenizer", str(self._model_path), "--output", str(output)]
        arguments += ["--validation-fraction", "0.2", *options]
        if "--workers" not in options:
            arguments += ["--workers", "1"]
        return self._line("data.prepare", arguments, step, number)

    def merge(
        self, shards: Sequence[Path], output: Path, step: int = 0, number: int = signal.SIGKILL
    ) -> list[str]:
        arguments = ["--output", str(output), *map(str, shards)]
        return self._line("data.merge", arguments, step, number)

    def _line(self, module: str, arguments: list[str], step: int, number: int) -> list[str]:
        script = str(REPOSITORY / "tests/data/crash.py")
        return [sys.executable, script, str(step), str(int(number)), module, *arguments]

    def start(self, line: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            line, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
        )  # fmt: skip

    def run(self, line: list[str], code: int = 0, **options: Any) -> str:
        """Standard error of a command that must end with `code`."""
        process = self.start(line, **options)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code, errors
        return errors

    def steps(self, line: list[str]) -> int:
        """Runs the command to its end; how often it changed the disk."""
        return int(self.run(line).splitlines()[-1])


@pytest.fixture
def small_steps(model_path: Path) -> SmallSteps:
    return SmallSteps(model_path)


@pytest.fixture
def mixed_sources(tmp_path: Path) -> list[Path]:
    """Documents of all lengths, equal ones, empty ones and invalid ones, in two files and a
    folder; some 25 chunks."""
    choice = random.Random(0)
    words = ["def", "return", "self", "the", "quick", "fox", "\u00e9", "\U0001f600", "(", "\n\t"]
    texts = ["", *(" ".join(choice.choices(words, k=choice.randrange(300))) for _ in range(60))]
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "folder"]
    for path in paths[:2]:
        lines = [json.dumps({"text": choice.choice(texts)}) for _ in range(50)]
        lines[7:7] = ['{"text": "cut', "[]"]
        path.write_text("\n".join(lines))
    paths[2].mkdir()
    for name in "xyz":
        (paths[2] / f"{name}.txt").write_text(choice.choice(texts))
    return paths
