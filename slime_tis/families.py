"""The supported families of decoders: one entry of `FAMILIES` each.

An entry lists which fields of config.json a family reads, which layers it has, and how
megatron-core and the files of a checkpoint name each of its weights. Conversion, export, checks of
files, `slime-tis plan` and both engines read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Layout = Literal[
    "replicated",
    "rows",
    "columns",
    "vocab",
    "qkv",
    "fused_qkv",
    "gated_qkv",
    "gated",
    "fused_gated",
    "transposed",
    "alternating",
    "three_parts",
    "delta_qkvz",
    "delta_ba",
]
"""How a weight is split over tensor-parallel ranks: a key of `hf_weights.LAYOUTS`."""
Property = Literal["qkv_bias", "qk_norm", "query_rank", "no_query_rank"]
"""A property of the attention of some models of a family."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in the files of a checkpoint."""

    name: str
    """Name within its layer; {expert} stands for the number of a routed expert."""
    shape: tuple[str, ...]
    """Keys of `hf_tensors.dimensions`."""
    stacks_experts: bool = False
    """Whether it has all routed experts of the layer, along its first dimension."""


@dataclass(frozen=True)
class Weight:
    """A weight of megatron-core, and the tensors of the file that it consists of."""

    layout: Layout
    tensors: tuple[FileTensor, ...]
    needs: Property | None = None
    """Property of the attention without which the weight does not exist; None if it always does."""


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


def _weight(layout: Layout, name: str, *shape: str, needs: Property | None = None) -> Weight:
    """Returns a weight that consists of one tensor of the file."""
    return Weight(layout, (FileTensor(name, shape),), needs)


def _gated_mlp(megatron: str, file: str, inner: str) -> dict[str, Weight]:
    """Returns the weights of down(silu(gate(x)) · up(x)), whose inner size is `inner`."""
    gate = FileTensor(f"{file}.gate_proj.weight", (inner, "hidden"))
    up = FileTensor(f"{file}.up_proj.weight", (inner, "hidden"))
    return {
        f"{megatron}.linear_fc1.weight": Weight("gated", (gate, up)),
        f"{megatron}.linear_fc2.weight": _weight(
            "rows", f"{file}.down_proj.weight", "hidden", inner
        ),
    }


MODEL_WEIGHTS: Mapping[str, Weight] = {
    "embedding.word_embeddings.weight": _weight(
        "vocab", "model.embed_tokens.weight", "vocab", "hidden"
    ),
    "decoder.final_layernorm.weight": _weight("replicated", "model.norm.weight", "hidden"),
    "output_layer.weight": _weight("vocab", "lm_head.weight", "vocab", "hidden"),
}
"""The weights outside of layers, which are equal in all families."""

PRE_NORMS: Mapping[str, Weight] = {
    "input_layernorm.weight": _weight("replicated", "input_layernorm.weight", "hidden"),
    "pre_mlp_layernorm.weight": _weight("replicated", "post_attention_layernorm.weight", "hidden"),
}
"""Norms of the inputs of attention and MLP."""

ATTENTION: Mapping[str, Weight] = {
    "self_attention.linear_qkv.weight": Weight(
        "qkv",
        (
            FileTensor("self_attn.q_proj.weight", ("queries", "hidden")),
            FileTensor("self_attn.k_proj.weight", ("keys", "hidden")),
            FileTensor("self_attn.v_proj.weight", ("keys", "hidden")),
        ),
    ),
    "self_attention.linear_proj.weight": _weight(
        "rows", "self_attn.o_proj.weight", "hidden", "queries"
    ),
}
"""Projections of queries, keys, values and the output."""

QKV_BIAS: Mapping[str, Weight] = {
    "self_attention.linear_qkv.bias": Weight(
        "qkv",
        (
            FileTensor("self_attn.q_proj.bias", ("queries",)),
            FileTensor("self_attn.k_proj.bias", ("keys",)),
            FileTensor("self_attn.v_proj.bias", ("keys",)),
        ),
        "qkv_bias",
    ),
}

QK_NORM: Mapping[str, Weight] = {
    "self_attention.q_layernorm.weight": _weight(
        "replicated", "self_attn.q_norm.weight", "head", needs="qk_norm"
    ),
    "self_attention.k_layernorm.weight": _weight(
        "replicated", "self_attn.k_norm.weight", "head", needs="qk_norm"
    ),
}

