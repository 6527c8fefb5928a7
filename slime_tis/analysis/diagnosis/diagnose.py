"""The causes of a mismatch, ranked from a table of tokens and the metrics of a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slime_tis.analysis.diagnosis import pattern_rules, token_rules
from slime_tis.analysis.diagnosis.causes import CAUSES
from slime_tis.analysis.diagnosis.concentration import affected, concentration
from slime_tis.analysis.diagnosis.metric_rules import (
    CERTAIN,
    MIN_NAMED_CONFIDENCE,
    RUN_RULES,
    health,
    metric_findings,
    run_statistics,
)
from slime_tis.analysis.diagnosis.proof import Proof
from slime_tis.analysis.diagnosis.trained_tokens import (
    MAX_TOKENS,
    MIN_TOKENS,
    Mask,
    Tokens,
    tokens_of,
)
from slime_tis.analysis.diagnosis.weight_rules import sampled_distribution
from slime_tis.analysis.dumps.table import TokenTable, are_log_probs
from slime_tis.health import NEGLIGIBLE_DIFFERENCE, Finding, evaluate

MIN_NAMED_SHARE = 0.8
"""Smallest share that a cause without a proof must explain when samples are scored again; otherwise
the answer is `unexplained`. On the first generator of the study, right causes explain 86 % or more
and wrong ones 78 % or less."""
MIN_UNTESTED_CONFIDENCE = 0.85
"""Smallest confidence of a rule's finding that is named before `unexplained` although a proof
failed, if no hypothesis describes its cause."""
MIN_TESTED_SHARE = 0.1
"""A cause whose best hypothesis removes a smaller share of the mismatch is refuted."""
MIN_CERTAIN_CONFIDENCE = 0.9
"""Below this confidence a finding names the command that proves it."""
PROOF = (
    " To prove it, run `slime-tis diagnose --hf-checkpoint DIR` on the dump: it scores samples"
    " again."
)
MIN_SHARE = 0.05
"""A finding that explains less of the mismatch is no cause, unless it is CERTAIN, such as a NaN. A
share of 0 marks findings that explain no Δ, such as a metric's."""
ENOUGH = 1.0
"""Share of the mismatch that several named causes cover, above which candidates are not shown."""
MIN_SCORE = 0.05
"""Findings with a lower score are dropped."""
ALL_EQUAL = (
    "all log-probs are equal, as with --true-on-policy; a dump that has one engine's log-probs"
    " twice looks the same"
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Findings, ranked by score; the single finding `healthy` if there is no problem."""

    findings: tuple[Finding, ...]
    tokens: int
    """Number of analyzed tokens; 0 without dumps."""
    samples: int
    """Number of samples."""
    mean_abs_log_ratio: float
    """Mean abs(Δ) of tokens with finite log-probs, nats; NaN without tokens."""
    concentration: str = ""
    """Which samples carry the mismatch, as a sentence."""
    rest: TokenTable | None = None
    """The samples to score again: those of the server that differs, if one does. Tokens that
    certain findings explain, and those of samples without a mismatch, have NaN as rollout log-prob.
    None without tokens."""
    rest_share: float = 1.0
    """Share of the mismatch that certain findings leave."""

    @property
    def cause(self) -> str:
        """The top-ranked cause."""
        return self.findings[0].cause

    @property
    def overlaps(self) -> bool:
        """Whether several causes cover the same tokens: their shares add up to more than 1."""
        named = [finding.share for finding in self.findings if finding.cause != "unexplained"]
        # Half a percent more than 1, which the text does not show.
        return self.tokens > 0 and sum(named) > 1.005

    @property
    def server(self) -> str:
        """Name of the rollout server that differs from the others; empty if none does."""
        for finding in self.findings:
            if finding.cause == "worker":
                return finding.detail
        return ""

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = dict(vars(self))
        del values["rest"]
        findings = []
        for finding in self.findings:
            findings.append(asdict(finding) | {"score": finding.score})
        values["findings"] = findings
        if not np.isfinite(self.mean_abs_log_ratio):
            # JSON has no NaN.
            values["mean_abs_log_ratio"] = None
        return values


def diagnose(table: TokenTable | None, metrics: Sequence[Mapping[str, Any]] = ()) -> Diagnosis:
    """Names the causes of a mismatch.

    Args:
        table: Tokens of a dump; None if there is none.
        metrics: Rows of the run's metrics.

    Returns:
        The causes that tokens show, and those that only metrics show.
    """
    if table is None:
        return _diagnose_metrics(metrics)
    if not (table.loss_mask > 0).any():
        return _without_trained_tokens(table, metrics)
    table = table.sampled(MAX_TOKENS)
    tokens = tokens_of(table)
    if not tokens.finite.any():
        return _without_log_probs(table, tokens, metrics)
    findings, is_certain = findings_of(tokens)
    mean = float(np.abs(tokens.log_ratio[tokens.finite]).mean())
    findings += _from_metrics(metrics, findings, mean)
    ranked = _ranked(findings, _without_finding(mean, int(tokens.finite.sum()), metrics))
    if ranked[0].cause == "unexplained":
        distribution = sampled_distribution(tokens)
        if distribution:
            first = replace(ranked[0], evidence=(distribution, *ranked[0].evidence))
            ranked = (first, *ranked[1:])
    which_samples = ""
    if ranked[0].cause != "healthy":
        which_samples = concentration(tokens)
    size = tokens.size
    rest_share = float(size[~is_certain].sum() / max(size.sum(), 1e-12))
    result = Diagnosis(
        findings=ranked,
        tokens=len(tokens),
        samples=len(table),
        mean_abs_log_ratio=mean,
        concentration=which_samples,
        rest_share=rest_share,
    )
    rest = _to_score_again(table, tokens, is_certain, result.server)
    return replace(result, rest=rest)


def _from_metrics(
    metrics: Sequence[Mapping[str, Any]], findings: Sequence[Finding], mean: float
) -> list[Finding]:
    """Returns the findings of a run's metrics that its tokens do not show.

    Args:
        metrics: Rows of the run's metrics.
        findings: Of the tokens.
        mean: Mean abs(Δ) of the tokens, nats.
    """
    of_metrics: Iterable[Finding | None]
    if findings or mean >= NEGLIGIBLE_DIFFERENCE:
        of_metrics = evaluate(RUN_RULES, run_statistics(metrics)).values()
    else:
        # The mismatch may be in steps that the dump does not have.
        of_metrics = metric_findings(metrics)
    causes = {finding.cause for finding in findings}
    added = []
    for finding in of_metrics:
        if finding is not None and finding.cause not in causes:
            added.append(replace(finding, share=0.0))
    return added


def _without_finding(mean: float, tokens: int, metrics: Sequence[Mapping[str, Any]]) -> Finding:
    """Returns the answer if no rule finds anything.

    It is healthy only without a mismatch. Few tokens do not show that: then the metrics of the run
    decide, if there are any.

    Args:
        mean: Mean abs(Δ), nats.
        tokens: Number of tokens with log-probs of both engines.
        metrics: Rows of the run's metrics.
    """
    fact = f"abs(Δ) is {mean:.2g} nats on average over {tokens} tokens"
    if mean >= NEGLIGIBLE_DIFFERENCE:
        return Finding("unexplained", (f"{fact}, without a known cause",), 0.9)
    if tokens >= MIN_TOKENS:
        if mean == 0:
            fact += f"; {ALL_EQUAL}"
        return Finding("healthy", (fact,), 0.9)
    too_few = f"{fact}; at least {MIN_TOKENS} tokens must show that the engines agree"
    if not metrics:
        return Finding("not_measured", (too_few,), confidence=0.0, share=0.0)
    of_metrics = health(metrics)
    return replace(of_metrics, evidence=(too_few, *of_metrics.evidence))


def _to_score_again(table: TokenTable, tokens: Tokens, is_certain: Mask, server: str) -> TokenTable:
    """Returns the samples to score again.

    Args:
        table: The dump.
        tokens: Its trained tokens.
        is_certain: [N] tokens that certain findings explain.
        server: The server that differs from the others; empty if none does.
    """
    # The loss mask stays, because hypotheses on turns read it.
    rollout_log_prob = table.rollout_log_prob.copy()
    trained = np.flatnonzero(table.loss_mask > 0)
    rollout_log_prob[trained[is_certain | ~affected(tokens)]] = np.nan
    rest = replace(table, rollout_log_prob=rollout_log_prob)
    if server:
        # Samples from other servers would hide the cause.
        rest = rest.of_worker(server)
    return rest


def _without_trained_tokens(table: TokenTable, metrics: Sequence[Mapping[str, Any]]) -> Diagnosis:
    """Returns the answer for a dump without a trained token.

    The metrics of the run decide, if there are any.
    """
    if metrics:
        # The number of samples says that there is a dump.
        return replace(_diagnose_metrics(metrics), samples=len(table))
    fact = f"none of the {table.tokens} tokens is trained: the loss mask is 0"
    if not table.tokens:
        fact = f"the responses of all {len(table)} samples are empty"
    finding = Finding("not_measured", (fact,), confidence=0.0, share=0.0)
    return Diagnosis(
        findings=(_described(finding),),
        tokens=0,
        samples=len(table),
        mean_abs_log_ratio=float("nan"),
    )


def _without_log_probs(
    table: TokenTable, tokens: Tokens, metrics: Sequence[Mapping[str, Any]]
) -> Diagnosis:
    """Returns the answer for a dump in which no trained token has log-probs of both engines.

    The metrics of the run decide, if there are any.
    """
    if metrics:
        return _diagnose_metrics(metrics)
    facts = []
    for engine, log_probs in (("training", tokens.train), ("the rollout engine", tokens.rollout)):
        missing = int((~are_log_probs(log_probs)).sum())
        if missing:
            facts.append(f"{missing} of {len(tokens)} trained tokens have no log-prob of {engine}")
    finding = Finding("not_measured", tuple(facts), confidence=0.0, share=0.0)
    return Diagnosis(
        findings=(_described(finding),),
        tokens=len(tokens),
        samples=len(table),
        mean_abs_log_ratio=float("nan"),
    )


def _diagnose_metrics(metrics: Sequence[Mapping[str, Any]]) -> Diagnosis:
    """Names the causes that the metrics of a run show."""
    if metrics:
        findings = _ranked(metric_findings(metrics), health(metrics))
    else:
        nothing = ("there are neither metrics nor tokens",)
        findings = (_described(Finding("not_measured", nothing, confidence=0.0, share=0.0)),)
    return Diagnosis(findings=findings, tokens=0, samples=0, mean_abs_log_ratio=float("nan"))


def with_proof(diagnosis: Diagnosis, proof: Proof) -> Diagnosis:
    """Returns the diagnosis with the result of scoring the rest again.

    Findings of the rules are the prior, and the proof is the evidence:

    - A certain finding stays. Its tokens were not scored again.
    - A proven cause replaces all other findings.
    - Otherwise a cause whose hypotheses remove nothing is refuted. A cause that no hypothesis
      describes keeps its confidence.

    A cause that explains less than MIN_NAMED_SHARE of the mismatch is a candidate after
    `unexplained`.
    """
    if not proof.hypotheses and not proof.causes:
        return diagnosis
    share = min(proof.explained, 1.0)
    is_settled = proof.is_proven or proof.is_noise
    if proof.is_proven:
        confidence = 1.0
    elif proof.is_noise:
        confidence = 0.9
    else:
        confidence = share
    scored = []
    for cause in proof.causes:
        own_share = share * diagnosis.rest_share
        scored.append(Finding(cause, (proof.sentence,), confidence, own_share))
    others = [finding for finding in diagnosis.findings if finding.cause not in proof.causes]
    if is_settled:
        certain = [finding for finding in others if _is_certain(finding)]
        ranked = sorted([*certain, *scored], key=lambda finding: -finding.score)
        return _with_findings(diagnosis, ranked)
    named, candidates = _not_refuted(others, proof.tested)
    remaining = (1 - share) * diagnosis.rest_share
    if share < MIN_NAMED_SHARE and not (named and remaining < MIN_SHARE):
        fact = (proof.sentence,)
        named.append(Finding("unexplained", fact, MIN_CERTAIN_CONFIDENCE, remaining))
    return _with_findings(diagnosis, [*named, *scored, *candidates])


def _not_refuted(
    findings: Sequence[Finding], tested: Mapping[str, float]
) -> tuple[list[Finding], list[Finding]]:
    """Returns the rules' findings that an unsuccessful proof leaves.

    Args:
        findings: Of the rules.
        tested: Largest share of the mismatch that a hypothesis of a cause removes, by cause.

    Returns:
        Findings that stay named: certain ones, and confident ones that no hypothesis describes.
        Candidates.
    """
    named = []
    candidates = []
    for finding in findings:
        if _is_certain(finding):
            named.append(finding)
        elif finding.cause in ("unexplained", "healthy"):
            continue
        elif finding.cause in tested:
            # Noise of arithmetic depends on kernels, so scoring again may show other noise.
            is_noise = finding.cause == "rounding"
            if is_noise or tested[finding.cause] >= MIN_TESTED_SHARE:
                candidates.append(finding)
        elif finding.confidence >= MIN_UNTESTED_CONFIDENCE:
            named.append(finding)
        else:
            candidates.append(finding)
    return named, candidates


def _is_certain(finding: Finding) -> bool:
    """Whether a finding of the rules is a fact, which scoring again cannot refute."""
    if finding.cause in ("unexplained", "healthy"):
        return False
    return finding.cause == "worker" or finding.confidence >= CERTAIN


def _with_findings(diagnosis: Diagnosis, findings: Sequence[Finding]) -> Diagnosis:
    """Returns the diagnosis with other findings; those on a server come first."""
    ordered = [finding for finding in findings if finding.cause == "worker"]
    ordered += [finding for finding in findings if finding.cause != "worker"]
    return replace(diagnosis, findings=tuple(_described(finding) for finding in ordered))


def findings_of(tokens: Tokens) -> tuple[list[Finding], Mask]:
    """Returns all findings of the rules, unordered, and the tokens [N] of the certain ones."""
    deviation = token_rules.deviating_worker(tokens)
    if deviation is not None:
        # First of all, because the tokens of a wrong server would hide the others' pattern.
        finding, of_worker = deviation
        return _findings_with_worker(tokens, finding, of_worker)
    total = max(float(tokens.size.sum()), 1e-12)
    findings = []
    is_certain = np.zeros(len(tokens), bool)
    # `tokens` shrinks below; `rows` has the indices of the remaining ones among all.
    rows = np.arange(len(tokens))
    for token_rule in token_rules.RULES:
        verdict = token_rule(tokens)
        if verdict is not None:
            finding, explained = verdict
            share = float(tokens.size[explained].sum() / total)
            findings.append(replace(finding, share=share))
            is_certain[rows[explained]] = finding.confidence >= CERTAIN
            rows = rows[~explained]
            tokens = tokens.only(~explained)
    tokens = tokens.only(tokens.finite)
    if len(tokens) < MIN_TOKENS:
        return findings, is_certain
    remaining = float(tokens.size.sum()) / total
    for pattern in _patterns(tokens):
        findings.append(replace(pattern, share=pattern.share * remaining))
    return findings, is_certain


def _patterns(tokens: Tokens) -> list[Finding]:
    """Returns the findings of the rules on patterns over all tokens."""
    if float(np.abs(tokens.log_ratio).mean()) < NEGLIGIBLE_DIFFERENCE:
        found = [rule(tokens) for rule in pattern_rules.RULES_WITHOUT_MISMATCH]
    else:
        of_affected = tokens.only(affected(tokens))
        found = [rule(tokens) for rule in pattern_rules.RULES_ON_ALL]
        found += [rule(of_affected) for rule in pattern_rules.RULES_ON_AFFECTED]
    return [pattern for pattern in found if pattern is not None and pattern.confidence]


def _findings_with_worker(
    tokens: Tokens, worker: Finding, of_worker: Mask
) -> tuple[list[Finding], Mask]:
    """Returns the finding on a server with its cause, then the findings on the other servers."""
    is_certain = np.zeros(len(tokens), bool)
    own, is_certain[of_worker] = findings_of(tokens.only(of_worker))
    if own:
        cause = max(own, key=lambda finding: finding.score).cause
        fact = f"the cause that its tokens alone show: {CAUSES[cause].title}"
        worker = replace(worker, evidence=(*worker.evidence, fact))
    findings = [worker]
    others, is_certain[~of_worker] = findings_of(tokens.only(~of_worker))
    for finding in others:
        findings.append(replace(finding, share=finding.share * (1 - worker.share)))
    return findings, is_certain


def _ranked(findings: Sequence[Finding], otherwise: Finding) -> tuple[Finding, ...]:
    """Returns the findings with title and fix, the highest score first; or only `otherwise`."""
    large = []
    for finding in findings:
        is_small = 0 < finding.share < MIN_SHARE and finding.confidence < CERTAIN
        if finding.score >= MIN_SCORE and not is_small:
            large.append(finding)
    if not large:
        return (_described(otherwise),)
    ranked = sorted(large, key=lambda finding: -finding.score)
    named = [finding for finding in ranked if finding.confidence >= MIN_NAMED_CONFIDENCE]
    candidates = [finding for finding in ranked if finding.confidence < MIN_NAMED_CONFIDENCE]
    if not named and ranked[0].cause != "unexplained":
        titles = "; ".join(CAUSES[finding.cause].title for finding in candidates)
        fact = f"other causes make the same pattern, so these are candidates only: {titles}"
        share = min(sum(finding.share for finding in candidates), 1.0)
        named = [Finding("unexplained", (fact,), candidates[0].confidence, share)]
    is_unexplained = any(finding.cause == "unexplained" for finding in named)
    covered = sum(finding.share for finding in named)
    if not is_unexplained and covered > ENOUGH:
        # The named causes explain all of the mismatch, so a shared pattern is no further cause.
        candidates = []
    return tuple(_described(finding) for finding in (*named, *candidates))


def _described(finding: Finding) -> Finding:
    """Returns a finding with title and fix."""
    cause = CAUSES[finding.cause]
    title = cause.title
    fix = cause.fix
    if finding.detail:
        title += f" ({finding.detail})"
    is_cause = finding.cause not in ("not_measured", "broken_metrics")
    if is_cause and finding.confidence < MIN_CERTAIN_CONFIDENCE:
        fix += PROOF
    return replace(finding, title=title, fix=fix)
