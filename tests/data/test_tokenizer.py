"""What holds for every kind of tokenizer, and for sentencepiece's own."""

from __future__ import annotations

import pickle
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings

from data.tokenizer import Tokenizer, load_tokenizer
from data.train_tokenizer import KINDS, train_tokenizer
from tests.data.tokenizer_texts import AWKWARD, TEXTS, stdlib_texts


@pytest.fixture(scope="module", params=KINDS)
def any_tokenizer(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    training_text: list[str],
) -> Tokenizer:
    """One of every kind that the command trains."""
    suffix = ".json" if request.param == "byte-level-bpe" else ".model"
    path = tmp_path_factory.mktemp("kinds") / f"tokenizer{suffix}"
    train_tokenizer(training_text, 310, path, kind=request.param)
    return load_tokenizer(path)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back(any_tokenizer: Tokenizer, text: str) -> None:
    assert any_tokenizer.decode(any_tokenizer.encode(text)) == text


@given(TEXTS)
@example("\u2581 ")
@settings(max_examples=300, deadline=None)
def test_round_trip_is_the_identity(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text)
    assert any_tokenizer.decode(ids) == text
    # Nothing is unknown, and no text becomes a special token (TK-02, DP-28).
    assert not set(ids) & set(any_tokenizer.special_tokens.values())
    assert all(0 <= token < any_tokenizer.vocabulary_size for token in ids)


def test_code_comes_back(any_tokenizer: Tokenizer) -> None:
    texts = stdlib_texts()
    tokens, lengths = any_tokenizer.encode_batch(texts)
    for ids, text in zip(np.split(tokens, np.cumsum(lengths)[:-1]), texts, strict=True):
        assert any_tokenizer.decode(ids.tolist()) == text


def test_batch_is_its_texts_one_by_one(any_tokenizer: Tokenizer) -> None:
    tokens, lengths = any_tokenizer.encode_batch(AWKWARD)
    one_by_one = [any_tokenizer.encode(text) for text in AWKWARD]
    assert tokens.dtype == lengths.dtype == np.int32
    assert lengths.tolist() == list(map(len, one_by_one))
    assert tokens.tolist() == list(chain(*one_by_one))
    for nothing in ([], [""]):
        tokens, lengths = any_tokenizer.encode_batch(nothing)
        assert (tokens.size, lengths.tolist()) == (0, [0] * len(nothing))


def test_half_a_surrogate_pair_is_named(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud83d' at character 1"):
        any_tokenizer.encode_batch(["fine", "a\ud83d"])


def test_copy_in_another_process_encodes_alike(any_tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(any_tokenizer))
    assert (copy.fast is None) == (any_tokenizer.fast is None)
    assert copy.identity == any_tokenizer.identity
    assert copy.encode_batch(AWKWARD)[0].tolist() == any_tokenizer.encode_batch(AWKWARD)[0].tolist()


def test_folder_of_its_files_is_the_tokenizer(any_tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, content in any_tokenizer.files.items():
        (tmp_path / name).write_bytes(content)
    assert load_tokenizer(tmp_path).identity == any_tokenizer.identity


def test_ids_are_those_of_sentencepiece(tokenizer: Tokenizer, model_path: Path) -> None:
    raw = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    texts = [text for text in [*AWKWARD, *stdlib_texts()] if "\u2581" not in text]
    assert tokenizer.fast is not None
    for encode in (tokenizer.encode_batch, tokenizer.reference_encode_batch):
        tokens, lengths = encode(texts)
        expected = raw.encode(texts)
        assert lengths.tolist() == list(map(len, expected))
        assert tokens.tolist() == list(chain(*expected))


def test_special_ids_are_pinned_and_recorded(tokenizer: Tokenizer, model_path: Path) -> None:
    raw = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    ids = {"unk": raw.unk_id(), "bos": raw.bos_id(), "eos": raw.eos_id(), "pad": raw.pad_id()}
    assert ids == {"unk": 0, "bos": 1, "eos": 2, "pad": 3} == tokenizer.identity.special_tokens
    assert tokenizer.identity.kind == "sentencepiece"
    assert tokenizer.end_of_document == 2
    assert tokenizer.vocabulary_size == 320 == raw.vocab_size()


def _foreign(path: Path, **options: Any) -> Path:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words of text"] * 3), model_prefix=str(path), vocab_size=30,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return Path(f"{path}.model")


def test_tokenizers_of_other_making(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.lossless
    default = load_tokenizer(_foreign(tmp_path / "default"))
    assert not default.lossless
    assert default.fast is None
    assert "only BPE sentencepiece models" in default.notices[0]
    # Its pad token has the id -1 (TK-01).
    assert default.special_tokens == {"unk": 0, "bos": 1, "eos": 2}


def test_end_of_document_of_sentencepiece(tmp_path: Path) -> None:
    without = _foreign(tmp_path / "none", eos_id=-1, user_defined_symbols=["<sep>"])
    with pytest.raises(ValueError, match=r"none\.model: .*no end-of-sentence.*--end-of-document"):
        load_tokenizer(without)
    named = load_tokenizer(without, end_of_document="<s>")
    raw = sentencepiece.SentencePieceProcessor(model_file=str(without))
    assert named.end_of_document == named.special_tokens["eos"] == raw.bos_id()
    for text in ("<sep>", "<eod>"):
        with pytest.raises(ValueError, match=f"{text!r} cannot end documents"):
            load_tokenizer(without, end_of_document=text)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\0" * 100])
def test_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text.model").write_bytes(content)
    with pytest.raises(ValueError, match=r"text\.model: not a sentencepiece model"):
        load_tokenizer(tmp_path / "text.model")


def test_nothing_to_load(tmp_path: Path, model_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path / "missing.model")
    with pytest.raises(ValueError, match=r"holds neither a tokenizer\.json nor a tokenizer\.model"):
        load_tokenizer(tmp_path)
    shutil.copy(model_path, tmp_path / "tokenizer.model")
    assert load_tokenizer(tmp_path).identity.kind == "sentencepiece"
