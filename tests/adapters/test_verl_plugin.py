"""The plugin inside verl's own code: its registry, its correction helper, and the loss that its
workers call."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig as VerlConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils.tracking import Tracking
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.errors import HealthAlarm
from slime_tis.integrations import verl, verl_plugin
from slime_tis.policy.losses import ppo_clip

BATCH, LENGTH, PROMPT = 6, 10, 3


def columns():
    generator = torch.Generator().manual_seed(0)
    sampled = -2 * torch.rand(BATCH, LENGTH, generator=generator)
    old = (sampled + 0.2 * torch.randn(BATCH, LENGTH, generator=generator)).clamp(max=0.0)
    lengths = torch.tensor([10, 7, 1, 4, 10, 8])
    return {
        "rollout_log_probs": sampled,
        "old_log_probs": old,
        "log_probs": (old + 0.2 * torch.randn(BATCH, LENGTH, generator=generator)).clamp(max=0.0),
        "advantages": torch.randn(BATCH, 1, generator=generator).expand(BATCH, LENGTH).contiguous(),
        "response_mask": (torch.arange(LENGTH) < lengths[:, None]).long(),
    }


def worker_loss(loss_mode, x, whole=None):
    """verl's `ppo_loss` on a micro-batch, the gradient of the log-probs [B, T], and its metrics.

    `whole` is the mask of all response tokens, where the batch's own lacks rejected tokens.
    """
    policy_loss = PolicyLossConfig(loss_mode=loss_mode)
    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=BATCH, policy_loss=policy_loss
    )
    mask = x["response_mask"] if whole is None else whole
    attention = torch.cat([torch.ones(BATCH, PROMPT, dtype=torch.long), mask], 1)
    log_probs = x["log_probs"].clone().requires_grad_()
    # the model's output: for each token of a row without padding, the log-prob of the next one
    rows = [
        torch.cat([torch.zeros(PROMPT - 1), log_probs[i, : int(mask[i].sum())], torch.zeros(1)])
        for i in range(BATCH)
    ]
    tensors = {
        name: x[name]
        for name in ("old_log_probs", "advantages", "response_mask", "rollout_is_weights")
        if name in x
    }
    tensors |= {
        "prompts": torch.zeros(BATCH, PROMPT),
        "responses": torch.zeros(BATCH, LENGTH),
        "attention_mask": attention,
    }
    data = TensorDict(tensors, batch_size=[BATCH])
    for name, value in {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}.items():
        data[name] = NonTensorData(value)
    loss, metrics = ppo_loss(config, {"log_probs": torch.cat(rows)}, data)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss, gradient, metrics


def test_verls_helper_is_replaced():
    x = columns()
    batch = DataProto.from_dict(
        {name: value.clone() for name, value in x.items() if name != "log_probs"}
    )
    options = VerlConfig(
        rollout_is="token",
        rollout_is_threshold=1.1,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.97_1.03",
    )
    batch, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(batch, options)
    assert (
        rollout_corr_helper.compute_rollout_correction_and_rejection_mask
        is verl.compute_rollout_correction_and_rejection_mask
    )
    config = RolloutCorrectionConfig(
        use_tis=True,
        tis_upper_bound=1.1,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.97_1.03",
    )
    found = correct(config, x["old_log_probs"], x["rollout_log_probs"], x["response_mask"])
    assert torch.equal(batch.batch["response_mask"].bool(), found.mask) and not torch.equal(
        found.mask, x["response_mask"].bool()
    )
    torch.testing.assert_close(batch.batch["rollout_is_weights"], found.weights)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(
        found.statistics.metrics()["mismatch_k3_kl"]
    )


def override(option):
    """Hydra's override of an option of the block slime_tis, of HEALTH, or of verl (+)."""
    block = "algorithm.rollout_correction"
    if option.startswith("+"):
        return f"+{block}.{option[1:]}"
    if option.startswith("HEALTH."):
        return f"+{block}.slime_tis_health.{option.removeprefix('HEALTH.')}"
    return f"+{block}.slime_tis.{option}"


def on_driver(x, *options):
    """The batch that verl's driver corrects with options from verl's command line."""
    with initialize_config_dir(
        str(Path(core_algos.__file__).parents[1] / "config"), version_base=None
    ):
        config = compose(
            "ppo_trainer",
            [override(option) for option in options],
        )
    batch = DataProto.from_dict(
        {name: value.clone() for name, value in x.items() if name != "log_probs"}
    )
    batch, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(
        batch, config.algorithm.rollout_correction
    )
    return dict(batch.batch.items()), metrics


