"""The metrics of a log by step, in arrays: 9 bytes per value instead of 70 in dicts."""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from slime_tis.analysis.logs.peer_metrics import AGE, OWN_PREFIXES, PEER_METRICS
from slime_tis.health import METRIC_PREFIXES

MAX_STEPS = 200_000
"""Steps of a log."""
MAX_STEP = 2**53
"""Largest number of a step, exact as a float."""
MAX_METRICS = 20
"""Metrics below KEPT_PREFIXES that are kept, the first ones of a log."""


def _with_prefixes(*names: str) -> set[str]:
    """Each name below each of METRIC_PREFIXES."""
    metrics: set[str] = set()
    for prefix in METRIC_PREFIXES:
        metrics.update(prefix + name for name in names)
    return metrics


MISMATCH_NAMES = frozenset(
    ({peer.metric for peer in PEER_METRICS.values()} - {AGE})
    | _with_prefixes("mismatch_k3_kl", "mismatch_kl", "train_rollout_logprob_abs_diff")
)
"""Names of the metrics that compare the engines."""
RUN_NAMES = {
    AGE,
    "rollout/update_received",
    "rollout/raw_reward",
    "train/entropy_gap",
    "train/entropy_loss",
    "train/grad_norm",
    "train/without_replay/mismatch_k3_kl",
    "train/with_replay/mismatch_k3_kl",
}
"""Metrics of a run that the diagnosis or the report reads."""
CORRECTION_NAMES = _with_prefixes(
    "nonfinite_token_fraction",
    "mismatch_k3_kl_staleness_0",
    "mismatch_chi2_token",
    "mismatch_ppl_ratio",
    "mis_eff_sample_size",
    "mis_mean_is_weight_before_clip",
    "mis_ratio_mean_after_mis",
    "mis_rs_masked_fraction",
    "mis_catastrophic_seq_fraction",
    "mis_mask_fraction_high",
)
"""Metrics of the correction that they read."""
KEPT_NAMES = MISMATCH_NAMES | RUN_NAMES | CORRECTION_NAMES
"""All metrics that are kept. From others, only the step is kept."""
KEPT_PREFIXES = ("eval/", "health/")
"""Prefixes of other metrics that are kept, up to MAX_METRICS."""


class LogTable(Sequence[Mapping[str, float]]):
    """Rows of metrics with "step", one per step, in ascending order.

    If a metric is logged twice at a step, the first value counts.
    """

    def __init__(self) -> None:
        self._row_of_step: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}
        self._is_present: dict[str, bytearray] = {}
        self._order: list[tuple[int, int]] = []
        self._kept_by_prefix = 0
        self.framework = ""
        """Framework whose mismatch metrics the log has; empty if unknown."""

    def add(self, step: float, name: str, value: float) -> None:
        """Adds a value under our name of the metric.

        Raises:
            ValueError: The step is not finite or too large, or there are too many steps.
        """
        # Negated, so that NaN is refused, too.
        if not abs(step) <= MAX_STEP:
            raise ValueError(f"it has the step {step:g}, which is no number of steps")
        row = self._row_of_step.setdefault(int(step), len(self._row_of_step))
        if row >= MAX_STEPS:
            raise ValueError(f"it has more than {MAX_STEPS:,} steps; give a part of it")
        framework, metric = self._own_name(name)
        self.framework = self.framework or framework
        if not self._is_kept(metric):
            return
        if name in PEER_METRICS and math.isfinite(value):
            value = PEER_METRICS[name].convert(value)
        column = self._columns.setdefault(metric, array("d"))
        is_present = self._is_present.setdefault(metric, bytearray())
        # A column is as long as the last row that has its metric.
        missing = row + 1 - len(column)
        if missing > 0:
            column.frombytes(bytes(8 * missing))
            is_present.extend(bytes(missing))
        if not is_present[row]:
            column[row] = value
            is_present[row] = 1

    def _own_name(self, name: str) -> tuple[str, str]:
        """Framework (empty if unknown) and our name of a metric."""
        peer = PEER_METRICS.get(name)
        if peer is not None:
            return peer.framework, peer.metric
        for prefix, framework in OWN_PREFIXES.items():
            if name.startswith(prefix):
                return framework, name
        return "", name

    def _is_kept(self, name: str) -> bool:
        """Whether a metric is kept; counts a new metric below KEPT_PREFIXES."""
        if name in KEPT_NAMES or name in self._columns:
            return True
        if not name.startswith(KEPT_PREFIXES) or self._kept_by_prefix >= MAX_METRICS:
            return False
        self._kept_by_prefix += 1
        return True

    @property
    def has_mismatch(self) -> bool:
        """Whether a metric compares the engines."""
        return not MISMATCH_NAMES.isdisjoint(self._columns)

    def _rows(self) -> list[tuple[int, int]]:
        """Step and number per row, in the order of the steps."""
        if len(self._order) != len(self._row_of_step):
            self._order = sorted(self._row_of_step.items())
        return self._order

    def __len__(self) -> int:
        return len(self._row_of_step)

    def __iter__(self) -> Iterator["LogRow"]:
        for step, row in self._rows():
            yield LogRow(self, step, row)

    @overload
    def __getitem__(self, index: int) -> "LogRow": ...
    @overload
    def __getitem__(self, index: slice) -> list["LogRow"]: ...
    def __getitem__(self, index: int | slice) -> "LogRow | list[LogRow]":
        if isinstance(index, slice):
            return [LogRow(self, step, row) for step, row in self._rows()[index]]
        step, row = self._rows()[index]
        return LogRow(self, step, row)

    def value(self, row: int, name: str) -> float | None:
        """Returns the value of a metric in the row with this number; None if it was not logged."""
        is_present = self._is_present.get(name)
        if is_present is None or row >= len(is_present) or not is_present[row]:
            return None
        return self._columns[name][row]

    def names(self, row: int) -> list[str]:
        """Returns the names of the metrics in the row with this number."""
        return [name for name in self._columns if self.value(row, name) is not None]


class LogRow(Mapping[str, float]):
    """One row of a `LogTable`."""

    __slots__ = ("_row", "_step", "_table")

    def __init__(self, table: LogTable, step: int, row: int) -> None:
        self._table = table
        self._step = step
        self._row = row

    def __getitem__(self, name: str) -> float:
        value: float | None = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of a metric.

        Mapping.get would catch an exception for each missing value, which is slow in a report.
        """
        if name == "step":
            return self._step
        value = self._table.value(self._row, name)
        if value is None:
            return default
        return value

    def __iter__(self) -> Iterator[str]:
        yield "step"
        yield from self._table.names(self._row)

    def __len__(self) -> int:
        return 1 + len(self._table.names(self._row))
