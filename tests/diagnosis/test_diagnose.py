"""Causes planted into the log-probs of a small softmax model, and the diagnosis of each."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.analysis.diagnosis import CAUSES, Diagnosis, diagnose
from slime_tis.analysis.diagnosis.diagnose import _ranked, as_text
from slime_tis.analysis.diagnosis.engine_rules import reported_grid
from slime_tis.analysis.diagnosis.shift_rules import best_lags
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.health import Finding

SAMPLES, TOKENS, VOCABULARY = 48, 32, 40


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


class Softmax:
    """Random logits for each token of each sample, tokens drawn by a sampler, and both engines' log-probs."""

    def __init__(
        self, seed: int = 0, sampler: Sampler = lambda logits, _: logits, *, paired: bool = False
    ) -> None:
        chance = np.random.default_rng(seed)
        self.chance = chance
        self.logits = 2.5 * chance.normal(size=(SAMPLES, TOKENS, VOCABULARY))
        uniform = chance.random((SAMPLES, TOKENS, 1))
        if paired:  # two samples of a prompt have the same tokens until noise makes them differ
            self.logits[1::2], uniform[1::2] = self.logits[::2], uniform[::2]
        self.token = np.zeros((SAMPLES, TOKENS), int)
        sampled = np.empty(self.logits.shape)
        for t in range(TOKENS):
            sampled[:, t] = log_softmax(sampler(self.logits[:, t], self.token[:, :t]))
            drawn = (np.exp(sampled[:, t]).cumsum(-1) < uniform[:, t]).sum(-1)
            self.token[:, t] = drawn.clip(max=VOCABULARY - 1)
        full = log_softmax(self.logits)
        self.train, self.rollout = self.of(full), self.of(sampled)
        self.entropy = -(np.exp(full) * full).sum(-1)

    def of(self, log_probs: np.ndarray) -> np.ndarray:
        return np.take_along_axis(log_probs, self.token[..., None], -1)[..., 0]

    def noisy(self, size: float | np.ndarray) -> np.ndarray:
        return self.of(log_softmax(self.logits + size * self.chance.normal(size=self.logits.shape)))

    def table(self, rollout: np.ndarray, **columns: np.ndarray) -> TokenTable:
        columns |= {"train_log_prob": self.train, "rollout_log_prob": rollout}
        columns |= {"entropy": self.entropy, "token": self.token}
        parts = [
            SampleParts(**{name: values[i] for name, values in columns.items()})
            for i in range(SAMPLES)
        ]
        return TokenTable.from_parts(parts)


