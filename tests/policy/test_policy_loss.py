"""The loss of a micro-batch: old policies, weights, masks, denominators, and what a custom function may do."""

import math
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_tis.correction import GlobalBatch, Ranks, RolloutCorrectionConfig, response_slices
from slime_tis.errors import CustomFunctionError
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import CustomTis, ObjectiveFunctions
from slime_tis.policy.policy_loss import LossInputs, LossStep, policy_loss, rollout_pull
from slime_tis.policy.response_tokens import ResponseTokens, turns_of
from slime_tis.policy.step_sums import STALENESS, TURN, LossReduction, metrics_by, step_metrics
from slime_tis.trainer.megatron.batch import make_batch

NAN = float("nan")


def make(masks, **values):
    """Responses after prompts of two tokens, with values by name: rollout_log_probs, advantages, old_log_probs, …"""
    lengths = [len(mask) for mask in masks]
    totals = [n + 2 for n in lengths]
    versions = values.pop("weight_versions", [[0.0] * n for n in lengths])
    packed = {
        f"{name}_L": torch.tensor([x for row in rows for x in row]) for name, rows in values.items()
    }
    loss_mask_N = torch.tensor([x for mask in masks for x in mask], dtype=torch.float32)
    return ResponseTokens(
        slices=response_slices(totals, lengths, 0, 1),
        total_lengths=tuple(totals),
        loss_mask_L=loss_mask_N,
        loss_mask_N=loss_mask_N,
        weight_versions_L=torch.tensor([x for row in versions for x in row], dtype=torch.int64),
        turns_L=turns_of(loss_mask_N, lengths),
        **packed,
    )


def build(policy=None, recompute_old=False, **correction):
    return LossStep(
        correction=RolloutCorrectionConfig(**{"rejection_normalizer": "kept", **correction}),
        policy=PolicyConfig(**(policy or {})),
        uses_recomputed_old_policy=recompute_old,
    )


def evaluate(step, tokens, log_probs, entropy):
    found = policy_loss(LossInputs(tokens=tokens, log_probs_L=log_probs, entropy_L=entropy), step)
    return found.numerator, found.denominator, found.sums


def loss_of(step, tokens, log_probs):
    """(loss, gradient at the log-probs, sums) of a step with this micro-batch alone."""
    leaf = torch.tensor(log_probs, requires_grad=True)
    numerator, denominator, sums = evaluate(
        step, tokens.to(leaf.device), leaf, torch.zeros(len(log_probs))
    )
    (numerator / denominator.clamp_min(1)).backward()
    return (numerator / denominator.clamp_min(1)).item(), leaf.grad, sums


def counts(sums):
    """Accepted and original denominator, accepted and original tokens."""
    found = (
        sums.loss_denominator,
        sums.original_denominator,
        sums.accepted_tokens,
        sums.masked_in_tokens,
    )
    return [value.item() for value in found]


MASKS = [[1, 1, 0, 1], [1, 1]]
ROLLOUT = [[-1.0, -2.0, -9.0, -0.5], [-1.5, -0.25]]
CURRENT = [-1.0, -1.0, -1.0, -1.0, -1.5, -0.5]
ADVANTAGES = [[1.0] * 4, [-2.0] * 2]


def batch(**values):
    """`make` of the constants above, with these values instead or in addition."""
    return make(MASKS, **{"rollout_log_probs": ROLLOUT, "advantages": ADVANTAGES, **values})


def test_the_loss_decays_with_the_age_of_the_weights():
    """Versions 5 (trained), 3, 4 and unknown: factors 1, 0.25, 0.5 and 1; masked tokens and the divisor as before."""
    versions = {"weight_versions": [[5, 3, 3, 4], [-1, 7]]}
    tokens = batch(**versions)
    step = build({"calculate_per_token_loss": True}, use_tis=True)
    _, plain, _ = loss_of(replace(step, version=5), tokens, CURRENT)
    decayed = replace(step, version=5, policy=replace(step.policy, staleness_decay=0.5))
    _, gradient, _ = loss_of(decayed, tokens, CURRENT)
    assert (gradient / plain)[[0, 1, 3, 4, 5]].tolist() == pytest.approx([1, 0.25, 0.5, 1, 1])


