"""The causes of a mismatch, ranked from a table of tokens and the metrics of a run."""

import textwrap
from collections.abc import Mapping, Sequence
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
from slime_tis.analysis.diagnosis.trained_tokens import MIN_TOKENS, Tokens, tokens_of
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
"""Title and fix of each cause."""

MIN_NAMED_SHARE = 0.8
"""The same for the share that scoring again explains without a proof: on the first generator of the
study right causes explain 86 % or more, wrong ones 78 % or less."""
MIN_CERTAIN_CONFIDENCE = 0.9
"""Below this confidence a finding names the command that proves it."""
PROOF = (
    " To prove it, run `slime-tis diagnose --hf-checkpoint DIR` on the dump: it scores samples"
    " again."
)
TERMINAL_WIDTH = 100
MIN_SHARE = 0.05
"""A finding that explains less of the mismatch is no cause, unless its confidence is CERTAIN, as of
a NaN. A share of 0 marks findings that explain no Δ, such as a metric's."""
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
        """Whether several causes cover the same tokens, so that their shares add up to more than 1."""
        named = [finding.share for finding in self.findings if finding.cause != "unexplained"]
        return self.tokens > 0 and sum(named) > 1.005

    @property
    def server(self) -> str:
        """The rollout server that differs from the others; empty if none does."""
        return next((finding.detail for finding in self.findings if finding.cause == "worker"), "")

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        findings = [{**asdict(finding), "score": finding.score} for finding in self.findings]
        mean = self.mean_abs_log_ratio if np.isfinite(self.mean_abs_log_ratio) else None
        return {**vars(self), "findings": findings, "mean_abs_log_ratio": mean}


def diagnose(table: TokenTable | None, metrics: Sequence[Mapping[str, Any]] = ()) -> Diagnosis:
    """Names the causes of a mismatch."""
    if table is None or not (table.loss_mask > 0).any():
        if metrics:
            ranked = _ranked(metric_findings(metrics), health(metrics))
        else:
            nothing = Finding(
                "not_measured", ("there are no metrics and no trained tokens",), 0.0, 0.0
            )
            ranked = (_described(nothing),)
        return Diagnosis(findings=ranked, tokens=0, samples=0, mean_abs_log_ratio=float("nan"))
    from_metrics = [
        finding
        for finding in evaluate(RUN_RULES, run_statistics(metrics)).values()
        if finding is not None
    ]
    tokens = tokens_of(table)
    findings = findings_of(tokens)
    causes = {finding.cause for finding in findings}
    findings += [
        replace(finding, share=0.0) for finding in from_metrics if finding.cause not in causes
    ]
    finite = tokens.only(tokens.finite)
    mean = float(np.abs(finite.log_ratio).mean()) if len(finite) else float("nan")
    fact = f"abs(Δ) is {mean:.2g} nats on average over {len(tokens)} tokens, without a known cause"
    ranked = _ranked(findings, Finding("healthy", (fact,), 0.9))
    if ranked[0].cause == "unexplained" and (fact := pattern_rules.sampling(tokens)):
        ranked = (replace(ranked[0], evidence=(fact, *ranked[0].evidence)), *ranked[1:])
    return Diagnosis(
        findings=ranked, tokens=len(tokens), samples=len(table), mean_abs_log_ratio=mean
    )


def with_proof(diagnosis: Diagnosis, proof: Proof) -> Diagnosis:
    """The diagnosis with what scoring again has shown: alone if that settles it, else before the rules' findings.

    A cause that explains less than MIN_NAMED_SHARE of the mismatch, and patterns that no hypothesis
    repeats, are candidates after `unexplained`.
    """
    if not proof.hypotheses and not proof.causes:
        return diagnosis
    share = min(proof.explained, 1.0)
    is_settled = proof.is_proven or proof.is_noise
    confidence = 1.0 if proof.is_proven else 0.9 if is_settled else share
    shown = [Finding(cause, (proof.sentence,), confidence, share) for cause in proof.causes]
    if not is_settled and share < MIN_NAMED_SHARE:
        shown.insert(
            0, Finding("unexplained", (proof.sentence,), MIN_CERTAIN_CONFIDENCE, 1 - share)
        )
    servers = [each for each in diagnosis.findings if each.cause == "worker"]
    known = {"worker", "unexplained", "healthy", *proof.causes}
    others = [
        each
        for each in diagnosis.findings
        if each.cause not in known and each.confidence >= CERTAIN
    ]
    return replace(
        diagnosis, findings=(*servers, *map(_described, shown), *([] if is_settled else others))
    )


