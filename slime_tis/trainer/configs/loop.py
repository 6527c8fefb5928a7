"""Options of the training loop and of reports: run directory, TensorBoard, trackers."""

import dataclasses
import importlib.util
import string
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, Literal

from slime_tis.errors import quoted
from slime_tis.options.fields import Limits, check_fields, flag, option

loop_option = partial(option, group="training loop")

debug_option = partial(option, group="debugging")

reporting_option = partial(option, group="reporting")


TENSORBOARD = ("--use-tensorboard", "--report-to=tensorboard")
"""Flags that write TensorBoard's events."""
WANDB = ("--use-wandb", "--report-to=wandb")
"""Flags that report to Weights & Biases."""
Destination = Literal["tensorboard", "wandb", "trackio", "mlflow", "prometheus"]
PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
}
"""The package that a destination of --report-to needs."""
MOST_SAMPLES = 1_048_576
"""Largest number of samples in a rollout: 4,096 prompts with 256 samples each."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Length of the loop, optimizer steps per rollout, and dumps to write or replay."""

    num_rollout: Annotated[int | None, Limits(ge=1, le=10_000_000)] = loop_option(None)
    """Rollouts of the run; unset: num_epoch passes over the prompts."""
    num_epoch: Annotated[int | None, Limits(ge=1, le=1_000_000)] = loop_option(None)
    """Passes over the training prompts; replaces num_rollout."""
    global_batch_size: Annotated[int | None, Limits(ge=1, le=MOST_SAMPLES)] = loop_option(None)
    """Samples of one optimizer step over all ranks; unset: from num_steps_per_rollout."""
    num_steps_per_rollout: Annotated[int | None, Limits(ge=1, le=MOST_SAMPLES)] = loop_option(None)
    """Optimizer steps per rollout; unset: from global_batch_size, or 1."""
    debug_rollout_only: bool = debug_option(False)
    """Sample and score without training."""
    save_debug_rollout_data: str | None = debug_option(None, metavar="FILE")
    """File for samples; {rollout_id} becomes a number."""
    save_debug_train_data: str | None = debug_option(None, metavar="FILE")
    """File for the trained tokens, parquet or slime's .pt; {rollout_id} and {rank} become
    numbers."""
    dump_details: str | None = debug_option(None, metavar="DIR")
    """Directory for both kinds of files, if their flags are unset."""
    load_debug_rollout_data: str | None = debug_option(None, metavar="FILE")
    """File of samples to train on without sampling; {rollout_id} becomes a number."""
    ci_train_rollout_logprob_abs_diff_threshold: Annotated[
        float | None, Limits(ge=0, le=1_000, hint="slime's default is 0.1")
    ] = debug_option(None)
    """Stop the run with status 1 after a step whose train/train_rollout_logprob_abs_diff is larger,
    nats per token."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_rollout is None and self.num_epoch is None:
            raise ValueError(
                "--num-rollout is unset and so is --num-epoch; add one of them to bound the run."
            )
        if self.num_rollout is not None and self.num_epoch is not None:
            raise ValueError("--num-rollout and --num-epoch are both given; remove one of the two.")
        self._check_saved_files()
        _check_pattern("--load-debug-rollout-data", self.load_debug_rollout_data, ("rollout_id",))
        if self.debug_rollout_only:
            self._check_without_training()

    def _check_saved_files(self) -> None:
        """Refuses names under which one dump would overwrite another."""
        saved = self.save_debug_rollout_data
        trained = self.save_debug_train_data
        for name, pattern, fields in (
            ("--save-debug-rollout-data", saved, ("rollout_id",)),
            ("--save-debug-train-data", trained, ("rollout_id", "rank")),
        ):
            _check_pattern(name, pattern, fields)
            # num_rollout is None if num_epoch bounds the run, which may be several rollouts.
            if pattern is None or self.num_rollout == 1:
                continue
            first = pattern.format(rollout_id=0, rank=0)
            second = pattern.format(rollout_id=1, rank=0)
            if first == second:
                raise ValueError(
                    f"{name} is {quoted(pattern)}, one file for all rollouts; put {{rollout_id}}"
                    " into it."
                )
        if trained is not None and trained == saved:
            raise ValueError(
                f"--save-debug-train-data and --save-debug-rollout-data are both {quoted(trained)}."
            )

    def _check_without_training(self) -> None:
        """Refuses options of training beside --debug-rollout-only."""
        for name in (
            "load_debug_rollout_data",
            "save_debug_train_data",
            "ci_train_rollout_logprob_abs_diff_threshold",
        ):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{flag(name)} has no effect with --debug-rollout-only, which does not train;"
                    " remove one."
                )

    def with_dump_patterns(self) -> "LoopConfig":
        """Returns the options with the files of dump_details."""
        if self.dump_details is None:
            return self
        # The directory's own braces are text, not fields.
        directory = self.dump_details.replace("{", "{{").replace("}", "}}")
        patterns: dict[str, str] = {}
        if self.load_debug_rollout_data is None:  # loaded samples are not saved again
            patterns["save_debug_rollout_data"] = f"{directory}/rollout_data/{{rollout_id}}.jsonl"
        if not self.debug_rollout_only:
            patterns["save_debug_train_data"] = (
                f"{directory}/train_data/{{rollout_id}}_{{rank}}.parquet"
            )
        files: dict[str, Any] = {}
        for name, pattern in patterns.items():
            files[name] = getattr(self, name) or pattern
        # If all files are given, no pattern is left in them.
        if not files.items() & patterns.items():
            raise ValueError(
                "--dump-details has no effect: the files of all dumps are given; remove it."
            )
        return dataclasses.replace(self, **files)


def _check_pattern(label: str, pattern: str | None, names: tuple[str, ...]) -> None:
    """Refuses a file name with fields other than {NAME}."""
    try:
        # Field name, format specification and conversion; the name is None for text at the end.
        parsed = [field[1:] for field in string.Formatter().parse(pattern or "")]
        fields = [field for field in parsed if field[0] is not None]
    except ValueError:
        # A field that no option allows, so that the message below follows.
        fields = [("unbalanced braces", "", None)]
    plain_fields = [(name, "", None) for name in names]
    if any(field not in plain_fields for field in fields):
        allowed = " and ".join(f"{{{name}}}" for name in names)
        raise ValueError(
            f"{label} is {quoted(pattern)} but may have no field besides {allowed}; double other"
            " braces."
        )


@dataclass(frozen=True, kw_only=True)
class ReportingConfig:
    """Where the metrics of a run are reported."""

    output_dir: str = reporting_option("runs/latest", metavar="DIR")
    """Run directory."""
    report_to: tuple[Destination, ...] | None = reporting_option(None)
    """Where metrics go besides the console and metrics.jsonl; trackers read their keys and servers
    from their own environment variables."""
    tracker_project: str | None = reporting_option(
        None, metavar="NAME", needs=("--report-to=trackio", "--report-to=mlflow")
    )
    """Project of Trackio, experiment of MLflow; unset: slime_tis."""
    use_tensorboard: bool = reporting_option(False)
    """Same as --report-to tensorboard, as in slime: events in the run directory."""
    tb_project_name: str | None = reporting_option(None, metavar="NAME", needs=TENSORBOARD)
    """Sub-directory that groups runs."""
    tb_experiment_name: str | None = reporting_option(None, metavar="NAME", needs=TENSORBOARD)
    """Sub-directory that names the run."""
    use_wandb: bool = reporting_option(False)
    """Same as --report-to wandb, as in slime: Weights & Biases with the key in WANDB_API_KEY."""
    wandb_project: str | None = reporting_option(None, metavar="NAME", needs=WANDB)
    """Project; unset: slime_tis."""
    wandb_group: str | None = reporting_option(None, metavar="NAME", needs=WANDB)
    """Group of the run."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = reporting_option(
        None, needs=WANDB
    )
    """Mode; unset: from the environment."""
    wandb_dir: str | None = reporting_option(None, metavar="DIR", needs=WANDB)
    """Directory for files of Weights & Biases; unset: the run directory."""
    prometheus_port: Annotated[int | None, Limits(ge=1, le=65_535)] = reporting_option(None)
    """Port on 127.0.0.1 that serves the last step's metrics to Prometheus."""
    progress: bool = reporting_option(True)
    """One line on stderr with the remaining time, if it is a terminal; elsewhere a line per minute
    of a rollout."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("tb_project_name", "tb_experiment_name"):
            path = PurePath(getattr(self, name) or "")
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(
                    f"{flag(name)} is {str(path)!r}, which leads out of the run directory; give a"
                    " plain name."
                )
        if "prometheus" in self.destinations and self.prometheus_port is None:
            raise ValueError(
                "--report-to has prometheus but no port is given; add --prometheus-port N."
            )
        for name, given in self.destinations.items():
            package = PACKAGES[name]
            if not _is_installed(package):
                raise ValueError(
                    f"{given} but {package} is not installed; run pip install {package}."
                )

    @property
    def destinations(self) -> dict[str, str]:
        """The values of --report-to with those of slime's flags, and how the user gave them."""
        given = {}
        if self.use_tensorboard:
            given["tensorboard"] = "--use-tensorboard is on"
        if self.use_wandb:
            given["wandb"] = "--use-wandb is on"
        if self.prometheus_port is not None:
            given["prometheus"] = "--prometheus-port is set"
        for name in self.report_to or ():
            given[name] = f"--report-to has {name}"
        return given


def _is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    spec = importlib.util.find_spec(package)
    # A directory without Python code is a package, too: offline runs of W&B make one named wandb.
    return spec is not None and spec.origin is not None