@pytest.mark.parametrize("normalizer", ["original", "kept"])
def test_options_that_verl_lacks(normalizer):
    x = columns()
    options = {"use_tis": True, "tis_level": "prefix", "tis_batch_normalize": True, "use_rs": True}
    options |= {"rs_level": "geometric", "rs_z_score": 1.0, "rejection_normalizer": normalizer}
    overrides = [f"{name}={value}" for name, value in options.items()]
    batch, metrics = on_driver(x, *overrides, "HEALTH.log_all_metrics=true")
    found = correct(
        RolloutCorrectionConfig(**options),
        x["old_log_probs"],
        x["rollout_log_probs"],
        x["response_mask"],
    )
    assert 0 < found.mask.sum() < x["response_mask"].sum()
    assert metrics == {
        f"rollout_corr/{name}": value for name, value in found.statistics.metrics().items()
    }
    log_probs = x["log_probs"].clone().requires_grad_()
    expected = found.mean(
        ppo_clip(log_probs, x["old_log_probs"], x["advantages"], dual_clip=3.0)[0]
    )
    # the lengths of the worker's model output do not depend on rejection
    loss, gradient, _ = worker_loss(
        "vanilla", batch | {"log_probs": x["log_probs"]}, x["response_mask"]
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, log_probs)[0], rtol=1e-6, atol=1e-8
    )


@pytest.fixture(autouse=True)
def driver_health(monkeypatch):
    """verl's driver of one run."""
    health = verl_plugin.DriverHealth()
    monkeypatch.setattr(verl_plugin, "DRIVER_HEALTH", health)
    return health


class KeepingLogger:
    """A backend of verl's `Tracking`."""

    def __init__(self):
        self.rows = []

    def log(self, data, step):
        self.rows.append(data)


def logged_rows(batches, *options):
    """What verl's `Tracking` logs for some steps of a driver."""
    tracking = Tracking.__new__(Tracking)
    tracking.logger = {"test": KeepingLogger()}
    for step, x in enumerate(batches):
        _, metrics = on_driver(x, *options)
        tracking.log(data={**metrics, "actor/grad_norm": 1.0}, step=step)
    tracking._finished = True
    return tracking.logger["test"].rows


def shifted_columns():
    x = columns()
    x["old_log_probs"] -= 0.05  # some are exactly 0, which would count as placeholders
    x["rollout_log_probs"] = x["old_log_probs"].roll(-1, 1)
    return x


def test_an_alarm_is_in_the_log_of_verl():
    (row,) = logged_rows([shifted_columns()], "use_tis=true")
    assert row["health/shifted_tokens"] == 1.0
    assert row["rollout_corr/mismatch_k3_kl"] > 0


@pytest.mark.parametrize("option", ["use_tis=true", "+rollout_is=token"], ids=["ours", "verl's"])
def test_all_metrics_of_verl_have_the_signs(option):
    (row,) = logged_rows([shifted_columns()], option, "HEALTH.log_all_metrics=true")
    assert row["rollout_corr/shifted_sample_fraction"] > 0.5


def test_an_alarm_reads_options_of_verl():
    (row,) = logged_rows([shifted_columns()], "+rollout_is=token")
    assert row["health/shifted_tokens"] == 1.0


def test_an_alarm_stops_the_driver_if_asked():
    options = ("use_tis=true", "HEALTH.on_alarm=stop")
    with pytest.raises(HealthAlarm, match="rollout_corr/shifted_sample_fraction is"):
        logged_rows([shifted_columns()], *options)


def test_updates_that_stop_raise_an_alarm():
    same = columns()
    same["rollout_log_probs"] = same["old_log_probs"].clone()
    rows = logged_rows([same, columns(), columns()], "use_tis=true")
    marks = [row.get("health/weights_not_updated") for row in rows]
    assert marks == [None, None, 1.0]


def test_a_gradient_of_verl_that_is_nan_raises_an_alarm(driver_health):
    driver_health.configure({}, RolloutCorrectionConfig())
    row = driver_health.checked({"actor/grad_norm": math.nan}, 1)
    assert row["health/nonfinite_gradient"] == 1.0


def test_bypass_mode_checks_the_metrics_of_the_workers(driver_health):
    x = columns()
    batch = DataProto.from_dict({"rollout_log_probs": x["rollout_log_probs"]})
    verl_plugin.apply_bypass_mode(batch, {})
    for step in range(2):
        row = driver_health.checked({"actor/rollout_corr/k3_kl": 0.4}, step)
    assert row["health/mismatch"] == 1.0


