"""Reads and checks the configuration of a Hugging Face model directory.

Each ValueError names the file.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tis.atomic_files import parse_object
from slime_tis.errors import first_line, one_line, quoted, quoted_path
from slime_tis.families import FAMILIES, family_of
from slime_tis.unread_fields import unread_problems
from slime_tis.unsupported_families import UNSUPPORTED

ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Supported values of rope_type."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
"""Values of rope_type whose frequencies depend on the length of a sequence."""
CONVERTED = ("fp8", "mxfp4")
"""Values of quant_method that `slime_tis.trainer.storage.dequantize` knows."""
COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "n_routed_experts",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "full_attention_interval",
)
"""Fields of config.json that are positive integers."""
FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "qkv_bias",
    "use_qk_norm",
    "mlp_bias",
    "use_sliding_window",
    "norm_topk_prob",
    "rope_interleave",
)
"""Fields of config.json that are true or false."""


def _is_count(value: object, most: int = 2**31 - 1) -> bool:
    return type(value) is int and 0 < value <= most


def _is_count_or_zero(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_positive(value: object) -> bool:
    return _is_number(value) and value > 0  # type: ignore[operator]  # a number


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(COUNTS, (_is_count, "a whole number above 0 and below 2**31")),
    **dict.fromkeys(FLAGS, (_is_flag, "true or false")),
    # transformers makes a list with an entry for each layer before it reads weights
    "num_hidden_layers": (lambda value: _is_count(value, 1024), "a whole number from 1 to 1024"),
    "rms_norm_eps": (lambda value: _is_number(value) and 0 <= value < 1, "a number from 0 to 1"),
    "routed_scaling_factor": (_is_positive, "a number above 0"),
    "first_k_dense_replace": (_is_count_or_zero, "a whole number from 0 to below 2**31"),
    "query_pre_attn_scalar": (_is_positive, "a number above 0"),
    "swiglu_alpha": (_is_positive, "a number above 0"),
    "swiglu_limit": (_is_positive, "a number above 0"),
    "rope_theta": (_is_positive, "a number above 0"),
    "factor": (_is_positive, "a number above 0"),
    "rope_scaling": (_is_object, "an object"),
    "rope_parameters": (_is_object, "an object"),
}
"""Test and description of the valid values of optional fields of config.json and its rope
objects."""


@dataclass(frozen=True, kw_only=True)
class MoeSizes:
    """The mixture-of-experts layers of a model."""

    layers: tuple[int, ...]
    """Indices of the sparse layers, ascending."""
    num_experts: int
    """Routed experts of a sparse layer."""
    top_k: int
    """Routed experts per token."""
    intermediate_size: int
    """Inner size of a routed expert."""
    shared_intermediate_size: int | None
    """Inner size of the shared expert, or None."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Limits on prompts; None if config.json lacks the field."""

    context_len: int | None
    """Maximum tokens of prompt and response."""
    vocab_size: int | None
    """Number of token ids."""


def read_model_config(directory: str | Path, flag: str = "--hf-checkpoint") -> dict[str, Any]:
    """Returns the content of config.json.

    Raises:
        ValueError: The model is not supported, or a field is invalid. The message names `flag`.
    """
    path = Path(directory) / "config.json"
    where = f"{flag} is {quoted_path(directory)}"
    if not path.is_file():
        raise ValueError(
            f"{where} but holds no config.json; give a Hugging Face directory, or ORG/NAME or"
            " ORG/NAME@REVISION of a model of the Hub."
        )
    model = parse_object(path.read_bytes(), f"{where} but its config.json")
    architectures = model.get("architectures") or ["unknown"]
    name = architectures
    if isinstance(architectures, list):
        name = architectures[0]
    if not isinstance(architectures, list) or name not in FAMILIES:
        reason = ""
        if isinstance(name, str) and name in UNSUPPORTED:
            reason = f" {UNSUPPORTED[name]}"
        raise ValueError(
            f"{where} of the architecture {one_line(str(name))} but supported are"
            f" {', '.join(FAMILIES)}; give a checkpoint of one of these.{reason}"
        )
    quantization = model.get("quantization_config")
    if quantization is not None:
        advice = "give a checkpoint that is not quantized"
        if isinstance(quantization, dict) and quantization.get("quant_method") in CONVERTED:
            advice = (
                "convert it with python -m slime_tis.trainer.storage.dequantize DIR OUT_DIR, and"
                " give OUT_DIR"
            )
        raise ValueError(
            f"{where}, whose config.json has quantization_config {quoted(quantization)}; {advice}."
        )
    _check_fields(model, f"{where}, whose config.json has")
    return model


