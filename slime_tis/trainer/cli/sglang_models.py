"""Models that SGLang 0.5.23 serves without an error, but as another model."""

from typing import Any

from slime_tis.errors import quoted_path
from slime_tis.families import attention_windows, family_of
from slime_tis.hf_directory import MoeSizes


def refuse_misread_model(directory: str, hf: Any, moe: MoeSizes | None, longest: int) -> None:
    """Refuses a model from whose definition the server would deviate.

    Args:
        directory: --hf-checkpoint.
        hf: transformers' configuration.
        moe: Sizes of the experts; None for a dense model.
        longest: Tokens of the longest sequence of the run.

    Raises:
        ValueError: SGLang samples from another model.
    """
    problem = ""
    if moe is not None:
        problem = _experts_problem(hf, moe)
    elif not family_of(hf).attention.has_typed_windows:
        window = attention_windows(hf)[0]
        # The server takes these families for Llama, whose tokens see all tokens before them.
        if window is not None and longest > window:
            problem = (
                f"has windows of {window} tokens, which SGLang ignores, and sequences have up to"
                f" {longest} tokens (--rollout-max-context-len)"
            )
    if problem:
        raise ValueError(
            f"{quoted_path(directory)} {problem}; use --rollout-engine local, or another"
            " checkpoint."
        )


def _experts_problem(hf: Any, moe: MoeSizes) -> str:
    """Returns what SGLang ignores of a mixture of experts, or an empty text."""
    if hf.tie_word_embeddings:
        return "ties embeddings, which SGLang ignores with experts"
    if hasattr(hf, "decoder_sparse_step") and len(moe.layers) < hf.num_hidden_layers:
        return "has dense layers, which SGLang reads as sparse"
    return ""
