"""The causes of a mismatch, ranked from a table of tokens and the metrics of a run."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slime_tis.analysis.diagnosis import pattern_rules, token_rules
from slime_tis.analysis.diagnosis.metric_rules import (
    CERTAIN,
    MIN_NAMED_CONFIDENCE,
    RUN_RULES,
    health,
    metric_findings,
    run_statistics,
)
from slime_tis.analysis.diagnosis.proof import Proof
from slime_tis.analysis.diagnosis.trained_tokens import MIN_TOKENS, Mask, Tokens, tokens_of
from slime_tis.analysis.diagnosis.weight_rules import sampled_distribution
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.errors import one_line
from slime_tis.health import NEGLIGIBLE_DIFFERENCE, Finding, evaluate

CAUSES: dict[str, tuple[str, str]] = {
    "shifted_tokens": (
        "tokens shifted against their log-probs",
        (
            "Compare how both engines index log-probs: log_probs[t] must belong to token t given"
            " the tokens before it. A shift by one usually means a missing or doubled first token"
            " (BOS), or logits that were not moved by one."
        ),
    ),
    "other_prompt": (
        "different prompt or chat template",
        (
            "Print the prompt's token ids in both engines: they condition on different prompts. Use"
            " one chat template and one system prompt, and send token ids instead of text."
        ),
    ),
    "temperature": (
        "log-probs at a different temperature",
        (
            "Score and sample at the same temperature: divide the training logits by"
            " --rollout-temperature, or ask the rollout engine for log-probs after temperature"
            " scaling."
        ),
    ),
    "truncated_sampling": (
        "top-p or top-k truncation",
        (
            "Sample with top-p 1 and without top-k, or record the allowed token sets and train over"
            " them."
        ),
    ),
    "stale_weights": (
        "stale weights",
        (
            "Sample with newer weights (--update-weights-interval 1, a smaller --rollout-lookahead,"
            " --max-weight-staleness), or correct for the age: `slime-tis recommend` names the"
            " correction for a dump."
        ),
    ),
    "weights_not_updated": (
        "weights not updated or only partly updated",
        (
            "Compare the weights of both engines with --check-weight-sync. Tensors are skipped,"
            " sent under a name that the engine ignores, or rounded away (--weight-update-rounding"
            " stochastic)."
        ),
    ),
    "worker": (
        "one rollout server differs from the others",
        (
            "Restart this server or remove it. Compare its version, flags, weights and prefix cache"
            " with the other servers'."
        ),
    ),
    "rounding": (
        "precision of the engines",
        (
            "Low precision makes noise of this size; `slime-tis recommend` says for a dump whether"
            " and how to correct it. To remove it, raise the rollout's precision, or train in fp16"
            " or in the rollout's precision."
        ),
    ),
    "broken_tokens": (
        "a few broken tokens",
        (
            "Look at these tokens in the report: NaN, infinite or absurd log-probs point to a"
            " faulty kernel. Reject their sequences (--rs-veto-threshold) until the engine is"
            " fixed."
        ),
    ),
    "position_drift": (
        "mismatch that grows with position",
        (
            "Compare settings that depend on position: rope_theta and rope scaling, the sliding"
            " window, KV cache precision, context parallelism. Answers that start with the same"
            " template look the same."
        ),
    ),
    "moe_routing": (
        "different expert routing",
        (
            "Replay the rollout's experts in training (--use-rollout-routing-replay), and keep"
            " routers in fp32 in both engines."
        ),
    ),
    "retokenised": (
        "retokenized text",
        (
            "Train on the sampled token ids: decoding and encoding again merges tokens differently."
            " Pass token ids through tools and chat templates (token-in, token-out)."
        ),
    ),
    "mask_mistake": (
        "trained tokens that the policy did not sample",
        (
            "Set loss_mask to 0 on tool output, padding and all other tokens without a rollout"
            " log-prob; these tokens have a placeholder value."
        ),
    ),
    "penalty": (
        "penalty in the sampler or bias of its logits",
        (
            "Switch off penalties, logit bias, banned tokens and minimum lengths, or ask the"
            " rollout engine for log-probs before them: training cannot reproduce them."
        ),
    ),
    "attention_mask": (
        "attention to padding or to other samples",
        (
            "Check the masks: padding is masked, and packed samples are separated (cu_seqlens or"
            " position ids)."
        ),
    ),
    "stale_cache": (
        "cached prompts of older weights",
        (
            "Flush the prefix cache after each weight update (SGLang: flush_cache), before the next"
            " request."
        ),
    ),
    "other_model": (
        "log-probs of another model",
        (
            "Ask for the target model's log-probs: a draft model of speculative decoding must not"
            " report its own."
        ),
    ),
    "dropout": (
        "dropout or unstable kernels",
        (
            "Set attention and hidden dropout to 0, or score in eval mode; else choose"
            " deterministic kernels."
        ),
    ),
    "unexplained": (
        "a mismatch without a pattern of one cause",
        (
            "Compare the two engines on one prompt, with --hf-checkpoint as the reference: model,"
            " tokenizer, weights."
        ),
    ),
    "broken_metrics": (
        "metrics that are not finite or impossible",
        (
            "Look at the first such step: log-probs of one engine are NaN or infinite there, or the"
            " log is damaged or has another metric under this name. These values are left out of"
            " everything else."
        ),
    ),
    "not_measured": (
        "the mismatch was not measured",
        (
            "Log a mismatch metric in every step, or write a dump of both engines' log-probs"
            " (docs/dumps.md)."
        ),
    ),
    "healthy": ("healthy", "Nothing to change."),
}
"""Title and fix by cause."""

MIN_NAMED_SHARE = 0.8
"""Smallest share that a cause without a proof must explain when samples are scored again; otherwise
the answer is `unexplained`. On the first generator of the study, right causes explain 86 % or more
and wrong ones 78 % or less."""
MIN_CERTAIN_CONFIDENCE = 0.9
"""Below this confidence a finding names the command that proves it."""
PROOF = (
    " To prove it, run `slime-tis diagnose --hf-checkpoint DIR` on the dump: it scores samples"
    " again."
)
TERMINAL_WIDTH = 100
"""Columns of the text."""
MIN_SHARE = 0.05
"""A finding that explains less of the mismatch is no cause, unless it is CERTAIN, such as a NaN. A
share of 0 marks findings that explain no Δ, such as a metric's."""
OVERLAP = (
    "The shares add up to more than 100%, because several of these causes cover the same tokens."
)
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

    @property
    def overlaps(self) -> bool:
        """Whether several causes cover the same tokens: their shares add up to more than 1."""
        named = [finding.share for finding in self.findings if finding.cause != "unexplained"]
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
        values["findings"] = [
            asdict(finding) | {"score": finding.score} for finding in self.findings
        ]
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
    if table is None or not (table.loss_mask > 0).any():
        return _diagnose_metrics(metrics)
    tokens = tokens_of(table)
    findings = findings_of(tokens)
    causes = {finding.cause for finding in findings}
    for finding in evaluate(RUN_RULES, run_statistics(metrics)).values():
        if finding is not None and finding.cause not in causes:
            findings.append(replace(finding, share=0.0))
    finite = tokens.only(tokens.finite)
    mean = float("nan")
    if len(finite):
        mean = float(np.abs(finite.log_ratio).mean())
    fact = f"abs(Δ) is {mean:.2g} nats on average over {len(tokens)} tokens, without a known cause"
    ranked = _ranked(findings, Finding("healthy", (fact,), 0.9))
    if ranked[0].cause == "unexplained":
        distribution = sampled_distribution(tokens)
        if distribution:
            first = replace(ranked[0], evidence=(distribution, *ranked[0].evidence))
            ranked = (first, *ranked[1:])
    return Diagnosis(
        findings=ranked, tokens=len(tokens), samples=len(table), mean_abs_log_ratio=mean
    )


