"""Causes planted into the log-probs of a small softmax model, and the diagnosis of each."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.analysis.diagnosis import CAUSES, Diagnosis, diagnose
from slime_tis.analysis.diagnosis.diagnose import _ranked
from slime_tis.analysis.diagnosis.diagnosis_text import as_text
from slime_tis.analysis.diagnosis.engine_rules import reported_grid
from slime_tis.analysis.diagnosis.shift_rules import best_lags
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.health import Finding

SAMPLES = 48
TOKENS = 32
"""Tokens of a response."""
VOCABULARY = 40


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


Sampler = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(logits [S, V], tokens before [S, t]) → the sampler's logits."""


def top_p(logits: np.ndarray, _: np.ndarray) -> np.ndarray:
    probability = np.exp(log_softmax(logits))
    order = np.argsort(-probability, -1)
    ordered = np.take_along_axis(probability, order, -1)
    kept = np.empty(logits.shape, bool)
    np.put_along_axis(kept, order, ordered.cumsum(-1) - ordered < 0.8, -1)
    return np.where(kept, logits, -np.inf)


def counts(tokens: np.ndarray) -> np.ndarray:
    return (tokens[:, :, None] == np.arange(VOCABULARY)).sum(1)


SAMPLERS: dict[str, Sampler] = {
    "top-p": top_p,
    "raw log-probs": lambda logits, tokens: top_p(logits / 0.7, tokens),
    "presence penalty": lambda logits, tokens: logits - 0.4 * (counts(tokens) > 0),
    "frequency penalty": lambda logits, tokens: logits - 0.3 * counts(tokens),
    "repetition penalty": lambda x, tokens: np.where(
        counts(tokens), np.where(x > 0, x / 1.2, x * 1.2), x
    ),
    "repetition raised": lambda logits, tokens: logits + 0.4 * (counts(tokens) > 0),
    "logit bias": lambda logits, _: logits + 1.5 * (np.arange(VOCABULARY) == 7),
    "banned token": lambda logits, _: np.where(np.arange(VOCABULARY) == 7, -np.inf, logits),
    "temperature": lambda logits, _: logits / 0.8,
    "unstable": (
        lambda x, tokens: x + 0.3 * np.random.default_rng(tokens.shape[1]).normal(size=x.shape)
    ),
    "decoding": lambda x, tokens: (
        x + 0.3 * np.random.default_rng(tokens.shape[1]).normal(size=x.shape) * bool(tokens.size)
    ),
}


def no_change(logits: np.ndarray, _: np.ndarray) -> np.ndarray:
    return logits


class Softmax:
    """Random logits for each token, tokens drawn by a sampler, and both engines' log-probs."""

    def __init__(
        self,
        seed: int = 0,
        sampler: Sampler = no_change,
        *,
        paired: bool = False,
        samples: int = SAMPLES,
        tokens: int = TOKENS,
    ) -> None:
        self.chance = chance = np.random.default_rng(seed)
        self.samples = np.arange(samples)
        self.positions = np.arange(tokens)
        self.logits = 2.5 * chance.normal(size=(samples, tokens, VOCABULARY))
        uniform = chance.random((samples, tokens, 1))
        if paired:
            # Two samples of a prompt have the same tokens until noise makes them differ.
            self.logits[1::2] = self.logits[::2]
            uniform[1::2] = uniform[::2]
        self.token = np.zeros((samples, tokens), int)
        sampled = np.empty(self.logits.shape)
        for t in range(tokens):
            sampled[:, t] = log_softmax(sampler(self.logits[:, t], self.token[:, :t]))
            drawn = (np.exp(sampled[:, t]).cumsum(-1) < uniform[:, t]).sum(-1)
            self.token[:, t] = drawn.clip(max=VOCABULARY - 1)
        full = log_softmax(self.logits)
        self.train = self.of(full)
        self.rollout = self.of(sampled)
        self.entropy = -(np.exp(full) * full).sum(-1)
        self.sampled_entropy = -(np.exp(sampled) * np.maximum(sampled, -1e3)).sum(-1)

    def of(self, log_probs: np.ndarray) -> np.ndarray:
        """Log-probs [S, T] of the sampled tokens."""
        return np.take_along_axis(log_probs, self.token[..., None], -1)[..., 0]

    def noisy(self, size: float | np.ndarray) -> np.ndarray:
        """Log-probs [S, T] of logits with noise."""
        return self.of(log_softmax(self.logits + size * self.chance.normal(size=self.logits.shape)))

    def at_temperature(self, temperature: float) -> np.ndarray:
        return self.of(log_softmax(self.logits / temperature))

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Values [S] of samples as values [S, T] of their tokens."""
        return values[:, None].repeat(len(self.positions), 1)

    def table(self, rollout: np.ndarray, **columns: np.ndarray) -> TokenTable:
        columns |= {"train_log_prob": self.train, "rollout_log_prob": rollout}
        columns |= {"entropy": self.entropy, "token": self.token}
        parts = []
        for i in self.samples:
            parts.append(SampleParts(**{name: values[i] for name, values in columns.items()}))
        return TokenTable.from_parts(parts)


def retokenized(model: Softmax) -> TokenTable:
    rollout = model.rollout
    for i in model.samples[::2]:
        start = 6 + i % 11
        rollout[i, start:] = np.roll(rollout[i, start:], 1)
    return model.table(rollout)


def unstable(model: Softmax) -> TokenTable:
    return model.table(model.rollout, prompt=model.samples[:, None] // 2)


def raw_log_probs(model: Softmax) -> TokenTable:
    """Training applies the sampler's settings, and the engine reports log-probs without them."""
    reported = model.train
    model.train = model.rollout
    model.entropy = model.sampled_entropy
    return model.table(reported)


