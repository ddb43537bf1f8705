from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.tokenizer import load_tokenizer
from data.train_tokenizer import (
    _CHARACTERS,
    BYTE_LEVEL_BPE,
    KINDS,
    SENTENCEPIECE_BPE,
    SENTENCEPIECE_UNIGRAM,
    train_tokenizer,
)
from tests.data.conftest import REPOSITORY, Command


def named(folder: Path, kind: str) -> Path:
    return folder / ("t.json" if kind == BYTE_LEVEL_BPE else "t.model")


@pytest.mark.parametrize("kind", [SENTENCEPIECE_BPE, BYTE_LEVEL_BPE])
def test_code_gets_useful_pieces(tmp_path: Path, kind: str) -> None:
    path = named(tmp_path, kind)
    train_tokenizer([Path(argparse.__file__).read_text()], 1000, path, kind=kind)
    tokenizer = load_tokenizer(path)
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("(self):\n        return 1")]
    assert any("\n" in piece and len(piece) > 1 for piece in pieces)
    assert any(" " * 7 in piece for piece in pieces)
    assert len(pieces) <= 7


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic(training_text: list[str], tmp_path: Path, kind: str) -> None:
    contents = set()
    for name in ("a", "b"):
        path = named(tmp_path / name, kind)
        train_tokenizer(training_text, 310, path, kind=kind)
        contents.add(path.read_bytes())
        assert load_tokenizer(path).vocabulary_size == 310
    assert len(contents) == 1


def test_long_documents_are_not_skipped(tmp_path: Path) -> None:
    # TK-03: only the long documents, of 100 kB without a space, hold the character.
    documents = ["\u00e9" * 3 + "ab\u00e9cd" * 20_000, "short"]
    report = train_tokenizer(documents, 280, tmp_path / "long.model")
    total = sum(len(document.encode()) for document in documents)
    assert report.read_bytes == report.used_bytes == total
    assert report.unchanged == report.sampled > 1
    assert len(load_tokenizer(tmp_path / "long.model").encode("ab\u00e9cd" * 8)) < 8 * 5


@pytest.mark.parametrize("kind", [SENTENCEPIECE_BPE, BYTE_LEVEL_BPE])
def test_fraction_is_spread_evenly(tmp_path: Path, kind: str) -> None:
    size = _CHARACTERS[kind]
    cut = ("word " * size)[:size]
    report = (
        train_tokenizer([cut] * 40, 266, tmp_path / "m.model", fraction=0.25)
        if (kind == SENTENCEPIECE_BPE)
        else train_tokenizer([cut] * 40, 261, tmp_path / "m.json", fraction=0.25, kind=kind)
    )
    assert (report.read_bytes, report.used_bytes) == (40 * size, 10 * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "limit"),
    [(32_000, r"largest it supports is (\d+)"), (200, r"need at least (\d+)")],
)
def test_impossible_vocabulary_states_the_limit(
    tmp_path: Path, kind: str, size: int, limit: str
) -> None:
    text = ["some words that are not many, some words"]
    with pytest.raises(ValueError, match=limit) as caught:
        train_tokenizer(text, size, named(tmp_path, kind), kind=kind)
    assert not list(tmp_path.iterdir())
    digits = str(caught.value).replace(",", "")
    feasible = int([word for word in digits.split() if word.strip(";").isdigit()][-1].strip(";"))
    train_tokenizer(text, feasible, named(tmp_path, kind), kind=kind)
    assert load_tokenizer(named(tmp_path, kind)).vocabulary_size == feasible
    wrong_side = feasible + 1 if size > feasible else feasible - 1
    with pytest.raises(ValueError, match="vocabulary of"):
        train_tokenizer(text, wrong_side, named(tmp_path, kind), kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_to_train_on(tmp_path: Path, kind: str) -> None:
    untrainable = [] if kind == BYTE_LEVEL_BPE else [["\0", "\u2581"]]
    for documents in [[], ["", ""], *untrainable]:
        with pytest.raises(ValueError, match="no text"):
            train_tokenizer(documents, 300, named(tmp_path, kind), kind=kind)


def test_kind_and_name_of_the_file_belong_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.json: a sentencepiece-unigram tokenizer is a"):
        train_tokenizer(["text"], 300, tmp_path / "t.json", kind=SENTENCEPIECE_UNIGRAM)
    with pytest.raises(ValueError, match=r"t\.model: a byte-level-bpe tokenizer is a \.json file"):
        train_tokenizer(["text"], 300, tmp_path / "t.model", kind=BYTE_LEVEL_BPE)


@pytest.mark.slow
def test_transformers_loads_what_was_trained(tmp_path: Path, training_text: list[str]) -> None:
    from transformers import AutoTokenizer

    train_tokenizer(training_text, 300, tmp_path / "tokenizer.json", kind=BYTE_LEVEL_BPE)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert theirs.eos_token_id == ours.end_of_document == 0
    assert theirs("def add(a)")["input_ids"] == ours.encode("def add(a)")
    assert len(theirs) == ours.vocabulary_size == 300


@pytest.mark.slow
def test_command(command: Command, tmp_path: Path) -> None:
    lines = [json.dumps({"body": f"words of line {number}"}) for number in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"other": 1}']))
    arguments = ["train", "--source", tmp_path / "*.jsonl", "--text-key", "body"]
    target = tmp_path / "tokenizer.json"
    done = command(
        "data.tokenizer", *arguments, "--vocab-size", "270", "--output", target, "--skip-invalid"
    )
    bytes_of_text = sum(len(json.loads(line)["body"]) for line in lines)
    assert f"270 pieces (byte-level-bpe) learnt from {bytes_of_text:,} of" in done.stdout
    assert "1 invalid documents skipped; round trip 100.00% of 100 texts" in done.stdout
    wrong = command(
        "data.tokenizer", *arguments, "--vocab-size", "270", "--output", target, mistake=True
    )
    assert "no key 'body'" in wrong.stderr


def test_help_and_import_are_light() -> None:
    code = "import sys, data.tokenizer; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    heavy = {"sentencepiece", "tokenizers", "gigatoken", "transformers", "datasets", "torch"}
    assert not heavy & set(done.stdout.split())
