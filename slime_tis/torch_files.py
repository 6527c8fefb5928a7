"""Loads files of `torch.save` that others may have written: tensors and plain data, never code."""

import pickle
import re
from pathlib import Path
from typing import IO, Any

import torch

from slime_tis.errors import first_line

SAFE_TORCH = (2, 10)
"""The first version of torch whose `weights_only=True` has no known hole.

CVE-2025-32434 (code runs, before 2.6) and CVE-2026-24747 (memory is corrupted, before 2.10).
"""
NOT_TENSORS = "it is damaged, or holds objects other than tensors, which are never loaded"
"""The reason for a refusal. It replaces torch's message, which recommends weights_only=False and
thus to run the code."""


class UnsafeFile(ValueError):
    """A file that could run code, or is damaged; it was not loaded. The message names the file."""


class UnsafeTorch(UnsafeFile):
    """This torch cannot load the file safely, whatever the file contains."""


def load_tensors(
    file: str | Path | IO[bytes], *, where: str | Path | None = None, mmap: bool = False
) -> Any:
    """Returns the content of a file of `torch.save`, on the CPU.

    The content is tensors and plain data: numbers, texts, lists, dicts.

    Args:
        file: A path, or an open file.
        where: The file's name in messages; needed for an open file.
        mmap: Whether tensors stay in the file until they are used.

    Raises:
        UnsafeFile: The file holds other objects, or is damaged, or torch is too old.
        OSError: The file cannot be read.
    """
    name = file if where is None else where
    check_torch(name)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:  # unpickling a damaged file may raise anything
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            reason = NOT_TENSORS
        raise UnsafeFile(f"{name} was not loaded: {reason}") from None


def check_torch(where: object) -> None:
    """Raises UnsafeTorch if this torch cannot load `.pt` and `.bin` files of others safely."""
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    assert version is not None, torch.__version__
    if (int(version[1]), int(version[2])) < SAFE_TORCH:
        raise UnsafeTorch(
            f"{where} was not loaded: a file of torch.save can run code in torch"
            f" {torch.__version__}, even with weights_only=True (CVE-2025-32434, CVE-2026-24747);"
            " install torch>=2.10, or convert the file to parquet or safetensors where it was"
            " written."
        )
