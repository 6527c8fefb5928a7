"""The study of --true-on-policy: Δ, times and intervals by hand; its grid, page and results."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import yaml

from examples.tables import read_rows
from slime_tis.trainer.cli.train_arguments import configure
from studies.collapse.cases import Grid
from studies.true_on_policy.measured import differences
from studies.true_on_policy.report import (
    END,
    PAGE,
    START,
    Interval,
    by_mode,
    interval,
    paired,
    tables,
)
from studies.true_on_policy.results import RESULTS, CpuTimes, Row, cpu_times, summarize
from studies.true_on_policy.run import STUDY, in_order
from tests.checkpoints import make_task
from tests.runs import ROOT
from tests.runs import make_task as make_runnable_task

SEEDS = [0, 1, 2]
FACTS = {
    "scenario": "lr 1e-4",
    "correction": "raw",
    "flags": "",
    "date": "",
    "machine": "",
    "versions": "",
}
STEPS = [
    {"step": 1, "tokens": 10, "different": 4, "sum_abs": 0.4, "max_abs": 0.2},
    {"step": 2, "tokens": 10, "different": 5, "sum_abs": 0.2, "max_abs": 0.1},
    {"step": 3, "tokens": 20, "different": 0, "sum_abs": 0.0, "max_abs": 0.0},
    {"step": 4, "tokens": 20, "different": 6, "sum_abs": 0.6, "max_abs": 0.3},
]
CPU = [(8.0, 9.0), (9.5, 10.0), (20.0, 21.0), (21.25, 21.5)]
"""CPU time before and after training of each step; an evaluation of 10 s follows step 2."""


def measured_steps() -> list[dict[str, float]]:
    """The steps of a run, with their times."""
    steps = []
    for step, (before, after) in zip(STEPS, CPU, strict=True):
        steps.append(step | {"cpu_before": before, "cpu_after": after})
    return steps


def row_of(seed: int, late: float) -> Row:
    """A run whose evaluations are 0.25 before the first step, and `late` at its end."""
    metrics = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 2, "eval/accuracy": 0.5},
        {"step": 4, "eval/accuracy": late},
    ]
    return summarize(metrics, measured_steps(), seed=seed, **FACTS)


def test_differences_by_hand():
    log_probs_L = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    rollout_L = torch.tensor([-1.0, -2.5, -2.75, -9999.0])
    mask_L = torch.tensor([1.0, 1.0, 1.0, 0.0])
    expected = {"tokens": 3, "different": 2, "sum_abs": 0.75, "max_abs": 0.5}
    assert differences(log_probs_L, rollout_L, mask_L) == expected


def test_differences_of_the_smallest_step_count():
    rollout_L = torch.tensor([-1.0])
    log_probs_L = torch.nextafter(rollout_L, torch.tensor([0.0]))
    assert differences(log_probs_L, rollout_L, torch.ones(1))["different"] == 1


def test_nan_counts_as_different():
    measured = differences(torch.tensor([math.nan]), torch.tensor([math.nan]), torch.ones(1))
    assert measured["different"] == 1
    assert math.isnan(measured["sum_abs"])


def test_a_step_without_trained_tokens_has_no_difference():
    measured = differences(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.zeros(1))
    assert measured == {"tokens": 0, "different": 0, "sum_abs": 0.0, "max_abs": 0.0}


def test_the_mismatch_of_a_run_by_hand():
    row = row_of(0, 0.75)
    assert (row.tokens, row.different, row.max_abs) == (60, 15, 0.3)
    assert row.mean_abs == pytest.approx(1.2 / 60)


def test_only_the_last_quarter_counts_as_late():
    row = row_of(0, 0.75)
    assert row.late_accuracy == 0.75
    assert row.final_accuracy == 0.75


def test_cpu_times_leave_out_evaluations():
    # Steps 2 and 4: 1.0 s = 0.5 + 0.5, and 0.5 s = 0.25 + 0.25.
    expected = CpuTimes(step=0.75, training=0.375, rest=0.375)
    assert cpu_times(measured_steps(), {0, 2, 4}) == expected


def test_an_interval_by_hand():
    # s = 1, and t(2) at 95 % is 4.303 in every table.
    of_three = interval([1.0, 2.0, 3.0])
    assert of_three.mean == 2.0
    assert of_three.half_width == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_an_interval_of_two_seeds_by_hand():
    # s = √2, and t(1) at 95 % is 12.706.
    assert interval([1.0, 3.0]).half_width == pytest.approx(12.706, rel=1e-4)


def test_an_interval_of_one_seed_is_refused():
    with pytest.raises(ValueError, match="needs two seeds, but there are 1"):
        interval([0.5])


def test_modes_are_compared_seed_by_seed():
    raw = [row_of(0, 0.25), row_of(1, 0.5)]
    zero = [row_of(1, 0.75), row_of(0, 0.5), row_of(2, 0.0)]
    assert paired(zero, raw) == Interval(mean=0.25, half_width=0.0)


def test_each_seed_begins_with_another_mode():
    grid = Grid.load(STUDY).chosen(["lr 1e-4"], None)
    cases = in_order(grid, SEEDS)
    assert [case.correction for case in cases[::3]] == ["raw", "token TIS", "zero"]
    assert sorted(case.key for case in cases) == sorted(case.key for case in grid.cases(SEEDS))


def test_train_accepts_every_mode(monkeypatch, tmp_path):
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    make_task(tmp_path / "data" / "sort_digits")
    monkeypatch.chdir(tmp_path)
    for case in Grid.load(STUDY).cases([3]):
        arguments = configure(case.command(tmp_path / case.name), {})
        assert arguments.rollout.true_on_policy == (case.correction == "zero")


def test_stored_rows_have_the_flags_of_the_grid():
    cases = {case.key: " ".join(case.flags) for case in Grid.load(STUDY).cases(SEEDS)}
    stored = {row.key: row.flags for row in read_rows(RESULTS, Row)}
    assert stored.items() <= cases.items()


def test_stored_rows_have_the_same_budget():
    planned = yaml.safe_load(STUDY.common.read_text(encoding="utf-8"))["num_rollout"]
    assert {row.steps for row in read_rows(RESULTS, Row)} == {planned}


def test_every_stored_seed_has_all_modes():
    rows = read_rows(RESULTS, Row)
    seeds = sorted({row.seed for row in rows})
    cases = Grid.load(STUDY).chosen(["lr 1e-4"], None).cases(seeds)
    assert {case.key for case in cases} == {row.key for row in rows}


def test_zero_mode_had_no_different_token():
    zero = [row for row in read_rows(RESULTS, Row) if row.correction == "zero"]
    assert [row.different for row in zero] == [0] * len(zero)
    assert max(row.max_abs for row in zero) == 0


def test_the_page_has_the_tables_of_the_results():
    text = tables(read_rows(RESULTS, Row))
    assert f"{START}\n{text}\n{END}" in PAGE.read_text(encoding="utf-8"), "run `make docs`"


def test_the_documentation_has_the_accuracies():
    text = (ROOT / "docs" / "true_on_policy.md").read_text(encoding="utf-8")
    rows = by_mode(read_rows(RESULTS, Row))
    late = {}
    for mode, runs in rows.items():
        late[mode] = f"{interval([row.late_accuracy for row in runs]).mean:.3f}"
    assert f"{late['zero']} with it, {late['raw']} without correction" in text
    assert f"{late['token TIS']} with token TIS" in text


MODES = {"raw": ([], True), "zero": (["--true-on-policy"], False)}
"""Flags of a mode, and whether its tokens differ."""


@pytest.mark.parametrize(("flags", "differ"), MODES.values(), ids=MODES)
def test_the_meter_measures_a_run(tmp_path, flags, differ):
    steps = tmp_path / "steps.jsonl"
    command = [sys.executable, "-m", "studies.true_on_policy.measured", str(steps)]
    command += make_runnable_task(tmp_path)
    command += ["--bf16", "--rollout-precision", "bf16", *flags]
    command += ["--output-dir", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in steps.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert (sum(line["different"] for line in lines) > 0) == differ
