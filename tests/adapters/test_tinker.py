"""Corrected losses inside tinker's client: what its server would get, without a server or a key."""

import math
from types import SimpleNamespace

import pytest
import torch
from tinker import types
from tinker.lib.public_interfaces import custom_loss
from tinker.lib.public_interfaces.training_client import TrainingClient

from examples.tinker import recipe
from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.errors import HealthAlarm
from slime_tis.integrations.tinker import corrected_loss, policy_gradient, traced_loss
from slime_tis.policy.losses import ppo_clip

LENGTHS = (5, 9, 3)
CONFIGS = {
    "tis": RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.2),
    "geometric": RolloutCorrectionConfig(
        use_tis=True, use_rs=True, rs_level="geometric", rs_lower_bound=0.9, rs_upper_bound=1.1
    ),
    "dppo": RolloutCorrectionConfig(divergence_mask="binary_tv", divergence_mask_bound=0.1),
    "all rejected": RolloutCorrectionConfig(
        use_rs=True, rs_level="token", rs_lower_bound=90.0, rs_upper_bound=99.0
    ),
}


def numbers(values):
    kind = "int64" if values.dtype == torch.int64 else "float32"
    return types.TensorData(data=values.tolist(), dtype=kind, shape=list(values.shape))


def batch(last=None):
    """Data as a tinker user has them, and the log-probs that the server's forward pass returns.

    `last` replaces the sampler's log-prob of each last token.
    """
    generator = torch.Generator().manual_seed(0)
    data, log_probs = [], []
    for length in LENGTHS:
        sampled = -2 * torch.rand(length, generator=generator)
        log_probs.append((sampled + 0.3 * torch.randn(length, generator=generator)).clamp(max=0.0))
        if last is not None:
            sampled[-1] = last
        mask = torch.ones(length)
        mask[0] = 0.0  # a token of the prompt
        inputs = {
            "target_tokens": torch.arange(length),
            "logprobs": sampled,
            "sampling_logprobs": sampled,
            "advantages": torch.randn(1, generator=generator).expand(length) * mask,
            "mask": mask,
        }
        inputs = {name: numbers(value) for name, value in inputs.items()}
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(list(range(length))), loss_fn_inputs=inputs
            )
        )
    return data, log_probs


def sent(data, log_probs, loss):
    """The weights of all tokens that the client sends for the backward pass, −dL/dlog π, and the
    metrics."""
    forward = SimpleNamespace(loss_fn_outputs=[{"logprobs": numbers(x)} for x in log_probs])
    result = TrainingClient._compute_custom_loss(data, loss, forward)
    return (
        torch.cat([datum.loss_fn_inputs["weights"].to_torch() for datum in result.data]),
        result.metrics,
    )


def columns(data, name):
    return [datum.loss_fn_inputs[name].to_torch() for datum in data]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weights_sent_are_advantage_times_weight(name):
    data, log_probs = batch()
    config, advantages = CONFIGS[name], columns(data, "advantages")
    found = correct(
        config, log_probs, columns(data, "logprobs"), columns(data, "mask"), advantages=advantages
    )
    expected = torch.cat(
        [a * w * m for a, w, m in zip(advantages, found.weights, found.mask, strict=True)]
    )
    assert expected.any() or name == "all rejected"
    weights, metrics = sent(data, log_probs, corrected_loss(config, log_all_metrics=True))
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)
    for metric, value in found.statistics.metrics().items():
        assert metrics[f"custom/{metric.lower()}:mean"] == pytest.approx(value, rel=1e-12)
    loss, ranks = traced_loss(config)
    handle = custom_loss.trace_loss(loss, ranks, "session")
    assert custom_loss.encode_graph(handle).nodes
    custom_loss.check_loss_inputs(handle, data)
    weights, metrics = sent(data, log_probs, handle)
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-8)
    assert metrics["custom/accepted_tokens:sum"] == float(sum(mask.sum() for mask in found.mask))


def test_ppo_compares_with_the_sampler():
    data, log_probs = batch()
    loss = corrected_loss(
        RolloutCorrectionConfig(use_rollout_logprobs=True), lambda *x: ppo_clip(*x)[0]
    )
    weights, _ = sent(data, log_probs, loss)
    rows = zip(log_probs, columns(data, "logprobs"), columns(data, "advantages"), strict=True)
    expected = []
    for log_prob, sampled, advantage in rows:
        ratio = (log_prob - sampled).exp()
        clipped = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
        expected.append(torch.where(clipped, 0.0, advantage * ratio))
    torch.testing.assert_close(weights, torch.cat(expected))


def test_metrics_alone_leave_the_loss_as_it_is():
    data, log_probs = batch()
    plain, _ = sent(
        data,
        log_probs,
        lambda data, values: (
            sum(
                policy_gradient(x, x, a).sum()
                for x, a in zip(values, columns(data, "advantages"), strict=True)
            ),
            {},
        ),
    )
    measured, metrics = sent(
        data, log_probs, corrected_loss(RolloutCorrectionConfig(get_mismatch_metrics=True))
    )
    assert torch.equal(measured, plain) and metrics["custom/mismatch_k3_kl:mean"] > 0


