"""Dumps of this program: a `TokenTable` as parquet, or as a `.pt` file in slime's layout.

A parquet file has one row per sample and list columns for the tokens; docs/dumps.md lists the
columns. Files are written and read in row groups, so they may be larger than memory.

slime's `--save-debug-train-data` (THUDM/slime, slime/observability/train_data_utils.py,
format_version 2) saves {"format_version": 2, "rollout_id", "rank", "samples": [one dict per
sample], "dp_shards"}. Samples use slime's keys for the columns that slime has, and the table's
names for the others. The key "metadata" has the table's metadata.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from slime_tis.analysis.dumps.table import (
    COLUMNS,
    OBJECT_COLUMNS,
    REQUIRED_COLUMNS,
    SAMPLE_COLUMNS,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    TokenTable,
    offsets_of,
)
from slime_tis.atomic_files import FOREIGN, atomic_file
from slime_tis.errors import first_line, quoted
from slime_tis.torch_files import UnsafeTorch, load_tensors

SCHEMA_VERSION = 1
"""Version of the columns and their meaning. A file with a later version is refused."""
KEY = b"slime_tis"
"""Key in the metadata of the file. The value is {"schema_version", "metadata", "experts_shape"} as
JSON."""
ROW_GROUP_BYTES = 1 << 26
"""Bytes of a row group and of a read batch after decoding: about a million tokens, at least one
sample."""
PYTHON_NUMBER_BYTES = 32
"""Memory of a float in a Python list."""
MAX_GROUP_BYTES = 1 << 30
"""Bytes of memory that a row group or a .pt file may always take."""
MAX_EXPANSION = 32
"""They may take more memory if it is at most this many times the size of the file."""
SLIME_NAMES = {
    "rollout_log_prob": "rollout_log_probs",
    "old_log_prob": "log_probs",
    "loss_mask": "loss_masks",
    "advantage": "advantages",
    "weight_version": "weight_versions",
    "rollout_worker": "rollout_workers",
    "reward": "rewards",
    "group": "group_index",
    "text": "response",
    "prompt_text": "prompt",
}
"""slime's key for a column of the table."""


def _schema() -> Any:
    """Returns arrow's types of all columns."""
    columns = []
    for name, dtype in SAMPLE_COLUMNS.items():
        columns.append(pa.field(name, pa.from_numpy_dtype(dtype), nullable=name == "reward"))
    for name in TEXT_COLUMNS:
        columns.append(pa.field(name, pa.dictionary(pa.int32(), pa.string())))
    for name, dtype in TOKEN_COLUMNS.items():
        columns.append(pa.field(name, pa.large_list(pa.from_numpy_dtype(dtype)), nullable=False))
    columns.append(pa.field("prompt", pa.large_list(pa.int32()), nullable=False))
    return pa.schema(columns)


SCHEMA = _schema()
"""Types of the columns when they are read."""


def write(path: str | Path, table: TokenTable) -> None:
    """Writes a table, in slime's layout if the name ends in .pt, else as parquet.

    The file appears under its name when it is complete.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table = _write_parquet
    if path.suffix == ".pt":
        write_table = _write_pt
    with atomic_file(path) as file:
        write_table(file, table)


def check_replaceable(path: Path) -> None:
    """Checks that a path is free or holds a dump of this program.

    Raises:
        ValueError: another file is there.
    """
    if os.path.lexists(path) and not _is_own(path):
        raise ValueError(FOREIGN)


def _is_own(path: Path) -> bool:
    """Whether a file is a dump of this program."""
    if not path.is_file():  # reading a pipe or a device would block
        return False
    try:
        if path.suffix != ".pt":
            return is_own_parquet(path)
        # Mapped, because only the keys are read, and the tensors may take gigabytes.
        content = load_tensors(path, mmap=True)
    except UnsafeTorch:
        raise
    except Exception:  # unpickling another file may raise anything
        return False
    keys = {"format_version", "samples", "dp_shards", "metadata"}
    return (
        isinstance(content, dict)
        and content.keys() >= keys
        and isinstance(content["metadata"], dict)
    )


def _write_pt(file: IO[bytes], table: TokenTable) -> None:
    content = {
        "format_version": 2,
        "rollout_id": table.metadata.get("rollout_id"),
        "rank": table.metadata.get("rank"),
        "samples": [_sample(table, index) for index in range(len(table))],
        "dp_shards": [],
        "metadata": dict(table.metadata),
    }
    torch.save(content, file)


def _sample(table: TokenTable, index: int) -> dict[str, Any]:
    """One sample in slime's layout."""
    rows = slice(int(table.offsets[index]), int(table.offsets[index + 1]))
    length = rows.stop - rows.start
    prompt = OBJECT_COLUMNS["prompt"]
    if table.prompt is not None:
        prompt = table.prompt[index]
    sample: dict[str, Any] = {"response_lengths": length, "total_lengths": len(prompt) + length}
    if table.token is not None:
        tokens = np.concatenate([prompt, table.token[rows]])
        sample["tokens"] = torch.from_numpy(tokens.astype(np.int64))
    for name in COLUMNS:
        column = getattr(table, name)
        if column is None or name in ("token", "prompt"):  # both are in "tokens"
            continue
        if name in TOKEN_COLUMNS:
            # torch.save would write all rows of a view.
            value = torch.from_numpy(column[rows].copy())
        elif name in SAMPLE_COLUMNS:
            value = column[index].item()
        else:
            value = column[index]
        sample[SLIME_NAMES.get(name, name)] = value
    return sample


