"""Models that servers read in another way than transformers does."""

from dataclasses import replace
from typing import Any

from slime_tis.errors import quoted_path
from slime_tis.families import FAMILIES, attention_windows, family_of
from slime_tis.hf_directory import MoeSizes, load_config
from slime_tis.trainer.configs.megatron import MegatronConfig


def refuse_misread_model(
    engine: str, directory: str, hf: Any, moe: MoeSizes | None, longest: int
) -> None:
    """Refuses a model from whose definition or weights the servers deviate.

    Args:
        engine: --rollout-engine.
        directory: --hf-checkpoint.
        hf: transformers' configuration.
        moe: Sizes of the experts; None for a dense model.
        longest: Tokens of the longest sequence of the run.

    Raises:
        ValueError: The servers sample from another model.
    """
    problem = ""
    if engine == "sglang":
        problem = _sglang_problem(hf, moe, longest)
    elif engine == "vllm" and family_of(hf).attention.sinks:
        # vLLM 0.32 has a placeholder for each weight during an update. Its loader of gpt-oss copies
        # into the placeholders of experts and sinks, which vLLM does not notice.
        problem = "has experts and sinks to which vLLM does not apply a weight update"
    if problem:
        raise ValueError(
            f"{quoted_path(directory)} {problem}; use --rollout-engine local, or another"
            " checkpoint."
        )


def _sglang_problem(hf: Any, moe: MoeSizes | None, longest: int) -> str:
    """Returns what SGLang 0.5.23 ignores of a model, or an empty text."""
    if moe is not None:
        return _experts_problem(hf, moe)
    if family_of(hf).attention.has_typed_windows:
        return ""
    window = attention_windows(hf)[0]
    # The server takes these families for Llama, whose tokens see all tokens before them.
    if window is not None and longest > window:
        return (
            f"has windows of {window} tokens, which SGLang ignores, and sequences have up to"
            f" {longest} tokens (--rollout-max-context-len)"
        )
    return ""


def _experts_problem(hf: Any, moe: MoeSizes) -> str:
    """Returns what SGLang ignores of a mixture of experts, or an empty text."""
    if hf.tie_word_embeddings:
        return "ties embeddings, which SGLang ignores with experts"
    if hasattr(hf, "decoder_sparse_step") and len(moe.layers) < hf.num_hidden_layers:
        return "has dense layers, which SGLang reads as sparse"
    return ""


def with_latent_epsilon(megatron: MegatronConfig, engine: str, architecture: str) -> MegatronConfig:
    """Returns the options with the ε that the rollout engine has in norms of latent vectors.

    SGLang 0.5.23 and vLLM 0.32 take rms_norm_eps of config.json. transformers takes 1e-6, which is
    the default of training: it differs for Moonlight and GLM-4.7-Flash, whose rms_norm_eps is 1e-5.

    Raises:
        ValueError: The option is given for a model without latent attention.
    """
    family = FAMILIES[architecture]
    if not family.attention.latent:
        if megatron.latent_norm_epsilon is not None:
            raise ValueError(
                f"--latent-norm-epsilon is given but {family.title} has no latent attention;"
                " remove it."
            )
        return megatron
    if engine == "local" or megatron.latent_norm_epsilon is not None:
        return megatron
    hf = load_config(megatron.hf_checkpoint)
    return replace(megatron, latent_norm_epsilon=hf.rms_norm_eps)
