"""Each mistake in a config is one line that names the key, and all come at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.reading import ConfigError
from configs.schema import RunConfig, load_config


def write(path: Path, config: Any) -> Path:
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_missing_file(tmp_path: Path) -> None:
    (line,) = problems(tmp_path / "absent.json")
    assert "absent.json" in line
    assert "No such file" in line


def test_broken_json_names_line_and_column(tmp_path: Path) -> None:
    (line,) = problems(write(tmp_path / "c.json", '{\n  "model": {,}\n}'))
    assert "line 2 column 13" in line


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'{"model": "\xe9"}')
    assert "not UTF-8" in problems(path)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1]", "expected a JSON object, found a list"),
        ('{"model": 1, "model": 2}', "key given twice: model"),
        ('{"model": NaN}', "NaN is not a JSON number"),
    ],
)
def test_json_that_is_no_config(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problems(write(tmp_path / "c.json", text))[0]


def test_all_mistakes_at_once_each_with_its_key(
    tmp_path: Path, altered: Callable[..., Any]
) -> None:
    config = altered(
        {
            "training.max_stepz": 3,
            "training.seed": "one",
            "training.log_interval": 0,
            "model.heads": 5.5,
            "data.validation": ...,
            "data.train": [{"path": "x", "weight": -1.0, "wieght": 2}],
        }
    )
    lines = problems(write(tmp_path / "c.json", config))
    found = {line.split(": ")[0]: line for line in lines}
    assert "did you mean 'max_steps'?" in found["training.max_stepz"]
    assert 'got "one"' in found["training.seed"]
    assert "greater than 0" in found["training.log_interval"]
    assert "integer" in found["model.heads"]
    assert found["data.validation"] == "data.validation: missing"
    assert "greater than or equal to 0" in found["data.train.0.weight"]
    assert "did you mean 'weight'?" in found["data.train.0.wieght"]


TWO = [{"path": "a"}, {"path": "b"}]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"data.train": [{"path": "a", "tokens": 5}, {"path": "b"}]},
            "data: train: either every corpus has tokens, a budget, or none has",
        ),
        (
            {"data.train": [{"path": "a", "tokens": 5, "weight": 1.0}]},
            "data: train: either every corpus has tokens, a budget, or none has",
        ),
        ({"data.train": [{"path": "a", "tokens": 0}]}, "data.train.0.tokens: Input should be gr"),
        ({"data.train": [{"path": "a"}, {"path": "a"}]}, "data: train: a is listed twice"),
        (
            {"data.train": [{"path": "a", "weight": 0}, {"path": "b", "weight": 0}]},
            "data: train: all weights are 0",
        ),
        ({"data.train": [{"path": "a", "weight": "NaN"}]}, "data.train.0.weight"),
        (
            {"data.train": TWO, "data.schedule": [{"from_tokens": 9, "weights": [1]}]},
            "data: schedule.0.weights: 1 weights for the 2 corpora of data.train",
        ),
        (
            {"data.train": TWO, "data.schedule": [{"from_tokens": 9, "weights": [0, 0]}]},
            "data: schedule.0.weights: all are 0",
        ),
        (
            {"data.train": TWO, "data.schedule": [{"from_tokens": 9, "weights": [1, -1]}]},
            "data.schedule.0.weights.1: Input should be greater than or equal to 0",
        ),
        (
            {
                "data.train": TWO,
                "data.schedule": [{"from_tokens": 9, "weights": [1, 1]}] * 2,
            },
            "data: schedule.1.from_tokens: 9 is not after 9",
        ),
        (
            {
                "data.train": [{"path": "a", "tokens": 5}],
                "data.schedule": [{"from_tokens": 9, "weights": [1]}],
            },
            "data: schedule: goes with weights",
        ),
        ({"data.validation": ""}, "data: validation: names no corpus"),
        ({"data.validation": {}}, "data: validation: names no corpus"),
    ],
)
def test_blends_that_make_no_sense(
    tmp_path: Path, altered: Callable[..., Any], changes: dict[str, Any], expected: str
) -> None:
    (line,) = problems(write(tmp_path / "c.json", altered(changes)))
    assert expected in line


def test_shares_and_validation_sets(altered: Callable[..., Any]) -> None:
    def data(changes: dict[str, Any]) -> Any:
        return RunConfig.model_validate(altered(changes)).data

    weights = data({"data.train": [{"path": "a", "weight": 0.5}, {"path": "b"}]})
    assert [corpus.share for corpus in weights.train] == [0.5, 1.0]
    budgets = data({"data.train": [{"path": "a", "tokens": 7}, {"path": "b", "tokens": 9}]})
    assert [corpus.share for corpus in budgets.train] == [7, 9]
    assert data({"data.validation": "x/val"}).validation_sets == {"": "x/val"}
    named = {"code": "x/val", "web": "y/val"}
    assert data({"data.validation": named}).validation_sets == named
    assert data({"data.train": [{"path": "x/train"}]}).tokenizer_path == "x"
    assert data({"data.tokenizer": "t.model"}).tokenizer_path == "t.model"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model.width": 30}, "model: heads=4 does not divide width=30"),
        ({"model.kv_heads": 3}, "model: kv_heads=3 does not divide heads=4"),
        (
            {"training.sequence_length": 64},
            "training.sequence_length=64 is longer than model.max_sequence_length=16",
        ),
        ({"model.preset": "gpt3"}, "model.preset: Input should be 'gpt2', 'neox' or 'llama'"),
        (
            {"model.preset": "neox", "model.rotary_fraction": 0.4},
            "model: rotary_fraction=0.4 of head width 8 is 3 channels",
        ),
    ],
)
def test_facts_that_contradict_each_other(
    tmp_path: Path, altered: Callable[..., Any], changes: dict[str, Any], expected: str
) -> None:
    (line,) = problems(write(tmp_path / "c.json", altered(changes)))
    assert expected in line


def test_overrides_are_checked_like_the_file(tmp_path: Path, run_config: dict[str, Any]) -> None:
    path = write(tmp_path / "c.json", run_config)
    config = load_config(
        path,
        [
            "training.seed=7",
            "training.run_folder=runs/other",
            "data.train.0.weight=0.5",
            "deepspeed.zero_optimization.reduce_bucket_size=5e8",
        ],
    )
    assert config.training.seed == 7
    assert config.training.run_folder == "runs/other"
    assert config.data.train[0].weight == 0.5
    size = config.deepspeed["zero_optimization"]["reduce_bucket_size"]
    assert (size, type(size)) == (500_000_000, int)
    assert "did you mean 'seed'?" in problems(path, "training.sead=7")[0]
    assert "expected KEY=VALUE" in problems(path, "training.seed")[0]
    assert "training.max_steps is not a section" in problems(path, "training.max_steps.x=1")[0]
    assert "data.train has 1 entries" in problems(path, "data.train.1.weight=1")[0]
    assert "integer" in problems(path, "training.seed=5.5")[0]


def test_the_resolved_config_reads_back_as_itself(tmp_path: Path, run_config: Any) -> None:
    config = load_config(write(tmp_path / "c.json", run_config))
    again = load_config(write(tmp_path / "d.json", config.model_dump_json()))
    assert again == config
    assert isinstance(again, RunConfig)


def test_compiled_blocks_cannot_be_checkpointed_selectively(altered: Callable[..., Any]) -> None:
    changes = {
        "training.compile_blocks": True,
        "activation_checkpointing": {"policies": {"selective": [0]}},
    }
    with pytest.raises(ValueError, match=r"training\.compile_blocks.*selective"):
        RunConfig.model_validate(altered(changes))
    changes["activation_checkpointing"] = {"policies": {"full": [0]}}
    assert RunConfig.model_validate(altered(changes)).training.compile_blocks