def stale(model: Softmax) -> TokenTable:
    version = model.per_token(np.where(model.samples % 2, 7, 4))
    rollout = model.noisy(np.where(version == 7, 0.005, 0.1)[..., None])
    return model.table(rollout, step=np.full(SAMPLES, 7), weight_version=version)


def stale_with_certain_first_tokens(model: Softmax) -> TokenTable:
    is_old = model.per_token(model.samples % 4 > 0)
    size = np.where(is_old, 0.1, 0.02) * np.where(model.positions < 4, 0.05, 1)
    rollout = model.noisy(size[..., None])
    version = np.where(is_old, 6, 7)
    return model.table(rollout, step=np.full(SAMPLES, 7), weight_version=version)


def never_updated(model: Softmax) -> TokenTable:
    step = model.samples // 8
    rollout = model.noisy(0.03 * (1 + step)[:, None, None])
    return model.table(rollout, step=step, weight_version=model.per_token(step))


def fp8_with_a_certain_first_token(model: Softmax) -> TokenTable:
    rollout = model.noisy(0.2)
    rollout[:, 0] = model.train[:, 0] = -0.001
    return model.table(rollout)


def one_nan(model: Softmax) -> TokenTable:
    model.rollout[3, 4] = np.nan
    return model.table(model.rollout)


def impossible_tokens(model: Softmax) -> TokenTable:
    rows = model.rollout[::7]
    rows[:, 5] = -30.0 + np.arange(len(rows)) / 10
    return model.table(model.rollout)


def routing(model: Softmax) -> TokenTable:
    is_routed = model.chance.random((SAMPLES, TOKENS, 1)) < 0.08
    rollout = model.noisy(np.where(is_routed, 0.5, 0.002))
    return model.table(rollout, experts=np.zeros((SAMPLES, TOKENS, 2, 2), int))


def tool_output(model: Softmax) -> TokenTable:
    model.rollout[::3, 6:12] = 0.0
    return model.table(model.rollout)


FAULTS: dict[str, Callable[[Softmax], TokenTable]] = {
    "shift": lambda model: model.table(np.roll(model.rollout, 1, axis=1)),
    "retokenized": retokenized,
    "reported temperature": lambda model: model.table(model.at_temperature(0.8)),
    "raw log-probs": raw_log_probs,
    "draft": lambda model: model.table(model.noisy(1.0)),
    "unstable": unstable,
    "stale": stale,
    "stale, certain first tokens": stale_with_certain_first_tokens,
    "never updated": never_updated,
    "bf16": lambda model: model.table(model.noisy(0.01)),
    "fp8": lambda model: model.table(model.noisy(0.2)),
    "fp8, certain first token": fp8_with_a_certain_first_token,
    "NaN": one_nan,
    "-30 nats": impossible_tokens,
    "position": lambda model: model.table(model.noisy(0.004 * (1 + model.positions)[:, None])),
    "prompt": lambda model: model.table(model.noisy(0.4 / (1 + model.positions)[:, None])),
    "routing": routing,
    "tool output": tool_output,
    "fp32": lambda model: model.table(
        model.rollout + 1e-6 * model.chance.normal(size=model.rollout.shape)
    ),
}
"""Faults of the reported log-probs; `SAMPLERS` has those of the sampler."""