def load_config(directory: str | Path) -> Any:
    """Returns transformers' configuration of a checkpoint, with the family's defaults."""
    from transformers import CONFIG_MAPPING, AutoConfig

    path = Path(directory) / "config.json"
    model = parse_object(path.read_bytes(), str(path))
    family = FAMILIES[model["architectures"][0]]
    try:
        if model.get("model_type") in family.aliases:
            fields = {**model, "model_type": family.model_type}
            hf = CONFIG_MAPPING[family.model_type].from_dict(fields)
        else:
            hf = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers checks fields with errors of several libraries
        raise ValueError(
            f"{Path(directory) / 'config.json'} is not accepted: {first_line(error)}."
        ) from error
    if hf.model_type != family.model_type:
        problem = f"model_type {quoted(model.get('model_type'))}"
        if hf.model_type != model.get("model_type"):
            # such as Ministral: Mistral with types of layers
            problem += f", which transformers reads as {quoted(hf.model_type)} with these fields"
        problem += f" and which does not match {hf.architectures[0]}; {family.model_type} does"
    else:
        problem = _absent_field(hf) or _layers_problem(hf) or _moe_problem(hf)
    if problem:
        raise ValueError(f"{Path(directory) / 'config.json'} has {problem}.")
    return hf


def _absent_field(hf: Any) -> str:
    """Returns a field that the family reads and that has no value, or an empty text."""
    family = family_of(hf)
    names: list[str] = []
    if family.attention.latent:
        names += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    experts = family.experts
    if experts is not None:
        names += [experts.count, experts.size, "num_experts_per_tok"]
        if experts.sparse_layers == "first_k_dense_replace":
            names.append(experts.sparse_layers)
        if experts.router == "sigmoid":
            names += ["n_group", "topk_group"]
    for name in names:
        if getattr(hf, name) is None:
            return f"no {name}, which {family.title} needs"
    return ""


def _layers_problem(hf: Any) -> str:
    """Returns an invalid window or number of entries in a field of all layers, or an empty text."""
    family = family_of(hf)
    names = ["layer_types", "mlp_layer_types"]
    if family.attention.rotary_layers is not None:
        names.append(family.attention.rotary_layers)
    for name in names:
        entries = getattr(hf, name, None)
        if entries is not None and len(entries) != hf.num_hidden_layers:
            return f"{len(entries)} entries in {name}, but {hf.num_hidden_layers} layers"
    field = family.attention.window
    if field is None:  # Qwen models have 0 if use_sliding_window is false
        return ""
    window = getattr(hf, field)
    types = getattr(hf, "layer_types", None) or []
    if window is None and "sliding_attention" in types:
        return f"sliding_attention in layer_types, but no {field}"
    if window is not None and not _is_count(window):
        return f"{field} {quoted(window)}, which must be a whole number above 0"
    return ""


def moe_layers(hf: Any) -> list[int]:
    """Returns the indices of the sparse layers of transformers' configuration, ascending."""
    experts = family_of(hf).experts
    if experts is None:
        return []
    if experts.sparse_layers == "all":
        return list(range(hf.num_hidden_layers))
    if experts.sparse_layers == "mlp_layer_types":
        return [layer for layer, kind in enumerate(hf.mlp_layer_types) if kind == "sparse"]
    if experts.sparse_layers == "first_k_dense_replace":
        return list(range(hf.first_k_dense_replace, hf.num_hidden_layers))
    layers = []
    for layer in range(hf.num_hidden_layers):
        is_sparse = (layer + 1) % hf.decoder_sparse_step == 0
        if is_sparse and layer not in hf.mlp_only_layers:
            layers.append(layer)
    return layers


