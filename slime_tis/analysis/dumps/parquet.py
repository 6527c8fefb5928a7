"""A `TokenTable` as a parquet file: one row per sample, list columns for its tokens.

The schema is that of docs/dumps.md. A file is written one row group at a time and read in parts of about as many
bytes, so that it may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    cast,
    offsets_of,
)
from slime_tis.errors import first_line, quoted
from slime_tis.files import atomic_path

SCHEMA_VERSION = 1
"""Of the columns and their meaning; a file of a later version is refused."""
KEY = b"slime_tis"
"""Key of the file's metadata whose value is {"schema_version", "metadata", "experts_shape"} as JSON."""
ROW_GROUP_BYTES = 1 << 26
"""Bytes of a row group and of what is read at a time, before compression: a million tokens without experts. One sample
at least."""


def write_parquet(path: str | Path, table: TokenTable) -> None:
    """Writes a table to a file that appears when it is complete.

    Args:
        path: of the file; directories are made where missing.
        table: to write; columns that are None are left out.

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
    """Whether a parquet file was written by `write_parquet`, of whatever version."""
    return KEY in (parquet.read_schema(path).metadata or {})


def parquet_tables(path: str | Path) -> Iterator[TokenTable]:
    """The tables of a file's row groups, one after another.

    Raises:
        ValueError: the file is of another form or a later version, or damaged; names the file and the row group.
    """
    place, group = str(path), 0
    try:
        with parquet.ParquetFile(path) as file:
            described = _description(file.schema_arrow, place)
            for group in range(file.num_row_groups):
                yield from (_table(part, described) for part in _parts(file, group))
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise ValueError(f"{place}, row group {group} cannot be read: {first_line(error)}.") from error
    except ValueError as error:
        raise ValueError(str(error) if place in str(error) else f"{place}, row group {group}: {error}") from error


def _description(schema: Any, place: str) -> dict[str, Any]:
    found = (schema.metadata or {}).get(KEY)
    if found is None:
        raise ValueError(f"{place} is parquet, but of another program.")
    described = json.loads(found)
    if not isinstance(described, dict) or not isinstance(described.get("schema_version"), int):
        raise ValueError(f"{place} has damaged metadata: {quoted(found)}.")
    if described["schema_version"] > SCHEMA_VERSION:
        raise ValueError(
            f"{place} has schema version {described['schema_version']} but this program reads up to {SCHEMA_VERSION}; "
            "update slime_tis."
        )
    missing = [name for name in REQUIRED_COLUMNS if name not in schema.names]
    if missing:
        raise ValueError(f"{place} has no column {', '.join(missing)}.")
    return described


def _parts(file: Any, group: int) -> Iterator[Any]:
    """A row group in parts of about ROW_GROUP_BYTES, by the numbers that its metadata announces."""
    described = file.metadata.row_group(group)
    size = sum(4 * described.column(i).num_values for i in range(described.num_columns))
    if size <= 2 * ROW_GROUP_BYTES or described.num_rows < 2:
        yield file.read_row_group(group)
        return
    rows = max(described.num_rows * ROW_GROUP_BYTES // size, 1)
    for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
        yield pa.Table.from_batches([batch])


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


def _table(group: Any, described: dict[str, Any]) -> TokenTable:
    columns: dict[str, Any] = {}
    lengths = _lengths(group, "rollout_log_prob")
    for name, dtype in TOKEN_COLUMNS.items():
        if name in group.column_names:
            shape = tuple(described["experts_shape"]) if name == "experts" else ()
            width = int(np.prod(shape, dtype=np.int64))
            if not np.array_equal(_lengths(group, name), lengths * width):
                raise ValueError(f"{name} and rollout_log_prob differ in length.")
            columns[name] = (
                _values(group, name, dtype).reshape(-1, *shape)
                if width
                else np.zeros((int(lengths.sum()), *shape), dtype)
            )
    for name, dtype in SAMPLE_COLUMNS.items():
        if name in group.column_names:
            columns[name] = cast(group[name].to_numpy(), dtype, name)
    for name in TEXT_COLUMNS:
        if name in group.column_names:
            columns[name] = tuple("" if text is None else str(text) for text in group[name].to_pylist())
    if "prompt" in group.column_names:
        columns["prompt"] = _values(group, "prompt", np.int32)
        columns["prompt_offsets"] = offsets_of(_lengths(group, "prompt"))
    return TokenTable(offsets=offsets_of(lengths), **columns, metadata=described["metadata"])


def _lengths(group: Any, name: str) -> Column:
    lists = group[name].combine_chunks()
    if lists.null_count:
        raise ValueError(f"{name} has a sample without a list.")
    lengths: Column = lists.value_lengths().to_numpy()
    return lengths


def _values(group: Any, name: str, dtype: type) -> Column:
    values: Column = group[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return cast(values, dtype, name)
