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
    is_own_parquet,
    is_too_large,
    parquet_rows,
    parquet_tables,
)
from slime_tis.analysis.dumps.row_formats import AREAL_ROLLOUTS, SLIME, RowFormat, format_of
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
    "dumped_data/*.jsonl",
    "*.parquet",
    "*.pt",
    "rank_*.jsonl",
    "*.jsonl",
)
"""Patterns of the dumps in a directory. The first one with files is used."""
NOT_DUMPS = ("metrics.jsonl", "optimizer.pt", "scheduler.pt")
"""Files of a run, or of a transformers checkpoint, with the suffix of a dump."""
HIGHEST_LOG_PROB = 1e-2
"""A log-prob above 0 by more than this is no rounding error, nats."""
PICKLES = (".pkl", ".pickle")
"""Suffixes of files that are refused with an explanation."""
NO_PICKLES = (
    "pickles run code and are never loaded. Of SkyRL's trainer.dump_data_batch, convert them with"
    ' the script in docs/dumps.md ("Dumps from SkyRL"); of your own, write JSONL with'
    " train_log_probs, rollout_log_probs and loss_mask."
)


def read(
    path: str | Path, *, max_tokens: int | None = None, max_bytes: int | None = None
) -> TokenTable:
    """Returns the table of a dump: a file, or a directory of files in one format.

    Formats: parquet or .pt of this program, a run directory, slime's and miles's
    `--save-debug-train-data`, NeMo-RL's `train_data_step*.jsonl`, prime-rl's `token_exports`,
    verl's generations with log-probs, batches of SkyRL and AReaL as JSONL, and JSONL or parquet
    with the columns train_log_probs, rollout_log_probs and loss_mask (docs/dumps.md).

    If a directory has dumps of several runs, only one run is read, with a warning: the run in
    run.json, else the run of the newest file.

    Args:
        path: The file or directory.
        max_tokens: Response tokens to keep; from more, random samples are kept. Memory is then
            bounded by twice this number, and by one batch of a parquet file or one .pt file.
            Default: all.
        max_bytes: Size of the table, likewise. Bounds the memory of tokens with many experts.

    Raises:
        ValueError: there is no dump, or it is damaged.
    """
    files = files_of(Path(path))
    run = None
    if len(files) > 1:
        run = _run_of(Path(path), files)
    skipped: set[Path] = set()

    def tables() -> Iterator[TokenTable]:
        for file in files:
            for table in tables_of(file):
                if len(files) == 1 or table.metadata.get("run") in (None, run):
                    yield table
                else:
                    skipped.add(file)

    part = _random_part(tables(), max_tokens, max_bytes)
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
    """The identity of the run to read: that in run.json, else that of the newest file."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads((path / "run.json").read_text(encoding="utf-8"))["run"])
    for file in sorted(files, key=lambda file: -file.stat().st_mtime_ns):
        for table in tables_of(file):  # a file may have no table
            return table.metadata.get("run")
    return None


def _random_part(
    tables: Iterator[TokenTable], max_tokens: int | None, max_bytes: int | None
) -> TokenTable | None:
    """A uniform random part of the samples in several tables; None without tables.

    Each sample gets a random number, and the lowest numbers are kept. This needs one pass, without
    the total in advance. `metadata["sampled"]` has the totals if samples were discarded.
    """
    if max_tokens is None:
        max_tokens = 2**62
    chance = np.random.default_rng(0)
    kept: list[TokenTable] = []
    priorities: list[Column] = []
    bound = np.inf  # lowest number of a discarded sample
    samples = 0
    tokens = 0
    for table in tables:
        priority = chance.random(len(table))
        samples += len(table)
        tokens += table.tokens
        if max_bytes is not None and table.tokens:
            max_tokens = min(max_tokens, max_bytes * table.tokens // table.nbytes)
        chosen = np.flatnonzero(priority < bound)
        if len(chosen) < len(table):
            table = table.select(chosen)
        kept.append(table)
        priorities.append(priority[chosen])
        # At twice the number, so that a thinning pays off.
        if sum(held.tokens for held in kept) > 2 * max_tokens:
            kept, priorities, bound = _thinned(kept, priorities, max_tokens)
    if not kept:
        return None
    if tokens <= max_tokens:
        return TokenTable.concatenate(kept)
    (table,), _, _ = _thinned(kept, priorities, max_tokens)
    totals = {"samples": samples, "tokens": tokens}
    return replace(table, metadata={**table.metadata, "sampled": totals})


def _thinned(
    tables: Sequence[TokenTable], priorities: Sequence[Column], max_tokens: int
) -> tuple[list[TokenTable], list[Column], float]:
    """The samples with the lowest numbers as one table, their numbers, and the lowest other one."""
    table = TokenTable.concatenate(tables)
    priority = np.concatenate(priorities)
    chosen = lowest_priorities(priority, table.response_length, max_tokens)
    lowest_other = np.delete(priority, chosen).min(initial=np.inf)
    return [table.select(chosen)], [priority[chosen]], lowest_other


def dump_files(path: Path) -> list[Path]:
    """Returns the dumps in a directory, sorted by the numbers in their names."""
    candidates = [files_of_run(path)]
    candidates += [list(path.glob(pattern)) for pattern in PATTERNS]
    for matches in candidates:
        files = [file for file in matches if file.is_file() and file.name not in NOT_DUMPS]
        if files:
            return sorted(files, key=_numbers_in_name)
    return []


def _numbers_in_name(file: Path) -> tuple[list[int], str]:
    """Sorts 10.pt after 9.pt."""
    return list(map(int, re.findall(r"\d+", file.name))), str(file)


def files_of(path: Path) -> list[Path]:
    """Returns the files of a dump, which is a file or a directory.

    Raises:
        ValueError: there is no such file, or the directory has no dumps.
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
    files = dump_files(path)
    if files:
        return files
    possible_pickles = [*path.glob("*.p*"), *path.glob("dumped_data/*.p*")]
    if any(file.suffix in PICKLES for file in possible_pickles):
        raise ValueError(f"{quoted_path(path)} has no dumps, but pickles: {NO_PICKLES}")
    if any(path.glob("rollout/*/*.jsonl")):
        raise ValueError(f"{quoted_path(path)} has no dumps. {AREAL_ROLLOUTS}")
    raise ValueError(
        f"{quoted_path(path)} has no dumps of tokens; docs/dumps.md shows how train.py"
        " (--dump-details), slime, miles, verl, TRL, NeMo-RL, prime-rl, SkyRL and AReaL write them."
    )