def test_log_probs_that_are_not_finite_are_counted_and_not_trained():
    data, log_probs = batch(last=math.nan)
    last = [sum(LENGTHS[: i + 1]) - 1 for i in range(len(LENGTHS))]
    for loss in (
        corrected_loss(CONFIGS["tis"]),
        corrected_loss(CONFIGS["tis"], lambda *x: ppo_clip(*x)[0]),
    ):
        weights, metrics = sent(data, log_probs, loss)
        assert not weights[last].any() and weights.isfinite().all() and weights.any()
        assert metrics["custom/nonfinite_token_fraction:mean"] == pytest.approx(
            3 / (sum(LENGTHS) - 3)
        )


TOKEN_LOSSES = {"policy gradient": policy_gradient, "ppo": lambda *x: ppo_clip(*x)[0]}


@pytest.mark.parametrize("policy", ["reject", "neutral"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("of", ["current policy", "sampler", "both"])
@pytest.mark.parametrize("token_loss", TOKEN_LOSSES)
@pytest.mark.parametrize("traced", [False, True], ids=["custom", "traced"])
def test_loss_and_gradient_are_finite_for_any_log_prob(traced, token_loss, of, value, policy):
    data, log_probs = batch(last=None if of == "current policy" else value)
    if of != "sampler":
        log_probs[1][-1] = value
    leaves = [values.clone().requires_grad_() for values in log_probs]
    config = RolloutCorrectionConfig(use_tis=True, nonfinite_policy=policy)
    if traced:
        loss, _ = traced_loss(config, TOKEN_LOSSES[token_loss])
        rows = zip(
            leaves,
            *(columns(data, name) for name in ("sampling_logprobs", "advantages", "mask")),
            strict=True,
        )
        total = torch.stack([loss(*row)[0] for row in rows]).sum()
    else:
        total, _ = corrected_loss(config, TOKEN_LOSSES[token_loss])(data, leaves)
    gradients = torch.autograd.grad(total, leaves)
    assert total.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_neutral_policy_trains_a_token_without_sampler_log_prob():
    """As behavior cloning weighted by the advantage: weight 1, gradient −A."""
    data, log_probs = batch(last=math.nan)
    config = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="neutral")
    weights, _ = sent(data, log_probs, corrected_loss(config))
    assert weights[LENGTHS[0] - 1] == columns(data, "advantages")[0][-1]


def test_the_raise_policy_names_the_token():
    data, log_probs = batch(last=math.nan)
    config = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="raise")
    with pytest.raises(ValueError, match="sequence 0, position 4: train log-prob"):
        corrected_loss(config)(data, log_probs)


def shifted_batch():
    """Data whose log-probs belong to the next token."""
    data, _ = batch()
    log_probs = columns(data, "logprobs")
    for datum, values in zip(data, log_probs, strict=True):
        datum.loss_fn_inputs["logprobs"] = numbers(values.roll(-1))
    return data, log_probs


def test_an_alarm_is_a_metric():
    data, log_probs = shifted_batch()
    _, metrics = sent(data, log_probs, corrected_loss(CONFIGS["tis"]))
    assert metrics["custom/health/shifted_tokens:mean"] == 1.0


def test_an_alarm_stops_the_loop_if_asked():
    data, log_probs = shifted_batch()
    loss = corrected_loss(CONFIGS["tis"], on_alarm="stop")
    with pytest.raises(HealthAlarm, match="custom/shifted_sample_fraction:mean is 1"):
        sent(data, log_probs, loss)


@pytest.mark.parametrize("age", [None, 0, 2], ids=["unknown", "current", "two steps"])
def test_only_current_weights_can_lack_updates(age):
    data, log_probs = batch()
    if age is not None:
        for datum in data:
            datum.loss_fn_inputs["weight_age"] = numbers(torch.tensor([age]))
    loss = corrected_loss(RolloutCorrectionConfig(use_tis=True))
    sent(data, columns(data, "logprobs"), loss)
    logs = [sent(data, log_probs, loss)[1] for _ in range(3)]
    alarms = {name for log in logs for name in log if "health/weights" in name}
    assert alarms == ({"custom/health/weights_not_updated:mean"} if age == 0 else set())


@pytest.mark.parametrize("ages", [[], [0, 2]], ids=["empty", "two"])
def test_a_datum_has_one_age(ages):
    data, log_probs = batch()
    data[0].loss_fn_inputs["weight_age"] = numbers(torch.tensor(ages, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"weight_age .* has {len(ages)} entries; give one"):
        sent(data, log_probs, corrected_loss(CONFIGS["tis"]))


def test_by_default_few_metrics_are_returned():
    _, metrics = sent(*batch(), corrected_loss(CONFIGS["tis"]))
    assert len(metrics) == 10


def test_no_data_have_a_loss_of_0():
    total, metrics = corrected_loss(CONFIGS["tis"])([], [])
    total.backward()
    assert total.item() == 0.0
    assert metrics == {}


def test_a_datum_without_log_probs_is_refused():
    data, log_probs = batch()
    del data[2].loss_fn_inputs["logprobs"]
    with pytest.raises(ValueError, match="lacks loss_fn_inputs logprobs"):
        sent(data, log_probs, corrected_loss(CONFIGS["tis"]))


def test_the_recipe_runs(capsys):
    recipe.main(steps=15)
    first, *_, last = [
        float(line.split("reward ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()
    ]
    assert last > first + 0.1