def _write_parquet(file: IO[bytes], table: TokenTable) -> None:
    # A list column has no shape, so the header has layers and k.
    shape = [0, 0]
    if table.experts is not None:
        shape = list(table.experts.shape[1:])
    header = {
        "schema_version": SCHEMA_VERSION,
        "metadata": dict(table.metadata),
        "experts_shape": shape,
    }
    # A sample belongs to the row group that its first token falls into.
    token_bytes = table.nbytes // max(table.tokens, 1)
    group_S = table.offsets[:-1] * token_bytes // ROW_GROUP_BYTES
    starts = np.flatnonzero(np.diff(group_S)) + 1
    parts = np.split(np.arange(len(table)), starts)
    groups = [_to_arrow(table.select(samples)) for samples in parts]
    schema = groups[0].schema.with_metadata({KEY: json.dumps(header)})
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for group in groups:
            writer.write_table(group.replace_schema_metadata(schema.metadata))


def is_own_parquet(path: Path) -> bool:
    """Whether this program wrote a parquet file, in any version."""
    return KEY in (parquet.read_schema(path).metadata or {})


def parquet_tables(path: str | Path) -> Iterator[TokenTable]:
    """Yields the tables of a file's row groups.

    Raises:
        ValueError: the file is damaged, too large for memory, or of a newer version.
    """
    try:
        file_schema = parquet.read_schema(path)
        header = _header(file_schema)
        schema = pa.schema([item for item in SCHEMA if item.name in file_schema.names])
        for batch in _batches(Path(path), schema.names):
            yield _from_arrow(batch.select(schema.names).cast(schema), header)
    except (pa.ArrowException, OSError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of another program's file, each with its location for messages.

    Lists of text are left out: their size in memory is not known before they are decoded.
    """
    number = 0
    try:
        text = _text_columns(path)
        # parquet names the entries of a list column NAME.list.element.
        lists_of_text = {name.split(".")[0] for name in text} - text
        columns = [name for name in parquet.read_schema(path).names if name not in lists_of_text]
        for batch in _batches(path, columns, PYTHON_NUMBER_BYTES):
            values = []
            for name in columns:
                if name in text:
                    values.append(_texts(batch[name]))
                else:
                    values.append(batch[name].to_pylist())
            for row in zip(*values, strict=True):
                number += 1
                yield f"{path}, row {number}", dict(zip(columns, row, strict=True))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read as parquet after row {number}: {first_line(error)}."
        ) from error


def _batches(path: Path, names: Sequence[str], value_bytes: int = 4) -> Iterator[Any]:
    """Yields the row groups of a file in batches of about ROW_GROUP_BYTES after decoding.

    Text columns are dictionaries, so a text that many rows repeat takes memory once.

    Args:
        path: The file.
        names: Columns to read.
        value_bytes: Memory of a number.
    """
    file_bytes = path.stat().st_size
    text_columns = _text_columns(path)
    text_names = [name for name in names if name in text_columns]
    with parquet.ParquetFile(path, read_dictionary=text_names) as file:
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            size = _decoded_bytes(group, names, value_bytes)
            if is_too_large(size, file_bytes):
                raise ValueError(
                    f"row group {index} needs {size >> 20} MiB of memory; write smaller row groups."
                )
            if group.num_rows == 0:
                # iter_batches yields nothing, but an empty dump is a table, too.
                yield pa.RecordBatch.from_pylist([], file.schema_arrow)
            parts = 1
            if size > 2 * ROW_GROUP_BYTES:
                parts = -(-size // ROW_GROUP_BYTES)  # rounded up
            rows = max(group.num_rows // parts, 1)
            yield from file.iter_batches(rows, row_groups=[index], columns=names)


def _decoded_bytes(group: Any, names: Sequence[str], value_bytes: int) -> int:
    """Memory of the columns of a row group after decoding, bytes.

    Raises:
        ValueError: the memory has no bound.
    """
    size = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        if chunk.path_in_schema.split(".")[0] not in names:
            continue
        if "DELTA_BYTE_ARRAY" in chunk.encodings:
            raise ValueError(
                "text has the encoding DELTA_BYTE_ARRAY, whose size is not bounded; write PLAIN."
            )
        size += value_bytes * chunk.num_values
        if chunk.physical_type == "BYTE_ARRAY":
            size += chunk.total_uncompressed_size
    return size


def is_too_large(size: int, file_bytes: int) -> bool:
    """Returns whether content is too large in memory for its file, as in a decompression bomb."""
    return size > max(MAX_GROUP_BYTES, MAX_EXPANSION * file_bytes)


def _text_columns(path: Path) -> set[str]:
    """Names of the text columns of a parquet file, without lists of text."""
    schema = parquet.read_metadata(path).schema
    return {column.path for column in schema if column.physical_type == "BYTE_ARRAY"}


def _texts(column: Any) -> list[str | None]:
    """The texts of a dictionary column; equal texts are one object."""
    dictionary = column.dictionary.to_pylist()
    indices = column.indices.to_pylist()
    return [None if index is None else dictionary[index] for index in indices]


def _header(schema: Any) -> dict[str, Any]:
    """The value of KEY, checked."""
    value = (schema.metadata or {}).get(KEY, b"")
    try:
        header = dict(json.loads(value))
        is_newer = header["schema_version"] > SCHEMA_VERSION
        # The layout of a newer header is not known.
        if not is_newer:
            is_valid = isinstance(header["metadata"], dict)
            if not is_valid or not all(0 <= size < 2**15 for size in header["experts_shape"]):
                raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"damaged metadata {quoted(value)}.") from None
    if is_newer:
        raise ValueError(
            f"schema version {header['schema_version']} is newer than {SCHEMA_VERSION}; update"
            " slime_tis."
        )
    missing = [name for name in REQUIRED_COLUMNS if name not in schema.names]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}.")
    return header


def _to_arrow(table: TokenTable) -> Any:
    """Returns the columns of a table as an arrow table."""
    columns: dict[str, Any] = {}
    for item in SCHEMA:
        column = getattr(table, item.name)
        if column is None:
            continue
        if item.name in TEXT_COLUMNS:
            # A tokenizer may return a lone surrogate, which is not UTF-8.
            texts = [text.encode("utf-8", "replace").decode() for text in column]
            columns[item.name] = pa.array(texts, pa.string())
        elif item.name in TOKEN_COLUMNS:
            # Experts have layers · k values per token, and all other columns one.
            token_values = int(np.prod(column.shape[1:], dtype=np.int64))
            offsets = pa.array(table.offsets * token_values)
            values = pa.array(column.reshape(-1))
            columns[item.name] = pa.LargeListArray.from_arrays(offsets, values)
        elif item.name == "prompt":
            columns[item.name] = pa.array(list(column), item.type)
        else:
            columns[item.name] = pa.array(column, item.type)
    return pa.table(columns)


def _from_arrow(batch: Any, header: dict[str, Any]) -> TokenTable:
    """Returns the table in an arrow batch; raises ValueError if columns differ in length."""
    lengths = batch["rollout_log_prob"].value_lengths().to_numpy()
    columns: dict[str, Any] = {}
    for name in batch.schema.names:
        column = batch[name]
        if name in TEXT_COLUMNS:
            columns[name] = tuple(text or "" for text in _texts(column))
            continue
        if name in SAMPLE_COLUMNS:
            columns[name] = column.to_numpy(zero_copy_only=False)
            continue
        counts = column.value_lengths().to_numpy()
        values = column.flatten().to_numpy(zero_copy_only=False)
        if name == "prompt":
            # np.split would return one empty piece for a batch without samples.
            columns[name] = ()
            if len(batch):
                columns[name] = tuple(np.split(values, np.cumsum(counts)[:-1]))
            continue
        shape = ()
        if name == "experts":
            shape = header["experts_shape"]
        if not np.array_equal(counts, lengths * int(np.prod(shape, dtype=np.int64))):
            raise ValueError(f"{name} and rollout_log_prob differ in length.")
        columns[name] = values.reshape(int(lengths.sum()), *shape)
    return TokenTable(offsets=offsets_of(lengths), **columns, metadata=header["metadata"])
