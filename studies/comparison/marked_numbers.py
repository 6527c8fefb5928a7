"""Numbers in sentences: each stands before a comment that names its source, and is kept up to date.

reaches 0.96<!-- stale 8 | OPSM --> of on-policy accuracy
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_tis.analysis.report.comparison_study import Column, record
from slime_tis.atomic_files import write_atomically

MARKED = re.compile(r"[−\d][\d.]*(?P<mark><!-- (?P<key>[^>]+?) -->)")
"""A number and its mark. Marks of tables do not follow a number."""


def values_of(compared: Sequence[Column], seen: Sequence[Column]) -> dict[str, str]:
    """The numbers by their marks.

    Args:
        compared: All columns.
        seen: Columns of the sorting task, over which a method's record is.
    """
    values = {}
    methods = {}
    for column in compared:
        for cell in column.cells:
            values[f"{column.name} | {cell.method}"] = f"{cell.relative:.2f}"
            values[f"loss | {column.name} | {cell.method}"] = percent(cell.gap)
            values[f"low | {column.name} | {cell.method}"] = percent(cell.gap_low)
            values[f"high | {column.name} | {cell.method}"] = percent(cell.gap_high)
            methods[cell.method] = cell.method
    for method in methods:
        gaps = record(method, seen)
        if gaps is not None:
            values[f"columns | {method}"] = str(gaps.columns)
            values[f"mean loss | {method}"] = percent(gaps.mean)
            values[f"upper end | {method}"] = percent(gaps.high)
            values[f"largest loss | {method}"] = percent(gaps.worst)
    counts = [len(column.cells) for column in compared]
    values["methods"] = str(len(methods))
    values["columns"] = str(len(compared))
    values["columns of the sorting task"] = str(len(seen))
    values["comparisons"] = str(sum(counts) - len(compared))
    found_worse = [cell.is_worse for column in compared for cell in column.cells]
    values["found worse"] = str(sum(found_worse))
    # Only the columns stale 16 and stale 64 have all methods.
    incomplete = [count for count in counts if count < len(methods)]
    values["fewest methods"] = str(min(counts))
    values["most methods"] = str(max(incomplete, default=len(methods)))
    return values


def percent(share: float) -> str:
    """A share in percent, without a sign of percent."""
    text = f"{100 * share:.0f}".replace("-", "−")
    return "0" if text == "−0" else text


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with the numbers before its marks.

    Raises:
        ValueError: A mark names no result.
    """

    def with_number(match: re.Match[str]) -> str:
        key = match["key"]
        if key not in values:
            raise ValueError(f"the mark {key!r} names no result of the study.")
        return values[key] + match["mark"]

    return MARKED.sub(with_number, text)


def fill_page(page: Path, values: Mapping[str, str]) -> Path:
    """Writes the numbers before the marks of a page."""
    try:
        text = filled(page.read_text(encoding="utf-8"), values)
    except ValueError as error:
        raise ValueError(f"{page}: {error}") from None
    write_atomically(page, text)
    return page
