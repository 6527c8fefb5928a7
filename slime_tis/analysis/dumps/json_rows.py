"""Per-token dumps of other projects that are JSON, one object per sample; each as that project's own source writes it.

A row becomes the parts of one sample. What is wrong with a row is a ValueError that names the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_tis.analysis.dumps.table import Column, SampleParts
from slime_tis.errors import quoted

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A project's form of a row."""

    source: str
    """Name in the metadata."""
    keys: frozenset[str]
    """Keys that rows of this form have, and others do not."""
    parts: Callable[[Row, Path], SampleParts]
    """The sample of a row of a file."""
    metadata: Mapping[str, Any]
    """Of the tables."""


def nemo_rl(row: Row, path: Path) -> SampleParts:
    """A row of NeMo-RL's `train_data_step{step}.jsonl`.

    Source: NVIDIA-NeMo/RL, nemo_rl/algorithms/grpo.py (the block "Log training data") and
    nemo_rl/utils/logger.py, log_batched_dict_as_jsonl: every value is a list of one entry, that of the sample. Token
    columns are padded sequences of prompt and response with `input_lengths` tokens, entry t being of token t;
    prev_logprobs are the training engine's and generation_logprobs the rollout engine's.
    """
    row = {key: _only(value, key) for key, value in row.items() if key in NEMO_RL_KEYS}
    total = _whole_number(row, "input_lengths") if "input_lengths" in row else len(row["prev_logprobs"])
    train = _numbers(row, "prev_logprobs")
    if total > len(train):
        raise ValueError(f"has input_lengths {total} but {len(train)} prev_logprobs.")
    mask = _numbers(row, "token_loss_mask", len(train))[:total] > 0
    response = slice(int(mask.argmax()) if mask.any() else total, total)
    counted = mask & (float(row.get("sample_loss_mask", 1.0)) > 0)
    advantage = row.get("advantages")
    tokens = None if row.get("token_ids") is None else _numbers(row, "token_ids", len(train))
    step = re.search(r"train_data_step(\d+)", path.name)
    return SampleParts(
        train_log_prob=train[response],
        rollout_log_prob=_numbers(row, "generation_logprobs", len(train))[response],
        loss_mask=counted[response],
        token=None if tokens is None else tokens[response],
        prompt=None if tokens is None else tokens[: response.start],
        advantage=None if advantage is None else _spread(row, "advantages", len(train))[response],
        reward=_number(row, "filtered_rewards" if "filtered_rewards" in row else "rewards"),
        step=int(step[1]) - 1 if step else None,
    )


NEMO_RL_KEYS = (
    *("rewards", "filtered_rewards", "input_lengths", "token_ids", "token_loss_mask", "sample_loss_mask"),
    *("advantages", "generation_logprobs", "prev_logprobs"),
)


def prime_rl(row: Row, path: Path) -> SampleParts:
    """A row of prime-rl's `token_exports/step_{step}/rank_{rank}.jsonl`.

    Source: PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/token_export.py, TokenExporter, schema_version 1 (a
    fork has 2 with more columns): sequences of prompt and response, entry t being of token t, null where a number is
    not finite. `is_masked` are the tokens that its loss leaves out.
    """
    train = _numbers(row, "trainer_logprobs")
    mask = _numbers(row, "loss_mask", len(train)) > 0
    response = slice(int(mask.argmax()) if mask.any() else len(train), len(train))
    tokens = _numbers(row, "token_ids", len(train))
    left_out = row.get("is_masked")
    known = left_out is not None and None not in left_out
    return SampleParts(
        train_log_prob=train[response],
        rollout_log_prob=_numbers(row, "inference_logprobs", len(train))[response],
        loss_mask=mask[response],
        token=tokens[response],
        prompt=tokens[: response.start],
        rejected=(_numbers(row, "is_masked", len(train)) > 0)[response] & mask[response] if known else None,
        advantage=_numbers(row, "advantages", len(train))[response],
        entropy=_numbers(row, "entropy", len(train))[response],
        step=_whole_number(row, "step"),
        reward=_mean(_numbers(row, "rewards", len(train))[response]) if row.get("rewards") is not None else None,
    )


def verl(row: Row, path: Path) -> SampleParts:
    """A row of verl's `trainer.rollout_data_dir/{step}.jsonl` that carries log-probs.

    Source: verl-project/verl, verl/trainer/ppo/ray_trainer.py, _write_generations: input, output, gts, score, step
    and every list that reward functions return with the score. verl itself writes no log-probs there, and rewards run
    before old_log_probs exist. The patch in docs/dumps.md adds the keys of its batch (old_log_probs,
    rollout_log_probs, response_mask, responses, advantages) as lists over the response.
    """
    missing = [name for name in ("old_log_probs", "rollout_log_probs") if row.get(name) is None]
    if missing:
        raise ValueError(
            f"is a generation of verl without {' and '.join(missing)}; the patch in docs/dumps.md adds them, "
            "or write JSONL with train_log_probs, rollout_log_probs and loss_mask."
        )
    length = len(row["old_log_probs"]) if isinstance(row["old_log_probs"], list) else None
    return SampleParts(
        train_log_prob=_numbers(row, "old_log_probs"),
        rollout_log_prob=_numbers(row, "rollout_log_probs", length),
        loss_mask=_optional(row, "response_mask", length),
        token=_optional(row, "responses", length),
        advantage=None if row.get("advantages") is None else _spread(row, "advantages", length or 0),
        reward=_number(row, "score"),
        step=_whole_number(row, "step") if row.get("step") is not None else None,
        text=_text(row, "output"),
        prompt_text=_text(row, "input"),
    )


