"""The arithmetic of the studies: rejection bounds, the real-model study, and the study of collapse."""

import math

import pytest
import torch

from examples.tables import read_rows, write_rows
from studies.collapse import report
from studies.collapse.cases import Grid, Study
from studies.collapse.results import Row, area, collapse_step, read_table, summarize
from studies.real_model import mismatch
from studies.rejection_bounds.simulate import NOISE, RULES, estimates, shares, tables
from tests.checkpoints import make_checkpoint
from tests.runs import ROOT

STUDY = Study(ROOT / "studies" / "real_model")


def row_of(scenario, correction, seed, flags=""):
    curve = [{"step": step, "eval/accuracy": 0.2 + step / 20} for step in (0, 4, 8, 12)]
    facts = {
        "seconds": 1.0,
        "flags": flags,
        "date": "2026-01-02",
        "machine": "2 cores",
        "versions": "python 3",
    }
    return summarize(curve, scenario=scenario, correction=correction, seed=seed, **facts)


def test_what_was_not_run_is_listed():
    grid = Grid.load(STUDY).chosen(["both", "bf16"], ["standard PPO", "bypass PPO"])
    rows = [row_of("both", "standard PPO", seed) for seed in (0, 1, 2)] + [
        row_of("both", "bypass PPO", 0)
    ]
    assert report.not_run(rows, grid).splitlines() == [
        "",
        "",
        "4 of the 12 runs of seeds 0, 1, 2 were made. Not run yet:",
        "",
        "* both: bypass PPO (seeds 1, 2)",
        "* bf16: standard PPO (seeds 0, 1, 2), bypass PPO (seeds 0, 1, 2)",
    ]


def test_the_pages_show_what_was_measured():
    page = STUDY.page.read_text(encoding="utf-8")
    measured = mismatch.table(read_rows(mismatch.RESULTS, mismatch.Row))
    assert f"{report.begin('mismatch')}{measured}\n{report.END}" in page, "run `make docs`"
    # The rows of the shortest responses as printed; the others take longer to make.
    page = (ROOT / "studies/rejection_bounds/README.md").read_text().splitlines()
    printed = tables(batches=20)
    assert all(next(printed) in page for _ in range(7))


def test_estimates_by_hand():
    """ρ of two responses: 2 and 1; 1/2. k3 = ((1 − ln 2) + 0 + (−1/2 + ln 2))/3 = 1/6; χ² = (3 + 0 − 3/4)/3 = 3/4."""
    log_ratios = [
        torch.tensor([2.0, 1.0], dtype=torch.float64).log(),
        torch.tensor([0.5], dtype=torch.float64).log(),
    ]
    k3, chi2, largest = mismatch.estimates(log_ratios)
    assert (
        k3[0] == pytest.approx(1 / 6)
        and chi2[0] == pytest.approx(0.75)
        and largest[0] == pytest.approx(2)
    )
    # resamples: twice the first (a quarter), both (half), twice the second (a quarter)
    assert k3[1:] == pytest.approx(((1 - math.log(2)) / 2, math.log(2) - 0.5))
    assert chi2[1:] == pytest.approx((-0.75, 1.5))
    assert largest[1:] == pytest.approx((0.5, 2))


def test_a_small_model_is_measured(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(4)))
    rows = mismatch.measure(
        checkpoint, tmp_path / "rows.jsonl", apply_chat_template=False, response=4
    )
    pairs = [(row.training, row.rollout) for row in rows]
    assert pairs == [
        (training, rollout) for training, rollouts in mismatch.PRECISIONS for rollout in rollouts
    ]
    by_pair = dict(zip(pairs, rows, strict=True))
    assert (
        by_pair["fp32", "fp32"].k3 < 1e-9 < by_pair["fp32", "int8"].k3 < by_pair["fp32", "fp8"].k3
    )
    for row in rows:
        assert row.k3_low <= row.k3 <= row.k3_high and row.chi2_low <= row.chi2 <= row.chi2_high
        assert (
            row.largest_low <= row.largest == pytest.approx(row.largest_high) and row.samples == 4
        )
    write_rows(tmp_path / "mismatch.csv", mismatch.Row, rows)
    again = read_rows(tmp_path / "mismatch.csv", mismatch.Row)
    assert mismatch.table(again).splitlines()[:2] == [
        "| training | rollout | tokens | k3 KL | χ² per token | largest weight |",
        "|---|---|---|---|---|---|",
    ]
    assert len(mismatch.table(again).splitlines()) == 2 + len(pairs)


TIGHT, WIDE, Z_SCORE, TARGET = RULES.values()


