"""Checks of a Hugging Face model directory that do not read its weights. Each ValueError names the file."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *(
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "num_experts",
        "num_local_experts",
    ),
    *(
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "decoder_sparse_step",
    ),
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group"),
)
FLAGS = (
    *(
        "tie_word_embeddings",
        "attention_bias",
        "qkv_bias",
        "use_qk_norm",
        "mlp_bias",
        "use_sliding_window",
    ),
    "norm_topk_prob",
)


def _is_count(value: object, most: int = 2**31 - 1) -> bool:
    return type(value) is int and 0 < value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(COUNTS, (_is_count, "a whole number above 0 and below 2**31")),
    **dict.fromkeys(FLAGS, (lambda value: type(value) is bool, "true or false")),
    # transformers makes a list with an entry for each layer before it reads weights
    "num_hidden_layers": (lambda value: _is_count(value, 1024), "a whole number from 1 to 1024"),
    "rms_norm_eps": (lambda value: _is_number(value) and 0 <= value < 1, "a number from 0 to 1"),
    **dict.fromkeys(
        ("routed_scaling_factor", "rope_theta", "factor"),
        (lambda x: _is_number(x) and x > 0, "a number above 0"),
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters"), (lambda value: isinstance(value, dict), "an object")
    ),
}
"""Test and description of the valid values of optional fields of config.json and its rope
objects."""
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the supported types of weights."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def has(hf: Any, part: bool | str) -> bool:
    """Returns the value of a flag of `Family`, read from the configuration if the flag is a field name."""
    return bool(getattr(hf, part)) if isinstance(part, str) else part


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
    """Returns the content of config.json; a ValueError names `flag` and an unsupported model or an invalid field."""
    path = Path(directory) / "config.json"
    where = f"{flag} is {quoted_path(directory)}"
    if not path.is_file():
        raise ValueError(f"{where} but holds no config.json; give a Hugging Face directory.")
    model = parse_object(path.read_bytes(), f"{where} but its config.json")
    architectures = model.get("architectures") or ["unknown"]
    if not isinstance(architectures, list) or architectures[0] not in FAMILIES:
        name = architectures[0] if isinstance(architectures, list) else architectures
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
    """Returns transformers' configuration of a checkpoint, with the defaults of its family."""
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
    step, dense = hf.decoder_sparse_step, set(hf.mlp_only_layers)
    return [
        layer
        for layer in range(hf.num_hidden_layers)
        if layer not in dense and (layer + 1) % step == 0
    ]


