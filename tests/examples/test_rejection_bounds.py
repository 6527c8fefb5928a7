"""The simulation of rejection bounds, small: its README shows the tables that it prints."""

import math

import pytest

from examples.rejection_bounds.simulate import NOISE, RULES, estimates, shares, tables
from tests.runs import ROOT

TIGHT, WIDE, Z_SCORE, TARGET = RULES.values()


def test_no_fixed_bound_fits_both_lengths():
    """Shares of healthy sequences, of those off by a constant, and of those with a broken token."""
    short, long = (shares(TIGHT, length, 0.02, batches=3) for length in (12, 3000))
    assert short.healthy == pytest.approx(0.86, abs=0.03) and long.healthy == pytest.approx(0.012, abs=0.01)
    short, long = (shares(WIDE, length, 0.02, batches=3) for length in (12, 3000))
    assert (short.healthy, short.token, long.healthy, long.token) == (0.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("length", [12, 64, 300, 3000])
def test_a_z_score_fits_all_lengths(length):
    found = shares(Z_SCORE, length, 0.01, batches=2)
    assert found.healthy < 0.005 and found.offset == found.token == 1.0
    found = shares(TARGET, length, 0.01, batches=2)  # 12 of 256, of which the eight broken ones are found
    assert found.healthy == pytest.approx(4 / 248) and found.offset == found.token == 1.0


def test_the_estimate_of_k3_is_neither_widened_nor_too_small():
    found = estimates(12, 0.05, NOISE["a tenth of the sequences"], batches=4)
    assert found["mean, +20 nats"] > 1e8 and found["median of sequences"] < 0.2
    assert found["clamped mean"] == pytest.approx(1.0, abs=0.1)
    widened = (math.e - 2) / (256 * 12) / (0.05**2 / 2)
    assert found["clamped mean, +20 nats"] == pytest.approx(found["clamped mean"] + widened, rel=0.01)
    assert found["healthy rejected"] < 0.04


def test_the_page_shows_what_it_prints():
    """The rows of the shortest responses as printed; the others take longer to make."""
    page = (ROOT / "examples/rejection_bounds/README.md").read_text().splitlines()
    printed = tables(batches=20)
    assert all(next(printed) in page for _ in range(7))
