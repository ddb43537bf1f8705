"""Corpora as Megatron-LM, Megatron-DeepSpeed and GPT-NeoX write them, written here with struct
alone from the layout their sources describe (megatron/core/datasets/indexed_dataset.py)."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.dataset import Corpus
from data.foreign import derive_manifest, require_one_tokenizer, sampled_ids
from data.manifest import TokenizerRecord
from data.token_file import TokenFile

# Code, struct's letter and numpy's name. Megatron's uint16 is 8: it came after the floats.
TYPES = [(1, "B", "uint8"), (4, "i", "int32"), (5, "q", "int64"), (8, "H", "uint16")]

Documents = Sequence[Sequence[Sequence[int]]]  # documents of sentences of ids
DOCUMENTS: Documents = [[[5, 6], [7, 8, 9, 2]], [[1, 2]], [[3], [4], [5, 2]]]


def write_megatron(
    prefix: Path, documents: Documents, code: int = 8, letter: str = "H", modes: bool = False
) -> Path:
    sentences = list(itertools.chain(*documents))
    item = struct.calcsize(f"<{letter}")
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sentences)) + struct.pack("<Q", len(documents) + 1)
    for sentence in sentences:
        index += struct.pack("<i", len(sentence))
    position = 0
    for sentence in sentences:
        index += struct.pack("<q", position)
        position += item * len(sentence)
    count = 0
    index += struct.pack("<q", 0)
    for document in documents:
        count += len(document)
        index += struct.pack("<q", count)
    if modes:
        index += struct.pack(f"<{len(sentences)}b", *[0] * len(sentences))
    Path(f"{prefix}.idx").write_bytes(index)
    ids = list(itertools.chain(*sentences))
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(ids)}{letter}", *ids))
    return prefix


def tokenizer(sha256: str = "1f", size: int = 100) -> TokenizerRecord:
    return TokenizerRecord(
        kind="sentencepiece", sha256=sha256, vocabulary_size=size, special_tokens={"eos": 2}
    )


@pytest.mark.parametrize(("code", "letter", "name"), TYPES)
def test_documents_of_several_sequences(tmp_path: Path, code: int, letter: str, name: str) -> None:
    file = TokenFile(write_megatron(tmp_path / "x_text_sentence", DOCUMENTS, code, letter))
    assert (file.document_count, file.sequence_count, file.token_count) == (3, 6, 12)
    assert file.dtype.name == name
    for number, sentences in enumerate(DOCUMENTS):
        assert file.document(number).tolist() == list(itertools.chain(*sentences))
    derived = derive_manifest(file, tokenizer())
    assert (derived.documents, derived.sequences, derived.tokens) == (3, 6, 12)
    item = struct.calcsize(letter)
    assert (derived.dtype, derived.bin_bytes) == (name, 12 * item)
    assert derived.idx_bytes == 34 + 6 * 12 + 4 * 8


def test_samples_run_on_over_sentences_and_documents(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "x", DOCUMENTS)
    corpus = Corpus(prefix, 5, 0, vocabulary_size=100, shuffle=False, tokenizer=tokenizer())
    assert corpus.sample(0).tolist() == [5, 6, 7, 8, 9, 2]
    assert corpus.sample(1).tolist() == [2, 1, 2, 3, 4, 5]
    assert corpus.tokenizer == tokenizer()
    with pytest.raises(ValueError, match="100 ids, but the model's vocabulary is 50"):
        Corpus(prefix, 5, 0, vocabulary_size=50, tokenizer=tokenizer())


def test_empty_documents(tmp_path: Path) -> None:
    file = TokenFile(write_megatron(tmp_path / "x", [[], [[1, 2]], [], [[3]]]))
    assert [file.document(n).tolist() for n in range(4)] == [[], [1, 2], [], [3]]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.idx: a multimodal corpus, with a mode for each"):
        TokenFile(write_megatron(tmp_path / "x", DOCUMENTS, modes=True))
    # fairseq's older layout, Megatron's `lazy` and `cached`: version, dtype, element size, counts.
    (tmp_path / "old.bin").write_bytes(b"")
    (tmp_path / "old.idx").write_bytes(b"TNTIDX\x00\x00" + struct.pack("<QQQQQ", 1, 4, 4, 0, 0))
    with pytest.raises(ValueError, match=r"old\.idx: not a Megatron index .*--dataset-impl mmap"):
        TokenFile(tmp_path / "old")
    for code in (6, 7, 9, 0):
        with pytest.raises(ValueError, match=f"dtype code {code} is not an integer type"):
            TokenFile(write_megatron(tmp_path / "x", DOCUMENTS, code))
    with pytest.raises(ValueError, match=r"x\.bin: leave out \.bin and \.idx"):
        TokenFile(tmp_path / "x.bin")


def test_ids_are_looked_at_in_both_ends_and_between(tmp_path: Path) -> None:
    tokens = np.full(1_000_000, 5, "<u2")
    write_megatron(tmp_path / "x", [[[5] * 1_000_000]])
    for place, bad in ((0, 99), (999_999, 98), (0, 5), (466_000, 97)):
        tokens[:] = 5
        tokens[place] = bad
        tokens.tofile(tmp_path / "x.bin")
        assert sampled_ids(TokenFile(tmp_path / "x")) == (5, bad)
    with pytest.raises(ValueError, match=r"x\.bin: holds ids from 5 to 97, .*tokenizer has 97:"):
        derive_manifest(TokenFile(tmp_path / "x"), tokenizer(size=97))
    file = TokenFile(write_megatron(tmp_path / "y", [[[3, -1, 2]]], 4, "i"))
    with pytest.raises(ValueError, match="ids from -1 to 3"):
        derive_manifest(file, tokenizer())


def test_the_tokenizer_has_to_be_named_and_the_same(
    tmp_path: Path, write_corpus: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = TokenFile(write_megatron(tmp_path / "x", DOCUMENTS))

    def own(name: str, sha256: str) -> TokenFile:
        file: Any = TokenFile(write_corpus([[1, 2, 3]], 100, name))
        record = tokenizer(sha256)
        file.manifest = type("M", (), {"inputs": type("I", (), {"tokenizer": record})})
        return file  # type: ignore[no-any-return]

    one, same, other = own("one", "1f"), own("same", "1f"), own("other", "2e")
    assert require_one_tokenizer([one, same], None, None) == {}
    assert require_one_tokenizer([one, same], tokenizer("1f"), "t") == {}
    with pytest.raises(ValueError, match=r"one\.bin \(1f\), .*other\.bin \(2e\)"):
        require_one_tokenizer([one, other], None, None)
    with pytest.raises(
        ValueError, match=r"x\.bin: no manifest\.json .* name it in data\.tokenizer"
    ):
        require_one_tokenizer([one, foreign], None, None)
    with pytest.raises(ValueError, match=r"data\.tokenizer: t \(2e\) is not .*one\.bin .*\(1f\)"):
        require_one_tokenizer([one, foreign], tokenizer("2e"), "t")
    derived = require_one_tokenizer([one, foreign], tokenizer("1f"), "t")
    assert [Path(path).name for path in derived] == ["x.bin"]


def test_megatrons_own_reader_agrees(tmp_path: Path, write_corpus: Callable[..., Path]) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefix = write_corpus([[5, 6, 2], [2], [7, 9, 10, 2]], 70_000)
    theirs = indexed.IndexedDataset(str(prefix))
    assert [theirs[n].tolist() for n in range(3)] == [[5, 6, 2], [2], [7, 9, 10, 2]]
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "built.bin"), dtype=np.uint16)
    for document in DOCUMENTS:
        ids = list(itertools.chain(*document))
        builder.add_document(np.array(ids), [len(sentence) for sentence in document])
    builder.finalize(str(tmp_path / "built.idx"))
    write_megatron(tmp_path / "written", DOCUMENTS)
    for kind in ("idx", "bin"):
        built = (tmp_path / f"built.{kind}").read_bytes()
        assert built == (tmp_path / f"written.{kind}").read_bytes()
