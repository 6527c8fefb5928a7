"""What is said about figures, when, and that it is said once."""

import pytest

from slime_tis import RolloutCorrectionConfig
from slime_tis.diffusion import Watch

CONFIG = RolloutCorrectionConfig(use_tis=True, use_rs=True)


def said(watch: Watch, steps: int, prefix: str = "rollout_corr/", **figures: float) -> list[tuple[int, str]]:
    """(step, sentence) of so many equal steps."""
    row = {prefix + name: value for name, value in figures.items()}
    return [(step, sentence) for step in range(1, steps + 1) for sentence in watch.read(row)]


def test_rejection_above_five_percent_for_ten_steps_is_said_once() -> None:
    ((step, sentence),) = said(Watch(CONFIG), 60, rejected_sequence_fraction=0.06, gradient_kept_fraction=0.95)
    assert step == 10
    assert sentence == (
        "6.0% of the sequences lost a step to rejection, and more than 5% did in each of the last 10 steps: training "
        "is on a selected set. Bring the rollout closer (newer weights, higher precision), or widen the bounds that "
        "reject."
    )


def test_nine_steps_five_percent_and_a_gap_are_not_enough() -> None:
    assert said(Watch(CONFIG), 9, rejected_sequence_fraction=0.5) == []
    assert said(Watch(CONFIG), 60, rejected_sequence_fraction=0.05) == []
    watch = Watch(CONFIG)
    assert said(watch, 9, rejected_sequence_fraction=0.5) + said(watch, 1) == []
    assert said(watch, 9, rejected_sequence_fraction=0.5) == []
    assert len(said(watch, 1, rejected_sequence_fraction=0.5)) == 1


def test_the_mend_fits_the_configuration() -> None:
    config = RolloutCorrectionConfig(use_rollout_logprobs=True, use_rs=True, rejection_normalizer="original")
    figures = {"rejected_sequence_fraction": 0.2, "gradient_kept_fraction": 0.83}
    ((_, sentence),) = said(Watch(config), 10, "actor/rollout_corr/", **figures)
    assert "The gradient is shrunk to 83% by it; --rejection-normalizer kept" in sentence
    assert "Without --use-rollout-logprobs rejection compares π_old" in sentence
    assert said(Watch(config), 10, "rollout_corr/", **figures) == [], "the figures of another mode"


def test_a_gap_of_more_than_a_nat_is_said_in_the_first_steps() -> None:
    ((step, sentence),) = said(Watch(CONFIG), 5, mismatch_log_ppl_abs_diff=1.31)
    assert step == 1 and sentence.startswith("mismatch_log_ppl_abs_diff is 1.31 nats at step 1, above 1: rollout and")
    assert said(Watch(CONFIG), 60, mismatch_log_ppl_abs_diff=1.0) == []
    late = Watch(CONFIG)
    said(late, 50)
    assert said(late, 5, mismatch_log_ppl_abs_diff=9.0) == []


@pytest.mark.parametrize(
    ("mode", "figure", "expected"),
    [
        ("truncate", "mis_truncate_fraction", 1),
        ("clip", "mis_clip_fraction_high", 1),
        ("mask", "mis_mask_fraction_high", 0),
    ],
)
def test_a_largest_weight_at_its_bound_is_said(mode: str, figure: str, expected: int) -> None:
    config = RolloutCorrectionConfig(use_tis=True, tis_mode=mode, tis_upper_bound=3.0)  # type: ignore[arg-type]
    found = said(Watch(config), 50, **{figure: 0.01})
    assert [step for step, _ in found] == [10] * expected
    assert all(s.startswith("The largest weight was at its bound --tis-upper-bound 3 in each") for _, s in found)
    late = Watch(config)
    said(late, 45)
    assert said(late, 20, **{figure: 0.01}) == []


def test_several_things_are_said_together_and_silence_is_the_rule() -> None:
    watch = Watch(CONFIG)
    figures = {"rejected_sequence_fraction": 0.3, "mismatch_log_ppl_abs_diff": 2.0, "mis_truncate_fraction": 0.1}
    assert [step for step, _ in said(watch, 60, **figures)] == [1, 10, 10]
    assert watch.read({}) == []
    assert said(Watch(CONFIG), 60, mismatch_log_ppl_abs_diff=0.01, rejected_sequence_fraction=0.0) == []