def test_the_policy_gradient_of_ppo_and_of_reinforce_by_the_current_ratio():
    _, grad, _ = loss_of(build(), batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4]))
    step = build(
        use_rollout_logprobs=True, policy_loss="reinforce", use_tis=True, tis_upper_bound=2.0
    )
    loss, grad, _ = loss_of(step, batch(), CURRENT)
    weights = torch.tensor([1.0, 2.0, 0.0, 0.60653066, 1.0, 0.7788008])
    expected = weights * torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4])
    torch.testing.assert_close(grad, expected)
    assert loss == pytest.approx((expected @ torch.tensor(CURRENT)).item())


def test_rejected_tokens_and_sequences_leave_the_denominator_unless_it_is_the_original():
    # Ratios: 1, e, (masked), e^−0.5 | 1, e^−0.25. Rejection keeps [0.5, 2], so the second token
    # goes.
    step = build(
        use_tis=True, tis_upper_bound=2.0, use_rs=True, rs_lower_bound=0.7, rs_upper_bound=2.0
    )
    _, grad, sums = loss_of(step, batch(), CURRENT)
    quarter = 0.7788008
    torch.testing.assert_close(grad, torch.tensor([-1 / 2, 0, 0, 0, 2 / 4, 2 / 4 * quarter]))
    assert counts(sums) == [2, 2, 3, 5]
    step = build(
        use_rs=True, rs_lower_bound=0.7, rs_upper_bound=2.0, rejection_normalizer="original"
    )
    _, grad, _ = loss_of(step, batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, 0, 0, 0, 2 / 4, 2 / 4]))
    step = build(use_rs=True, rs_level="sequence", rs_lower_bound=0.5, rs_upper_bound=1.2)
    _, grad, sums = loss_of(step, batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([0, 0, 0, 0, 1.0, 1.0]))
    assert counts(sums) == [1, 2, 2, 5]


def test_bypass_clips_against_the_rollout_policy_with_ratio_one_of_a_neutral_token():
    step = build(use_rollout_logprobs=True)
    _, grad, _ = loss_of(step, batch(), CURRENT)
    # A > 0: ratio e > 1.2 is clipped, e^−0.5 is not; A < 0: ratio e^−0.25 < 0.8 is clipped.
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, 0, 0, -0.60653066 / 6, 2 / 4, 0]))
    tokens = batch(rollout_log_probs=[[-1.0, NAN, -9.0, -1.0], [-1.5, -0.5]])
    step = build(use_rollout_logprobs=True, nonfinite_policy="neutral")
    _, grad, _ = loss_of(step, tokens, CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4]))


@pytest.mark.parametrize("loss", ["ppo", "reinforce"])
def test_bypass_measures_the_weights_of_the_current_policy_and_does_not_apply_them(loss):
    # Weights π_θ/π_rollout: 1, e, (masked), e^−0.5 | 1, e^−0.25; the second is above the bound of
    # 2.
    step = build(use_rollout_logprobs=True, policy_loss=loss)
    _, grad, sums = loss_of(step, batch(), CURRENT)
    found = step_metrics(sums, step.correction, step.policy)
    expected = {
        "mis_mean_is_weight_before_clip": 1.2207226,
        "mis_ratio_mean_after_mis": 1.0770663,
        "mis_weight_max": 2.0,
        "mis_truncate_fraction": 0.2,
        "gradient_kept_fraction": 1.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    if loss == "reinforce":
        torch.testing.assert_close(grad, torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4]))


def test_several_steps_per_rollout_take_the_recomputed_log_probs_as_the_old_policy():
    old = [[-1.0, -1.1, -9.0, -2.0], [-1.5, -0.4]]
    tokens = batch(old_log_probs=old)
    _, grad, sums = loss_of(build(recompute_old=True), tokens, CURRENT)
    ratio = (torch.tensor(CURRENT) - tokens.old_log_probs_L).exp()
    scale = torch.tensor([-1 / 6, -1 / 6, 0, 0, 2 / 4, 2 / 4])  # the fourth ratio, e, is clipped
    torch.testing.assert_close(grad, ratio * scale)
    metrics = step_metrics(sums, RolloutCorrectionConfig(), PolicyConfig())
    assert metrics["ois"] == pytest.approx(
        ((1 + ratio[1] + ratio[3]) / 3 + (1 + ratio[5]) / 2).item() / 2, rel=1e-6
    )