def moe_sizes(hf: Any) -> MoeSizes | None:
    """Returns the sizes of the sparse layers of transformers' configuration; None if dense."""
    layers = moe_layers(hf)
    experts = family_of(hf).experts
    if not layers or experts is None:
        return None
    shared = None
    if experts.shared_size is not None:
        shared = getattr(hf, experts.shared_size)
    if experts.shared_count is not None:
        shared = getattr(hf, experts.shared_count) * hf.moe_intermediate_size
    return MoeSizes(
        layers=tuple(layers),
        num_experts=getattr(hf, experts.count),
        top_k=hf.num_experts_per_tok,
        intermediate_size=getattr(hf, experts.size),
        shared_intermediate_size=shared,
    )


def _moe_problem(hf: Any) -> str:
    """Returns an unsupported property of the sparse layers, or an empty text."""
    experts = family_of(hf).experts
    sizes = moe_sizes(hf)
    if experts is None or sizes is None:
        return ""
    problem = ""
    if experts.router == "sigmoid":
        problem = _sigmoid_router_problem(hf, sizes)
    elif experts.router == "greedy_softmax":
        problem = _greedy_router_problem(hf)
    elif experts.router == "softmax" and sizes.top_k == 1 and hf.norm_topk_prob:
        problem = "norm_topk_prob true with num_experts_per_tok 1, whose router has no gradient"
    elif experts.router == "chosen_softmax" and sizes.top_k == 1:
        problem = "num_experts_per_tok 1, whose router has no gradient"
    if not problem and sizes.top_k > sizes.num_experts:
        problem = f"num_experts_per_tok {sizes.top_k}, of {sizes.num_experts} experts"
    return problem


def _greedy_router_problem(hf: Any) -> str:
    """Returns an unsupported property of a router of DeepSeek-V2, or an empty text."""
    # megatron-core scores a group by several experts, DeepSeek-V2 by its best one
    if hf.topk_method != "greedy":
        return f"topk_method {quoted(hf.topk_method)}, but only greedy is supported"
    # transformers ignores the field
    if hf.norm_topk_prob:
        return "norm_topk_prob true, which is not supported for this family"
    return ""


