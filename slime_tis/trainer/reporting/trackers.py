"""Experiment trackers: Weights & Biases, Trackio and MLflow, each through its own library.

Their servers, keys and offline modes come from their own environment variables, so that no secret
is on a command line.
"""

import io
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from slime_tis.errors import first_line
from slime_tis.progress import print_line
from slime_tis.trainer.configs.loop import ReportingConfig
from slime_tis.trainer.configs.servers import SECRET_FLAG

PROJECT = "slime_tis"
"""Project of runs without --wandb-project or --tracker-project."""
HIDDEN = "(hidden)"
"""What a tracker gets in place of a secret."""
MLFLOW_PARAMS = 100
"""Most parameters of one request, by MLflow's REST API."""
MLFLOW_VALUE = 500
"""Characters of a parameter; MLflow servers before 2.9 refuse longer ones."""
MLFLOW_START = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Environment variables of MLflow at the start of a run, unless the user has set them. With the
defaults of MLflow, a server that does not answer would delay the start by twenty minutes."""
MLFLOW_CLOSE = 60.0
"""Seconds that the end of a run waits for MLflow's server. MLflow repeats a request for minutes."""
NOT_MLFLOW = re.compile(r"[^\w\-. /]")
"""Characters that MLflow refuses in the name of a metric."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a tracker shows of a run."""

    identity: str
    """Identity of the run, the same after a resumption."""
    directory: Path
    """The run directory."""
    options: Mapping[str, Any]
    """The effective configuration, without secrets."""

    @property
    def name(self) -> str:
        """The name of the run directory with the start of the identity, since names repeat."""
        return f"{self.directory.resolve().name}-{self.identity[:8]}"


