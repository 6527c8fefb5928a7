"""The directory of a run, with its configuration and identity.

Reports of an earlier run are moved aside.
"""

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_tis.atomic_files import CONFIG, METRICS, free_name, metrics_before, write_atomically

TENSORBOARD = "tensorboard"
"""Directory of TensorBoard's events."""
IDENTITY = "run.json"
"""File with the identity of the run, which its checkpoints have, too."""
EARLIER = "earlier"
"""Directory of the reports of earlier runs."""
REPORTS = (CONFIG, METRICS, TENSORBOARD, IDENTITY)
OWN_NAMES = frozenset((*REPORTS, EARLIER, "wandb"))
"""Names in a run directory that the run itself uses."""


def prepare_run_directory(
    directory: str, effective_config: Mapping[str, Any], resume_step: int, run: str | None = None
) -> Path:
    """Makes the directory of a run and writes its configuration and identity.

    A resumed run (`resume_step` > 0) continues its reports. Other reports in the directory move to
    `earlier/TIME/`.
    """
    import yaml  # here, because the command line imports this module without PyYAML, too

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if not (resume_step > 0 and continues(path, run)):
        _set_aside(path)
    identity = {"run": run or uuid.uuid4().hex}
    write_atomically(path / IDENTITY, json.dumps(identity) + "\n")
    config = yaml.safe_dump(dict(effective_config), sort_keys=False, allow_unicode=True)
    write_atomically(path / CONFIG, config)
    return path


def continues(directory: Path, run: str | None) -> bool:
    """Returns whether the reports in a directory belong to a run."""
    try:
        identity = json.loads((directory / IDENTITY).read_text(encoding="utf-8"))
        return bool(identity["run"] == run)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def foreign_file(directory: Path) -> str | None:
    """Returns a file named like a report in a directory that no run has used, or None."""
    if (directory / IDENTITY).exists() or (directory / METRICS).exists():
        return None
    for name in REPORTS:
        if (directory / name).exists():
            return name
    return None


def check_metrics(directory: str, run: str) -> None:
    """Raises ValueError if the metrics.jsonl that a resumed run continues has a damaged line."""
    if continues(Path(directory), run):
        metrics_before(Path(directory) / METRICS, 0)


def _set_aside(path: Path) -> None:
    """Moves the reports of an earlier run to `earlier/TIME/`, named after its last metrics."""
    reports = [path / name for name in REPORTS if (path / name).exists()]
    if not reports:
        return
    last = path / METRICS if (path / METRICS).exists() else reports[0]
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime(last.stat().st_mtime))
    earlier = free_name(path / EARLIER / name)
    earlier.mkdir(parents=True)
    for report in reports:
        report.rename(earlier / report.name)
