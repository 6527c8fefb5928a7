"""The arithmetic of the studies of rejection bounds, a real model, and collapse."""

import itertools
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


def test_the_page_shows_the_measured_mismatch():
    page = STUDY.page.read_text(encoding="utf-8")
    measured = mismatch.table(read_rows(mismatch.RESULTS, mismatch.Row))
    assert f"{report.begin('mismatch')}{measured}\n{report.END}" in page, "run `make docs`"


def test_the_page_shows_the_simulated_bounds():
    """The rows of the shortest responses; the others take longer to make."""
    page = (ROOT / "studies/rejection_bounds/README.md").read_text().splitlines()
    for row in itertools.islice(tables(batches=20), 7):
        assert row in page


@pytest.fixture
def by_hand() -> tuple[tuple[float, ...], ...]:
    """k3, χ² and the largest weight of two responses, ρ = (2, 1) and ρ = 1/2.

    The first value of each is the estimate. The others are an interval from resamples: twice the
    first response (a quarter), both (half), twice the second (a quarter).
    """
    log_ratios = [
        torch.tensor([2.0, 1.0], dtype=torch.float64).log(),
        torch.tensor([0.5], dtype=torch.float64).log(),
    ]
    return tuple(mismatch.estimates(log_ratios))


def test_k3_by_hand(by_hand):
    """((1 − ln 2) + 0 + (−1/2 + ln 2))/3 = 1/6."""
    expected = (1 / 6, (1 - math.log(2)) / 2, math.log(2) - 0.5)
    assert by_hand[0] == pytest.approx(expected)


def test_chi2_by_hand(by_hand):
    """(3 + 0 − 3/4)/3 = 3/4."""
    assert by_hand[1] == pytest.approx((0.75, -0.75, 1.5))


def test_the_largest_weight_by_hand(by_hand):
    assert by_hand[2] == pytest.approx((2, 0.5, 2))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[mismatch.Row]:
    """The mismatch of a small model, in all pairs of precisions."""
    directory = tmp_path_factory.mktemp("measured")
    checkpoint = make_checkpoint(directory / "model", "llama")
    prompts = directory / "rows.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(4)))
    return mismatch.measure(checkpoint, prompts, apply_chat_template=False, response=4)


def test_every_pair_of_precisions_is_measured(measured):
    expected = []
    for training, rollouts in mismatch.PRECISIONS:
        for rollout in rollouts:
            expected.append((training, rollout))
    assert [(row.training, row.rollout) for row in measured] == expected


def test_fewer_bits_give_more_mismatch(measured):
    k3 = {row.rollout: row.k3 for row in measured if row.training == "fp32"}
    assert k3["fp32"] < 1e-9 < k3["int8"] < k3["fp8"]


def test_estimates_lie_in_their_intervals(measured):
    for row in measured:
        assert row.samples == 4
        assert row.k3_low <= row.k3 <= row.k3_high
        assert row.chi2_low <= row.chi2 <= row.chi2_high
        assert row.largest_low <= row.largest == pytest.approx(row.largest_high)


def test_the_stored_measurement_becomes_a_table(measured, tmp_path):
    write_rows(tmp_path / "mismatch.csv", mismatch.Row, measured)
    lines = mismatch.table(read_rows(tmp_path / "mismatch.csv", mismatch.Row)).splitlines()
    assert lines[:2] == [
        "| training | rollout | tokens | k3 KL | χ² per token | largest weight |",
        "|---|---|---|---|---|---|",
    ]
    assert len(lines) == 2 + len(measured)


SHORT = 12
"""Tokens of a short response."""
LONG = 3000
"""Tokens of a long response."""
TIGHT, WIDE, Z_SCORE, TARGET = RULES.values()


@pytest.mark.parametrize(
    ("length", "healthy", "tolerance"), [(SHORT, 0.86, 0.03), (LONG, 0.012, 0.01)], ids=str
)
def test_a_tight_bound_rejects_short_healthy_responses(length, healthy, tolerance):
    rejected = shares(TIGHT, length, 0.02, batches=3)
    assert rejected.healthy == pytest.approx(healthy, abs=tolerance)


@pytest.mark.parametrize(("length", "token"), [(SHORT, 1.0), (LONG, 0.0)], ids=str)
def test_a_wide_bound_misses_a_broken_token_of_a_long_response(length, token):
    rejected = shares(WIDE, length, 0.02, batches=3)
    assert rejected.token == token
    assert rejected.healthy == 0.0


