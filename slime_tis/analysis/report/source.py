"""What a report is made of: the metrics of a run, and the tokens of its dumps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime_tis.analysis.dumps.readers import files_of, read
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.errors import first_line, quoted_path
from slime_tis.metrics_file import CONFIG, METRICS, metrics_before

MAX_METRICS = 2**29
"""Bytes that a metrics.jsonl may have."""
MAX_TOKENS = 2_000_000
"""Tokens of dumps that are held; of more, a random part of the samples."""
MAX_BYTES = 1 << 28
"""Bytes of dumps that are held, likewise: fewer tokens where each has many experts."""
DUMPS_FLAG = "--save-debug-train-data"
"""The flag of train.py that writes dumps."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run directory or a dump, as it was read."""

    name: str
    """Of the path."""
    path: Path
    metrics: tuple[Mapping[str, Any], ...]
    """Rows of metrics.jsonl; none of a dump."""
    table: TokenTable | None
    """Tokens; None where the run wrote no dumps."""
    note: str
    """What is missing, and what to do about it."""


def open_source(path: str) -> Source:
    """Reads a run directory with the dumps that its configuration names, or a dump in any format that `read` knows.

    Raises:
        ValueError: There is nothing there, or a file is damaged, too large or of another form.
        OSError: A file cannot be read.
    """
    place = Path(path)
    if not (place / METRICS).is_file():
        whole = read(path, max_tokens=MAX_TOKENS, max_bytes=MAX_BYTES)
        return Source(name=place.name or path, path=place, metrics=(), table=whole, note=_staleness_note(whole))
    rows = _metrics(place / METRICS)
    found, note = _dumps_of(place)
    return Source(name=place.resolve().name, path=place, metrics=rows, table=found, note=note or _staleness_note(found))


def _staleness_note(table: TokenTable | None) -> str:
    """A hint where the age of the weights is unknown."""
    if table is None or not table.tokens or (table.weight_version is not None and table.step is not None):
        return ""
    return "The dump lacks weight_versions or step, so staleness cannot be seen (docs/dumps.md)."


def _metrics(path: Path) -> tuple[Mapping[str, Any], ...]:
    if path.stat().st_size > MAX_METRICS:
        raise ValueError(f"{quoted_path(path)} has more than {MAX_METRICS >> 20} MiB; give a dump instead of the run.")
    rows = []
    for number, line in enumerate(metrics_before(path, 2**62), start=1):
        row = json.loads(line)
        if not all(
            value is None or type(value) is float or (type(value) is int and abs(value) < 2**63)
            for value in row.values()
        ):
            raise ValueError(f"{quoted_path(path)}, line {number}, has a value that is not a number of 64 bits.")
        rows.append(row)
    return tuple(rows)


def _dumps_of(run: Path) -> tuple[TokenTable | None, str]:
    """The dumps that the configuration of a run names, and a note where there are none."""
    pattern = _pattern(run / CONFIG)
    if pattern is None:
        return None, (
            f"This run wrote no dumps of tokens, so there is nothing but its metrics to show. {DUMPS_FLAG} PATTERN, "
            f"for example {DUMPS_FLAG} '{run}/dumps/{{rollout_id}}.parquet', writes them."
        )
    directory = Path(os.path.dirname(pattern.split("{", 1)[0]) if "{" in pattern else pattern)
    for place in (run if directory.samefile(run) else directory for directory in _existing(directory, run)):
        try:
            files_of(place)
        except ValueError:
            continue
        return read(place, max_tokens=MAX_TOKENS, max_bytes=MAX_BYTES), ""
    return None, f"The dumps of this run, {pattern}, are not where it wrote them; give their path instead of the run's."


def _existing(directory: Path, run: Path) -> list[Path]:
    """Where the dumps may be: where the run wrote them, or beside its metrics when it was moved."""
    return [place for place in (directory, run / directory.name) if place.exists()]


def _pattern(path: Path) -> str | None:
    """The value of --save-debug-train-data in a run's config.yaml."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{quoted_path(path)} is damaged: {first_line(error)}.") from error
    value = config.get("save_debug_train_data") if isinstance(config, dict) else None
    return value if isinstance(value, str) and value else None
