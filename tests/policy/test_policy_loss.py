"""The loss of a micro-batch: old policies, weights, masks, denominators, custom functions."""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tis.correction import GlobalBatch, Ranks, RolloutCorrectionConfig, response_slices
from slime_tis.errors import CustomFunctionError
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import CustomTis, ObjectiveFunctions
from slime_tis.policy.loss_inputs import LossInputs, LossStep
from slime_tis.policy.policy_loss import policy_loss, rollout_pull
from slime_tis.policy.response_tokens import ResponseTokens, turns_of
from slime_tis.policy.step_sums import (
    STALENESS,
    TURN,
    LossReduction,
    StepSums,
    metrics_by,
    step_metrics,
)
from slime_tis.trainer.megatron.batch import make_batch

NAN = float("nan")
Rows = Sequence[Sequence[float]]


def make(masks: Rows, **values: Rows) -> ResponseTokens:
    """Responses after prompts of two tokens.

    Values by name: rollout_log_probs, advantages, old_log_probs, weight_versions, …
    """
    lengths = [len(mask) for mask in masks]
    totals = [length + 2 for length in lengths]
    versions = values.pop("weight_versions", [[0.0] * length for length in lengths])
    packed: dict[str, Any] = {f"{name}_L": pack(rows) for name, rows in values.items()}
    loss_mask_N = pack(masks).float()
    return ResponseTokens(
        slices=response_slices(totals, lengths, 0, 1),
        total_lengths=tuple(totals),
        loss_mask_L=loss_mask_N,
        loss_mask_N=loss_mask_N,
        weight_versions_L=pack(versions).long(),
        turns_L=turns_of(loss_mask_N, lengths),
        **packed,
    )


def pack(rows: Rows) -> Tensor:
    return torch.tensor(list(chain.from_iterable(rows)))


def build(
    policy: dict[str, Any] | None = None, recompute_old: bool = False, **correction: Any
) -> LossStep:
    return LossStep(
        correction=RolloutCorrectionConfig(**{"rejection_normalizer": "kept", **correction}),
        policy=PolicyConfig(**(policy or {})),
        uses_recomputed_old_policy=recompute_old,
    )


def evaluate(
    step: LossStep, tokens: ResponseTokens, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, Tensor, StepSums]:
    outputs = policy_loss(LossInputs(tokens=tokens, log_probs_L=log_probs, entropy_L=entropy), step)
    return outputs.numerator, outputs.denominator, outputs.sums


def loss_of(
    step: LossStep, tokens: ResponseTokens, log_probs: list[float]
) -> tuple[float, Tensor, StepSums]:
    """Loss, gradient of the log-probs, and sums of a step with only this micro-batch."""
    leaf = torch.tensor(log_probs, requires_grad=True)
    numerator, denominator, sums = evaluate(
        step, tokens.to(leaf.device), leaf, torch.zeros(len(log_probs))
    )
    loss = numerator / denominator.clamp_min(1)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad, sums


def counts(sums: StepSums) -> list[float]:
    """Accepted and original denominator, accepted and original tokens."""
    values = (
        sums.loss_denominator,
        sums.original_denominator,
        sums.accepted_tokens,
        sums.masked_in_tokens,
    )
    return [value.item() for value in values]


MASKS = [[1, 1, 0, 1], [1, 1]]
ROLLOUT = [[-1.0, -2.0, -9.0, -0.5], [-1.5, -0.25]]
CURRENT = [-1.0, -1.0, -1.0, -1.0, -1.5, -0.5]
ADVANTAGES = [[1.0] * 4, [-2.0] * 2]


def batch(**values: Rows) -> ResponseTokens:
    """`make` of the constants above, with these values instead or in addition."""
    rows: dict[str, Rows] = {"rollout_log_probs": ROLLOUT, "advantages": ADVANTAGES, **values}
    return make(MASKS, **rows)


def test_loss_decays_with_the_age_of_the_weights() -> None:
    # Versions 5 (trained), 3, 4 and unknown have factors 1, 0.25, 0.5 and 1.
    tokens = batch(weight_versions=[[5, 3, 3, 4], [-1, 7]])
    step = build({"calculate_per_token_loss": True}, use_tis=True)
    _, plain, _ = loss_of(replace(step, version=5), tokens, CURRENT)
    decayed = replace(step, version=5, policy=replace(step.policy, staleness_decay=0.5))
    _, gradient, _ = loss_of(decayed, tokens, CURRENT)
    assert (gradient / plain)[[0, 1, 3, 4, 5]].tolist() == pytest.approx([1, 0.25, 0.5, 1, 1])


