"""Pieces of documents to the files of a chunk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data.encoding
from data.encoding import Options, encode_chunks
from data.sources import Chunk, Invalid, Piece, Reading

END = 9
CHUNK = Chunk(0, "text", "some.txt", 0, 1, 1)


class Letters:
    """a is 1, b is 2, ... spaces are nothing, ? is unknown."""

    vocabulary_size = 10
    end_of_document = END
    special_tokens = {"eos": END, "unk": 0}  # noqa: RUF012

    def encode_batch(self, texts: Sequence[str]) -> tuple[Any, Any]:
        ids = [["?abcdefgh".index(c) for c in text if c != " "] for text in texts]
        lengths = np.array([len(one) for one in ids], np.int32)
        return np.array([token for one in ids for token in one], np.int32), lengths


def encode(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    items: Iterable[Piece | Invalid],
    fraction: float = 0.0,
    **options: bool,
) -> Any:
    monkeypatch.setattr(data.encoding, "read_chunk", lambda chunk, reading: iter(items))
    chosen = {"skip_invalid": True, "deduplicate": False, **options}
    return encode_chunks(
        [CHUNK], Letters(), Options(Reading(()), fraction, **chosen), folder / "c", lambda *_: None
    )


def read(folder: Path, split: str = "train") -> tuple[list[int], list[int]]:
    tokens = np.fromfile(folder / "c" / f"{split}.bin", "<u2").tolist()
    return tokens, np.fromfile(folder / "c" / f"{split}.lengths", "<i4").tolist()


def documents(*texts: str, piece: int) -> list[Piece]:
    """The texts, cut after every `piece` characters."""
    return [
        Piece(text[start : start + piece], start + piece >= len(text))
        for text in texts
        for start in range(0, max(1, len(text)), piece)
    ]


BAD = Invalid(ValueError("some.txt:3: bad\nin two lines"))


@pytest.mark.parametrize("batch", [1, 40, 70, 100, 1 << 20])
@pytest.mark.parametrize("piece", [1, 2, 100])
def test_batches_and_pieces_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, piece: int
) -> None:
    monkeypatch.setattr(data.encoding, "_BATCH_CHARACTERS", batch)
    items = [
        *documents("abc", "", "  ", "d", piece=piece), *documents("e?g", piece=piece)[:-1], BAD,
        *documents("h", " a ", piece=piece), BAD, *documents("b?", piece=piece),
    ]  # fmt: skip
    record = encode(tmp_path, monkeypatch, items)
    assert read(tmp_path) == (
        [1, 2, 3, END, 4, END, 8, END, 1, END, 2, 0, END], [4, 2, 2, 2, 3],
    )  # fmt: skip
    assert record.unknown_tokens == 1
    # "" has no characters, "  " no tokens.
    assert (record.skipped.empty, record.skipped.invalid) == (2, 2)
    assert (tmp_path / "c" / "invalid.txt").read_text() == "some.txt:3: bad in two lines\n" * 2


@pytest.mark.parametrize("batch", [1, 70, 1 << 20])
def test_splits_and_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(data.encoding, "_BATCH_CHARACTERS", batch)
    texts = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in ("", "a", "bcd")]
    items = documents(*texts, piece=2)
    items[6:6] = [Piece("ef", False), BAD]
    encode(tmp_path, monkeypatch, items, 0.3, deduplicate=True)
    expected: dict[str, list[str]] = {"train": [], "validation": []}
    for text in texts:
        first = text[:2].encode()  # the piece alone decides
        digest = hashlib.blake2b(first, digest_size=8, person=b"validation").digest()
        share = int.from_bytes(digest, "big") / 2**64
        expected["validation" if share < 0.3 else "train"].append(text)
    assert all(expected.values())
    for split, chosen in expected.items():
        tokens, lengths = read(tmp_path, split)
        assert tokens == [t for x in chosen for t in [*("?abcdefgh".index(c) for c in x), END]]
        assert lengths == [len(text) + 1 for text in chosen]
        hashes = (tmp_path / "c" / f"{split}.hashes").read_bytes()
        assert hashes == b"".join(
            hashlib.blake2b(text.encode(), digest_size=16).digest() for text in chosen
        )


def test_an_invalid_document_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="bad"):
        encode(tmp_path, monkeypatch, [BAD], skip_invalid=False)


@pytest.mark.parametrize("batch", [1, 1 << 20])
def test_the_longest_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(data.encoding, "_BATCH_CHARACTERS", batch)
    monkeypatch.setattr(data.encoding, "MAX_DOCUMENT_TOKENS", 5)
    (tmp_path / "fits").mkdir()
    encode(tmp_path / "fits", monkeypatch, documents("abcd", "abcd", piece=3))
    assert read(tmp_path / "fits")[1] == [5, 5]
    with pytest.raises(ValueError, match=r"some\.txt: a document of more than 5 tokens"):
        encode(tmp_path, monkeypatch, documents("abcd", "abcde", piece=3))


def test_ids_outside_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "vocabulary_size", 8)
    with pytest.raises(ValueError, match=r"some\.txt: token ids from 1 to 8 do not fit"):
        encode(tmp_path, monkeypatch, documents("abch", piece=10))