def planted(name: str, *, samples: int = SAMPLES, tokens: int = TOKENS) -> TokenTable:
    sampler = SAMPLERS.get(name, no_change)
    model = Softmax(sampler=sampler, paired=name == "unstable", samples=samples, tokens=tokens)
    if name not in FAULTS:
        return model.table(model.rollout)
    return FAULTS[name](model)


PLANTED = {
    "shift": "shifted_tokens",
    "retokenized": "retokenised",
    "temperature": "temperature",
    "reported temperature": "temperature",
    "top-p": "truncated_sampling",
    "raw log-probs": "truncated_sampling",
    "presence penalty": "penalty",
    "frequency penalty": "penalty",
    "repetition penalty": "penalty",
    "repetition raised": "penalty",
    "logit bias": "penalty",
    # As with top-p, Δ = log(kept mass).
    "banned token": "truncated_sampling",
    "draft": "other_model",
    "decoding": "position_drift",
    "unstable": "dropout",
    "stale": "stale_weights",
    "stale, certain first tokens": "stale_weights",
    "never updated": "weights_not_updated",
    "bf16": "rounding",
    "fp8": "rounding",
    "fp8, certain first token": "rounding",
    "NaN": "broken_tokens",
    "-30 nats": "broken_tokens",
    "position": "position_drift",
    "prompt": "other_prompt",
    "routing": "moe_routing",
    "tool output": "mask_mistake",
    "fp32": "healthy",
}
CANDIDATES = (
    "banned token",
    "decoding",
    "never updated",
    "bf16",
    "fp8",
    "fp8, certain first token",
    "position",
    "prompt",
)
"""Faults whose pattern other causes make, too: the answer is `unexplained`, then candidates."""


@pytest.fixture(scope="module", params=PLANTED)
def planted_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def planted_diagnosis(planted_name: str) -> Diagnosis:
    return diagnose(planted(planted_name))


@pytest.fixture(scope="module")
def first_cause(planted_name: str, planted_diagnosis: Diagnosis) -> Finding:
    """The first finding with a cause."""
    return planted_diagnosis.findings[int(planted_name in CANDIDATES)]


def test_the_planted_cause_comes_first(planted_name: str, first_cause: Finding) -> None:
    assert first_cause.cause == PLANTED[planted_name], first_cause


def test_shared_patterns_are_only_candidates(
    planted_name: str, planted_diagnosis: Diagnosis
) -> None:
    is_unexplained = planted_diagnosis.cause == "unexplained"
    assert is_unexplained == (planted_name in CANDIDATES)


def test_a_finding_is_complete(first_cause: Finding) -> None:
    assert first_cause.evidence
    assert first_cause.title and first_cause.fix
    assert 0 < first_cause.confidence <= 1
    assert 0 <= first_cause.share <= 1


def test_a_diagnosis_is_valid_json(planted_diagnosis: Diagnosis) -> None:
    json.dumps(planted_diagnosis.as_json(), allow_nan=False)


def test_the_text_has_the_first_title(planted_diagnosis: Diagnosis, first_cause: Finding) -> None:
    assert first_cause.title in as_text(planted_diagnosis, "a run")


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        # The planted ratio is 0.80.
        pytest.param("temperature", "rollout/training ≈ 0.82", id="temperature"),
        pytest.param("logit bias", "bias of token 7", id="logit bias"),
    ],
)
def test_the_detail_has_the_planted_parameter(name: str, detail: str) -> None:
    assert diagnose(planted(name)).findings[0].detail == detail