def test_ppo_has_the_policy_gradient() -> None:
    _, grad, _ = loss_of(build(), batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4]))


def test_reinforce_weights_by_the_current_ratio() -> None:
    step = build(
        use_rollout_logprobs=True, policy_loss="reinforce", use_tis=True, tis_upper_bound=2.0
    )
    loss, grad, _ = loss_of(step, batch(), CURRENT)
    weights = torch.tensor([1.0, 2.0, 0.0, 0.60653066, 1.0, 0.7788008])
    expected = weights * torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4])
    torch.testing.assert_close(grad, expected)
    assert loss == pytest.approx((expected @ torch.tensor(CURRENT)).item())


# Ratios are 1, e, (masked), e^−0.5 | 1, e^−0.25.
TOKEN_REJECTION: dict[str, Any] = {"use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 2.0}


def test_denominator_omits_rejected_tokens() -> None:
    step = build(use_tis=True, tis_upper_bound=2.0, **TOKEN_REJECTION)
    _, grad, sums = loss_of(step, batch(), CURRENT)
    weight = 0.7788008
    torch.testing.assert_close(grad, torch.tensor([-1 / 2, 0, 0, 0, 2 / 4, 2 / 4 * weight]))
    assert counts(sums) == [2, 2, 3, 5]


def test_original_denominator_has_rejected_tokens() -> None:
    step = build(**TOKEN_REJECTION, rejection_normalizer="original")
    _, grad, _ = loss_of(step, batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, 0, 0, 0, 2 / 4, 2 / 4]))


def test_denominator_omits_rejected_sequences() -> None:
    step = build(use_rs=True, rs_level="sequence", rs_lower_bound=0.5, rs_upper_bound=1.2)
    _, grad, sums = loss_of(step, batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([0, 0, 0, 0, 1.0, 1.0]))
    assert counts(sums) == [1, 2, 2, 5]


def test_bypass_clips_against_the_rollout_policy() -> None:
    step = build(use_rollout_logprobs=True)
    _, grad, _ = loss_of(step, batch(), CURRENT)
    # A > 0: ratio e > 1.2 is clipped, e^−0.5 is not; A < 0: ratio e^−0.25 < 0.8 is clipped.
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, 0, 0, -0.60653066 / 6, 2 / 4, 0]))


def test_neutral_token_has_ratio_one_in_bypass_mode() -> None:
    tokens = batch(rollout_log_probs=[[-1.0, NAN, -9.0, -1.0], [-1.5, -0.5]])
    step = build(use_rollout_logprobs=True, nonfinite_policy="neutral")
    _, grad, _ = loss_of(step, tokens, CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4]))


@pytest.mark.parametrize("loss", ["ppo", "reinforce"])
def test_bypass_measures_the_current_policys_weights(loss: str) -> None:
    # Weights π_θ/π_rollout are 1, e, (masked), e^−0.5 | 1, e^−0.25; e is above the bound of 2.
    step = build(use_rollout_logprobs=True, policy_loss=loss)
    _, _, sums = loss_of(step, batch(), CURRENT)
    metrics = step_metrics(sums, step.correction, step.policy)
    expected = {
        "mis_mean_is_weight_before_clip": 1.2207226,
        "mis_ratio_mean_after_mis": 1.0770663,
        "mis_weight_max": 2.0,
        "mis_truncate_fraction": 0.2,
        "gradient_kept_fraction": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_bypass_does_not_apply_measured_weights() -> None:
    step = build(use_rollout_logprobs=True, policy_loss="reinforce")
    _, grad, _ = loss_of(step, batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4]))


def test_recomputed_log_probs_are_the_old_policy() -> None:
    old = [[-1.0, -1.1, -9.0, -2.0], [-1.5, -0.4]]
    tokens = batch(old_log_probs=old)
    _, grad, sums = loss_of(build(recompute_old=True), tokens, CURRENT)
    ratio = (torch.tensor(CURRENT) - pack(old)).exp()
    scale = torch.tensor([-1 / 6, -1 / 6, 0, 0, 2 / 4, 2 / 4])  # the fourth ratio, e, is clipped
    torch.testing.assert_close(grad, ratio * scale)
    metrics = step_metrics(sums, RolloutCorrectionConfig(), PolicyConfig())
    means = torch.stack([(1 + ratio[1] + ratio[3]) / 3, (1 + ratio[5]) / 2])
    assert metrics["ois"] == pytest.approx(means.mean().item(), rel=1e-6)


def test_interpolated_old_log_probs_follow_the_versions() -> None:
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


