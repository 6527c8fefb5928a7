"""The causes of a mismatch that the diagnosis can name."""

from dataclasses import replace

from slime_tis.rules import Finding

CAUSES: dict[str, tuple[str, str]] = {
    "shifted_tokens": (
        "tokens shifted against their log-probs",
        "Compare how both engines index log-probs: log_probs[t] must belong to token t given the tokens before it. A "
        "shift by one usually means a missing or doubled first token (BOS), or logits that were not moved by one.",
    ),
    "other_prompt": (
        "different prompt or chat template",
        "Print the prompt's token ids in both engines: they condition on different prompts. Use one chat template and "
        "one system prompt, and send token ids instead of text.",
    ),
    "temperature": (
        "log-probs at a different temperature",
        "Score and sample at the same temperature: divide the training logits by --rollout-temperature, or ask the "
        "rollout engine for log-probs after temperature scaling.",
    ),
    "truncated_sampling": (
        "top-p or top-k truncation",
        "Sample with top-p 1 and without top-k, or record the allowed token sets and train over them.",
    ),
    "stale_weights": (
        "stale weights",
        "Correct for staleness (--use-tis or --use-rollout-logprobs), or sample with newer weights: "
        "--update-weights-interval 1, a smaller --rollout-lookahead, --max-weight-staleness.",
    ),
    "weights_not_updated": (
        "weights not updated or only partly updated",
        "Compare the weights of both engines with --check-weight-sync. Tensors are skipped, sent under a name that the "
        "engine ignores, or rounded away (--weight-update-rounding stochastic).",
    ),
    "rounding": (
        "precision of the engines",
        "Low precision makes noise of this size; correct for it with --use-tis. To remove it, raise the rollout's "
        "precision, or train in fp16 or in the rollout's precision.",
    ),
    "broken_tokens": (
        "a few broken tokens",
        "Look at these tokens in the report: NaN, infinite or absurd log-probs point to a faulty kernel. Reject their "
        "sequences (--rs-veto-threshold) until the engine is fixed.",
    ),
    "position_drift": (
        "mismatch that grows with position",
        "Compare settings that depend on position: rope_theta and rope scaling, the sliding window, KV cache "
        "precision, context parallelism. Answers that start with the same template look the same.",
    ),
    "moe_routing": (
        "different expert routing",
        "Replay the rollout's experts in training (--use-rollout-routing-replay), and keep routers in fp32 in both "
        "engines.",
    ),
    "retokenised": (
        "retokenized text",
        "Train on the sampled token ids: decoding and encoding again merges tokens differently. Pass token ids through "
        "tools and chat templates (token-in, token-out).",
    ),
    "mask_mistake": (
        "trained tokens that the policy did not sample",
        "Set loss_mask to 0 on tool output, padding and all other tokens without a rollout log-prob; these tokens have "
        "a placeholder value.",
    ),
    "unexplained": (
        "a large mismatch without a known pattern",
        "Compare the two engines on one prompt, with --hf-checkpoint as the reference: model, tokenizer, weights.",
    ),
    "healthy": ("healthy", "Nothing to change."),
}
"""Title and fix of each cause."""

MIN_CERTAIN_CONFIDENCE = 0.9
"""Below this confidence a finding names the command that proves it."""
PROOF = " To prove it, run `slime-tis diagnose --hf-checkpoint DIR` on the dump: it names the wrong engine."


def describe(finding: Finding) -> Finding:
    """Adds title and fix to a finding of a cause in `CAUSES`."""
    title, fix = CAUSES[finding.cause]
    title += f" ({finding.detail})" if finding.detail else ""
    return replace(finding, title=title, fix=fix + (PROOF if finding.confidence < MIN_CERTAIN_CONFIDENCE else ""))
