"""Sources of a report: the metrics of a run, and the tokens of its dumps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_tis.analysis.diagnosis.metric_rules import (
    MISMATCH_METRICS,
    OTHER_SERIES,
    logged_values,
    series_of,
)
from slime_tis.analysis.dumps.readers import (
    dump_files,
    files_of,
    files_of_run,
    options_of_run,
    read,
)
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.logs.peer_metrics import dump_advice
from slime_tis.analysis.logs.read_log import MAX_LOG_SIZE, Log, names_of_logs, read_log
from slime_tis.atomic_files import METRICS, metrics_before
from slime_tis.errors import quoted_path

MAX_TOKENS = 2_000_000
"""Largest number of tokens in memory, a random part of the samples of a larger dump."""
MAX_BYTES = 1 << 28
"""Largest size of dumps in memory, bytes."""
DUMPS_FLAG = "--save-debug-train-data"
"""The flag of train.py that writes dumps."""
LOG_SUFFIXES = (".csv", ".log", ".out", ".wandb")
"""Files that are never read as dumps."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The content of a run directory, of a log or of a dump."""

    name: str
    """Last part of the path."""
    path: Path
    metrics: Sequence[Mapping[str, Any]]
    """Rows of metrics.jsonl or of a log; empty for a dump."""
    table: TokenTable | None
    """Tokens; None without dumps."""
    note: str
    """Missing data, and how to get them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The run's config.yaml; empty for a log or a dump."""
    log: Log | None = None
    """The log, if the metrics are another program's."""

    def tokens(self) -> TokenTable:
        """The table, which has trained tokens.

        Raises:
            ValueError: it has none.
        """
        if self.table is not None and self.table.valid.any():
            return self.table
        if self.table is not None:
            raise ValueError(
                f"{quoted_path(self.path)} has no trained token with log-probs of both engines."
            )
        if self.log is None:
            raise ValueError(f"{quoted_path(self.path)}: {self.note}")
        raise ValueError(
            f"{quoted_path(self.log.file)} is a log of metrics, but this command needs the"
            f" log-probs of each token. {_how_to_dump(self.log)}"
        )


def _how_to_dump(log: Log) -> str:
    framework = f"With {log.framework}, " if log.framework else "To get them, "
    return f"{framework}{dump_advice(log.framework)}."


def open_source(path: str, part: int = 1) -> Source:
    """Reads a run directory with its dumps, a dump in any format that `read` knows, or the log of another program.

    In a directory, dumps count before logs: tokens show more than metrics.

    Args:
        path: Run directory, directory of dumps or logs, dump or log.
        part: Number of sources that share the memory.

    Raises:
        ValueError: The path has neither metrics nor tokens, or is damaged.
    """
    source = Path(path)
    limits = {"max_tokens": MAX_TOKENS // part, "max_bytes": MAX_BYTES // part}
    if (source / METRICS).is_file():
        return _run(source, limits)
    has_dumps = source.is_dir() and bool(dump_files(source))
    log = None if has_dumps else read_log(source)
    name = source.name or path
    if log is not None:
        return Source(
            name=name, path=source, metrics=log.rows, table=None, note=_note_of_log(log), log=log
        )
    if source.is_file() and source.suffix in LOG_SUFFIXES:
        raise ValueError(
            f"{quoted_path(source)} has no metrics with steps; docs/diagnosis.md lists the logs"
            " that are read."
        )
    if source.is_dir() and not has_dumps:
        _refuse(source)
    table = read(source, **limits)
    return Source(name=name, path=source, metrics=(), table=table, note=_note_of_dump(table))


def _refuse(directory: Path) -> None:
    """Raises ValueError for a directory with neither dumps nor logs."""
    names = ", ".join(map(quoted_path, names_of_logs(directory)[:3]))
    passed_over = f" Without metrics of steps: {names}." if names else ""
    try:
        files_of(directory)
    except ValueError as error:
        raise ValueError(
            f'{error} It has no log with metrics either (docs/diagnosis.md, "Logs of other'
            f' trainers").{passed_over}'
        ) from None


def _note_of_dump(table: TokenTable) -> str:
    if table.tokens and (table.weight_version is None or table.step is None):
        return (
            "The dump lacks weight_versions or step, so staleness cannot be seen (docs/dumps.md)."
        )
    return ""


def _note_of_log(log: Log) -> str:
    """Which file was read, which checks it does not allow, and how to get more."""
    missing = [name for name in OTHER_SERIES if not series_of(log.rows, name)]
    if not any(logged_values(log.rows, metric.name) for metric in MISMATCH_METRICS):
        missing.insert(0, "every mismatch metric")
    sentences = [f"Read from {quoted_path(log.file)}."]
    sentences += [f"Passed over: {sentence}" for sentence in log.passed_over[:3]]
    if missing:
        sentences.append(
            f"This log lacks {', '.join(missing)}, so checks that need them were not made."
        )
    sentences.append(f"Log-probs of tokens show more. {_how_to_dump(log)}")
    return " ".join(sentences)


def _run(directory: Path, limits: dict[str, int]) -> Source:
    """A run of train.py: its metrics, its options, and its dumps if it wrote them."""
    options = options_of_run(directory)
    pattern = options.get("save_debug_train_data")
    table = None
    note = ""
    if not pattern:
        note = (
            f"This run wrote no dumps of tokens, so there are its metrics only. {DUMPS_FLAG}"
            f" PATTERN, for example {DUMPS_FLAG} 'DIR/{{rollout_id}}.parquet', writes them."
        )
    elif files_of_run(directory):
        table = read(directory, **limits)
        note = _note_of_dump(table)
    else:
        note = (
            f"The run's dumps {pattern} do not exist any more; give the path of the dumps instead"
            " of the run."
        )
    rows = _metrics(directory / METRICS)
    name = directory.resolve().name
    return Source(name=name, path=directory, metrics=rows, table=table, note=note, options=options)


def _metrics(path: Path) -> tuple[Mapping[str, Any], ...]:
    if path.stat().st_size > MAX_LOG_SIZE:
        raise ValueError(
            f"{quoted_path(path)} has more than {MAX_LOG_SIZE >> 20} MiB; give a dump instead of"
            " the run."
        )
    rows = []
    for number, line in enumerate(metrics_before(path, 2**62), start=1):
        row = json.loads(line)
        if not all(
            value is None or type(value) is float or (type(value) is int and abs(value) < 2**63)
            for value in row.values()
        ):
            raise ValueError(
                f"{quoted_path(path)}, line {number}, has a value that is not a number of 64 bits."
            )
        rows.append(row)
    return tuple(rows)
