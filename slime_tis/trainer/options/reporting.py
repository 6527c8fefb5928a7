"""Options of the reports: the run directory, the progress bar, TensorBoard and Weights & Biases."""

import importlib.util
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Annotated, Literal

from slime_tis.limits import Limits, check_fields, flag, option

reporting_option = partial(option, group="reporting")


@dataclass(frozen=True, kw_only=True)
class ReportingConfig:
    """Where the metrics of a run are reported."""

    output_dir: str = reporting_option("runs/latest", metavar="DIR")
    """Run directory."""
    use_tensorboard: bool = reporting_option(False)
    """Write TensorBoard events to the run directory."""
    tb_project_name: str | None = reporting_option(None, metavar="NAME", needs=("--use-tensorboard",))
    """Sub-directory that groups runs."""
    tb_experiment_name: str | None = reporting_option(None, metavar="NAME", needs=("--use-tensorboard",))
    """Sub-directory that names the run."""
    use_wandb: bool = reporting_option(False)
    """Log to Weights & Biases with the key in WANDB_API_KEY."""
    wandb_project: str | None = reporting_option(None, metavar="NAME", needs=("--use-wandb",))
    """Project; unset: slime_tis."""
    wandb_group: str | None = reporting_option(None, metavar="NAME", needs=("--use-wandb",))
    """Group of the run."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = reporting_option(None, needs=("--use-wandb",))
    """Mode; unset: from the environment."""
    wandb_dir: str | None = reporting_option(None, metavar="DIR", needs=("--use-wandb",))
    """Directory of its files; unset: the run directory."""
    prometheus_port: Annotated[int | None, Limits(ge=1, le=65_535)] = reporting_option(None)
    """Port on 127.0.0.1 that serves the last step's metrics to Prometheus."""
    progress: bool = reporting_option(True)
    """Progress bar, if stderr is a terminal."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("tb_project_name", "tb_experiment_name"):
            path = PurePath(getattr(self, name) or "")
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(
                    f"{flag(name)} is {str(path)!r}, which leads out of the run directory; give a plain name."
                )
        packages = {"use_tensorboard": "tensorboard", "use_wandb": "wandb", "prometheus_port": "prometheus_client"}
        for name, package in packages.items():
            if getattr(self, name) and importlib.util.find_spec(package) is None:
                raise ValueError(f"{flag(name)} is on but {package} is not installed; run pip install {package}.")
