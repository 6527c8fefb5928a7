"""Losses of 2026 against the values and gradients of the peers' own code; Clip-Cov and KL-Cov over
ranks."""

import math
from itertools import chain

import pytest
import torch

from slime_tis.correction import (
    Ranks,
    RolloutCorrectionConfig,
    correct,
    off_policy_sequence_mask,
    response_slices,
)
from slime_tis.integrations.verl_config import ACTOR_NAMES, LOSS_MODE, translate_actor
from slime_tis.policy import losses
from slime_tis.policy.config import COVARIANCE_LOSSES, PolicyConfig
from slime_tis.policy.loss_inputs import LossInputs, LossStep
from slime_tis.policy.losses import (
    LOSSES,
    aspo,
    clip_cov,
    dro,
    gspo,
    kl_cov,
    kl_estimate,
    ppo_clip,
    sapo,
    vespo,
)
from slime_tis.policy.policy_loss import policy_loss, prefix_sums
from tests.correction.test_trimming import over_ranks
from tests.golden.methods import BATCHES, Case, cases
from tests.policy.test_policy_loss import make


def average(loss, mask, mode):
    """The peers' averages over [B, T]."""
    loss = torch.where(mask > 0, loss, 0.0)
    if mode == "token-mean":
        return loss.sum() / mask.sum()
    rows = loss.sum(1) / mask.sum(1).clamp_min(1)
    return rows.mean() if mode == "mean over all rows" else rows.sum() / (mask.sum(1) > 0).sum()


def check(case, loss, log_prob, mode, rel=1e-5):
    value = average(loss, case.input("mask"), mode)
    value.backward()
    grad = log_prob.grad
    assert value.item() == pytest.approx(case.outputs["loss"], rel=rel, abs=1e-6)
    torch.testing.assert_close(grad, case.output("grad"), rtol=rel, atol=1e-6)


def policies(case):
    """log π with gradient, log of the anchor, advantages."""
    anchor = "sampler" if case.params.get("anchor") == "sampler" else "old"
    return case.input("logp").requires_grad_(), case.input(anchor), case.input("advantages")


