"""Names, shapes and layouts of the weights of decoders.

Each constant has the weights of one part of a layer, by their Megatron name within the layer; `*`
stands for an expert. The entries of `families.FAMILIES` combine them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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


def _weight(layout: Layout, name: str, *shape: str, needs: Property | None = None) -> Weight:
    """Returns a weight that consists of one tensor of the file."""
    return Weight(layout, (FileTensor(name, shape),), needs)


def _stack(layout: Layout, name: str, *shape: str) -> Weight:
    """Returns the weight of one expert, which is a part of a tensor with all experts."""
    return Weight(layout, (FileTensor(name, ("experts", *shape), stacks_experts=True),))


def _separate_qkv(layout: Layout, queries: str) -> Weight:
    """Returns the projection of queries, keys and values, whose query part has `queries` rows."""
    return Weight(
        layout,
        (
            FileTensor("self_attn.q_proj.weight", (queries, "hidden")),
            FileTensor("self_attn.k_proj.weight", ("keys", "hidden")),
            FileTensor("self_attn.v_proj.weight", ("keys", "hidden")),
        ),
    )


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

GEMMA3_PRE_NORMS: Mapping[str, Weight] = {
    "input_layernorm.weight": _weight("replicated", "input_layernorm.weight", "hidden"),
    "pre_mlp_layernorm.weight": _weight("replicated", "pre_feedforward_layernorm.weight", "hidden"),
}

OUTPUT_NORMS: Mapping[str, Weight] = {
    "self_attn_bda.weight": _weight("replicated", "post_attention_layernorm.weight", "hidden"),
    "mlp_bda.weight": _weight("replicated", "post_feedforward_layernorm.weight", "hidden"),
}
"""Norms of the outputs of attention and MLP, which megatron-core adds to the residual there."""

GLM4_OUTPUT_NORMS: Mapping[str, Weight] = {
    "self_attn_bda.weight": _weight("replicated", "post_self_attn_layernorm.weight", "hidden"),
    "mlp_bda.weight": _weight("replicated", "post_mlp_layernorm.weight", "hidden"),
}

ATTENTION: Mapping[str, Weight] = {
    "self_attention.linear_qkv.weight": _separate_qkv("qkv", "queries"),
    "self_attention.linear_proj.weight": _weight(
        "rows", "self_attn.o_proj.weight", "hidden", "queries"
    ),
}
"""Projections of queries, keys, values and the output."""

FUSED_QKV: Mapping[str, Weight] = {
    "self_attention.linear_qkv.weight": _weight(
        "fused_qkv", "self_attn.qkv_proj.weight", "qkv", "hidden"
    ),
}
"""Queries, keys and values in one tensor of the file."""

GATED_ATTENTION: Mapping[str, Weight] = {
    **ATTENTION,
    "self_attention.linear_qkv.weight": _separate_qkv("gated_qkv", "queries_and_gates"),
}
"""Attention with an output gate, whose projection is joined with the queries'."""

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

OUTPUT_BIAS: Mapping[str, Weight] = {
    "self_attention.linear_proj.bias": _weight("replicated", "self_attn.o_proj.bias", "hidden"),
}

QK_NORM: Mapping[str, Weight] = {
    "self_attention.q_layernorm.weight": _weight(
        "replicated", "self_attn.q_norm.weight", "head", needs="qk_norm"
    ),
    "self_attention.k_layernorm.weight": _weight(
        "replicated", "self_attn.k_norm.weight", "head", needs="qk_norm"
    ),
}

ALL_HEADS_QK_NORM: Mapping[str, Weight] = {
    "self_attention.q_layernorm.weight": _weight("columns", "self_attn.q_norm.weight", "queries"),
    "self_attention.k_layernorm.weight": _weight("columns", "self_attn.k_norm.weight", "keys"),
}
"""Norms over the features of all heads."""

SINKS: Mapping[str, Weight] = {
    "self_attention.core_attention.sinks": _weight("columns", "self_attn.sinks", "heads"),
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

MLP: Mapping[str, Weight] = _gated_mlp("mlp", "mlp", "inner")
"""The MLP of a dense layer."""

FUSED_GATE_UP: Mapping[str, Weight] = {
    "mlp.linear_fc1.weight": _weight("fused_gated", "mlp.gate_up_proj.weight", "gate_up", "hidden"),
}
"""Gate and up projection in one tensor of the file."""

EXPERTS: Mapping[str, Weight] = {
    "mlp.router.weight": _weight("replicated", "mlp.gate.weight", "experts", "hidden"),
    **_gated_mlp("mlp.experts.local_experts.*", "mlp.experts.{expert}", "expert_inner"),
}
"""Router and experts of a sparse layer."""

SELECTION_BIAS: Mapping[str, Weight] = {
    "mlp.router.expert_bias": _weight("replicated", "mlp.gate.e_score_correction_bias", "experts"),
}

GPT_OSS_EXPERTS: Mapping[str, Weight] = {
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
}
"""Router and experts of gpt-oss, with biases."""

SHARED_EXPERTS: Mapping[str, Weight] = _gated_mlp(
    "mlp.shared_experts", "mlp.shared_experts", "shared_inner"
)

GATED_SHARED_EXPERT: Mapping[str, Weight] = {
    **_gated_mlp("mlp.shared_experts", "mlp.shared_expert", "shared_inner"),
    "mlp.shared_experts.gate_weight": _weight(
        "replicated", "mlp.shared_expert_gate.weight", "one", "hidden"
    ),
}

LLAMA: Mapping[str, Weight] = {**PRE_NORMS, **ATTENTION, **MLP}

DEEPSEEK: Mapping[str, Weight] = {
    **PRE_NORMS,
    **LATENT_ATTENTION,
    **MLP,
    **EXPERTS,
    **SHARED_EXPERTS,
}