def options_of_run(run: Path) -> dict[str, Any]:
    """Returns the options in a run's config.yaml; none without the file.

    Raises:
        ValueError: the file is not YAML.
    """
    try:
        options = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{quoted_path(run / CONFIG)} is damaged: {first_line(error)}.") from error
    if not isinstance(options, dict):  # an empty file is None
        return {}
    return options


def files_of_run(run: Path) -> list[Path]:
    """Returns the dumps of a run, named by --save-debug-train-data in its config.yaml.

    If they are not where the run wrote them, they may have moved together with its directory.
    """
    option = options_of_run(run).get("save_debug_train_data")
    if not isinstance(option, str):
        return []
    pattern = Path(re.sub(r"\{(rollout_id|rank)\}", "*", option)).absolute()
    in_folder = run.absolute() / pattern.parent.name / pattern.name
    in_run = run.absolute() / pattern.name
    for path in (pattern, in_folder, in_run):
        # Path.glob takes only relative patterns.
        files = list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        if files:
            return files
    return []


def tables_of(path: Path) -> Iterator[TokenTable]:
    """Yields the tables of a file, some samples each."""
    if path.suffix == ".pt":
        yield slime_table(path)
    elif path.suffix != ".parquet":
        yield from _tables(json_lines(path), path)
    else:
        try:
            is_own = is_own_parquet(path)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{path} cannot be read as parquet: {first_line(error)}.") from error
        if is_own:
            yield from parquet_tables(path)
        else:
            yield from _tables(parquet_rows(path), path)


