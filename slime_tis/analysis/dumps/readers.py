"""Reads per-token dumps of this program and of other projects into one `TokenTable`.

file or directory → files → tables of some samples each → one table, or a random part of it
"""

import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from torch import Tensor

from slime_tis.analysis.dumps.files import (
    MAX_EXPANSION,
    MAX_GROUP_BYTES,
    is_own_parquet,
    parquet_rows,
    parquet_tables,
)
from slime_tis.analysis.dumps.row_formats import SLIME, RowFormat, format_of
from slime_tis.analysis.dumps.table import Column, SampleParts, TokenTable, lowest_priorities
from slime_tis.atomic_files import CONFIG, json_lines
from slime_tis.errors import first_line, quoted_path
from slime_tis.torch_files import UnsafeFile, load_tensors

CHUNK_TOKENS = 1 << 18
"""Response tokens and characters of text per table of a JSON or parquet file."""
PATTERNS = (
    "train_data/*.parquet",
    "train_data/*.pt",
    "token_exports/step_*/rank_*.jsonl",
    "step_*/rank_*.jsonl",
    "train_data_step*.jsonl",
    "*.parquet",
    "*.pt",
    "rank_*.jsonl",
    "*.jsonl",
)
"""Dumps in a directory; the first pattern with files is used."""
NOT_DUMPS = ("metrics.jsonl", "optimizer.pt", "scheduler.pt")
"""Files of a run or of transformers' checkpoints that have a dump's suffix."""
PICKLES = (".pkl", ".pickle")
NO_PICKLES = (
    "pickles run code and are never loaded. SkyRL's trainer.dump_data_batch writes them; in a"
    " script of your own, load them and write JSONL with train_log_probs, rollout_log_probs and"
    " loss_mask (docs/dumps.md)."
)


def read(
    path: str | Path, *, max_tokens: int | None = None, max_bytes: int | None = None
) -> TokenTable:
    """The table of a dump, a file or a directory of files of one form.

    Forms: parquet or .pt of this program, a run directory, slime's and miles's
    `--save-debug-train-data`, NeMo-RL's `train_data_step*.jsonl`, prime-rl's `token_exports`,
    verl's generations with log-probs, and JSONL or parquet with the columns train_log_probs,
    rollout_log_probs and loss_mask (docs/dumps.md).

    A directory with dumps of several runs gives one run and a warning: the run of run.json, else of
    the newest file.

    Args:
        path: The file or directory.
        max_tokens: Response tokens to keep, a random part of more. Memory is then bounded by twice
            this number and by one batch of a parquet file or one .pt file. Default: all.
        max_bytes: Size of the table, likewise. Bounds the memory of tokens with many experts.
    """
    files = files_of(Path(path))
    run = _run_of(Path(path), files) if len(files) > 1 else None
    skipped = set()

    def tables() -> Iterator[TokenTable]:
        for file in files:
            for table in tables_of(file):
                if len(files) == 1 or table.metadata.get("run") in (None, run):
                    yield table
                else:
                    skipped.add(file)

    part = _random_part(tables(), 2**62 if max_tokens is None else max_tokens, max_bytes)
    if skipped:
        print(
            f"warning: {quoted_path(path)} has dumps of several runs; {len(skipped)} of"
            f" {len(files)} files are skipped, for example {quoted_path(min(skipped))}. Give each"
            " run its own directory for dumps.",
            file=sys.stderr,
        )
    if part is None:
        raise ValueError(f"{path} has no samples.")
    return part


