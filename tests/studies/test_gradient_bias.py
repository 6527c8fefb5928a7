"""Bias and variance of gradient estimators: counts against enumeration and simulation."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

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


def brute_force(name: str, mismatch: Mismatch) -> tuple[Tensor, float, float]:
    """Mean, variance and kept share over all 81 responses of four tokens."""
    probability_N = mismatch.rollout_V[SEQUENCES_NT].prod(1)
    advantage_N = RIGHT_N - probability_N @ RIGHT_N
    log_ratio_NT = mismatch.log_ratio_V[SEQUENCES_NT]
    if name == "bypass PPO":
        ratio_NT = log_ratio_NT.exp()
        clipped_NT = torch.where(advantage_N[:, None] > 0, ratio_NT > 1.28, ratio_NT < 0.8)
        weight_NT = torch.where(clipped_NT, 0.0, ratio_NT)
        mask_NT = torch.ones_like(ratio_NT)
    else:
        corrected = correct(
            ESTIMATORS[name],
            log_ratio_NT,
            torch.zeros_like(log_ratio_NT),
            torch.ones_like(log_ratio_NT),
        )
        weight_NT = corrected.weights.double()
        mask_NT = corrected.mask.double()
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
    moments = enumerated(ESTIMATORS[name], mismatch, 4)
    torch.testing.assert_close(moments.mean_V, mean_V, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert moments.variance == pytest.approx(variance, rel=1e-5, nan_ok=True)
    assert moments.kept == pytest.approx(kept, rel=1e-9)


def test_the_true_gradient_equals_autograd():
    logits_V = TRAIN_V.log().requires_grad_()
    expected_reward = logits_V.softmax(0)[SEQUENCES_NT].prod(1) @ RIGHT_N
    (gradient_V,) = torch.autograd.grad(expected_reward, logits_V)
    torch.testing.assert_close(true_gradient(4), gradient_V, rtol=1e-12, atol=1e-12)


def test_unbounded_sequence_weights_are_unbiased():
    moments = enumerated(ESTIMATORS["sequence IS, unbounded"], Mismatch.of_size(0.2, 0.1), 64)
    torch.testing.assert_close(moments.mean_V, true_gradient(64), rtol=1e-6, atol=1e-7)


def test_the_second_moment_of_sequence_weights_in_closed_form():
    """With T tokens E[(Πρ)²] is (Σ π²/π_rollout)^T."""
    mismatch = Mismatch.of_size(0.2, 0.1)
    counts_CV, probability_C = likely_counts(mismatch.rollout_V, 64)
    weight_C = (counts_CV @ mismatch.log_ratio_V).exp()
    per_token = float((TRAIN_V**2 / mismatch.rollout_V).sum())
    assert float(probability_C @ weight_C**2) == pytest.approx(per_token**64)


RESPONSES = 20_000
"""Number of responses of a simulation."""


@pytest.fixture(scope="module", params=ENUMERABLE)
def moments(request: pytest.FixtureRequest) -> tuple[Moments, Moments]:
    """The exact moments of an estimator, and those of its simulation."""
    config = ESTIMATORS[request.param]
    mismatch = Mismatch.of_size(0.1, 0.7)
    return enumerated(config, mismatch, 32), simulated(config, mismatch, 32, RESPONSES)


def test_the_simulated_mean_is_within_its_interval(moments):
    exact, simulation = moments
    distance = float((simulation.mean_V - exact.mean_V).norm())
    assert distance < 1.5 * simulation.mean_radius(RESPONSES)


def test_the_simulated_deviation_is_within_its_interval(moments):
    exact, simulation = moments
    radius = simulation.deviation_radius(RESPONSES)
    deviation = math.sqrt(exact.variance)
    assert abs(math.sqrt(simulation.variance) - deviation) < 2 * radius
    assert 2 * radius < 0.1 * deviation


def test_the_simulated_share_of_kept_tokens_is_exact(moments):
    exact, simulation = moments
    assert simulation.kept == pytest.approx(exact.kept, abs=0.015)


def point_key(point: gradient.Point) -> tuple[float, int, float, str]:
    """Correlation, length, σ and estimator: the columns that identify a row."""
    return point.correlation, point.length, point.sigma, point.estimator


@pytest.fixture(scope="module")
def stored_points() -> dict[tuple[float, int, float, str], gradient.Point]:
    """The rows of the study's table by their key."""
    return {point_key(point): point for point in read_rows(gradient.TABLE, gradient.Point)}


def test_every_point_is_stored(stored_points):
    grid = itertools.product(
        gradient.CORRELATIONS, gradient.LENGTHS, gradient.SIGMAS, gradient.ESTIMATORS
    )
    assert set(stored_points) == set(grid)


def test_stored_points_are_computed_again(stored_points):
    """Those that take seconds."""
    keys = []
    for key in stored_points:
        _, length, sigma, estimator = key
        if length <= 64 and sigma in (0.001, 0.1, 1.0) and estimator in ENUMERABLE:
            keys.append(key)
    for key, point in zip(keys, gradient.points(keys), strict=True):
        stored = dataclasses.asdict(stored_points[key])
        computed = dataclasses.asdict(point)
        assert stored.pop("estimator") == computed.pop("estimator")
        assert computed == pytest.approx(stored, rel=1e-3, abs=1e-7, nan_ok=True)


def test_the_page_shows_the_stored_points():
    page = gradient.PAGE.read_text(encoding="utf-8")
    for name, text in gradient.tables(read_rows(gradient.TABLE, gradient.Point)).items():
        assert f"{report.begin(name)}{text}\n{report.END}" in page, "run `make docs`"


@pytest.mark.parametrize(
    ("mean", "deviation", "error", "up_to_scale"),
    [
        ((1.0, 0.0), 0.0, 0.0, 0.0),
        ((0.25, 0.0), 0.0, 0.75, 0.0),  # too small, and nothing else
        ((0.5, 0.5), 0.0, math.sqrt(0.5), math.sqrt(0.5)),  # 45° off
        # four responses: half of the squared length is noise
        ((1.0, 0.0), 2.0, 1.0, math.sqrt(0.5)),
        ((-1.0, 0.0), 0.0, 2.0, 1.0),
    ],
    ids=["exact", "too small", "45 degrees off", "half noise", "opposite"],
)
def test_errors_by_hand(mean, deviation, error, up_to_scale):
    mean_V = torch.tensor([*mean, 0.0])
    gradient_V = torch.tensor([1.0, 0.0, 0.0])
    metrics = gradient.relative(Moments(mean_V, deviation**2, 1.0, 0.0), gradient_V)
    point = gradient.Point(
        correlation=0.1, length=4, sigma=0.1, estimator="x", responses=0, **metrics
    )
    assert point.error(4) == pytest.approx(error)
    assert point.error_up_to_scale(4) == pytest.approx(up_to_scale, abs=1e-6)