def test_no_fixed_bound_fits_both_lengths():
    """Shares of healthy sequences, of those off by a constant, and of those with a broken token."""
    short, long = (shares(TIGHT, length, 0.02, batches=3) for length in (12, 3000))
    assert short.healthy == pytest.approx(0.86, abs=0.03) and long.healthy == pytest.approx(
        0.012, abs=0.01
    )
    short, long = (shares(WIDE, length, 0.02, batches=3) for length in (12, 3000))
    assert (short.healthy, short.token, long.healthy, long.token) == (0.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("length", [12, 64, 300, 3000])
def test_a_z_score_fits_all_lengths(length):
    found = shares(Z_SCORE, length, 0.01, batches=2)
    assert found.healthy < 0.005 and found.offset == found.token == 1.0
    found = shares(
        TARGET, length, 0.01, batches=2
    )  # 12 of 256, of which the eight broken ones are found
    assert found.healthy == pytest.approx(4 / 248) and found.offset == found.token == 1.0


def test_the_estimate_of_k3_is_neither_widened_nor_too_small():
    found = estimates(12, 0.05, NOISE["a tenth of the sequences"], batches=4)
    assert found["mean, +20 nats"] > 1e8 and found["median of sequences"] < 0.2
    assert found["clamped mean"] == pytest.approx(1.0, abs=0.1)
    widened = (math.e - 2) / (256 * 12) / (0.05**2 / 2)
    assert found["clamped mean, +20 nats"] == pytest.approx(
        found["clamped mean"] + widened, rel=0.01
    )
    assert found["healthy rejected"] < 0.04


def test_results_of_a_curve_by_hand():
    curve = [(0, 0.4), (10, 0.6), (20, 0.2), (40, 0.3)]
    assert area(curve) == pytest.approx((10 * 0.5 + 10 * 0.4 + 20 * 0.25) / 40)
    assert collapse_step(curve) == 20, "0.2 is less than half of 0.6"
    assert collapse_step([(0, 0.4), (10, 0.2), (20, 0.21)]) is None, "half is not less than half"


FACTS = {
    "scenario": "both",
    "correction": "token TIS",
    "seed": 1,
    "seconds": 12.5,
    "flags": "--use-tis --tis-upper-bound 2",
    "date": "2026-01-02",
    "machine": "2 cores of X, Y",
    "versions": "python 3",
}


def test_a_row_from_the_metrics_of_a_run_and_back_from_csv(tmp_path):
    metrics = [
        {"step": 0, "eval/accuracy": 0.5},
        {
            "step": 1,
            "train/mismatch_k3_kl": 0.1,
            "train/gradient_kept_fraction": 1.0,
            "rollout/raw_reward": 0.5,
        },
        {
            "step": 2,
            "train/mismatch_k3_kl": 0.3,
            "train/gradient_kept_fraction": 0.5,
            "eval/accuracy": 0.125,
        },
    ]
    for row, staleness in zip(metrics[1:], (0.0, 3.0), strict=True):
        row["rollout/weight_staleness"] = staleness
    row = summarize(metrics, **FACTS)
    assert (row.final_accuracy, row.accuracy_area, row.collapse_step, row.steps) == (
        0.125,
        0.3125,
        2,
        2,
    )
    assert row.mismatch_k3_kl == pytest.approx(0.2)
    assert (row.kept_fraction, row.reward, row.ess, row.mismatch_kl) == (0.75, 0.5, None, None)
    assert row.late_accuracy == 0.125
    assert row.k3_by_staleness == ((0, 0.1), (3, 0.3))
    write_rows(tmp_path / "r.csv", Row, [row])
    assert read_table(tmp_path / "r.csv") == {("both", "token TIS", 1): row}
    assert read_table(tmp_path / "none.csv") == {}
    (tmp_path / "other.csv").write_text("seed,accuracy\n0,0.5\n")
    with pytest.raises(
        ValueError, match=r"other\.csv does not have the columns scenario, correction, seed"
    ):
        read_table(tmp_path / "other.csv")


def study_row(correction, seed, *accuracy, scenario="both"):
    curve = [{"step": 10 * i, "eval/accuracy": value} for i, value in enumerate(accuracy)]
    for staleness, row in enumerate(curve):
        row |= {
            "train/mismatch_k3_kl": 0.01 + 0.02 * staleness,
            "rollout/weight_staleness": float(staleness),
        }
    return summarize(
        curve, **FACTS | {"scenario": scenario, "correction": correction, "seed": seed}
    )


def test_the_table_has_medians_and_ranges_over_seeds():
    rows = [
        study_row("a", 0, 0.4, 0.1),
        study_row("a", 1, 0.4, 0.3),
        study_row("a", 2, 0.4, 0.0),
        study_row("b", 0, 0.4, 0.8),
    ]
    assert report.table(rows).splitlines() == [
        "**both**",
        "",
        (
            "| run | final accuracy | last quarter | mean accuracy | collapse at step | k3 KL | k3"
            " KL, new → old | kept |"
        ),
        "|---|---|---|---|---|---|---|---|",
        (
            "| a | 0.10 [0.00, 0.30] | 0.10 [0.00, 0.30] | 0.25 [0.20, 0.35] | 10 (2 of 3) | 0.02 |"
            " 0.01 → 0.03 | – |"
        ),
        "| b | 0.80 | 0.80 | 0.60 | – | 0.02 | 0.01 → 0.03 | – |",
    ]
