"""what-if by hand: corrections on the tokens of a dump."""

import math
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_tis.analysis.diagnosis.trained_tokens import tokens_of
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.analysis.dumps.what_if import corrections, what_if
from slime_tis.correction import PRESETS, RolloutCorrectionConfig
from slime_tis.errors import CustomFunctionError
from slime_tis.main import main


def table(advantages=(1.0, -1.0)):
    """One token of ratio 2; a masked one, one of ratio 1/2 and one of ratio 1."""
    log_2 = math.log(2)
    parts = [
        SampleParts(
            train_log_prob=[-1.0], rollout_log_prob=[-1.0 - log_2], advantage=[1.0], step=0
        ),
        SampleParts(
            train_log_prob=[0.0, -2.0, -0.5],
            rollout_log_prob=[float("nan"), -2.0 + log_2, -0.5],
            loss_mask=[0, 1, 1],
            advantage=[-1.0] * 3,
            step=1,
        ),
    ]
    if advantages is None:
        parts = [replace(part, advantage=None) for part in parts]
    return TokenTable.from_parts(parts)


@pytest.mark.parametrize("code", [-9999.0, -1e6, -np.inf])
def test_a_code_for_minus_infinity_is_no_log_prob(code):
    low = SampleParts(
        train_log_prob=[code, -1.0, -200.0], rollout_log_prob=[-0.5, code, -1.0], step=0
    )
    dump = TokenTable.from_parts([low])
    assert dump.valid.tolist() == [False, False, True]
    assert dump.log_ratio.tolist() == [0.0, 0.0, -199.0]
    assert tokens_of(dump).finite.tolist() == [False, False, True]


def one(config, of=None, **options):
    return what_if(of or table(), {"it": config}, **options)[0]


BOUNDED = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.5)
BYPASS = RolloutCorrectionConfig(use_rollout_logprobs=True)


def test_bounded_weights_by_hand():
    row = one(BOUNDED)
    assert (row.kept, row.weight_max) == (1.0, 1.5)
    assert row.weight_mean == pytest.approx(1.0)  # (1.5 + 0.5 + 1) / 3
    assert row.ess == pytest.approx(9 / (3 * 3.5))
    assert row.flags == "--use-tis --tis-upper-bound 1.5"


def test_the_gradient_of_bounded_weights_by_hand():
    row = one(BOUNDED)
    # gradients of the mean over samples of their token means, times 2: −1.5, 0.25, 0.5 against −2,
    # 0.25, 0.5
    assert row.cosine == pytest.approx(3.3125 / math.sqrt(2.5625 * 4.3125))
    assert row.norm_ratio == pytest.approx(math.sqrt(2.5625 / 4.3125))
    # against −2, 0.25, 0.25: the second sample's ratio is 1/2
    assert row.sequence_cosine == pytest.approx(3.1875 / math.sqrt(2.5625 * 4.125))


def test_rejection_by_hand():
    row = one(RolloutCorrectionConfig(use_rs=True, rs_upper_bound=1.5))
    assert row.kept == pytest.approx(1 / 3)  # ratios 2 and 1/2 are out of bounds, 1 is not
    assert (row.ess, row.weight_mean, row.weight_max) == (1.0, 1.0, 1.0)
    assert row.cosine == pytest.approx(0.5 / math.sqrt(4.3125))


def test_bypass_clips_large_ratios():
    # PPO's clip drops ratio 2 with A > 0 and ratio 1/2 with A < 0; the token with ratio 1 is left.
    assert one(BYPASS).cosine == pytest.approx(0.5 / math.sqrt(4.3125))


def test_the_clip_range_comes_from_the_metadata():
    metadata = {"policy": {"eps_clip": 0.9, "eps_clip_high": 9}}
    wide = one(BYPASS, replace(table(), metadata=metadata))
    assert (wide.cosine, wide.norm_ratio) == (pytest.approx(1.0), pytest.approx(1.0))


def test_a_correction_that_rejects_everything_has_no_cosine():
    row = one(RolloutCorrectionConfig(use_rs=True, rs_lower_bound=5.0, rs_upper_bound=6.0))
    assert (row.kept, row.cosine, row.norm_ratio) == (0.0, None, 0.0)


