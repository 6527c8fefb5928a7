"""The directory of a run: made once, its configuration written, an earlier run in it set aside."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

CONFIG, METRICS, SUMMARY, TENSORBOARD = "config.yaml", "metrics.jsonl", "summary.png", "tensorboard"


def prepare_run_directory(directory: str, effective_config: Mapping[str, Any], resume_step: int) -> Path:
    """Makes the directory of a run and writes its configuration.

    Where a run starts afresh in a directory that another one has used, the reports of that one move to
    `earlier/TIME/`: nothing is lost and no two runs are mixed. A resumed run goes on with what it finds.

    Args:
        directory: path of the run directory.
        effective_config: plain values, written as config.yaml.
        resume_step: first step that will be logged; 0 starts afresh.

    Returns:
        The directory.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if resume_step == 0 and (path / METRICS).exists():
        _set_aside(path)
    write_atomically(path / CONFIG, yaml.safe_dump(dict(effective_config), sort_keys=False, allow_unicode=True))
    return path


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file that is either the old one or the whole new one, whenever the process dies."""
    with written_whole(path) as partial, open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` at the end, whole; after an error the old file is there still."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _set_aside(path: Path) -> None:
    written = time.localtime((path / METRICS).stat().st_mtime)
    earlier = path / "earlier" / time.strftime("%Y%m%d-%H%M%S", written)
    earlier.mkdir(parents=True)
    for name in (CONFIG, METRICS, SUMMARY, TENSORBOARD):
        if (path / name).exists():
            (path / name).rename(earlier / name)
