from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from data.pieces import Cutter, Invalid, Piece, cut
from data.sources import PIECE_CHARACTERS, Reading, plan_chunks, read_chunk
from data.text_files import read_text

texts = st.text(
    st.sampled_from("aZ09 .\n\u00e9\U0001f600") | st.characters(exclude_categories=["Cs"])
)


def expected_pieces(text: str, limit: int) -> list[str]:
    """By the rule as stated, one position after another."""
    pieces = []
    while len(text) > limit:
        places = [
            i
            for i in range(1, limit - 1)
            if text[i] == " "
            and re.match("[A-Za-z0-9]", text[i - 1])
            and re.match("[A-Za-z]", text[i + 1])
        ]
        end = places[-1] if places else limit
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text]


@given(texts, st.integers(2, 9), st.lists(st.integers(0, 12)))
@example("ab cd ef gh", 4, [3, 1, 1])
@example("one two", 4, [4])
def test_pieces_follow_the_rule_whatever_the_parts(text: str, limit: int, sizes: list[int]) -> None:
    expected = expected_pieces(text, limit)
    assert "".join(expected) == text
    documents = list(cut(text, limit))
    assert [piece.text for piece in documents] == expected
    assert [piece.last for piece in documents] == [False] * (len(expected) - 1) + [True]
    cutter = Cutter(limit)
    found: list[Piece] = []
    rest = text
    for size in [*sizes, len(text)]:
        found += cutter.feed(rest[:size])
        rest = rest[size:]
    assert [*found, cutter.finish()] == documents


@given(texts, st.booleans(), st.integers(1, 9))
def test_text_files_read_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, text: str, mark: bool, block_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "text.txt"
    content = text.encode()
    path.write_bytes(mark * b"\xef\xbb\xbf" + content)
    if mark or not text.startswith("\ufeff"):
        assert list(read_text(str(path), block_bytes)) == [Piece(text, True)]
    path.write_bytes(mark * b"\xef\xbb\xbf" + content + b"\xff")
    (invalid,) = read_text(str(path), block_bytes)
    assert isinstance(invalid, Invalid)
    assert f"byte 0xff at byte offset {3 * mark + len(content)} " in str(invalid.problem)


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_long_documents_come_in_pieces(tmp_path: Path, name: str) -> None:
    text = "some words and 1 number. " * 100_000
    content = text if name == "x.txt" else f'{{"text": "{text}"}}'
    (tmp_path / name).write_text(content)
    reading = Reading((str(tmp_path),))
    (chunk,) = plan_chunks(reading)
    pieces = [item for item in read_chunk(chunk, reading) if isinstance(item, Piece)]
    assert [piece.last for piece in pieces] == [False, False, True]
    assert "".join(piece.text for piece in pieces) == text
    # The place before "words", 5 characters after the start of a sentence of 25: the last below
    # 2**20 = 25 * 41,943 + 1 is that before "number" of the sentence before.
    assert PIECE_CHARACTERS == 2**20 == 25 * 41_943 + 1
    assert len(pieces[0].text) == 25 * 41_942 + 16
    assert all(re.match(" [A-Za-z]", piece.text) for piece in pieces[1:])


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.jsonl.zst"])
def test_memory_does_not_grow_with_a_document(tmp_path: Path, name: str) -> None:
    size = 1 << 26
    content = b"some words " * (size // 11)
    if name != "x.txt":
        content = b'{"text": "%b"}' % content
    if name.endswith(".zst"):
        content = zstandard.compress(content)
    (tmp_path / name).write_bytes(content)
    del content
    reading = Reading((str(tmp_path),))
    (chunk,) = plan_chunks(reading, chunk_bytes=2 * size)
    tracemalloc.start()
    try:
        characters = sum(len(item.text) for item in read_chunk(chunk, reading))  # type: ignore[union-attr]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert characters == size // 11 * 11
    # A line is read up to LONG_LINE_BYTES, 4 MiB; pieces of 1 MiB are held and joined.
    assert peak < size / 3