@pytest.mark.parametrize("length", [SHORT, 64, 300, LONG])
def test_a_z_score_fits_all_lengths(length):
    rejected = shares(Z_SCORE, length, 0.01, batches=2)
    assert rejected.healthy < 0.005
    assert rejected.offset == rejected.token == 1.0


@pytest.mark.parametrize("length", [SHORT, 64, 300, LONG])
def test_a_target_fraction_fits_all_lengths(length):
    rejected = shares(TARGET, length, 0.01, batches=2)
    # it rejects 12 of 256, and eight are broken
    assert rejected.healthy == pytest.approx(4 / 248)
    assert rejected.offset == rejected.token == 1.0


@pytest.fixture(scope="module")
def noise_estimates() -> dict[str, float]:
    """Estimates of k3, relative to the noise, if a tenth of the sequences is noisier."""
    return estimates(SHORT, 0.05, NOISE["a tenth of the sequences"], batches=4)


def test_the_clamped_mean_estimates_k3(noise_estimates):
    assert noise_estimates["clamped mean"] == pytest.approx(1.0, abs=0.1)
    assert noise_estimates["healthy rejected"] < 0.04


def test_the_clamped_mean_bounds_a_broken_token(noise_estimates):
    widened = (math.e - 2) / (256 * SHORT) / (0.05**2 / 2)
    expected = noise_estimates["clamped mean"] + widened
    assert noise_estimates["clamped mean, +20 nats"] == pytest.approx(expected, rel=0.01)


def test_other_estimates_of_k3_are_wrong(noise_estimates):
    assert noise_estimates["mean, +20 nats"] > 1e8
    assert noise_estimates["median of sequences"] < 0.2


def test_the_area_below_a_curve():
    curve = [(0, 0.4), (10, 0.6), (20, 0.2), (40, 0.3)]
    assert area(curve) == pytest.approx((10 * 0.5 + 10 * 0.4 + 20 * 0.25) / 40)


@pytest.mark.parametrize(
    ("curve", "step"),
    [
        ([(0, 0.4), (10, 0.6), (20, 0.2), (40, 0.3)], 20),
        ([(0, 0.4), (10, 0.2), (20, 0.21)], None),
    ],
    ids=["less than half", "exactly half"],
)
def test_less_than_half_of_the_best_is_a_collapse(curve, step):
    assert collapse_step(curve) == step


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


@pytest.fixture
def row() -> Row:
    """The row of a run of two steps."""
    metrics = [
        {"step": 0, "eval/accuracy": 0.5},
        {
            "step": 1,
            "train/mismatch_k3_kl": 0.1,
            "train/gradient_kept_fraction": 1.0,
            "rollout/raw_reward": 0.5,
            "rollout/weight_staleness": 0.0,
        },
        {
            "step": 2,
            "train/mismatch_k3_kl": 0.3,
            "train/gradient_kept_fraction": 0.5,
            "eval/accuracy": 0.125,
            "rollout/weight_staleness": 3.0,
        },
    ]
    return summarize(metrics, **FACTS)


def test_accuracies_of_a_run(row):
    assert row.final_accuracy == row.late_accuracy == 0.125
    assert row.accuracy_area == 0.3125
    assert row.collapse_step == row.steps == 2


def test_metrics_of_a_run_are_means_over_steps(row):
    assert row.mismatch_k3_kl == pytest.approx(0.2)
    assert row.kept_fraction == 0.75
    assert row.reward == 0.5


def test_absent_metrics_of_a_run_are_missing(row):
    assert row.ess is None
    assert row.mismatch_kl is None


def test_k3_of_a_run_by_staleness(row):
    assert row.k3_by_staleness == ((0, 0.1), (3, 0.3))


def test_a_row_survives_its_csv_file(row, tmp_path):
    write_rows(tmp_path / "r.csv", Row, [row])
    assert read_table(tmp_path / "r.csv") == {("both", "token TIS", 1): row}


def test_a_study_without_results_has_no_rows(tmp_path):
    assert read_table(tmp_path / "none.csv") == {}


def test_a_file_with_other_columns_is_refused(tmp_path):
    (tmp_path / "other.csv").write_text("seed,accuracy\n0,0.5\n")
    missing = r"other\.csv does not have the columns scenario, correction, seed"
    with pytest.raises(ValueError, match=missing):
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