@pytest.mark.parametrize(
    ("train", "rollout", "noise", "named", "words"),
    [
        pytest.param("fp32", "int8", 0.03, ("rounding", "int8"), "int8 makes noise", id="int8"),
        pytest.param("fp32", "bf16", 0.01, ("rounding", "bf16"), "bf16 makes noise", id="bf16"),
        pytest.param(
            "bf16", "fp32", 0.01, ("rounding", "bf16"), "bf16 makes noise", id="bf16 training"
        ),
        pytest.param(
            "fp32", "bf16", 0.2, ("unexplained", ""), "look for a second cause", id="too large"
        ),
        pytest.param(
            "fp32", "fp32", 0.003, ("unexplained", ""), "something else rounds", id="fp32"
        ),
        pytest.param(
            "fp32", None, 0.003, ("unexplained", ""), "candidates only: precision", id="unknown"
        ),
    ],
)
def test_precisions_in_the_metadata_are_evidence(
    train: str, rollout: str | None, noise: float, named: tuple[str, str], words: str
) -> None:
    model = Softmax()
    table = model.table(model.noisy(noise))
    metadata = {"precision": train, "rollout_precision": rollout}
    first = diagnose(replace(table, metadata=metadata)).findings[0]
    assert (first.cause, first.detail) == named
    assert words in first.evidence[-1]


@pytest.mark.parametrize(
    ("metadata", "has_experts", "cause"),
    [
        pytest.param({}, True, "moe_routing", id="recorded"),
        pytest.param(
            {"num_experts": 8, "replays_experts": False}, False, "moe_routing", id="in metadata"
        ),
        pytest.param(
            {"num_experts": 8, "replays_experts": True}, True, "unexplained", id="replayed"
        ),
        pytest.param(
            {"num_experts": 0, "replays_experts": False}, False, "unexplained", id="dense"
        ),
    ],
)
def test_routing_is_a_cause_if_experts_may_differ(
    metadata: dict[str, Any], has_experts: bool, cause: str
) -> None:
    table = replace(planted("routing"), metadata=metadata)
    if not has_experts:
        table = replace(table, experts=None)
    assert diagnose(table).cause == cause


class LongStep:
    """A run in which one long optimizer step moves the policy far from the sampling weights."""

    def __init__(self) -> None:
        self.model = Softmax()
        self.step = 1 + self.model.samples // 3
        self.is_long = self.step == 3
        self.rollout = self.model.noisy(np.where(self.is_long, 1.2, 0.02)[:, None, None])

    def causes(self, age: np.ndarray) -> set[str]:
        version = self.model.per_token(self.step - age)
        table = self.model.table(self.rollout, step=self.step, weight_version=version)
        return {finding.cause for finding in diagnose(table).findings}


def test_the_long_step_has_large_differences() -> None:
    run = LongStep()
    difference = np.abs(run.model.train - run.rollout)
    assert (difference[run.is_long] > 3).any()
    assert difference[~run.is_long].max() < 0.1


def test_stale_tokens_of_a_long_step_are_not_broken() -> None:
    run = LongStep()
    assert "broken_tokens" not in run.causes(run.step % 2)


def test_such_differences_of_current_weights_are_broken() -> None:
    run = LongStep()
    assert "broken_tokens" in run.causes(0 * run.step)


def test_stale_tokens_of_a_short_step_may_be_broken() -> None:
    run = LongStep()
    run.rollout[run.step == 5, 7] = -30.0
    assert "broken_tokens" in run.causes(run.step % 2)


class FourServers:
    """120 samples of four rollout servers, of which some sample at another temperature."""

    def __init__(self) -> None:
        self.model = Softmax(samples=120)
        self.worker = self.model.per_token(self.model.samples) % 4

    def findings(self, wrong: list[int], workers: Sequence[str] = ()) -> tuple[Finding, ...]:
        warm = self.model.at_temperature(0.9)
        is_wrong = np.isin(self.worker, wrong)
        rollout = np.where(is_wrong, warm, self.model.noisy(0.02))
        table = self.model.table(rollout, rollout_worker=self.worker)
        return diagnose(replace(table, metadata={"workers": list(workers)})).findings


@pytest.mark.parametrize(
    ("workers", "name"),
    [
        pytest.param((), "server 2", id="unnamed"),
        pytest.param(("a", "b", "http://c:1", "d"), "http://c:1", id="named"),
    ],
)
def test_the_wrong_server_of_four_is_named(workers: Sequence[str], name: str) -> None:
    first = FourServers().findings([2], workers)[0]
    assert (first.cause, first.detail) == ("worker", name)
    assert first.share > 0.5