def test_interpolated_old_log_probs_follow_the_versions():
    versions = [[0, 1, 2, 3], [3, 3]]
    tokens = batch(advantages=[[1.0] * 4, [1.0] * 2], weight_versions=versions)
    step = replace(
        build({"eps_clip": 0.9, "eps_clip_high": 9.0}, old_logprobs="interpolate"), version=3
    )
    _, grad, _ = loss_of(step, tokens, CURRENT)
    # α = (d − 1) / d for a staleness of d steps: 2/3 and 1/2 for 3 and 2, 0 for 1 and 0.
    # log π_θ − log π_old = (1 − α) Δ.
    ratio = torch.tensor([0.0, 1.0 / 2, 0.0, -0.5, 0.0, -0.25]).exp()
    torch.testing.assert_close(grad, -ratio * torch.tensor([1 / 6, 1 / 6, 0, 1 / 6, 1 / 4, 1 / 4]))


def test_off_policy_sequence_masking_against_the_old_policy_is_slimes():
    # log π_old − log π_θ: 0.1 on average in both; only the second sequence has a negative
    # advantage.
    old = [[-0.9, -0.9, -9.0, -0.9], [-1.4, -0.4]]
    step = build({"use_opsm": True, "opsm_policy": "old", "opsm_delta": 0.05}, recompute_old=True)
    _, grad, sums = loss_of(step, batch(old_log_probs=old), CURRENT)
    ratio = 2.718281828**-0.1
    torch.testing.assert_close(grad, torch.tensor([-ratio / 3, -ratio / 3, 0, -ratio / 3, 0, 0]))
    assert counts(sums) == [1, 2, 3, 5]
    metrics = step_metrics(sums, step.correction, step.policy)
    assert metrics["opsm_clipfrac"] == pytest.approx(0.5)
    assert metrics["gradient_kept_fraction"] == pytest.approx(3 / 5)


@pytest.mark.parametrize(("delta", "accepted"), [(0.1, False), (0.2, True)])
def test_off_policy_sequence_masking_acts_with_one_step_per_rollout(delta, accepted):
    # log π_rollout − log π_θ: −0.17 on average in the first, and 0.125 in the second, of a negative
    # advantage.
    step = build({"use_opsm": True, "opsm_delta": delta})
    _, grad, sums = loss_of(step, batch(), CURRENT)
    second = [2 / 4, 2 / 4] if accepted else [0.0, 0.0]
    first = -1 / 6 if accepted else -1 / 3
    torch.testing.assert_close(grad, torch.tensor([first, first, 0, first, *second]))
    metrics = step_metrics(sums, step.correction, step.policy)
    assert metrics["opsm_clipfrac"] == pytest.approx(0.0 if accepted else 0.5)
    unset = build({"use_opsm": True}).policy, build({"opsm_policy": "old"}).policy
    assert [policy.opsm_bound for policy in unset] == [0.1, 1e-4]


OPSM_OF_TOKENS = {  # advantages, mask → accepted; log π_old − log π_θ is 1 at every token
    "signs differ": ([2.0, -1.0, -0.5], [1, 1, 1], [True, False, False]),
    "a masked token has the largest advantage": (
        [-1.0, 5.0, -1.0],
        [1, 0, 1],
        [False, False, False],
    ),
}


