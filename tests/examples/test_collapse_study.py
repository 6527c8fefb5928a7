"""The study of collapse: its rows and its report."""

import pytest

from examples.collapse_study import report
from examples.collapse_study.results import Row, area, collapse_step, read_table, summarize
from examples.tables import write_rows


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
        {"step": 1, "train/mismatch_k3_kl": 0.1, "train/gradient_kept_fraction": 1.0, "rollout/raw_reward": 0.5},
        {"step": 2, "train/mismatch_k3_kl": 0.3, "train/gradient_kept_fraction": 0.5, "eval/accuracy": 0.125},
    ]
    for row, staleness in zip(metrics[1:], (0.0, 3.0), strict=True):
        row["rollout/weight_staleness"] = staleness
    row = summarize(metrics, **FACTS)
    assert (row.final_accuracy, row.accuracy_area, row.collapse_step, row.steps) == (0.125, 0.3125, 2, 2)
    assert row.mismatch_k3_kl == pytest.approx(0.2)
    assert (row.kept_fraction, row.reward, row.ess, row.mismatch_kl) == (0.75, 0.5, None, None)
    assert row.late_accuracy == 0.125
    assert row.k3_by_staleness == ((0, 0.1), (3, 0.3))
    write_rows(tmp_path / "r.csv", Row, [row])
    assert read_table(tmp_path / "r.csv") == {("both", "token TIS", 1): row}
    assert read_table(tmp_path / "none.csv") == {}
    (tmp_path / "other.csv").write_text("seed,accuracy\n0,0.5\n")
    with pytest.raises(ValueError, match=r"other\.csv does not have the columns scenario, correction, seed"):
        read_table(tmp_path / "other.csv")


def row_of(correction, seed, *accuracy, scenario="both"):
    curve = [{"step": 10 * i, "eval/accuracy": value} for i, value in enumerate(accuracy)]
    for staleness, row in enumerate(curve):
        row |= {"train/mismatch_k3_kl": 0.01 + 0.02 * staleness, "rollout/weight_staleness": float(staleness)}
    return summarize(curve, **FACTS | {"scenario": scenario, "correction": correction, "seed": seed})


def test_the_table_has_medians_and_ranges_over_seeds():
    rows = [row_of("a", 0, 0.4, 0.1), row_of("a", 1, 0.4, 0.3), row_of("a", 2, 0.4, 0.0), row_of("b", 0, 0.4, 0.8)]
    assert report.table(rows).splitlines() == [
        "**both**",
        "",
        "| run | final accuracy | last quarter | mean accuracy | collapse at step | k3 KL | k3 KL, new → old | kept |",
        "|---|---|---|---|---|---|---|---|",
        "| a | 0.10 [0.00, 0.30] | 0.10 [0.00, 0.30] | 0.25 [0.20, 0.35] | 10 (2 of 3) | 0.02 | 0.01 → 0.03 | – |",
        "| b | 0.80 | 0.80 | 0.60 | – | 0.02 | 0.01 → 0.03 | – |",
    ]
