"""Tables of results as CSV files of typed rows: the columns are the fields of a dataclass."""

import csv
import io
import types
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from slime_tis.atomic_files import write_atomically

RowT = TypeVar("RowT")


def write_rows(path: Path, kind: type[RowT], rows: Iterable[RowT]) -> None:
    """Writes a table, whole or not at all.

    Args:
        path: CSV file to make or to replace.
        kind: dataclass of the rows.
        rows: numbers are written with five digits, None as nothing, curves as `step:value
            step:value`.
    """
    columns = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_written(getattr(row, name)) for name in columns] for row in rows)
    write_atomically(path, text.getvalue())


def read_rows(path: Path, kind: type[RowT]) -> list[RowT]:
    """The rows of a table.

    Raises:
        ValueError: it has other columns.
    """
    hints = get_type_hints(kind)
    columns = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    with open(path, newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        if lines.fieldnames != columns:
            raise ValueError(
                f"{path} does not have the columns {', '.join(columns)}; move it away, and it is"
                " written again."
            )
        return [
            kind(**{name: _read(hints[name], text) for name, text in line.items()})
            for line in lines
        ]


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{step}:{height:.4g}" for step, height in value)
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)


def _read(hint: Any, text: str) -> Any:
    if get_origin(hint) is tuple:
        return tuple(
            (int(step), float(height))
            for step, height in (point.split(":") for point in text.split())
        )
    if get_origin(hint) is types.UnionType:  # X | None
        return get_args(hint)[0](text) if text else None
    return hint(text)
