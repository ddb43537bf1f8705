"""tokenizer.json of other making: what is taken from it, refused, or switched off."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data.tokenizer import load_tokenizer
from tests.data.tokenizer_texts import AWKWARD, KINDS, byte_level, stdlib_texts

Build = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path, training_text: list[str]) -> Build:
    """Writes a small byte-level tokenizer after a change of it, and of the files beside it."""

    def save(
        change: Callable[[Tokenizer], Any] = lambda tokenizer: None, **beside: dict[str, Any]
    ) -> Path:
        tokenizer = byte_level(training_text)
        change(tokenizer)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in beside.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path / "tokenizer.json"

    return save


def test_identity(saved: Build) -> None:
    path = saved(lambda t: t.add_special_tokens(["<pad>"]), tokenizer_config={"pad_token": "<pad>"})
    tokenizer = load_tokenizer(path)
    assert tokenizer.identity.model_dump() == {
        "kind": "huggingface",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "vocabulary_size": 301,
        "special_tokens": {"eos": 0, "pad": 300},
    }
    assert set(tokenizer.files) == {"tokenizer.json", "tokenizer_config.json"}


def test_vocabulary_counts_added_tokens_and_gaps(saved: Build) -> None:
    path = saved(lambda t: t.add_tokens(["<think>", "</think>"]))
    assert load_tokenizer(path).vocabulary_size == 302  # TK-05: not the model's 300
    content = json.loads(path.read_text())
    content["model"]["vocab"]["unreachable"] = 999
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).vocabulary_size == 1000


@pytest.mark.parametrize("text", ["<|endoftext|>", "a <|im_end|>b", "<|endoftext|><|im_end|>"])
@pytest.mark.parametrize("fast", [True, False])
def test_text_of_a_special_token_stays_text(saved: Build, text: str, fast: bool) -> None:
    # The second is an ordinary token to its file, and a special one to the user.
    path = saved(lambda t: t.add_tokens(["<|im_end|>"]))
    tokenizer = load_tokenizer(path, end_of_document="<|im_end|>", fast=fast)
    assert (tokenizer.fast is not None) == fast
    assert tokenizer.end_of_document == 300
    ids = tokenizer.encode(text)
    without = json.loads(path.read_text())
    without["added_tokens"] = []
    assert ids == Tokenizer.from_str(json.dumps(without)).encode(text).ids
    assert not {0, 300} & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, *ids, 300]) == text


def test_special_pieces_of_a_unigram_model_stay_text(
    tmp_path: Path, training_text: list[str]
) -> None:
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    raw.train_from_iterator(training_text, trainer)
    raw.encode_special_tokens = True
    assert raw.token_to_id("</s>") in raw.encode("a</s>").ids  # the reason for the test
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.end_of_document == 1
    assert not {0, 1} & set(tokenizer.encode("a</s> b<pad></s></s>"))
    for text in ("return a", "The dog"):
        assert tokenizer.encode(text) == raw.encode(text).ids


def test_nothing_is_added_cut_filled_or_varied(saved: Build) -> None:
    text = "The quick brown fox " * 250
    expected = load_tokenizer(saved()).encode(text)

    def change(tokenizer: Tokenizer) -> None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        tokenizer.enable_truncation(max_length=16)
        tokenizer.enable_padding(length=5000)
        tokenizer.model.dropout = 0.5

    tokenizer = load_tokenizer(saved(change))
    assert tokenizer.encode(text) == expected
    for found, name in zip(tokenizer.notices, ("truncation", "padding", "dropout"), strict=True):
        assert f"its {name} is switched off" in found


@pytest.mark.parametrize(
    ("beside", "end"),
    [
        ({"tokenizer_config": {"eos_token": "<a>"}}, "<a>"),
        ({"tokenizer_config": {"eos_token": {"content": "<a>"}}}, "<a>"),
        ({"special_tokens_map": {"eos_token": {"content": "<a>"}}}, "<a>"),
        (
            {"special_tokens_map": {"eos_token": "</s>"}, "tokenizer_config": {"eos_token": "<a>"}},
            "<a>",
        ),
        ({"tokenizer_config": {"eos_token": None}}, "<|endoftext|>"),
        ({}, "<|endoftext|>"),
    ],
)
def test_end_of_document_is_found(saved: Build, beside: dict[str, Any], end: str) -> None:
    path = saved(lambda t: t.add_special_tokens(["<a>"]), **beside)
    expected = Tokenizer.from_file(str(path)).token_to_id(end)
    assert load_tokenizer(path).end_of_document == expected
    assert load_tokenizer(path.parent).end_of_document == expected
    named = load_tokenizer(path, end_of_document="<|endoftext|>")
    assert named.end_of_document == 0 == named.special_tokens["eos"]


def test_end_of_document_is_not_guessed(saved: Build) -> None:
    several = saved(lambda t: t.add_special_tokens(["</s>"]))
    with pytest.raises(ValueError, match=r"several of the usual names .<\|endoftext\|>, </s>. in"):
        load_tokenizer(several)
    assert load_tokenizer(several, end_of_document="</s>").end_of_document == 300
    with pytest.raises(ValueError, match=r"end of document '<eod>' is not in the vocabulary"):
        load_tokenizer(several, end_of_document="<eod>")
    content = several.read_text().replace("<|endoftext|>", "<one>").replace("</s>", "<two>")
    several.write_text(content)
    with pytest.raises(
        ValueError, match=r"none of the usual names in its vocabulary; name it with --end"
    ):
        load_tokenizer(several)
    (several.parent / "tokenizer_config.json").write_text('{"eos_token": "<eod>"}')
    with pytest.raises(ValueError, match=r"its eos_token '<eod>' is not in the vocabulary"):
        load_tokenizer(several)


def test_prepared_corpus_remembers_its_end_of_document(saved: Build) -> None:
    path = saved(lambda t: t.add_special_tokens(["</s>"]))
    record = load_tokenizer(path, end_of_document="</s>").identity.model_dump()
    manifest = {"inputs": {"tokenizer": record}}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    assert load_tokenizer(path.parent).end_of_document == 300
    assert load_tokenizer(path.parent, end_of_document="<|endoftext|>").end_of_document == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"tokenizer\.json: broken JSON"),
        ("[1]", r"expected a JSON object, found list"),
        ('{"model": {"type": "BPE"}}', r"no vocabulary in model\.vocab"),
        ('{"model": {"vocab": {}}}', r"no vocabulary in model\.vocab"),
        ('{"model": {"vocab": {"<eos>": 0, "a": -1}}}', r"no vocabulary in model\.vocab"),
        (
            '{"model": {"vocab": {"<eos>": 0}, "type": "Other"}}',
            r"not a tokenizer\.json of",
        ),
    ],
)
def test_damaged_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_damaged_config_is_named(saved: Build) -> None:
    path = saved()
    (path.parent / "special_tokens_map.json").write_text("{")
    with pytest.raises(ValueError, match=r"special_tokens_map\.json: broken JSON"):
        load_tokenizer(path)


def test_lossy_tokenizers_are_found(saved: Build) -> None:
    assert load_tokenizer(saved()).lossless
    assert not load_tokenizer(saved(lambda t: setattr(t, "normalizer", normalizers.NFC()))).lossless
    # Its text is a byte in the alphabet of byte-level models, which decode to another.
    assert not load_tokenizer(saved(lambda t: t.add_tokens(["\u00e9"]))).lossless


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(tmp_path: Path, training_text: list[str], kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "tokenizer.json"
    KINDS[kind](training_text).save(str(path))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path))
    ours = load_tokenizer(path, end_of_document="<|endoftext|>")
    assert len(theirs) == ours.vocabulary_size
    texts = [*AWKWARD, "<|im_start|>user <think>", *stdlib_texts()]
    options = {"add_special_tokens": False, "split_special_tokens": True}
    expected = [theirs(text, **options)["input_ids"] for text in texts]
    assert ours.fast is not None
    for encode in (ours.encode_batch, ours.reference_encode_batch):
        tokens, lengths = encode(texts)
        assert lengths.tolist() == list(map(len, expected))
        assert tokens.tolist() == list(chain(*expected))