MLP: Mapping[str, Weight] = _gated_mlp("mlp", "mlp", "inner")
"""The MLP of a dense layer."""

EXPERTS: Mapping[str, Weight] = {
    "mlp.router.weight": _weight("replicated", "mlp.gate.weight", "experts", "hidden"),
    **_gated_mlp("mlp.experts.local_experts.*", "mlp.experts.{expert}", "expert_inner"),
}
"""Router and experts of a sparse layer."""

SELECTION_BIAS: Mapping[str, Weight] = {
    "mlp.router.expert_bias": _weight("replicated", "mlp.gate.e_score_correction_bias", "experts"),
}

LATENT_ATTENTION: Mapping[str, Weight] = {
    "self_attention.linear_q_proj.weight": _weight(
        "columns", "self_attn.q_proj.weight", "latent_queries", "hidden", needs="no_query_rank"
    ),
    "self_attention.linear_q_down_proj.weight": _weight(
        "replicated", "self_attn.q_a_proj.weight", "query_rank", "hidden", needs="query_rank"
    ),
    "self_attention.q_layernorm.weight": _weight(
        "replicated", "self_attn.q_a_layernorm.weight", "query_rank", needs="query_rank"
    ),
    "self_attention.linear_q_up_proj.weight": _weight(
        "columns", "self_attn.q_b_proj.weight", "latent_queries", "query_rank", needs="query_rank"
    ),
    "self_attention.linear_kv_down_proj.weight": _weight(
        "replicated", "self_attn.kv_a_proj_with_mqa.weight", "rank_and_rotated", "hidden"
    ),
    "self_attention.kv_layernorm.weight": _weight(
        "replicated", "self_attn.kv_a_layernorm.weight", "rank"
    ),
    "self_attention.linear_kv_up_proj.weight": _weight(
        "columns", "self_attn.kv_b_proj.weight", "keys_and_values", "rank"
    ),
    "self_attention.linear_proj.weight": _weight(
        "rows", "self_attn.o_proj.weight", "hidden", "values"
    ),
}
"""Multi-head latent attention, with megatron-core's names."""

GATED_DELTA_NET: Mapping[str, Weight] = {
    "self_attention.in_proj_qkvz.weight": _weight(
        "columns", "linear_attn.in_proj_qkvz.weight", "delta_qkvz", "hidden"
    ),
    "self_attention.in_proj_ba.weight": _weight(
        "columns", "linear_attn.in_proj_ba.weight", "delta_ba", "hidden"
    ),
    "self_attention.conv1d.weight": _weight(
        "three_parts", "linear_attn.conv1d.weight", "delta_qkv", "one", "kernel"
    ),
    "self_attention.A_log": _weight("columns", "linear_attn.A_log", "value_heads"),
    "self_attention.dt_bias": _weight("columns", "linear_attn.dt_bias", "value_heads"),
    "self_attention.out_norm.weight": _weight(
        "replicated", "linear_attn.norm.weight", "delta_value"
    ),
    "self_attention.out_proj.weight": _weight(
        "rows", "linear_attn.out_proj.weight", "hidden", "delta_values"
    ),
}
"""Gated delta nets, with megatron-core's names, except that it joins the input projections."""

SEPARATE_PROJECTIONS: Mapping[str, Weight] = {
    "self_attention.in_proj_qkvz.weight": Weight(
        "delta_qkvz",
        (
            FileTensor("linear_attn.in_proj_qkv.weight", ("delta_qkv", "hidden")),
            FileTensor("linear_attn.in_proj_z.weight", ("delta_values", "hidden")),
        ),
    ),
    "self_attention.in_proj_ba.weight": Weight(
        "delta_ba",
        (
            FileTensor("linear_attn.in_proj_b.weight", ("value_heads", "hidden")),
            FileTensor("linear_attn.in_proj_a.weight", ("value_heads", "hidden")),
        ),
    ),
}
"""Input projections of gated delta nets that files do not join by heads."""

