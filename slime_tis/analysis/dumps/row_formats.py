"""The forms of other projects' per-token dumps: which key of a row is which column of the table.

A row is one sample: a line of JSON, a row of a parquet file, or a sample of slime's `.pt` file.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from slime_tis.analysis.dumps.files import SLIME_NAMES
from slime_tis.analysis.dumps.table import (
    SAMPLE_COLUMNS,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    Column,
    SampleParts,
)
from slime_tis.errors import quoted

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A project's form of a row."""

    source: str
    """Name of the project in the metadata."""
    identifying_keys: frozenset[str] = frozenset()
    """Keys that only rows of this form have."""
    columns: Mapping[str, str]
    """Key of the row for each column."""
    metadata: Mapping[str, Any]
    """Metadata of the tables."""
    prepare: Callable[[dict[str, Any], Path], None] = lambda row, path: None
    """Changes a row in place before its columns are read."""
    has_prompt: bool = False
    """Whether lists cover prompt and response; the response starts at the first token with a loss
    mask."""

    def parts(self, row: Row, path: Path) -> SampleParts:
        """The sample of a row of a file."""
        row = dict(row)
        self.prepare(row, path)
        length = None
        values: dict[str, Any] = {}
        required = {"train_log_prob", "rollout_log_prob"} | (
            {"loss_mask"} if self.has_prompt else set()
        )
        for column, key in self.columns.items():
            if row.get(key) is None and column not in required:
                continue
            if column in TEXT_COLUMNS:
                values[column] = row[key] if isinstance(row[key], str) else None
            elif column in SAMPLE_COLUMNS:
                values[column] = _number(row, key, whole=column != "reward")
            elif column in ("advantage", "rollout_worker") and not isinstance(
                row[key], list | Tensor
            ):
                values[column] = np.full(length or 0, _number(row, key))
            else:
                values[column] = _numbers(row, key, None if column == "prompt" else length)
            length = len(values["train_log_prob"])
        if self.has_prompt:
            mask = values["loss_mask"] > 0
            start = int(mask.argmax()) if mask.any() else len(mask)
            prompt = values["token"][:start] if "token" in values else None
            values = {
                name: value[start:] if name in TOKEN_COLUMNS else value
                for name, value in values.items()
            }
            values["prompt"] = prompt
            if "rejected" in values:
                values["rejected"] = (values["rejected"] > 0) & mask[start:]
        if "sample_loss_mask" in row and _number(row, "sample_loss_mask") <= 0:
            values["loss_mask"] = np.zeros(len(values["train_log_prob"]), np.uint8)
        return SampleParts(**values)


def _prepare_nemo_rl(row: dict[str, Any], path: Path) -> None:
    """Every value is a list with one entry; token lists are padded and have `input_lengths` tokens."""
    keys = (
        *NEMO_RL_COLUMNS.values(),
        "rewards",
        "filtered_rewards",
        "input_lengths",
        "sample_loss_mask",
    )
    for key in row.keys() & set(keys):
        if not isinstance(row[key], list) or len(row[key]) != 1:
            raise ValueError(f"has {key} that is not a list with one entry.")
        (row[key],) = row[key]
    length = len(_numbers(row, "prev_logprobs"))
    total = row.get("input_lengths", length)
    if not isinstance(total, int) or not 0 <= total <= length:
        raise ValueError(f"has input_lengths {quoted(total, 40)} but {length} prev_logprobs.")
    if isinstance(row.get("advantages"), list) and len(row["advantages"]) == 1:
        (row["advantages"],) = row["advantages"]
    for key in NEMO_RL_COLUMNS.values():
        if isinstance(row.get(key), list):
            _numbers(row, key, length)
            row[key] = row[key][:total]
    row["rewards"] = row.get("filtered_rewards", row.get("rewards"))
    step = re.search(r"train_data_step(\d+)", path.name)
    row["step"] = int(step[1]) - 1 if step else None


def _prepare_prime_rl(row: dict[str, Any], path: Path) -> None:
    """`is_masked` are the tokens that the loss excludes; `rewards` repeats the reward of the sample."""
    if isinstance(row.get("is_masked"), list) and None in row["is_masked"]:
        row["is_masked"] = None
    if row.get("rewards") is not None:
        rewards = _numbers(row, "rewards")
        row["rewards"] = float(np.nanmean(rewards)) if np.isfinite(rewards).any() else None


def _prepare_verl(row: dict[str, Any], path: Path) -> None:
    missing = [name for name in ("old_log_probs", "rollout_log_probs") if row.get(name) is None]
    if missing:
        raise ValueError(
            f"is a generation of verl without {' and '.join(missing)}; the patch in docs/dumps.md"
            " adds them, or write JSONL with train_log_probs, rollout_log_probs and loss_mask."
        )


def _prepare_slime(row: dict[str, Any], path: Path) -> None:
    """`tokens` covers prompt and response; log-probs cover the response."""
    length = int(row["response_lengths"])
    for key in ("log_probs", "rollout_log_probs"):
        if row.get(key) is None:
            raise ValueError(
                f"has no {key}; slime saves both with --use-tis or --get-mismatch-metrics"
            )
    if (entries := len(row["log_probs"])) != length:
        raise ValueError(
            f"has {entries} entries of log_probs for {length} response tokens; if they are slices"
            " of context-parallel ranks, write the dump with a newer slime, which joins them"
        )
    row.setdefault("train_log_prob", row["log_probs"])
    if not isinstance(row.get("weight_versions"), Tensor):
        row["weight_versions"] = None
    row["rewards"] = row.get("local_raw_reward", row.get("rewards"))
    row["sample_index"] = row.get("sample_index", row.get("sample_indices"))
    if row.get("tokens") is not None:
        tokens = _numbers(row, "tokens")
        row["prompt_ids"], row["token"] = np.split(tokens, [len(tokens) - length])


