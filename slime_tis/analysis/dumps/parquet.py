"""A `TokenTable` as a parquet file: one row per sample, list columns for its tokens.

docs/dumps.md lists the columns. Files are written and read in row groups, so they may be larger than memory.
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
"""Version of the columns and their meaning; a file of a later version is refused."""
KEY = b"slime_tis"
"""Key of the file's metadata whose value is {"schema_version", "metadata", "experts_shape"} as JSON."""
ROW_GROUP_BYTES = 1 << 26
"""Decoded bytes of a row group and of each batch that is read, at least one sample; about a million tokens."""
MAX_GROUP_BYTES, MAX_EXPANSION = 1 << 30, 32
"""A row group may take this many bytes in memory, or this many times the size of its file, whichever is larger."""
SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.from_numpy_dtype(dtype), name == "reward") for name, dtype in SAMPLE_COLUMNS.items()),
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in TEXT_COLUMNS),
        *(pa.field(name, pa.large_list(pa.from_numpy_dtype(dtype)), False) for name, dtype in TOKEN_COLUMNS.items()),
        pa.field("prompt", pa.large_list(pa.int32()), False),
    ]
)
"""Types that columns are converted to when they are read."""


def write_parquet(path: str | Path, table: TokenTable) -> None:
    """Writes a table without its None columns; the file appears when it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = [0, 0] if table.experts is None else list(table.experts.shape[1:])
    header = {"schema_version": SCHEMA_VERSION, "metadata": dict(table.metadata), "experts_shape": shape}
    groups = [_to_arrow(table.select(samples)) for samples in _row_groups(table)]
    schema = groups[0].schema.with_metadata({KEY: json.dumps(header)})
    with atomic_path(path) as partial, parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
        for group in groups:
            writer.write_table(group.replace_schema_metadata(schema.metadata))


def is_own_parquet(path: Path) -> bool:
    """Whether `write_parquet` wrote a parquet file, in any version."""
    return KEY in (parquet.read_schema(path).metadata or {})


def parquet_tables(path: str | Path) -> Iterator[TokenTable]:
    """The tables of a file's row groups, one after another.

    Raises:
        ValueError: the file has another form or a later version, or is damaged; names the file.
    """
    try:
        names = parquet.read_schema(path)
        header = _header(names)
        schema = pa.schema([item for item in SCHEMA if item.name in names.names])
        for batch in batches(Path(path), schema.names):
            yield _from_arrow(batch.select(schema.names).cast(schema), header)
    except (pa.ArrowException, OSError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def batches(path: Path, names: Sequence[str], value_bytes: int = 4) -> Iterator[Any]:
    """The row groups of a file in batches of about ROW_GROUP_BYTES after decoding.

    Text columns are dictionaries, so a text that many rows repeat takes memory once.

    Args:
        path: The file.
        names: Columns to read.
        value_bytes: Memory per number.

    Raises:
        ValueError: a row group needs far more memory than its file has bytes.
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
    """Names of the text columns of a parquet file, without lists of text."""
    schema = parquet.read_metadata(path).schema
    return {column.path for column in schema if column.physical_type == "BYTE_ARRAY"}


def texts(column: Any) -> list[str | None]:
    """The texts of a dictionary column; equal texts are one object."""
    known = column.dictionary.to_pylist()
    return [None if index is None else known[index] for index in column.indices.to_pylist()]


def _header(schema: Any) -> dict[str, Any]:
    """The value of KEY.

    Raises:
        ValueError: it is damaged or of a later version, or a column is missing.
    """
    value = (schema.metadata or {}).get(KEY, b"")
    try:
        header = dict(json.loads(value))
        if header["schema_version"] <= SCHEMA_VERSION:
            layers, k = header["experts_shape"]
            if not (isinstance(header["metadata"], dict) and 0 <= layers < 2**15 and 0 <= k < 2**15):
                raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"damaged metadata {quoted(value)}.") from None
    if header["schema_version"] > SCHEMA_VERSION:
        raise ValueError(f"schema version {header['schema_version']} is newer than {SCHEMA_VERSION}; update slime_tis.")
    if missing := [name for name in REQUIRED_COLUMNS if name not in schema.names]:
        raise ValueError(f"no column {', '.join(missing)}.")
    return header


def _row_groups(table: TokenTable) -> list[Column]:
    """Consecutive samples of about ROW_GROUP_BYTES each."""
    group_S = table.offsets[:-1] * (table.nbytes // max(table.tokens, 1)) // ROW_GROUP_BYTES
    return np.split(np.arange(len(table)), np.flatnonzero(np.diff(group_S)) + 1)


def _to_arrow(table: TokenTable) -> Any:
    columns: dict[str, Any] = {}
    for item in SCHEMA:
        if (column := getattr(table, item.name)) is None:
            continue
        if item.name in TEXT_COLUMNS:  # a lone surrogate, which a tokenizer may return, is not UTF-8
            columns[item.name] = pa.array([text.encode("utf-8", "replace").decode() for text in column], pa.string())
        elif item.name in TOKEN_COLUMNS:
            offsets = table.offsets * int(np.prod(column.shape[1:], dtype=np.int64))
            columns[item.name] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(column.reshape(-1)))
        else:
            columns[item.name] = pa.array(list(column) if item.name == "prompt" else column, item.type)
    return pa.table(columns)


def _from_arrow(batch: Any, header: dict[str, Any]) -> TokenTable:
    lengths = batch["rollout_log_prob"].value_lengths().to_numpy()
    columns: dict[str, Any] = {}
    for name in batch.schema.names:
        column = batch[name]
        if name in TEXT_COLUMNS:
            columns[name] = tuple(text or "" for text in texts(column))
        elif name in SAMPLE_COLUMNS:
            columns[name] = column.to_numpy(zero_copy_only=False)
        else:
            counts, values = column.value_lengths().to_numpy(), column.flatten().to_numpy(zero_copy_only=False)
            shape = header["experts_shape"] if name == "experts" else ()
            if name == "prompt":
                columns[name] = tuple(np.split(values, np.cumsum(counts)[:-1])) if len(batch) else ()
            elif np.array_equal(counts, lengths * int(np.prod(shape, dtype=np.int64))):
                columns[name] = values.reshape(int(lengths.sum()), *shape)
            else:
                raise ValueError(f"{name} and rollout_log_prob differ in length.")
    return TokenTable(offsets=offsets_of(lengths), **columns, metadata=header["metadata"])
