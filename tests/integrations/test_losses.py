"""Losses of other frameworks with our correction."""

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction import within_bound
from slime_tis.errors import HealthAlarm
from slime_tis.integrations import losses
from slime_tis.policy.losses import ppo_clip
from tests.golden.methods import Case, cases
from tests.integrations import peer_losses as peers

LENGTHS = (5, 3, 6)
METRICS = RolloutCorrectionConfig(get_mismatch_metrics=True)
REJECT_ALL = RolloutCorrectionConfig(use_rs=True, rs_lower_bound=90.0, rs_upper_bound=99.0)
CONFIGS = {
    "tis": RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.1),
    "geometric": RolloutCorrectionConfig(
        use_tis=True, use_rs=True, rs_level="geometric", rs_upper_bound=1.1
    ),
    "veto": RolloutCorrectionConfig(
        use_tis=True,
        tis_level="prefix",
        rs_veto_threshold=0.75,
        rollout_rs="token_k3",
        rollout_rs_threshold=0.02,
    ),
}


@dataclass
class Batch:
    """[B, T] in float64."""

    log_probs: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor


Metrics = Mapping[str, Any]
Options = dict[str, Any]


def make_batch(broken: float | None = None, mask: float = 1.0) -> Batch:
    """`broken` replaces the sampler's second log-prob of each row."""
    generator = torch.Generator().manual_seed(0)
    shape = len(LENGTHS), max(LENGTHS)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    valid = (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).double() * mask
    rollout = -2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    old = rollout + noise(0.2)
    current = (old + noise(0.2)).requires_grad_()
    if broken is not None:
        rollout[:, 1] = broken
    return Batch(current, old, rollout, noise(1.0)[:, :1] * valid, valid)


def skyrl(config: RolloutCorrectionConfig | None, x: Batch) -> tuple[Tensor, Metrics]:
    options = peers.skyrl_options()
    options.policy_loss_type = "regular"
    loss = peers.skyrl
    if config is not None:
        options.policy_loss_type = "slime_tis"
        loss = losses.skyrl(peers.skyrl, config)
    advantages = x.advantages / x.mask.sum().clamp(min=1)  # as SkyRL forms the mean
    return loss(
        x.log_probs, x.old, advantages, config=options, loss_mask=x.mask, rollout_logprobs=x.rollout
    )


def openrlhf(config: RolloutCorrectionConfig | None, x: Batch) -> tuple[Tensor, Metrics]:
    loss: Any = peers.OpenRLHF()
    if config is not None:
        loss = losses.openrlhf(loss, config)
    total, _, _, kl, rejected = loss(
        x.log_probs, x.old, x.advantages, action_mask=x.mask, rollout_log_probs=x.rollout
    )
    return total, {"kl": kl, "rejected_fraction": rejected}


def nemo(config: RolloutCorrectionConfig | None, x: Batch) -> tuple[Tensor, Metrics]:
    loss: Any = peers.Nemo()
    if config is not None:
        loss = losses.NemoLoss(loss, config)
    columns = {
        "prev_logprobs": x.old,
        "generation_logprobs": x.rollout,
        "advantages": x.advantages,
        "token_mask": x.mask,
    }
    # NeMo-RL's data have a column for the first token of the prompt.
    data = {name: torch.nn.functional.pad(values, (1, 0)) for name, values in columns.items()}
    data["sample_mask"] = x.mask.any(1).double()
    return loss(x.log_probs, data, x.mask.any(1).sum(), x.mask.sum().clamp(min=1))


def areal(
    config: RolloutCorrectionConfig | None, x: Batch, packed: bool = False
) -> tuple[Tensor, Metrics]:
    metrics: dict[str, float] = {}
    loss = peers.areal
    if config is not None:
        loss = losses.areal(loss, config, metrics.update)
    columns = {
        "prox_logp": x.old,
        "logprobs": x.rollout,
        "advantages": x.advantages,
        "loss_mask": x.mask,
    }
    current = x.log_probs
    if packed:
        columns = {name: pack(values) for name, values in columns.items()}
        columns["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0)
        current = pack(current)
    options = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, "rejection_sampling": None}
    return loss(current, torch.zeros_like(current), columns, **options), metrics