def planted(name: str) -> TokenTable:  # noqa: C901, PLR0915
    model = Softmax(sampler=SAMPLERS.get(name, lambda logits, _: logits), paired=name == "unstable")
    rollout = model.rollout.copy()
    step, position = np.full(SAMPLES, 7), np.arange(TOKENS)
    columns: dict[str, np.ndarray] = {}
    match name:
        case "shift":
            rollout = np.roll(rollout, 1, axis=1)
        case "retokenized":
            for i in range(0, SAMPLES, 2):
                at = 6 + i % 11
                rollout[i, at:] = np.roll(rollout[i, at:], 1)
        case "reported temperature":
            rollout = model.of(log_softmax(model.logits / 0.8))
        case "draft":
            rollout = model.noisy(1.0)
        case "unstable":
            columns = {"prompt": np.arange(SAMPLES)[:, None] // 2}
        case "stale":
            version = np.where(np.arange(SAMPLES) % 2, 7, 4)[:, None].repeat(TOKENS, 1)
            rollout = model.noisy(np.where(version == 7, 0.005, 0.1)[..., None])
            columns = {"step": step, "weight_version": version}
        case "stale, certain first tokens":
            old = (np.arange(SAMPLES) % 4 > 0)[:, None]
            rollout = model.noisy(
                (np.where(old, 0.1, 0.02) * np.where(position < 4, 0.05, 1))[..., None]
            )
            columns = {"step": step, "weight_version": np.where(old, 6, 7).repeat(TOKENS, 1)}
        case "never updated":
            step = np.arange(SAMPLES) // 8
            rollout = model.noisy(0.03 * (1 + step)[:, None, None])
            columns = {"step": step, "weight_version": step[:, None].repeat(TOKENS, 1)}
        case "bf16":
            rollout = model.noisy(0.01)
        case "fp8":
            rollout = model.noisy(0.2)
        case "fp8, certain first token":
            rollout = model.noisy(0.2)
            rollout[:, 0] = model.train[:, 0] = -0.001
        case "NaN":
            rollout[3, 4] = np.nan
        case "-30 nats":
            rollout[::7, 5] = -30.0 + np.arange(len(rollout[::7])) / 10
        case "position":
            rollout = model.noisy(0.004 * (1 + position)[:, None])
        case "prompt":
            rollout = model.noisy(0.4 / (1 + position)[:, None])
        case "routing":
            other = model.chance.random((SAMPLES, TOKENS, 1)) < 0.08
            rollout = model.noisy(np.where(other, 0.5, 0.002))
            columns = {"experts": np.zeros((SAMPLES, TOKENS, 2, 2), int)}
        case "tool output":
            rollout[::3, 6:12] = 0.0
        case "fp32":
            rollout = rollout + 1e-6 * model.chance.normal(size=rollout.shape)
    return model.table(rollout, **columns)


PLANTED = {
    "shift": "shifted_tokens",
    "retokenized": "retokenised",
    "temperature": "temperature",
    "reported temperature": "temperature",
    "top-p": "truncated_sampling",
    "presence penalty": "penalty",
    "frequency penalty": "penalty",
    "repetition penalty": "penalty",
    "repetition raised": "penalty",
    "logit bias": "penalty",
    "banned token": "truncated_sampling",  # both have Δ = log(kept mass)
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


@pytest.mark.parametrize(("name", "cause"), PLANTED.items(), ids=PLANTED)
def test_the_planted_cause_comes_first(name: str, cause: str) -> None:
    found = diagnose(planted(name))
    is_candidate = name.split(",")[0] in (
        "never updated",
        "bf16",
        "fp8",
        "position",
        "prompt",
    )  # or other causes
    assert (found.cause == "unexplained") == is_candidate
    first = found.findings[is_candidate]
    assert first.cause == cause, [
        (finding.cause, finding.score, finding.evidence) for finding in found.findings
    ]
    assert (
        first.evidence
        and first.title
        and first.fix
        and 0 < first.confidence <= 1
        and 0 <= first.share <= 1
    )
    json.dumps(found.as_json(), allow_nan=False)
    assert first.title in as_text(found, "a run")
    details = {
        "temperature": "rollout/training ≈ 0.82",
        "logit bias": "bias of token 7",
    }  # planted: 0.80
    assert name not in details or first.detail == details[name]


@pytest.mark.parametrize(
    ("precisions", "noise", "named", "words"),
    [
        (("fp32", "int8"), 0.03, ("rounding", "int8"), "which fits"),
        (("fp32", "bf16"), 0.01, ("rounding", "bf16"), "which fits"),
        (("bf16", "fp32"), 0.01, ("rounding", "bf16"), "which fits"),
        (("fp32", "bf16"), 0.2, ("unexplained", ""), "noise of another size"),
        (("fp32", "fp32"), 0.003, ("unexplained", ""), "something else rounds"),
        (("fp32", None), 0.003, ("unexplained", ""), "candidates only: precision"),
    ],
    ids=["int8", "bf16", "bf16 training", "too large", "fp32", "unknown"],
)
def test_precisions_in_the_metadata_are_evidence(precisions, noise, named, words) -> None:
    model = Softmax()
    table = model.table(model.noisy(noise))
    metadata = {"precision": precisions[0], "rollout_precision": precisions[1]}
    first = diagnose(replace(table, metadata=metadata)).findings[0]
    assert (first.cause, first.detail) == named
    assert words in first.evidence[-1]


@pytest.mark.parametrize(
    ("metadata", "experts", "cause"),
    [
        ({}, True, "moe_routing"),
        ({"num_experts": 8, "replays_experts": False}, False, "moe_routing"),
        ({"num_experts": 8, "replays_experts": True}, True, "unexplained"),
        ({"num_experts": 0, "replays_experts": False}, False, "unexplained"),
    ],
    ids=["recorded", "in metadata", "replayed", "dense"],
)
def test_routing_is_a_cause_if_experts_may_differ(
    metadata: dict, experts: bool, cause: str
) -> None:
    table = planted("routing")
    table = replace(table, metadata=metadata, experts=table.experts if experts else None)
    assert diagnose(table).cause == cause


def test_stale_tokens_of_a_long_step_are_not_broken() -> None:
    model = Softmax()
    step = 1 + np.arange(SAMPLES) // 3
    long = step == 3  # it moved the policy far from the weights that sampled
    rollout = model.noisy(np.where(long, 1.2, 0.02)[:, None, None])
    apart = np.abs(model.train - rollout)
    assert (apart[long] > 3).any() and apart[~long].max() < 0.1

    def causes(age: np.ndarray) -> set[str]:
        table = model.table(
            rollout, step=step, weight_version=(step - age)[:, None].repeat(TOKENS, 1)
        )
        return {finding.cause for finding in diagnose(table).findings}

    stale = step % 2
    assert "broken_tokens" not in causes(stale)
    assert "broken_tokens" in causes(0 * stale)  # where the newest weights sampled
    rollout[step == 5, 7] = -30.0
    assert "broken_tokens" in causes(stale)


def test_wrong_servers_of_four_are_named_with_the_cause_on_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "SAMPLES", 120)
    model = Softmax()
    worker = np.arange(SAMPLES)[:, None].repeat(TOKENS, 1) % 4
    warm = model.of(log_softmax(model.logits / 0.9))
    table = model.table(np.where(worker == 2, warm, model.noisy(0.02)), rollout_worker=worker)
    for workers, name in ([], "server 2"), (["a", "b", "http://c:1", "d"], "http://c:1"):
        first, second = diagnose(replace(table, metadata={"workers": workers})).findings
        assert (first.cause, first.detail, second.cause) == ("worker", name, "rounding")
        assert "different temperature" in first.evidence[-1] and first.share > 0.5
    two = np.where(np.isin(worker, [0, 2]), warm, model.noisy(0.02))
    findings = diagnose(model.table(two, rollout_worker=worker)).findings
    assert {each.detail for each in findings if each.cause == "worker"} == {"server 0", "server 2"}


@pytest.mark.parametrize("seed", range(5))
def test_equal_servers_are_not_blamed(seed: int) -> None:
    model = Softmax(seed)
    rollout = model.noisy(0.02)
    rollout[7] = model.noisy(0.5)[7]  # one sample of a server, by chance
    worker = np.arange(SAMPLES)[:, None].repeat(TOKENS, 1) % 4
    assert diagnose(model.table(rollout, rollout_worker=worker)).cause != "worker"


@pytest.mark.parametrize("servers", [1, 2])
def test_tokens_of_unknown_servers_are_no_server(servers: int) -> None:
    model = Softmax()
    is_warm = np.arange(SAMPLES)[:, None].repeat(TOKENS, 1) % 3 == 0
    worker = np.where(is_warm, -1, np.arange(SAMPLES)[:, None] % servers)
    rollout = np.where(is_warm, model.of(log_softmax(model.logits / 0.9)), model.noisy(0.002))
    assert diagnose(model.table(rollout, rollout_worker=worker)).cause != "worker"


def test_a_constant_is_another_unit_and_a_nearly_constant_kept_mass_is_truncation() -> None:
    model = Softmax()
    assert diagnose(model.table(model.train + 0.03)).cause == "broken_tokens"
    mass = 0.03 - 0.001 * model.chance.random(model.train.shape)
    assert diagnose(model.table(model.train + mass)).cause == "truncated_sampling"


@pytest.mark.parametrize(
    ("noise", "causes"), [(0.02, ["stale_weights", "rounding"]), (1e-6, ["stale_weights"])]
)
def test_precision_is_measured_on_the_newest_weights(noise: float, causes: list[str]) -> None:
    model = Softmax()
    ages = (np.arange(SAMPLES) % 3)[:, None].repeat(TOKENS, 1)
    rollout = model.noisy((noise + 0.1 * ages)[..., None])
    found = diagnose(
        model.table(rollout, weight_version=7 - ages, step=np.full(SAMPLES, 7))
    ).findings
    assert [finding.cause for finding in found] == causes
    for finding in found[1:]:
        assert finding.detail == "bf16 or int8" and 0.1 < finding.share < 0.5
        assert "on tokens from the newest weights" in finding.evidence[0]


@pytest.mark.parametrize(
    ("samples", "tokens"), [(900, 32), (20, 1500)], ids=["many samples", "long samples"]
)
@pytest.mark.parametrize(
    ("name", "cause"),
    [("shift", "shifted_tokens"), ("retokenized", "retokenised")],
    ids=lambda value: value,
)
def test_a_shift_explains_the_whole_mismatch_of_a_large_dump(
    name, cause, samples, tokens, monkeypatch
) -> None:
    monkeypatch.setitem(globals(), "SAMPLES", samples)
    monkeypatch.setitem(globals(), "TOKENS", tokens)
    (finding,) = diagnose(planted(name)).findings
    assert finding.cause == cause and finding.share > 0.98


def test_a_partial_shift_leaves_other_causes_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SAMPLES", 900)
    model = Softmax()
    rollout = model.noisy(0.2)
    rollout[::5] = np.roll(rollout[::5], 1, axis=1)
    assert [finding.cause for finding in diagnose(model.table(rollout)).findings] == [
        "shifted_tokens",
        "rounding",
    ]


def test_masked_tokens_are_ignored() -> None:
    model = Softmax()
    mask = np.ones((SAMPLES, TOKENS))
    mask[:, 8:16] = 0
    rollout = model.rollout.copy()
    rollout[:, 8:16] = -30.0
    rollout[:, 9] = np.nan
    found = diagnose(model.table(rollout, loss_mask=mask))
    assert (found.cause, found.tokens) == ("healthy", SAMPLES * (TOKENS - 8))


def test_lags_of_a_sample_by_hand() -> None:
    train = np.array([-1.0, -7.0, -2.0, -9.0, -3.0, -8.0, -4.0, -6.0])
    rollout = np.array([-1.0, -7.0, -2.0, 0.0, -9.0, -3.0, -8.0, -4.0])
    lags, saved, left = best_lags(train, rollout)
    assert lags.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    # the unshifted costs; the last token has no partner
    assert saved == pytest.approx(5 + 5 + 5 + 4)
    assert left == 0
    train[-2] = -4.5
    assert best_lags(train, rollout)[1:] == pytest.approx((5 + 5 + 5 + 3.5 - 0.5, 0.5 / 18.5))
    train = np.concatenate([np.full(20, -1.0), -0.5 * np.arange(6, 12)])
    rollout = np.concatenate([np.full(20, -1.0), np.zeros(6)])
    lags, saved, left = best_lags(train, rollout)
    assert lags[-6:].tolist() == [6] * 6  # these tokens have no partner
    assert (saved, left) == (0, 1)


def test_16_bit_log_probs_are_recognized() -> None:
    values = (-np.random.default_rng(0).exponential(size=200)).astype(np.float32)
    bf16 = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    for log_probs, grid in ((values, ""), (values.astype(np.float16), "fp16"), (bf16, "bf16")):
        assert reported_grid(log_probs.astype(np.float64)) == grid


def test_empty_input_is_not_judged() -> None:
    assert diagnose(None).cause == "not_measured"
    empty = TokenTable.from_parts([SampleParts(train_log_prob=[], rollout_log_prob=[])])
    assert diagnose(empty).cause == "not_measured"
    masked = TokenTable.from_parts(
        [SampleParts(train_log_prob=[-1.0], rollout_log_prob=[-9.0], loss_mask=[0])]
    )
    assert diagnose(masked).cause == "not_measured"


@pytest.mark.parametrize(
    ("confidence", "names"), [(0.89, True), (0.9, False)], ids=["doubtful", "certain"]
)
def test_a_doubtful_finding_names_the_command_that_proves_it(
    confidence: float, names: bool
) -> None:
    rounding = Finding(cause="rounding", confidence=confidence, evidence=(), detail="int8")
    (finding,) = _ranked([rounding], Finding("healthy", ()))
    assert (
        "slime-tis diagnose --hf-checkpoint DIR" in finding.fix
    ) == names and finding.title.endswith("(int8)")
    assert all(title and fix for title, fix in CAUSES.values())


@given(
    st.lists(
        st.lists(
            st.tuples(st.floats(width=32), st.floats(width=32), st.sampled_from([0, 1])),
            max_size=40,
        ),
        max_size=6,
    )
)
def test_any_numbers_get_a_diagnosis(samples: list[list[tuple[float, float, int]]]) -> None:
    parts = []
    for step, rows in enumerate(samples):
        train, rollout, mask = zip(*rows, strict=True) if rows else ((), (), ())
        version = [0] * len(rows)
        parts.append(
            SampleParts(
                train_log_prob=train,
                rollout_log_prob=rollout,
                loss_mask=mask,
                weight_version=version,
                step=step,
            )
        )
    found: Diagnosis = diagnose(TokenTable.from_parts(parts))
    json.dumps(found.as_json(), allow_nan=False)
