"""Metrics of mismatches that are too large for the usual sums, against loops over float64 numbers.

A metric that measures agreement must not read "perfect" when all ratios underflow or all weights
are tiny.
"""

import math

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, Statistics, correct
from tests.correction.expected import expected_correction

GENERATOR = torch.Generator().manual_seed(0)
AROUND_MINUS_9 = (-9 + torch.randn(300, generator=GENERATOR)).tolist()

BATCHES = {
    "all sequences far below": [[-400.0], [-380.0], [-390.0]],
    "long sequences far below": [[-200.0] * 40, [-200.01] * 40, [-199.99] * 39],
    "far above": [[400.0], [380.0], [399.5]],
    "far on both sides": [[400.0, -17.0], [-400.0], [0.0], [-9.0, 17.0]],
    "two tiny weights": [[-17.0, -18.0]],
    "two large weights": [[17.0, 18.0]],
    "three hundred small weights": [AROUND_MINUS_9[:70], AROUND_MINUS_9[70:]],
    "one weight of 1 among tiny ones": [[0.0] + [-19.0] * 199, [-19.0] * 300],
    "weights around one half": [[-0.6, -0.8], [-0.7, -0.69, -0.65]],
    "one token": [[-17.0]],
    "one token far below": [[-400.0]],
    "agreement": [[0.0, 0.05], [-0.05]],
}
"""Δ of each token, by the name of the batch."""

CONFIGS = {
    "token truncate": {"tis_level": "token"},
    "token mask": {"tis_level": "token", "tis_mode": "mask", "tis_lower_bound": 0.5},
    "token mask of all ratios": {
        "tis_level": "token",
        "tis_mode": "mask",
        "tis_lower_bound": 0,
        "tis_upper_bound": 1e9,
    },
    "token normalized": {"tis_level": "token", "tis_upper_bound": 1e9, "tis_batch_normalize": True},
    "prefix clip": {"tis_level": "prefix", "tis_mode": "clip", "tis_lower_bound": 1e-8},
    "segment truncate": {"tis_level": "segment"},
    "sequence truncate": {"tis_level": "sequence", "tis_upper_bound": 1e6},
    "sequence mask": {"tis_level": "sequence", "tis_mode": "mask", "tis_lower_bound": 0.5},
    "geometric clip": {"tis_level": "geometric", "tis_mode": "clip", "tis_lower_bound": 1e-8},
}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}


def expected_metrics(config, deltas):
    rollout = [[0.0] * len(row) for row in deltas]
    mask = [[True] * len(row) for row in deltas]
    return expected_correction(config, deltas, rollout, mask).metrics


def in_lists(config, rows):
    return correct(
        config,
        rows,
        [torch.zeros_like(row) for row in rows],
        [torch.ones(len(row)) for row in rows],
    )


def packed(config, rows):
    tokens = torch.cat(rows)
    return correct(
        config,
        tokens,
        torch.zeros_like(tokens),
        torch.ones(len(tokens)),
        lengths=[len(row) for row in rows],
    )


def padded(config, rows):
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    return correct(config, tokens, torch.zeros_like(tokens), mask)


LAYOUTS = {"lists": in_lists, "packed": packed, "padded": padded}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", CONFIGS)
def test_metrics_of_extreme_mismatches(options, batch, layout, dtype):
    config = RolloutCorrectionConfig(use_tis=True, **CONFIGS[options])
    rows = [torch.tensor(row, dtype=dtype) for row in BATCHES[batch]]
    found = LAYOUTS[layout](config, rows).statistics.metrics()
    expected = expected_metrics(config, [row.tolist() for row in rows])
    assert found == pytest.approx(expected, rel=TOLERANCES[dtype], abs=1e-13)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", CONFIGS)
def test_micro_batches_of_extreme_mismatches_merge(options, batch):
    config = RolloutCorrectionConfig(use_tis=True, **CONFIGS[options])
    rows = [torch.tensor(row, dtype=torch.float64) for row in BATCHES[batch]]
    merged = Statistics.empty(config)
    for row in rows:
        merged = Statistics.empty(config).merge(merged.merge(in_lists(config, [row]).statistics))
    assert merged.metrics() == pytest.approx(
        expected_metrics(config, BATCHES[batch]), rel=1e-12, abs=1e-15
    )


def test_the_share_of_sequences_far_below_is_not_perfect():
    """The value of exactness_3.md N4, from Σ Δ of −400, −380 and −390."""
    statistics = in_lists(
        RolloutCorrectionConfig(), [torch.tensor([x]) for x in (-400.0, -380.0, -390.0)]
    ).statistics
    assert statistics.metrics()["effective_sequence_share"] == pytest.approx(0.33336, abs=5e-6)


def test_equal_sequences_have_a_share_of_exactly_1():
    statistics = in_lists(RolloutCorrectionConfig(), [torch.full((3,), -0.25)] * 7).statistics
    assert statistics.metrics()["effective_sequence_share"] == 1.0