@pytest.fixture
def old_policy_opsm() -> tuple[Tensor, StepSums, dict[str, float]]:
    """Gradient, sums and metrics of OPSM against the old policy, as in slime.

    log π_old − log π_θ is 0.1 on average in both sequences; only the second one has a negative
    advantage.
    """
    old = [[-0.9, -0.9, -9.0, -0.9], [-1.4, -0.4]]
    step = build({"use_opsm": True, "opsm_policy": "old", "opsm_delta": 0.05}, recompute_old=True)
    _, grad, sums = loss_of(step, batch(old_log_probs=old), CURRENT)
    return grad, sums, step_metrics(sums, step.correction, step.policy)


def test_opsm_masks_a_sequence(old_policy_opsm: tuple[Tensor, StepSums, dict[str, float]]) -> None:
    grad, sums, _ = old_policy_opsm
    ratio = math.exp(-0.1)
    torch.testing.assert_close(grad, torch.tensor([-ratio / 3, -ratio / 3, 0, -ratio / 3, 0, 0]))
    assert counts(sums) == [1, 2, 3, 5]


def test_opsm_is_reported(old_policy_opsm: tuple[Tensor, StepSums, dict[str, float]]) -> None:
    _, _, metrics = old_policy_opsm
    assert metrics["opsm_clipfrac"] == pytest.approx(0.5)
    assert metrics["gradient_kept_fraction"] == pytest.approx(3 / 5)


@pytest.mark.parametrize(("delta", "accepted"), [(0.1, False), (0.2, True)])
def test_opsm_works_with_one_step_per_rollout(delta: float, accepted: bool) -> None:
    # log π_rollout − log π_θ is −0.17 on average in the first sequence, and 0.125 in the second
    # one, which has a negative advantage.
    step = build({"use_opsm": True, "opsm_delta": delta})
    _, grad, sums = loss_of(step, batch(), CURRENT)
    expected = [-1 / 3, -1 / 3, 0, -1 / 3, 0, 0]
    if accepted:
        expected = [-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4]
    torch.testing.assert_close(grad, torch.tensor(expected))
    metrics = step_metrics(sums, step.correction, step.policy)
    assert metrics["opsm_clipfrac"] == pytest.approx(0.0 if accepted else 0.5)


@pytest.mark.parametrize(("policy", "bound"), [("rollout", 0.1), ("old", 1e-4)])
def test_opsm_has_a_default_bound_per_policy(policy: str, bound: float) -> None:
    assert build({"opsm_policy": policy}).policy.opsm_bound == bound


OPSM_TOKENS = {  # advantages, mask → accepted; log π_old − log π_θ is 1 at every token
    "signs differ": ([2.0, -1.0, -0.5], [1, 1, 1], [True, False, False]),
    "a masked token has the largest advantage": (
        [-1.0, 5.0, -1.0],
        [1, 0, 1],
        [False, False, False],
    ),
}


@pytest.mark.parametrize(("advantages", "mask", "accepted"), OPSM_TOKENS.values(), ids=OPSM_TOKENS)
def test_opsm_masks_single_tokens(
    advantages: list[float], mask: list[int], accepted: list[bool]
) -> None:
    tokens = make([mask], rollout_log_probs=[[-1.0] * 3], advantages=[advantages])
    step = build({"use_opsm": True, "opsm_delta": 0.1, "calculate_per_token_loss": True})
    _, grad, sums = loss_of(step, tokens, [-2.0] * 3)
    assert (grad != 0).tolist() == accepted
    assert counts(sums)[2:] == [sum(accepted), sum(mask)]
    metrics = step_metrics(sums, step.correction, step.policy)
    assert metrics["opsm_clipfrac"] == pytest.approx(1 - sum(accepted) / sum(mask))


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf"), -9999.0, -1e6])
@pytest.mark.parametrize("bypass", [False, True])
def test_nonfinite_log_prob_acts_like_a_mask(bad: float, bypass: bool) -> None:
    options: dict[str, Any] = {"use_rollout_logprobs": True} if bypass else {"use_tis": True}
    poisoned = batch(rollout_log_probs=[[-1.0, bad, bad, -0.5], ROLLOUT[1]])
    masked = make([[1, 0, 0, 1], [1, 1]], rollout_log_probs=ROLLOUT, advantages=ADVANTAGES)
    _, grad, sums = loss_of(build(**options), poisoned, CURRENT)
    _, expected, _ = loss_of(build(**options), masked, CURRENT)
    assert torch.equal(grad, expected)
    metrics = step_metrics(sums, RolloutCorrectionConfig(**options), PolicyConfig())
    assert metrics["nonfinite_token_fraction"] == pytest.approx(1 / 5)
    assert not any(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["train", "rollout"])
