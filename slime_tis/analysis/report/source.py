"""Sources of a report: the metrics of a run, and the tokens of its dumps."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_tis.analysis.dumps.readers import files_of_run, options_of_run, read
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report.logs import MAX_LOG_SIZE, read_log
from slime_tis.errors import quoted_path
from slime_tis.files import METRICS, metrics_before
from slime_tis.rules import SERIES, series_of

MAX_TOKENS = 2_000_000
"""Largest number of tokens in memory, a random part of the samples of a larger dump."""
MAX_BYTES = 1 << 28
"""Largest size of dumps in memory, bytes."""
DUMPS_FLAG = "--save-debug-train-data"
"""The flag of train.py that writes dumps."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The content of a run directory or a dump."""

    name: str
    """Last part of the path."""
    path: Path
    metrics: tuple[Mapping[str, Any], ...]
    """Rows of metrics.jsonl; empty for a dump."""
    table: TokenTable | None
    """Tokens; None if the run wrote no dumps."""
    note: str
    """Missing data, and how to get them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The run's config.yaml; empty for a dump."""

    def tokens(self) -> TokenTable:
        """The table, which has trained tokens.

        Raises:
            ValueError: it has none.
        """
        if self.table is None or not self.table.valid.any():
            raise ValueError(f"{self.path} has no dumps of tokens; {DUMPS_FLAG} writes them (docs/dumps.md).")
        return self.table


def open_source(path: str, part: int = 1) -> Source:
    """Reads a run directory with its dumps, the log of another program, or a dump in any format that `read` knows."""
    source = Path(path)
    limits = {"max_tokens": MAX_TOKENS // part, "max_bytes": MAX_BYTES // part}
    table, note = None, ""
    rows: tuple[Mapping[str, Any], ...] = ()
    options: dict[str, Any] = {}
    if not (is_run := (source / METRICS).is_file()):
        if (log := read_log(source)) is None:
            table = read(source, **limits)
        else:
            rows, missing = log, [name for name in SERIES if not series_of(log, name)]
            note = f"This log lacks {', '.join(missing)}, so checks that need them were not made. " if missing else ""
            note += "Log-probs of tokens show more: write a dump of both engines' log-probs (docs/dumps.md)."
    else:
        rows, options = _metrics(source / METRICS), options_of_run(source)
        pattern = options.get("save_debug_train_data")
        if not pattern:
            note = (
                f"This run wrote no dumps of tokens, so the report has its metrics only. {DUMPS_FLAG} PATTERN, "
                f"for example {DUMPS_FLAG} 'DIR/{{rollout_id}}.parquet', writes them."
            )
        elif files_of_run(source):
            table = read(source, **limits)
        else:
            note = f"The run's dumps {pattern} do not exist any more; give the path of the dumps instead of the run."
    if table is not None and table.tokens and (table.weight_version is None or table.step is None):
        note = "The dump lacks weight_versions or step, so staleness cannot be seen (docs/dumps.md)."
    name = source.resolve().name if is_run else source.name or path
    return Source(name=name, path=source, metrics=rows, table=table, note=note, options=options)


def _metrics(path: Path) -> tuple[Mapping[str, Any], ...]:
    if path.stat().st_size > MAX_LOG_SIZE:
        raise ValueError(f"{quoted_path(path)} has more than {MAX_LOG_SIZE >> 20} MiB; give a dump instead of the run.")
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
