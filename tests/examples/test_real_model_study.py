"""The study on a pretrained model: the runs that its page lists as missing, and the mismatch with intervals."""

import math

import pytest
import torch

from examples.collapse_study import report
from examples.collapse_study.cases import Grid, Study
from examples.collapse_study.results import summarize
from examples.real_model_study import mismatch
from examples.tables import read_rows, write_rows
from tests.checkpoints import make_checkpoint
from tests.runs import ROOT

STUDY = Study(ROOT / "examples" / "real_model_study")


def row_of(scenario, correction, seed, flags=""):
    curve = [{"step": step, "eval/accuracy": 0.2 + step / 20} for step in (0, 4, 8, 12)]
    facts = {"seconds": 1.0, "flags": flags, "date": "2026-01-02", "machine": "2 cores", "versions": "python 3"}
    return summarize(curve, scenario=scenario, correction=correction, seed=seed, **facts)


def test_what_was_not_run_is_listed():
    grid = Grid.load(STUDY).chosen(["both", "bf16"], ["standard PPO", "bypass PPO"])
    rows = [row_of("both", "standard PPO", seed) for seed in (0, 1, 2)] + [row_of("both", "bypass PPO", 0)]
    assert report.not_run(rows, grid).splitlines() == [
        "",
        "",
        "4 of the 12 runs of seeds 0, 1, 2 were made. Not run yet:",
        "",
        "* both: bypass PPO (seeds 1, 2)",
        "* bf16: standard PPO (seeds 0, 1, 2), bypass PPO (seeds 0, 1, 2)",
    ]


def test_the_page_shows_the_measured_mismatch():
    page = STUDY.page.read_text(encoding="utf-8")
    measured = mismatch.table(read_rows(mismatch.RESULTS, mismatch.Row))
    assert f"{report.begin('mismatch')}{measured}\n{report.END}" in page, "run `make docs`"


def test_estimates_by_hand():
    """ρ of two responses: 2 and 1; 1/2. k3 = ((1 − ln 2) + 0 + (−1/2 + ln 2))/3 = 1/6; χ² = (3 + 0 − 3/4)/3 = 3/4."""
    log_ratios = [torch.tensor([2.0, 1.0], dtype=torch.float64).log(), torch.tensor([0.5], dtype=torch.float64).log()]
    k3, chi2, largest = mismatch.estimates(log_ratios)
    assert k3[0] == pytest.approx(1 / 6) and chi2[0] == pytest.approx(0.75) and largest[0] == pytest.approx(2)
    # resamples: twice the first (a quarter), both (half), twice the second (a quarter)
    assert k3[1:] == pytest.approx(((1 - math.log(2)) / 2, math.log(2) - 0.5))
    assert chi2[1:] == pytest.approx((-0.75, 1.5))
    assert largest[1:] == pytest.approx((0.5, 2))


def test_a_small_model_is_measured(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(4)))
    rows = mismatch.measure(checkpoint, tmp_path / "rows.jsonl", apply_chat_template=False, response=4)
    pairs = [(row.training, row.rollout) for row in rows]
    assert pairs == [(training, rollout) for training, rollouts in mismatch.PRECISIONS for rollout in rollouts]
    by_pair = dict(zip(pairs, rows, strict=True))
    assert by_pair["fp32", "fp32"].k3 < 1e-9 < by_pair["fp32", "int8"].k3 < by_pair["fp32", "fp8"].k3
    for row in rows:
        assert row.k3_low <= row.k3 <= row.k3_high and row.chi2_low <= row.chi2 <= row.chi2_high
        assert row.largest_low <= row.largest == pytest.approx(row.largest_high) and row.samples == 4
    write_rows(tmp_path / "mismatch.csv", mismatch.Row, rows)
    again = read_rows(tmp_path / "mismatch.csv", mismatch.Row)
    assert mismatch.table(again).splitlines()[:2] == [
        "| training | rollout | tokens | k3 KL | χ² per token | largest weight |",
        "|---|---|---|---|---|---|",
    ]
    assert len(mismatch.table(again).splitlines()) == 2 + len(pairs)