def moe_sizes(hf: Any) -> MoeSizes | None:
    """Returns the sizes of the sparse layers of transformers' configuration, or None without sparse layers."""
    layers = moe_layers(hf)
    if not layers:
        return None
    if hasattr(hf, "n_routed_experts"):
        num_experts, shared = hf.n_routed_experts, hf.n_shared_experts * hf.moe_intermediate_size
    else:
        num_experts, shared = hf.num_experts, getattr(hf, "shared_expert_intermediate_size", None)
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
    if family.moe and not (
        hasattr(hf, "first_k_dense_replace") or hasattr(hf, "decoder_sparse_step")
    ):
        return f"model_type {quoted(hf.model_type)}, which does not match {hf.architectures[0]}"
    sizes = moe_sizes(hf)
    if sizes is None:
        return ""
    experts, top_k, norm = sizes.num_experts, sizes.top_k, hf.norm_topk_prob
    routing = f"num_experts_per_tok {top_k}"
    if family.sigmoid_router:
        groups, chosen = hf.n_group, hf.topk_group
        routing += f" of {experts} experts, n_group {groups}, topk_group {chosen}"
        fits = experts % groups == 0 and chosen <= groups and chosen * (experts // groups) >= top_k
        problems = {
            f"first_k_dense_replace {sizes.layers[0]}, which must be 0 or more": (
                sizes.layers[0] < 0
            ),
            # megatron-core divides the scores of several experts by their sum, and of a single one
            # by nothing
            f"norm_topk_prob {norm} with {routing}, which is not supported": norm != (top_k > 1),
            # megatron-core scores a group by its best top_k / topk_group experts, the model by its
            # best two
            f"{routing}, which do not fit": groups > 1 and (not fits or top_k // chosen != 2),
        }
    else:
        problems = {
            f"norm_topk_prob true with {routing}, whose router has no gradient": (
                top_k == 1 and bool(norm)
            )
        }
    problems[f"num_experts_per_tok {top_k}, of {experts} experts"] = top_k > experts
    return next((problem for problem, holds in problems.items() if holds), "")


def check_generation_config(directory: str | Path) -> None:
    """Refuses a damaged generation_config.json, and end tokens in it that are no token ids."""
    path = Path(directory) / "generation_config.json"
    if not path.is_file():
        return
    where = f"--hf-checkpoint is {quoted_path(directory)} but its generation_config.json"
    ids = parse_object(path.read_bytes(), where).get("eos_token_id")
    for token in ids if isinstance(ids, list) else [ids]:
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
    """Returns the file of each tensor by the tensor's name; refuses missing, damaged and outside files."""
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
    """Refuses a checkpoint without all tensors of `read_model_config` in their shapes; reads only the headers."""
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
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        if model.get(name) is None:
            raise ValueError(
                f"{Path(directory) / 'config.json'} has no {name}, which every model has."
            )
    family = FAMILIES[model["architectures"][0]]
    hf = load_config(directory) if family.moe else None
    moe = moe_sizes(hf) if family.moe else None
    hidden = model["hidden_size"]
    yield "model.embed_tokens.weight", (model["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not model.get("tie_word_embeddings", False):
        yield "lm_head.weight", (model["vocab_size"], hidden)
    for layer in range(model["num_hidden_layers"]):
        parts = [_attention_tensors(model, family, hf)]
        if moe is not None and layer in moe.layers:
            parts.append(_moe_tensors(hidden, family, moe))
        else:
            parts.append(_mlp_tensors("mlp", hidden, model["intermediate_size"]))
        for name, shape in itertools.chain(*parts):
            yield f"model.layers.{layer}.{name}", shape


def _attention_tensors(
    model: Mapping[str, Any], family: Family, hf: Any
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    groups, width = (
        model.get("num_key_value_heads") or heads,
        model.get("head_dim") or hidden // heads,
    )
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", (hidden,)
    for part, rows in (("q", heads * width), ("k", groups * width), ("v", groups * width)):
        yield f"self_attn.{part}_proj.weight", (rows, hidden)
        if has(hf, family.qkv_bias):
            yield f"self_attn.{part}_proj.bias", (rows,)
    if has(hf, family.qk_norm):
        for part in "qk":
            yield f"self_attn.{part}_norm.weight", (width,)
    yield "self_attn.o_proj.weight", (hidden, heads * width)


def _mlp_tensors(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("gate", "up"):
        yield f"{prefix}.{part}_proj.weight", (inner, hidden)
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
    ropes = [
        model[name]
        for name in ("rope_scaling", "rope_parameters")
        if isinstance(model.get(name), dict)
    ]
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
    groups, width = model.get("num_key_value_heads") or 1, model.get("head_dim")
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
    known: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise ValueError(
                f"{index} names {quoted(file)} for the tensor {quoted(name)}, which is not a file"
                " name."
            )
        if file not in known:
            known[file] = _file_within(directory, index, file)
    return {name: known[file] for name, file in weight_map.items()}


def _file_within(directory: Path, index: Path, file: str) -> Path:
    """Returns the path of a file in an index; links are allowed, as in Hugging Face's cache, names outside are not."""
    if (
        "\0" in file
        or "\\" in file
        or PurePosixPath(file).is_absolute()
        or ".." in PurePosixPath(file).parts
    ):
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
    """Returns the type and shape of each tensor of a safetensors file, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        open(path, "rb").close()  # safetensors reports a file without read permission as missing
        with safe_open(str(path), "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{quoted_path(path)} cannot be read as safetensors ({first_line(error)}); download it"
            " again."
        ) from None