def findings_of(tokens: Tokens) -> list[Finding]:
    """All findings of the rules on tokens, unordered."""
    total = max(float(tokens.size.sum()), 1e-12)
    if (deviation := token_rules.deviating_worker(tokens)) is not None:
        finding, of_worker = deviation
        own = max(findings_of(tokens.only(of_worker)), key=lambda each: each.score, default=None)
        alone = (
            ()
            if own is None
            else (f"the cause that its tokens alone show: {CAUSES[own.cause][0]}",)
        )
        others = findings_of(tokens.only(~of_worker))
        remaining = 1 - finding.share
        found = [replace(each, share=each.share * remaining) for each in others]
        return [replace(finding, evidence=finding.evidence + alone), *found]
    findings = []
    for rule in token_rules.RULES:
        if (verdict := rule(tokens)) is not None:
            finding, explained = verdict
            findings.append(replace(finding, share=float(tokens.size[explained].sum() / total)))
            tokens = tokens.only(~explained)
    tokens = tokens.only(tokens.finite)
    if len(tokens) < MIN_TOKENS:
        return findings
    negligible = float(np.abs(tokens.log_ratio).mean()) < NEGLIGIBLE_DIFFERENCE
    remaining = float(tokens.size.sum()) / total
    patterns = [
        rule(tokens)
        for rule in ((pattern_rules.sharper_sampling,) if negligible else pattern_rules.RULES)
    ]
    return findings + [
        replace(each, share=each.share * remaining) for each in patterns if each and each.confidence
    ]


def _ranked(findings: Sequence[Finding], otherwise: Finding) -> tuple[Finding, ...]:
    """The findings with title and fix, the highest score first; `otherwise` if there are none."""
    large = [
        finding
        for finding in findings
        if finding.score >= MIN_SCORE
        and (finding.confidence >= CERTAIN or not 0 < finding.share < MIN_SHARE)
    ]
    ranked = sorted(large, key=lambda each: -each.score)
    sure = [each for each in ranked if each.confidence >= MIN_NAMED_CONFIDENCE]
    candidates = [each for each in ranked if each not in sure]
    if candidates and not sure and ranked[0].cause != "unexplained":
        names = "; ".join(CAUSES[each.cause][0] for each in candidates)
        evidence = (f"other causes make the same pattern, so these are candidates only: {names}",)
        sure = [
            Finding(
                "unexplained",
                evidence,
                candidates[0].confidence,
                min(sum(c.share for c in candidates), 1.0),
            )
        ]
    ranked = [*sure, *candidates]
    return tuple(map(_described, ranked or [otherwise]))


def _described(finding: Finding) -> Finding:
    title, fix = CAUSES[finding.cause]
    title += f" ({finding.detail})" if finding.detail else ""
    is_cause = finding.cause not in ("not_measured", "broken_metrics")
    proof = PROOF if is_cause and finding.confidence < MIN_CERTAIN_CONFIDENCE else ""
    return replace(finding, title=title, fix=fix + proof)


def certainty(finding: Finding, *, has_tokens: bool) -> str:
    """Confidence and share of a finding in words; empty for `not_measured`, which has none."""
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
    """Each finding with cause, confidence, evidence and fix, then the note."""
    tokens = (
        f"{diagnosis.tokens:,} tokens of {diagnosis.samples:,} samples"
        if diagnosis.tokens
        else "only metrics"
    )
    lines = [f"{one_line(name, 200)}: {tokens}"]
    for number, finding in enumerate(diagnosis.findings, start=1):
        lines += ["", f"{number}. {finding.title}"]
        if words := certainty(finding, has_tokens=diagnosis.tokens > 0):
            lines.append(f"   {words}")
        for statement in finding.evidence:
            lines += textwrap.wrap(
                f"- {statement}", TERMINAL_WIDTH, initial_indent="   ", subsequent_indent="     "
            )
        lines += textwrap.wrap(
            f"→ {finding.fix}", TERMINAL_WIDTH, initial_indent="   ", subsequent_indent="     "
        )
    if diagnosis.overlaps:
        lines += ["", *textwrap.wrap(OVERLAP, TERMINAL_WIDTH)]
    if note:
        lines += ["", *textwrap.wrap(note, TERMINAL_WIDTH)]
    return "\n".join(lines)
