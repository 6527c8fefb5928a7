"""train.py with custom functions: the same flags reject alike, metrics alone change nothing; masking of stale ones."""

import textwrap

import pytest

MIS = ("--custom-tis-function-path", "custom_tis.mis.compute_mis_weights_with_cp")
TWO_STEPS = ("--num-rollout", "2", "--num-steps-per-rollout", "2", "--micro-batch-size", "4")
CORRECTIONS = {
    "token, one bound, veto": "--use-rs --rs-upper-bound 1.01 --rs-veto-threshold 0.95",
    "normalised over micro-batches": "--use-tis --tis-level sequence --tis-mode clip --tis-batch-normalize",
    "share of the global batch": "--use-rs --rs-level sequence --rs-target-fraction 0.25",
}
SAME = ("train/loss", "train/grad_norm", "train/gradient_kept_fraction", "train/loss_denominator")


@pytest.mark.parametrize("flags", CORRECTIONS.values(), ids=CORRECTIONS)
def test_the_same_flags_train_alike_whoever_computes(flags, run):
    built_in = run(*flags.split(), *TWO_STEPS, name="built_in")
    custom = run(*flags.split(), *TWO_STEPS, *MIS, name="custom")
    for one, other in zip(built_in, custom, strict=True):
        assert [other[name] for name in SAME] == pytest.approx([one[name] for name in SAME], rel=1e-4, abs=1e-6)
    if "--tis-level sequence" not in flags:
        assert any(row["train/gradient_kept_fraction"] < 1 for row in built_in)


def test_a_function_that_works_in_place_leaves_metrics_only_runs_as_they_are_to_the_bit(run, tmp_path):
    file = tmp_path / "half.py"
    file.write_text(
        textwrap.dedent(
            """
            import random
            import torch

            def fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **k):
                pg_loss.mul_(0.5).add_(1)
                for values in (train_log_probs, rollout_log_probs, loss_masks, k["advantages"], k["log_probs"]):
                    for value in values:
                        value.zero_()
                torch.manual_seed(random.randrange(9))
                torch.set_grad_enabled(False)
                torch.set_default_dtype(torch.float64)
                return pg_loss, loss_masks, {"loss": torch.full_like(pg_loss, 99.0)}
            """
        )
    )
    flags = ("--get-mismatch-metrics", "--num-rollout", "2")
    plain = run(*flags, name="plain")
    careless = run(*flags, "--custom-tis-function-path", f"{file}:fn", name="careless")
    for row, other in zip(plain, careless, strict=True):
        assert other["train/custom_loss"] == pytest.approx(99)
        same = {name: value for name, value in row.items() if name.startswith(("train/", "rollout/"))}
        assert {name: other[name] for name in same} == same


def test_off_policy_sequence_masking_acts_on_stale_samples_with_one_step_per_rollout(run):
    flags = ("--use-opsm", "--opsm-delta", "0.005", "--update-weights-interval", "3", "--num-rollout", "3")
    rows = run(*flags, "--rollout-precision", "fp32")
    clipped = [row["train/opsm_clipfrac"] for row in rows]
    assert clipped[0] == 0 < max(clipped[1:])  # the engines agree, and the weights do not
    assert rows[-1]["rollout/weight_staleness"] == 2