def pack(values: Tensor) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(values, LENGTHS, strict=True)])


def prime_rl(config: RolloutCorrectionConfig | None, x: Batch) -> tuple[Tensor, Metrics]:
    loss = peers.prime_rl
    if config is not None:
        loss = losses.prime_rl(loss, config)
    outputs = []
    for i, length in enumerate(LENGTHS):
        inputs = peers.LossInputs(
            trainer_logprobs=x.log_probs[i, :length],
            inference_logprobs=x.rollout[i, :length],
            ref_logprobs=None,
            advantages=x.advantages[i, :length],
            loss_mask=x.mask[i, :length].bool(),
        )
        outputs.append(loss(inputs))
    total = sum(output.loss for output in outputs)
    return total / x.mask.sum().clamp(min=1), outputs[0].metrics


def swift_trainer(step: int = 0) -> SimpleNamespace:
    """What the method reads of ms-swift's GRPOTrainer."""
    return SimpleNamespace(
        rollout_importance_sampling_mode="token_mask",
        disable_rollout_importance_sampling=False,
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=step),
        accelerator=SimpleNamespace(is_main_process=True),
        _metrics={"train": defaultdict(list)},
    )


def ms_swift(config: RolloutCorrectionConfig | None, x: Batch) -> tuple[Tensor, Metrics]:
    trainer = swift_trainer()
    weights = None
    if config is not None:
        log_ratio, weights = losses.ms_swift(config)(trainer, x.old, x.rollout, x.mask.bool())
        assert config is METRICS or log_ratio.isfinite().all()
    return weighted_ppo(x, weights), {}


def open_instruct(config: RolloutCorrectionConfig | None, x: Batch) -> tuple[Tensor, Metrics]:
    if config is None:
        return weighted_ppo(x, None), {}
    rollout = x.rollout.nan_to_num(nan=1.0)  # what open-instruct's mask_logprobs does
    rho_correction = losses.open_instruct(peers.RhoCorrection, config)
    rho = rho_correction(x.old, rollout, x.mask.bool(), x.advantages, None)
    return weighted_ppo(x, rho.weights), rho.metrics


def weighted_ppo(x: Batch, weights: Tensor | None) -> Tensor:
    loss, _ = ppo_clip(x.log_probs, x.old, x.advantages)
    if weights is not None:
        loss = loss * weights
    return (loss * x.mask).sum() / x.mask.sum().clamp(min=1)


Framework = Callable[[RolloutCorrectionConfig | None, Batch], tuple[Tensor, Metrics]]
FRAMEWORKS: dict[str, Framework] = {
    "skyrl": skyrl,
    "openrlhf": openrlhf,
    "nemo": nemo,
    "areal": areal,
    "areal packed": partial(areal, packed=True),
    "prime_rl": prime_rl,
    "ms_swift": ms_swift,
    "open_instruct": open_instruct,
}


def gradient(loss: Tensor, x: Batch) -> Tensor:
    return torch.autograd.grad(loss, x.log_probs)[0]


@dataclass
class Comparison:
    """A wrapped loss, and the loss of `slime_tis.correct`."""

    batch: Batch
    config: RolloutCorrectionConfig
    loss: Tensor
    metrics: Metrics
    expected: Tensor
    accepted: Tensor
    """The mask after rejection."""


@pytest.fixture(params=CONFIGS)
def config_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def comparison(framework: str, config_name: str) -> Comparison:
    x = make_batch()
    config = CONFIGS[config_name]
    if framework == "prime_rl":
        config = replace(config, use_tis=False, use_rollout_logprobs=True, rs_upper_bound=1.05)
        correction = correct(config, x.log_probs, x.rollout, x.mask)
        log_ratio = x.log_probs - x.rollout
        policy_terms = -x.advantages * log_ratio.exp() * correction.mask
        pull_terms = 1e-3 * x.mask * log_ratio.square()
        expected = (policy_terms + pull_terms).sum() / x.mask.sum()
    else:
        correction = correct(config, x.old, x.rollout, x.mask)
        token_losses, _ = ppo_clip(x.log_probs, x.old, x.advantages)
        expected = correction.mean(token_losses)
    loss, metrics = FRAMEWORKS[framework](config, x)
    return Comparison(x, config, loss, metrics, expected, correction.mask)


