"""The causes of a mismatch, as one table.

A rule sees the pattern of a cause in a dump or in a log. A hypothesis plants the cause in a model
that scores samples again. Both name the cause by its key in `CAUSES`.
"""

from typing import NamedTuple


class Cause(NamedTuple):
    """A cause in words."""

    title: str
    """The cause, as the title of a finding."""
    fix: str
    """Advice: the change that removes the cause."""


CAUSES: dict[str, Cause] = {
    "shifted_tokens": Cause(
        title="tokens shifted against their log-probs",
        fix=(
            "Compare how both engines index log-probs: log_probs[t] must belong to token t given "
            "the tokens before it. A shift by one usually means a missing or doubled first token "
            "(BOS), or logits that were not moved by one."
        ),
    ),
    "other_prompt": Cause(
        title="different prompt or chat template",
        fix=(
            "Print the prompt's token ids in both engines: they condition on different prompts. "
            "Use one chat template and one system prompt, and send token ids instead of text."
        ),
    ),
    "temperature": Cause(
        title="log-probs at a different temperature",
        fix=(
            "Score and sample at the same temperature: divide the training logits by "
            "--rollout-temperature, or ask the rollout engine for log-probs after temperature "
            "scaling (vLLM: --logprobs-mode processed_logprobs; SGLang: without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB)."
        ),
    ),
    "truncated_sampling": Cause(
        title="top-p or top-k truncation",
        fix=(
            "Sample with top-p 1 and without top-k, or record the allowed token sets and train "
            "over them. vLLM reports log-probs after truncation only with "
            "--logprobs-mode processed_logprobs."
        ),
    ),
    "stale_weights": Cause(
        title="stale weights",
        fix=(
            "Sample with newer weights (--update-weights-interval 1, a smaller "
            "--rollout-lookahead, --max-weight-staleness), or correct for the age: `slime-tis "
            "recommend` names the correction for a dump."
        ),
    ),
    "weights_not_updated": Cause(
        title="weights not updated or only partly updated",
        fix=(
            "Compare the weights of both engines with --check-weight-sync. Tensors are skipped, "
            "sent under a name that the engine ignores, or rounded away (--weight-update-rounding "
            "stochastic)."
        ),
    ),
    "worker": Cause(
        title="one rollout server differs from the others",
        fix=(
            "Restart this server or remove it. Compare its version, flags, weights and prefix "
            "cache with the other servers'."
        ),
    ),
    "rounding": Cause(
        title="precision of the engines",
        fix=(
            "Low precision makes noise of this size; `slime-tis recommend` says for a dump whether "
            "and how to correct it. To remove it, raise the rollout's precision, or train in fp16 "
            "or in the rollout's precision."
        ),
    ),
    "broken_tokens": Cause(
        title="broken log-probs",
        fix=(
            "Look at these tokens in the report: NaN, infinite or absurd log-probs of a few tokens "
            "point to a faulty kernel; another base, unit or constant points to the code that "
            "reports log-probs. Reject the sequences (--rs-veto-threshold) until it is fixed."
        ),
    ),
    "position_drift": Cause(
        title="mismatch that grows with position",
        fix=(
            "Compare settings that depend on position: rope_theta and rope scaling, the sliding "
            "window, KV cache precision, context parallelism. Answers that start with the same "
            "template look the same."
        ),
    ),
    "moe_routing": Cause(
        title="different expert routing",
        fix=(
            "Replay the rollout's experts in training (--use-rollout-routing-replay), and keep "
            "routers in fp32 in both engines."
        ),
    ),
    "retokenised": Cause(
        title="retokenized text",
        fix=(
            "Train on the sampled token ids: decoding and encoding again merges tokens "
            "differently. Pass token ids through tools and chat templates (token-in, token-out)."
        ),
    ),
    "mask_mistake": Cause(
        title="trained tokens that the policy did not sample",
        fix=(
            "Set loss_mask to 0 on tool output, padding and all other tokens without a rollout "
            "log-prob; these tokens have a placeholder value."
        ),
    ),
    "penalty": Cause(
        title="penalty in the sampler or bias of its logits",
        fix=(
            "Switch off penalties, logit bias, banned tokens and minimum lengths, or ask the "
            "rollout engine for log-probs before them: training cannot reproduce them."
        ),
    ),
    "attention_mask": Cause(
        title="attention to padding or to other samples",
        fix=(
            "Check the masks: padding is masked, and packed samples are separated (cu_seqlens or "
            "position ids)."
        ),
    ),
    "stale_cache": Cause(
        title="cached prompts of older weights",
        fix=(
            "Flush the prefix cache after each weight update (SGLang: flush_cache), before the "
            "next request."
        ),
    ),
    "other_model": Cause(
        title="log-probs of another model",
        fix=(
            "Ask for the target model's log-probs: a draft model of speculative decoding must not "
            "report its own. If sampling has a temperature and top-p, ask for log-probs after both "
            "(vLLM: --logprobs-mode processed_logprobs)."
        ),
    ),
    "dropout": Cause(
        title="dropout or unstable kernels",
        fix=(
            "Set attention and hidden dropout to 0, or score in eval mode; else choose "
            "deterministic kernels."
        ),
    ),
    "placeholder_log_prob": Cause(
        title="a placeholder instead of a log-prob",
        fix=(
            "Ask for the log-prob of every token, and set loss_mask to 0 on tokens that the engine "
            "did not sample, such as an appended end token. The reported value is a constant."
        ),
    ),
    "argmax_log_prob": Cause(
        title="log-probs of the likeliest token instead of the sampled one",
        fix=(
            "Read the log-prob of the sampled token id from the engine's answer, not the first "
            "entry of its list of likeliest tokens."
        ),
    ),
    "padded_vocabulary": Cause(
        title="padding rows of the vocabulary in a softmax",
        fix=(
            "Cut the logits to the tokenizer's vocabulary before the softmax, or mask the rows "
            "that only fill up the tensor."
        ),
    ),
    "attention_scale": Cause(
        title="another scale of attention",
        fix=(
            "Compare the scale of attention in both engines: 1/√(head size), or the value of the "
            "model's configuration."
        ),
    ),
    "network_setting": Cause(
        title="another setting of the network",
        fix=(
            "Compare the configurations of both engines, such as the epsilon of the norms and "
            "activation functions."
        ),
    ),
    "unexplained": Cause(
        title="a mismatch without a pattern of one cause",
        fix=(
            "Compare the two engines on one prompt, with --hf-checkpoint as the reference: model, "
            "tokenizer, weights."
        ),
    ),
    "broken_metrics": Cause(
        title="metrics that are not finite or impossible",
        fix=(
            "Look at the first such step: log-probs of one engine are NaN or infinite there, or "
            "the log is damaged or has another metric under this name. These values are left out "
            "of everything else."
        ),
    ),
    "not_measured": Cause(
        title="the mismatch was not measured",
        fix=(
            "Log a mismatch metric in every step, or write a dump of both engines' log-probs "
            "(docs/dumps.md)."
        ),
    ),
    "healthy": Cause(
        title="healthy",
        fix="Nothing to change.",
    ),
}
"""The causes by name; the last four are results without a cause."""
