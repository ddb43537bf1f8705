from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.sentencepiece_tokenizer import SPECIAL_TOKENS
from data.tokenizer import Tokenizer, load_tokenizer
from data.train_tokenizer import _TRAINING_CHARACTERS, train_tokenizer

AWKWARD = [
    "", " ", "  a", "a  ", "\\n\\n    return", "\\t\\tx\\r\\n\\r", "\\0a\\0", "\\u2581",
    " \\u2581\\u2581 a\\u2581b", "<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "a</s>b", "\\ufeffx",
    "\\u2585 \\u2047", "\\u3000\\uff21", "e\\u0301\\u00e9", "\\U0001f600\\u200d", "\\ufffd",
    "\\u2028\\x85", "\\U0010ffff",
]  # fmt: skip


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.text(st.sampled_from(" \t\r\n\0\u2581\u2585<>/s0xA")).map("def  f".join)
    | st.lists(st.sampled_from(AWKWARD)).map("".join)
)
@example("\u2581 ")
@settings(max_examples=300, deadline=None)
def test_round_trip_is_the_identity(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # Nothing is unknown, and no text becomes a special token (TK-02, DP-28).
    assert not set(ids) & set(SPECIAL_TOKENS.values())
    assert all(0 <= token < tokenizer.vocabulary_size for token in ids)


def test_code_gets_useful_pieces(tmp_path: Path) -> None:
    train_tokenizer([Path(argparse.__file__).read_text()], 1000, tmp_path / "code.model")
    tokenizer = load_tokenizer(tmp_path / "code.model")
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("(self):\n        return 1")]
    assert any("\n" in piece and len(piece) > 1 for piece in pieces)
    assert any(piece.startswith("        ") for piece in pieces)
    assert len(pieces) <= 6


def test_special_ids_are_pinned_and_recorded(tokenizer: Tokenizer, model_path: Path) -> None:
    raw = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    ids = {"unk": raw.unk_id(), "bos": raw.bos_id(), "eos": raw.eos_id(), "pad": raw.pad_id()}
    assert ids == {"unk": 0, "bos": 1, "eos": 2, "pad": 3} == tokenizer.identity.special_tokens
    assert tokenizer.end_of_document == 2
    assert tokenizer.vocabulary_size == 320 == raw.vocab_size()


def test_training_is_deterministic(
    model_path: Path, training_text: list[str], tmp_path: Path
) -> None:
    train_tokenizer(training_text, 320, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == model_path.read_bytes()


def test_long_documents_are_not_skipped(tmp_path: Path) -> None:
    # TK-03: only the long documents, of 100 kB without a space, hold the character.
    documents = ["\u00e9" * 3 + "ab\u00e9cd" * 20_000, "short"]
    report = train_tokenizer(documents, 280, tmp_path / "long.model")
    total = sum(len(document.encode()) for document in documents)
    assert report.read_bytes == report.used_bytes == total
    assert report.unchanged == report.sampled > 1
    assert len(load_tokenizer(tmp_path / "long.model").encode("ab\u00e9cd" * 8)) < 8 * 5


def test_fraction_is_spread_evenly(tmp_path: Path) -> None:
    cut = "word " * (_TRAINING_CHARACTERS // 4)
    report = train_tokenizer([cut[:_TRAINING_CHARACTERS]] * 40, 266, tmp_path / "m", fraction=0.25)
    assert (report.read_bytes, report.used_bytes) == (40 * 4096, 10 * 4096)


@pytest.mark.parametrize(
    ("size", "limit"),
    [(32_000, r"largest it supports is (\d+)"), (200, r"need at least (\d+)")],
)
def test_impossible_vocabulary_states_the_limit(tmp_path: Path, size: int, limit: str) -> None:
    text = ["some words that are not many, some words"]
    with pytest.raises(ValueError, match=limit) as caught:
        train_tokenizer(text, size, tmp_path / "m.model")
    assert not list(tmp_path.iterdir())
    digits = str(caught.value).replace(",", "")
    feasible = int([word for word in digits.split() if word.strip(";").isdigit()][-1].strip(";"))
    train_tokenizer(text, feasible, tmp_path / "m.model")
    wrong_side = feasible + 1 if size > feasible else feasible - 1
    with pytest.raises(ValueError, match="vocabulary of"):
        train_tokenizer(text, wrong_side, tmp_path / "n.model")


@pytest.mark.parametrize("documents", [[], ["", ""], ["\0", "\u2581"]])
def test_no_text_to_train_on(tmp_path: Path, documents: list[str]) -> None:
    with pytest.raises(ValueError, match="no text"):
        train_tokenizer(documents, 300, tmp_path / "m.model")


def _foreign(path: Path, **options: Any) -> Tokenizer:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words of text"] * 3), model_prefix=str(path), vocab_size=30,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return load_tokenizer(f"{path}.model")


def test_tokenizers_of_other_making(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.lossless
    assert not _foreign(tmp_path / "default").lossless
    with pytest.raises(ValueError, match=r"none\.model: this tokenizer has no end-of-sentence"):
        _ = _foreign(tmp_path / "none", eos_id=-1).end_of_document
    (tmp_path / "text.model").write_text("not a model")
    with pytest.raises(ValueError, match=r"text\.model: not a sentencepiece model"):
        load_tokenizer(tmp_path / "text.model")