def test_the_wrong_server_has_its_cause_as_evidence() -> None:
    first = FourServers().findings([2])[0]
    assert "different temperature" in first.evidence[-1]


def test_the_other_servers_have_their_cause() -> None:
    assert [finding.cause for finding in FourServers().findings([2])] == ["worker", "rounding"]


def test_two_wrong_servers_of_four_are_named() -> None:
    findings = FourServers().findings([0, 2])
    names = {finding.detail for finding in findings if finding.cause == "worker"}
    assert names == {"server 0", "server 2"}


@pytest.mark.parametrize("seed", range(5))
def test_equal_servers_are_not_blamed(seed: int) -> None:
    model = Softmax(seed)
    rollout = model.noisy(0.02)
    # One sample of a server differs by chance.
    rollout[7] = model.noisy(0.5)[7]
    worker = model.per_token(model.samples) % 4
    assert diagnose(model.table(rollout, rollout_worker=worker)).cause != "worker"


@pytest.mark.parametrize("servers", [1, 2])
def test_tokens_of_unknown_servers_are_no_server(servers: int) -> None:
    model = Softmax()
    is_warm = model.per_token(model.samples) % 3 == 0
    worker = np.where(is_warm, -1, model.samples[:, None] % servers)
    rollout = np.where(is_warm, model.at_temperature(0.9), model.noisy(0.002))
    assert diagnose(model.table(rollout, rollout_worker=worker)).cause != "worker"


def test_a_much_lower_temperature_in_training_is_no_truncation() -> None:
    model = Softmax()
    reported = model.train
    model.train = model.at_temperature(0.3)
    causes = [finding.cause for finding in diagnose(model.table(reported)).findings]
    assert "truncated_sampling" not in causes


def test_an_added_constant_is_another_unit() -> None:
    model = Softmax()
    assert diagnose(model.table(model.train + 0.03)).cause == "broken_tokens"


def test_a_mass_without_tokens_kept_alone_is_a_candidate() -> None:
    model = Softmax()
    mass = 0.03 - 0.001 * model.chance.random(model.train.shape)
    findings = diagnose(model.table(model.train + mass)).findings
    assert [finding.cause for finding in findings] == ["unexplained", "truncated_sampling"]


def runs_of_zeros(log_prob: float) -> list[str]:
    """Causes if the rollout engine reports 0 for runs of tokens that have one log-prob."""
    model = Softmax()
    rollout = model.train + 0.01 * model.chance.random(model.train.shape)
    model.train[::3, 6:12] = log_prob
    rollout[::3, 6:12] = 0.0
    return [finding.cause for finding in diagnose(model.table(rollout)).findings]


def test_zeros_of_likely_tokens_are_no_mask_mistake() -> None:
    assert "mask_mistake" not in runs_of_zeros(-0.1)


def test_zeros_of_unlikely_tokens_are_a_mask_mistake() -> None:
    assert runs_of_zeros(-1.0)[0] == "mask_mistake"


def findings_by_age(noise: float) -> tuple[Finding, ...]:
    """Findings on tokens that differ by their age, next to noise."""
    model = Softmax()
    ages = model.per_token(model.samples % 3)
    rollout = model.noisy((noise + 0.1 * ages)[..., None])
    table = model.table(rollout, weight_version=7 - ages, step=np.full(SAMPLES, 7))
    return diagnose(table).findings


def test_precision_is_a_cause_next_to_the_age() -> None:
    causes = [finding.cause for finding in findings_by_age(0.02)]
    assert causes == ["stale_weights", "rounding"]


def test_without_noise_only_the_age_is_a_cause() -> None:
    causes = [finding.cause for finding in findings_by_age(1e-6)]
    assert causes == ["stale_weights"]


def test_precision_is_measured_on_the_newest_weights() -> None:
    rounding = findings_by_age(0.02)[1]
    assert rounding.detail == "int8 or bf16"
    assert 0.1 < rounding.share < 0.5
    assert "on tokens from the newest weights" in rounding.evidence[0]


