"""The columns of the study: every method's relative accuracy and gap under each mismatch.

A method's accuracy is the mean of the evaluations in the last quarter of a run. Its relative
accuracy is the geometric mean over seeds of its accuracy divided by that of on-policy training with
the same seed. Its gap is the same for the column's best method, as a loss: 1 − accuracy / best.
intervals.py has the intervals and the test.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence

from slime_tis.analysis.report.comparison_study import STANDARD, Cell, Column, Conditions
from studies.collapse.cases import ROOT, Grid, Study
from studies.collapse.results import Row, mean_of
from studies.comparison.intervals import Accuracy, LogRatio, compare, is_worse

STUDY = Study(ROOT / "studies" / "comparison")
REFERENCE = "none"
"""On-policy training."""
MIN_SEEDS = 3
"""Methods with fewer seeds in a column have no interval and are not ranked."""
SORTING = ""
"""The task of columns without a task in their name."""
STALE_SERVER = "stale_server"
"""The fault of a server with old weights. `recommend` uses its column; columns of other faults only
count in the record of a method."""
STALE_SERVER_SHARE = 0.25
"""Share of the prompts that the stale server answers; faults.py has four servers."""
TOKENS = {SORTING: 11, "lr 2e-4": 11, "experts": 11, "agent": 17}
"""Mean number of trained tokens of a response, by task (`rollout/response_len`)."""


def columns(rows: Iterable[Row], grid: Grid) -> list[Column]:
    """The mismatches with at least two ranked methods, in the order of the grid."""
    by_case = by_case_of(rows)
    result = []
    for scenario in grid.scenarios:
        on_policy = on_policy_of(scenario)
        reference = accuracy_of(by_case.get((on_policy, STANDARD), {}))
        methods = {}
        for method in grid.corrections:
            by_seed = by_case.get((scenario, method), {})
            if len(by_seed.keys() & reference.keys()) >= MIN_SEEDS:
                methods[method] = by_seed
        if scenario != on_policy and len(methods) > 1:
            result.append(_column(scenario, grid, methods, reference))
    return result


def _column(
    name: str, grid: Grid, methods: Mapping[str, Mapping[int, Row]], reference: Accuracy
) -> Column:
    accuracy = {}
    relative = {}
    k3 = []
    for method, by_seed in methods.items():
        accuracy[method] = accuracy_of(by_seed)
        relative[method] = compare(accuracy[method], reference)
        # Equal engines, as with several steps per rollout, have no logged mismatch: k3 is 0.
        k3.append(mean_of(row.mismatch_k3_kl or 0.0 for row in by_seed.values()) or 0.0)
    best = max(relative, key=lambda method: relative[method].mean)
    cells = []
    for method, by_seed in methods.items():
        if method == best:
            seeds = relative[best].seeds
            gap = LogRatio(mean=0.0, low=0.0, high=0.0, p_value=1.0, seeds=seeds)
        else:
            gap = compare(accuracy[method], accuracy[best])
        ratio = relative[method]
        collapsed = [row for row in by_seed.values() if row.collapse_step is not None]
        cell = Cell(
            method=method,
            flags=grid.corrections[method],
            seeds=ratio.seeds,
            relative=math.exp(ratio.mean),
            low=math.exp(ratio.low),
            high=math.exp(ratio.high),
            gap=loss(gap.mean),
            # A loss falls with the log-ratio, so the ends change places.
            gap_low=loss(gap.high),
            gap_high=loss(gap.low),
            is_worse=is_worse(gap, len(methods) - 1),
            collapsed=len(collapsed),
        )
        cells.append(cell)
    tokens = TOKENS[task_of(name)]
    has_other_fault = name in grid.faults and grid.faults[name] != STALE_SERVER
    return Column(
        name=name,
        covers=task_of(name) == SORTING and not has_other_fault,
        conditions=conditions_of(name, grid),
        sigma=(math.sqrt(2 * min(k3) * tokens), math.sqrt(2 * max(k3) * tokens)),
        tokens=tokens,
        cells=tuple(sorted(cells, key=lambda cell: -cell.relative)),
    )


def loss(log_ratio: float) -> float:
    """The share of accuracy that a method with this log-ratio loses: 1 − exp(log_ratio)."""
    return 1 - math.exp(log_ratio)


def conditions_of(scenario: str, grid: Grid) -> Conditions:
    """The conditions that the flags of a scenario state; the runs themselves are not read."""
    flags = shlex.split(grid.scenarios[scenario])
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    steps = int(values.get("--num-steps-per-rollout", 1))
    interval = int(values.get("--update-weights-interval", 1))
    stale_servers = 0.0
    if grid.faults.get(scenario) == STALE_SERVER:
        stale_servers = STALE_SERVER_SHARE
    return Conditions(
        # The last step before an update trains on the oldest samples.
        age=interval * steps - 1,
        precision=values.get("--rollout-precision", "fp32"),
        steps=steps,
        stale_servers=stale_servers,
    )


def sorting_columns(compared: Sequence[Column]) -> list[Column]:
    """The columns of the sorting task, which `recommend` sees."""
    return [column for column in compared if task_of(column.name) == SORTING]


def task_of(scenario: str) -> str:
    """The task in the name of a column, "TASK: MISMATCH"."""
    task, colon, _ = scenario.partition(":")
    return task if colon else SORTING


def by_case_of(rows: Iterable[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """The rows by scenario and method, then by seed."""
    by_case: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        by_case.setdefault((row.scenario, row.correction), {})[row.seed] = row
    return by_case


def accuracy_of(by_seed: Mapping[int, Row]) -> Accuracy:
    """The accuracy by seed."""
    return {seed: row.late_accuracy for seed, row in by_seed.items()}


def on_policy_of(scenario: str) -> str:
    """The scenario of on-policy training in the same task."""
    task = task_of(scenario)
    return f"{task}: {REFERENCE}" if task else REFERENCE
