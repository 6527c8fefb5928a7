"""Ranks the causes of a mismatch from a table of tokens and the metrics of a run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slime_tis.analysis.diagnosis import form_rules, metric_rules, token_rules
from slime_tis.analysis.diagnosis.causes import describe
from slime_tis.analysis.diagnosis.tokens import MIN_TOKENS, Tokens, tokens_of
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.errors import one_line
from slime_tis.rules import Finding

TOKEN_RULES = (token_rules.mask_mistake, token_rules.misaligned, token_rules.broken_tokens)
"""Rules that remove the tokens they explain, in this order."""
FORM_RULES = (
    form_rules.weights_not_updated,
    form_rules.stale_weights,
    form_rules.temperature,
    form_rules.truncated_sampling,
    form_rules.position,
    form_rules.moe_routing,
    form_rules.rounding,
)
"""Rules on the remaining tokens."""
TERMINAL_WIDTH = 100
MIN_SCORE = 0.05
"""Findings with a lower score are dropped."""


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

    @property
    def cause(self) -> str:
        """The top-ranked cause."""
        return self.findings[0].cause

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        findings = [{**asdict(finding), "score": finding.score} for finding in self.findings]
        mean = self.mean_abs_log_ratio if np.isfinite(self.mean_abs_log_ratio) else None
        return {**vars(self), "findings": findings, "mean_abs_log_ratio": mean}


def diagnose(table: TokenTable | None, metrics: Sequence[Mapping[str, Any]] = ()) -> Diagnosis:
    """Names the causes of a mismatch."""
    from_metrics = metric_rules.findings(metrics)
    if table is None or not (table.loss_mask > 0).any():
        return Diagnosis(
            findings=_ranked(from_metrics, "the metrics show no cause; dumps of tokens show more"),
            tokens=0,
            samples=0,
            mean_abs_log_ratio=float("nan"),
        )
    tokens = tokens_of(table)
    findings = findings_of(tokens)
    causes = {finding.cause for finding in findings}
    findings += [replace(finding, share=0.0) for finding in from_metrics if finding.cause not in causes]
    finite = tokens.only(tokens.finite)
    mean = float(np.abs(finite.log_ratio).mean()) if len(finite) else float("nan")
    healthy = f"abs(Δ) is {mean:.2g} nats on average over {len(tokens)} tokens, without a known cause"
    ranked = _ranked(findings, healthy)
    return Diagnosis(findings=ranked, tokens=len(tokens), samples=len(table), mean_abs_log_ratio=mean)


def findings_of(tokens: Tokens) -> list[Finding]:
    """All findings of the rules on tokens, unordered."""
    total = float(tokens.size.sum())
    findings = []
    for rule in TOKEN_RULES:
        finding, explained = rule(tokens, total)
        if finding is not None:
            findings.append(finding)
            tokens = tokens.only(~explained)
    tokens = tokens.only(tokens.finite)
    if len(tokens) < MIN_TOKENS:
        return findings
    if float(np.abs(tokens.log_ratio).mean()) < form_rules.NEGLIGIBLE:
        return [*findings, *filter(None, [form_rules.sharper_sampling(tokens)])]
    remaining = float(tokens.size.sum()) / total
    patterns = [finding for rule in FORM_RULES if (finding := rule(tokens)) is not None]
    return findings + [replace(finding, share=finding.share * remaining) for finding in patterns]


def _ranked(findings: Sequence[Finding], healthy_evidence: str) -> tuple[Finding, ...]:
    ranked = sorted((finding for finding in findings if finding.score >= MIN_SCORE), key=lambda f: -f.score)
    healthy = Finding(cause="healthy", confidence=0.9, evidence=(healthy_evidence,))
    return tuple(map(describe, ranked or [healthy]))


def as_text(diagnosis: Diagnosis, name: str, note: str = "") -> str:
    """Each finding with cause, confidence, evidence and fix, then the note."""
    tokens = f"{diagnosis.tokens:,} tokens of {diagnosis.samples:,} samples" if diagnosis.tokens else "metrics alone"
    lines = [f"{one_line(name, 200)}: {tokens}"]
    for number, finding in enumerate(diagnosis.findings, start=1):
        lines += ["", f"{number}. {finding.title}"]
        lines.append(f"   confidence {finding.confidence:.0%}, {finding.share:.0%} of the mismatch")
        for statement in finding.evidence:
            lines += textwrap.wrap(f"- {statement}", TERMINAL_WIDTH, initial_indent="   ", subsequent_indent="     ")
        lines += textwrap.wrap(f"→ {finding.fix}", TERMINAL_WIDTH, initial_indent="   ", subsequent_indent="     ")
    if note:
        lines += ["", *textwrap.wrap(note, TERMINAL_WIDTH)]
    return "\n".join(lines)
