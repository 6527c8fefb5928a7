"""Writes a `TokenTable`: as parquet, or as a `.pt` file in slime's layout of train data.

slime's `--save-debug-train-data` (THUDM/slime, slime/observability/train_data_utils.py, format_version 2) saves
{"format_version": 2, "rollout_id", "rank", "samples": [one dict per sample], "dp_shards"}. Samples use slime's keys for
the columns that slime has, and the names of the table for the others. The key "metadata" has the table's metadata.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_tis.analysis.dumps.parquet import is_own_parquet, write_parquet
from slime_tis.analysis.dumps.table import OBJECT_COLUMNS, SAMPLE_COLUMNS, TOKEN_COLUMNS, TokenTable
from slime_tis.files import FOREIGN, atomic_path

FORMAT_VERSION = 2
"""slime's version of the layout."""
PT_KEYS = {"format_version", "samples", "dp_shards"}
"""Keys of every .pt file of `write_pt`, in addition to the metadata."""
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


def write(path: str | Path, table: TokenTable) -> None:
    """Writes a table in slime's layout if the name ends in .pt, else as parquet.

    Raises:
        OSError: the file cannot be written.
    """
    (write_pt if Path(path).suffix == ".pt" else write_parquet)(path, table)


def check_replaceable(path: Path) -> None:
    """Checks that a file may be overwritten: it is absent, or a dump of this program.

    Raises:
        ValueError: it is something else.
    """
    if os.path.lexists(path) and not _is_own(path):
        raise ValueError(FOREIGN)


def _is_own(path: Path) -> bool:
    if not path.is_file():  # reading a pipe or a device would block
        return False
    try:
        if path.suffix != ".pt":
            return is_own_parquet(path)
        content = torch.load(path, weights_only=True, mmap=True)
    except Exception:  # unpickling another file may raise anything
        return False
    return isinstance(content, dict) and isinstance(content.get("metadata"), dict) and content.keys() >= PT_KEYS


def write_pt(path: str | Path, table: TokenTable) -> None:
    """Writes a table to a .pt file, which appears when it is complete.

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
    rows = slice(int(table.offsets[index]), int(table.offsets[index + 1]))
    length = rows.stop - rows.start
    prompt = OBJECT_COLUMNS["prompt"] if table.prompt is None else table.prompt[index]
    sample: dict[str, Any] = {"response_lengths": length, "total_lengths": len(prompt) + length}
    if table.token is not None:
        sample["tokens"] = torch.from_numpy(np.concatenate([prompt, table.token[rows]]).astype(np.int64))
    for name in (*TOKEN_COLUMNS, *SAMPLE_COLUMNS, "text", "prompt_text"):
        column = getattr(table, name)
        if column is None or name == "token":
            continue
        value = torch.from_numpy(column[rows].copy()) if name in TOKEN_COLUMNS else column[index]
        sample[SLIME_NAMES.get(name, name)] = value.item() if isinstance(value, np.generic) else value
    return sample
