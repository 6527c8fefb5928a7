"""From a table of tokens, and the metrics of a run, to the causes of its mismatch, ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slime_tis.analysis.diagnosis import form_rules, metric_rules, token_rules
from slime_tis.analysis.diagnosis.causes import describe
from slime_tis.analysis.diagnosis.tokens import MIN_TOKENS, Tokens, tokens_of
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.rules import Finding

TOKEN_RULES = (token_rules.mask_mistake, token_rules.misaligned, token_rules.broken_tokens)
"""Rules that take their tokens out, in this order."""
FORM_RULES = (
    form_rules.weights_not_updated,
    form_rules.stale_weights,
    form_rules.temperature,
    form_rules.truncated_sampling,
    form_rules.position,
    form_rules.moe_routing,
    form_rules.rounding,
)
"""Rules that see the other tokens, all of them the same."""
MIN_SCORE = 0.05
"""Score below which a finding is left out."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong, the likeliest and largest cause first; one finding `healthy` where nothing is."""

    findings: tuple[Finding, ...]
    tokens: int
    """Trained tokens that were looked at; 0 where there were metrics alone."""
    samples: int
    """Their samples."""
    mean_abs_log_ratio: float
    """Mean abs(Δ) of the finite tokens, nats; NaN without tokens."""

    @property
    def cause(self) -> str:
        """The first cause."""
        return self.findings[0].cause

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        findings = [{**asdict(finding), "score": finding.score} for finding in self.findings]
        mean = self.mean_abs_log_ratio if np.isfinite(self.mean_abs_log_ratio) else None
        return {**vars(self), "findings": findings, "mean_abs_log_ratio": mean}


def diagnose(table: TokenTable | None, metrics: Sequence[Mapping[str, Any]] = ()) -> Diagnosis:
    """Names the causes of a mismatch.

    Args:
        table: Tokens of a dump; None where a run wrote none, and its metrics are all there is.
        metrics: Rows of metrics.jsonl.
    """
    from_metrics = metric_rules.findings(metrics)
    if table is None or not (table.loss_mask > 0).any():
        return Diagnosis(
            findings=_ranked(from_metrics, "no cause in the metrics; dumps of tokens show more"),
            tokens=0,
            samples=0,
            mean_abs_log_ratio=float("nan"),
        )
    tokens = tokens_of(table)
    found = findings_of(tokens)
    known = {finding.cause for finding in found}
    found += [replace(finding, share=0.0) for finding in from_metrics if finding.cause not in known]
    finite = tokens.only(tokens.finite)
    mean = float(np.abs(finite.log_ratio).mean()) if len(finite) else float("nan")
    healthy = f"abs(Δ) is {mean:.2g} nats on average over {len(tokens)} tokens, and no cause was found"
    return Diagnosis(findings=_ranked(found, healthy), tokens=len(tokens), samples=len(table), mean_abs_log_ratio=mean)


def findings_of(tokens: Tokens) -> list[Finding]:
    """All findings of the rules on tokens, in no order."""
    total = float(tokens.size.sum())
    found = []
    for rule in TOKEN_RULES:
        finding, explained = rule(tokens, total)
        if finding is not None:
            found.append(finding)
            tokens = tokens.only(~explained)
    tokens = tokens.only(tokens.finite)
    if len(tokens) < MIN_TOKENS:
        return found
    size = float(np.abs(tokens.log_ratio).mean())
    if size < form_rules.NEGLIGIBLE:
        return [*found, *filter(None, [form_rules.sharper_sampling(tokens)])]
    left = float(tokens.size.sum()) / total
    forms = [finding for rule in FORM_RULES if (finding := rule(tokens)) is not None]
    return found + [replace(finding, share=finding.share * left) for finding in forms]


def _ranked(findings: Sequence[Finding], healthy_evidence: str) -> tuple[Finding, ...]:
    ranked = sorted((finding for finding in findings if finding.score >= MIN_SCORE), key=lambda f: -f.score)
    healthy = Finding(cause="healthy", confidence=0.9, evidence=(healthy_evidence,))
    return tuple(map(describe, ranked or [healthy]))
