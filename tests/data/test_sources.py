from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from data.sources import Reading, read_documents, source_files

LINES = b'{"text": "one\\r\\n"}\r\n\n{"text": "\xc3\xa9\xf0\x9f\x98\x80", "id": 1}\n{"text": ""}'
TEXTS = ["one\r\n", "\u00e9\U0001f600", ""]


def read(*sources: Path | str, **options: Any) -> list[str]:
    return list(read_documents(Reading(tuple(map(str, sources))), **options))


def test_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_bytes(b"\xef\xbb\xbf\xef\xbb\xbftwo marks\r\n\r")
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(LINES) + gzip.compress(b"\n" + LINES))
    frames = zstandard.compress(LINES) + zstandard.compress(b"\n" + LINES)
    (tmp_path / "e.jsonl.zst").write_bytes(frames)
    (tmp_path / "ignored.md").write_text("no")
    folder = ["\ufefftwo marks\r\n\r", *TEXTS * 5]
    assert read(tmp_path) == folder
    assert read(tmp_path / "c.jsonl", tmp_path / "b") == [*TEXTS, folder[0]]


def test_zstd_larger_than_a_block(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + i * i % 20_000) for i in range(400_000))
    lines = "".join(json.dumps({"text": part}) + "\n" for part in (text, text[:10]))
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    assert read(tmp_path) == [text, text[:10]]


def test_python_stdlib() -> None:
    names = {path.name for path in source_files("python-stdlib")}
    assert {"argparse.py", "typing.py"} <= names
    assert not any("site-packages" in path.parts for path in source_files("python-stdlib"))
    assert sum(len(text) for text in read("python-stdlib")) > 5_000_000


BAD_LINES = [
    (b'{"text": ', r"x\.jsonl:2: broken JSON at column 10: "),
    (b'{"text": "a"} b', r"x\.jsonl:2: broken JSON at column 15: "),
    (b'{"title": "a", "n": 1}', r"x\.jsonl:2: no key 'text'; its keys are: 'title', 'n'"),
    (b'{"text": 3}', r"x\.jsonl:2: 'text' must hold a string, found int \(3\)"),
    (b'{"text": null}', r"x\.jsonl:2: 'text' must hold a string, found NoneType"),
    (b'["text"]', r"x\.jsonl:2: expected a JSON object, found list"),
    (b'{"text": "\xe9t\xe9"}', r"x\.jsonl:2: not valid UTF-8: byte 0xe9 at byte offset 27"),
    (b'{"text": "\\ud83d"}', r"x\.jsonl:2: 'text' holds the lone surrogate '\\ud83d'"),
    (b"[" * 100_000, r"x\.jsonl:2: broken JSON: nested too deeply"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_invalid_lines_are_named_or_counted(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(ValueError, match=message):
        read(path)
    problems: list[ValueError] = []
    assert read(path, on_invalid=problems.append) == ["good", "last"]
    assert len(problems) == 1


def test_invalid_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc\xff")
    (tmp_path / "b.txt").write_bytes("utf-16".encode("utf-16"))
    with pytest.raises(ValueError, match=r"a\.txt: not valid UTF-8: byte 0xff at byte offset 6 "):
        read(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"b\.txt: .* at byte offset 0 "):
        read(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_text("good")
    problems: list[ValueError] = []
    assert read(tmp_path, on_invalid=problems.append) == ["good"]
    assert len(problems) == 2


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("cut", [-1, -9, 20])
def test_cut_compressed_files(tmp_path: Path, suffix: str, cut: int) -> None:
    compress = gzip.compress if suffix == "gz" else zstandard.compress
    path = tmp_path / f"x.jsonl.{suffix}"
    path.write_bytes(compress(LINES * 50)[:cut])
    with pytest.raises(ValueError, match=rf"x\.jsonl\.{suffix}: truncated or damaged"):
        read(path, on_invalid=lambda problem: None)
    path.write_bytes(b"plain text, whatever the name says")
    with pytest.raises(ValueError, match=rf"x\.jsonl\.{suffix}: truncated or damaged"):
        read(path)


def test_sources_that_match_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.txt' does not exist"):
        read(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="holds no file ending in"):
        read(tmp_path)
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"expected files ending in .*, found .*x\.csv"):
        read(tmp_path / "x.csv")