@pytest.mark.parametrize(
    ("advantages", "mask", "accepted"), OPSM_OF_TOKENS.values(), ids=OPSM_OF_TOKENS
)
def test_opsm_of_the_loss_goes_by_each_token(advantages, mask, accepted):
    tokens = make([mask], rollout_log_probs=[[-1.0] * 3], advantages=[advantages])
    step = build({"use_opsm": True, "opsm_delta": 0.1, "calculate_per_token_loss": True})
    _, grad, sums = loss_of(step, tokens, [-2.0] * 3)
    assert (grad != 0).tolist() == accepted
    assert counts(sums)[2:] == [sum(accepted), sum(mask)]
    rejected = sum(mask) - sum(accepted)
    assert step_metrics(sums, step.correction, step.policy)["opsm_clipfrac"] == pytest.approx(
        rejected / sum(mask)
    )


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf"), -9999.0, -1e6])
@pytest.mark.parametrize("bypass", [False, True])
def test_a_log_prob_that_is_not_finite_is_rejected_without_a_trace(bad, bypass):
    options = {"use_rollout_logprobs": True} if bypass else {"use_tis": True}
    poisoned = batch(rollout_log_probs=[[-1.0, bad, bad, -0.5], ROLLOUT[1]])
    masked = make([[1, 0, 0, 1], [1, 1]], rollout_log_probs=ROLLOUT, advantages=ADVANTAGES)
    _, grad, sums = loss_of(build(**options), poisoned, CURRENT)
    _, expected, _ = loss_of(build(**options), masked, CURRENT)
    assert torch.equal(grad, expected)
    metrics = step_metrics(sums, RolloutCorrectionConfig(**options), PolicyConfig())
    assert metrics["nonfinite_token_fraction"] == pytest.approx(1 / 5)
    assert all(value == value for value in metrics.values())


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["train", "rollout"])
def test_the_pull_is_0_where_a_log_prob_is_not_finite(bad, side):
    train, rollout = [-1.0, -1.0], [-1.0, -3.0]
    (train if side == "train" else rollout)[0] = bad
    leaf = torch.tensor(train, requires_grad=True)
    tokens = make([[1, 1]], rollout_log_probs=[rollout], advantages=[[0.0, 0.0]])
    pull = rollout_pull(LossInputs(tokens=tokens, log_probs_L=leaf, entropy_L=torch.zeros(2)))
    pull.sum().backward()
    assert pull.tolist() == [0.0, 4.0]
    assert leaf.grad is not None and leaf.grad.tolist() == [0.0, 4.0]


def test_vespo_bounds_the_log_ratio_of_each_token():
    def gradient(log_ratios):
        old = (torch.tensor([-60.0, -60.0]) - torch.tensor(log_ratios)).tolist()
        values = {"rollout_log_probs": [old], "old_log_probs": [old], "advantages": [[1.0, 1.0]]}
        step = build(recompute_old=True, policy_loss="vespo")
        return loss_of(step, make([[1, 1]], **values), [-60.0, -60.0])[1]

    assert torch.equal(gradient([-50.0, 22.0]), gradient([-20.0, 20.0]))


@pytest.mark.parametrize(
    ("options", "stays_close"),
    [
        ({}, False),
        ({"rollout_pull_coef": 0.1}, True),
        ({"use_opsm": True, "opsm_policy": "rollout"}, True),
        ({"use_opsm": True, "opsm_policy": "old"}, False),
    ],
    ids=["neither", "pull", "OPSM against the rollout", "OPSM against the old policy"],
)
def test_terms_that_keep_the_policy_close_to_the_rollouts(options, stays_close):
    assert PolicyConfig(**options).stays_close_to_rollouts == stays_close


@pytest.mark.parametrize(
    ("coefficient", "contributing"), [(0.0, 4), (0.5, 5)], ids=["accepted", "pulled"]
)
def test_contributing_tokens_are_the_accepted_or_pulled_ones(coefficient, contributing):
    step = build({"rollout_pull_coef": coefficient}, use_rs=True, rs_upper_bound=2.0)
    leaf = torch.tensor(CURRENT, requires_grad=True)
    outputs = policy_loss(
        LossInputs(tokens=batch(), log_probs_L=leaf, entropy_L=torch.zeros(6)), step
    )
    assert outputs.contributing.item() == contributing