def test_aspo_gradient_by_hand():
    """r = 0.5, 1.5, 0.5, 1.5, 0.2, 5 at A = 2, 2, −1, −1, 2, −1: 1/r or r, at most 3, and 0 beyond
    0.8 and 1.2."""
    ratio = torch.tensor([0.5, 1.5, 0.5, 1.5, 0.2, 5.0], dtype=torch.float64)
    old, advantage = torch.full_like(ratio, -3.0), torch.tensor([2.0, 2.0, -1.0, -1.0, 2.0, -1.0])
    log_prob = (old + ratio.log()).requires_grad_()
    loss, clipped = aspo(log_prob, old, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    loss.sum().backward()
    assert log_prob.grad is not None and log_prob.grad.tolist() == pytest.approx(
        [-4.0, 0.0, 0.0, 1.5, -6.0, 3.0]
    )
    assert loss.tolist() == pytest.approx([-4.0, -4 / 3, 0.5, 1.5, -6.0, 3.0])
    assert clipped.tolist() == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(("advantage", "weight"), [(0.5, 2.0), (-0.5, 0.5)], ids=str)
def test_aspo_takes_the_reciprocal_at_small_positive_advantages(advantage, weight):
    old = torch.tensor([-3.0])
    loss, _ = aspo(old + math.log(0.5), old, torch.tensor([advantage]), clip_low=0.9, clip_high=0.2)
    assert loss.tolist() == pytest.approx([-weight * advantage])


def sapo_of(params, mask, *policies):
    tau = {"tau_pos": 1.0, "tau_neg": 1.05} | params | params.get("sapo", {})
    return sapo(*policies, tau_positive=tau["tau_pos"], tau_negative=tau["tau_neg"])


def vespo_of(_, mask, log_prob, old, advantage):
    total = ((log_prob.detach() - old).clamp(-20, 20) * mask).sum(1, keepdim=True)
    return vespo(log_prob, total.expand_as(mask), advantage)


def gspo_of(params, mask, log_prob, old, advantage):
    mean = ((log_prob.detach() - old) * mask).sum(1, keepdim=True) / mask.sum(
        1, keepdim=True
    ).clamp_min(1)
    low, high = params["clip_ratio_low"], params["clip_ratio_high"]
    return gspo(log_prob, mean.expand_as(mask), advantage, clip_low=low, clip_high=high)[0]


def dual_clip_of(params, mask, *policies):
    low, high = params.get("epsilon_low", 0.2), params.get("epsilon_high", 0.2)
    return ppo_clip(*policies, clip_low=low, clip_high=high, dual_clip=params["delta"])[0]


def dro_of(params, mask, *policies):
    return dro(*policies, beta=params["policy_loss"]["dro_beta"])


ROWS = "mean over all rows"
PEERS = [
    (sapo_of, "seq-mean-token-mean", cases("verl.sapo")),
    (sapo_of, "token-mean", cases("areal.sapo", without="importance_sampling_level")),
    (sapo_of, ROWS, [*cases("skyrl.sapo"), *cases("trl.sapo", without="clip_max")]),
    (dro_of, "token-mean", cases("verl.dro")),
    (vespo_of, "token-mean", cases("trl.vespo", without="clip_max")),
    (gspo_of, None, cases("verl.gspo")),
    (
        dual_clip_of,
        "token-mean",
        cases("trl.delta", loss_type="dapo", without="importance_sampling_level"),
    ),
    (dual_clip_of, ROWS, cases("trl.delta", loss_type="grpo", without="importance_sampling_level")),
]


@pytest.mark.parametrize(
    ("loss", "mode", "case"),
    [
        pytest.param(loss, mode, *entry.values, id=entry.id)
        for loss, mode, chosen in PEERS
        for entry in chosen
    ],
)
def test_losses_equal_the_peers(loss, mode, case):
    inputs = policies(case)
    check(
        case,
        loss(case.params, case.input("mask"), *inputs),
        inputs[0],
        mode or case.params["loss_agg_mode"],
    )


MILES = [
    cases("miles.unbiased_kl", kl_loss_type=kind) for kind in ("k1", "k2", "k3")
]  # low_var_kl clamps earlier


@pytest.mark.parametrize("case", [*cases("slime.unbiased_kl"), *chain.from_iterable(MILES)])
def test_unbiased_kl_equals_slime_and_miles(case):
    log_prob, old, _ = policies(case)
    ratio = (log_prob - old).exp() if case.params["unbiased"] else None
    kl = kl_estimate(log_prob, case.input("ref"), case.params["kl_loss_type"], ratio)
    expected, mask = case.output("values"), case.input("mask").bool()
    bounded = (log_prob.detach() - case.input("ref")).abs() <= 20  # the peers have no bound
    torch.testing.assert_close(
        kl.detach()[mask & bounded], expected[mask & bounded], rtol=1e-5, atol=1e-6
    )
    if bounded[mask].all():
        check(case, kl, log_prob, "token-mean")


@pytest.mark.parametrize(
    "case", [*cases("slime.opsm"), *cases("miles.opsm"), *cases("trl.off_policy_mask")]
)
def test_off_policy_sequence_mask_equals_the_peers(case):
    mask, anchor = (
        case.input("mask").bool(),
        case.input("sampler" if "loss_type" in case.params else "old"),
    )
    delta = case.params.get("opsm_delta") or case.params["off_policy_mask_threshold"]
    kept = off_policy_sequence_mask(
        case.input("logp"), anchor, case.input("advantages")[:, 0], mask, delta=delta
    )
    expected = (
        case.output("kept_rows")
        if "kept_rows" in case.outputs
        else (case.output("kept") * mask).sum(1)
    )
    assert torch.equal(kept[mask.any(1)], expected[mask.any(1)] > 0)


def step_of(case, step):
    """Value, gradient [B, T] and accepted tokens of `policy_loss` on the case's batch."""
    names = {"old": "old_log_probs", "sampler": "rollout_log_probs", "advantages": "advantages"}
    tokens = make(
        case.input("mask").tolist(),
        **{key: case.input(name).tolist() for name, key in names.items()},
    )
    log_probs = case.input("logp").requires_grad_()
    flat = log_probs.reshape(-1)
    outputs = policy_loss(
        LossInputs(tokens=tokens, log_probs_L=flat, entropy_L=torch.zeros_like(flat)), step
    )
    value = outputs.numerator / outputs.denominator.clamp_min(1)
    value.backward()
    return value, log_probs.grad, outputs.record.accepted_L.view_as(log_probs)


def step_for(correction, *, old=True, **policy):
    return LossStep(
        correction=correction,
        policy=PolicyConfig(**{"calculate_per_token_loss": True, **policy}),
        uses_recomputed_old_policy=old,
    )


@pytest.mark.parametrize("case", [*cases("prime_rl.default"), *cases("prime_rl.ipo")])
def test_gradient_of_the_divergence_presets_equals_prime_rl(case):
    if "ipo_threshold" in case.params:
        overrides, preset = {"divergence_mask_bound": case.params["ipo_threshold"]}, "ipo"
    else:
        high, low = case.params["dppo_mask_high"], case.params["dppo_mask_low"]
        overrides, preset = (
            {
                "divergence_mask_bound": high,
                "divergence_mask_bound_negative": low,
            },
            "dppo_tv",
        )
    config = RolloutCorrectionConfig.preset(preset, **overrides)
    _, gradient, _ = step_of(
        case, step_for(config, old=False, rollout_pull_coef=case.params["kl_tau"])
    )
    # prime-rl scales the policy loss alone, by adv_tau; weights here end at e^20
    bounded = (case.input("logp") - case.input("sampler")).abs() < 20
    scale = case.params["adv_tau"]
    pull = torch.where(case.input("mask") > 0, case.input("logp") - case.input("sampler"), 0.0)
    pull = 2 * case.params["kl_tau"] * pull / case.input("mask").sum()
    torch.testing.assert_close(
        (scale * (gradient - pull) + pull)[bounded],
        case.output("grad")[bounded],
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    "case", cases("nemo_rl.clipped_pg", truncated_importance_sampling_type="seq-mask-tis")
)
def test_seq_mask_tis_equals_nemo_rl(case):
    low, high = (case.params[f"truncated_importance_sampling_ratio{end}"] for end in ("_min", ""))
    config = RolloutCorrectionConfig.preset("seq_mask_tis", rs_lower_bound=low, rs_upper_bound=high)
    step = step_for(config, calculate_per_token_loss=case.params.get("token_level_loss", True))
    value, gradient, accepted = step_of(case, step)
    mask = case.input("mask").bool()
    assert torch.equal(accepted[mask], case.output("kept").bool()[mask])
    assert value.item() == pytest.approx(case.outputs["loss"], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(gradient, case.output("grad"), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", cases("nemo_rl.sequence_error_mask"))
def test_sequence_error_equals_nemo_rl(case):
    config = RolloutCorrectionConfig(
        rollout_rs="seq_mean_error", rollout_rs_threshold=case.params["seq_logprob_error_threshold"]
    )
    mask = case.input("mask").bool()
    found = correct(config, case.input("old"), case.input("sampler"), mask)
    kept = case.output("kept_rows").bool()
    assert torch.equal(found.mask.any(1), kept & mask.any(1))
    error = found.sequence_sums.criteria["seq_mean_error"] / found.sequence_sums.valid.clamp_min(1)
    expected = case.output("row_error").double()
    finite = mask.any(1) & (expected < 1e6)
    torch.testing.assert_close(error[finite], expected[finite], rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", cases("vcpo.ess_step", use_clipped=False, scaling_rule="sqrt"))
def test_effective_share_of_sequences_equals_vcpo(case):
    mask = case.input("mask").bool()
    result = correct(RolloutCorrectionConfig(), case.input("old"), case.input("sampler"), mask)
    log_weights = ((case.input("old").double() - case.input("sampler")) * mask).sum(1)[mask.any(1)]
    exact = (2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp().item() / len(
        log_weights
    )
    share = result.statistics.metrics()["effective_sequence_share"]
    assert share == pytest.approx(exact, rel=1e-5)
    if (
        mask.any(1).all() and case.outputs["ess"] != "nan"
    ):  # VCPO counts fully masked rows; its float32 overflows
        assert min(1.0, share / case.params["base_ess_ratio"]) ** 0.5 == pytest.approx(
            case.outputs["lr_scale"], 1e-5
        )


@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl", "gspo", "cispo", "dro"])
def test_verls_loss_modes_equal_verl(mode):
    compared = 0
    for (case,) in (
        entry.values for entry in cases(f"verl.{mode}", without="rollout_is_threshold")
    ):
        if case.params["loss_agg_mode"] != "token-mean" or case.params.get("anchor") == "sampler":
            continue
        keys = {name: value for name, value in case.params.items() if name in ACTOR_NAMES}
        keys["policy_loss.dro_beta"] = case.params.get("policy_loss", {}).get("dro_beta")
        translated = translate_actor({LOSS_MODE: mode, **keys})
        options = {name: value for name, (value, _) in translated.items()}
        # these numbers are of verl 0.9.1; newer versions take sequence means in gspo whatever the
        # key says
        options["calculate_per_token_loss"] = True
        policy = {
            name: value
            for name, value in options.items()
            if name in PolicyConfig.__dataclass_fields__
        }
        correction = {name: options[name] for name in options.keys() - policy.keys()}
        step = step_for(RolloutCorrectionConfig(**correction), **policy)
        value, gradient, _ = step_of(case, step)
        exact = (
            ~case.inexact("kept") if "kept" in case.outputs else torch.ones_like(gradient).bool()
        )
        torch.testing.assert_close(
            gradient[exact], case.output("grad")[exact], rtol=1e-5, atol=1e-6
        )
        if exact.all():
            assert value.item() == pytest.approx(case.outputs["loss"], rel=1e-5, abs=1e-6)
        compared += 1
    assert compared >= 3


# loss and norm of the gradient of the authors' function, with bounds 0.025, 0.05, 0.05 and 0.1,
# 0.2, 0.4
CTPO = {
    "plain": ((0.5146511197, 0.0916988254), (0.5199998617, 0.1207662821)),
    "edges": ((-0.1390566528, 0.0924928933), (-0.1443535089, 0.0924928933)),
    "tiny": ((0.0454825573, 0.0579362623), (0.0694368109, 0.0961179659)),
    "varied": ((0.1114997193, 0.0840468779), (0.2202093005, 0.1181653664)),
    "long": ((0.0069978349, 0.0381661430), (0.1847242713, 0.0702307448)),
}


@pytest.mark.parametrize("batch", CTPO)
def test_ctpo_equals_its_authors(batch):
    for (low, high, dual), expected in zip(
        ((0.025, 0.05, 0.05), (0.1, 0.2, 0.4)), CTPO[batch], strict=True
    ):
        clips = {
            "eps_clip": -math.expm1(-low),
            "eps_clip_high": math.expm1(high),
            "eps_clip_c": math.exp(dual),
        }
        step = step_for(RolloutCorrectionConfig(policy_loss="experimental_ctpo"), **clips)
        value, gradient, _ = step_of(Case(params={}, outputs={}, batch=batch), step)
        assert (value.item(), gradient.norm().item()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batch", CTPO)
def test_cppo_equals_its_algorithm(batch):
    """Algorithm 1 of the paper, token by token in float64."""
    case, bound, budget = Case(params={}, outputs={}, batch=batch), 0.02, 0.01
    config = RolloutCorrectionConfig(policy_loss="experimental_cppo")
    step = step_for(config, eps_clip=bound, experimental_cppo_budget=budget)
    value, gradient, _ = step_of(case, step)
    log_prob, old, advantage, mask = (
        case.input(name).double() for name in ("logp", "old", "advantages", "mask")
    )
    expected, dropped, total = torch.zeros_like(gradient), 0, 0.0
    for row in range(len(mask)):
        tokens = mask[row].nonzero().flatten().tolist()
        prefix = weights = 0.0
        for t, column in enumerate(tokens, 1):
            place = row, column
            weight = 1 - 0.2 / max(len(tokens) - 1, 1) * (t - 1)
            divergence = weight * (log_prob[place].exp() - old[place].exp()).abs().item()
            log_ratio = (log_prob[place] - old[place]).item()
            ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
            limit = min(bound, bound + budget * weights - prefix)
            if advantage[place] * (ratio - 1) <= 0 or divergence <= limit:
                total -= ratio * advantage[place].item()
                expected[place] = -ratio * advantage[place] if abs(log_ratio) <= 20 else 0.0
            else:
                dropped += 1
            prefix, weights = prefix + divergence, weights + weight
    assert dropped
    torch.testing.assert_close(gradient, expected / mask.sum(), rtol=1e-5, atol=1e-7)
    assert value.item() == pytest.approx(total / mask.sum().item(), rel=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - COVARIANCE_LOSSES))
def test_every_loss_at_the_limits(name, monkeypatch):
    """Equal policies give the policy gradient, rows can be micro-batches, and a masked batch has no
    gradient."""
    plain = BATCHES["plain"]
    step = step_for(RolloutCorrectionConfig(policy_loss=name))

    def gradient(**changes):
        monkeypatch.setitem(BATCHES, "changed", plain | changes)
        case = Case(params={}, outputs={}, batch="changed")
        return step_of(case, step)[1] * case.input("mask").sum().clamp_min(1)

    masked_in = torch.tensor(plain["mask"])
    torch.testing.assert_close(
        gradient(logp=plain["old"]), -torch.tensor(plain["advantages"]) * masked_in
    )
    names = ("logp", "old", "sampler", "advantages", "mask")
    rows = [
        gradient(**{key: plain[key][row : row + 1] for key in names})
        for row in range(len(masked_in))
    ]
    torch.testing.assert_close(torch.cat(rows), gradient())
    assert not gradient(mask=(masked_in * 0).tolist()).any()


def test_prefix_sums_cross_context_parallel_ranks():
    """Two responses of 5 and 3 tokens after prompts of 2 and 1, each cut into four chunks for two
    ranks."""
    slices = [response_slices([7, 4], [5, 3], rank, 2) for rank in range(2)]
    values_N, mask_N = torch.arange(1.0, 9.0), torch.tensor([1, 1, 0, 1, 1, 1, 0, 1]).bool()
    expected_N = torch.tensor([1.0, 3, 3, 7, 12, 6, 6, 14])
    parts = [each.scatter(each.slice_flat(values_N * mask_N)).double() for each in slices]
    for rank, each in enumerate(slices):
        ranks = Ranks(context=lambda whole_N, _, other_N=parts[1 - rank]: whole_N + other_N)
        found_L = prefix_sums(
            each.slice_flat(values_N), mask_L=each.slice_flat(mask_N), slices=each, ranks=ranks
        )
        assert 0 < len(found_L) < 8
        assert found_L.tolist() == each.slice_flat(expected_N).tolist()


@pytest.mark.parametrize("case", cases("verl.kl_cov"))
def test_kl_cov_equals_verl(case):
    log_prob, old, advantage = policies(case)
    options = case.params["policy_loss"]
    config = PolicyConfig(cov_ratio=options["kl_cov_ratio"])
    limit = losses.covariance_limit(log_prob, advantage, case.input("mask"), config, "kl_cov")
    selected = limit.selects(log_prob.detach(), advantage) & (case.input("mask") > 0)
    if (log_prob.detach() - old)[case.input("mask") > 0].abs().max() > 20:  # verl has no bound here
        assert case.batch == "tiny"
        return
    if selected.sum() > max(1, int(options["kl_cov_ratio"] * case.input("mask").sum())):
        assert case.batch == "tiny"  # equal covariances, of which verl takes one
        return
    check(
        case,
        kl_cov(log_prob, old, advantage, selected, coef=options["ppo_kl_coef"]),
        log_prob,
        "token-mean",
    )


@pytest.mark.parametrize("case", cases("verl.clip_cov"))
def test_clip_cov_equals_verl_without_its_draw(case):
    """Where verl draws some of the candidates, as many are selected here."""
    log_prob, old, advantage = policies(case)
    options, mask = case.params["policy_loss"], case.input("mask")
    clips = {"clip_low": case.params["clip_ratio_low"], "clip_high": case.params["clip_ratio_high"]}
    bounds = {
        "clip_cov_lower_bound": options["clip_cov_lb"],
        "clip_cov_upper_bound": options["clip_cov_ub"],
    }
    config = PolicyConfig(cov_ratio=options["clip_cov_ratio"], **bounds)
    _, clipped = ppo_clip(log_prob.detach(), old, advantage, **clips)
    limit = losses.covariance_limit(log_prob, advantage, mask, config, "clip_cov")
    selected = limit.selects(log_prob.detach(), advantage) & (mask > 0) & (clipped == 0)
    dropped = (mask > 0) & ~case.output("kept").bool()
    if config.cov_ratio < 1:  # clipped tokens, which have no gradient, may be selected here
        assert 0 <= selected.sum() <= dropped.sum() + 1
        return
    assert torch.equal(selected, dropped)
    if (log_prob.detach() - old)[mask > 0].max() > 20:  # verl has no bound here
        assert case.batch == "tiny"
        return
    loss, _ = clip_cov(log_prob, old, advantage, selected, **clips)
    check(case, loss, log_prob, "token-mean")


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(400, generator=generator) > 0.2).float()
    return -torch.rand(400, generator=generator) * 5, torch.randn(400, generator=generator), mask


@pytest.mark.parametrize(
    ("name", "lower", "upper"), [("kl_cov", -math.inf, math.inf), ("clip_cov", 0.5, 2.0)]
)
def test_the_largest_covariances_are_selected_for_every_split_over_ranks(name, lower, upper):
    rule = PolicyConfig(cov_ratio=0.04, clip_cov_lower_bound=0.5, clip_cov_upper_bound=2.0), name
    log_probs, advantages, mask = batch()
    a, log_p = (x[mask > 0].double() for x in (advantages, log_probs))
    c = (a - a.mean()) * (log_p - log_p.mean())
    inside = c[(c > lower) & (c < upper)].sort(descending=True).values
    expected = inside[: int(0.04 * len(c))].tolist()
    limit = losses.covariance_limit(log_probs, advantages, mask, *rule)
    selected = limit.selects(log_probs, advantages) & (mask > 0)
    found = limit.candidates(log_probs, advantages)[selected].sort(descending=True).values
    assert found.tolist() == pytest.approx(expected) and len(expected) > 10
    parts = [torch.arange(start, 400, 3) for start in range(3)]

    def count_of(part, ranks):
        rank_limit = losses.covariance_limit(
            log_probs[part], advantages[part], mask[part], *rule, ranks
        )
        return (rank_limit.selects(log_probs[part], advantages[part]) & (mask[part] > 0)).sum()

    assert sum(over_ranks(parts, count_of)) == len(expected)


@pytest.mark.parametrize("mask", [0.0, 1.0], ids=["no token", "tokens without log-probs"])
def test_nothing_is_selected_without_usable_tokens(mask):
    log_probs = torch.full((5,), math.nan)
    limit = losses.covariance_limit(
        log_probs, torch.ones(5), torch.full((5,), mask), PolicyConfig(cov_ratio=0.5), "kl_cov"
    )
    assert not limit.selects(log_probs, torch.ones(5)).any()
