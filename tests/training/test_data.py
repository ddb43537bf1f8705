"""The data of a run: budgets, tokenizers, what a resumed run may change, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.reading import ConfigError
from configs.schema import RunConfig
from data.manifest import TokenizerRecord
from data.token_file import TokenFileWriter
from training.agreement import disagreement
from training.checkpoint import Progress
from training.engine import Ranks
from training.say import describe_data
from training.setup import Run, open_data, prepare, require_same_past

ALONE = Ranks(0, 0, 1, 1, torch.device("cpu"))
SIXTY = TokenizerRecord(
    kind="sentencepiece", sha256="0" * 64, vocabulary_size=67, special_tokens={"eos": 66}
)


def two(write_split: Callable[..., Path], **settings: Any) -> list[dict[str, Any]]:
    """Corpora of 20 and 100 samples of 16 tokens."""
    lengths = {"small": 20 * 16 + 1, "large": 100 * 16 + 1}
    return [
        {"path": str(write_split(name, np.arange(length) % 67)), **settings.get(name, {})}
        for name, length in lengths.items()
    ]


def described(config: dict[str, Any]) -> tuple[Run, list[str]]:
    run = prepare(RunConfig.model_validate(config), ALONE)
    return run, describe_data(run)


def test_what_is_said_of_a_blend(
    altered: Callable[..., Any], write_split: Callable[..., Path]
) -> None:
    corpora = two(write_split, small={"weight": 0.75}, large={"weight": 0.25})
    # 20 steps of 8 samples: 120 of the small corpus' 20, 40 of the large one's 100.
    run, lines = described(altered({"data.train": corpora}))
    assert run.total_samples == 160
    small, large, warning = lines
    assert "small/train: 75.00% of the samples and tokens, 1,920 tokens, 6 epochs of 321" in small
    assert "large/train: 25.00% of the samples and tokens, 640 tokens, 0.4 epochs" in large
    assert warning.startswith("warning")
    assert "small/train: read 6 times, more than its max_epochs of 4" in warning
    corpora[0]["max_epochs"] = 6.0
    assert len(described(altered({"data.train": corpora}))[1]) == 2


def test_what_is_not_read_is_said(
    altered: Callable[..., Any], write_split: Callable[..., Path]
) -> None:
    corpora = two(write_split, small={"weight": 0})
    schedule = [
        {"from_tokens": 100 * 16, "weights": [0, 2]},
        {"from_tokens": 10**9, "weights": [1, 1]},
    ]
    _, lines = described(altered({"data.train": corpora, "data.schedule": schedule}))
    text = "\n".join(lines)
    assert "notice     " in text
    assert "small/train: skipped, the run reads nothing of it" in text
    assert "schedule   from 1,600 tokens: 0.00%, 100.00%" in text
    assert "the run ends at 2,560 tokens, before that" in text


def test_budgets_have_to_cover_the_run(
    altered: Callable[..., Any], write_split: Callable[..., Path]
) -> None:
    corpora = two(write_split, small={"tokens": 560}, large={"tokens": 2000})
    run, lines = described(altered({"data.train": corpora}))  # 2,560 tokens, all of the budget
    assert run.train_data.counts(160).tolist() == [35, 125]
    assert "560 tokens, 1.75 epochs" in lines[0]
    with pytest.raises(
        ConfigError, match="budgets add up to 2,560 tokens, but 21 steps read 2,688"
    ):
        described(altered({"data.train": corpora, "training.max_steps": 21}))


def test_a_schedule_begins_with_the_first_whole_sample(
    altered: Callable[..., Any], write_split: Callable[..., Path]
) -> None:
    corpora = two(write_split)
    for tokens, first in ((160, 10), (161, 11), (175, 11), (176, 11), (1, 1)):
        schedule = [{"from_tokens": tokens, "weights": [0, 1]}]
        config = altered({"data.train": corpora, "data.schedule": schedule})
        blend, _ = open_data(RunConfig.model_validate(config))
        assert blend.stages[1].first == first


def test_what_a_resumed_run_may_change_of_its_data(
    altered: Callable[..., Any], write_split: Callable[..., Path]
) -> None:
    corpora = two(write_split)

    def data(train: list[dict[str, Any]], schedule: Any = ()) -> Any:
        changes = {"data.train": train, "data.schedule": list(schedule)}
        return open_data(RunConfig.model_validate(altered(changes)))[0]

    start = Progress(10, 80, data(corpora).fingerprint(80), 1)
    require_same_past(data(corpora), start)
    require_same_past(data(corpora, [{"from_tokens": 80 * 16, "weights": [9, 1]}]), start)
    added = [*corpora, {"path": str(write_split("new", np.arange(99))), "weight": 0}]
    later = [{"from_tokens": 80 * 16, "weights": [1, 1, 4]}]
    require_same_past(data(added, later), start)
    wrong = [
        data([corpora[0] | {"weight": 2}, corpora[1]]),
        data(corpora, [{"from_tokens": 79 * 16, "weights": [9, 1]}]),
        data([*corpora, added[2] | {"weight": 1}]),
        data(corpora[:1]),
    ]
    for other in wrong:
        with pytest.raises(ConfigError, match=r'data\.schedule: \{"from_tokens": 1280, ') as caught:
            require_same_past(other, start)
        assert "the first 1,280 tokens" in str(caught.value)


def test_a_corpus_without_a_manifest_needs_a_tokenizer(
    altered: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TokenFileWriter(tmp_path / "x", 67) as writer:
        writer.append(np.arange(200) % 67, np.array([200], np.int32))
    changes: dict[str, Any] = {"data.train": [{"path": str(tmp_path / "x")}]}
    with pytest.raises(
        ConfigError, match=r"x\.bin: no manifest\.json .*name it in data\.tokenizer"
    ):
        prepare(RunConfig.model_validate(altered(changes)), ALONE)
    changes["data.tokenizer"] = "t.json"
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*t\.json"):
        prepare(RunConfig.model_validate(altered(changes)), ALONE)
    named = SimpleNamespace(identity=SIXTY.model_dump())
    monkeypatch.setattr("training.documents.load_tokenizer", lambda path, fast: named)
    run, (line, *_) = described(altered(changes))
    assert "in 1 documents, no manifest, ids as of data.tokenizer" in line
    assert run.train_data.corpora[0].tokenizer == SIXTY
    other = SIXTY.model_copy(update={"sha256": "1" * 64})
    named.identity = other.model_dump()  # the validation set's manifest says another
    with pytest.raises(ConfigError, match=r"data\.tokenizer: t\.json \(111111111111\) is not"):
        prepare(RunConfig.model_validate(altered(changes)), ALONE)


def test_ranks_that_read_what_they_should_not() -> None:
    # DP-18: rows of (data rank, first sample, end, data).
    assert disagreement([(0, 0, 4, 7), (1, 4, 8, 7), (2, 8, 12, 7)]) is None
    assert disagreement([(0, 0, 4, 7), (0, 0, 4, 7), (1, 4, 8, 7), (1, 4, 8, 7)]) is None
    same = disagreement([(0, 0, 4, 7), (1, 4, 8, 7), (2, 4, 8, 7)])
    assert same is not None
    assert "ranks 1 and 2 both read sample 4" in same
    overlap = disagreement([(0, 0, 4, 7), (1, 3, 7, 7)])
    assert overlap is not None
    assert "ranks 0 and 1 both read sample 3" in overlap
    split = disagreement([(0, 0, 4, 7), (0, 4, 8, 7)])
    assert split is not None
    assert "ranks 0 and 1 are parts of one replica" in split
    stale = disagreement([(0, 0, 4, 7), (1, 4, 8, 8)])
    assert stale is not None
    assert "rank 1 does not read the data that rank 0 reads" in stale