def test_loss_equals_the_library(comparison: Comparison) -> None:
    torch.testing.assert_close(comparison.loss, comparison.expected, rtol=1e-6, atol=0)


def test_gradient_equals_the_library(comparison: Comparison) -> None:
    actual = gradient(comparison.loss, comparison.batch)
    expected = gradient(comparison.expected, comparison.batch)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-12)


def test_rejected_fraction_equals_the_library(comparison: Comparison) -> None:
    # SkyRL, AReaL and prime-rl report the metrics of `correct` instead.
    fractions = [
        value for key, value in comparison.metrics.items() if key.endswith("rejected_fraction")
    ]
    expected = 1 - (comparison.accepted.sum() / comparison.batch.mask.sum()).item()
    assert fractions in ([], [pytest.approx(expected)])


def test_batch_has_accepted_tokens(comparison: Comparison) -> None:
    assert comparison.accepted.sum() > 0


@pytest.mark.parametrize("config_name", ["geometric", "veto"], indirect=True)
def test_batch_has_rejected_tokens(comparison: Comparison) -> None:
    assert comparison.accepted.sum() < comparison.batch.mask.sum()


@pytest.mark.parametrize("framework", ["skyrl", "openrlhf", "nemo", "areal"])
def test_bypass_compares_with_the_sampler(framework: str) -> None:
    config = RolloutCorrectionConfig(
        use_rollout_logprobs=True,
        divergence_mask="binary_tv",
        divergence_mask_bound=0.05,
        rs_veto_threshold=0.5,
    )
    x = make_batch()
    correction = correct(
        config,
        x.log_probs,
        x.rollout,
        x.mask,
        current_log_probs=x.log_probs.detach(),
        advantages=x.advantages,
    )
    token_losses, _ = ppo_clip(x.log_probs, x.rollout, x.advantages)
    expected = correction.mean(token_losses)
    loss, _ = FRAMEWORKS[framework](config, x)
    assert 0 < correction.mask.sum() < x.mask.sum()
    torch.testing.assert_close(gradient(loss, x), gradient(expected, x), rtol=1e-6, atol=1e-12)


def test_loss_with_only_metrics_keeps_its_bits(framework: str) -> None:
    x = make_batch()
    plain, _ = FRAMEWORKS[framework](None, x)
    loss, _ = FRAMEWORKS[framework](METRICS, x)
    assert torch.equal(loss, plain)
    assert torch.equal(gradient(loss, x), gradient(plain, x))


@pytest.mark.parametrize("framework", ["skyrl", "areal", "prime_rl"])
def test_mismatch_is_measured(framework: str) -> None:
    _, metrics = FRAMEWORKS[framework](METRICS, make_batch())
    assert metrics["correction/mismatch_k3_kl"] > 0


BYPASS_FRAMEWORKS = sorted(FRAMEWORKS.keys() - {"ms_swift", "open_instruct"})


@pytest.mark.parametrize("broken", [math.nan, -math.inf, -9999.0, -1e6, -500.0], ids=str)
@pytest.mark.parametrize("policy", ["reject", "neutral"])
@pytest.mark.parametrize("framework", BYPASS_FRAMEWORKS)
def test_bypass_is_finite_at_any_rollout_log_prob(
    framework: str, policy: str, broken: float
) -> None:
    """The frameworks take exp of log π_θ − log π_rollout without a bound."""
    x = make_batch(broken=broken)
    options: Options = {"use_rollout_logprobs": True, "nonfinite_policy": policy}
    loss, _ = FRAMEWORKS[framework](RolloutCorrectionConfig(**options), x)
    assert loss.isfinite()
    assert gradient(loss, x).isfinite().all()


def test_log_probs_within_the_bound_keep_their_bits() -> None:
    other = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    log_probs = torch.tensor([-1.3, -20.9, -101.0, -9999.0, math.nan])
    assert within_bound(log_probs, other).tolist() == [*log_probs[:2].tolist(), -21.0, -1.0, -1.0]


BROKEN_LOG_PROBS = [math.nan, -math.inf, -500.0]
FINITE_REJECTION = RolloutCorrectionConfig(use_rs=True, rs_upper_bound=1e4)