def test_a_reducer_leaves_the_entropy_bonus_as_it_is():
    def loss(coefficient):
        options = {"custom_pg_loss_reducer_function_path": "slime_tis.policy.reducers.dr_grpo"}
        step = build({**options, "entropy_coef": coefficient})
        functions = ObjectiveFunctions.load(step.policy, Namespace(rollout_max_response_len=8))
        leaf = torch.tensor(CURRENT, requires_grad=True)
        return evaluate(replace(step, functions=functions), batch(), leaf, torch.ones(6))[0].item()

    assert loss(0.1) - loss(0.0) == pytest.approx(
        -0.1 * 2, rel=1e-5
    )  # two sequences with a mean entropy of 1


@pytest.mark.parametrize(
    ("counted", "expected"), [([1], 3.0), ([0], 3.0)], ids=["one sequence", "no sequence"]
)
def test_metrics_of_a_custom_loss_are_means_over_sequences(counted, expected):
    tokens = make([counted], rollout_log_probs=[[-1.0]], advantages=[[1.0]])
    policy = PolicyConfig(loss_type="custom_loss", custom_loss_function_path="own.py:loss")
    _, _, sums = loss_of(build(), tokens, [-1.0])
    sums = replace(sums, custom={"custom/own": torch.tensor(3.0)})
    assert step_metrics(sums, RolloutCorrectionConfig(), policy)["custom/own"] == expected


def test_the_sum_of_the_pull_keeps_no_graph():
    step = build({"rollout_pull_coef": 0.5})
    leaf = torch.tensor(CURRENT, requires_grad=True)
    _, _, sums = evaluate(step, batch(), leaf, torch.zeros(6))
    assert sums.rollout_pull is not None and not sums.rollout_pull.requires_grad


def test_metrics_only_leaves_the_loss_as_it_is_to_the_bit():
    values = {"rollout_log_probs": [[-1.0, NAN, -9.0, -0.5], ROLLOUT[1]], "advantages": ADVANTAGES}
    old = [[-1.2, -1.1, -1.0, -2.0], [-1.5, -0.4]]
    _, plain, _ = loss_of(build(), make(MASKS, **values), CURRENT)
    measured = build(get_mismatch_metrics=True)
    _, grad, sums = loss_of(measured, make(MASKS, old_log_probs=old, **values), CURRENT)
    assert torch.equal(grad, plain)
    metrics = step_metrics(sums, measured.correction, PolicyConfig())
    # π_old of the separate forward pass: Δ = −0.2, −1.5 | 0, −0.15 on finite tokens.
    assert metrics["mismatch_kl"] == pytest.approx((0.2 + 1.5 + 0.0 + 0.15) / 4, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rollout_logprobs": True}, {"old_logprobs": "interpolate"}, {"use_rs": True}],
    ids=str,
)
def test_the_mismatch_of_the_only_step_is_that_of_its_own_forward_pass(options):
    tokens = batch()
    measured = build(get_mismatch_metrics=True, **options)
    metrics = step_metrics(
        loss_of(measured, tokens, CURRENT)[2], measured.correction, PolicyConfig()
    )
    assert metrics["mismatch_kl"] == pytest.approx(-(1.0 - 0.5 - 0.25) / 5)
    _, _, sums = loss_of(measured, tokens, [NAN, *CURRENT[1:]])
    metrics = step_metrics(sums, measured.correction, PolicyConfig())
    assert metrics["mismatch_kl"] == pytest.approx(-(1.0 - 0.5 - 0.25) / 4)


def test_the_mismatch_is_reported_by_staleness_of_the_weights():
    # Δ: 0, 1, (masked), −0.5 at versions 3, 3, 3, 2 | 0, −0.25 at versions 1, 0; the policy is at
    # version 3.
    versions = [[3.0, 3.0, 3.0, 2.0], [1.0, 0.0]]
    sums = loss_of(replace(build(), version=3), batch(weight_versions=versions), CURRENT)[2]
    found = metrics_by(STALENESS, sums.merge(sums).staleness)
    assert found["mismatch_kl_staleness_0"] == pytest.approx(-0.5)
    assert found["mismatch_kl_staleness_1"] == pytest.approx(0.5)
    assert found["mismatch_kl_staleness_2"] == 0.0
    assert found["mismatch_k3_kl_staleness_3_to_4"] == pytest.approx(math.exp(-0.25) - 1 + 0.25)
    assert found["token_fraction_staleness_0"] == pytest.approx(0.4)
    assert found["train_rollout_logprob_abs_diff_staleness_3_to_4"] == pytest.approx(0.25)
    fresh = loss_of(build(), batch(), CURRENT)[2]
    assert metrics_by(STALENESS, fresh.staleness) == {}