def _diagnose_metrics(metrics: Sequence[Mapping[str, Any]]) -> Diagnosis:
    """Names the causes that the metrics of a run show."""
    if metrics:
        findings = _ranked(metric_findings(metrics), health(metrics))
    else:
        nothing = ("there are no metrics and no trained tokens",)
        findings = (_described(Finding("not_measured", nothing, confidence=0.0, share=0.0)),)
    return Diagnosis(findings=findings, tokens=0, samples=0, mean_abs_log_ratio=float("nan"))


def with_proof(diagnosis: Diagnosis, proof: Proof) -> Diagnosis:
    """Returns the diagnosis with the result of scoring again first.

    If scoring again settles the cause, the rules' findings are dropped. A cause that explains less
    than MIN_NAMED_SHARE of the mismatch, and patterns that no hypothesis repeats, are candidates
    after `unexplained`.
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
    proven = []
    if not is_settled and share < MIN_NAMED_SHARE:
        proven.append(Finding("unexplained", (proof.sentence,), MIN_CERTAIN_CONFIDENCE, 1 - share))
    for cause in proof.causes:
        proven.append(Finding(cause, (proof.sentence,), confidence, share))
    findings = [finding for finding in diagnosis.findings if finding.cause == "worker"]
    findings += [_described(finding) for finding in proven]
    if not is_settled:
        replaced = {"worker", "unexplained", "healthy", *proof.causes}
        for finding in diagnosis.findings:
            if finding.cause not in replaced and finding.confidence >= CERTAIN:
                findings.append(finding)
    return replace(diagnosis, findings=tuple(findings))


def findings_of(tokens: Tokens) -> list[Finding]:
    """Returns all findings of the rules on tokens, unordered."""
    deviation = token_rules.deviating_worker(tokens)
    if deviation is not None:
        finding, of_worker = deviation
        return _findings_with_worker(tokens, finding, of_worker)
    total = max(float(tokens.size.sum()), 1e-12)
    findings = []
    for token_rule in token_rules.RULES:
        verdict = token_rule(tokens)
        if verdict is not None:
            finding, explained = verdict
            share = float(tokens.size[explained].sum() / total)
            findings.append(replace(finding, share=share))
            tokens = tokens.only(~explained)
    tokens = tokens.only(tokens.finite)
    if len(tokens) < MIN_TOKENS:
        return findings
    remaining = float(tokens.size.sum()) / total
    rules: Sequence[Callable[[Tokens], Finding | None]] = pattern_rules.RULES
    if float(np.abs(tokens.log_ratio).mean()) < NEGLIGIBLE_DIFFERENCE:
        rules = pattern_rules.RULES_WITHOUT_MISMATCH
    for rule in rules:
        pattern = rule(tokens)
        if pattern is not None and pattern.confidence:
            findings.append(replace(pattern, share=pattern.share * remaining))
    return findings


def _findings_with_worker(tokens: Tokens, worker: Finding, of_worker: Mask) -> list[Finding]:
    """Returns the finding on a server with its cause, then the findings on the other servers."""
    own = findings_of(tokens.only(of_worker))
    if own:
        cause = max(own, key=lambda finding: finding.score).cause
        fact = f"the cause that its tokens alone show: {CAUSES[cause][0]}"
        worker = replace(worker, evidence=(*worker.evidence, fact))
    findings = [worker]
    for finding in findings_of(tokens.only(~of_worker)):
        findings.append(replace(finding, share=finding.share * (1 - worker.share)))
    return findings


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
        titles = "; ".join(CAUSES[finding.cause][0] for finding in candidates)
        fact = f"other causes make the same pattern, so these are candidates only: {titles}"
        share = min(sum(finding.share for finding in candidates), 1.0)
        named = [Finding("unexplained", (fact,), candidates[0].confidence, share)]
    return tuple(_described(finding) for finding in (*named, *candidates))


def _described(finding: Finding) -> Finding:
    """Returns a finding with title and fix."""
    title, fix = CAUSES[finding.cause]
    if finding.detail:
        title += f" ({finding.detail})"
    is_cause = finding.cause not in ("not_measured", "broken_metrics")
    if is_cause and finding.confidence < MIN_CERTAIN_CONFIDENCE:
        fix += PROOF
    return replace(finding, title=title, fix=fix)


def certainty(finding: Finding, *, has_tokens: bool) -> str:
    """Returns confidence and share in words; empty for `not_measured`, which has none."""
    if finding.cause == "not_measured":
        return ""
    confidence = f"confidence {finding.confidence:.0%}"
    if finding.confidence < MIN_NAMED_CONFIDENCE and finding.cause != "unexplained":
        confidence = f"only a candidate: {confidence}"
    if not has_tokens or finding.cause == "healthy":
        return confidence
    if finding.share == 0:
        return f"{confidence}, from the run's metrics"
    return f"{confidence}; its pattern covers {min(finding.share, 1.0):.0%} of the mismatch"


def as_text(diagnosis: Diagnosis, name: str, note: str = "") -> str:
    """Returns each finding with cause, confidence, evidence and fix, then the note."""
    size = "only metrics"
    if diagnosis.tokens:
        size = f"{diagnosis.tokens:,} tokens of {diagnosis.samples:,} samples"
    lines = [f"{one_line(name, 200)}: {size}"]
    for number, finding in enumerate(diagnosis.findings, start=1):
        lines += ["", f"{number}. {finding.title}"]
        confidence = certainty(finding, has_tokens=diagnosis.tokens > 0)
        if confidence:
            lines.append(f"   {confidence}")
        for fact in finding.evidence:
            lines += _indented(f"- {fact}")
        lines += _indented(f"→ {finding.fix}")
    if diagnosis.overlaps:
        lines += ["", *textwrap.wrap(OVERLAP, TERMINAL_WIDTH)]
    if note:
        lines += ["", *textwrap.wrap(note, TERMINAL_WIDTH)]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    """Returns the lines of an item of a list."""
    return textwrap.wrap(text, TERMINAL_WIDTH, initial_indent="   ", subsequent_indent="     ")
