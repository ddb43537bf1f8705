"""Masked documents under the real engine: every way to run trains as a plain loop does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from model.gpt import build
from tests.conftest import SEPARATOR
from tests.end_to_end import test_parity as parity
from tests.end_to_end import test_tensor_parallel

train_all_split = test_tensor_parallel.train_all


@pytest.fixture
def masked(corpus_of_documents: Path, altered: Callable[..., Any]) -> Callable[..., Any]:
    """run_config with masked documents, and further changes."""
    data = {
        "data.train": [{"path": str(corpus_of_documents / "train")}],
        "data.validation": str(corpus_of_documents / "validation"),
        "data.document_masking": True,
    }
    return lambda changes: altered({**data, **changes})


def expected_of(config: dict[str, Any], world_size: int, monkeypatch: Any) -> dict[str, Any]:
    monkeypatch.setattr(parity, "build", partial(build, separator=SEPARATOR))
    expected = parity.plain_loop(config, world_size)
    monkeypatch.setattr(parity, "build", build)
    unmasked = parity.plain_loop(config, world_size)
    assert expected["losses"] != pytest.approx(unmasked["losses"], rel=1e-3), "nothing was masked"
    return expected


def assert_equal(result: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    for key in ("losses", "norms", "lrs"):
        assert result[key] == pytest.approx(expected[key], rel=parity.RELATIVE), f"{name}: {key}"


@pytest.mark.slow
def test_two_ranks_train_as_a_plain_loop(
    masked: Callable[..., Any],
    train_all: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs = {
        f"zero {stage}, {checkpointing}": masked(
            {
                "deepspeed.zero_optimization": {"stage": stage},
                "activation_checkpointing": checkpointing,
                "training.rehearse": stage == 3,
            }
        )
        for stage, checkpointing in (
            (0, {"backend": "deepspeed", "reentrant": True, "policies": {"full": "all"}}),
            (1, {"backend": "deepspeed", "policies": {"full": "first-1"}}),
            (2, {"policies": {"selective": "all"}}),
            (3, {"policies": {"full": "first-1", "selective": "last-1"}}),
        )
    }
    expected = expected_of(masked({}), 2, monkeypatch)
    for name, result in train_all(configs, 2).items():
        assert_equal(result, expected, name)


@pytest.mark.slow
def test_a_split_replica_trains_as_a_plain_loop(
    masked: Callable[..., Any],
    train_all_split: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = test_tensor_parallel.MODELS["llama"] | {"model.dropout": 0.0}
    split = masked(
        changes
        | test_tensor_parallel.SPLIT
        | {"activation_checkpointing": {"policies": {"selective": "all"}}}
    )
    expected = expected_of(masked(changes), 1, monkeypatch)
    for result in train_all_split({"split": split}, 2):
        assert_equal(result["split"], expected, "split")
