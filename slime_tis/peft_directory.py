"""Reads and writes LoRA adapters in PEFT's format, without importing PEFT.

A directory contains `adapter_config.json` and `adapter_model.safetensors`. For the linear layer
`model.layers.0.self_attn.q_proj`, the tensors are

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight  [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight  [out, rank]
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_tis.errors import first_line, quoted, quoted_path
from slime_tis.hf_tensors import FLOAT_TYPES, tensor_files, tensors_of

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
"""Names of the tensors of plain LoRA."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "layers_to_transform": (None,),
    "exclude_modules": (None, [], ""),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None,),
    # VeLoRA computes the same, but its files have more tensors than A and B.
    "velora_config": (None,),
    # Others, such as pissa, subtract the initial adapter from the model's weights.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Values of fields of adapter_config.json with plain LoRA; all other values are refused."""
WITHOUT_EFFECT = frozenset(
    [
        # Read by `read_adapter_config`.
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        # Names of models, files and versions.
        "auto_mapping",
        "base_model_name_or_path",
        "peft_version",
        "revision",
        "task_type",
        # Of training with PEFT.
        "inference_mode",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        # Where PEFT computes. PEFT does not save it, but verl and SkyRL do.
        "runtime_config",
        # Of initial values: A and B contain them, or NEUTRAL refuses init_lora_weights.
        "corda_config",
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        # Used only together with a field of NEUTRAL.
        "ensure_weight_tying",
        "layers_pattern",
        "qalora_group_size",
    ]
)
"""Fields of PEFT 0.21 that may have any value in plain LoRA."""
UNSET: tuple[Any, ...] = (None, False, "", [], {})
"""Values that PEFT writes for unused fields."""
OTHER_MATRIX = {"A": "B", "B": "A"}
"""The second matrix of a layer."""
MAX_RANK = 4096
"""Largest accepted rank, as of --lora-rank."""
MAX_ALPHA = 1e6
"""Largest accepted α, as of --lora-alpha."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The settings of an adapter."""

    rank: int
    alpha: float
    """α, with s = α / rank; for rank-stabilized LoRA already multiplied by √rank."""
    targets: tuple[str, ...]
    """Last parts of the names of the adapted layers, such as q_proj, sorted."""

    @property
    def scale(self) -> float:
        """s, by which the product of B and A is multiplied."""
        return self.alpha / self.rank


def tensor_name(layer: str, matrix: str) -> str:
    """Returns PEFT's name of A or B of a linear layer such as model.layers.0.mlp.up_proj."""
    return f"base_model.model.{layer}.lora_{matrix}.weight"


def is_adapter(directory: str | Path) -> bool:
    """Returns whether a directory contains an adapter in PEFT's format."""
    return (Path(directory) / CONFIG).is_file()


def base_model(directory: str | Path) -> str:
    """Returns the directory of the base model that an adapter's configuration names.

    Raises:
        ValueError: It names no model, or one that is not on this machine.
    """
    path = Path(directory) / CONFIG
    try:
        base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{quoted_path(path)} names no base_model_name_or_path: {first_line(error)}."
        ) from None
    if not isinstance(base, str) or not (Path(base) / "config.json").is_file():
        raise ValueError(
            f"{quoted_path(path)} has base_model_name_or_path {quoted(base)}, which is no model"
            " directory on this machine; write its path there."
        )
    return base


def read_adapter_config(directory: str | Path, subject: str) -> AdapterConfig:
    """Returns the settings of an adapter.

    Args:
        directory: The directory.
        subject: Beginning of error messages, such as the option and its value.

    Raises:
        ValueError: The directory has no adapter, or one that is not plain LoRA, or the tensors have
            another rank.
    """
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise ValueError(
            f"{subject} but it holds no {CONFIG}; give a directory that PEFT or --save-hf wrote."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{subject} but {quoted_path(path)} cannot be read: {first_line(error)}."
        ) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{subject} but {quoted_path(path)} is no LoRA adapter of PEFT.")
    _check_method(config, subject)
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ValueError(
            f"{subject} but its {CONFIG} has r {quoted(rank)}, which must be an integer from 1 to"
            f" {MAX_RANK}."
        )
    if type(alpha) not in (int, float) or not 0 < alpha <= MAX_ALPHA:
        raise ValueError(
            f"{subject} but its {CONFIG} has lora_alpha {quoted(alpha)}, which must be a number"
            f" above 0, and at most {MAX_ALPHA:,.0f}."
        )
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)
    targets = _targets(directory, rank, subject)
    _check_target_modules(config.get("target_modules"), targets, subject)
    return AdapterConfig(rank=rank, alpha=alpha, targets=targets)


def _check_method(config: Mapping[str, Any], subject: str) -> None:
    """Checks that an adapter's settings are those of plain LoRA.

    Raises:
        ValueError: A field of adapter_config.json has another value than with plain LoRA, or is
            unknown and has a value.
    """
    for name, values in NEUTRAL.items():
        if name in config and config[name] not in values:
            raise ValueError(
                f"{subject} but its {CONFIG} has {name} {quoted(config[name])}; only plain LoRA is"
                " supported."
            )
    for name, value in config.items():
        if name not in NEUTRAL and name not in WITHOUT_EFFECT and value not in UNSET:
            raise ValueError(
                f"{subject} but its {CONFIG} has {quoted(name)} {quoted(value)}, a field that this"
                " version does not know; the adapter may compute something other than plain LoRA."
                " If it is plain LoRA, remove the field from the file."
            )