def test_kl_and_entropy_enter_the_loss():
    step = build(
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.5,
            "entropy_coef": 0.1,
            "calculate_per_token_loss": True,
        }
    )
    tokens = make(
        [[1, 1]],
        rollout_log_probs=[[-1.0, -1.0]],
        ref_log_probs=[[-1.5, -1.0]],
        advantages=[[1.0, 1.0]],
    )
    leaf, entropy = (
        torch.tensor([-1.0, -2.0], requires_grad=True),
        torch.tensor([0.3, 0.5], requires_grad=True),
    )
    numerator, denominator, sums = evaluate(step, tokens, leaf, entropy)
    (numerator / denominator).backward()
    torch.testing.assert_close(leaf.grad, torch.tensor([-0.5 + 0.25, -0.5 + 0.25]))
    torch.testing.assert_close(entropy.grad, torch.tensor([-0.05, -0.05]))
    metrics = step_metrics(sums, step.correction, step.policy)
    assert metrics["loss"] == pytest.approx(-1.0 - 0.1 * 0.4 + 0.5 * (0.5 - 1.0) / 2)


def test_a_batch_split_into_micro_batches_sums_to_the_same_loss_and_metrics():
    step = build(use_tis=True, use_rs=True, rs_lower_bound=0.7, rs_upper_bound=2.0)
    whole = batch()
    _, expected, sums = loss_of(step, whole, CURRENT)
    leaf = torch.tensor(CURRENT, requires_grad=True)
    first = evaluate(
        step,
        make(MASKS[:1], rollout_log_probs=ROLLOUT[:1], advantages=ADVANTAGES[:1]),
        leaf[:4],
        leaf[:4],
    )
    second = evaluate(
        step,
        make(MASKS[1:], rollout_log_probs=ROLLOUT[1:], advantages=ADVANTAGES[1:]),
        leaf[4:],
        leaf[4:],
    )
    ((first[0] + second[0]) / (first[1] + second[1])).backward()
    torch.testing.assert_close(leaf.grad, expected)
    merged = step_metrics(first[2].merge(second[2]), step.correction, step.policy)
    del merged["entropy_loss"], merged["entropy_gap"]
    metrics = step_metrics(sums, step.correction, step.policy)
    assert merged == pytest.approx({name: metrics[name] for name in merged}, rel=1e-6, abs=1e-7)


def test_trimming_takes_the_limit_that_it_is_given():
    # Δ²: 0, 1, (masked), 0.25 | 0, 0.0625: over all five the mean of all but the 1 is 0.078.
    options = {"rs_second_moment_bound": 0.1}
    whole = batch()
    _, grad, sums = loss_of(build(**options), whole, CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 4, 0, 0, -1 / 4, 2 / 4, 2 / 4]))
    first = make(MASKS[:1], rollout_log_probs=ROLLOUT[:1], advantages=ADVANTAGES[:1])
    for limit, accepted in (
        (None, 1),
        (1.0, 2),
        (torch.inf, 3),
    ):  # alone: the mean of 0 and 0.25 is 0.125
        known = None if limit is None else torch.tensor(limit, dtype=torch.float64)
        _, _, sums = loss_of(
            replace(build(**options), global_batch=GlobalBatch(second_moment_limit=known)),
            first,
            CURRENT[:4],
        )
        assert counts(sums) == [1, 1, accepted, 3]


class Observer:
    """A user function that keeps its arguments and changes nothing."""

    def __init__(self, metrics=lambda call: {}):
        self.metrics = metrics
        self.calls = []

    def __call__(self, args, *, pg_loss, loss_masks, **kwargs):
        self.calls.append({"loss_masks": loss_masks, "random": torch.rand(()).item(), **kwargs})
        return pg_loss, loss_masks, self.metrics(len(self.calls))


def custom(function, seed=0, **correction):
    return replace(
        build(**correction), custom=CustomTis(function=function, args=Namespace(), seed=seed)
    )


