"""The causes of a mismatch that can be named, and what a finding of one is."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause: its title, and what to change."""

    title: str
    fix: str


CAUSES: dict[str, Cause] = {
    "shifted_tokens": Cause(
        title="tokens shifted against their log-probs",
        fix="Compare how both sides index log-probs: log_probs[t] must be of token t given the tokens before it. A "
        "shift by one usually is a missing or doubled first token (BOS) or logits that were not moved by one.",
    ),
    "other_prompt": Cause(
        title="another prompt or chat template",
        fix="Print the prompt's token ids on both sides: the engines condition on different prompts. Use one chat "
        "template, one system prompt, and send token ids instead of text.",
    ),
    "temperature": Cause(
        title="log-probs of another temperature",
        fix="Score and sample at one temperature: divide the training logits by --rollout-temperature, or ask the "
        "rollout engine for log-probs after temperature scaling.",
    ),
    "truncated_sampling": Cause(
        title="top-p or top-k truncation",
        fix="Sample with top-p 1 and top-k off, or record the sets of tokens that could be sampled and train over "
        "them.",
    ),
    "stale_weights": Cause(
        title="stale weights",
        fix="Correct for it (--use-tis, or --use-rollout-logprobs), or sample with newer weights: "
        "--update-weights-interval 1, a smaller --rollout-lookahead, --max-weight-staleness.",
    ),
    "weights_not_updated": Cause(
        title="weights never or only partly updated",
        fix="Compare the weights of both engines with --check-weight-sync: tensors are skipped, sent under a name "
        "that the engine ignores, or rounded away (--weight-update-rounding stochastic).",
    ),
    "rounding": Cause(
        title="precision of the engines",
        fix="Noise of this size is what low precision makes; correct for it with --use-tis. To remove it, raise the "
        "rollout's precision, or train in fp16 or in the rollout's precision.",
    ),
    "broken_tokens": Cause(
        title="a few broken tokens",
        fix="Look at these tokens in the report: NaN, infinite or absurd log-probs point to a kernel. Reject their "
        "sequences (--rs-veto-threshold) until the engine is repaired.",
    ),
    "position_drift": Cause(
        title="mismatch that grows with position",
        fix="Compare what depends on position: rope_theta and rope scaling, the sliding window, precision of the KV "
        "cache, context parallelism. Answers that begin alike, with a template, look the same.",
    ),
    "moe_routing": Cause(
        title="experts chosen differently",
        fix="Replay the rollout's experts in training (--use-rollout-routing-replay), and keep routers in fp32 on "
        "both sides.",
    ),
    "retokenised": Cause(
        title="text that was tokenised again",
        fix="Train on the token ids that were sampled: decoding and encoding again merges tokens in another way. "
        "Keep ids through tools and chat templates (token-in, token-out).",
    ),
    "mask_mistake": Cause(
        title="trained tokens that the policy did not sample",
        fix="Set loss_mask to 0 on tool output, padding and everything else without a log-prob of the rollout "
        "engine; these tokens have a placeholder instead of one.",
    ),
    "unexplained": Cause(
        title="a large mismatch of no known form",
        fix="Compare the two engines on one prompt, with --hf-checkpoint as the reference: model, tokenizer, weights.",
    ),
    "healthy": Cause(title="healthy", fix="Nothing to change."),
}
"""Causes by name."""

SURE = 0.9
"""Confidence below which a finding names the command that proves it."""
PROOF = " To prove it, run `slime-tis diagnose --hf-checkpoint DIR` on the dump: it names the engine that is wrong."


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause that is present."""

    cause: str
    """A key of `CAUSES`."""
    confidence: float
    """From 0 to 1: how specific the evidence is to this cause."""
    share: float
    """Share of the mismatch, Σ min(abs(Δ), 10), that it accounts for."""
    evidence: tuple[str, ...]
    """What was measured, one statement each."""
    detail: str = ""
    """Which form of the cause: "bf16", "int8", "fp8" of rounding, a lag in tokens, a ratio of temperatures."""

    @property
    def score(self) -> float:
        """What findings are ranked by: confidence, and where that is alike the share of the mismatch."""
        return self.confidence * (0.4 + 0.6 * self.share)

    @property
    def title(self) -> str:
        """The cause in words, with its form."""
        return CAUSES[self.cause].title + (f" ({self.detail})" if self.detail else "")

    @property
    def fix(self) -> str:
        """What to change, and below SURE how to prove the cause."""
        return CAUSES[self.cause].fix + (PROOF if self.confidence < SURE else "")

    def as_json(self) -> dict[str, Any]:
        """The finding as plain values, its title and fix included."""
        return {**asdict(self), "score": self.score, "title": self.title, "fix": self.fix}