def test_a_log_without_a_run_of_the_plugin_is_unchanged(driver_health):
    data = {"train/loss": 0.5}
    assert driver_health.checked(data, 3) is data


def test_an_unknown_health_option_is_refused():
    with pytest.raises(ValueError, match="slime_tis_health has no option on_alarms"):
        on_driver(columns(), "use_tis=true", "HEALTH.on_alarms=stop")


def test_metrics_alone_leave_the_loss_as_it_is():
    x = columns()
    batch, metrics = on_driver(x, "get_mismatch_metrics=true")
    measured, plain = (
        worker_loss("vanilla", each)[:2] for each in (batch | {"log_probs": x["log_probs"]}, x)
    )
    assert torch.equal(measured[0], plain[0]) and torch.equal(measured[1], plain[1])
    assert metrics["rollout_corr/mismatch_k3_kl"] > 0


def test_log_probs_that_are_not_finite_are_counted_and_not_trained():
    x = columns()
    x["rollout_log_probs"][:, 0] = math.nan
    share = pytest.approx(BATCH / x["response_mask"].sum().item())
    batch, metrics = on_driver(x, "use_tis=true")
    bypass = {**x, "old_log_probs": x["rollout_log_probs"]}
    runs = [worker_loss("vanilla", batch | {"log_probs": x["log_probs"]})]
    runs += [worker_loss(f"slime_tis_{name}", bypass) for name in verl_plugin.LOSSES]
    for loss, gradient, _ in runs:
        assert (
            loss.isfinite()
            and gradient.isfinite().all()
            and gradient.any()
            and not gradient[:, 0].any()
        )
    assert metrics["rollout_corr/nonfinite_token_fraction"] == share
    assert runs[1][2]["actor/nonfinite_token_fraction"].values == [share]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        pytest.param("rs_zscore=3", "rs_zscore", id="unknown"),
        pytest.param("divergence_mask=binary_tv", "advantages", id="advantages"),
        pytest.param("use_rollout_logprobs=true", "decoupled", id="bypass"),
    ],
)
def test_options_that_cannot_work_are_refused(option, words):
    with pytest.raises(ValueError, match=words):
        on_driver(columns(), option)


@pytest.mark.parametrize("loss_mode", ["vanilla", "slime_tis_ppo"])
def test_loss_and_gradient_of_the_worker_equal_the_library(loss_mode):
    x = columns()
    config = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.1, rejection_normalizer="kept")
    found = correct(config, x["old_log_probs"], x["rollout_log_probs"], x["response_mask"])
    loss, gradient, _ = worker_loss(loss_mode, {**x, "rollout_is_weights": found.weights})
    log_probs = x["log_probs"].requires_grad_()
    expected = found.mean(
        ppo_clip(log_probs, x["old_log_probs"], x["advantages"], dual_clip=3.0)[0]
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, log_probs)[0], rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("name", ["cispo", "dppo_tv"])
def test_losses_that_verl_has_agree_with_its_own(name):
    x = columns()
    _, gradient, metrics = worker_loss(f"slime_tis_{name}", x)
    _, expected, of_verl = worker_loss(name, x)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    assert metrics["actor/pg_clipfrac"].values == pytest.approx(of_verl["actor/pg_clipfrac"].values)
    assert gradient.any()


@pytest.mark.parametrize("name", sorted(verl_plugin.LOSSES))
def test_edges(name):
    assert f"slime_tis_{name}" in core_algos.POLICY_LOSS_REGISTRY
    x = columns()
    x["old_log_probs"][x["response_mask"] == 0] = math.nan  # padding
    _, gradient, metrics = worker_loss(f"slime_tis_{name}", x)
    assert gradient.isfinite().all() and gradient.any()
    assert not gradient[x["response_mask"] == 0].any()
    assert 0 <= metrics["actor/pg_clipfrac"].values[0] <= 1
    x["rollout_is_weights"] = torch.zeros(BATCH, LENGTH)  # everything rejected
    loss, gradient, _ = worker_loss(f"slime_tis_{name}", x)
    assert loss == 0 and not gradient.any()


def test_verl_imports_the_plugin_by_its_environment_variable():
    code = (
        "from verl.trainer.ppo import core_algos, rollout_corr_helper as helper; "
        "from slime_tis.integrations import verl_plugin; "
        "assert 'slime_tis_kpop' in core_algos.POLICY_LOSS_REGISTRY; "
        "assert helper.apply_bypass_mode is verl_plugin.apply_bypass_mode"
    )
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": verl_plugin.__name__}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