def test_a_custom_function_sees_slimes_arguments_and_ours_and_replaces_loss_and_mask():
    seen = {}

    def halve(args, *, pg_loss, loss_masks, **kwargs):
        seen.update(kwargs)
        masks = [mask.clone() for mask in loss_masks]
        masks[0][0] = 0
        return pg_loss / 2, masks, {"flat": torch.arange(6.0)}

    step = custom(halve, use_tis=True)
    _, grad, sums = loss_of(step, batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([0, -1 / 8, 0, -1 / 8, 1 / 4, 1 / 4]))
    assert [len(values) for values in seen["train_log_probs"]] == [4, 2]
    assert seen["total_lengths"] == [6, 4] and seen["response_lengths"] == [4, 2]
    assert [values.tolist() for values in seen["advantages"]] == ADVANTAGES
    assert not seen["log_probs"][0].requires_grad
    metrics = step_metrics(sums, step.correction, step.policy)
    assert metrics["flat"] == pytest.approx(
        ((0 + 1 + 3) / 3 + (4 + 5) / 2) / 2
    )  # over the mask before rejection
    assert metrics["gradient_kept_fraction"] == pytest.approx(4 / 5)


def test_a_custom_function_gets_whole_masks_without_a_collective_of_its_own():
    watch, reduced = Observer(), list[int]()

    def of_one_rank(table, op):
        reduced.append(table.shape[0])
        return table

    # 8 tokens on 2 ranks, the response from token 3: rank 0 has its last token alone.
    tokens = (
        make_batch([[1] * 8], [[1, 1, 0, 1, 1]], [[-1.0] * 5], [[0] * 5], 0, 2)
        .with_advantages([1.0])
        .responses
    )
    step = replace(
        custom(watch, use_tis=True), global_batch=GlobalBatch(ranks=Ranks(context=of_one_rank))
    )
    loss_of(step, tokens, [-1.0])
    assert [mask.tolist() for mask in watch.calls[0]["loss_masks"]] == [[1, 1, 0, 1, 1]]
    assert reduced == [1]  # the correction's table alone, of one sequence


def test_a_custom_function_replaces_veto_and_trimming_too():
    step = custom(Observer(), use_tis=True, rs_second_moment_bound=0.1, rs_veto_upper_threshold=2.0)
    _, grad, sums = loss_of(step, batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4]))
    metrics = step_metrics(sums, step.correction, step.policy)
    assert not any("second_moment" in name or "catastrophic" in name for name in metrics)


def test_a_custom_function_for_metrics_alone_may_work_in_place():
    def careless(args, *, pg_loss, **k):
        pg_loss.mul_(0.5).add_(1)
        for name in (
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "advantages",
            "log_probs",
        ):
            for values in k[name]:
                values.mul_(0).add_(3)
        torch.set_grad_enabled(False)
        return pg_loss, [mask * 0 for mask in k["loss_masks"]], {}

    values = {"rollout_log_probs": ROLLOUT, "advantages": ADVANTAGES, "old_log_probs": ROLLOUT}
    plain_loss, plain, plain_sums = loss_of(
        build(get_mismatch_metrics=True), make(MASKS, **values), CURRENT
    )
    tokens = make(MASKS, **values)
    before = {
        name: value.clone() for name, value in vars(tokens).items() if isinstance(value, Tensor)
    }
    loss, grad, sums = loss_of(custom(careless, get_mismatch_metrics=True), tokens, CURRENT)
    assert loss == plain_loss and torch.equal(grad, plain)
    assert torch.equal(sums.terms.stack(), plain_sums.terms.stack())
    for name, value in before.items():
        assert torch.equal(getattr(tokens, name), value), name


def test_a_log_prob_that_was_never_sampled_is_0_for_a_custom_function_and_one_that_is_missing_is_nan():
    watch = Observer()
    tokens = batch(rollout_log_probs=[[-1.0, NAN, NAN, -0.5], ROLLOUT[1]])
    loss_of(custom(watch, use_tis=True), tokens, CURRENT)
    seen = watch.calls[0]["rollout_log_probs"]
    assert (
        seen[0].nan_to_num(9.0).tolist() == [-1.0, 9.0, 0.0, -0.5]
        and seen[1].tolist() == ROLLOUT[1]
    )


