"""custom_tis.mis behind slime's contract trains as the built-in correction does, whatever the options."""

import itertools
import random
from argparse import Namespace
from typing import Any

import pytest
import torch

from custom_tis.mis import compute_mis_weights_with_cp
from slime_tis.correction import RolloutCorrectionConfig, correct
from slime_tis.errors import CustomFunctionError
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import CustomTis
from slime_tis.policy.policy_loss import LossStep
from slime_tis.policy.step_sums import step_metrics
from slime_tis.user_functions import load_custom_tis
from tests.policy.test_policy_loss import counts, evaluate, make

LEVELS = ("token", "sequence", "geometric", "prefix", "segment")
TIS: list[dict[str, Any]] = [{}] + [
    {"use_tis": True, "tis_level": level, "tis_mode": mode, **bounds, **normalized}
    for level, mode, bounds, normalized in itertools.product(
        LEVELS,
        ("truncate", "clip", "mask"),
        (
            {},
            {"tis_upper_bound": 1.2, "tis_upper_bound_negative": 1.1},
            {"tis_upper_bound": 1.5, "tis_lower_bound": 0.9},
        ),
        ({}, {"tis_batch_normalize": True}),
    )
]
RS = [
    {},
    {"use_rs": True, "rs_level": "geometric", "rs_z_score": 1.0},
    {"use_rs": True, "rs_level": "sequence", "rs_target_fraction": 0.4},
] + [
    {"use_rs": True, "rs_level": level, **bounds}
    for level, bounds in itertools.product(
        LEVELS,
        (
            {},
            {"rs_upper_bound": 1.1},
            {"rs_lower_bound": 0.95},
            {"rs_upper_bound": 1.3, "rs_lower_bound": 0.6},
        ),
    )
]
OTHERS = [
    {},
    {"rs_veto_threshold": 0.6},
    {"rs_veto_upper_threshold": 1.5},
    {"rs_second_moment_bound": 0.02},
    {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.6_1.8,0.05"},
    {"rollout_rs": "seq_mean_error", "rollout_rs_threshold": "1.25"},
    {"divergence_mask": "binary_tv", "divergence_mask_bound": 0.02},
    {
        "divergence_mask": "binary_kl_max",
        "divergence_mask_direction": "both",
        "divergence_mask_level": "sequence",
    },
    {"rejection_normalizer": "original"},
    {"nonfinite_policy": "neutral"},
    {"rs_veto_threshold": 0.6, "rs_second_moment_bound": 0.03},
]
BYPASS = {"use_rollout_logprobs": True, "policy_loss": "reinforce"}


def combinations():
    """Every choice of TIS, RS and others, each with some of the rest."""
    chance = random.Random(0)
    for number, tis in enumerate(TIS):
        options = (
            tis | RS[number % len(RS)] | OTHERS[number % len(OTHERS)] | chance.choice(({}, BYPASS))
        )
        if RolloutCorrectionConfig(**options).corrects:
            yield options


def sequences(*, missing=True):
    """Six responses with masked tokens and missing log-probs, one masked, and the current policy's log-probs."""
    chance = random.Random(1)
    lengths = [3, 7, 1, 12, 5, 4]
    rollout = [[-chance.random() * 2 for _ in range(n)] for n in lengths]
    current = [value + chance.gauss(0, 0.25) for row in rollout for value in row]
    if missing:
        rollout[1][2] = rollout[3][0] = float("nan")
    masks = [[int(chance.random() > 0.15) for _ in range(n)] for n in lengths]
    masks[2], masks[3][0] = [0], 0
    advantages = [
        [value] * n for n, value in zip(lengths, (1.0, -1.0, 0.5, -0.3, 2.0, -2.0), strict=True)
    ]
    return make(masks, rollout_log_probs=rollout, advantages=advantages), current


def trained(config, *, custom, per_token, missing=True):
    """Gradient and sums of a step of two micro-batches, what concerns the global batch found before them."""
    tokens, log_probs = sequences(missing=missing)
    train_L = torch.tensor(log_probs)
    known = tokens.rollout_log_probs_L, tokens.loss_mask_L
    found = correct(config, train_L, *known, lengths=tokens.lengths, advantages=tokens.advantages_L)
    options = {name: getattr(config, name) for name in config.__dataclass_fields__}
    step = LossStep(
        correction=config,
        policy=PolicyConfig(calculate_per_token_loss=per_token),
        uses_recomputed_old_policy=False,
        custom=(
            CustomTis(function=compute_mis_weights_with_cp, args=Namespace(**options), seed=0)
            if custom
            else None
        ),
        global_batch=found.global_batch,
    )
    leaf = torch.tensor(log_probs, requires_grad=True)
    cut = sum(tokens.lengths[:3])
    one = evaluate(step, tokens.select(range(3)), leaf[:cut], torch.zeros(cut))
    two = evaluate(step, tokens.select(range(3, 6)), leaf[cut:], torch.zeros(len(log_probs) - cut))
    ((one[0] + two[0]) / (one[1] + two[1]).clamp_min(1)).backward()
    return leaf.grad, one[2].merge(two[2])


def test_the_same_options_give_the_same_gradient_and_the_same_kept_share():
    tried = 0
    for options in combinations():
        config = RolloutCorrectionConfig(**options)
        per_token = tried % 2 == 0
        expected, of_built_in = trained(config, custom=False, per_token=per_token)
        gradient, sums = trained(config, custom=True, per_token=per_token)
        assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7), options
        assert counts(sums) == counts(of_built_in), options
        torch.testing.assert_close(
            sums.terms.pg_loss, of_built_in.terms.pg_loss, rtol=1e-5, atol=1e-6
        )
        tried += 1
    assert tried >= 90


