"""JSON lines: cut at byte ranges, and lines too long to be parsed at once."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.json_lines import LONG_LINE_BYTES, read_json_lines
from data.json_scanner import scan_text
from data.pieces import Invalid, Piece
from data.sources import Chunk, Reading, plan_chunks, read_chunk


def blocks(content: bytes, size: int) -> Iterator[bytes]:
    return (content[i : i + size] for i in range(0, len(content), size))


def joined(items: Iterator[Piece | Invalid]) -> list[str]:
    """Documents; of an invalid one, its message."""
    documents, text = [], ""
    for item in items:
        if isinstance(item, Invalid):
            documents.append(f"invalid: {item.problem}")
            text = ""
        else:
            text += item.text
            if item.last:
                documents.append(text)
                text = ""
    assert text == "", "the last document does not end"
    return documents


characters = st.characters() | st.sampled_from('"\\/\n\r\t\0\x7f\u00e9\ud83d\ude00\U0001f600u0d8')
texts = st.text(characters, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def json_objects(draw: st.DrawFn) -> bytes:
    """Objects with the text somewhere, as json writes them: escaped or not, spaced or not."""
    members = list(draw(st.dictionaries(texts, values, max_size=3)).items())
    members.insert(draw(st.integers(0, len(members))), ("text", draw(texts | texts | values)))
    space = draw(st.sampled_from(["", " ", "\t \r"]))
    return json.dumps(
        dict(members), ensure_ascii=draw(st.booleans()), separators=(space + ",", ":" + space)
    ).encode("utf-8", "surrogatepass")


def reference(content: bytes) -> str | None:
    """The text, or None: what the standard library says, plus: strings are Unicode, and the text
    occurs once."""
    seen = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        seen.append([key for key, _ in found])
        return dict(found)

    try:
        record = json.loads(content.decode(), object_pairs_hook=pairs)
        if seen[-1].count("text") > 1:
            return None
        record["text"].encode()
    except (ValueError, LookupError, AttributeError, TypeError):
        return None
    text: str = record["text"]
    return text


def check_scanner(content: bytes, block_bytes: int) -> None:
    expected = reference(content)
    try:
        found = "".join(scan_text(blocks(content, block_bytes), "text"))
    except ValueError:
        assert expected is None
    else:
        assert found == expected


@given(json_objects(), st.integers(1, 40))
@example(b'{"a": [{"text": "no"}], "text": "\\ud83d\\ude00\\\\"}', 7)
@example(b'{"te\\u0078t": "yes"}', 3)
@example(b'{"text": "one", "text": "two"}', 3)
@example(b'{"texts": "one", "tex": 1}', 3)
@example(b'{"text": "\\\\ud83d"}', 1)
@example(b'{"text": "\\ud83d\\u0041"}', 1)
@example(b'{"a": "\\ud83d", "text": ""}', 1)
def test_scanned_text_is_what_json_loads(content: bytes, size: int) -> None:
    check_scanner(content, size)


FAULTS = [b"", *(bytes([byte]) for byte in b'{}[]",:\\0-1eEtNu\x00\x1f\xff\xc3')]


@given(json_objects(), st.data(), st.sampled_from(FAULTS), st.booleans())
def test_scanner_accepts_what_json_accepts(
    content: bytes, data: st.DataObject, fault: bytes, insert: bool
) -> None:
    i = data.draw(st.integers(0, len(content)))
    check_scanner(content[:i] + fault + content[i + (not insert) :], block_bytes=5)


LINES = [
    b'{"text": "one"}',
    b'{"text": "\xc3\xa9 is longer than the limit for lines", "n": 1}\r',
    b"",
    b" \t\r",
    b'{"n": 2}',
    b'{"text": "x',
    b'{"n": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "text": null}',
]


@given(
    st.lists(st.sampled_from(LINES), max_size=12),
    st.booleans(),
    st.booleans(),
    st.integers(1, 90),
    st.sampled_from([16, 40, 1000]),
)
def test_each_line_belongs_to_one_chunk(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    mark: bool,
    newline: bool,
    chunk_bytes: int,
    long_line_bytes: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(mark * b"\xef\xbb\xbf" + b"\n".join(lines) + newline * b"\n")
    expected: list[str | int] = []
    for number, line in enumerate(lines, start=1):
        text = reference(line)
        if text is not None or line.strip():
            expected.append(number if text is None else text)
    reading = Reading((str(path),))
    found: list[str | int] = []
    for chunk in plan_chunks(reading, chunk_bytes):
        assert chunk.stop - chunk.start == chunk.size <= chunk_bytes
        for document in joined(
            read_json_lines(chunk.path, "text", chunk.start, chunk.stop, long_line_bytes)
        ):
            place = re.match(r"invalid: \S*/lines\.jsonl:(\d+): ", document)
            found.append(int(place[1]) if place else document)
    assert found == expected


LONG = LONG_LINE_BYTES

BAD_LONG_LINES = [
    (b'", "n": 1', r"broken JSON at byte 4,194,324 of the line: expected ',' or '}'"),
    (b'", "n": 01}', r"broken JSON at byte 4,194,322 of the line: expected a value"),
    (b'"} 1', r"broken JSON at byte 4,194,317 of the line: extra data"),
    (b"\t", r"broken JSON at byte 4,194,314 of the line: Invalid control character at"),
    (b"\xc3(", r"not valid UTF-8: byte 0xc3 at byte offset 4194330 "),
    (b'\\ud83d!"}', r"'text' holds the lone surrogate '\\ud83d' at character 4194304"),
    (b'", "text": ""}', r"the key 'text' occurs twice in one object"),
]


def test_invalid_lines_too_long_to_parse(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = b'{"text": "good"}\n'
    for end, message in BAD_LONG_LINES:
        path.write_bytes(good + b'{"text":"' + b"a" * LONG + end + b"\n" + good)
        first, problem, last = joined(read_json_lines(str(path), "text"))
        assert (first, last) == ("good", "good")
        assert re.search(rf"x\.jsonl:2: {message}", problem), problem


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "expected a JSON object, found list"),
        (b'{"a": 1, "b": 2}', "no key 'text'; its keys are: 'a', 'b'"),
        (b'{"text": null}', "'text' must hold a string, found NoneType"),
        (b'{"text": 3}', "'text' must hold a string, found a number"),
        (
            b'{"text": "' + b"\\u00e9" * 9,
            "broken JSON at byte 65 of the line: the string has no end",
        ),
        (b'{"n": ' + b"[" * 1001, "broken JSON at byte 1,008 of the line: nested too deeply"),
        (b'{"n": ' + b"1" * 9999 + b"}", "broken JSON at byte 7 of the line: a number of more"),
        (b"{1: 2}", "broken JSON at byte 2 of the line: expected a key in double quotes"),
    ],
)
def test_invalid_objects_for_the_scanner(line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        list(scan_text(blocks(line, 7), "text"))


def test_what_only_json_takes_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a", "score": NaN, "half": "\\ud83d", "huge": 1e999}\n')
    assert joined(read_json_lines(str(path), "text")) == ["a"]


def test_chunks_of_compressed_files_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000))
    reading = Reading((str(path),))
    size = path.stat().st_size
    (chunk,) = plan_chunks(reading, chunk_bytes=16)
    assert chunk == Chunk(0, "json_lines", str(path), 0, size, size)
    assert joined(read_chunk(chunk, reading)) == ["a"] * 1000
