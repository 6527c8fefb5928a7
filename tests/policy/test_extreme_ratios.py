"""Losses and KL estimates at extreme log-ratios: finite, and right if a clip acts."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_tis.correction import RolloutCorrectionConfig
from slime_tis.policy.config import COVARIANCE_LOSSES, PolicyConfig
from slime_tis.policy.loss_inputs import LossInputs, LossStep
from slime_tis.policy.losses import LOSSES, TokenLossInputs, kl_estimate, policy_ratio, ppo_clip
from slime_tis.policy.policy_loss import policy_loss
from slime_tis.policy.step_sums import step_metrics
from tests.policy.test_policy_loss import make

NAN, INF = math.nan, math.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EXTREME = [
    NAN,
    INF,
    -INF,
    0.0,
    -1e-40,
    -1.0,
    -20.0,
    -89.0,
    -100.0,
    -200.0,
    -9000.0,
    -9999.0,
    -1e6,
    -3e38,
    1e30,
]
KINDS = ["k1", "k2", "k3", "low_var_kl"]
E20 = math.exp(20)


@dataclass
class Graded:
    """A loss per token and its gradient."""

    loss: Tensor
    gradient: Tensor

    @property
    def is_finite(self) -> bool:
        return bool(self.loss.isfinite().all() and self.gradient.isfinite().all())


def graded(loss_of, log_prob: Tensor) -> Graded:
    leaf = log_prob.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.sum().backward()
    assert leaf.grad is not None
    return Graded(loss.detach(), leaf.grad)


def loss_of(name, old: Tensor, advantage: Tensor, options: PolicyConfig):
    """A loss of LOSSES on one sequence, as a function of log π_θ."""
    selected = torch.arange(len(old)) % 2 == 0 if name in COVARIANCE_LOSSES else None

    def over_sequence(values: Tensor, *, mean: bool) -> Tensor:
        total = values.double().sum() / (len(values) if mean else 1)
        return total.to(values.dtype).expand_as(values)

    def prefix_sums(values: Tensor) -> Tensor:
        return values.double().cumsum(0).to(values.dtype)

    def loss(log_prob: Tensor) -> Tensor:
        inputs = TokenLossInputs(
            log_probs_L=log_prob,
            old_log_probs_L=old,
            advantages_L=advantage,
            over_sequence=over_sequence,
            prefix_sums=prefix_sums,
            config=options,
            selected_L=selected,
        )
        values, clipped = LOSSES[name](inputs)
        assert clipped.isfinite().all()
        return values

    return loss


# old log-prob, advantage → loss and gradient at a log-prob of −1, with ε = 0.2; by hand
PPO = {
    "vLLM's sentinel is clipped away": (-9999.0, 1.0, -1.2, 0.0),
    "100 nats are clipped away": (-101.0, 1.0, -1.2, 0.0),
    "21 nats are clipped away": (-22.0, 1.0, -1.2, 0.0),
    "minus infinity is clipped away": (-INF, 1.0, -1.2, 0.0),
    "negative advantage at the bound": (-101.0, -1.0, E20, 0.0),
    "negative advantage inside the bound": (-20.0, -1.0, math.exp(19), math.exp(19)),
    "advantage 0": (-101.0, 0.0, 0.0, 0.0),
    "likelier before, positive advantage": (99.0, 1.0, -math.exp(-20), 0.0),
    "likelier before, negative advantage": (99.0, -1.0, 0.8, 0.0),
}


@pytest.mark.parametrize(("old", "advantage", "loss", "gradient"), PPO.values(), ids=PPO)
def test_ppo_by_hand(old, advantage, loss, gradient):
    inputs = torch.tensor([old, -1.0]), torch.tensor([advantage, 1.0])
    found = graded(lambda x: ppo_clip(x, *inputs)[0], torch.tensor([-1.0, -1.0]))
    assert found.loss.tolist() == pytest.approx([loss, -1.0], rel=1e-5)
    assert found.gradient.tolist() == pytest.approx([gradient, -1.0], rel=1e-5)


@pytest.mark.parametrize("old", [-101.0, -9999.0, -1e6, -INF], ids=str)
def test_dual_clip_bounds_an_enormous_ratio(old):
    inputs = torch.tensor([old]), torch.tensor([-2.0])
    found = graded(lambda x: ppo_clip(x, *inputs, dual_clip=3.0)[0], torch.tensor([-1.0]))
    assert found.loss.item() == 6.0
    assert found.gradient.item() == 0.0


def test_gspo_keeps_an_extreme_sequence_to_itself():
    config = PolicyConfig()
    old, advantage = torch.tensor([-300.0, -1.0]), torch.tensor([1.0, 1.0])
    found = graded(loss_of("gspo", old, advantage, config), torch.tensor([-1.0, -1.0]))
    assert found.loss.tolist() == pytest.approx([-1.2, -1.2])
    assert found.gradient.tolist() == [0.0, 0.0]


# difference log π_θ − log π_ref → value and gradient of k3, by hand
K3 = {
    "-100 nats": (-100.0, E20 - 21, 0.0),
    "-19 nats": (-19.0, math.exp(19) - 20, 1 - math.exp(19)),
    "equal": (0.0, 0.0, 0.0),
    "100 nats": (100.0, 99.0, 1.0),
}


@pytest.mark.parametrize(("difference", "value", "gradient"), K3.values(), ids=K3)
def test_k3_by_hand(difference, value, gradient):
    reference = torch.tensor([-150.0], dtype=torch.float64)
    found = graded(lambda x: kl_estimate(x, reference, "k3"), reference + difference)
    assert found.loss.item() == pytest.approx(value, rel=1e-9)
    assert found.gradient.item() == pytest.approx(gradient, rel=1e-9)


def test_low_var_kl_has_no_gradient_beyond_its_clamp():
    found = graded(lambda x: kl_estimate(x, torch.zeros(1), "low_var_kl"), torch.tensor([-100.0]))
    assert (found.loss.item(), found.gradient.item()) == (10.0, 0.0)


SEEDS = st.integers(0, 2**32 - 1)
"""Hypothesis draws one number for a batch: drawing each value takes longer than the losses."""


def drawn_log_prob(chance: random.Random, extreme: bool) -> float:
    """A log-prob of at least -6, or in half of the cases one of EXTREME if `extreme` is set."""
    if extreme and chance.random() < 0.5:
        return chance.choice(EXTREME)
    if chance.random() < 0.25:
        return -float(chance.randint(0, 6))  # two equal log-probs have a ratio of exactly 1
    return chance.uniform(-6.0, 0.0)


def drawn_policy(seed: int, extreme: bool) -> tuple[list[list[float]], list[float], PolicyConfig]:
    """log π_θ, log π_old and advantages of one sequence, as lists, and options of the losses."""
    chance = random.Random(seed)
    length = chance.randint(1, 6)
    rows = []
    for _ in range(2):
        rows.append([drawn_log_prob(chance, extreme) for _ in range(length)])
    advantages = chance.choices([0.0, -0.0, 0.5, -0.5, 3.0, -3.0], k=length)
    options = PolicyConfig(
        eps_clip=chance.choice([0.2, 1.0, 3e-4]),
        eps_clip_high=chance.choice([None, 0.28, 5.0]),
        eps_clip_c=chance.choice([None, 3.0]),
    )
    return rows, advantages, options


def policies(extreme: bool):
    """Strategy for the policies and options of `drawn_policy`."""
    return SEEDS.map(lambda seed: drawn_policy(seed, extreme))


def tensors(rows, dtype):
    return [torch.tensor(row, dtype=torch.float64).to(dtype) for row in rows]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=100)
@given(policies(extreme=True), st.sampled_from(DTYPES))
def test_every_loss_is_finite_at_extremes(name, batch, dtype):
    rows, advantages, options = batch
    log_prob, old = tensors(rows, dtype)
    advantage = torch.tensor(advantages, dtype=dtype)
    assert graded(loss_of(name, old, advantage, options), log_prob).is_finite


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(policies(extreme=True), st.sampled_from(DTYPES), st.booleans())
def test_every_kl_estimate_is_finite_at_extremes(kind, batch, dtype, is_unbiased):
    log_prob, reference = tensors(batch[0], dtype)
    old = reference.flip(0)

    def estimate(x):
        return kl_estimate(x, reference, kind, policy_ratio(x, old) if is_unbiased else None)

    assert graded(estimate, log_prob).is_finite


def clipped(ratio: Tensor, low, high, advantage: Tensor, dual) -> Tensor:
    """−min(r·A, clip(r, low, high)·A), and at A < 0 at most −c·A."""
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if dual is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)


def formula(name, x: Tensor, old: Tensor, a: Tensor, options: PolicyConfig) -> Tensor:  # noqa: C901
    """The losses as docs/math.md has them, without bounds against overflow."""
    fixed = x.detach()
    ratio = (x - old).exp()
    low = torch.tensor(1 - options.eps_clip, dtype=x.dtype)
    high = torch.tensor(1 + options.clip_high, dtype=x.dtype)
    position = torch.arange(1, len(x) + 1, dtype=x.dtype)
    selected = position % 2 == 1
    if name == "gspo":
        ratio = ((fixed - old).mean() + x - fixed).exp()
    if name in ("ppo", "gspo"):
        return clipped(ratio, low, high, a, options.eps_clip_c if name == "ppo" else None)
    if name == "cispo":
        return -ratio.detach().clamp(low, high) * a * x
    if name == "aspo":
        weight = torch.where(a >= 0, 1 / ratio, ratio).detach()
        weight = weight if options.eps_clip_c is None else weight.clamp(max=options.eps_clip_c)
        is_clipped = torch.where(a >= 0, ratio > high, ratio < low)
        return -weight * a * torch.where(is_clipped, fixed, x).sub(fixed).exp()
    if name == "sapo":
        tau = torch.where(a > 0, options.sapo_tau_pos, options.sapo_tau_neg).to(x)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
    if name == "vespo":
        w = (fixed - old).sum().clamp(math.log(1e-8), 20).exp().expand_as(x)
        k, rate = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        return -(w**k) * (rate * (1 - w)).exp() * a * x
    if name == "clip_cov":
        loss = clipped(ratio, low, high, a, None)
        return torch.where(selected & (ratio * a <= ratio.clamp(low, high) * a), 0.0, loss)
    if name == "kl_cov":
        return -ratio * a + torch.where(selected, options.kl_cov_coef * (x - old).abs(), 0.0)
    if name == "dro":
        return -a * x + options.dro_beta / 2 * (x - old) ** 2
    if name == "experimental_ctpo":
        ratio = ((fixed - old).cumsum(0) + x - fixed).clamp(max=10).exp()
        root = position.sqrt()
        dual = None if options.eps_clip_c is None else options.eps_clip_c**root
        return clipped(ratio, low**root, high**root, a, dual)
    if name == "experimental_cppo":
        weight = 1 - 0.2 * (position - 1) / max(len(x) - 1, 1)
        divergence = weight * (fixed.exp() - old.exp()).abs()
        limit = options.eps_clip + options.experimental_cppo_budget * (weight.cumsum(0) - weight)
        is_inside = (divergence <= options.eps_clip) & (divergence.cumsum(0) <= limit)
        return torch.where(is_inside | (a * (ratio - 1) <= 0), -ratio * a, 0.0)
    assert name == "reinforce"
    return -a * x


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=100)
@given(policies(extreme=False))
def test_every_loss_is_its_formula_inside_the_bounds(name, batch):
    rows, advantages, options = batch
    log_prob, old = tensors(rows, torch.float64)
    advantage = torch.tensor(advantages, dtype=torch.float64)
    found = graded(loss_of(name, old, advantage, options), log_prob)
    expected = graded(lambda x: formula(name, x, old, advantage, options), log_prob)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-6, atol=1e-9)


@given(st.lists(st.floats(-20.0, 20.0, width=32), min_size=1, max_size=9))
def test_bounds_change_no_bit_inside(differences):
    difference = torch.tensor(differences, dtype=torch.float32)
    old = torch.full_like(difference, -1.0)
    log_prob = old + difference.clamp(-18, 18)
    plain = graded(lambda x: (x - old).exp(), log_prob)
    found = graded(lambda x: policy_ratio(x, old), log_prob)
    assert torch.equal(found.loss, plain.loss)
    assert torch.equal(found.gradient, plain.gradient)


GARBAGE = [NAN, INF, -INF, 1e30, -1e30, -9999.0]
POLICY_OPTIONS = {
    "plain": {},
    "per token": {"calculate_per_token_loss": True},
    "reference": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "use_unbiased_kl": True,
        "entropy_coef": 0.01,
    },
    "pull and OPSM": {"rollout_pull_coef": 0.1, "use_opsm": True, "staleness_decay": 0.9},
}
CORRECTIONS = {
    "bypass": {"use_rollout_logprobs": True},
    "bypass, neutral": {"use_rollout_logprobs": True, "nonfinite_policy": "neutral"},
    "decoupled": {"use_tis": True},
    "decoupled, neutral": {"use_tis": True, "nonfinite_policy": "neutral"},
    "metrics": {"get_mismatch_metrics": True},
}
NAMES = ("log_probs", "rollout_log_probs", "old_log_probs", "ref_log_probs")


def step_result(name, columns, correction, policy):
    """Loss, gradient and metrics of one micro-batch of two sequences."""
    mask = [[1, 0, 1, 1], [1, 1, 0, 1]]
    rows = {key: [values[:4], values[4:]] for key, values in columns.items() if key != "log_probs"}
    tokens = make(mask, advantages=[[1.0] * 4, [-1.0, -1.0, 2.0, -1.0]], **rows)
    step = LossStep(
        correction=RolloutCorrectionConfig(policy_loss=name, **correction),
        policy=PolicyConfig(**policy),
        uses_recomputed_old_policy="use_tis" in correction,
    )
    leaf = torch.tensor(columns["log_probs"], requires_grad=True)
    outputs = policy_loss(
        LossInputs(tokens=tokens, log_probs_L=leaf, entropy_L=torch.zeros(8)), step
    )
    outputs.numerator.backward()
    assert leaf.grad is not None
    return (
        outputs.numerator.detach(),
        leaf.grad,
        step_metrics(outputs.sums, step.correction, step.policy),
    )


def drawn_columns(seed: int) -> dict[str, list[float]]:
    """Eight log-probs of each policy in NAMES."""
    chance = random.Random(seed)
    columns = {}
    for name in NAMES:
        columns[name] = [drawn_log_prob(chance, extreme=True) for _ in range(8)]
    return columns


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60)
@given(
    SEEDS.map(drawn_columns),
    st.sampled_from(list(CORRECTIONS.values())),
    st.sampled_from(list(POLICY_OPTIONS.values())),
)
def test_the_policy_loss_is_finite_at_extremes(name, columns, correction, policy):
    if name == "vespo" and correction.get("use_tis"):  # refused: it weights sequences itself
        correction = CORRECTIONS["metrics"]
    loss, gradient, metrics = step_result(name, columns, correction, policy)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert [key for key, value in metrics.items() if not math.isfinite(value)] == []


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_masked_garbage_changes_nothing(name, garbage):
    policy = {**POLICY_OPTIONS["reference"], **POLICY_OPTIONS["pull and OPSM"]}
    clean = {key: [-1.0, -2.0, -0.5, -1.5, -0.25, -3.0, -1.0, -0.75] for key in NAMES}
    clean["rollout_log_probs"] = [-1.5, -2.0, -0.25, -1.0, -0.5, -2.0, -1.0, -0.5]
    poisoned = {key: list(values) for key, values in clean.items()}
    for values in poisoned.values():
        values[1] = values[6] = garbage
    expected = step_result(name, clean, {"use_rollout_logprobs": True}, policy)
    loss, gradient, metrics = step_result(name, poisoned, {"use_rollout_logprobs": True}, policy)
    assert torch.equal(loss, expected[0])
    assert torch.equal(gradient, expected[1])
    assert metrics == expected[2]