def test_without_advantages_only_weights_are_known():
    row = one(BOUNDED, table(advantages=None))
    assert (row.cosine, row.norm_ratio, row.sequence_cosine) == (None, None, None)
    assert row.weight_max == 1.5


def halve(args, *, pg_loss, loss_masks, **_):
    """Weight 1/2 for the first sample's token and 2 for others; the last token is rejected."""
    weights = torch.tensor([0.5, 2.0, 2.0, 2.0])
    loss_masks[-1] = loss_masks[-1] * torch.tensor([1, 1, 0])
    return pg_loss * weights * args.scale, loss_masks, {}


def test_a_missing_option_of_a_function_is_explained():
    with pytest.raises(
        CustomFunctionError, match=r"no attribute 'scale'; add scale to .* the argument args="
    ):
        what_if(table(), [halve])


def test_tokens_without_log_probs_are_no_effective_samples():
    missing = SampleParts(
        train_log_prob=[-1.0, -1.0], rollout_log_prob=[math.nan] * 2, advantage=[1.0, 1.0]
    )
    row = what_if(TokenTable.from_parts([missing], {}), [RolloutCorrectionConfig(use_tis=True)])[0]
    assert (row.kept, row.ess, row.weight_max) == (0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def rows_of_list():
    choices = [RolloutCorrectionConfig(), RolloutCorrectionConfig(use_tis=True), halve]
    return what_if(table(), choices, args=Namespace(scale=2.0))


def test_corrections_in_a_list_are_named_by_their_flags(rows_of_list):
    assert [row.name for row in rows_of_list] == ["no correction", "--use-tis", "halve"]
    named = one(RolloutCorrectionConfig(use_tis=True))
    assert rows_of_list[1] == replace(named, name="--use-tis")


def test_a_function_in_slimes_contract_by_hand(rows_of_list):
    row = rows_of_list[2]  # weights 1 and 4 at the two accepted tokens
    assert (row.kept, row.weight_mean, row.weight_max) == (pytest.approx(2 / 3), 2.5, 4.0)
    assert row.ess == pytest.approx(25 / (2 * 17))
    # gradients times 2 of the mean over samples: −1, 2 and 0 against −2, 0.25, 0.5 (the rejected
    # token counts)
    assert row.cosine == pytest.approx(2.5 / math.sqrt(5 * 4.3125))
    assert row.flags == f"--use-tis --custom-tis-function-path {halve.__module__}.halve"


FLAGS = {
    "built-in": ("--use-tis", "--tis-upper-bound", "1.5"),
    "preset": ("--rollout-correction-preset", "decoupled_token_is"),
    "function": (
        "--use-tis",
        "--tis-upper-bound",
        "1.5",
        "--custom-tis-function-path",
        "custom_tis.tis.vanilla_tis",
    ),
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_the_command_compares_a_choice_with_no_correction(tmp_path, capsys, flags):
    write(tmp_path / "dump.parquet", table())
    assert main(["what-if", str(tmp_path / "dump.parquet"), *flags]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    ess = {line.split("  ")[-1]: float(line.split()[1]) for line in lines}
    weight = 2.0 if "preset" in flags[0] else 1.5
    exact = (weight + 1.5) ** 2 / (3 * (weight**2 + 1.25))
    assert ess == {"no correction": 1.0, " ".join(flags): pytest.approx(exact, abs=1e-3)}


def test_the_command_prints_all_corrections_by_default(tmp_path, capsys):
    write(tmp_path / "dump.parquet", table())
    assert main(["what-if", str(tmp_path / "dump.parquet")]) == 0
    _, *lines, order, recommendation = capsys.readouterr().out.splitlines()
    assert len(lines) == len(corrections())
    assert "closest to the exact gradient first" in order
    assert "slime-tis recommend" in recommendation


def test_the_command_takes_options_of_the_loss(tmp_path, capsys):
    write(tmp_path / "dump.parquet", stale())
    assert main(["what-if", str(tmp_path / "dump.parquet"), "--staleness-decay", "0.5"]) == 0
    ratios = {
        line.split("  ")[-1]: float(line.split()[5])
        for line in capsys.readouterr().out.splitlines()[1:]
    }
    assert ratios == {"no correction": 0.343, "--staleness-decay 0.5": 0.25}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(["--lr", "1"], "--lr is not a flag of a correction", id="another group"),
        pytest.param(["--use-tsi"], "--use-tsi", id="typo"),
        pytest.param(["--tis-level", "token"], "no effect without", id="no effect"),
        pytest.param(
            ["--use-tis", "--custom-tis-function-path", "absent.py:f"],
            "absent.py",
            id="no function",
        ),
        pytest.param(
            ["--get-mismatch-metrics", "--custom-tis-function-path", "a.f"],
            "--use-tis",
            id="only measures",
        ),
    ],
)
def test_the_command_refuses_with_one_line(tmp_path, capsys, flags, message):
    write(tmp_path / "dump.parquet", table())
    assert main(["what-if", str(tmp_path / "dump.parquet"), *flags]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out


NORMALIZED = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=10.0, tis_batch_normalize=True)


def test_weights_are_normalized_within_each_step():
    row = one(NORMALIZED)
    # step 0: mean weight 2; step 1: 0.75. Gradients −2/2, (0.5/0.75)/2, (1/0.75)/2 against −2,
    # 0.25, 0.5
    gradient = (-1.0, 1 / 3, 2 / 3)
    expected = (2 + 0.25 / 3 + 1 / 3) / math.sqrt(sum(g * g for g in gradient) * 4.3125)
    assert row.cosine == pytest.approx(expected)


def test_only_corrections_with_batch_statistics_count_steps():
    assert one(NORMALIZED).steps == 2
    assert one(RolloutCorrectionConfig(use_tis=True)).steps is None


def test_batch_statistics_of_a_large_dump_use_some_steps():
    row = one(NORMALIZED, max_steps=1)
    assert row.steps == 1
    # Only step 0: one token, whose weight is normalised to 1.
    assert row.weight_max == 1.0
    assert (row.cosine, row.norm_ratio) == (pytest.approx(1.0), pytest.approx(0.5))


def stale():
    """A token of the step's own weights, ratio 1, and one of weights two steps older, ratio 4."""
    part = SampleParts(
        train_log_prob=[-1.0], rollout_log_prob=[-1.0], advantage=[1.0], step=3, weight_version=[3]
    )
    return TokenTable.from_parts(
        [part, replace(part, rollout_log_prob=[-1.0 - math.log(4)], weight_version=[1])]
    )


def test_interpolation_depends_on_the_age():
    config = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=9, old_logprobs="interpolate")
    assert one(config, stale()).weight_max == pytest.approx(2.0)  # half of the way, √4