@pytest.mark.parametrize(
    ("samples", "tokens"),
    [pytest.param(900, 32, id="many samples"), pytest.param(20, 1500, id="long samples")],
)
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        pytest.param("shift", "shifted_tokens", id="shift"),
        pytest.param("retokenized", "retokenised", id="retokenized"),
    ],
)
def test_a_shift_explains_all_of_a_large_dump(
    name: str, cause: str, samples: int, tokens: int
) -> None:
    (finding,) = diagnose(planted(name, samples=samples, tokens=tokens)).findings
    assert finding.cause == cause
    assert finding.share > 0.98


def test_a_partial_shift_leaves_other_causes_visible() -> None:
    model = Softmax(samples=900)
    rollout = model.noisy(0.2)
    rollout[::5] = np.roll(rollout[::5], 1, axis=1)
    causes = [finding.cause for finding in diagnose(model.table(rollout)).findings]
    assert causes == ["shifted_tokens", "rounding"]


def test_masked_tokens_are_ignored() -> None:
    model = Softmax()
    mask = np.ones((SAMPLES, TOKENS))
    mask[:, 8:16] = 0
    rollout = model.rollout
    rollout[:, 8:16] = -30.0
    rollout[:, 9] = np.nan
    result = diagnose(model.table(rollout, loss_mask=mask))
    assert (result.cause, result.tokens) == ("healthy", SAMPLES * (TOKENS - 8))


SHIFTED_TRAIN = np.array([-1.0, -7.0, -2.0, -9.0, -3.0, -8.0, -4.0, -6.0])
SHIFTED_ROLLOUT = np.array([-1.0, -7.0, -2.0, 0.0, -9.0, -3.0, -8.0, -4.0])


def test_lags_of_a_sample_by_hand() -> None:
    lags, saved, left = best_lags(SHIFTED_TRAIN, SHIFTED_ROLLOUT)
    assert lags.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    # The unshifted costs of the tokens; the last one has no partner.
    assert saved == pytest.approx(5 + 5 + 5 + 4)
    assert left == 0


def test_a_residual_of_the_lags_by_hand() -> None:
    train = SHIFTED_TRAIN.copy()
    train[-2] = -4.5
    _, saved, left = best_lags(train, SHIFTED_ROLLOUT)
    assert saved == pytest.approx(5 + 5 + 5 + 3.5 - 0.5)
    assert left == pytest.approx(0.5 / 18.5)


def test_tokens_without_a_partner_save_nothing() -> None:
    train = np.concatenate([np.full(20, -1.0), -0.5 * np.arange(6, 12)])
    rollout = np.concatenate([np.full(20, -1.0), np.zeros(6)])
    lags, saved, left = best_lags(train, rollout)
    assert lags[-6:].tolist() == [6] * 6
    assert (saved, left) == (0, 1)


FP32 = (-np.random.default_rng(0).exponential(size=200)).astype(np.float32)


@pytest.mark.parametrize(
    ("log_probs", "grid"),
    [
        pytest.param(FP32, "", id="fp32"),
        pytest.param(FP32.astype(np.float16), "fp16", id="fp16"),
        pytest.param((FP32.view(np.uint32) & 0xFFFF0000).view(np.float32), "bf16", id="bf16"),
    ],
)
def test_16_bit_log_probs_are_recognized(log_probs: np.ndarray, grid: str) -> None:
    assert reported_grid(log_probs.astype(np.float64)) == grid


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(None, id="no table"),
        pytest.param(SampleParts(train_log_prob=[], rollout_log_prob=[]), id="no tokens"),
        pytest.param(
            SampleParts(train_log_prob=[-1.0], rollout_log_prob=[-9.0], loss_mask=[0]),
            id="masked",
        ),
    ],
)
def test_empty_input_is_not_judged(samples: SampleParts | None) -> None:
    table = None
    if samples is not None:
        table = TokenTable.from_parts([samples])
    assert diagnose(table).cause == "not_measured"


def equal_engines(tokens: int) -> TokenTable:
    log_probs = [-1.0] * tokens
    return TokenTable.from_parts(
        [SampleParts(train_log_prob=log_probs, rollout_log_prob=log_probs)]
    )


@pytest.mark.parametrize(
    ("tokens", "cause"),
    [
        pytest.param(1, "not_measured", id="one"),
        pytest.param(29, "not_measured", id="too few"),
        pytest.param(30, "healthy", id="enough"),
    ],
)
def test_few_equal_tokens_do_not_show_health(tokens: int, cause: str) -> None:
    assert diagnose(equal_engines(tokens)).cause == cause


