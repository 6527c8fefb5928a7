"""Checks of a Hugging Face model directory that do not read the weights.

Each ValueError names the file.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from slime_tis.atomic_files import parse_object
from slime_tis.errors import first_line, one_line, quoted, quoted_path


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences between families of decoders."""

    rotary_class: str
    """Class in transformers that computes the rotary frequencies, as `module:name`."""
    qkv_bias: bool | str = False
    """Bias on the query, key and value projections, or the field of config.json with this flag."""
    qk_norm: bool | str = False
    """RMSNorm on queries and keys, per head, or the field of config.json with this flag."""
    moe: bool = False
    """Whether layers are mixtures of experts."""
    sigmoid_router: bool = False
    """Whether routers score experts by a sigmoid and choose them by score and bias, instead of by a
    softmax."""
    shared_expert: str | None = None
    """Tensor prefix of the shared expert within a layer."""
    shared_expert_gate: str | None = None
    """Tensor prefix of the shared expert's gate."""


ROTARY = "transformers.models.{0}.modeling_{0}:{1}RotaryEmbedding"
FAMILIES = {
    "LlamaForCausalLM": Family(rotary_class=ROTARY.format("llama", "Llama")),
    "Qwen2ForCausalLM": Family(rotary_class=ROTARY.format("qwen2", "Qwen2"), qkv_bias=True),
    "Qwen3ForCausalLM": Family(rotary_class=ROTARY.format("qwen3", "Qwen3"), qk_norm=True),
    "Qwen2MoeForCausalLM": Family(
        rotary_class=ROTARY.format("qwen2_moe", "Qwen2Moe"),
        qkv_bias="qkv_bias",
        moe=True,
        shared_expert="mlp.shared_expert",
        shared_expert_gate="mlp.shared_expert_gate",
    ),
    "Qwen3MoeForCausalLM": Family(
        rotary_class=ROTARY.format("qwen3_moe", "Qwen3Moe"), qk_norm=True, moe=True
    ),
    "Glm4MoeForCausalLM": Family(
        rotary_class=ROTARY.format("glm4_moe", "Glm4Moe"),
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        moe=True,
        sigmoid_router=True,
        shared_expert="mlp.shared_experts",
    ),
}
"""Supported families, by their architecture in config.json."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
"""Supported values of rope_type."""
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
)
"""Fields of config.json that are true or false."""


def _is_count(value: object, most: int = 2**31 - 1) -> bool:
    return type(value) is int and 0 < value <= most


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
    "rope_theta": (_is_positive, "a number above 0"),
    "factor": (_is_positive, "a number above 0"),
    "rope_scaling": (_is_object, "an object"),
    "rope_parameters": (_is_object, "an object"),
}
"""Test and description of the valid values of optional fields of config.json and its rope
objects."""
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the supported types of weights."""
INDEX = "model.safetensors.index.json"
"""File that maps tensor names to safetensors files."""
SINGLE = "model.safetensors"
"""File with all tensors, if there is no index."""


def has(hf: Any, flag: bool | str) -> bool:
    """Returns the value of a flag of `Family`, which may name a field of the configuration."""
    if isinstance(flag, str):
        return bool(getattr(hf, flag))
    return flag


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
        raise ValueError(
            f"{where} of the architecture {one_line(str(name))} but supported are"
            f" {', '.join(FAMILIES)}; give a checkpoint of one of these."
        )
    quantization = model.get("quantization_config")
    if quantization is not None:
        raise ValueError(
            f"{where}, whose config.json has quantization_config {quoted(quantization)}; give a"
            " checkpoint that is not quantized."
        )
    _check_fields(model, f"{where}, whose config.json has")
    return model


def load_config(directory: str | Path) -> Any:
    """Returns transformers' configuration of a checkpoint, with the family's defaults."""
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers checks fields with errors of several libraries
        raise ValueError(
            f"{Path(directory) / 'config.json'} is not accepted: {first_line(error)}."
        ) from error
    problem = _moe_problem(hf)
    if problem:
        raise ValueError(f"{Path(directory) / 'config.json'} has {problem}.")
    return hf