def _tables(rows: Iterator[tuple[str, dict[str, Any]]], path: Path) -> Iterator[TokenTable]:
    """Yields tables of about CHUNK_TOKENS tokens from the rows of a file."""
    form: RowFormat | None = None
    parts: list[SampleParts] = []
    locations: list[str] = []
    tokens = 0
    for where, row in rows:
        try:
            # The first row decides, so that a row without a key is an error of this format.
            form = form or format_of(row)
            part = form.parts(row, path)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from error
        if tokens >= CHUNK_TOKENS:
            yield _table(parts, locations, form, path)
            parts = []
            locations = []
            tokens = 0
        parts.append(part)
        locations.append(where)
        tokens += len(part.rollout_log_prob) + len(part.text or "") + len(part.prompt_text or "")
    if form is not None:
        yield _table(parts, locations, form, path)


def _table(
    parts: Sequence[SampleParts], locations: Sequence[str], form: RowFormat, path: Path
) -> TokenTable:
    """Returns the table of some rows; refuses numbers that are no log-probs.

    Args:
        parts: The rows' content.
        locations: The rows' files and lines, for messages.
        form: The rows' format.
        path: The file.
    """
    try:
        table = TokenTable.from_parts(parts, {"source": form.source, **form.metadata})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for log_probs in (table.train_log_prob, table.rollout_log_prob):
        # NaN, the log-prob that an engine did not return, is not above anything.
        wrong = (table.loss_mask > 0) & (log_probs > HIGHEST_LOG_PROB)
        if wrong.any():
            first = int(wrong.argmax())
            location = locations[table.sample[first]]
            raise ValueError(
                f"{location} has a log-prob of {log_probs[first]:.4g}; natural logarithms of"
                " probabilities are at most 0."
            )
    return table


def slime_table(path: Path) -> TokenTable:
    """Returns the table of a `.pt` file in slime's layout, from this program, slime or miles.

    Source: THUDM/slime, slime/observability/train_data_utils.py, save_debug_train_data:
    format_version 2 has a list of samples. Earlier versions, and radixark/miles,
    miles/utils/train_dump_utils.py, have a dict of lists "rollout_data". Log-probs cover the
    response; the training engine computed `log_probs` before the rollout's first step.

    Raises:
        ValueError: the file is damaged, needs too much memory, or lacks log-probs.
    """
    content = _load_pt(path)
    file_bytes = path.stat().st_size
    metadata = content.get("metadata")  # only this program's dumps have it
    if not isinstance(metadata, dict):
        metadata = {"source": SLIME.source, **SLIME.metadata}
    parts: list[SampleParts] = []
    size = 0
    where = ""
    try:
        if "samples" in content:
            samples = content["samples"]
        else:
            samples = _transposed(content["rollout_data"])
        for index, sample in enumerate(samples):
            where = f", sample {index}"
            part = SLIME.parts({"step": content.get("rollout_id"), **sample}, path)
            parts.append(part)
            for value in vars(part).values():
                if isinstance(value, np.ndarray):
                    size += value.nbytes
            # Tensors may be views of one small storage, for example expanded ones.
            if is_too_large(size, file_bytes):
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


def _load_pt(path: Path) -> dict[str, Any]:
    """The content of a `.pt` file, without running its code."""
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save does not compress, so larger entries are a decompression bomb.
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise ValueError("entries larger than the file")
        content = load_tensors(path)
    except UnsafeFile as error:
        raise ValueError(f"{error}.") from None
    except Exception as error:  # unpickling a damaged file may raise anything
        raise ValueError(
            f"{path} cannot be read as a dump in slime's format: {first_line(error)}."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, but a dump in slime's format is a dict."
        )
    return content


def _transposed(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One dict per sample, from lists with one entry per sample."""
    samples: list[dict[str, Any]] = [{} for _ in range(len(data["response_lengths"]))]
    for key, values in data.items():
        # Other entries describe the complete rollout.
        if isinstance(values, list | tuple | Tensor) and len(values) == len(samples):
            for sample, value in zip(samples, values, strict=True):
                sample[key] = value
    return samples