def test_pull_is_0_without_a_finite_log_prob(bad: float, side: str) -> None:
    train = [-1.0, -1.0]
    rollout = [-1.0, -3.0]
    if side == "train":
        train[0] = bad
    else:
        rollout[0] = bad
    leaf = torch.tensor(train, requires_grad=True)
    tokens = make([[1, 1]], rollout_log_probs=[rollout], advantages=[[0.0, 0.0]])
    pull = rollout_pull(LossInputs(tokens=tokens, log_probs_L=leaf, entropy_L=torch.zeros(2)))
    pull.sum().backward()
    assert pull.tolist() == [0.0, 4.0]
    assert leaf.grad is not None and leaf.grad.tolist() == [0.0, 4.0]


def vespo_gradient(log_ratios: list[float]) -> Tensor:
    old = [-60.0 - log_ratio for log_ratio in log_ratios]
    tokens = make([[1, 1]], rollout_log_probs=[old], old_log_probs=[old], advantages=[[1.0, 1.0]])
    _, grad, _ = loss_of(build(recompute_old=True, policy_loss="vespo"), tokens, [-60.0, -60.0])
    return grad


def test_vespo_bounds_the_log_ratios_of_tokens() -> None:
    assert torch.equal(vespo_gradient([-50.0, 22.0]), vespo_gradient([-20.0, 20.0]))


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
def test_terms_keep_the_policy_close_to_the_rollouts(
    options: dict[str, Any], stays_close: bool
) -> None:
    assert PolicyConfig(**options).stays_close_to_rollouts == stays_close


@pytest.mark.parametrize(
    ("coefficient", "contributing"), [(0.0, 4), (0.5, 5)], ids=["accepted", "pulled"]
)
def test_contributing_tokens_are_accepted_or_pulled(coefficient: float, contributing: int) -> None:
    step = build({"rollout_pull_coef": coefficient}, use_rs=True, rs_upper_bound=2.0)
    leaf = torch.tensor(CURRENT, requires_grad=True)
    outputs = policy_loss(
        LossInputs(tokens=batch(), log_probs_L=leaf, entropy_L=torch.zeros(6)), step
    )
    assert outputs.contributing.item() == contributing


def loss_with_reducer(entropy_coef: float) -> float:
    options = {"custom_pg_loss_reducer_function_path": "slime_tis.policy.reducers.dr_grpo"}
    step = build({**options, "entropy_coef": entropy_coef})
    functions = ObjectiveFunctions.load(step.policy, Namespace(rollout_max_response_len=8))
    leaf = torch.tensor(CURRENT, requires_grad=True)
    loss, _, _ = evaluate(replace(step, functions=functions), batch(), leaf, torch.ones(6))
    return loss.item()


def test_reducer_does_not_change_the_entropy_bonus() -> None:
    # Two sequences have a mean entropy of 1.
    bonus = loss_with_reducer(0.1) - loss_with_reducer(0.0)
    assert bonus == pytest.approx(-0.1 * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("counted", "expected"), [([1], 3.0), ([0], 3.0)], ids=["one sequence", "no sequence"]
)
def test_custom_loss_metrics_are_means_over_sequences(counted: list[int], expected: float) -> None:
    tokens = make([counted], rollout_log_probs=[[-1.0]], advantages=[[1.0]])
    policy = PolicyConfig(loss_type="custom_loss", custom_loss_function_path="own.py:loss")
    _, _, sums = loss_of(build(), tokens, [-1.0])
    sums = replace(sums, custom={"custom/own": torch.tensor(3.0)})
    assert step_metrics(sums, RolloutCorrectionConfig(), policy)["custom/own"] == expected


def test_sum_of_the_pull_has_no_graph() -> None:
    step = build({"rollout_pull_coef": 0.5})
    leaf = torch.tensor(CURRENT, requires_grad=True)
    _, _, sums = evaluate(step, batch(), leaf, torch.zeros(6))
    assert sums.rollout_pull is not None and not sums.rollout_pull.requires_grad


