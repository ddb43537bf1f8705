"""The fast encoder is used where it is right, and only there."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import pre_tokenizers

from data import fast_encoder
from data.tokenizer import Tokenizer, load_tokenizer
from tests.data.tokenizer_texts import KINDS, TEXTS, byte_level, stdlib_texts


@pytest.fixture(scope="module", params=[*KINDS, "sentencepiece"])
def checked(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    training_text: list[str],
    model_path: Path,
) -> Tokenizer:
    path = model_path
    if request.param != "sentencepiece":
        path = tmp_path_factory.mktemp("kinds") / "tokenizer.json"
        KINDS[request.param](training_text).save(str(path))
    tokenizer = load_tokenizer(path, end_of_document=None)
    assert tokenizer.fast is not None, tokenizer.notices
    assert tokenizer.notices == ()
    return tokenizer


def assert_agree(tokenizer: Tokenizer, texts: list[str]) -> None:
    for found, expected in zip(
        tokenizer.encode_batch(texts), tokenizer.reference_encode_batch(texts), strict=True
    ):
        assert found.dtype == expected.dtype == np.int32
        assert found.tolist() == expected.tolist()


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_agrees_with_the_reference(checked: Tokenizer, text: str) -> None:
    assert_agree(checked, [text, f"{text} {text}"])


def test_agrees_on_code(checked: Tokenizer) -> None:
    assert_agree(checked, stdlib_texts())


def test_agrees_on_added_tokens_in_words(checked: Tokenizer) -> None:
    words = [
        "return",
        "xreturn",
        "returns",
        " return ",
        "a def  b",
        "0x  a",
        "<think>",
        "x<think>y",
    ]
    marks = ["a\u0897\u0301", "e\u0301\u1ae6", "\u0344", "\u212b"]
    special = ["<|endoftext|>", "<|im_start|>", "a<|im_end|>", "</s>", "<s>x", "<pad><unk>"]
    assert_agree(checked, [*words, *marks, *special])


class Altered:
    """gigatoken's tokenizer, but for one text."""

    def __init__(self, backend: Any, wrong: Callable[[str], bool], fail: bool) -> None:
        self.backend, self.wrong, self.fail = backend, wrong, fail

    def encode(self, text: str) -> Any:
        if not self.wrong(text):
            return self.backend.encode(text)
        if self.fail:
            raise BaseException("panicked\nat a line")  # as its Rust code does
        return self.backend.encode(text)[:-1]


@pytest.fixture
def altered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, training_text: list[str]
) -> Callable[..., Tokenizer]:
    def load(wrong: Callable[[str], bool], sample: list[str], fail: bool = False) -> Tokenizer:
        from_json = gigatoken.Tokenizer.from_json
        monkeypatch.setattr(
            gigatoken.Tokenizer, "from_json", lambda data: Altered(from_json(data), wrong, fail)
        )
        path = tmp_path / "tokenizer.json"
        byte_level(training_text).save(str(path))
        return load_tokenizer(path, sample=sample)

    return load


def test_difference_on_a_built_in_text_is_told(altered: Callable[..., Tokenizer]) -> None:
    tokenizer = altered(lambda text: "\U0001f600" in text, [])
    assert tokenizer.fast is None
    assert "gigatoken encodes '\U0001f600' differently" in tokenizer.notices[0]
    assert tokenizer.decode(tokenizer.encode("\U0001f600")) == "\U0001f600"


def test_difference_on_the_sample_is_told(altered: Callable[..., Tokenizer]) -> None:
    sample = ["one line\nanother zyx line\n" * 3]
    assert altered(lambda text: "zyx" in text, []).fast is not None
    tokenizer = altered(lambda text: "zyx" in text, sample)
    assert tokenizer.fast is None
    assert r"gigatoken encodes 'another zyx line\n' differently" in tokenizer.notices[0]


def test_failure_is_told(altered: Callable[..., Tokenizer]) -> None:
    tokenizer = altered(lambda text: "\0" in text, [], fail=True)
    assert tokenizer.fast is None
    assert tokenizer.notices[0].endswith("gigatoken fails on the texts of the check: panicked")


def test_what_it_does_not_support_is_told(tmp_path: Path, training_text: list[str]) -> None:
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    raw = byte_level(training_text, pre_tokenizers.Sequence(parts))
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.fast is None
    assert "gigatoken does not support it: Unsupported pre_tokenizer" in tokenizer.notices[0]
    assert tokenizer.encode("a12") == raw.encode("a12").ids


def test_absence_is_told(monkeypatch: pytest.MonkeyPatch, model_path: Path) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "gigatoken":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    tokenizer = load_tokenizer(model_path)
    assert tokenizer.fast is None
    assert "the gigatoken package is not installed" in tokenizer.notices[0]
    assert load_tokenizer(model_path, fast=False).notices == ()


def test_check_is_the_same_every_time() -> None:
    first, second = (list(fast_encoder.stress_texts(["<a>", "<b>"])) for _ in range(2))
    assert first == second
    assert any("<a>" in text and "\u0301" in text for text in first)
