"""Rules as priors and scoring again as evidence: which findings stay, and in which order."""

from dataclasses import replace

import numpy as np
import pytest

from slime_tis.analysis.diagnosis.diagnose import Diagnosis, _ranked, diagnose, with_proof
from slime_tis.analysis.diagnosis.proof import Proof
from slime_tis.health import Finding
from tests.diagnosis.test_diagnose import SAMPLES, TOKENS, Softmax

FAILED = Proof(
    sentence="nothing explains it",
    engine="rollout",
    hypotheses=50,
    tested={"temperature": 0.02, "rounding": 0.4},
)


def diagnosis_of(*findings: Finding, rest_share: float = 1.0) -> Diagnosis:
    return Diagnosis(
        findings=findings,
        tokens=1000,
        samples=50,
        mean_abs_log_ratio=0.1,
        rest_share=rest_share,
    )


def finding(cause: str, confidence: float) -> Finding:
    return Finding(cause, ("a fact",), confidence)


def causes_after(proof: Proof, *findings: Finding, rest_share: float = 1.0) -> list[str]:
    result = with_proof(diagnosis_of(*findings, rest_share=rest_share), proof)
    return [each.cause for each in result.findings]


def test_a_certain_finding_stays_before_unexplained() -> None:
    causes = causes_after(FAILED, finding("mask_mistake", 0.95))
    assert causes == ["mask_mistake", "unexplained"]


def test_a_certain_finding_stands_alone_if_it_leaves_nothing() -> None:
    causes = causes_after(FAILED, finding("mask_mistake", 0.95), rest_share=0.01)
    assert causes == ["mask_mistake"]


def test_a_tested_cause_is_refuted() -> None:
    assert causes_after(FAILED, finding("temperature", 0.85)) == ["unexplained"]


def test_a_partly_confirmed_cause_is_a_candidate() -> None:
    assert causes_after(FAILED, finding("rounding", 0.75)) == ["unexplained", "rounding"]


def test_noise_that_is_not_repeated_stays_a_candidate() -> None:
    proof = replace(FAILED, tested={"rounding": 0.01})
    assert causes_after(proof, finding("rounding", 0.55)) == ["unexplained", "rounding"]


def test_a_confident_cause_without_a_hypothesis_stays() -> None:
    causes = causes_after(FAILED, finding("retokenised", 0.9))
    assert causes == ["retokenised", "unexplained"]


def test_a_doubtful_cause_without_a_hypothesis_is_a_candidate() -> None:
    causes = causes_after(FAILED, finding("moe_routing", 0.7))
    assert causes == ["unexplained", "moe_routing"]


PROVEN = replace(FAILED, causes=("temperature",), explained=0.99, is_proven=True)


def test_a_proven_cause_replaces_a_pattern() -> None:
    assert causes_after(PROVEN, finding("other_prompt", 0.8)) == ["temperature"]


def test_a_proven_cause_joins_a_certain_one() -> None:
    causes = causes_after(PROVEN, finding("mask_mistake", 0.95), rest_share=0.5)
    assert set(causes) == {"temperature", "mask_mistake"}


def test_without_hypotheses_the_diagnosis_stays() -> None:
    empty = Proof(sentence="too few samples", engine="rollout")
    assert causes_after(empty, finding("other_prompt", 0.8)) == ["other_prompt"]


def test_tokens_of_a_certain_finding_are_not_scored_again() -> None:
    model = Softmax()
    rollout = model.noisy(0.1)
    rollout[::3, 6:12] = 0.0
    result = diagnose(model.table(rollout))
    assert result.findings[0].cause == "mask_mistake"
    assert result.rest is not None
    expected = np.ones((SAMPLES, TOKENS), bool)
    expected[::3, 6:12] = False
    assert result.rest.valid.reshape(SAMPLES, TOKENS).tolist() == expected.tolist()


def test_tokens_that_are_not_scored_again_stay_trained() -> None:
    model = Softmax()
    rollout = model.noisy(0.1)
    rollout[::3, 6:12] = 0.0
    result = diagnose(model.table(rollout))
    assert result.rest is not None
    assert result.rest.loss_mask.all()


@pytest.mark.parametrize("value", [np.nan, -np.inf, -9999.0])
@pytest.mark.parametrize("engine", ["train", "rollout"])
def test_a_dump_without_log_probs_is_not_measured(engine: str, value: float) -> None:
    model = Softmax()
    getattr(model, engine)[:] = value
    (finding,) = diagnose(model.table(model.rollout)).findings
    assert (finding.cause, finding.confidence) == ("not_measured", 0.0)
    assert f"{SAMPLES * TOKENS} of {SAMPLES * TOKENS}" in " ".join(finding.evidence)


def test_a_healthy_dump_has_no_concentration() -> None:
    model = Softmax()
    assert diagnose(model.table(model.rollout + 1e-7)).concentration == ""


def test_the_end_token_with_a_placeholder_is_named() -> None:
    model = Softmax()
    token = model.token.copy()
    token[:, -1] = 39
    token[:, :-1] %= 39
    rollout = model.rollout.copy()
    rollout[:, -1] = 0.0
    first = diagnose(model.table(rollout, token=token)).findings[0]
    assert (first.cause, first.confidence) == ("placeholder_log_prob", 0.95)
    assert "exactly 0 for 48 of 48 tokens at the last position" in first.evidence[0]