def moe_layers(hf: Any) -> list[int]:
    """Returns the indices of the sparse layers of transformers' configuration, ascending."""
    if not FAMILIES[hf.architectures[0]].moe:
        return []
    if hasattr(hf, "first_k_dense_replace"):
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
    if not layers:
        return None
    if hasattr(hf, "n_routed_experts"):
        num_experts = hf.n_routed_experts
        shared = hf.n_shared_experts * hf.moe_intermediate_size
    else:
        num_experts = hf.num_experts
        shared = getattr(hf, "shared_expert_intermediate_size", None)
    return MoeSizes(
        layers=tuple(layers),
        num_experts=num_experts,
        top_k=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        shared_intermediate_size=shared,
    )


def _moe_problem(hf: Any) -> str:
    """Returns an unsupported property of the sparse layers, or an empty text."""
    family = FAMILIES[hf.architectures[0]]
    has_layers = hasattr(hf, "first_k_dense_replace") or hasattr(hf, "decoder_sparse_step")
    if family.moe and not has_layers:
        return f"model_type {quoted(hf.model_type)}, which does not match {hf.architectures[0]}"
    sizes = moe_sizes(hf)
    if sizes is None:
        return ""
    problem = ""
    if family.sigmoid_router:
        problem = _sigmoid_router_problem(hf, sizes)
    elif sizes.top_k == 1 and hf.norm_topk_prob:
        problem = "norm_topk_prob true with num_experts_per_tok 1, whose router has no gradient"
    if not problem and sizes.top_k > sizes.num_experts:
        problem = f"num_experts_per_tok {sizes.top_k}, of {sizes.num_experts} experts"
    return problem


def _sigmoid_router_problem(hf: Any, sizes: MoeSizes) -> str:
    """Returns an unsupported property of a router with groups of experts, or an empty text."""
    experts = sizes.num_experts
    top_k = sizes.top_k
    groups = hf.n_group
    chosen = hf.topk_group
    routing = (
        f"num_experts_per_tok {top_k} of {experts} experts, n_group {groups}, topk_group {chosen}"
    )
    if sizes.layers[0] < 0:
        return f"first_k_dense_replace {sizes.layers[0]}, which must be 0 or more"
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


def tensor_files(directory: str | Path) -> dict[str, Path]:
    """Returns the files by tensor name.

    Raises:
        ValueError: A file is missing, damaged, or outside the directory.
    """
    directory = Path(directory)
    index = directory / INDEX
    if index.is_file():
        return _indexed_files(directory, index)
    single = directory / SINGLE
    if not single.is_file():
        raise ValueError(
            f"{directory} has no {SINGLE} and no {INDEX}; only checkpoints in safetensors are read."
        )
    return dict.fromkeys(_tensors_of(single), single)


