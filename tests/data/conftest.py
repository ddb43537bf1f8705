from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