@pytest.fixture
def measured_run() -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics with --get-mismatch-metrics and recomputed log-probs."""
    tokens = batch(
        rollout_log_probs=[[-1.0, NAN, -9.0, -0.5], ROLLOUT[1]],
        old_log_probs=[[-1.2, -1.1, -1.0, -2.0], [-1.5, -0.4]],
    )
    step = build(get_mismatch_metrics=True)
    _, grad, sums = loss_of(step, tokens, CURRENT)
    return grad, step_metrics(sums, step.correction, step.policy)


def test_measuring_keeps_all_bits_of_the_gradient(
    measured_run: tuple[Tensor, dict[str, float]],
) -> None:
    tokens = batch(rollout_log_probs=[[-1.0, NAN, -9.0, -0.5], ROLLOUT[1]])
    _, plain, _ = loss_of(build(), tokens, CURRENT)
    grad, _ = measured_run
    assert torch.equal(grad, plain)


def test_recomputed_log_probs_are_measured(measured_run: tuple[Tensor, dict[str, float]]) -> None:
    # Δ = −0.2, −1.5 | 0, −0.15 at finite tokens.
    _, metrics = measured_run
    assert metrics["mismatch_kl"] == pytest.approx((0.2 + 1.5 + 0.0 + 0.15) / 4, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rollout_logprobs": True}, {"old_logprobs": "interpolate"}, {"use_rs": True}],
    ids=str,
)
def test_only_step_measures_its_forward_pass(options: dict[str, Any]) -> None:
    step = build(get_mismatch_metrics=True, **options)
    _, _, sums = loss_of(step, batch(), CURRENT)
    metrics = step_metrics(sums, step.correction, PolicyConfig())
    assert metrics["mismatch_kl"] == pytest.approx(-(1.0 - 0.5 - 0.25) / 5)
    # Without the log-prob of the first token, whose Δ is 0.
    _, _, sums = loss_of(step, batch(), [NAN, *CURRENT[1:]])
    metrics = step_metrics(sums, step.correction, PolicyConfig())
    assert metrics["mismatch_kl"] == pytest.approx(-(1.0 - 0.5 - 0.25) / 4)


def test_mismatch_is_reported_by_staleness() -> None:
    # Δ is 0, 1, (masked), −0.5 at versions 3, 3, 3, 2 | 0, −0.25 at versions 1, 0. The policy is at
    # version 3.
    versions = [[3.0, 3.0, 3.0, 2.0], [1.0, 0.0]]
    _, _, sums = loss_of(replace(build(), version=3), batch(weight_versions=versions), CURRENT)
    metrics = metrics_by(STALENESS, sums.merge(sums).staleness)
    expected = {
        "mismatch_kl_staleness_0": -0.5,
        "mismatch_kl_staleness_1": 0.5,
        "mismatch_kl_staleness_2": 0.0,
        "mismatch_k3_kl_staleness_3_to_4": math.exp(-0.25) - 1 + 0.25,
        "token_fraction_staleness_0": 0.4,
        "train_rollout_logprob_abs_diff_staleness_3_to_4": 0.25,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_fresh_tokens_have_no_metrics_by_staleness() -> None:
    _, _, sums = loss_of(build(), batch(), CURRENT)
    assert metrics_by(STALENESS, sums.staleness) == {}


REGULARIZED = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.5,
    "entropy_coef": 0.1,
    "calculate_per_token_loss": True,
}


@pytest.fixture
def regularized_run() -> tuple[Tensor, Tensor, dict[str, float]]:
    """Gradients of log-probs and entropies, and metrics, with KL loss and entropy bonus."""
    step = build(REGULARIZED)
    tokens = make(
        [[1, 1]],
        rollout_log_probs=[[-1.0, -1.0]],
        ref_log_probs=[[-1.5, -1.0]],
        advantages=[[1.0, 1.0]],
    )
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.3, 0.5], requires_grad=True)
    numerator, denominator, sums = evaluate(step, tokens, leaf, entropy)
    (numerator / denominator).backward()
    assert leaf.grad is not None
    assert entropy.grad is not None
    return leaf.grad, entropy.grad, step_metrics(sums, step.correction, step.policy)


def test_kl_loss_has_a_gradient(regularized_run: tuple[Tensor, Tensor, Any]) -> None:
    grad, _, _ = regularized_run
    torch.testing.assert_close(grad, torch.tensor([-0.5 + 0.25, -0.5 + 0.25]))


def test_entropy_bonus_has_a_gradient(regularized_run: tuple[Tensor, Tensor, Any]) -> None:
    _, grad, _ = regularized_run
    torch.testing.assert_close(grad, torch.tensor([-0.05, -0.05]))


def test_loss_metric_has_all_terms(regularized_run: tuple[Any, Any, dict[str, float]]) -> None:
    _, _, metrics = regularized_run
    assert metrics["loss"] == pytest.approx(-1.0 - 0.1 * 0.4 + 0.5 * (0.5 - 1.0) / 2)


@pytest.fixture
def split_run() -> tuple[LossStep, Tensor, StepSums]:
    """A step with two micro-batches: options, gradient and sums."""
    step = build(use_tis=True, **TOKEN_REJECTION)
    leaf = torch.tensor(CURRENT, requires_grad=True)
    first_tokens = make(MASKS[:1], rollout_log_probs=ROLLOUT[:1], advantages=ADVANTAGES[:1])
    second_tokens = make(MASKS[1:], rollout_log_probs=ROLLOUT[1:], advantages=ADVANTAGES[1:])
    first = evaluate(step, first_tokens, leaf[:4], leaf[:4])
    second = evaluate(step, second_tokens, leaf[4:], leaf[4:])
    loss = (first[0] + second[0]) / (first[1] + second[1])
    loss.backward()
    assert leaf.grad is not None
    return step, leaf.grad, first[2].merge(second[2])


def test_micro_batches_add_up_to_the_gradient(split_run: tuple[LossStep, Tensor, StepSums]) -> None:
    step, grad, _ = split_run
    _, expected, _ = loss_of(step, batch(), CURRENT)
    torch.testing.assert_close(grad, expected)


def test_micro_batches_add_up_to_the_metrics(split_run: tuple[LossStep, Tensor, StepSums]) -> None:
    step, _, split_sums = split_run
    _, _, sums = loss_of(step, batch(), CURRENT)
    expected = step_metrics(sums, step.correction, step.policy)
    metrics = step_metrics(split_sums, step.correction, step.policy)
    # The entropies of the two runs differ.
    names = metrics.keys() - {"entropy_loss", "entropy_gap"}
    compared = {name: metrics[name] for name in names}
    assert compared == pytest.approx({name: expected[name] for name in names}, rel=1e-6, abs=1e-7)


# Δ² is 0, 1, (masked), 0.25 | 0, 0.0625.
TRIMMING: dict[str, Any] = {"rs_second_moment_bound": 0.1}


def test_trimming_uses_the_limit_of_the_batch() -> None:
    # The mean of all tokens but the second one is 0.078.
    _, grad, _ = loss_of(build(**TRIMMING), batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 4, 0, 0, -1 / 4, 2 / 4, 2 / 4]))


@pytest.mark.parametrize(
    ("limit", "accepted"),
    [
        # The mean of 0 and 0.25 is 0.125.
        pytest.param(None, 1, id="limit of the micro-batch"),
        pytest.param(1.0, 2, id="given limit"),
        pytest.param(torch.inf, 3, id="no limit"),
    ],
)
def test_trimming_uses_a_given_limit(limit: float | None, accepted: int) -> None:
    second_moment_limit = None
    if limit is not None:
        second_moment_limit = torch.tensor(limit, dtype=torch.float64)
    global_batch = GlobalBatch(second_moment_limit=second_moment_limit)
    tokens = make(MASKS[:1], rollout_log_probs=ROLLOUT[:1], advantages=ADVANTAGES[:1])
    step = replace(build(**TRIMMING), global_batch=global_batch)
    _, _, sums = loss_of(step, tokens, CURRENT[:4])
    assert counts(sums) == [1, 1, accepted, 3]


class Observer:
    """A user function that keeps its arguments and changes nothing."""

    def __init__(self, metrics: Callable[[int], dict[str, Tensor]] = lambda call: {}) -> None:
        self.metrics = metrics
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, args: Namespace, *, pg_loss: Tensor, loss_masks: list[Tensor], **kwargs: Any
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        self.calls.append({"loss_masks": loss_masks, "random": torch.rand(()).item(), **kwargs})
        return pg_loss, loss_masks, self.metrics(len(self.calls))


def custom(function: Callable[..., Any], seed: int = 0, **correction: Any) -> LossStep:
    custom_tis = CustomTis(function=function, args=Namespace(), seed=seed)
    return replace(build(**correction), custom=custom_tis)


def halve(
    args: Namespace, *, pg_loss: Tensor, loss_masks: list[Tensor], **kwargs: Any
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Halves the loss and masks the first token."""
    masks = [mask.clone() for mask in loss_masks]
    masks[0][0] = 0
    return pg_loss / 2, masks, {"flat": torch.arange(6.0)}