def plain(row: Row, path: Path) -> SampleParts:
    """A row of one's own: train_log_probs, rollout_log_probs and loss_mask over the response.

    Optional: old_log_probs, tokens, advantages (a list or one number), entropy, weight_versions, prompt (token ids),
    reward, step, group, response and prompt_text.
    """
    train = _numbers(row, "train_log_probs")
    length = len(train)
    return SampleParts(
        train_log_prob=train,
        old_log_prob=_optional(row, "old_log_probs", length),
        rollout_log_prob=_numbers(row, "rollout_log_probs", length),
        loss_mask=_optional(row, "loss_mask", length),
        token=_optional(row, "tokens", length),
        advantage=None if row.get("advantages") is None else _spread(row, "advantages", length),
        entropy=_optional(row, "entropy", length),
        weight_version=_optional(row, "weight_versions", length),
        prompt=_optional(row, "prompt", None),
        reward=_number(row, "reward"),
        step=_whole_number(row, "step") if row.get("step") is not None else None,
        group=_whole_number(row, "group") if row.get("group") is not None else None,
        text=_text(row, "response"),
        prompt_text=_text(row, "prompt_text"),
    )


FORMATS = (
    RowFormat(
        source="nemo_rl",
        keys=frozenset({"prev_logprobs", "generation_logprobs"}),
        parts=nemo_rl,
        metadata={"old_policy": "recomputed"},
    ),
    RowFormat(
        source="prime_rl",
        keys=frozenset({"trainer_logprobs", "inference_logprobs"}),
        parts=prime_rl,
        metadata={"old_policy": "current", "criteria": ["is_masked"]},
    ),
    RowFormat(source="plain", keys=frozenset({"train_log_probs"}), parts=plain, metadata={"old_policy": "current"}),
    RowFormat(
        source="verl", keys=frozenset({"input", "output", "score"}), parts=verl, metadata={"old_policy": "recomputed"}
    ),
)
"""The forms that rows are recognised by, the first that fits."""


def format_of(row: Row) -> RowFormat:
    """The form of a row.

    Raises:
        ValueError: it is of none that is known.
    """
    for known in FORMATS:
        if known.keys <= row.keys():
            return known
    if "rollout_log_probs" in row and row.keys() & {"response_ids", "response_length"}:
        raise ValueError(
            "is of --save-debug-rollout-data, without training log-probs; --save-debug-train-data has them."
        )
    raise ValueError(
        f"has none of the known forms of per-token dumps, but the keys {quoted(sorted(map(str, row)))}; plain rows "
        "have train_log_probs, rollout_log_probs and loss_mask."
    )


def _only(value: Any, key: str) -> Any:
    """The entry of a list of one."""
    if not isinstance(value, list) or len(value) != 1:
        raise ValueError(f"has {key} that is not a list with one entry, that of the sample.")
    return value[0]


def _numbers(row: Row, key: str, length: int | None = None) -> Column:
    """A list of numbers, null as NaN, as float64."""
    values = row.get(key)
    if not isinstance(values, list):
        raise ValueError(f"has {key} that is {quoted(values, 40)} but must be a list of numbers.")
    try:
        numbers = np.array(values)
        if numbers.dtype.kind == "O":  # null among them, or a number beyond 64 bits
            if any(value is not None and not isinstance(value, int | float) for value in values):
                raise ValueError
            numbers = np.array(values, np.float64)
        if numbers.dtype.kind not in "fiub" or numbers.ndim != 1:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"has {key} with an entry that is no number.") from None
    if length is not None and len(numbers) != length:
        raise ValueError(f"has {len(numbers)} entries of {key} but {length} of the log-probs.")
    return numbers.astype(np.float64, copy=False)


def _optional(row: Row, key: str, length: int | None) -> Column | None:
    return None if row.get(key) is None else _numbers(row, key, length)


def _spread(row: Row, key: str, length: int) -> Column:
    """A value per token, or one value for all."""
    value = row[key]
    if isinstance(value, list) and len(value) == 1 and length != 1:
        value = value[0]
    return np.full(length, _number({key: value}, key)) if not isinstance(value, list) else _numbers(row, key, length)


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    if value is not None and not isinstance(value, int | float):
        raise ValueError(f"has {key} that is {quoted(value, 40)} but must be a number.")
    try:
        return None if value is None else float(value)
    except OverflowError:
        raise ValueError(f"has {key} that is {quoted(value, 40)}, beyond any number of 64 bits.") from None


def _whole_number(row: Row, key: str) -> int:
    value = row.get(key)
    if not isinstance(value, int):
        raise ValueError(f"has {key} that is {quoted(value, 40)} but must be a whole number.")
    return value


def _text(row: Row, key: str) -> str | None:
    value = row.get(key)
    return value if isinstance(value, str) else None


def _mean(values: Column) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None
