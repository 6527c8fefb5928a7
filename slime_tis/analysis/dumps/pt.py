"""A `TokenTable` as a `.pt` file in slime's layout of train data.

slime's `--save-debug-train-data` (THUDM/slime, slime/observability/train_data_utils.py, format_version 2) saves
{"format_version": 2, "rollout_id", "rank", "samples": [one dict per sample], "dp_shards"}. The keys of a sample that
slime has are used as slime uses them (tokens, total_lengths, response_lengths, loss_masks, rollout_log_probs,
log_probs, advantages, rewards, truncated, sample_index); the other columns have their own names, and the metadata are
under the key "metadata" of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.files import atomic_path

FORMAT_VERSION = 2
"""slime's."""
SLIME_NAMES = {
    "rollout_log_prob": "rollout_log_probs",
    "old_log_prob": "log_probs",
    "loss_mask": "loss_masks",
    "advantage": "advantages",
    "weight_version": "weight_versions",
    "reward": "rewards",
    "group": "group_index",
    "text": "response",
    "prompt_text": "prompt",
}
"""slime's key for a column of the table."""
OWN_COLUMNS = ("train_log_prob", "weight", "bounded_weight", "rejected", "vetoed", "entropy", "turn", "experts")
"""Columns of tokens that slime does not have, under their own names."""


def write_pt(path: str | Path, table: TokenTable) -> None:
    """Writes a table to a file that appears when it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format_version": FORMAT_VERSION,
        "rollout_id": table.metadata.get("rollout_id"),
        "rank": table.metadata.get("rank"),
        "samples": [_sample(table, index) for index in range(len(table))],
        "dp_shards": [],
        "metadata": dict(table.metadata),
    }
    with atomic_path(path) as partial:
        torch.save(content, partial)


def _sample(table: TokenTable, index: int) -> dict[str, Any]:
    first, last = int(table.offsets[index]), int(table.offsets[index + 1])
    prompt = np.zeros(0, np.int32)
    if table.prompt is not None and table.prompt_offsets is not None:
        prompt = table.prompt[table.prompt_offsets[index] : table.prompt_offsets[index + 1]]
    sample: dict[str, Any] = {"response_lengths": last - first, "total_lengths": len(prompt) + last - first}
    if table.token is not None:
        sample["tokens"] = torch.from_numpy(np.concatenate([prompt, table.token[first:last]]).astype(np.int64))
    for name in ("rollout_log_prob", "old_log_prob", "loss_mask", "advantage", "weight_version", *OWN_COLUMNS):
        if (column := getattr(table, name)) is not None:
            sample[SLIME_NAMES.get(name, name)] = torch.from_numpy(column[first:last].copy())
    for name in ("reward", "truncated", "step", "sample_index", "group", "text", "prompt_text"):
        if (column := getattr(table, name)) is not None:
            value = column[index]
            sample[SLIME_NAMES.get(name, name)] = value if isinstance(value, str) else value.item()
    return sample