def test_custom_function_replaces_the_loss() -> None:
    _, grad, _ = loss_of(custom(halve, use_tis=True), batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([0, -1 / 8, 0, -1 / 8, 1 / 4, 1 / 4]))


def test_custom_function_replaces_the_mask() -> None:
    step = custom(halve, use_tis=True)
    _, _, sums = loss_of(step, batch(), CURRENT)
    metrics = step_metrics(sums, step.correction, step.policy)
    assert metrics["gradient_kept_fraction"] == pytest.approx(4 / 5)
    # Metrics are averaged over the mask before rejection.
    assert metrics["flat"] == pytest.approx(((0 + 1 + 3) / 3 + (4 + 5) / 2) / 2)


def test_custom_function_gets_slimes_arguments() -> None:
    observer = Observer()
    loss_of(custom(observer, use_tis=True), batch(), CURRENT)
    arguments = observer.calls[0]
    assert [len(values) for values in arguments["train_log_probs"]] == [4, 2]
    assert arguments["total_lengths"] == [6, 4]
    assert arguments["response_lengths"] == [4, 2]


def test_custom_function_gets_our_arguments() -> None:
    observer = Observer()
    loss_of(custom(observer, use_tis=True), batch(), CURRENT)
    arguments = observer.calls[0]
    assert [values.tolist() for values in arguments["advantages"]] == ADVANTAGES
    assert not arguments["log_probs"][0].requires_grad