PROJECTS = ("plain", "nemo_rl", "prime_rl", "verl")
COLUMN_KEYS = {
    "train_log_prob": ("train_log_probs", "prev_logprobs", "trainer_logprobs", "old_log_probs"),
    "old_log_prob": ("old_log_probs", "", "", ""),
    "rollout_log_prob": (
        "rollout_log_probs",
        "generation_logprobs",
        "inference_logprobs",
        "rollout_log_probs",
    ),
    "loss_mask": ("loss_mask", "token_loss_mask", "loss_mask", "response_mask"),
    "token": ("tokens", "token_ids", "token_ids", "responses"),
    "rejected": ("", "", "is_masked", ""),
    "advantage": ("advantages", "advantages", "advantages", "advantages"),
    "entropy": ("entropy", "", "entropy", ""),
    "weight_version": ("weight_versions", "", "", ""),
    "rollout_worker": ("rollout_workers", "", "", ""),
    "prompt": ("prompt", "", "", ""),
    "reward": ("reward", "rewards", "rewards", "score"),
    "step": ("step", "step", "step", "step"),
    "group": ("group", "", "", ""),
    "text": ("response", "", "", "output"),
    "prompt_text": ("prompt_text", "", "", "input"),
}
"""Key of a row for each column, in the order of PROJECTS; empty if the project's rows lack the
column."""


def _columns(project: str) -> dict[str, str]:
    index = PROJECTS.index(project)
    return {column: keys[index] for column, keys in COLUMN_KEYS.items() if keys[index]}


NEMO_RL_COLUMNS = _columns("nemo_rl")
FORMATS = (
    # NVIDIA-NeMo/RL, nemo_rl/algorithms/grpo.py ("Log training data"), utils/logger.py
    # log_batched_dict_as_jsonl
    RowFormat(
        source="nemo_rl",
        identifying_keys=frozenset({"prev_logprobs", "generation_logprobs"}),
        columns=NEMO_RL_COLUMNS,
        metadata={"old_policy": "recomputed"},
        prepare=_prepare_nemo_rl,
        has_prompt=True,
    ),
    # PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/token_export.py, TokenExporter,
    # schema_version 1
    RowFormat(
        source="prime_rl",
        identifying_keys=frozenset({"trainer_logprobs", "inference_logprobs"}),
        columns=_columns("prime_rl"),
        metadata={"old_policy": "current", "criteria": ["is_masked"]},
        prepare=_prepare_prime_rl,
        has_prompt=True,
    ),
    RowFormat(
        source="plain",
        identifying_keys=frozenset({"train_log_probs"}),
        columns=_columns("plain"),
        metadata={"old_policy": "current"},
    ),
    # verl-project/verl, verl/trainer/ppo/ray_trainer.py, _write_generations, with the patch in
    # docs/dumps.md
    RowFormat(
        source="verl",
        identifying_keys=frozenset({"input", "output", "score"}),
        columns=_columns("verl"),
        metadata={"old_policy": "recomputed"},
        prepare=_prepare_verl,
    ),
)
"""Forms of rows; the first whose keys a row has is used."""
SLIME = RowFormat(
    source="slime",
    columns={"train_log_prob": "train_log_prob"}
    | {
        name: SLIME_NAMES.get(name, name)
        for name in (*TOKEN_COLUMNS, *SAMPLE_COLUMNS, *TEXT_COLUMNS)
    }
    | {"prompt": "prompt_ids"},
    metadata={"old_policy": "recomputed"},
    prepare=_prepare_slime,
)
"""Samples of slime's, miles's and this program's `.pt` files."""


def format_of(row: Row) -> RowFormat:
    """The form of a row."""
    for known in FORMATS:
        if known.identifying_keys <= row.keys():
            return known
    hint = "plain rows have train_log_probs, rollout_log_probs and loss_mask."
    if "rollout_log_probs" in row and row.keys() & {"response_ids", "response_length"}:
        hint = (
            "--save-debug-rollout-data has no training log-probs; --save-debug-train-data has them."
        )
    elif row.keys() >= {"head_version", "tail_version"}:
        hint = f"AReaL's rollout files have no log-probs of training; convert its batches: {hint}"
    raise ValueError(f"has an unknown form, with the keys {quoted(sorted(map(str, row)))}; {hint}")


def _numbers(row: Row, key: str, length: int | None = None) -> Column:
    """A tensor or a list of numbers as an array; null is NaN."""
    values = row.get(key)
    if isinstance(values, Tensor | np.ndarray):
        numbers: Column = (
            values.detach().resolve_conj().numpy() if isinstance(values, Tensor) else values
        )
    elif not isinstance(values, list):
        raise ValueError(f"has {key} that is {quoted(values, 40)} but must be a list of numbers.")
    else:
        try:
            numbers = np.array(values)
            if numbers.dtype.kind == "O" and all(
                value is None or isinstance(value, int | float) for value in values
            ):
                numbers = np.array(values, np.float64)
            if numbers.dtype.kind not in "fiub" or numbers.ndim != 1:
                raise ValueError
        except (ValueError, OverflowError):  # nested lists, text, or huge numbers
            raise ValueError(f"has {key} with an entry that is not a number of 64 bits.") from None
    if length is not None and len(numbers) != length:
        raise ValueError(f"has {len(numbers)} entries of {key} but {length} log-probs.")
    return numbers


def _number(row: Row, key: str, *, whole: bool = False) -> Any:
    value = row[key].item() if isinstance(row[key], Tensor) else row[key]
    if not isinstance(value, int if whole else int | float):
        raise ValueError(
            f"has {key} {quoted(value, 40)}, which is not a {'whole ' if whole else ''}number."
        )
    return value