def test_metrics_of_a_custom_function_replace_none_of_ours_and_have_the_same_names():
    names = ("loss", "grad_norm", "custom_loss", "mine", "opsm_clipfrac")
    greedy = Observer(lambda call: dict.fromkeys(names, torch.full((6,), 99.0)))
    step = replace(custom(greedy, use_tis=True), policy=PolicyConfig(use_opsm=True, opsm_delta=9.0))
    loss, _, sums = loss_of(step, batch(), CURRENT)
    metrics = step_metrics(sums, step.correction, step.policy)
    assert (
        metrics["loss"] == pytest.approx(loss)
        and "grad_norm" not in metrics
        and metrics["opsm_clipfrac"] == 0
    )
    names = (
        "custom_loss",
        "custom_custom_loss",
        "custom_grad_norm",
        "mine",
        "custom_opsm_clipfrac",
    )
    assert [metrics[name] for name in names] == pytest.approx([99.0] * 5)
    step = custom(Observer(lambda call: {("a", "b")[call - 1]: torch.zeros(6)}), use_tis=True)
    tokens = batch()
    loss_of(step, tokens, CURRENT)
    message = (
        r"Observer \(.*, line \d+\) returned metric 'a' for one micro-batch and not for another"
    )
    with pytest.raises(CustomFunctionError, match=message):
        loss_of(step, tokens, CURRENT)


def test_random_numbers_of_a_custom_function_follow_from_seed_and_micro_batch():
    lottery = Observer()
    tokens = batch()
    before = torch.get_rng_state()
    for seed in (5, 5, 6):
        step = custom(lottery, seed, use_tis=True)
        loss_of(step, tokens, CURRENT)
        loss_of(step, tokens, CURRENT)
    drawn = [call["random"] for call in lottery.calls]
    assert drawn[:2] == drawn[2:4] != drawn[4:] and drawn[0] != drawn[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mismatch_is_reported_by_turn_without_what_tools_said():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1.0])
    assert turns_of(mask, [6, 0, 2, 3]).tolist() == [1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 2]
    assert turns_of(mask[:0], [0]).tolist() == []
    tokens = make(
        [[1, 1, 0, 1], [1, 0]],
        rollout_log_probs=[[-1.0, -1.0, 9.0, -3.0], [-1.0, -50.0]],
        advantages=[[1.0] * 4, [1.0] * 2],
    )
    inputs = LossInputs(tokens=tokens, log_probs_L=torch.full((6,), -2.0), entropy_L=torch.zeros(6))
    found = metrics_by(TURN, policy_loss(inputs, build()).sums.turns)
    assert found["token_fraction_turn_1"] == 0.75 and found["token_fraction_turn_2"] == 0.25
    assert found["mismatch_kl_turn_1"] == pytest.approx(1.0) and found[
        "mismatch_kl_turn_2"
    ] == pytest.approx(-1.0)
    assert found["train_rollout_logprob_abs_diff_turn_1"] == pytest.approx(1.0)
    assert {name.rpartition("_turn_")[2] for name in found} == {"1", "2"}


def test_segments_of_a_rollout_are_averaged_over_together():
    mask = torch.tensor([True, True, False, True, True, True])
    counts = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64)
    apart = LossReduction.build(mask, counts, [3, 2, 1], [0, 1, 2], per_token=False)
    assert apart.scale_L.tolist() == [0.5, 0.5, 0, 0.5, 0.5, 1.0] and apart.denominator == 3
    together = LossReduction.build(mask, counts, [3, 2, 1], [0, 0, 1], per_token=False)
    assert (
        together.scale_L.tolist() == [0.25, 0.25, 0, 0.25, 0.25, 1.0] and together.denominator == 2
    )
    per_token = LossReduction.build(mask, counts, [3, 2, 1], [0, 0, 1], per_token=True)
    assert per_token.scale_L.tolist() == [1, 1, 0, 1, 1, 1] and per_token.denominator == 5