METRICS = {
    "mis_mean_is_weight_before_clip": "mis_tis_weight_before_bound",
    "mis_ratio_mean_after_mis": "mis_tis_weight_after_bound",
    "mis_truncate_fraction": "mis_tis_truncate_fraction",
    "mis_catastrophic_token_fraction": "mis_rs_catastrophic_token_fraction",
    "mis_second_moment_masked_fraction": "mis_second_moment_masked_fraction",
    "mis_batch_norm_factor": "mis_batch_norm_factor",
    "mismatch_kl": "mis_kl",
    "mismatch_k3_kl": "mis_k3_kl",
}
"""The built-in's metric → that of custom_tis.mis, as docs/metrics.md lists them; the same over
tokens."""


def test_the_metrics_of_both_are_the_same_under_their_two_names():
    config = RolloutCorrectionConfig(
        use_tis=True,
        tis_upper_bound=1.2,
        tis_batch_normalize=True,
        rs_veto_threshold=0.8,
        rs_second_moment_bound=0.02,
    )
    policy = PolicyConfig(calculate_per_token_loss=True)
    built_in, mis = (
        step_metrics(
            trained(config, custom=custom, per_token=True, missing=False)[1], config, policy
        )
        for custom in (False, True)
    )
    assert (
        0 < built_in["mis_second_moment_masked_fraction"] < 1
        and 0 < built_in["mis_catastrophic_token_fraction"] < 1
    )
    for ours, slimes in METRICS.items():
        assert mis[slimes] == pytest.approx(built_in[ours], rel=1e-5, abs=1e-7), ours


def test_what_a_function_does_not_follow_is_refused_before_the_run():
    defaults = {
        name: field.default for name, field in RolloutCorrectionConfig.__dataclass_fields__.items()
    }

    def loaded(path, **options):
        return load_custom_tis(
            path, Namespace(**{**defaults, "rs_lower_bound": 0.5, "rs_upper_bound": 2.0, **options})
        )

    for path in ("custom_tis.tis.vanilla_tis", "custom_tis.icepop.icepop"):
        assert loaded(path, use_tis=True, tis_upper_bound=1.5, nonfinite_policy="neutral")
        for options, flag in (
            ({"use_rs": True}, "--use-rs is on"),
            ({"tis_level": "sequence"}, "--tis-level is sequence"),
            ({"tis_mode": "mask"}, "--tis-mode is mask"),
            ({"rs_veto_threshold": 1e-4}, "--rs-veto-threshold is 0.0001"),
            ({"rollout_rs": "token_k1"}, "--rollout-rs is token_k1"),
        ):
            with pytest.raises(
                CustomFunctionError, match=f"{flag}, and {path.split('.')[-1]} does not follow it"
            ):
                loaded(path, use_tis=True, **options)
    for path in ("custom_tis.tis.vanilla_tis", "custom_tis.template.soft_tis"):
        with pytest.raises(
            CustomFunctionError,
            match=r"--rs-second-moment-bound is 0.1 .* no argument second_moment_",
        ):
            loaded(path, rs_second_moment_bound=0.1)
    assert loaded(
        "custom_tis.mis.compute_mis_weights_with_cp", use_rs=True, rs_second_moment_bound=0.1
    )


def test_a_bound_on_the_global_batch_is_refused_where_the_trainer_does_not_know_it():
    tokens, log_probs = sequences()
    train = list(torch.tensor(log_probs).split(tokens.lengths))
    with pytest.raises(
        ValueError,
        match=r"rs_second_moment_bound is 0.1, which needs statistics of the global batch, but",
    ):
        compute_mis_weights_with_cp(
            Namespace(rs_second_moment_bound=0.1),
            pg_loss=torch.ones(len(log_probs)),
            train_log_probs=train,
            rollout_log_probs=list(tokens.rollout_log_probs_L.split(tokens.lengths)),
            loss_masks=list(tokens.loss_mask_L.split(tokens.lengths)),
            total_lengths=list(tokens.total_lengths),
            response_lengths=list(tokens.response_lengths),
        )
