"""The data of real runs: a mix that changes, several validation sets, corpora of other tools."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.train_tokenizer import train_tokenizer
from tests.conftest import read_metrics

TOKENS = 10 * 8 * 16  # of the first 10 steps


@pytest.mark.slow
def test_the_mix_changes_when_a_run_goes_on(
    altered: Callable[..., Any],
    command: Any,
    corpus: Path,
    tmp_path: Path,
    write_split: Callable[..., Path],
    losses: Callable[[str], dict[int, float]],
) -> None:
    other = write_split("other", np.random.default_rng(3).integers(0, 67, 3000))
    train = [{"path": str(corpus / "train")}, {"path": str(other)}]
    schedule = [{"from_tokens": TOKENS, "weights": [0.1, 0.9]}]
    validation = {"known": str(corpus / "validation"), "other": str(other)}
    base = altered({"data.train": train, "data.validation": validation})

    def with_folder(name: str, **data: Any) -> dict[str, Any]:
        training = base["training"] | {"run_folder": str(tmp_path / name)}
        return base | {"training": training, "data": base["data"] | data}

    whole = command.train(with_folder("whole", schedule=schedule))
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert "schedule   from 1,280 tokens: 10.00%, 90.00%" in whole.stdout

    half = command.train(with_folder("parts"), "--set", "training.max_steps=10")
    assert half.returncode == 0, half.stderr[-3000:]
    reweighted = [train[0] | {"weight": 0.1}, train[1] | {"weight": 0.9}]
    refused = command.train(with_folder("parts", train=reweighted))
    assert refused.returncode == 2
    assert '{"from_tokens": 1280, "weights": [...]}' in refused.stderr
    assert "Traceback" not in refused.stderr
    rest = command.train(with_folder("parts", schedule=schedule))
    assert rest.returncode == 0, rest.stderr[-3000:]
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))

    lines = [line for line in read_metrics(tmp_path / "whole") if "validation_loss" in line]
    assert len(lines) == 3
    for line in lines:
        each = line["validation_loss/known"], line["validation_loss/other"]
        assert line["validation_loss"] == pytest.approx(sum(each) / 2, rel=1e-12)
    # What has a rule is learnt, random ids are not.
    assert lines[-1]["validation_loss/known"] < lines[-1]["validation_loss/other"] - 0.5


@pytest.mark.slow
def test_validation_is_the_same_on_two_ranks(
    altered: Callable[..., Any], command: Any, corpus: Path, tmp_path: Path
) -> None:
    found = []
    for ranks in (1, 2):
        config = altered(
            {
                "model.dropout": 0.0,
                "training.max_steps": 1,
                "training.evaluation_samples": 7,  # no multiple of anything
                "training.run_folder": str(tmp_path / f"on{ranks}"),
                "data.validation": {
                    "a": str(corpus / "validation"),
                    "b": str(corpus / "train"),
                },
            }
        )
        done = command.train(config, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = read_metrics(tmp_path / f"on{ranks}")
        found.append([line for line in lines if "validation_loss" in line])
    for alone, together in zip(*found, strict=True):
        assert alone == pytest.approx(together, rel=1e-5)


@pytest.mark.slow
def test_a_corpus_of_megatron_trains_with_its_tokenizer_named(
    altered: Callable[..., Any], command: Any, tmp_path: Path
) -> None:
    texts = [f"def f{n}(x):\n    return x + {n}\n" for n in range(300)]
    train_tokenizer(texts, 300, tmp_path / "t.model")
    for name in ("train", "validation"):  # documents of two sequences, as of split sentences
        sizes, pointers = [25] * 40, [50 * n for n in range(40)]
        index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 40, 21)
        index += struct.pack("<40i40q21q", *sizes, *pointers, *range(0, 41, 2))
        (tmp_path / f"{name}_text_sentence.idx").write_bytes(index)
        ids = np.arange(1000, dtype="<u2") % 300
        (tmp_path / f"{name}_text_sentence.bin").write_bytes(ids.tobytes())
    config = altered(
        {
            "model.vocabulary_size": 300,
            "data.train": [{"path": str(tmp_path / "train_text_sentence")}],
            "data.validation": str(tmp_path / "validation_text_sentence"),
            "data.tokenizer": str(tmp_path / "t.model"),
        }
    )
    done = command.train(config, "--set", "training.max_steps=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1,000 in 20 documents, no manifest, ids as of data.tokenizer" in done.stdout
    generate = ["-m", "training.generate", "--checkpoint", config["training"]["run_folder"]]
    done = command.python(*generate, "--prompt", "def f", "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("def f")


WORKER = """
import sys
from dataclasses import replace
from training.agreement import RanksDisagree, require_distinct_batches
from training.engine import read_ranks, start_process_group
from training.say import fail

ranks = read_ranks()
start_process_group(ranks)
start = 4 * ranks.data_rank
require_distinct_batches(ranks, range(start, start + 4), "ab" * 32)
wrong = replace(ranks, tensor_parallel=1)
try:
    require_distinct_batches(wrong, range(0, 4), "ab" * 32)
except RanksDisagree as error:
    sys.exit(fail(error, 1, ranks))
"""


@pytest.mark.slow
def test_two_ranks_with_one_batch_are_named(command: Any, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    done = command.python(str(tmp_path / "worker.py"), ranks=2, timeout=120)
    assert done.returncode == 1
    assert "error: ranks 0 and 1 both read sample 0 in their first batch" in done.stderr
