"""Writes a `TokenTable` in the format that the name of the file asks for."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from slime_tis.analysis.dumps.parquet import is_own_parquet, write_parquet
from slime_tis.analysis.dumps.pt import write_pt
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.files import FOREIGN

PT_KEYS = {"format_version", "samples", "dp_shards"}
"""Keys that every .pt file of `write_pt` has, beside the metadata."""


def write(path: str | Path, table: TokenTable) -> None:
    """Writes a table: in slime's layout where the name ends in .pt, as parquet elsewhere.

    Raises:
        OSError: the file cannot be written.
    """
    (write_pt if Path(path).suffix == ".pt" else write_parquet)(path, table)


def check_replaceable(path: Path) -> None:
    """Whether a file may be written over: it is absent, or a dump of this program.

    Raises:
        ValueError: it is something else.
    """
    if os.path.lexists(path) and not _is_own(path):
        raise ValueError(FOREIGN)


def _is_own(path: Path) -> bool:
    if not path.is_file():  # a pipe or a device would be waited for
        return False
    try:
        if path.suffix != ".pt":
            return is_own_parquet(path)
        found = torch.load(path, weights_only=True, mmap=True)
    except Exception:  # unpickling another file may raise anything
        return False
    return isinstance(found, dict) and isinstance(found.get("metadata"), dict) and found.keys() >= PT_KEYS