@pytest.mark.parametrize("broken", BROKEN_LOG_PROBS, ids=str)
def test_broken_log_probs_are_not_trained(framework: str, broken: float) -> None:
    x = make_batch(broken=broken)
    loss, _ = FRAMEWORKS[framework](FINITE_REJECTION, x)
    actual = gradient(loss, x)
    assert loss.isfinite()
    assert actual.isfinite().all()
    assert actual.any()
    assert not actual[:, 1].any()


NONFINITE_SHARES = {
    "skyrl": ("correction/nonfinite_token_fraction", len(LENGTHS) / sum(LENGTHS)),
    "nemo": ("correction/nonfinite_fraction", len(LENGTHS) / sum(LENGTHS)),
    "areal": ("correction/nonfinite_token_fraction", len(LENGTHS) / sum(LENGTHS)),
    "areal packed": ("correction/nonfinite_token_fraction", len(LENGTHS) / sum(LENGTHS)),
    "prime_rl": ("correction/nonfinite_token_fraction", 1 / LENGTHS[0]),
}


@pytest.mark.parametrize("broken", [math.nan, -math.inf], ids=str)
@pytest.mark.parametrize("framework", NONFINITE_SHARES)
def test_nonfinite_log_probs_are_counted(framework: str, broken: float) -> None:
    name, share = NONFINITE_SHARES[framework]
    _, metrics = FRAMEWORKS[framework](FINITE_REJECTION, make_batch(broken=broken))
    assert float(metrics[name]) == pytest.approx(share)


