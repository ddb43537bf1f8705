from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources import Invalid, Reading, plan_chunks, read_chunk, read_documents

Write = Callable[[pa.Table, Path, int], None]

TEXTS = [f"document {i} " * (i % 7) for i in range(100)]


def write_parquet(table: pa.Table, path: Path, rows: int) -> None:
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=rows)


def write_arrow_file(table: pa.Table, path: Path, rows: int) -> None:
    with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_arrow_stream(table: pa.Table, path: Path, rows: int) -> None:
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


KINDS = [write_parquet, write_arrow_file, write_arrow_stream]


def read(folder: Path, chunk_bytes: int = 1 << 26) -> tuple[list[str], list[str]]:
    """Documents and problems of all chunks."""
    texts, problems = [], []
    reading = Reading((str(folder),))
    for chunk in plan_chunks(reading, chunk_bytes):
        for item in read_chunk(chunk, reading):
            if isinstance(item, Invalid):
                problems.append(str(item.problem))
            else:
                texts.append(item.text)
    return texts, problems


@pytest.mark.parametrize("write", KINDS)
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_rows_are_documents(tmp_path: Path, write: Write, kind: pa.DataType) -> None:
    table = pa.table({"n": range(100), "text": pa.array(TEXTS).cast(kind)})
    write(table, tmp_path / "x", 9)
    assert read(tmp_path) == (TEXTS, [])
    # Nine rows at a time are 12 parts.
    chunks = plan_chunks(Reading((str(tmp_path),)), chunk_bytes=1)
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(i, i + 1) for i in range(12)]
    (file,) = tmp_path.iterdir()
    assert sum(chunk.size for chunk in chunks) == file.stat().st_size
    few = plan_chunks(Reading((str(tmp_path),)), chunk_bytes=file.stat().st_size // 3)
    assert 2 <= len(few) <= 3
    assert read(tmp_path, chunk_bytes=1) == (TEXTS, [])


@pytest.mark.parametrize("write", KINDS)
@pytest.mark.parametrize(("rows", "chunk_bytes"), [(2, 1), (2, 1 << 20), (5, 1)])
def test_nulls_and_broken_unicode_are_invalid_documents(
    tmp_path: Path, write: Write, rows: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.columnar._MAXIMUM_BATCH_ROWS", 2)
    # Arrow takes any bytes for a string where told to.
    binary = pa.array([b"a", None, b"\xff", b"\xc3\xa9", b""], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 5, binary.buffers())
    write(pa.table({"text": text}), tmp_path / "x", rows)
    texts, problems = read(tmp_path, chunk_bytes)
    assert texts == ["a", "\u00e9", ""]
    (file,) = tmp_path.iterdir()
    assert problems == [
        f"{file}: row 2: 'text' must hold a string, found null",
        f"{file}: row 3: not valid UTF-8: invalid start byte",
    ]


@pytest.mark.parametrize("write", KINDS)
def test_tables_without_the_text(tmp_path: Path, write: Write) -> None:
    write(pa.table({"content": ["a"], "n": [1]}), tmp_path / "x", 1)
    with pytest.raises(
        ValueError, match=r"x\.\w+: expected one column 'text'; its columns are: 'content', 'n'$"
    ):
        read(tmp_path)
    write(pa.table({"text": [1]}), tmp_path / "x", 1)
    with pytest.raises(ValueError, match=r"x\.\w+: column 'text' must hold strings, found int64$"):
        read(tmp_path)


@pytest.mark.parametrize("write", KINDS)
@pytest.mark.parametrize("keep", [0, 0.3, 0.95])
def test_cut_files(tmp_path: Path, write: Write, keep: float) -> None:
    write(pa.table({"text": TEXTS}), tmp_path / "x", 9)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=rf"{file.name}: damaged or not a {file.suffix[1:]} file"):
        read(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_files_of_another_kind(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x.{suffix}").write_bytes(b"plain text, whatever the name says" * 10)
    with pytest.raises(ValueError, match=rf"x\.{suffix}: damaged or not a {suffix} file: "):
        read(tmp_path)


@pytest.mark.parametrize("write", KINDS)
def test_text_inside_a_column_is_not_a_column(tmp_path: Path, write: Write) -> None:
    nested = pa.array([{"text": "inner"}], pa.struct([("text", pa.string())]))
    write(pa.table({"a": nested, "text": ["outer"]}), tmp_path / "x", 1)
    assert read(tmp_path) == (["outer"], [])


@pytest.mark.slow
def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
    folder = tmp_path / "folder"
    folder.mkdir()
    write_parquet(pa.table({"text": [*TEXTS, None]}), folder / "train", 9)
    write_parquet(pa.table({"text": ["held out"]}), folder / "test", 9)
    for streaming in (False, True):
        reading = Reading((f"hf:{folder}",), streaming=streaming)
        problems: list[ValueError] = []
        assert list(read_documents(reading, problems.append)) == TEXTS
        assert ["row 101: 'text' must hold a string" in str(p) for p in problems] == [True]
        test = Reading((f"hf:{folder}",), split="test", streaming=streaming)
        assert list(read_documents(test)) == ["held out"]
        with pytest.raises(ValueError, match="expected one column 'body'; its columns are: 'text'"):
            plan_chunks(Reading((f"hf:{folder}",), text_key="body", streaming=streaming))
        for name, reason in ((folder, "nope"), (f"{folder}:french", "french")):
            with pytest.raises(ValueError, match=f"hf:{name}, split 'nope': .*{reason}"):
                plan_chunks(Reading((f"hf:{name}",), split="nope", streaming=streaming))
    with pytest.raises(ValueError, match="is read already by source 'hf:"):
        plan_chunks(Reading((f"hf:{folder}", f"hf:{folder}")))
    rows = Reading((f"hf:{folder}",))
    chunks = plan_chunks(rows, chunk_bytes=100)
    assert len(chunks) > 5
    documents = [item for chunk in chunks for item in read_chunk(chunk, rows)]
    assert [item.text for item in documents if not isinstance(item, Invalid)] == TEXTS


@pytest.mark.slow
def test_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    train = datasets.Dataset.from_dict({"text": TEXTS})
    train.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.load_from_disk(tmp_path / "one").map(lambda row: {"text": "changed"})
    assert len(list((tmp_path / "one").glob("cache-*.arrow"))) > 0, "the library cached nothing"
    test = datasets.Dataset.from_dict({"text": ["held out"]})
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "two")

    def documents(source: str, split: str = "train") -> list[str]:
        return list(read_documents(Reading((source,), split=split)))

    one, two = tmp_path / "one", tmp_path / "two"
    assert documents(f"{one}") == documents(f"hf:{one}") == TEXTS
    assert documents(f"{two}/train") == documents(f"hf:{two}") == TEXTS
    assert documents(f"{two}/test") == documents(f"hf:{two}", "test") == ["held out"]
    with pytest.raises(ValueError, match="two: a dataset with the splits train, test: give one of"):
        documents(f"{two}")
    with pytest.raises(ValueError, match=r"hf:.*two: no split 'nope'; its splits are: train, test"):
        documents(f"hf:{two}", "nope")
