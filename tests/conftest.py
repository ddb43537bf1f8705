"""A corpus and a model small enough to train in a test, and a way to run the real commands."""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.manifest import Inputs, Manifest, Skipped, SplitRecord, TokenizerRecord
from data.token_file import TokenFileWriter

ROOT = Path(__file__).parent.parent
VOCABULARY = 67  # no multiple of anything
SEPARATOR = 2
"""Ends the documents of corpus_of_documents."""

# Variables of a launcher or an interactive allocation must not reach the runs under test.
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("SLURM_", "OMPI_", "PMI_", "RANK", "LOCAL_", "WORLD_", "MASTER_"))
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-golden", action="store_true", help="record the golden losses anew")


def write_manifest(
    folder: Path,
    splits: dict[str, SplitRecord],
    *,
    vocabulary: int = VOCABULARY,
    separator: int | None = None,
) -> None:
    """As of a tokenizer that is not there: tests make up their ids."""
    special = {"eos": vocabulary - 1 if separator is None else separator}
    tokenizer = TokenizerRecord(
        kind="sentencepiece", sha256="0" * 64, vocabulary_size=vocabulary, special_tokens=special
    )
    inputs = Inputs(
        sources=(), tokenizer=tokenizer, text_key="text", skip_invalid=False,
        validation_fraction=0.0,
    )  # fmt: skip
    skipped = Skipped(empty=0, invalid=0)
    manifest = Manifest(inputs=inputs, dtype="uint16", splits=splits, skipped=skipped)
    (folder / "manifest.json").write_text(manifest.model_dump_json())


@pytest.fixture
def write_split(tmp_path: Path) -> Callable[..., Path]:
    """Writes one document of token ids with a manifest into a folder of its own; returns the
    prefix. `vocabulary` is what the manifest says."""

    def write(name: str, tokens: Any, *, vocabulary: int = VOCABULARY) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        with TokenFileWriter(folder / "train", 1 << 15) as writer:
            writer.append(np.asarray(tokens), np.array([len(tokens)], np.int32))
        write_manifest(folder, {"train": writer.record}, vocabulary=vocabulary)
        return folder / "train"

    return write


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train and validation token files of a few documents that can be learnt."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    splits = {}
    for split, documents in (("train", 40), ("validation", 6)):
        with TokenFileWriter(folder / split, VOCABULARY) as writer:
            for _ in range(documents):
                length = int(random.integers(20, 200))
                tokens = (random.integers(VOCABULARY) + np.arange(length)) % VOCABULARY
                writer.append(tokens, np.array([length], np.int32))
        splits[split] = writer.record
    write_manifest(folder, splits)
    return folder


@pytest.fixture(scope="session")
def corpus_of_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with token files of short documents, and the manifest that says what ends them."""
    folder = tmp_path_factory.mktemp("documents")
    random, splits = np.random.default_rng(0), {}
    for split, documents in (("train", 400), ("validation", 30)):
        with TokenFileWriter(folder / split, VOCABULARY) as writer:
            for length in random.integers(1, 20, documents):
                tokens = (random.integers(VOCABULARY) + np.arange(length)) % (VOCABULARY - 3) + 3
                tokens = np.append(tokens, SEPARATOR)
                writer.append(tokens, np.array([length + 1], np.int32))
        splits[split] = writer.record
    write_manifest(folder, splits, separator=SEPARATOR)
    return folder


@pytest.fixture
def run_config(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """A complete run of 20 steps, as its JSON file would hold it."""
    return {
        "model": {
            "preset": "gpt2",
            "layers": 2,
            "width": 32,
            "heads": 4,
            "vocabulary_size": VOCABULARY,
            "vocabulary_multiple": 8,
            "max_sequence_length": 16,
            "dropout": 0.1,
        },
        "data": {
            "train": [{"path": str(corpus / "train")}],
            "validation": str(corpus / "validation"),
        },
        "training": {
            "max_steps": 20,
            "sequence_length": 16,
            "run_folder": str(tmp_path / "run"),
            "log_interval": 1,
            "evaluation_interval": 10,
            "evaluation_samples": 8,
            "save_interval": 10,
        },
        "deepspeed": {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1},
            },
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "warmup_num_steps": 4,
                    "warmup_type": "linear",
                    "total_num_steps": 20,
                    "cos_min_ratio": 0.1,
                },
            },
            "zero_optimization": {"stage": 0},
        },
    }


@pytest.fixture
def altered(run_config: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """run_config with keys changed: altered({"training.seed": 3}); a value of ... drops the key."""

    def alter(changes: dict[str, Any]) -> dict[str, Any]:
        config = copy.deepcopy(run_config)
        for key, value in changes.items():
            *parents, last = key.split(".")
            node = config
            for parent in parents:
                node = node.setdefault(parent, {})
            if value is ...:
                del node[last]
            else:
                node[last] = copy.deepcopy(value)  # a later key may change it
        return config

    return alter


class Command:
    """Runs the project's commands as a user would, from the project's root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def python(self, *arguments: str, ranks: int = 1, **options: Any) -> Any:
        """One process, or `ranks` of them under torchrun."""
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            launcher += ["--master-port", "0", "--rdzv-backend", "c10d"]
            launcher += ["--rdzv-endpoint", "localhost:0"]
        return self.run(*launcher, *arguments, **options)

    def train(self, config: dict[str, Any], *arguments: str, ranks: int = 1, **options: Any) -> Any:
        path = self.folder / "config.json"
        path.write_text(json.dumps(config))
        return self.python("train.py", "--config", str(path), *arguments, ranks=ranks, **options)

    def run(self, *command: str, env: dict[str, str] | None = None, timeout: int = 240) -> Any:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=CLEAN | {"PYTHONPATH": str(ROOT)} | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_tool(*names: str) -> str:
    """The path of the first of these programs; a test without any is skipped, or fails in CI."""
    for name in names:
        if path := shutil.which(name):
            return path
    reason = f"{' and '.join(names)} not installed"
    if os.environ.get("CI_REQUIRES_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def read_metrics(run_folder: str | Path) -> list[dict[str, Any]]:
    text = (Path(run_folder) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def losses() -> Callable[[str], dict[int, float]]:
    """Step -> training loss of a run folder."""

    def read(run_folder: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in read_metrics(run_folder) if "loss" in line}

    return read