def test_custom_function_gets_complete_masks_without_a_collective() -> None:
    observer = Observer()
    reduced_rows = []

    def reduce(table: Tensor, _: str) -> Tensor:
        reduced_rows.append(table.shape[0])
        return table

    # 8 tokens on 2 ranks, the response from token 3: rank 0 has only the last response token.
    tokens = (
        make_batch([[1] * 8], [[1, 1, 0, 1, 1]], [[-1.0] * 5], [[0] * 5], 0, 2)
        .with_advantages([1.0])
        .responses
    )
    global_batch = GlobalBatch(ranks=Ranks(context=reduce))
    step = replace(custom(observer, use_tis=True), global_batch=global_batch)
    loss_of(step, tokens, [-1.0])
    assert [mask.tolist() for mask in observer.calls[0]["loss_masks"]] == [[1, 1, 0, 1, 1]]
    assert reduced_rows == [1]  # the correction's table of one sequence


@pytest.mark.parametrize(
    ("options", "metric"),
    [
        pytest.param({"rs_second_moment_bound": 0.1}, "second_moment", id="trimming"),
        pytest.param({"rs_veto_upper_threshold": 2.0}, "catastrophic", id="veto"),
    ],
)
def test_custom_function_replaces_rejection(options: dict[str, Any], metric: str) -> None:
    step = custom(Observer(), use_tis=True, **options)
    _, grad, sums = loss_of(step, batch(), CURRENT)
    torch.testing.assert_close(grad, torch.tensor([-1 / 6, -1 / 6, 0, -1 / 6, 2 / 4, 2 / 4]))
    metrics = step_metrics(sums, step.correction, step.policy)
    assert [name for name in metrics if metric in name] == []