GATED_ATTENTION: Mapping[str, Weight] = {
    **ATTENTION,
    "self_attention.linear_qkv.weight": Weight(
        "gated_qkv",
        (
            FileTensor("self_attn.q_proj.weight", ("queries_and_gates", "hidden")),
            FileTensor("self_attn.k_proj.weight", ("keys", "hidden")),
            FileTensor("self_attn.v_proj.weight", ("keys", "hidden")),
        ),
    ),
}
"""Attention with an output gate, whose projection is joined with the queries'."""


def _stack(layout: Layout, name: str, *shape: str) -> Weight:
    """Returns the weight of one expert, which is a part of a tensor with all experts."""
    return Weight(layout, (FileTensor(name, ("experts", *shape), stacks_experts=True),))


FUSED_QKV: Mapping[str, Weight] = {
    "self_attention.linear_qkv.weight": _weight(
        "fused_qkv", "self_attn.qkv_proj.weight", "qkv", "hidden"
    ),
}
FUSED_GATE_UP: Mapping[str, Weight] = {
    "mlp.linear_fc1.weight": _weight("fused_gated", "mlp.gate_up_proj.weight", "gate_up", "hidden"),
}

GATED_SHARED_EXPERT: Mapping[str, Weight] = {
    **_gated_mlp("mlp.shared_experts", "mlp.shared_expert", "shared_inner"),
    "mlp.shared_experts.gate_weight": _weight(
        "replicated", "mlp.shared_expert_gate.weight", "one", "hidden"
    ),
}
LLAMA: Mapping[str, Weight] = {**PRE_NORMS, **ATTENTION, **MLP}
SHARED_EXPERTS: Mapping[str, Weight] = _gated_mlp(
    "mlp.shared_experts", "mlp.shared_experts", "shared_inner"
)
DEEPSEEK: Mapping[str, Weight] = {
    **PRE_NORMS,
    **LATENT_ATTENTION,
    **MLP,
    **EXPERTS,
    **SHARED_EXPERTS,
}

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
        weights={
            **ATTENTION,
            **MLP,
            "self_attention.q_layernorm.weight": _weight(
                "columns", "self_attn.q_norm.weight", "queries"
            ),
            "self_attention.k_layernorm.weight": _weight(
                "columns", "self_attn.k_norm.weight", "keys"
            ),
            "self_attn_bda.weight": _weight(
                "replicated", "post_attention_layernorm.weight", "hidden"
            ),
            "mlp_bda.weight": _weight("replicated", "post_feedforward_layernorm.weight", "hidden"),
        },
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
            "self_attn_bda.weight": _weight(
                "replicated", "post_self_attn_layernorm.weight", "hidden"
            ),
            "mlp_bda.weight": _weight("replicated", "post_mlp_layernorm.weight", "hidden"),
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
            "input_layernorm.weight": _weight("replicated", "input_layernorm.weight", "hidden"),
            "self_attn_bda.weight": _weight(
                "replicated", "post_attention_layernorm.weight", "hidden"
            ),
            "pre_mlp_layernorm.weight": _weight(
                "replicated", "pre_feedforward_layernorm.weight", "hidden"
            ),
            "mlp_bda.weight": _weight("replicated", "post_feedforward_layernorm.weight", "hidden"),
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
            "self_attention.core_attention.sinks": _weight("columns", "self_attn.sinks", "heads"),
            "self_attention.linear_proj.bias": _weight(
                "replicated", "self_attn.o_proj.bias", "hidden"
            ),
            "mlp.router.weight": _weight("replicated", "mlp.router.weight", "experts", "hidden"),
            "mlp.router.bias": _weight("replicated", "mlp.router.bias", "experts"),
            "mlp.experts.local_experts.*.linear_fc1.weight": _stack(
                "alternating", "mlp.experts.gate_up_proj", "hidden", "expert_gate_up"
            ),
            "mlp.experts.local_experts.*.linear_fc1.bias": _stack(
                "alternating", "mlp.experts.gate_up_proj_bias", "expert_gate_up"
            ),
            "mlp.experts.local_experts.*.linear_fc2.weight": _stack(
                "transposed", "mlp.experts.down_proj", "expert_inner", "hidden"
            ),
            "mlp.experts.local_experts.*.linear_fc2.bias": _stack(
                "replicated", "mlp.experts.down_proj_bias", "hidden"
            ),
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
