"""The supported families of decoders: one entry of `FAMILIES` each.

An entry lists the fields of config.json that a family reads, its layers, and its weights with their
names in megatron-core and in checkpoints (`family_weights`). Conversion, export, checks of files,
`slime-tis plan` and both engines read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime_tis.family_weights import (
    ALL_HEADS_QK_NORM,
    ATTENTION,
    DEEPSEEK,
    EXPERTS,
    FUSED_GATE_UP,
    FUSED_QKV,
    GATED_ATTENTION,
    GATED_DELTA_NET,
    GATED_SHARED_EXPERT,
    GEMMA3_PRE_NORMS,
    GLM4_OUTPUT_NORMS,
    GPT_OSS_EXPERTS,
    LLAMA,
    MLP,
    OUTPUT_BIAS,
    OUTPUT_NORMS,
    PRE_NORMS,
    QK_NORM,
    QKV_BIAS,
    SELECTION_BIAS,
    SEPARATE_PROJECTIONS,
    SHARED_EXPERTS,
    SINKS,
    Property,
    Weight,
)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention with grouped queries, or latent attention."""

    has_delta_nets: bool = False
    """Whether layers of the type linear_attention have a gated delta net, a recurrence, instead of
    attention."""
    output_gate: bool = False
    """Whether a sigmoid of a projection scales each feature of the output before its
    projection."""
    latent: bool = False
    """Whether keys and values are projections of one latent vector per token: multi-head latent
    attention of DeepSeek-V2."""

    qkv_bias: bool | str = False
    """Bias on the query, key and value projections, or the field of config.json with this flag."""
    qk_norm: bool | str = False
    """RMSNorm on queries and keys, or the field of config.json with this flag."""
    qk_norm_over: Literal["head", "all_heads"] = "head"
    """Features over which a norm of queries or keys takes the mean square."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and has no value."""
    turns_neighbors: bool | str = False
    """Whether the rotary embedding turns the features 2i and 2i + 1 instead of i and i + d/2, or
    the field of config.json with this flag."""
    rotary_layers: str | None = None
    """Field with a flag for each layer: whether it has a rotary embedding; None: all have."""
    scale: str | None = None
    """Field x of the factor x^(-1/2) on products of queries and keys; None for the size of a
    head."""
    rotary_kinds: tuple[str, ...] = ()
    """Types of layers, each with different rotary frequencies; empty if these are equal in all
    layers."""
    unused_rope_fields: tuple[str, ...] = ()
    """Fields of rope_parameters that change nothing in a text."""
    window: str | None = None
    """Field with the number of last tokens, itself included, that a token sees."""
    has_typed_windows: bool = False
    """Whether the window is about layers of the type sliding_attention; otherwise all have it."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Layers with a router and experts; the fields are names in config.json."""

    router: Literal["softmax", "chosen_softmax", "greedy_softmax", "sigmoid"] = "softmax"
    """How scores are computed. A softmax follows `norm_topk_prob`; one over the chosen experts does
    not; a greedy one keeps the scores of the chosen experts and scales them. Sigmoid routers choose
    by score and bias, may have groups, and scale."""
    count: str = "num_experts"
    """Field with the number of routed experts."""
    size: str = "moe_intermediate_size"
    """Field with the inner size of a routed expert."""
    sparse_layers: Literal[
        "decoder_sparse_step", "first_k_dense_replace", "mlp_layer_types", "all"
    ] = "decoder_sparse_step"
    """Field that decides which layers have experts; "all" if every layer has them."""
    shared_count: str | None = None
    """Field with the number of shared experts, each as large as a routed expert."""
    shared_size: str | None = None
    """Field with the inner size of the shared expert."""
    has_shared_gate: bool = False
    """Whether a gate scales the output of the shared expert."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences between families of decoders."""

    title: str
    """Name in messages."""
    model_type: str
    """Field model_type of config.json, as transformers knows it."""
    aliases: tuple[str, ...] = ()
    """Values of model_type in published files that transformers does not know. The layers are those
    of `model_type`."""
    unused_tensors: tuple[str, ...] = ()
    """Beginnings of names of tensors that are neither trained nor exported, such as layers for
    multi-token prediction; only needed if transformers does not know them."""
    rotary_class: str
    """Class in transformers that computes the rotary frequencies, as `module:name`."""
    attention: Attention = Attention()
    norms: Literal["inputs", "outputs", "both"] = "inputs"
    """Whether the inputs or the outputs of attention and MLP are normalized."""
    norm_offset: float = 0.0
    """Number that norms add to their weights."""
    activation: Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"] = "silu"
    """Activation of the gate in MLPs. The clamped one is gpt-oss'."""
    biases: bool = False
    """Biases on the output projection, routers and experts, besides queries, keys and values."""
    activation_field: str = "hidden_act"
    """Field with the name of the activation."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    experts: Experts | None = None
    """Experts of the sparse layers; None if all layers are dense."""
    weights: Mapping[str, Weight]
    """The weights of a layer, by their Megatron name within it; `*` stands for an expert."""
    has_engine_layers: bool = False
    """Whether transformer-engine computes the layers on GPUs, otherwise plain torch."""
    true_on_policy: bool = False
    """Whether `--true-on-policy` was shown to be exact."""


def flag_value(hf: Any, flag: bool | str) -> bool:
    """Returns the value of a flag of an entry, which may name a field of the configuration."""
    if isinstance(flag, str):
        return bool(getattr(hf, flag))
    return flag


def family_of(hf: Any) -> Family:
    """Returns the entry of a Hugging Face configuration."""
    return FAMILIES[hf.architectures[0]]


def attention_windows(hf: Any) -> tuple[int | None, ...]:
    """Returns for each layer the number of last tokens that a token sees; None for all."""
    attention = family_of(hf).attention
    window: int | None = None
    if attention.window is not None:
        window = getattr(hf, attention.window)
    if not attention.has_typed_windows:
        return tuple(window for _ in range(hf.num_hidden_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in hf.layer_types)


def delta_net_layers(hf: Any) -> frozenset[int]:
    """Returns the indices of the layers with a gated delta net."""
    if not family_of(hf).attention.has_delta_nets:
        return frozenset()
    kinds = enumerate(hf.layer_types)
    return frozenset(layer for layer, kind in kinds if kind == "linear_attention")


def stacks_experts(hf: Any) -> bool:
    """Returns whether files have one tensor with all routed experts of a layer."""
    for weight in family_of(hf).weights.values():
        if any(tensor.stacks_experts for tensor in weight.tensors):
            return True
    return False


def layer_weights(hf: Any, *, is_sparse: bool, has_delta_net: bool = False) -> dict[str, Weight]:
    """Returns the weights of a layer of a model, by their Megatron name.

    Args:
        hf: Configuration of the model.
        is_sparse: Whether the layer has experts.
        has_delta_net: Whether it has a gated delta net instead of attention.
    """
    family = family_of(hf)
    weights = {}
    for name, weight in family.weights.items():
        if name.startswith("mlp.") and name.startswith("mlp.linear") == is_sparse:
            continue
        is_mixer = name.startswith("self_attention.")
        if is_mixer and (name in GATED_DELTA_NET) != has_delta_net:
            continue
        if _has_property(hf, weight.needs):
            weights[name] = weight
    return weights


def _has_property(hf: Any, name: Property | None) -> bool:
    """Returns whether the attention of a model has a property that `Weight.needs` names."""
    attention = family_of(hf).attention
    if name == "qkv_bias":
        return flag_value(hf, attention.qkv_bias)
    if name == "qk_norm":
        return flag_value(hf, attention.qk_norm)
    if name == "query_rank":
        return hf.q_lora_rank is not None
    if name == "no_query_rank":
        return hf.q_lora_rank is None
    return True


ROTARY = "transformers.models.{0}.modeling_{0}:{1}RotaryEmbedding"

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        title="Llama",
        model_type="llama",
        rotary_class=ROTARY.format("llama", "Llama"),
        weights=LLAMA,
        has_engine_layers=True,
        true_on_policy=True,
    ),
    "Qwen2ForCausalLM": Family(
        title="Qwen2",
        model_type="qwen2",
        rotary_class=ROTARY.format("qwen2", "Qwen2"),
        attention=Attention(qkv_bias=True),
        weights={**LLAMA, **QKV_BIAS},
        has_engine_layers=True,
        true_on_policy=True,
    ),
    "Qwen3ForCausalLM": Family(
        title="Qwen3",
        model_type="qwen3",
        rotary_class=ROTARY.format("qwen3", "Qwen3"),
        attention=Attention(qk_norm=True),
        weights={**LLAMA, **QK_NORM},
        has_engine_layers=True,
        true_on_policy=True,
    ),
    "MistralForCausalLM": Family(
        title="Mistral",
        model_type="mistral",
        rotary_class=ROTARY.format("mistral", "Mistral"),
        attention=Attention(window="sliding_window"),
        weights=LLAMA,
        true_on_policy=True,
    ),
    "Phi3ForCausalLM": Family(
        title="Phi-4",
        model_type="phi3",
        rotary_class=ROTARY.format("phi3", "Phi3"),
        attention=Attention(window="sliding_window"),
        weights={**LLAMA, **FUSED_QKV, **FUSED_GATE_UP},
    ),
    "SmolLM3ForCausalLM": Family(
        title="SmolLM3",
        model_type="smollm3",
        rotary_class=ROTARY.format("smollm3", "SmolLM3"),
        attention=Attention(rotary_layers="no_rope_layers"),
        weights=LLAMA,
        true_on_policy=True,
    ),
    "Olmo2ForCausalLM": Family(
        title="OLMo 2",
        model_type="olmo2",
        rotary_class=ROTARY.format("olmo2", "Olmo2"),
        attention=Attention(qk_norm=True, qk_norm_over="all_heads"),
        norms="outputs",
        weights={**ATTENTION, **MLP, **ALL_HEADS_QK_NORM, **OUTPUT_NORMS},
    ),
    "SeedOssForCausalLM": Family(
        title="Seed-OSS",
        model_type="seed_oss",
        rotary_class=ROTARY.format("seed_oss", "SeedOss"),
        attention=Attention(qkv_bias="attention_bias"),
        weights={**LLAMA, **QKV_BIAS},
    ),
    "MiMoForCausalLM": Family(
        title="MiMo",
        model_type="qwen2",
        aliases=("mimo",),
        unused_tensors=("model.mtp_layers.",),
        rotary_class=ROTARY.format("qwen2", "Qwen2"),
        attention=Attention(qkv_bias=True),
        weights={**LLAMA, **QKV_BIAS},
        true_on_policy=True,
    ),
    "Glm4ForCausalLM": Family(
        title="GLM-4-0414",
        model_type="glm4",
        rotary_class=ROTARY.format("glm4", "Glm4"),
        attention=Attention(qkv_bias="attention_bias", turns_neighbors=True),
        norms="both",
        weights={
            **LLAMA,
            **FUSED_GATE_UP,
            **QKV_BIAS,
            **GLM4_OUTPUT_NORMS,
        },
    ),
    "Gemma3ForCausalLM": Family(
        title="Gemma 3",
        model_type="gemma3_text",
        rotary_class=ROTARY.format("gemma3", "Gemma3"),
        attention=Attention(
            qk_norm=True,
            scale="query_pre_attn_scalar",
            rotary_kinds=("sliding_attention", "full_attention"),
            window="sliding_window",
            has_typed_windows=True,
        ),
        norms="both",
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
        scales_embeddings=True,
        weights={
            **ATTENTION,
            **QK_NORM,
            **MLP,
            **GEMMA3_PRE_NORMS,
            **OUTPUT_NORMS,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        title="Qwen2-MoE",
        model_type="qwen2_moe",
        rotary_class=ROTARY.format("qwen2_moe", "Qwen2Moe"),
        attention=Attention(qkv_bias="qkv_bias"),
        experts=Experts(shared_size="shared_expert_intermediate_size", has_shared_gate=True),
        weights={
            **LLAMA,
            **QKV_BIAS,
            **EXPERTS,
            **GATED_SHARED_EXPERT,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        title="Qwen3-MoE",
        model_type="qwen3_moe",
        rotary_class=ROTARY.format("qwen3_moe", "Qwen3Moe"),
        attention=Attention(qk_norm=True),
        experts=Experts(),
        weights={**LLAMA, **QK_NORM, **EXPERTS},
    ),
    "Qwen3NextForCausalLM": Family(
        title="Qwen3-Next",
        model_type="qwen3_next",
        rotary_class=ROTARY.format("qwen3_next", "Qwen3Next"),
        attention=Attention(has_delta_nets=True, output_gate=True, qk_norm=True),
        norm_offset=1.0,
        experts=Experts(shared_size="shared_expert_intermediate_size", has_shared_gate=True),
        weights={
            **PRE_NORMS,
            **GATED_ATTENTION,
            **QK_NORM,
            **GATED_DELTA_NET,
            **MLP,
            **EXPERTS,
            **GATED_SHARED_EXPERT,
        },
    ),
    "Qwen3_5ForCausalLM": Family(
        title="Qwen3.5 (dense, text)",
        model_type="qwen3_5_text",
        rotary_class=ROTARY.format("qwen3_5", "Qwen3_5Text"),
        attention=Attention(
            has_delta_nets=True,
            output_gate=True,
            qk_norm=True,
            # the axes of a text's tokens have equal positions
            unused_rope_fields=("mrope_section", "mrope_interleaved"),
        ),
        norm_offset=1.0,
        weights={
            **PRE_NORMS,
            **GATED_ATTENTION,
            **QK_NORM,
            **GATED_DELTA_NET,
            **SEPARATE_PROJECTIONS,
            **MLP,
        },
    ),
    "Glm4MoeForCausalLM": Family(
        title="GLM-4.5",
        model_type="glm4_moe",
        rotary_class=ROTARY.format("glm4_moe", "Glm4Moe"),
        attention=Attention(qkv_bias="attention_bias", qk_norm="use_qk_norm"),
        experts=Experts(
            router="sigmoid",
            count="n_routed_experts",
            sparse_layers="first_k_dense_replace",
            shared_count="n_shared_experts",
        ),
        weights={
            **LLAMA,
            **QKV_BIAS,
            **QK_NORM,
            **EXPERTS,
            **SELECTION_BIAS,
            **SHARED_EXPERTS,
        },
    ),
    "GptOssForCausalLM": Family(
        title="gpt-oss",
        model_type="gpt_oss",
        rotary_class=ROTARY.format("gpt_oss", "GptOss"),
        attention=Attention(
            qkv_bias=True, sinks=True, window="sliding_window", has_typed_windows=True
        ),
        experts=Experts(
            router="chosen_softmax",
            count="num_local_experts",
            size="intermediate_size",
            sparse_layers="all",
        ),
        activation="clamped_swiglu",
        biases=True,
        weights={
            **PRE_NORMS,
            **ATTENTION,
            **QKV_BIAS,
            **SINKS,
            **OUTPUT_BIAS,
            **GPT_OSS_EXPERTS,
        },
    ),
    "DeepseekV2ForCausalLM": Family(
        title="DeepSeek-V2-Lite",
        model_type="deepseek_v2",
        rotary_class=ROTARY.format("deepseek_v2", "DeepseekV2"),
        attention=Attention(latent=True, turns_neighbors=True),
        experts=Experts(
            router="greedy_softmax",
            count="n_routed_experts",
            sparse_layers="first_k_dense_replace",
            shared_count="n_shared_experts",
        ),
        weights=DEEPSEEK,
    ),
    "DeepseekV3ForCausalLM": Family(
        title="DeepSeek-V3",
        model_type="deepseek_v3",
        aliases=("kimi_k2",),
        rotary_class=ROTARY.format("deepseek_v3", "DeepseekV3"),
        attention=Attention(latent=True, turns_neighbors="rope_interleave"),
        experts=Experts(
            router="sigmoid",
            count="n_routed_experts",
            sparse_layers="first_k_dense_replace",
            shared_count="n_shared_experts",
        ),
        weights={**DEEPSEEK, **SELECTION_BIAS},
    ),
    "Glm4MoeLiteForCausalLM": Family(
        title="GLM-4.7-Flash",
        model_type="glm4_moe_lite",
        rotary_class=ROTARY.format("glm4_moe_lite", "Glm4MoeLite"),
        attention=Attention(latent=True, turns_neighbors="rope_interleave"),
        experts=Experts(
            router="sigmoid",
            count="n_routed_experts",
            sparse_layers="mlp_layer_types",
            shared_count="n_shared_experts",
        ),
        weights={**DEEPSEEK, **SELECTION_BIAS},
    ),
}
"""Supported families, by their architecture in config.json."""


def family_titles() -> str:
    """Returns the names of all families for a message."""
    *titles, last = [family.title for family in FAMILIES.values()]
    return f"{', '.join(titles)} and {last}"