def test_truncation_that_keeps_tokens_alone_is_no_placeholder() -> None:
    model = Softmax()
    rollout = np.where(model.train > -0.3, 0.0, model.rollout)
    causes = {each.cause for each in diagnose(model.table(rollout)).findings}
    assert "placeholder_log_prob" not in causes


@pytest.mark.parametrize("has_entropy", [True, False])
def test_log_probs_of_the_likeliest_token_are_named(has_entropy: bool) -> None:
    model = Softmax()
    logits = model.logits - model.logits.max(-1, keepdims=True)
    likeliest = -np.log(np.exp(logits).sum(-1))
    table = model.table(likeliest)
    if not has_entropy:
        table = replace(table, entropy=None)
    assert diagnose(table).cause == "argmax_log_prob"


def raw_at_a_low_temperature(has_entropy: bool) -> Diagnosis:
    """Sampled at 0.6 in both engines, but the rollout engine reports log-probs at 1."""
    model = Softmax(sampler=lambda logits, _: logits / 0.6)
    table = model.table(model.at_temperature(1.0))
    cold = model.at_temperature(0.6)
    logits = model.logits / 0.6
    full = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(full) * full).sum(-1)
    table = replace(
        table,
        train_log_prob=cold.reshape(-1).astype(np.float32),
        old_log_prob=cold.reshape(-1).astype(np.float32),
        entropy=entropy.reshape(-1).astype(np.float32),
    )
    if not has_entropy:
        table = replace(table, entropy=None)
    return diagnose(table)


def test_raw_log_probs_are_a_temperature() -> None:
    assert raw_at_a_low_temperature(True).cause == "temperature"


def test_without_entropy_raw_log_probs_are_no_other_model() -> None:
    causes = {finding.cause for finding in raw_at_a_low_temperature(False).findings}
    assert "other_model" not in causes


def by_step(sizes: list[float], *, one_version: bool = False) -> Diagnosis:
    """Steps of six samples with noise of a size; the newest weights sample every step."""
    model = Softmax(samples=6 * len(sizes))
    step = model.samples // 6
    rollout = model.noisy(np.array(sizes)[step][:, None, None])
    version = model.per_token(0 * step if one_version else step)
    return diagnose(model.table(rollout, step=step, weight_version=version))


def test_equal_engines_at_first_have_different_weights_later() -> None:
    first = by_step([0.0, 0.05, 0.1, 0.15]).findings[0]
    assert (first.cause, first.confidence) == ("weights_not_updated", 0.92)


def test_a_jump_in_a_later_step_is_no_missing_update() -> None:
    first = by_step([0.0, 0.0, 0.0, 0.1, 0.1, 0.1]).findings[0]
    assert first.cause == "unexplained"


def test_a_constant_mismatch_after_the_first_step_is_a_candidate() -> None:
    causes = [each.cause for each in by_step([0.0, 0.1, 0.1, 0.1, 0.1]).findings]
    assert causes[0] == "unexplained"
    assert "weights_not_updated" in causes


def test_a_short_run_of_one_version_is_stale() -> None:
    causes = [each.cause for each in by_step([0.0, 0.05, 0.1, 0.15], one_version=True).findings]
    assert causes[0] == "stale_weights"
    assert "weights_not_updated" not in causes


def groups(noisy_train: float, noisy_rollout: float, samples: np.ndarray) -> Diagnosis:
    """Pairs of samples of one prompt with equal tokens, of which some are scored with noise."""
    model = Softmax(paired=True)
    is_noisy = np.isin(model.samples, samples)[:, None, None]
    train = model.noisy(noisy_train * is_noisy)
    rollout = model.noisy(noisy_rollout * is_noisy)
    table = model.table(rollout, prompt=model.samples[:, None] // 2)
    table = replace(table, train_log_prob=train.reshape(-1).astype(np.float32))
    return diagnose(replace(table, old_log_prob=table.train_log_prob))


def causes_of(diagnosis: Diagnosis) -> set[str]:
    return {each.cause for each in diagnosis.findings}


def test_two_noisy_engines_are_not_unstable() -> None:
    assert "dropout" not in causes_of(groups(0.3, 0.3, np.arange(SAMPLES)))


def test_a_few_wrong_samples_are_not_dropout() -> None:
    assert "dropout" not in causes_of(groups(0.0, 0.6, np.arange(0, SAMPLES, 4)))


def test_a_large_mismatch_without_a_pattern_is_not_healthy() -> None:
    model = Softmax()
    # One sign, and more than any precision makes.
    rollout = model.train + 0.5 + model.chance.random(model.train.shape)
    assert diagnose(model.table(rollout)).cause != "healthy"


@pytest.mark.parametrize(
    ("share", "causes"),
    [
        pytest.param(0.95, ["stale_weights", "rounding"], id="explained"),
        pytest.param(0.5, ["stale_weights", "rounding", "position_drift"], id="a part is open"),
    ],
)
def test_candidates_need_an_open_part(share: float, causes: list[str]) -> None:
    named = Finding("stale_weights", ("a fact",), 0.93, share)
    candidate = Finding("position_drift", ("a fact",), 0.6, 0.1)
    noise = Finding("rounding", ("a fact",), 0.75, 0.2)
    ranked = _ranked([named, noise, candidate], Finding("healthy", ()))
    assert [each.cause for each in ranked] == causes
