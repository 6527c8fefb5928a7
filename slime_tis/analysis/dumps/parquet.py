"""A `TokenTable` as a parquet file: one row per sample, list columns for its tokens.

docs/dumps.md lists the columns. Files are written and read in row groups, so that they may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from slime_tis.analysis.dumps.table import (
    REQUIRED_COLUMNS,
    SAMPLE_COLUMNS,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    Column,
    TokenTable,
    offsets_of,
)
from slime_tis.errors import first_line, quoted
from slime_tis.files import atomic_path

SCHEMA_VERSION = 1
"""Of the columns and their meaning; a file of a later version is refused."""
KEY = b"slime_tis"
"""Key of the file's metadata whose value is {"schema_version", "metadata", "experts_shape"} as JSON."""
ROW_GROUP_BYTES = 1 << 26
"""Decoded bytes of a row group and of each part that is read, at least one sample: a million tokens without experts."""
MAX_GROUP_BYTES, MAX_EXPANSION = 1 << 30, 32
"""A row group may take this many bytes in memory, or this many times the size of its file, whichever is larger."""
SCHEMA = pa.schema(
    [
        *((name, pa.from_numpy_dtype(dtype)) for name, dtype in SAMPLE_COLUMNS.items()),
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in TEXT_COLUMNS),
        *((name, pa.large_list(pa.from_numpy_dtype(dtype))) for name, dtype in TOKEN_COLUMNS.items()),
        ("prompt", pa.large_list(pa.int32())),
    ]
)
"""Types that columns are converted to when they are read."""