def _run_of(path: Path, files: Sequence[Path]) -> str | None:
    """The identity of the run to read: the run directory's, else the newest file's."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads((path / "run.json").read_text(encoding="utf-8"))["run"])
    newest_first = sorted(files, key=lambda file: -file.stat().st_mtime_ns)
    return next(
        (table.metadata.get("run") for file in newest_first for table in tables_of(file)), None
    )


def _random_part(
    tables: Iterator[TokenTable], max_tokens: int, max_bytes: int | None
) -> TokenTable | None:
    """A uniform random part of the samples of several tables: the samples with the lowest random numbers.

    `metadata["sampled"]` has the totals if samples were discarded. None without tables.
    """
    chance = np.random.default_rng(0)
    kept: list[TokenTable] = []
    priorities: list[Column] = []
    bound = np.inf  # lowest number of a discarded sample
    samples = tokens = 0
    for table in tables:
        priority = chance.random(len(table))
        samples, tokens = samples + len(table), tokens + table.tokens
        if max_bytes is not None and table.tokens:
            max_tokens = min(max_tokens, max_bytes * table.tokens // table.nbytes)
        chosen = np.flatnonzero(priority < bound)
        kept.append(table if len(chosen) == len(table) else table.select(chosen))
        priorities.append(priority[chosen])
        if sum(held.tokens for held in kept) > 2 * max_tokens:
            kept, priorities, bound = _thinned(kept, priorities, max_tokens)
    if tokens <= max_tokens:
        return TokenTable.concatenate(kept) if kept else None
    (table,), _, _ = _thinned(kept, priorities, max_tokens)
    return replace(
        table, metadata={**table.metadata, "sampled": {"samples": samples, "tokens": tokens}}
    )


def _thinned(
    tables: Sequence[TokenTable], priorities: Sequence[Column], max_tokens: int
) -> tuple[list[TokenTable], list[Column], float]:
    """The samples of the lowest numbers as one table, their numbers, and the lowest number of the others."""
    table, priority = TokenTable.concatenate(tables), np.concatenate(priorities)
    chosen = lowest_priorities(priority, table.response_length, max_tokens)
    return (
        [table.select(chosen)],
        [priority[chosen]],
        np.delete(priority, chosen).min(initial=np.inf),
    )


def dump_files(path: Path) -> list[Path]:
    """The dumps in a directory, in the order of the numbers in their names; empty if it has none."""
    for candidates in (files_of_run(path), *(path.glob(pattern) for pattern in PATTERNS)):
        files = [file for file in candidates if file.is_file() and file.name not in NOT_DUMPS]
        if files:
            return sorted(
                files, key=lambda file: (list(map(int, re.findall(r"\d+", file.name))), str(file))
            )
    return []


def files_of(path: Path) -> list[Path]:
    """The files of a dump, which is a file or a directory.

    Raises:
        ValueError: There are none.
    """
    if path.is_file():
        if path.suffix in PICKLES:
            raise ValueError(f"{quoted_path(path)} is a pickle: {NO_PICKLES}")
        return [path]
    if not path.is_dir():
        if path.exists():
            raise ValueError(
                f"{quoted_path(path)} is not a regular file; give a file or directory."
            )
        raise ValueError(f"there is no file or directory {quoted_path(path)}.")
    if files := dump_files(path):
        return files
    if any(
        file.suffix in PICKLES
        for folder in (path, path / "dumped_data")
        for file in folder.glob("*.p*")
    ):
        raise ValueError(f"{quoted_path(path)} has no dumps, but pickles: {NO_PICKLES}")
    if any(path.glob("rollout/*/*.jsonl")):
        raise ValueError(
            f"{quoted_path(path)} has no dumps. AReaL's rollout files have no log-probs of"
            " training; write JSONL with train_log_probs, rollout_log_probs and loss_mask"
            " (docs/dumps.md)."
        )
    raise ValueError(
        f"{quoted_path(path)} has no dumps of tokens; docs/dumps.md shows how train.py"
        " (--dump-details), slime, miles, verl, TRL, NeMo-RL and prime-rl write them."
    )


def options_of_run(run: Path) -> dict[str, Any]:
    """The options in a run's config.yaml; none without the file."""
    try:
        options = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{quoted_path(run / CONFIG)} is damaged: {first_line(error)}.") from error
    return options if isinstance(options, dict) else {}


def files_of_run(run: Path) -> list[Path]:
    """Files of --save-debug-train-data in a run's config.yaml, where the run wrote them or moved with the run."""
    option = options_of_run(run).get("save_debug_train_data")
    if not isinstance(option, str):
        return []
    pattern = Path(re.sub(r"\{(rollout_id|rank)\}", "*", option)).absolute()
    moved = (run.absolute() / pattern.parent.name / pattern.name, run.absolute() / pattern.name)
    matches = (
        Path(path.anchor).glob(str(path.relative_to(path.anchor))) for path in (pattern, *moved)
    )
    return next((files for files in map(list, matches) if files), [])