def check_tensors(directory: str | Path, model: Mapping[str, Any]) -> None:
    """Checks that a checkpoint has all tensors of the model, and reads only the files' headers.

    Raises:
        ValueError: A tensor is missing, or has another shape or an unsupported type.
    """
    files = tensor_files(directory)
    headers: dict[Path, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, shape in expected_tensors(directory, model):
        if name not in files:
            raise ValueError(f"{directory} has no tensor {name}, which its config.json asks for.")
        path = files[name]
        if path not in headers:
            headers[path] = _tensors_of(path)
        if name not in headers[path]:
            raise ValueError(f"{path} has no tensor {name}, which {INDEX} says it has.")
        kind, actual = headers[path][name]
        if actual != shape:
            raise ValueError(
                f"{path}: the tensor {name} has the shape {list(actual)}, but by config.json it is"
                f" {list(shape)}."
            )
        if kind not in FLOAT_TYPES:
            raise ValueError(
                f"{path}: the tensor {name} is of type {kind}, not one of {', '.join(FLOAT_TYPES)}."
            )


def expected_tensors(
    directory: str | Path, model: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor of a model."""
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    for name in required:
        if model.get(name) is None:
            raise ValueError(
                f"{Path(directory) / 'config.json'} has no {name}, which every model has."
            )
    family = FAMILIES[model["architectures"][0]]
    hf = None
    moe = None
    if family.moe:
        hf = load_config(directory)
        moe = moe_sizes(hf)
    hidden = model["hidden_size"]
    yield "model.embed_tokens.weight", (model["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not model.get("tie_word_embeddings", False):
        yield "lm_head.weight", (model["vocab_size"], hidden)
    for layer in range(model["num_hidden_layers"]):
        if moe is not None and layer in moe.layers:
            mlp = _moe_tensors(hidden, family, moe)
        else:
            mlp = _mlp_tensors("mlp", hidden, model["intermediate_size"])
        for name, shape in chain(_attention_tensors(model, family, hf), mlp):
            yield f"model.layers.{layer}.{name}", shape


def _attention_tensors(
    model: Mapping[str, Any], family: Family, hf: Any
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = model["hidden_size"]
    heads = model["num_attention_heads"]
    groups = model.get("num_key_value_heads") or heads
    width = model.get("head_dim") or hidden // heads
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    projections = {"q_proj": heads * width, "k_proj": groups * width, "v_proj": groups * width}
    for name, rows in projections.items():
        yield f"self_attn.{name}.weight", (rows, hidden)
        if has(hf, family.qkv_bias):
            yield f"self_attn.{name}.bias", (rows,)
    if has(hf, family.qk_norm):
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)
    yield "self_attn.o_proj.weight", (hidden, heads * width)


def _mlp_tensors(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _moe_tensors(
    hidden: int, family: Family, moe: MoeSizes
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mlp.gate.weight", (moe.num_experts, hidden)
    if family.sigmoid_router:
        yield "mlp.gate.e_score_correction_bias", (moe.num_experts,)
    for expert in range(moe.num_experts):
        yield from _mlp_tensors(f"mlp.experts.{expert}", hidden, moe.intermediate_size)
    if family.shared_expert is not None and moe.shared_intermediate_size is not None:
        yield from _mlp_tensors(family.shared_expert, hidden, moe.shared_intermediate_size)
    if family.shared_expert_gate is not None:
        yield f"{family.shared_expert_gate}.weight", (1, hidden)


def _check_fields(model: Mapping[str, Any], where: str) -> None:
    """Refuses invalid fields of config.json and its rope objects, and sizes that do not divide."""
    ropes = []
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(model.get(name), dict):
            ropes.append(model[name])
    for fields in (model, *ropes):
        for name, (is_valid, description) in FIELDS.items():
            if fields.get(name) is not None and not is_valid(fields[name]):
                raise ValueError(
                    f"{where} {name} {quoted(fields[name])}, which must be {description}."
                )
    for rope in ropes:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise ValueError(
                f"{where} rope_type {quoted(kind)}, but known are {', '.join(ROPE_TYPES)}."
            )
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


def _indexed_files(directory: Path, index: Path) -> dict[str, Path]:
    weight_map = parse_object(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"{index} has no weight_map, an object that names the file of each tensor."
        )
    paths: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise ValueError(
                f"{index} names {quoted(file)} for the tensor {quoted(name)}, which is not a file"
                " name."
            )
        if file not in paths:
            paths[file] = _file_within(directory, index, file)
    return {name: paths[file] for name, file in weight_map.items()}


def _file_within(directory: Path, index: Path, file: str) -> Path:
    """Returns the path of a file in an index.

    Links may lead outside of the directory, as in Hugging Face's cache, but names may not.
    """
    name = PurePosixPath(file)
    if "\0" in file or "\\" in file or name.is_absolute() or ".." in name.parts:
        raise ValueError(
            f"{index} names {quoted(file)}, which is not a file within the directory; files outside"
            " are not read."
        )
    path = directory / file
    if not path.is_file():
        raise ValueError(
            f"{index} names {quoted(file)}, which does not exist; download the checkpoint again."
        )
    return path


def _tensors_of(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the types and shapes of the tensors in a safetensors file, from the header."""
    from safetensors import SafetensorError, safe_open

    try:
        open(path, "rb").close()  # safetensors reports a file without read permission as missing
        tensors = {}
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118  # the file is no dictionary
                header = file.get_slice(name)
                tensors[name] = (header.get_dtype(), tuple(header.get_shape()))
        return tensors
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{quoted_path(path)} cannot be read as safetensors ({first_line(error)}); download it"
            " again."
        ) from None