class WandB:
    """Scalars to Weights & Biases, with the key in WANDB_API_KEY."""

    def __init__(self, config: ReportingConfig, run: RunInfo) -> None:
        import wandb  # an optional package

        self._run = wandb.init(
            project=config.wandb_project or PROJECT,
            group=config.wandb_group,
            mode=config.wandb_mode,
            dir=config.wandb_dir or str(run.directory),
            config=dict(run.options),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Uploads pending metrics and ends the run."""
        self._run.finish()


class Trackio:
    """Scalars to Trackio: a local database, or a server or Space that the environment names."""

    def __init__(self, config: ReportingConfig, run: RunInfo) -> None:
        import trackio  # an optional package

        project = config.tracker_project or PROJECT
        # It prints its advice with escape sequences, also into a log.
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=project,
                name=run.name,
                config=dict(run.options),
                resume="allow",
                embed=False,
                # Its own thread would ask the GPU for its load every ten seconds.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        print(f"trackio: run {run.name}; see `trackio show --project {project}`", flush=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queues the metrics of a step for Trackio's own thread."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Writes pending metrics and ends the run."""
        import trackio

        # Not `self._run.finish()`, after which Trackio finishes the run again at Python's exit.
        with redirect_stdout(io.StringIO()):
            trackio.finish()


@contextmanager
def _few_retries() -> Iterator[None]:
    """Sets `MLFLOW_START` within its block."""
    unset = [variable for variable in MLFLOW_START if variable not in os.environ]
    for variable in unset:
        os.environ[variable] = MLFLOW_START[variable]
    try:
        yield
    finally:
        for variable in unset:
            del os.environ[variable]


class MLflow:
    """Scalars to the server of MLFLOW_TRACKING_URI, or to MLflow's local default."""

    def __init__(self, config: ReportingConfig, run: RunInfo) -> None:
        import mlflow  # an optional package
        from mlflow.entities import Metric

        self._client = mlflow.MlflowClient()
        with _few_retries():
            self._open_run(config, run)
        self._error: Exception | None = None
        self._batches: SimpleQueue[list[Metric] | None] = SimpleQueue()
        # Not MLflow's own queue, whose threads collide when they make the files of a new metric.
        # A daemon, because a server that does not answer must not keep the process alive.
        self._sender = Thread(target=self._send_batches, name="mlflow", daemon=True)
        self._sender.start()

    def _open_run(self, config: ReportingConfig, run: RunInfo) -> None:
        """Finds the run of an earlier process, or makes one with the options."""
        from mlflow.entities import Param

        experiment_id = self._experiment(config.tracker_project)
        tag = "slime_tis.run"
        earlier = self._client.search_runs([experiment_id], f"tags.`{tag}` = '{run.identity}'")
        if earlier:
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {tag: run.identity}
            created = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
            self._run_id = created.info.run_id
            params = []
            for name, value in run.options.items():
                params.append(Param(name, str(value)[:MLFLOW_VALUE]))
            for start in range(0, len(params), MLFLOW_PARAMS):
                chunk = params[start : start + MLFLOW_PARAMS]
                self._client.log_batch(self._run_id, params=chunk)

    def _experiment(self, name: str | None) -> str:
        """Returns the id of an experiment, which is made if it does not exist."""
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        name = name or MLFLOW_EXPERIMENT_NAME.get() or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                # Another run may have made it in the meantime.
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queues the finite metrics of a step; a slow server does not delay training."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = []
        for name, value in metrics.items():
            if math.isfinite(value):
                batch.append(Metric(NOT_MLFLOW.sub("_", name), value, now, step))
        self._batches.put(batch)
        self._raise_first_error()

    def close(self) -> None:
        """Sends pending metrics and ends the run, within `MLFLOW_CLOSE` seconds."""
        self._batches.put(None)
        self._sender.join(MLFLOW_CLOSE)
        self._raise_first_error()
        if self._sender.is_alive():
            raise TimeoutError(f"the server did not answer within {MLFLOW_CLOSE:.0f} s")

    def _send_batches(self) -> None:
        """Sends batches until None ends the run; a later batch may arrive after a failed one."""
        batch = self._batches.get()
        while batch is not None:
            self._attempt(self._client.log_batch, self._run_id, metrics=batch, synchronous=True)
            batch = self._batches.get()
        self._attempt(self._client.set_terminated, self._run_id)

    def _attempt(self, request: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Makes a request and keeps its error, if it is the first one."""
        try:
            request(*args, **options)
        except Exception as error:  # MLflow's, of requests, and of a store in files
            self._error = self._error or error

    def _raise_first_error(self) -> None:
        if self._error is not None:
            raise self._error


TRACKERS: dict[str, Callable[[ReportingConfig, RunInfo], Any]] = {
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}
"""Classes by value of --report-to; they implement `reporters.Reporter`."""


class Tracker:
    """A tracker whose failure does not end the run: metrics.jsonl has the metrics, too."""

    def __init__(self, name: str, config: ReportingConfig, run: RunInfo) -> None:
        self._name = name
        self._failed = False
        try:
            self._tracker = TRACKERS[name](config, run)
        except Exception as error:  # the libraries' errors have no common class
            raise ValueError(
                f"{config.destinations[name]} but {name} does not start: {first_line(error)};"
                " set up its login or server, or remove it."
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Reports the metrics of a step; the first failure is a warning."""
        self._attempt(lambda: self._tracker.log(metrics, step))

    def close(self) -> None:
        """Ends the tracker's run; a failure is a warning."""
        self._attempt(self._tracker.close)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if not self._failed:
                print_line(
                    f"warning: {self._name} does not get all metrics: {first_line(error)};"
                    " metrics.jsonl has them.",
                    sys.stderr,
                )
            self._failed = True


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options for a tracker, with `HIDDEN` for those whose name is that of a secret.

    The program's own options refuse secrets; only options of user functions may have them.
    """
    shown: dict[str, Any] = {}
    for name, value in options.items():
        # An option that ends with _env has the name of a variable, no secret.
        words = str(name).lower().replace("_", "-")
        if SECRET_FLAG.fullmatch(words) and isinstance(value, str):
            shown[name] = HIDDEN
        elif isinstance(value, Mapping):
            shown[name] = without_secrets(value)
        else:
            shown[name] = value
    return shown