def test_metrics_decide_next_to_few_tokens() -> None:
    rows = [{"step": step, "train/mismatch_k3_kl": 1e-8} for step in range(9)]
    assert diagnose(equal_engines(1), rows).cause == "healthy"


@pytest.mark.parametrize("tokens", [1, 30], ids=["too few", "enough"])
def test_metrics_with_a_mismatch_refute_equal_tokens(tokens: int) -> None:
    rows = [{"step": step, "train/mismatch_k3_kl": 0.5} for step in range(9)]
    assert diagnose(equal_engines(tokens), rows).cause == "unexplained"


def test_metrics_that_are_nan_refute_equal_tokens() -> None:
    rows = [{"step": step, "train/mismatch_k3_kl": math.nan} for step in range(9)]
    assert diagnose(equal_engines(30), rows).cause == "broken_metrics"


def test_too_few_tokens_are_named_next_to_other_metrics() -> None:
    rows = [{"step": step, "train/loss": 0.1} for step in range(9)]
    (finding,) = diagnose(equal_engines(1), rows).findings
    assert finding.cause == "not_measured"
    assert "at least 30 tokens" in finding.evidence[0]


def test_equal_log_probs_may_be_a_copied_column() -> None:
    (finding,) = diagnose(equal_engines(30)).findings
    assert "one engine's log-probs twice" in finding.evidence[0]


def test_a_masked_dump_is_not_called_a_log() -> None:
    masked = SampleParts(train_log_prob=[-1.0], rollout_log_prob=[-9.0], loss_mask=[0])
    text = as_text(diagnose(TokenTable.from_parts([masked, masked])), "dump")
    assert text.startswith("dump: 2 samples without a trained token")
    assert "none of the 2 tokens is trained: the loss mask is 0" in text


def test_a_masked_dump_is_named_next_to_metrics() -> None:
    masked = SampleParts(train_log_prob=[-1.0], rollout_log_prob=[-9.0], loss_mask=[0])
    rows = [{"step": step, "train/mismatch_k3_kl": 1e-8} for step in range(9)]
    text = as_text(diagnose(TokenTable.from_parts([masked, masked]), rows), "run")
    assert text.startswith("run: 2 samples without a trained token")


def test_flags_in_the_text_are_not_broken() -> None:
    finding = Finding("stale_weights", (), 0.95)
    diagnosis = Diagnosis(
        findings=_ranked([finding], finding), tokens=1, samples=1, mean_abs_log_ratio=1.0
    )
    words = as_text(diagnosis, "dump").split()
    assert "--max-weight-staleness)," in words


def ranked_rounding(confidence: float) -> Finding:
    rounding = Finding(cause="rounding", confidence=confidence, evidence=(), detail="int8")
    (finding,) = _ranked([rounding], Finding("healthy", ()))
    return finding


@pytest.mark.parametrize(
    ("confidence", "names"),
    [pytest.param(0.89, True, id="doubtful"), pytest.param(0.9, False, id="certain")],
)
def test_a_doubtful_finding_names_the_proof(confidence: float, names: bool) -> None:
    fix = ranked_rounding(confidence).fix
    assert ("slime-tis diagnose --hf-checkpoint DIR" in fix) == names


def test_a_title_ends_with_the_detail() -> None:
    assert ranked_rounding(0.9).title.endswith("(int8)")


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_an_advice(cause: str) -> None:
    title = CAUSES[cause].title
    fix = CAUSES[cause].fix
    assert title and fix


TOKEN = st.tuples(st.floats(width=32), st.floats(width=32), st.sampled_from([0, 1]))
"""Both log-probs and the mask of a token."""


@given(st.lists(st.lists(TOKEN, max_size=40), max_size=6))
def test_any_numbers_get_a_diagnosis(samples: list[list[tuple[float, float, int]]]) -> None:
    parts = []
    for step, tokens in enumerate(samples):
        sample = SampleParts(
            train_log_prob=[train for train, _, _ in tokens],
            rollout_log_prob=[rollout for _, rollout, _ in tokens],
            loss_mask=[mask for _, _, mask in tokens],
            weight_version=[0] * len(tokens),
            step=step,
        )
        parts.append(sample)
    result = diagnose(TokenTable.from_parts(parts))
    json.dumps(result.as_json(), allow_nan=False)
