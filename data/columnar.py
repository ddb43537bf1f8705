"""Parquet and Arrow files: a table, the text in one of its columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.pieces import Invalid, Piece, cut

# Rows are turned into text in batches of about this many bytes.
_BATCH_BYTES = 1 << 22
_MAXIMUM_BATCH_ROWS = 4096

# Pages are read as they are needed, not a row group at once.
_READ_OPTIONS = {"buffer_size": 1 << 20, "pre_buffer": False, "page_checksum_verification": True}

_ARROW_FILE_MAGIC = b"ARROW1"


def parquet_groups(path: str, text_key: str) -> list[int]:
    """Bytes on disk of the text in each row group. Raises ValueError or OSError: see _named."""
    with _named(path), pq.ParquetFile(path) as file:
        check_column(file.schema_arrow, text_key, path)
        column = _parquet_column(file, text_key)
        return [
            file.metadata.row_group(group).column(column).total_compressed_size
            for group in range(file.num_row_groups)
        ]


def read_parquet(path: str, text_key: str, start: int, stop: int) -> Iterator[Piece | Invalid]:
    """The documents of the row groups start <= g < stop."""
    with _named(path), pq.ParquetFile(path, **_READ_OPTIONS) as file:
        column = _parquet_column(file, text_key)
        metadata = file.metadata
        row = sum(metadata.row_group(group).num_rows for group in range(start))
        for group in range(start, stop):
            rows = metadata.row_group(group).num_rows
            size = metadata.row_group(group).column(column).total_uncompressed_size
            for batch in file.iter_batches(
                batch_size=_batch_rows(size, rows),
                row_groups=[group],
                columns=[text_key],
                use_threads=False,
            ):
                yield from _documents(batch.column(0), path, row, text_key)
                row += len(batch)


def _parquet_column(file: pq.ParquetFile, text_key: str) -> int:
    return next(index for index, column in enumerate(file.schema) if column.path == text_key)


def arrow_batches(path: str, text_key: str) -> list[int]:
    """Rows of each record batch. Raises ValueError or OSError: see _named."""
    with _named(path), pa.memory_map(path) as mapped:
        with _arrow_reader(mapped) as reader:
            check_column(reader.schema, text_key, path)
        return [len(batch) for batch in _record_batches(mapped, text_key)]


def read_arrow(path: str, text_key: str, start: int, stop: int) -> Iterator[Piece | Invalid]:
    """The documents of the record batches start <= b < stop."""
    row = 0
    with _named(path), pa.memory_map(path) as mapped:
        for number, batch in enumerate(_record_batches(mapped, text_key)):
            if number >= stop:
                return
            if number >= start:
                yield from table_documents(batch.column(text_key), path, row, text_key)
            row += len(batch)


def table_documents(
    column: pa.Array, where: str, first_row: int, text_key: str
) -> Iterator[Piece | Invalid]:
    """The documents of a column of any size; rows are counted from `first_row` in messages."""
    rows = _batch_rows(column.nbytes, len(column))
    for start in range(0, len(column), rows):
        yield from _documents(column.slice(start, rows), where, first_row + start, text_key)


def _arrow_reader(mapped: pa.MemoryMappedFile, options: Any = None) -> Any:
    mapped.seek(0)
    magic = mapped.read(len(_ARROW_FILE_MAGIC))
    mapped.seek(0)
    open_reader = pa.ipc.open_file if magic == _ARROW_FILE_MAGIC else pa.ipc.open_stream
    return open_reader(mapped, options=options)


def _record_batches(mapped: pa.MemoryMappedFile, text_key: str) -> Iterator[pa.RecordBatch]:
    """All of a file, of which only the text is read; in a mapped file, not before it is used."""
    with _arrow_reader(mapped) as reader:
        column = reader.schema.get_field_index(text_key)
    options = pa.ipc.IpcReadOptions(included_fields=[column], use_threads=False)
    with _arrow_reader(mapped, options) as reader:
        if isinstance(reader, pa.RecordBatchFileReader):
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
        else:
            yield from reader


def _batch_rows(size: int, rows: int) -> int:
    return max(1, min(_MAXIMUM_BATCH_ROWS, _BATCH_BYTES * rows // max(1, size)))


def check_column(schema: pa.Schema, text_key: str, path: str) -> None:
    if schema.names.count(text_key) != 1:
        raise ValueError(
            f"{path}: expected one column {text_key!r}; its columns are: "
            f"{', '.join(map(repr, schema.names)) or 'none'}"
        )
    kind = schema.field(text_key).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    ):
        raise ValueError(f"{path}: column {text_key!r} must hold strings, found {kind}")


def _documents(
    column: pa.Array, where: str, first_row: int, text_key: str
) -> Iterator[Piece | Invalid]:
    try:
        texts = column.to_pylist()
    except UnicodeDecodeError:
        texts = [_decoded(value) for value in column]
    for row, text in enumerate(texts, start=first_row + 1):
        if isinstance(text, str):
            yield from cut(text)
        elif text is None:
            yield Invalid(
                ValueError(f"{where}: row {row:,}: {text_key!r} must hold a string, found null")
            )
        else:
            yield Invalid(ValueError(f"{where}: row {row:,}: not valid UTF-8: {text.reason}"))


def _decoded(value: pa.Scalar) -> str | UnicodeDecodeError | None:
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError as problem:
        return problem
    return text


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Turns the library's errors into one that names the file.

    Raises ValueError if the file is damaged, OSError if it cannot be read.
    """
    kind = Path(path).suffix[1:]
    try:
        yield
    except (pa.ArrowInvalid, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno is not None:
            raise  # of the system; the library's own about damaged content have no number
        reason = str(problem).splitlines()[0]
        raise ValueError(f"{path}: damaged or not a {kind} file: {reason}") from None
