"""custom_tis.mis behind slime's contract trains as the built-in correction, with any options."""

import itertools
import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch

from custom_tis.mis import compute_mis_weights_with_cp
from slime_tis.correction import RolloutCorrectionConfig, correct
from slime_tis.errors import CustomFunctionError
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import CustomTis
from slime_tis.policy.loss_inputs import LossStep
from slime_tis.policy.response_tokens import ResponseTokens
from slime_tis.policy.step_sums import StepSums, step_metrics
from slime_tis.user_functions import load_custom_tis
from tests.policy.test_policy_loss import counts, evaluate, make

LEVELS = ("token", "sequence", "geometric", "prefix", "segment")
Options = dict[str, Any]
WEIGHT_BOUNDS: list[Options] = [
    {},
    {"tis_upper_bound": 1.2, "tis_upper_bound_negative": 1.1},
    {"tis_upper_bound": 1.5, "tis_lower_bound": 0.9},
]
TIS: list[Options] = [{}]
for level, mode, bounds, normalize in itertools.product(
    LEVELS, ("truncate", "clip", "mask"), WEIGHT_BOUNDS, (False, True)
):
    weight_options = {"use_tis": True, "tis_level": level, "tis_mode": mode, **bounds}
    if normalize:
        weight_options["tis_batch_normalize"] = True
    TIS.append(weight_options)

REJECTION_BOUNDS: list[Options] = [
    {},
    {"rs_upper_bound": 1.1},
    {"rs_lower_bound": 0.95},
    {"rs_upper_bound": 1.3, "rs_lower_bound": 0.6},
]
RS: list[Options] = [
    {},
    {"use_rs": True, "rs_level": "geometric", "rs_z_score": 1.0},
    {"use_rs": True, "rs_level": "sequence", "rs_target_fraction": 0.4},
]
for level, bounds in itertools.product(LEVELS, REJECTION_BOUNDS):
    RS.append({"use_rs": True, "rs_level": level, **bounds})