def tables_of(path: Path) -> Iterator[TokenTable]:
    """The tables of a file, some samples each."""
    if path.suffix == ".pt":
        yield slime_table(path)
    elif path.suffix != ".parquet":
        yield from _tables(json_lines(path), path)
    else:
        try:
            own = is_own_parquet(path)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path} cannot be read as parquet: {first_line(error)}.") from error
        yield from parquet_tables(path) if own else _tables(parquet_rows(path), path)


def _tables(rows: Iterator[tuple[str, dict[str, Any]]], path: Path) -> Iterator[TokenTable]:
    form: RowFormat | None = None
    parts: list[SampleParts] = []
    tokens = 0
    for where, row in rows:
        try:
            form = form or format_of(row)
            part = form.parts(row, path)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from error
        if tokens >= CHUNK_TOKENS:
            yield _table(parts, form, path)
            parts, tokens = [], 0
        parts.append(part)
        tokens += len(part.rollout_log_prob) + len(part.text or "") + len(part.prompt_text or "")
    if form is not None:
        yield _table(parts, form, path)


def _table(parts: Sequence[SampleParts], form: RowFormat, path: Path) -> TokenTable:
    try:
        table = TokenTable.from_parts(parts, {"source": form.source, **form.metadata})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for log_probs in (table.train_log_prob, table.rollout_log_prob):
        if (highest := np.fmax.reduce(log_probs[table.loss_mask > 0], initial=-np.inf)) > 1e-2:
            raise ValueError(
                f"{path} has a log-prob of {highest:.4g}; natural logarithms are at most 0."
            )
    return table


def slime_table(path: Path) -> TokenTable:
    """The table of a `.pt` file in slime's layout, of this program, slime or miles.

    Source: THUDM/slime, slime/observability/train_data_utils.py, save_debug_train_data:
    format_version 2 has a list of samples. Earlier versions, and radixark/miles,
    miles/utils/train_dump_utils.py, have a dict of lists "rollout_data". Log-probs cover the
    response; `log_probs` are the training engine's before the rollout's first step.
    """
    try:
        file_bytes = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > file_bytes:
                raise ValueError("entries larger than the file")
        content = load_tensors(path)
    except UnsafeFile as error:
        raise ValueError(f"{error}.") from None
    except Exception as error:  # unpickling a damaged file may raise anything
        raise ValueError(
            f"{path} cannot be read as a dump of slime's form: {first_line(error)}."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, but a dump of slime's form is a dict."
        )
    own = content.get("metadata")
    metadata = own if isinstance(own, dict) else {"source": SLIME.source, **SLIME.metadata}
    parts: list[SampleParts] = []
    where, size = "", 0
    try:
        samples = (
            content["samples"] if "samples" in content else _transposed(content["rollout_data"])
        )
        for index, sample in enumerate(samples):
            where = f", sample {index}"
            parts.append(SLIME.parts({"step": content.get("rollout_id"), **sample}, path))
            size += sum(
                value.nbytes for value in vars(parts[-1]).values() if isinstance(value, np.ndarray)
            )
            if size > max(MAX_GROUP_BYTES, MAX_EXPANSION * file_bytes):
                raise ValueError(f"needs {size >> 20} MiB of memory with the samples before it")
        where = ""
        return TokenTable.from_parts(parts, metadata)
    except KeyError as error:
        raise ValueError(
            f"{path}{where} has no {error}, which train data of slime and miles have."
        ) from error
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise ValueError(f"{path}{where} {first_line(error)}.") from error


def _transposed(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One dict per sample, from lists with one entry per sample."""
    samples = len(data["response_lengths"])
    lists = {
        key: values for key, values in data.items() if isinstance(values, list | tuple | Tensor)
    }
    columns = {key: values for key, values in lists.items() if len(values) == samples}
    return [{key: values[index] for key, values in columns.items()} for index in range(samples)]