def config_for(framework: str, config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The configuration without weights for prime-rl, whose ratio is the weight already."""
    if framework == "prime_rl":
        return replace(config, use_tis=False)
    return config


# prime-rl's pull to the sampler also trains rejected tokens.
WITHOUT_PULL = [name for name in FRAMEWORKS if name != "prime_rl"]
# OpenRLHF's mean divides by 0 without a trained token.
MASKED_FRAMEWORKS = [name for name in FRAMEWORKS if name != "openrlhf"]


def test_rejected_batch_has_a_finite_loss(framework: str) -> None:
    x = make_batch()
    loss, _ = FRAMEWORKS[framework](config_for(framework, REJECT_ALL), x)
    assert loss.isfinite()
    assert gradient(loss, x).isfinite().all()


@pytest.mark.parametrize("framework", WITHOUT_PULL)
def test_rejected_batch_has_no_gradient(framework: str) -> None:
    x = make_batch()
    loss, _ = FRAMEWORKS[framework](REJECT_ALL, x)
    assert not gradient(loss, x).any()


@pytest.mark.parametrize("framework", MASKED_FRAMEWORKS)
def test_masked_batch_has_neither_loss_nor_gradient(framework: str) -> None:
    x = make_batch(mask=0.0)
    loss, _ = FRAMEWORKS[framework](config_for(framework, CONFIGS["geometric"]), x)
    assert loss.isfinite()
    assert not gradient(loss, x).any()


GEOMETRIC: Options = {
    "use_tis": True,
    "tis_upper_bound": math.inf,
    "use_rs": True,
    "rs_level": "geometric",
}
SKYRL: dict[str, Options] = {
    "geometric": {
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.99,
        "rs_upper_bound": 1.01,
    },
    "product": {
        "use_rs": True,
        "rs_level": "sequence",
        "rs_lower_bound": 0.5,
        "rs_upper_bound": 2.0,
    },
    "token": {"use_tis": True},
    "sequence": {"use_tis": True, "tis_level": "sequence", "tis_upper_bound": 5.0},
}


def bounded(mode: str, low: float | None, high: float) -> Options:
    return {"use_tis": True, "tis_mode": mode, "tis_lower_bound": low, "tis_upper_bound": high}


def openrlhf_options(params: Options) -> Options:
    low, high = params["is_correction_threshold"]
    if params["is_correction_level"] == "seq":
        return GEOMETRIC | {"rs_lower_bound": low, "rs_upper_bound": high}
    return bounded(params["is_correction_mode"], low, high)


def nemo_options(params: Options) -> Options:
    high = params["truncated_importance_sampling_ratio"]
    low = params.get("truncated_importance_sampling_ratio_min")
    kind = params["truncated_importance_sampling_type"]
    if kind == "seq-mask-tis":
        return GEOMETRIC | {"rs_lower_bound": low, "rs_upper_bound": high}
    if kind == "icepop":
        return bounded("mask", low, high)
    return {"use_tis": True, "tis_upper_bound": high}


def skyrl_options(params: Options) -> Options:
    (value,) = params.values()
    return SKYRL[value]


@dataclass(frozen=True)
class Peer:
    """A method of the golden file, and how its parameters become options of ours."""

    method: str
    options: Callable[[Options], Options]
    framework: Framework

    def supports(self, params: Options) -> bool:
        """Whether our losses have the correction of these parameters."""
        if self.framework is openrlhf:
            return params["is_correction_gating"] == "ratio"
        if self.framework is skyrl:
            values = list(params.values())
            return len(values) == 1 and values[0] in SKYRL
        return True


PEERS = [
    Peer("openrlhf.policy_loss", openrlhf_options, openrlhf),
    Peer("nemo_rl.clipped_pg", nemo_options, nemo),
    Peer("skyrl.off_policy_correction", skyrl_options, skyrl),
]


def golden_cases() -> list[Any]:
    parameters = []
    for peer in PEERS:
        for entry in cases(peer.method, without="token_level_loss"):
            (case,) = entry.values
            # On the tiny batch the peers clamp PPO's ratio, which PPO does not.
            if case.batch != "tiny" and peer.supports(case.params):
                parameters.append(pytest.param(case, peer, id=entry.id))
    return parameters


@dataclass
class GoldenRun:
    """A peer's loss without its correction, wrapped with ours, in float64."""

    case: Case
    batch: Batch
    loss: Tensor


@pytest.fixture
def golden_run(case: Case, peer: Peer) -> GoldenRun:
    x = Batch(
        log_probs=case.input("logp").double().requires_grad_(),
        old=case.input("old").double(),
        rollout=case.input("sampler").double(),
        advantages=case.input("advantages").double(),
        mask=case.input("mask").double(),
    )
    config = RolloutCorrectionConfig(**peer.options(case.params))
    loss, _ = peer.framework(config, x)
    return GoldenRun(case, x, loss)


@pytest.mark.parametrize(("case", "peer"), golden_cases())
def test_wrapped_loss_equals_the_peers_corrected_loss(golden_run: GoldenRun) -> None:
    expected = golden_run.case.outputs["loss_float64"]
    assert golden_run.loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


EXACT_CASES = [
    entry for entry in golden_cases() if "differs_from_float64" not in entry.values[0].outputs
]


@pytest.mark.parametrize(("case", "peer"), EXACT_CASES)
def test_wrapped_gradient_equals_the_peers_gradient(golden_run: GoldenRun) -> None:
    actual = gradient(golden_run.loss, golden_run.batch).float()
    torch.testing.assert_close(actual, golden_run.case.output("grad"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rs_z_score", {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}),
        ("tis_batch_normalize", {"use_tis": True, "tis_batch_normalize": True}),
        ("kept", {"rs_veto_threshold": 1e-4, "rejection_normalizer": "kept"}),
    ],
    ids=["z score", "normalized", "kept"],
)
def test_global_batch_options_are_refused(name: str, options: Options) -> None:
    with pytest.raises(ValueError, match=name):
        skyrl(RolloutCorrectionConfig(**options), make_batch())


def test_openrlhf_refuses_a_second_correction() -> None:
    loss: Any = peers.OpenRLHF()
    loss.is_correction_level = "token"
    with pytest.raises(ValueError, match="is_correction_level"):
        losses.openrlhf(loss, METRICS)


def test_openrlhf_without_correction_options_is_refused() -> None:
    class PolicyLoss:
        """OpenRLHF's main 3c3be62 has no is_correction_level."""

    message = r"PolicyLoss has no is_correction_level.* install openrlhf==0\.11\.2"
    with pytest.raises(ValueError, match=message):
        losses.openrlhf(PolicyLoss(), METRICS)


def test_nemo_refuses_bypass_with_force_on_policy_ratio() -> None:
    loss: Any = peers.Nemo()
    loss.force_on_policy_ratio = True
    with pytest.raises(ValueError, match="force_on_policy_ratio"):
        losses.NemoLoss(loss, RolloutCorrectionConfig(use_rollout_logprobs=True))


def test_skyrl_refuses_a_second_correction() -> None:
    options = peers.skyrl_options()
    options.off_policy_correction.token_mask_is_threshold_low = 0.5
    log_probs = make_batch().log_probs
    with pytest.raises(ValueError, match="off_policy_correction"):
        losses.skyrl(peers.skyrl, METRICS)(log_probs, log_probs, log_probs, options)


def swift_log(
    rollout: Tensor, old: Tensor, *, is_main_process: bool = True, **options: Any
) -> Metrics:
    """The log of ms-swift at the third step, after two micro-batches per step."""
    method = losses.ms_swift(METRICS, **options)
    trainer = swift_trainer()
    trainer.accelerator.is_main_process = is_main_process
    for step in range(3):
        trainer.state.global_step = step
        for half in (slice(0, 2), slice(2, 4)):
            method(trainer, old[half], rollout[half], torch.ones_like(old[half]))
    return trainer._metrics["train"]


def clean_log_probs() -> Tensor:
    return -2 * torch.rand(4, 10, generator=torch.Generator().manual_seed(0)) - 0.1


def test_ms_swift_logs_the_metrics_of_complete_steps() -> None:
    old = clean_log_probs()
    log = swift_log(old - 0.01, old)
    k3 = math.expm1(0.01) - 0.01
    assert log["correction/mismatch_k3_kl"] == pytest.approx([k3, k3], rel=1e-4)


def test_ms_swift_logs_an_alarm() -> None:
    old = clean_log_probs()
    assert swift_log(old.roll(-1, 1), old)["health/shifted_tokens"] == [1.0, 1.0]


@pytest.mark.parametrize("is_main_process", [True, False], ids=["first", "other"])
def test_only_the_first_process_of_ms_swift_prints(
    is_main_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    old = clean_log_probs()
    swift_log(old.roll(-1, 1), old, is_main_process=is_main_process)
    assert len(caplog.messages) == is_main_process


def test_ms_swift_stops_at_an_alarm_if_asked() -> None:
    old = clean_log_probs()
    with pytest.raises(HealthAlarm, match="health/shifted_tokens since step 0"):
        swift_log(old.roll(-1, 1), old, on_alarm="stop")


def test_ms_swift_refuses_options_with_advantages() -> None:
    with pytest.raises(ValueError, match="advantages"):
        losses.ms_swift(RolloutCorrectionConfig(divergence_mask="binary_tv"))


def test_prime_rl_refuses_weights() -> None:
    with pytest.raises(ValueError, match="twice"):
        losses.prime_rl(peers.prime_rl, CONFIGS["tis"])


def test_rollout_log_probs_are_required() -> None:
    x = make_batch()
    with pytest.raises(ValueError, match="no rollout log-probs"):
        losses.corrected(
            METRICS,
            log_probs=x.log_probs,
            old=None,
            rollout=None,
            advantages=x.advantages,
            mask=x.mask,
        )


def test_prime_rl_loss_needs_prime_rl() -> None:
    with pytest.raises(ImportError, match="prime-rl"):
        losses.prime_rl_loss(None, rs_veto_threshold=1e-4)


@pytest.fixture
def unpickled_nemo() -> losses.NemoLoss:
    """NeMo-RL sends the loss to its workers."""
    return pickle.loads(pickle.dumps(losses.NemoLoss(peers.Nemo(), METRICS)))


def test_pickled_nemo_loss_keeps_the_wrapped_loss(unpickled_nemo: losses.NemoLoss) -> None:
    assert unpickled_nemo.loss_type == peers.Nemo().loss_type
    assert unpickled_nemo.correction == METRICS


def test_nemo_metrics_are_normalized_by_tokens(unpickled_nemo: losses.NemoLoss) -> None:
    _, metrics = nemo(METRICS, make_batch())
    normalizations = {
        key: value
        for key, value in unpickled_nemo.metric_normalizations.items()
        if key.startswith(losses.PREFIX)
    }
    assert normalizations.keys() == {key for key in metrics if key.startswith(losses.PREFIX)}
    assert set(normalizations.values()) == {"tokens"}
