from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard

from data.sources import (
    Reading,
    plan_chunks,
    read_chunk,
    read_documents,
    source_files,
)

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
@pytest.mark.parametrize("cut", [-1, -9, 20, 0])
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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Every file's text is its path; .jsonl lines in folders of two depths, and hidden ones."""
    for name in (
        "a.jsonl",
        "b/a.jsonl",
        "b/c/a.jsonl",
        "b/c/b.jsonl",
        "b/c/b.txt",
        "b/c/note.md",
        ".d/a.jsonl",
        "b/.a.jsonl",
        "e [1].jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name.endswith(".jsonl") else name)
    return tmp_path


PATTERNS = {
    "*.jsonl": ["a.jsonl", "e [1].jsonl"],
    "**/*.jsonl": ["a.jsonl", "b/a.jsonl", "b/c/a.jsonl", "b/c/b.jsonl", "e [1].jsonl"],
    "b/**/*.jsonl": ["b/a.jsonl", "b/c/a.jsonl", "b/c/b.jsonl"],
    "b/**/b.*t": ["b/c/b.txt"],
    "**/c/[ab].jsonl": ["b/c/a.jsonl", "b/c/b.jsonl"],
    "?/c/**/**/a.jsonl": ["b/c/a.jsonl"],
    "*/.a.jsonl": ["b/.a.jsonl"],
    "*/.*.jsonl": ["b/.a.jsonl"],
    "e [1].jsonl": ["e [1].jsonl"],
    "b/c": ["b/c/a.jsonl", "b/c/b.jsonl", "b/c/b.txt"],
    ".": ["a.jsonl", "b/a.jsonl", "b/c/a.jsonl", "b/c/b.jsonl", "b/c/b.txt", "e [1].jsonl"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_and_folders(tree: Path, pattern: str) -> None:
    assert read(tree / pattern) == PATTERNS[pattern]


def test_patterns_that_go_wrong(tree: Path) -> None:
    for pattern in ("**/*.parquet", "nowhere/*.jsonl", "b/*/*/*.jsonl", "?"):
        with pytest.raises(ValueError, match=re.escape(f"{pattern}': the pattern matches no file")):
            read(tree / pattern)
    with pytest.raises(ValueError, match=r"expected files ending in .*, found .*b/c/note\.md"):
        read(tree / "**/c/**")


def test_a_file_is_read_once(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"b/a\.jsonl is read already by source '.*/b'"):
        read(tree / "b", tree / "**/a.jsonl")
    (tree / "f.jsonl").symlink_to(tree / "a.jsonl")
    with pytest.raises(ValueError, match=r"/a\.jsonl is read already by source '.*\*\.jsonl'"):
        read(tree / "*.jsonl")


def test_links(tree: Path) -> None:
    outside = tree / "b" / "c"
    inside = tree / "links"
    inside.mkdir()
    (inside / "to_folder").symlink_to(outside)
    assert read(inside) == read(inside / "**/[ab].*") == ["b/c/a.jsonl", "b/c/b.jsonl", "b/c/b.txt"]
    (inside / "up").symlink_to(tree)
    for source in (inside, inside / "**/*.jsonl"):
        with pytest.raises(
            ValueError, match=r"links(/up/links)?: a symbolic link to a folder that"
        ):
            read(source)
    (inside / "up").unlink()
    (inside / "gone.txt").symlink_to(tree / "nothing.txt")
    with pytest.raises(FileNotFoundError, match=r"links/gone\.txt"):
        read(inside)


def test_unreadable_files(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not hold for root, as whom tests may run.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "b.txt")
    with pytest.raises(PermissionError, match=r"b\.txt"):
        plan_chunks(Reading((str(tree),)))


def test_plan_groups_small_texts_and_skips_empty_files(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("t" * 10 * i)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "more.jsonl").write_text('{"text": "m"}')
    reading = Reading((str(tmp_path),))
    chunks = plan_chunks(reading, chunk_bytes=64 * 100)
    # Of 0, 10, 20, ... 90 bytes; never above 100 together: 0 + 10 + 20 + 30 + 40, then each alone.
    # An empty text is a document, to be counted as such; a file without lines holds none.
    assert [(chunk.size, 1 + len(chunk.others)) for chunk in chunks] == [
        (100, 5),
        *((size, 1) for size in (50, 60, 70, 80, 90, 13)),
    ]
    texts = [item.text for chunk in chunks for item in read_chunk(chunk, reading)]  # type: ignore[union-attr]
    assert texts == ["t" * 10 * i for i in range(10)] + ["m"]
