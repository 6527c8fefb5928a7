"""Writes a `TokenTable` in the format that the name of the file asks for."""

from __future__ import annotations

from pathlib import Path

import torch

from slime_tis.dumps.parquet import is_own_parquet, write_parquet
from slime_tis.dumps.pt import write_pt
from slime_tis.dumps.table import TokenTable


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
    if path.exists() and not _is_own(path):
        raise ValueError("the file is there and is no dump of this program; move it, or give another name")


def _is_own(path: Path) -> bool:
    try:
        if path.suffix != ".pt":
            return is_own_parquet(path)
        found = torch.load(path, weights_only=True, mmap=True)
    except Exception:  # unpickling another file may raise anything
        return False
    return isinstance(found, dict) and isinstance(found.get("metadata"), dict)
