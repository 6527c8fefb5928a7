"""Wall times of a step, and reporters: console, JSONL, TensorBoard, Prometheus and trackers."""

import json
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from slime_tis.atomic_files import METRICS, metrics_before, write_atomically
from slime_tis.health import METRIC_PREFIXES
from slime_tis.progress import Progress, print_line
from slime_tis.trainer.configs.loop import ReportingConfig
from slime_tis.trainer.reporting.run_directory import TENSORBOARD, prepare_run_directory
from slime_tis.trainer.reporting.trackers import TRACKERS, RunInfo, Tracker, without_secrets


def _decimal(value: float) -> str:
    """Returns a number with three decimals, or with an exponent if it would be long."""
    if abs(value) < 1e6:
        return f"{value:.3f}"
    return f"{value:.3e}"


def _signed(value: float) -> str:
    """Returns a number with a sign and four decimals, or with an exponent if it would be long."""
    if abs(value) < 1e4:
        return f"{value:+.4f}"
    return f"{value:+.3e}"


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "rollout/raw_reward", _decimal),
    ("loss", "train/loss", _signed),
    ("grad norm", "train/grad_norm", _decimal),
    *(("k3", f"{prefix}mismatch_k3_kl", "{:.1e}".format) for prefix in METRIC_PREFIXES),
    *(
        ("weight", f"{prefix}mis_ratio_mean_after_mis", "{:.3f}".format)
        for prefix in METRIC_PREFIXES
    ),
    *(
        ("rejected", f"{prefix}gradient_kept_fraction", lambda kept: f"{1 - kept:.1%}")
        for prefix in METRIC_PREFIXES
    ),
    ("time", "perf/step_time", "{:.2f} s".format),
)
"""Columns of the console's line: label, metric and format. A missing metric and a rejection of 0
are skipped."""


class Reporter(Protocol):
    """A destination of metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Reports the metrics of a step; steps rise from call to call."""

    def close(self) -> None:
        """Writes pending metrics and closes the destination."""


class Reporters:
    """Several reporters as one."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = reporters

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Reports to all reporters."""
        for reporter in self._reporters:
            reporter.log(metrics, step)

    def close(self) -> None:
        """Closes all reporters."""
        for reporter in self._reporters:
            reporter.close()


