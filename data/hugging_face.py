"""Datasets as the `datasets` library loads them, and the folders it saves them in.

The library is imported where it is used: that takes seconds.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.columnar import check_column, table_documents
from data.pieces import Invalid, Piece

HF = "hf:"

_BATCH_ROWS = 1000


def saved_dataset(source: str, split: str) -> Path | None:
    """The folder of one split, if hf:FOLDER was written by `datasets.save_to_disk`, which
    `load_dataset` does not read; None if it was not.

    Raises ValueError if it has no such split.
    """
    folder = Path(source.removeprefix(HF))
    if (folder / "state.json").is_file():
        saved = json.loads((folder / "state.json").read_bytes()).get("_split")
        splits = [saved or split]
    elif (folder / "dataset_dict.json").is_file():
        splits = _saved_splits(folder)
        folder /= split
    else:
        return None
    if split not in splits:
        raise ValueError(f"{source}: no split {split!r}; its splits are: {', '.join(splits)}")
    return folder


def drop_unsaved(files: Sequence[Path], root: Path) -> list[Path]:
    """Leaves out what a saved dataset's folder holds beside it: results that `map` has cached.

    Raises ValueError if several splits of one dataset would be read as one.
    """
    saved: dict[Path, set[str] | None] = {}
    kept = []
    for path in files:
        folder = path.parent
        if path.suffix == ".arrow" and folder not in saved:
            saved[folder] = _saved_names(folder)
            whole = folder.parent
            if folder != root and (whole / "dataset_dict.json").is_file():
                raise ValueError(
                    f"{whole}: a dataset with the splits {', '.join(_saved_splits(whole))}: give "
                    f"one of them, as {folder}, or as {HF}{whole} with the split"
                )
        names = saved.get(folder)
        if path.suffix != ".arrow" or names is None or path.name in names:
            kept.append(path)
    return kept


def _saved_splits(folder: Path) -> list[str]:
    splits: list[str] = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
    return splits


def _saved_names(folder: Path) -> set[str] | None:
    try:
        state = json.loads((folder / "state.json").read_bytes())
    except FileNotFoundError:
        return None
    return {file["filename"] for file in state["_data_files"]}


@functools.lru_cache(maxsize=1)
def _dataset(source: str, split: str, streaming: bool) -> Any:
    """Loaded once in each worker, as its chunks of one source follow one another."""
    import datasets

    name, _, config = source.removeprefix(HF).partition(":")
    with _named(f"{source}, split {split!r}"):
        return datasets.load_dataset(name, config or None, split=split, streaming=streaming)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Turns any failure of the library, which has no common class for those of the network, of
    parsers and of file systems, into a ValueError that tells its first cause."""
    try:
        yield
    except Exception as problem:
        cause: BaseException = problem
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise ValueError(f"{where}: {reason}") from None


def plan_dataset(
    source: str, text_key: str, split: str, streaming: bool, chunk_bytes: int
) -> list[tuple[int, int, int]]:
    """(start, stop, bytes) of each chunk: of rows, or with `streaming` of the dataset's shards,
    whose bytes are not known: 0.

    Raises ValueError if it cannot be loaded or has no such column.
    """
    dataset = _dataset(source, split, streaming)
    if streaming:
        for table in itertools.islice(_tables(dataset, 1, source), 1):
            check_column(table.schema, text_key, source)
        return [(shard, shard + 1, 0) for shard in range(dataset.num_shards)]
    check_column(dataset.data.schema, text_key, source)
    rows = len(dataset)
    size = dataset.data.nbytes
    chunks = max(1, min(rows, size // chunk_bytes))
    bounds = [rows * chunk // chunks for chunk in range(chunks + 1)]
    sizes = [size * bound // max(1, rows) for bound in bounds]
    return [(bounds[i], bounds[i + 1], sizes[i + 1] - sizes[i]) for i in range(chunks) if rows]


def read_dataset(
    source: str, text_key: str, split: str, streaming: bool, start: int, stop: int
) -> Iterator[Piece | Invalid]:
    """The documents of the rows or shards from `start` to `stop`, exclusive."""
    dataset = _dataset(source, split, streaming)
    where = f"{source}, split {split!r}"
    row = 0 if streaming else start
    if streaming:
        where += f", shard {start:,}"
        part = dataset.shard(num_shards=dataset.num_shards, index=start, contiguous=True)
    else:
        part = dataset.select(range(start, stop))
    for table in _tables(part, _BATCH_ROWS, where):
        for column in table.column(text_key).chunks:
            yield from table_documents(column, where, row, text_key)
            row += len(column)


def _tables(dataset: Any, rows: int, where: str) -> Iterator[pa.Table]:
    with _named(where):
        yield from dataset.with_format("arrow").iter(batch_size=rows)