def _sigmoid_router_problem(hf: Any, sizes: MoeSizes) -> str:
    """Returns an unsupported property of a router with groups of experts, or an empty text."""
    experts = sizes.num_experts
    top_k = sizes.top_k
    groups = hf.n_group
    chosen = hf.topk_group
    routing = (
        f"num_experts_per_tok {top_k} of {experts} experts, n_group {groups}, topk_group {chosen}"
    )
    # transformers ignores this field if mlp_layer_types decides
    first = getattr(hf, "first_k_dense_replace", None)
    if first is None:
        first = sizes.layers[0]
    if list(sizes.layers) != list(range(first, hf.num_hidden_layers)):
        return f"first_k_dense_replace {first}, but other layers have experts"
    # megatron-core divides the scores of several experts by their sum; it does not divide the score
    # of a single expert
    if hf.norm_topk_prob != (top_k > 1):
        return f"norm_topk_prob {hf.norm_topk_prob} with {routing}, which is not supported"
    if groups == 1:
        return ""
    fits = experts % groups == 0 and chosen <= groups and chosen * (experts // groups) >= top_k
    # megatron-core scores a group by its best top_k / topk_group experts, the model by its best two
    if not fits or top_k // chosen != 2:
        return f"{routing}, which do not fit"
    return ""


def check_generation_config(directory: str | Path) -> None:
    """Refuses a damaged generation_config.json, and end tokens that are no token ids."""
    path = Path(directory) / "generation_config.json"
    if not path.is_file():
        return
    where = f"--hf-checkpoint is {quoted_path(directory)} but its generation_config.json"
    ids = parse_object(path.read_bytes(), where).get("eos_token_id")
    tokens = ids if isinstance(ids, list) else [ids]
    for token in tokens:
        if token is not None and not (type(token) is int and 0 <= token < 2**31):
            raise ValueError(
                f"{where} has eos_token_id {quoted(ids)}, which must be a token id or a list of"
                " them."
            )


def model_sizes(model: Mapping[str, Any]) -> ModelSizes:
    """Returns the sizes in config.json."""
    return ModelSizes(
        context_len=model.get("max_position_embeddings"), vocab_size=model.get("vocab_size")
    )


def _check_rope_type(rope: Mapping[str, Any], where: str) -> None:
    """Refuses kinds of rotary frequencies that are not known, or depend on the length."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in LENGTH_DEPENDENT_ROPE:
        # SGLang 0.5.23 scales "dynamic" at every length, transformers only beyond the context.
        raise ValueError(
            f"{where} rope_type {quoted(kind)}, whose frequencies depend on the length of a"
            " sequence, which is not supported; choose a model with another rope_type."
        )
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{where} rope_type {quoted(kind)}, but known are {', '.join(ROPE_TYPES)}."
        )


def _check_fields(model: Mapping[str, Any], where: str) -> None:
    """Refuses invalid fields of config.json and its rope objects, and sizes that do not divide."""
    ropes = []
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(model.get(name), dict):
            ropes.append(model[name])
            # Gemma 3 has one object for each type of layers.
            ropes += [value for value in model[name].values() if isinstance(value, dict)]
    for fields in (model, *ropes):
        for name, (is_valid, description) in FIELDS.items():
            if fields.get(name) is not None and not is_valid(fields[name]):
                raise ValueError(
                    f"{where} {name} {quoted(fields[name])}, which must be {description}."
                )
    for rope in ropes:
        _check_rope_type(rope, where)
    family = FAMILIES[model["architectures"][0]]
    for problem in unread_problems(model):
        raise ValueError(
            f"{where} {problem}, which changes the model's numbers and is not supported for"
            f" {family.title}; choose a checkpoint without it."
        )
    if family.attention.has_delta_nets:
        _check_delta_net_sizes(model, where)
    if family.attention.latent:
        _check_latent_sizes(model, where)
    else:
        _check_head_sizes(model, where)


def _check_delta_net_sizes(model: Mapping[str, Any], where: str) -> None:
    """Refuses heads of gated delta nets that do not divide."""
    keys = model.get("linear_num_key_heads") or 1
    values = model.get("linear_num_value_heads") or keys
    if values % keys:
        raise ValueError(
            f"{where} linear_num_value_heads {values}, which must be a multiple of"
            f" linear_num_key_heads {keys}."
        )


def _check_latent_sizes(model: Mapping[str, Any], where: str) -> None:
    """Refuses sizes of latent attention that do not fit."""
    heads = model.get("num_attention_heads")
    key_heads = model.get("num_key_value_heads")
    if key_heads is not None and key_heads != heads:
        raise ValueError(
            f"{where} num_key_value_heads {key_heads}, which must be num_attention_heads {heads}"
            " in latent attention."
        )
    rotated = model.get("qk_rope_head_dim") or 2
    if rotated % 2:
        raise ValueError(f"{where} qk_rope_head_dim {rotated}, which must be even.")


def _check_head_sizes(model: Mapping[str, Any], where: str) -> None:
    """Refuses heads of grouped queries whose sizes do not divide."""
    heads = model.get("num_attention_heads") or 1
    hidden = model.get("hidden_size") or 2 * heads
    groups = model.get("num_key_value_heads") or 1
    width = model.get("head_dim")
    if heads % groups:
        raise ValueError(
            f"{where} num_attention_heads {heads}, which must be a multiple of {groups} key-value"
            " heads."
        )
    if (width or hidden // heads) % 2 or (width is None and hidden % heads):
        raise ValueError(
            f"{where} heads of {width or hidden / heads:g} numbers, which must be whole and even."
        )