def careless(
    args: Namespace, *, pg_loss: Tensor, **kwargs: Any
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Changes all arguments in place, and a global setting."""
    pg_loss.mul_(0.5).add_(1)
    lists = ("train_log_probs", "rollout_log_probs", "loss_masks", "advantages", "log_probs")
    for name in lists:
        for values in kwargs[name]:
            values.mul_(0).add_(3)
    torch.set_grad_enabled(False)
    return pg_loss, [mask * 0 for mask in kwargs["loss_masks"]], {}


def test_measuring_function_does_not_change_the_loss() -> None:
    tokens = batch(old_log_probs=ROLLOUT)
    plain = loss_of(build(get_mismatch_metrics=True), tokens, CURRENT)
    loss, grad, sums = loss_of(custom(careless, get_mismatch_metrics=True), tokens, CURRENT)
    assert loss == plain[0]
    assert torch.equal(grad, plain[1])
    assert torch.equal(sums.terms.stack(), plain[2].terms.stack())


def test_careless_function_gets_copies() -> None:
    tokens = batch(old_log_probs=ROLLOUT)
    loss_of(custom(careless, get_mismatch_metrics=True), tokens, CURRENT)
    expected = vars(batch(old_log_probs=ROLLOUT))
    tensors = {name: value for name, value in vars(tokens).items() if isinstance(value, Tensor)}
    torch.testing.assert_close(tensors, {name: expected[name] for name in tensors}, rtol=0, atol=0)


def test_custom_function_gets_0_for_tokens_that_were_not_sampled() -> None:
    observer = Observer()
    tokens = batch(rollout_log_probs=[[-1.0, NAN, NAN, -0.5], ROLLOUT[1]])
    loss_of(custom(observer, use_tis=True), tokens, CURRENT)
    first, second = observer.calls[0]["rollout_log_probs"]
    # The second token is sampled, and its log-prob is missing: NaN. The third one is tool output.
    assert first.nan_to_num(9.0).tolist() == [-1.0, 9.0, 0.0, -0.5]
    assert second.tolist() == ROLLOUT[1]


@pytest.fixture
def greedy_metrics() -> dict[str, float]:
    """Metrics of a step with a custom function that uses our names."""
    names = ("loss", "grad_norm", "custom_loss", "mine", "opsm_clipfrac")
    greedy = Observer(lambda call: dict.fromkeys(names, torch.full((6,), 99.0)))
    step = replace(custom(greedy, use_tis=True), policy=PolicyConfig(use_opsm=True, opsm_delta=9.0))
    loss, _, sums = loss_of(step, batch(), CURRENT)
    metrics = step_metrics(sums, step.correction, step.policy)
    assert metrics["loss"] == pytest.approx(loss)
    return metrics


def test_custom_metrics_do_not_replace_ours(greedy_metrics: dict[str, float]) -> None:
    assert "grad_norm" not in greedy_metrics
    assert greedy_metrics["opsm_clipfrac"] == 0


@pytest.mark.parametrize(
    "name",
    ["custom_loss", "custom_custom_loss", "custom_grad_norm", "mine", "custom_opsm_clipfrac"],
)
def test_custom_metric_gets_a_free_name(greedy_metrics: dict[str, float], name: str) -> None:
    assert greedy_metrics[name] == pytest.approx(99.0)


def test_custom_metrics_need_the_same_names_in_every_call() -> None:
    function = Observer(lambda call: {("a", "b")[call - 1]: torch.zeros(6)})
    step = custom(function, use_tis=True)
    loss_of(step, batch(), CURRENT)
    message = (
        r"Observer \(.*, line \d+\) returned metric 'a' for one micro-batch and not for another"
    )
    with pytest.raises(CustomFunctionError, match=message):
        loss_of(step, batch(), CURRENT)


def random_numbers(seed: int) -> list[float]:
    """Numbers that a custom function draws in two micro-batches."""
    observer = Observer()
    step = custom(observer, seed, use_tis=True)
    loss_of(step, batch(), CURRENT)
    loss_of(step, batch(), CURRENT)
    return [call["random"] for call in observer.calls]


def test_custom_functions_seed_determines_its_random_numbers() -> None:
    assert random_numbers(5) == random_numbers(5) != random_numbers(6)


def test_micro_batches_have_different_random_numbers() -> None:
    first, second = random_numbers(5)
    assert first != second


def test_custom_function_does_not_change_the_generator() -> None:
    before = torch.get_rng_state()
    random_numbers(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_turns_begin_with_trained_tokens() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1.0])
    assert turns_of(mask, [6, 0, 2, 3]).tolist() == [1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 2]


def test_empty_response_has_no_turns() -> None:
    assert turns_of(torch.zeros(0), [0]).tolist() == []


def test_mismatch_is_reported_by_turn() -> None:
    tokens = make(
        [[1, 1, 0, 1], [1, 0]],
        rollout_log_probs=[[-1.0, -1.0, 9.0, -3.0], [-1.0, -50.0]],
        advantages=[[1.0] * 4, [1.0] * 2],
    )
    inputs = LossInputs(tokens=tokens, log_probs_L=torch.full((6,), -2.0), entropy_L=torch.zeros(6))
    metrics = metrics_by(TURN, policy_loss(inputs, build()).sums.turns)
    expected = {
        "token_fraction_turn_1": 0.75,
        "token_fraction_turn_2": 0.25,
        "mismatch_kl_turn_1": 1.0,
        "mismatch_kl_turn_2": -1.0,
        "train_rollout_logprob_abs_diff_turn_1": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert {name.rpartition("_turn_")[2] for name in metrics} == {"1", "2"}


REDUCTIONS = {
    # rollouts, per token, factors, denominator
    "three rollouts": ([0, 1, 2], False, [0.5, 0.5, 0, 0.5, 0.5, 1.0], 3),
    "two segments of a rollout": ([0, 0, 1], False, [0.25, 0.25, 0, 0.25, 0.25, 1.0], 2),
    "per token": ([0, 0, 1], True, [1, 1, 0, 1, 1, 1], 5),
}


@pytest.mark.parametrize(
    ("rollouts", "per_token", "factors", "denominator"), REDUCTIONS.values(), ids=REDUCTIONS
)
def test_segments_of_a_rollout_are_averaged_together(
    rollouts: list[int], per_token: bool, factors: list[float], denominator: float
) -> None:
    mask = torch.tensor([True, True, False, True, True, True])
    counts_S = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64)
    reduction = LossReduction.build(mask, counts_S, [3, 2, 1], rollouts, per_token=per_token)
    assert reduction.scale_L.tolist() == factors
    assert reduction.denominator == denominator