def check_base(directory: str | Path, model: str | Path, subject: str, *, layers: int) -> None:
    """Checks from the files' headers that training can continue an adapter of a model.

    Args:
        directory: The adapter.
        model: Hugging Face directory.
        subject: Beginning of error messages, such as the option and its value.
        layers: num_hidden_layers of the model, all of which must have the adapter.

    Raises:
        ValueError: A file cannot be read, the model lacks an adapted layer or has it with another
            shape, or a layer has no adapter.
    """
    weights = _shapes_of_weights(model)
    headers = tensors_of(Path(directory) / WEIGHTS)
    for name, (_, shape) in headers.items():
        match = TENSOR.fullmatch(name)
        assert match is not None  # read_adapter_config refuses other names
        weight = f"{match['layer']}.weight"
        if weight not in weights:
            raise ValueError(
                f"{subject} but it adapts {match['layer']}, which {quoted_path(model)} does not"
                " have; it belongs to another model."
            )
        dimension = 1 if match["matrix"] == "A" else 0
        if shape[dimension] != weights[weight][dimension]:
            raise ValueError(
                f"{subject} but its tensor {name} has the shape {list(shape)}, and {weight} of"
                f" {quoted_path(model)} has {list(weights[weight])}; it belongs to another model."
            )
    check_all_layers(headers, layers, subject)


def check_all_layers(names: Iterable[str], layers: int, subject: str) -> None:
    """Checks that each adapted projection has its adapter in all layers of the model.

    Args:
        names: PEFT's names of the adapter's tensors.
        layers: Number of layers of the model.
        subject: Beginning of error messages, such as the option and its value.

    Raises:
        ValueError: A projection has adapters in fewer layers, or in more.
    """
    adapted = {name.rpartition(".lora_")[0] for name in names}
    counts = Counter(linear.rpartition(".")[2] for linear in adapted)
    for projection, count in sorted(counts.items()):
        if count != layers:
            raise ValueError(
                f"{subject} but its number of adapters of {projection} is {count}, and the model"
                f" has {layers} layers; only adapters of all layers are trained."
            )


def _shapes_of_weights(model: str | Path) -> dict[str, tuple[int, ...]]:
    """Reads the shapes of a checkpoint's tensors from the headers of its files."""
    shapes = {}
    for path in set(tensor_files(model).values()):
        for name, (_, shape) in tensors_of(path).items():
            shapes[name] = shape
    return shapes


def _check_target_modules(modules: Any, targets: tuple[str, ...], subject: str) -> None:
    """Refuses a list of layers that differs from the layers of the tensors.

    PEFT ignores tensors of layers that are not listed.

    Raises:
        ValueError: The list has other layers.
    """
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        return  # a regular expression, all-linear, or the default of PEFT
    listed = sorted({name.rpartition(".")[2] for name in modules})
    if listed != list(targets):
        names = ", ".join(listed) or "[]"
        raise ValueError(
            f"{subject} but its {CONFIG} has target_modules {names}, and its tensors are of"
            f" {', '.join(targets)}."
        )


def read_adapter_tensors(directory: str | Path, subject: str) -> "dict[str, Tensor]":
    """Returns the tensors by PEFT's names.

    Raises:
        ValueError: The file cannot be read, or a tensor has NaN or infinity.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(directory) / WEIGHTS
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{subject} but {quoted_path(path)} cannot be read: {first_line(error)}."
        ) from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{subject} but its tensor {name} holds NaN or infinity.")
    return tensors


def write_adapter(
    directory: Path, tensors: "Mapping[str, Tensor]", config: AdapterConfig, *, base: str
) -> None:
    """Writes an adapter in PEFT's format.

    Args:
        directory: An existing directory.
        tensors: A and B by PEFT's names, on the CPU.
        config: Settings.
        base: Path or name of the model without the adapter.

    Raises:
        OSError: A file could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }
    text = json.dumps(fields, indent=2) + "\n"
    (directory / CONFIG).write_text(text, encoding="utf-8")
    try:
        save_file(dict(tensors), directory / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # raised on a full disk
        raise OSError(str(error)) from error


def _targets(directory: str | Path, rank: int, subject: str) -> tuple[str, ...]:
    """Returns the last parts of the names of the adapted layers; checks the file's header.

    Raises:
        ValueError: The file cannot be read, a tensor is not an A or B of this rank, or a layer has
            only one of the two.
    """
    path = Path(directory) / WEIGHTS
    if not path.is_file():
        raise ValueError(
            f"{subject} but it holds no {WEIGHTS}; PEFT's save_pretrained writes this file."
        )
    try:
        headers = tensors_of(path)
    except ValueError as error:
        raise ValueError(f"{subject} but {error}") from None
    targets = set()
    for name, (kind, shape) in headers.items():
        match = TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{subject} but it has the tensor {name}, which plain LoRA does not have."
            )
        if kind not in FLOAT_TYPES:
            raise ValueError(
                f"{subject} but its tensor {name} is of type {kind}, not one of"
                f" {', '.join(FLOAT_TYPES)}."
            )
        rank_dimension = 0
        if match["matrix"] == "B":
            rank_dimension = 1
        if len(shape) != 2 or shape[rank_dimension] != rank:
            raise ValueError(
                f"{subject} but its tensor {name} has the shape {list(shape)}, which does not fit"
                f" r {rank} in {CONFIG}."
            )
        targets.add(match["layer"].rpartition(".")[2])
        other = tensor_name(match["layer"], OTHER_MATRIX[match["matrix"]])
        if other not in headers:
            raise ValueError(f"{subject} but it has the tensor {name} without {other}.")
    if not targets:
        raise ValueError(f"{subject} but {quoted_path(path)} has no tensors.")
    return tuple(sorted(targets))
