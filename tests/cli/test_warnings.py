"""What an accepted command line is warned about."""

import shlex

import pytest

from slime_tis.trainer.cli.arguments import parse_args


def test_warnings_are_one_line_each_and_replayed_truncation_is_none(whole, capsys):
    parse_args(shlex.split(whole))
    assert capsys.readouterr().err == ""
    parse_args(shlex.split(whole + "--rollout-top-p 0.9 --get-mismatch-metrics --use-tis --tis-lower-bound 0.5"))
    bound, measures = capsys.readouterr().err.splitlines()
    assert bound.startswith("warning: --tis-lower-bound is 0.5") and "--use-tis" in measures


def test_functions_that_loaded_samples_have_no_use_for_are_warned_about(whole, capsys, tmp_path):
    (tmp_path / "0.jsonl").touch()
    loads = f"--load-debug-rollout-data {tmp_path}/0.jsonl "
    functions = "--dynamic-sampling-filter-path a.f --custom-generate-function-path a.g "
    parse_args(shlex.split(whole + functions))
    parse_args(shlex.split(whole + loads))
    assert capsys.readouterr().err == ""
    parse_args(shlex.split(whole + loads + functions))
    warning = capsys.readouterr().err
    assert "--dynamic-sampling-filter-path and --custom-generate-function-path will not be called" in warning


@pytest.mark.parametrize(
    ("flags", "warns"), [("2", False), ("3", True), ("2999", True)], ids=["shorter", "as long", "longer"]
)
def test_a_warm_up_longer_than_the_run_is_warned_about(whole, capsys, flags, warns):
    parse_args(shlex.split(whole + "--lr-warmup-iters " + flags))
    assert capsys.readouterr().err.startswith("warning: --lr-warmup-iters") == warns


GEOMETRIC_BOUNDS = [
    ("--rollout-correction-preset decoupled_geo_rs", "geometric", "1.001"),
    ("--use-rs --rs-level geometric --rs-upper-bound 1.0001", "geometric", "1.0001"),
    ("--use-rs --rs-level geometric --rs-lower-bound 0 --rs-upper-bound 1.001", "geometric", "1.001"),
    ("--use-rs --rs-level geometric --rs-lower-bound 0 --rs-upper-bound 2", None, None),
    ("--rollout-rs seq_mean_k1 --rollout-rs-threshold 0.999_1.001", "seq_mean_k1", "1.001"),
    ("--use-rs --rs-level geometric --rs-upper-bound 1.01", None, None),
    ("--rollout-correction-preset decoupled_geo_rs --rs-z-score 3", None, None),
    ("--rollout-rs seq_mean_k3 --rollout-rs-threshold 0.001", None, None),
]


@pytest.mark.parametrize(("flags", "criterion", "upper"), GEOMETRIC_BOUNDS, ids=[row[0] for row in GEOMETRIC_BOUNDS])
def test_geometric_bounds_that_no_precision_fits_are_warned_about(whole, capsys, flags, criterion, upper):
    parse_args(shlex.split(whole + flags))
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == (criterion is not None)
    assert all(f" to {upper} of {criterion} " in warning for warning in warnings)


MISMATCHED = [
    ("--rollout-lookahead 2", "--rollout-lookahead is 2, so samples"),
    ("--update-weights-interval 3 --get-mismatch-metrics", "--update-weights-interval is 3, so samples"),
    ("--update-weights-interval 3 --use-tis", None),
    ("--update-weights-interval 3 --use-rollout-logprobs", None),
    ("--update-weights-interval 3 --old-logprobs interpolate", None),
    ("--eps-clip-high 0.28", "--eps-clip-high is 0.28, but with one optimizer step"),
    ("--use-tis --eps-clip 0.1 --eps-clip-c 3", "--eps-clip is 0.1 and --eps-clip-c is 3, but"),
    ("--eps-clip-high 0.28 --num-steps-per-rollout 2", None),
    ("--eps-clip-high 0.28 --use-rollout-logprobs", None),
    ("--eps-clip-high 0.28 --old-logprobs interpolate", None),
]


@pytest.mark.parametrize(("flags", "words"), MISMATCHED, ids=[row[0] for row in MISMATCHED])
def test_uncorrected_staleness_and_idle_clip_ranges_are_warned_about(whole, capsys, flags, words):
    parse_args(shlex.split(whole + flags))
    warning = capsys.readouterr().err
    assert words in warning if words else not warning