def test_the_staleness_decay_depends_on_the_age():
    decaying = replace(stale(), metadata={"policy": {"staleness_decay": 0.5}})
    row = one(RolloutCorrectionConfig(), decaying)
    # 1 and 0.5² against 1 and 4
    assert row.norm_ratio == pytest.approx(math.hypot(1, 0.25) / math.hypot(1, 4))


def test_interpolation_needs_weight_versions():
    with pytest.raises(ValueError, match="weight versions"):
        one(RolloutCorrectionConfig(use_tis=True, old_logprobs="interpolate"))


@pytest.fixture(scope="module")
def default_rows():
    return what_if(table())


def test_every_correction_has_a_row(default_rows):
    assert [row.name for row in default_rows] == [*corrections()]


def test_presets_come_first(default_rows):
    assert [row.name for row in default_rows[: len(PRESETS)]] == [*PRESETS]
    assert default_rows[0].flags == "--rollout-correction-preset decoupled_token_is"


def test_corrections_differ_in_their_flags(default_rows):
    assert len({row.flags for row in default_rows}) == len(corrections())


def test_metrics_of_all_corrections_are_finite(default_rows):
    for row in default_rows:
        assert all(map(math.isfinite, row.metrics.values())), row.name


def test_an_empty_table_keeps_nothing():
    assert {row.kept for row in what_if(TokenTable.from_parts([]))} == {0.0}


def test_a_large_table_is_sampled():
    row = one(RolloutCorrectionConfig(use_tis=True), max_tokens=3)
    assert row.weight_max == 1.0  # only the second sample