OTHERS: list[Options] = [
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
BYPASS: Options = {"use_rollout_logprobs": True, "policy_loss": "reinforce"}


def combinations() -> list[Options]:
    """Every choice of TIS, RS and others, each with some of the rest."""
    chance = random.Random(0)
    chosen = []
    for number, tis in enumerate(TIS):
        bypass = chance.choice(({}, BYPASS))
        options = tis | RS[number % len(RS)] | OTHERS[number % len(OTHERS)] | bypass
        if RolloutCorrectionConfig(**options).corrects:
            chosen.append(options)
    return chosen


def make_sequences(*, missing: bool = True) -> tuple[ResponseTokens, list[float]]:
    """Six responses, one of them masked, and the current policy's log-probs.

    Some tokens are masked; with `missing`, two rollout log-probs are NaN.
    """
    chance = random.Random(1)
    lengths = [3, 7, 1, 12, 5, 4]
    rollout = [[-chance.random() * 2 for _ in range(n)] for n in lengths]
    current = [value + chance.gauss(0, 0.25) for value in chain.from_iterable(rollout)]
    if missing:
        rollout[1][2] = float("nan")
        rollout[3][0] = float("nan")
    masks = [[int(chance.random() > 0.15) for _ in range(n)] for n in lengths]
    masks[2] = [0]
    masks[3][0] = 0
    advantages = []
    for length, value in zip(lengths, (1.0, -1.0, 0.5, -0.3, 2.0, -2.0), strict=True):
        advantages.append([value] * length)
    return make(masks, rollout_log_probs=rollout, advantages=advantages), current


def train(
    config: RolloutCorrectionConfig, *, custom: bool, per_token: bool, missing: bool = True
) -> tuple[torch.Tensor, StepSums]:
    """Gradient and sums of a step with two micro-batches.

    Statistics of the global batch are computed before the step.
    """
    tokens, log_probs = make_sequences(missing=missing)
    correction = correct(
        config,
        torch.tensor(log_probs),
        tokens.rollout_log_probs_L,
        tokens.loss_mask_L,
        lengths=tokens.lengths,
        advantages=tokens.advantages_L,
    )
    custom_tis = None
    if custom:
        args = Namespace(**vars(config))
        custom_tis = CustomTis(function=compute_mis_weights_with_cp, args=args, seed=0)
    step = LossStep(
        correction=config,
        policy=PolicyConfig(calculate_per_token_loss=per_token),
        uses_recomputed_old_policy=False,
        custom=custom_tis,
        global_batch=correction.global_batch,
    )
    leaf = torch.tensor(log_probs, requires_grad=True)
    cut = sum(tokens.lengths[:3])
    first = evaluate(step, tokens.select(range(3)), leaf[:cut], torch.zeros(cut))
    rest = torch.zeros(len(log_probs) - cut)
    second = evaluate(step, tokens.select(range(3, 6)), leaf[cut:], rest)
    loss = (first[0] + second[0]) / (first[1] + second[1]).clamp_min(1)
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad, first[2].merge(second[2])


COMBINATIONS = combinations()


@dataclass
class Pair:
    """One step with the built-in correction, and one with custom_tis.mis."""

    gradient: torch.Tensor
    sums: StepSums
    custom_gradient: torch.Tensor
    custom_sums: StepSums


@pytest.fixture(scope="module", params=range(len(COMBINATIONS)))
def pair(request: pytest.FixtureRequest) -> Pair:
    config = RolloutCorrectionConfig(**COMBINATIONS[request.param])
    per_token = request.param % 2 == 0
    gradient, sums = train(config, custom=False, per_token=per_token)
    custom_gradient, custom_sums = train(config, custom=True, per_token=per_token)
    return Pair(gradient, sums, custom_gradient, custom_sums)


def test_custom_gradient_equals_the_built_in(pair: Pair) -> None:
    assert torch.allclose(pair.custom_gradient, pair.gradient, rtol=1e-5, atol=1e-7)


def test_custom_counts_equal_the_built_in(pair: Pair) -> None:
    assert counts(pair.custom_sums) == counts(pair.sums)


def test_custom_policy_loss_equals_the_built_in(pair: Pair) -> None:
    torch.testing.assert_close(
        pair.custom_sums.terms.pg_loss, pair.sums.terms.pg_loss, rtol=1e-5, atol=1e-6
    )


def test_there_are_enough_combinations() -> None:
    assert len(COMBINATIONS) >= 90


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


@pytest.fixture(scope="module")
def metrics_of_both() -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of the built-in correction, and of custom_tis.mis."""
    config = RolloutCorrectionConfig(
        use_tis=True,
        tis_upper_bound=1.2,
        tis_batch_normalize=True,
        rs_veto_threshold=0.8,
        rs_second_moment_bound=0.02,
    )
    policy = PolicyConfig(calculate_per_token_loss=True)
    _, sums = train(config, custom=False, per_token=True, missing=False)
    _, custom_sums = train(config, custom=True, per_token=True, missing=False)
    return step_metrics(sums, config, policy), step_metrics(custom_sums, config, policy)


@pytest.mark.parametrize("name", METRICS)
def test_custom_metric_equals_the_built_in(
    metrics_of_both: tuple[dict[str, float], dict[str, float]], name: str
) -> None:
    built_in, custom = metrics_of_both
    assert custom[METRICS[name]] == pytest.approx(built_in[name], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    "name", ["mis_second_moment_masked_fraction", "mis_catastrophic_token_fraction"]
)
def test_rejections_occur(
    metrics_of_both: tuple[dict[str, float], dict[str, float]], name: str
) -> None:
    built_in, _ = metrics_of_both
    assert 0 < built_in[name] < 1


def load(path: str, **options: Any) -> Callable[..., Any]:
    """A custom function, loaded with the options of a run."""
    args = {
        name: field.default for name, field in RolloutCorrectionConfig.__dataclass_fields__.items()
    }
    # train.py always passes bounds, also without --use-rs.
    args |= {"rs_lower_bound": 0.5, "rs_upper_bound": 2.0}
    return load_custom_tis(path, Namespace(**(args | options)))


TOKEN_FUNCTIONS = ["custom_tis.tis.vanilla_tis", "custom_tis.icepop.icepop"]
UNREAD_OPTIONS: dict[str, tuple[Options, str]] = {
    "rejection": ({"use_rs": True}, "--use-rs is on"),
    "level": ({"tis_level": "sequence"}, "--tis-level is sequence"),
    "mode": ({"tis_mode": "mask"}, "--tis-mode is mask"),
    "veto": ({"rs_veto_threshold": 1e-4}, "--rs-veto-threshold is 0.0001"),
    "criteria": ({"rollout_rs": "token_k1"}, "--rollout-rs is token_k1"),
}


@pytest.mark.parametrize("path", TOKEN_FUNCTIONS)
def test_options_that_a_function_follows_load(path: str) -> None:
    assert callable(load(path, use_tis=True, tis_upper_bound=1.5, nonfinite_policy="neutral"))


@pytest.mark.parametrize("path", TOKEN_FUNCTIONS)
@pytest.mark.parametrize(("options", "flag"), UNREAD_OPTIONS.values(), ids=UNREAD_OPTIONS)
def test_options_that_a_function_ignores_are_refused(
    options: Options, flag: str, path: str
) -> None:
    function = path.split(".")[-1]
    with pytest.raises(CustomFunctionError, match=f"{flag}, and {function} does not follow it"):
        load(path, use_tis=True, **options)


@pytest.mark.parametrize("path", ["custom_tis.tis.vanilla_tis", "custom_tis.template.soft_tis"])
def test_global_batch_options_need_an_argument(path: str) -> None:
    message = r"--rs-second-moment-bound is 0.1, .* no argument second_moment_"
    with pytest.raises(CustomFunctionError, match=message):
        load(path, rs_second_moment_bound=0.1)


def test_mis_follows_global_batch_options() -> None:
    path = "custom_tis.mis.compute_mis_weights_with_cp"
    assert callable(load(path, use_rs=True, rs_second_moment_bound=0.1))


def test_global_batch_statistics_must_be_passed() -> None:
    tokens, log_probs = make_sequences()
    message = r"rs_second_moment_bound is 0.1, which needs statistics of the global batch, but"
    with pytest.raises(ValueError, match=message):
        compute_mis_weights_with_cp(
            Namespace(rs_second_moment_bound=0.1),
            pg_loss=torch.ones(len(log_probs)),
            train_log_probs=torch.tensor(log_probs).split(tokens.lengths),
            rollout_log_probs=tokens.rollout_log_probs_L.split(tokens.lengths),
            loss_masks=tokens.loss_mask_L.split(tokens.lengths),
            total_lengths=tokens.total_lengths,
            response_lengths=tokens.response_lengths,
        )