class JsonLines:
    """metrics.jsonl: one JSON object per step, complete after every step.

    A value that is not finite becomes null, because JSON has no NaN.
    """

    def __init__(self, path: Path, resume_step: int = 0, *, evaluates_again: bool = False) -> None:
        if os.path.lexists(path):
            lines = metrics_before(path, resume_step, evaluates_again=evaluates_again)
            write_atomically(path, "".join(lines))
        self._path = path
        # The lines above have replaced a user's link by a file. A link that is here now was made
        # by somebody else, and is not followed.
        descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
        self._file = os.fdopen(descriptor, "a", encoding="utf-8")  # open as long as the run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends a line and flushes it."""
        row: dict[str, float | None] = {"step": step}
        for name, value in metrics.items():
            row[name] = value if math.isfinite(value) else None
        line = json.dumps(row, allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"could not write the metrics of step {step} to {self._path}: {error.strerror};"
                " free space (or give another --output-dir), and resume with --load from the"
                " latest checkpoint"
            ) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Console:
    """One readable line per step on stdout; below it the progress if stderr is a terminal."""

    def __init__(self, total_steps: int, resume_step: int = 0, progress: bool = True) -> None:
        self._total = total_steps
        # Without a terminal, the lines of the steps are the progress.
        self._progress = Progress(
            "steps",
            total_steps,
            initial=max(resume_step - 1, 0),
            shown=progress,
            with_lines=False,
            delay=0.0,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Prints the line of a step."""
        print_line(format_step(metrics, step, self._total))
        self._progress.move_to(max(step, self._progress.done))

    def close(self) -> None:
        """Removes the progress."""
        self._progress.close()


class TensorBoard:
    """Scalars as TensorBoard events; a resumed run hides earlier events of the same steps."""

    def __init__(self, directory: Path, resume_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(directory), purge_step=resume_step, flush_secs=10)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds one scalar per metric."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class Prometheus:
    """An endpoint http://127.0.0.1:PORT/metrics with the last value of every metric, as gauges."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server  # an optional package

        self._gauges: dict[str, tuple[str, float]] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    def collect(self) -> Iterator[Any]:
        """The gauges, for prometheus_client: `slime_tis_train_grad_norm` is train/grad_norm."""
        from prometheus_client.core import GaugeMetricFamily

        for gauge, (name, value) in self._gauges.items():
            yield GaugeMetricFamily(gauge, name, value=value)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Replaces the values of these metrics; other metrics keep the value of an earlier step."""
        gauges = dict(self._gauges)
        for name, value in {**metrics, "step": step}.items():
            gauge = "slime_tis_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            gauges[gauge] = (name, value)
        # a new dict, because the server's thread may iterate over the earlier one
        self._gauges = gauges

    def close(self) -> None:
        """Closes the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def open_reporters(
    config: ReportingConfig,
    effective_config: Mapping[str, Any],
    *,
    total_steps: int,
    resume_step: int = 0,
    evaluates_again: bool = False,
    run: str | None = None,
) -> Reporter:
    """Prepares the directory of a run and opens its reporters.

    Args:
        config: The reporters and their destinations.
        effective_config: Plain values, written as config.yaml, and sent to trackers without
            secrets.
        total_steps: Steps of the complete run.
        resume_step: First step that will be logged; rows at and after it are deleted.
        evaluates_again: Whether the run repeats the evaluation of the previous step.
        run: Identity of the run; None makes one.
    """
    directory = prepare_run_directory(config.output_dir, effective_config, resume_step, run)
    destinations = config.destinations
    reporters: list[Reporter] = [
        JsonLines(directory / METRICS, resume_step, evaluates_again=evaluates_again),
        Console(total_steps, resume_step, config.progress),
    ]
    if "tensorboard" in destinations:
        names = [name for name in (config.tb_project_name, config.tb_experiment_name) if name]
        reporters.append(TensorBoard(directory.joinpath(TENSORBOARD, *names), resume_step))
    if config.prometheus_port is not None:
        reporters.append(Prometheus(config.prometheus_port))
    info = RunInfo(
        identity=run or uuid.uuid4().hex,
        directory=directory,
        options=without_secrets(effective_config),
    )
    for name in TRACKERS:
        if name in destinations:
            reporters.append(Tracker(name, config, info))
    return Reporters(reporters)


def format_step(metrics: Mapping[str, float], step: int, total_steps: int) -> str:
    """Formats the console's line of a step: number, logged columns, scores of evaluations."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for label, name, show in COLUMNS:
        if name in metrics and (label != "rejected" or metrics[name] < 1.0):
            parts.append(f"{label} {show(metrics[name])}")
    for name, value in metrics.items():
        if name.startswith("eval/") and name.count("/") == 1:
            parts.append(f"{name} {_decimal(value)}")
    return "  ".join(parts)


class Timer:
    """Adds up the wall time of named parts of a step.

    `with timer("generate"): …` may be entered any number of times per step. If parts nest, the
    outer part includes the time of the inner one. A step lasts from one `take` to the next, the
    first step from its first part on.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._step_start: float | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time inside the block to `name`, also where the block raises."""
        start = self._clock()
        if self._step_start is None:
            self._step_start = start
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def take(self) -> dict[str, float]:
        """Returns the seconds since the last call and resets them.

        Returns:
            `perf/NAME_time` of every part, and `perf/step_time`.
        """
        now = self._clock()
        times = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        start = now if self._step_start is None else self._step_start
        times["perf/step_time"] = now - start
        self._seconds = {}
        self._step_start = now
        return times
