"""Fields of config.json that change a model's numbers and that no family reads.

transformers ignores most of them for the supported families, but SGLang or vLLM may follow them. A
model that has one is refused, because training would compute another model than the server.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from slime_tis.errors import quoted
from slime_tis.families import FAMILIES, Experts, Family

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    # attention
    "dual_chunk_attention_config": (None,),
    "attention_chunk_size": (None,),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "clip_qkv": (None,),
    "attention_out_bias": (None, False),
    "no_rope_layers": (None,),
    "index_topk": (None, 0),
    "alibi": (None, False),
    "use_mrope": (None, False),
    # scales of Granite, Cohere and MiniCPM
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "scale_emb": (None, 1),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    # layers
    "use_parallel_residual": (None, False),
    "parallel_attn": (None, False),
    "moe_layer_freq": (None, 1),
    "interleave_moe_layer_step": (None, 1),
}
"""Values with which a field changes nothing. A family that reads a field accepts any value."""
ROPE_FIELDS = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
    "truncate",
)
"""Fields of rope_parameters and rope_scaling that transformers reads."""


def unread_problems(model: Mapping[str, Any]) -> Iterator[str]:
    """Yields a description of each field that changes numbers and is not read.

    Args:
        model: config.json of a supported family.
    """
    family = FAMILIES[model["architectures"][0]]
    read = _fields_of(family)
    for name, neutral in NEUTRAL_VALUES.items():
        if name in model and name not in read and model[name] not in neutral:
            yield f"{name} {quoted(model[name])}"
    yield from _attention_problems(model, family)
    attention = family.attention
    known = {*ROPE_FIELDS, *attention.rotary_kinds, *attention.unused_rope_fields}
    for name in ("rope_parameters", "rope_scaling"):
        rope = model.get(name)
        if isinstance(rope, dict):
            for field in sorted(rope.keys() - known):
                yield f"{field} {quoted(rope[field])} in {name}"
    if family.experts is not None:
        yield from _router_problems(model, family.experts)


def _fields_of(family: Family) -> set[str]:
    """Returns the names of fields of config.json that an entry has."""
    names = set()
    for part in (family.attention, family.experts):
        if part is None:
            continue
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, str):
                names.add(value)
    return names


def _router_problems(model: Mapping[str, Any], experts: Experts) -> Iterator[str]:
    """Yields scores, choices and scales that the family's router does not have."""
    is_sigmoid = experts.router == "sigmoid"
    score = "sigmoid" if is_sigmoid else "softmax"
    if model.get("scoring_func") not in (None, score):
        yield f"scoring_func {quoted(model['scoring_func'])}"
    # SGLang and vLLM give the router a selection bias only with this value.
    if is_sigmoid and model.get("topk_method") not in (None, "noaux_tc"):
        yield f"topk_method {quoted(model['topk_method'])}"
    scale = model.get("routed_scaling_factor")
    if experts.router in ("softmax", "chosen_softmax") and scale not in (None, 1):
        yield f"routed_scaling_factor {quoted(scale)}"


def _attention_problems(model: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yields windows and types of layers that the family does not have."""
    has_windows = family.attention.window is not None
    window = model.get("sliding_window")
    # The Qwen families have a window that this flag switches on.
    if not has_windows and window is not None and model.get("use_sliding_window") is not False:
        yield f"sliding_window {quoted(window)} without use_sliding_window false"
    if family.biases and model.get("attention_bias") is False:
        yield "attention_bias false"
    kinds = model.get("layer_types")
    if not isinstance(kinds, list):
        return
    known = {"full_attention"}
    if family.attention.has_typed_windows:
        known.add("sliding_attention")
    elif has_windows and window is not None:
        # transformers gives all layers the window, vLLM only those of this type.
        known = {"sliding_attention"}
    if family.attention.has_delta_nets:
        known.add("linear_attention")
    for kind in kinds:
        if kind not in known:
            yield f"{quoted(kind)} in layer_types"
            return