def write_parquet(path: str | Path, table: TokenTable) -> None:
    """Writes a table to a file that appears when it is complete.

    Args:
        path: of the file; directories are made where missing.
        table: to write; columns that are None are skipped.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = [0, 0] if table.experts is None else list(table.experts.shape[1:])
    described = {"schema_version": SCHEMA_VERSION, "metadata": dict(table.metadata), "experts_shape": shape}
    groups = [_arrow(table.select(samples)) for samples in _row_groups(table)] if table.tokens else [_arrow(table)]
    schema = groups[0].schema.with_metadata({KEY: json.dumps(described)})
    with atomic_path(path) as partial, parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
        for group in groups:
            writer.write_table(group.replace_schema_metadata(schema.metadata))


def is_own_parquet(path: Path) -> bool:
    """Whether a parquet file was written by `write_parquet`; of any version."""
    return KEY in (parquet.read_schema(path).metadata or {})


def parquet_tables(path: str | Path) -> Iterator[TokenTable]:
    """The tables of a file's row groups, one after another.

    Raises:
        ValueError: the file is of another form or a later version, or damaged; names the file.
    """
    try:
        found = parquet.read_schema(path)
        described = _description(found)
        schema = pa.schema([item for item in SCHEMA if item.name in found.names])
        for batch in batches(Path(path), schema.names):
            yield _table(batch.select(schema.names).cast(schema), described)
    except (pa.ArrowException, OSError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def batches(path: Path, names: Sequence[str], value_bytes: int = 4) -> Iterator[Any]:
    """The row groups of a file in parts of about ROW_GROUP_BYTES after decoding.

    Columns of text are dictionaries, so that a text that many rows repeat takes memory once.

    Args:
        path: of the file.
        names: columns to read.
        value_bytes: memory that each number will take.

    Raises:
        ValueError: a row group would take far more memory than its file has bytes.
    """
    file_bytes = path.stat().st_size
    with parquet.ParquetFile(path, read_dictionary=[name for name in names if name in text_columns(path)]) as file:
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            chunks = [group.column(i) for i in range(group.num_columns)]
            chunks = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in names]
            size = sum(value_bytes * chunk.num_values for chunk in chunks)
            size += sum(chunk.total_uncompressed_size for chunk in chunks if chunk.physical_type == "BYTE_ARRAY")
            if size > max(MAX_GROUP_BYTES, MAX_EXPANSION * file_bytes):
                raise ValueError(f"row group {index} needs {size >> 20} MiB of memory; write smaller row groups.")
            if any("DELTA_BYTE_ARRAY" in chunk.encodings for chunk in chunks):
                raise ValueError("text has the encoding DELTA_BYTE_ARRAY, whose size is not bounded; write PLAIN.")
            if group.num_rows == 0:
                yield pa.RecordBatch.from_pylist([], file.schema_arrow)
            parts = 1 if size <= 2 * ROW_GROUP_BYTES else -(-size // ROW_GROUP_BYTES)
            yield from file.iter_batches(max(group.num_rows // parts, 1), row_groups=[index], columns=names)


def text_columns(path: Path) -> set[str]:
    """Names of the columns of text of a parquet file, without lists of text."""
    schema = parquet.read_metadata(path).schema
    return {column.path for column in schema if column.physical_type == "BYTE_ARRAY"}


def texts(column: Any) -> list[str | None]:
    """The texts of a dictionary column; equal ones are one object."""
    known = column.dictionary.to_pylist()
    return [None if index is None else known[index] for index in column.indices.to_pylist()]


def _description(schema: Any) -> dict[str, Any]:
    """The value of KEY.

    Raises:
        ValueError: it is damaged or of a later version, or a column is missing.
    """
    found = (schema.metadata or {}).get(KEY, b"")
    damaged = f"damaged metadata {quoted(found)}."
    try:
        described = dict(json.loads(found))
        later = described["schema_version"] > SCHEMA_VERSION
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(damaged) from None
    if later:
        raise ValueError(
            f"schema version {described['schema_version']} is newer than {SCHEMA_VERSION}; update slime_tis."
        )
    shape = described.get("experts_shape")
    if not isinstance(described.get("metadata"), dict) or not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(damaged)
    if not all(isinstance(size, int) and 0 <= size < 2**15 for size in shape):
        raise ValueError(damaged)
    missing = [name for name in REQUIRED_COLUMNS if name not in schema.names]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}.")
    return described


def _row_groups(table: TokenTable) -> Iterator[Column]:
    """Consecutive samples of about ROW_GROUP_BYTES each."""
    group_S = table.offsets[:-1] * (table.nbytes // table.tokens) // ROW_GROUP_BYTES
    yield from np.split(np.arange(len(table)), np.flatnonzero(np.diff(group_S)) + 1)


def _arrow(table: TokenTable) -> Any:
    columns: dict[str, Any] = {}
    for name in SAMPLE_COLUMNS:
        if (values := getattr(table, name)) is not None:
            columns[name] = pa.array(values)
    for name in TEXT_COLUMNS:
        if (texts := getattr(table, name)) is not None:
            # a lone surrogate, which a tokenizer may leave, is not UTF-8
            columns[name] = pa.array([text.encode("utf-8", "replace").decode() for text in texts], pa.string())
    if table.prompt is not None and table.prompt_offsets is not None:
        columns["prompt"] = _lists(table.prompt, table.prompt_offsets)
    for name in TOKEN_COLUMNS:
        if (column := getattr(table, name)) is None:
            continue
        width = int(np.prod(column.shape[1:], dtype=np.int64))
        columns[name] = _lists(column.reshape(-1), table.offsets * width)
    return pa.table(columns)


def _lists(values: Column, offsets: Column) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def _table(batch: Any, described: dict[str, Any]) -> TokenTable:
    columns: dict[str, Any] = {}
    lengths, _ = _lists_of(batch, "rollout_log_prob")
    for name in TOKEN_COLUMNS:
        if name not in batch.schema.names:
            continue
        shape = described["experts_shape"] if name == "experts" else ()
        counts, values = _lists_of(batch, name)
        if not np.array_equal(counts, lengths * int(np.prod(shape, dtype=np.int64))):
            raise ValueError(f"{name} and rollout_log_prob differ in length.")
        columns[name] = values.reshape(int(lengths.sum()), *shape)
    for name in batch.schema.names:
        if name in SAMPLE_COLUMNS:
            columns[name] = batch[name].to_numpy(zero_copy_only=False)
        elif name in TEXT_COLUMNS:
            columns[name] = tuple(text or "" for text in texts(batch[name]))
    if "prompt" in batch.schema.names:
        counts, columns["prompt"] = _lists_of(batch, "prompt")
        columns["prompt_offsets"] = offsets_of(counts)
    return TokenTable(offsets=offsets_of(lengths), **columns, metadata=described["metadata"])


def _lists_of(batch: Any, name: str) -> tuple[Column, Column]:
    """Lengths of the lists of a column, and their entries one after another."""
    if batch[name].null_count:
        raise ValueError(f"{name} has a sample without a list.")
    return batch[name].value_lengths().to_numpy(), batch[name].flatten().to_numpy(zero_copy_only=False)
