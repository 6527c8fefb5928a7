"""Inputs of a report: the metrics of a run, and the tokens in its dumps."""

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
"""Tokens in memory. From a larger dump, random samples are read."""
MAX_BYTES = 1 << 28
"""Bytes of dumps in memory, likewise."""
DUMPS_FLAG = "--save-debug-train-data"
"""The flag of train.py that writes dumps."""
CONSOLE = "a console log needs verl's lines, such as step:3 - rollout_corr/k3_kl:0.001"
LOG_SUFFIXES = {
    ".csv": "a CSV needs commas between its columns, a column step, and numbers",
    ".log": CONSOLE,
    ".out": CONSOLE,
    ".wandb": "an offline run of W&B has its history in this file",
}
"""Suffixes of files that are never read as dumps, and what such a log must have."""


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
    """Missing data, and how to get it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options in the run's config.yaml; empty for a log or a dump."""
    log: Log | None = None
    """The log, if another program logged the metrics."""

    def tokens(self) -> TokenTable:
        """Returns the table.

        Raises:
            ValueError: there is no table, or it has no trained token.
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
    """How the framework of a log writes tokens, as a sentence."""
    advice = dump_advice(log.framework)
    if log.framework:
        return f"With {log.framework}, {advice}."
    return f"To get them, {advice}."


def open_source(path: str, sources: int = 1) -> Source:
    """Reads a run directory with its dumps, a dump, or another program's log.

    If a directory has both dumps and logs, the dumps are read: tokens show more than metrics.

    Args:
        path: Run directory, directory of dumps or logs, dump or log.
        sources: Number of sources that share the memory.

    Raises:
        ValueError: The path has neither metrics nor tokens, or is damaged.
    """
    source = Path(path)
    max_tokens = MAX_TOKENS // sources
    max_bytes = MAX_BYTES // sources
    if (source / METRICS).is_file():
        return _run(source, max_tokens, max_bytes)
    has_dumps = source.is_dir() and bool(dump_files(source))
    log = None
    if not has_dumps:
        log = read_log(source)
    name = source.name or path  # the path "." has no name
    if log is not None:
        return Source(
            name=name, path=source, metrics=log.rows, table=None, note=_note_of_log(log), log=log
        )
    if source.is_file() and source.suffix in LOG_SUFFIXES:
        raise ValueError(
            f"{quoted_path(source)} has no metrics with steps: {LOG_SUFFIXES[source.suffix]}"
            " (docs/diagnosis.md)."
        )
    if source.is_dir() and not has_dumps:
        _refuse(source)
    table = read(source, max_tokens=max_tokens, max_bytes=max_bytes)
    return Source(name=name, path=source, metrics=(), table=table, note=_note_of_dump(table))


def _refuse(directory: Path) -> None:
    """Raises ValueError for a directory with neither dumps nor logs."""
    names = names_of_logs(directory)[:3]
    passed_over = ""
    if names:
        passed_over = f" Files without metrics: {', '.join(map(quoted_path, names))}."
    try:
        files_of(directory)
    except ValueError as error:  # its message says why there are no dumps
        raise ValueError(
            f'{error} It has no log with metrics either (docs/diagnosis.md, "Logs of other'
            f' trainers").{passed_over}'
        ) from None


def _note_of_dump(table: TokenTable) -> str:
    """The columns that a dump lacks, in words; empty if none is missing."""
    if table.tokens and (table.weight_version is None or table.step is None):
        return (
            "The dump lacks weight_versions or step, so staleness cannot be seen (docs/dumps.md)."
        )
    return ""


def _note_of_log(log: Log) -> str:
    """The file that was read, the metrics that it lacks, and how to get tokens."""
    missing = [name for name in OTHER_SERIES if not series_of(log.rows, name)]
    if not any(logged_values(log.rows, metric.name) for metric in MISMATCH_METRICS):
        missing.insert(0, "every mismatch metric")
    sentences = [f"Read from {quoted_path(log.file)}."]
    sentences += [f"Passed over: {sentence}" for sentence in log.passed_over[:3]]
    if missing:
        sentences.append(
            f"This log lacks {', '.join(missing)}, so the checks that need them were skipped."
        )
    sentences.append(f"Log-probs of tokens show more. {_how_to_dump(log)}")
    return " ".join(sentences)


def _run(directory: Path, max_tokens: int, max_bytes: int) -> Source:
    """A run of train.py: its metrics and options, and its dumps if it wrote them."""
    options = options_of_run(directory)
    pattern = options.get("save_debug_train_data")
    table = None
    note = ""
    if not pattern:
        note = (
            f"This run wrote no dumps of tokens, so the report has only metrics. {DUMPS_FLAG}"
            f" PATTERN, for example {DUMPS_FLAG} 'DIR/{{rollout_id}}.parquet', writes dumps."
        )
    elif files_of_run(directory):
        table = read(directory, max_tokens=max_tokens, max_bytes=max_bytes)
        note = _note_of_dump(table)
    else:
        note = (
            f"The run's dumps {pattern} do not exist any more. If they were moved, give their path"
            " instead of the run."
        )
    rows = _metrics(directory / METRICS)
    name = directory.resolve().name
    return Source(name=name, path=directory, metrics=rows, table=table, note=note, options=options)


def _metrics(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The rows of a metrics.jsonl; raises ValueError for values that train.py never logs."""
    if path.stat().st_size > MAX_LOG_SIZE:
        raise ValueError(
            f"{quoted_path(path)} has more than {MAX_LOG_SIZE >> 20} MiB; give a dump instead of"
            " the run."
        )
    rows = []
    for number, line in enumerate(metrics_before(path, 2**62), start=1):
        row = json.loads(line)
        if not all(map(_is_logged, row.values())):
            raise ValueError(
                f"{quoted_path(path)}, line {number}, has a value that is not a number of 64 bits."
            )
        rows.append(row)
    return tuple(rows)


def _is_logged(value: Any) -> bool:
    """Whether train.py may have logged a JSON value: null, a float, or an integer of 64 bits."""
    if type(value) is int:  # not bool, which is a subclass
        return abs(value) < 2**63
    return value is None or type(value) is float
