"""Bias and variance of gradient estimators: moments by counts against all responses one by one, and simulation."""

import dataclasses
import itertools
import math

import pytest
import torch

from examples.tables import read_rows
from slime_tis import correct
from studies.collapse import report
from studies.gradient_bias import gradient
from studies.gradient_bias.estimators import (
    ENUMERABLE,
    ESTIMATORS,
    QUALITY_V,
    TRAIN_V,
    Mismatch,
    Moments,
    enumerated,
    likely_counts,
    simulated,
    true_gradient,
)

SEQUENCES_NT = torch.tensor(list(itertools.product(range(3), repeat=4)))
MEAN = float(TRAIN_V @ QUALITY_V)
RIGHT_N = (QUALITY_V[SEQUENCES_NT].sum(1) >= 4 * MEAN + 0.5 * 2 * math.sqrt(1 - MEAN**2)).double()


def brute_force(name, mismatch):
    """Mean, variance and kept share over all 81 responses of four tokens, each corrected as it is."""
    probability_N = mismatch.rollout_V[SEQUENCES_NT].prod(1)
    advantage_N = RIGHT_N - probability_N @ RIGHT_N
    log_ratio_NT = mismatch.log_ratio_V[SEQUENCES_NT]
    if name == "bypass PPO":
        ratio_NT = log_ratio_NT.exp()
        clipped_NT = torch.where(advantage_N[:, None] > 0, ratio_NT > 1.28, ratio_NT < 0.8)
        weight_NT, mask_NT = torch.where(clipped_NT, 0.0, ratio_NT), torch.ones_like(ratio_NT)
    else:
        found = correct(
            ESTIMATORS[name],
            log_ratio_NT,
            torch.zeros_like(log_ratio_NT),
            torch.ones_like(log_ratio_NT),
        )
        weight_NT, mask_NT = found.weights.double(), found.mask.double()
    score_NTV = torch.nn.functional.one_hot(SEQUENCES_NT, 3) - TRAIN_V
    estimate_NV = advantage_N[:, None] * torch.einsum("nt,ntv->nv", weight_NT * mask_NT, score_NTV)
    mean_V = probability_N @ estimate_NV
    kept = float(probability_N[mask_NT.sum(1) > 0].sum())
    return mean_V, float(probability_N @ ((estimate_NV - mean_V) ** 2).sum(1)), kept


@pytest.mark.parametrize("correlation", [0.1, 0.7])
@pytest.mark.parametrize("sigma", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("name", ENUMERABLE)
def test_counts_give_the_moments_of_all_responses(name, sigma, correlation):
    mismatch = Mismatch.of_size(sigma, correlation)
    mean_V, variance, kept = brute_force(name, mismatch)
    found = enumerated(ESTIMATORS[name], mismatch, 4)
    torch.testing.assert_close(found.mean_V, mean_V, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert found.variance == pytest.approx(variance, rel=1e-5, nan_ok=True)
    assert found.kept == pytest.approx(kept, rel=1e-9)


def test_the_true_gradient_and_whole_sequence_weights_in_closed_form():
    logits_V = TRAIN_V.log().requires_grad_()
    expected_reward = logits_V.softmax(0)[SEQUENCES_NT].prod(1) @ RIGHT_N
    (gradient_V,) = torch.autograd.grad(expected_reward, logits_V)
    torch.testing.assert_close(true_gradient(4), gradient_V, rtol=1e-12, atol=1e-12)
    # With T tokens E[(Πρ)²] is (Σ π²/π_rollout)^T: it multiplies the variance of a reward-blind
    # estimator.
    mismatch = Mismatch.of_size(0.2, 0.1)
    found = enumerated(ESTIMATORS["sequence IS, unbounded"], mismatch, 64)
    torch.testing.assert_close(found.mean_V, true_gradient(64), rtol=1e-6, atol=1e-7)
    counts_CV, probability_C = likely_counts(mismatch.rollout_V, 64)
    weight_C = (counts_CV @ mismatch.log_ratio_V).exp()
    assert float(probability_C @ weight_C**2) == pytest.approx(
        float((TRAIN_V**2 / mismatch.rollout_V).sum()) ** 64
    )


@pytest.mark.parametrize("name", ENUMERABLE)
def test_simulated_responses_agree_within_their_interval(name):
    mismatch, responses = Mismatch.of_size(0.1, 0.7), 20_000
    config = ESTIMATORS[name]
    exact, found = enumerated(config, mismatch, 32), simulated(config, mismatch, 32, responses)
    assert float((found.mean_V - exact.mean_V).norm()) < 1.5 * found.mean_radius(responses)
    radius = found.deviation_radius(responses)
    assert (
        abs(math.sqrt(found.variance) - math.sqrt(exact.variance))
        < 2 * radius
        < 0.1 * math.sqrt(exact.variance)
    )
    assert found.kept == pytest.approx(exact.kept, abs=0.015)


def test_stored_points_are_those_computed_and_on_the_page():
    stored = {
        (p.correlation, p.length, p.sigma, p.estimator): p
        for p in read_rows(gradient.TABLE, gradient.Point)
    }
    assert set(stored) == set(
        itertools.product(
            gradient.CORRELATIONS, gradient.LENGTHS, gradient.SIGMAS, gradient.ESTIMATORS
        )
    )
    again = [
        key
        for key in stored
        if key[1] <= 64 and key[2] in (0.001, 0.1, 1.0) and key[3] in ENUMERABLE
    ]
    for key, point in zip(again, gradient.points(again), strict=True):
        metrics = [dataclasses.asdict(row) for row in (stored[key], point)]
        assert metrics[0].pop("estimator") == metrics[1].pop("estimator") == key[3]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, abs=1e-7, nan_ok=True)
    page = gradient.PAGE.read_text(encoding="utf-8")
    for name, text in gradient.tables(read_rows(gradient.TABLE, gradient.Point)).items():
        assert f"{report.begin(name)}{text}\n{report.END}" in page, "run `make docs`"


@pytest.mark.parametrize(
    ("mean", "deviation", "error", "up_to_scale"),
    [
        ((1.0, 0.0), 0.0, 0.0, 0.0),
        ((0.25, 0.0), 0.0, 0.75, 0.0),  # too small, and nothing else
        ((0.5, 0.5), 0.0, math.sqrt(0.5), math.sqrt(0.5)),  # 45° off
        (
            (1.0, 0.0),
            2.0,
            1.0,
            math.sqrt(0.5),
        ),  # four responses: half of the squared length is noise
        ((-1.0, 0.0), 0.0, 2.0, 1.0),
    ],
    ids=["exact", "too small", "45 degrees off", "half noise", "opposite"],
)
def test_errors_by_hand(mean, deviation, error, up_to_scale):
    mean_V, gradient_V = torch.tensor([*mean, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    metrics = gradient.relative(Moments(mean_V, deviation**2, 1.0, 0.0), gradient_V)
    point = gradient.Point(
        correlation=0.1, length=4, sigma=0.1, estimator="x", responses=0, **metrics
    )
    assert point.error(4) == pytest.approx(error)
    assert point.error_up_to_scale(4) == pytest.approx(up_to_scale, abs=1e-6)
