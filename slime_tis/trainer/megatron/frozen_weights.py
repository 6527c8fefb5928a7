"""Weights that are not trained: --freeze-params-name-list and --only-train-params-name-list.

Both options have regular expressions, which `re.search` looks for in the names of the weights. The
names are those of megatron-core with transformer-engine's layers, as slime has them, so that a
pattern selects the same weights with every implementation of the layers and on every parallel
layout:

* Layers are counted from the first one of the model. slime counts from the first one of the
  pipeline stage.
* transformer-engine keeps a norm with the linear layer that follows it.
* All routed experts of a layer have one name, without a number.
* An output layer that is tied to the embedding has the embedding's name.

A frozen weight has no gradient buffer and no optimizer state, so neither the norm of the gradient
nor weight decay knows it.

Source: slime, backends/megatron_utils/model_provider.py, freeze_model_params.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from slime_tis.errors import quoted
from slime_tis.options.fields import flag
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.architecture import Model
from slime_tis.trainer.megatron.parallel import Parallel

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
ROUTER = "mlp.router.weight"
"""A layer with this weight has experts."""
FUSED_NORM = "self_attention.linear_qkv.layer_norm_weight"
"""transformer-engine's name of the norm before the attention."""
FUSED_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"
"""transformer-engine's name of the norm before a dense MLP; it is not fused with experts."""
EXPERT_NUMBER = re.compile(r"\.local_experts\.\d+")
MAX_NAMES = 16
"""Names that a message lists."""


def slime_names(names: Iterable[str], *, first_layer: int, tied: bool) -> dict[str, str]:
    """Returns the names that patterns are matched with, by megatron-core's names on this rank.

    Args:
        names: Names of this rank's weights.
        first_layer: Number of the rank's first layer.
        tied: Whether the output layer has the embedding's weight.
    """
    names = list(names)
    matched = {}
    for name in names:
        if name == OUTPUT_LAYER and tied:  # the copy on the last pipeline stage
            matched[name] = EMBEDDING
            continue
        if not name.startswith("decoder.layers."):
            matched[name] = name
            continue
        _, _, index, within = name.split(".", 3)
        has_experts = f"decoder.layers.{index}.{ROUTER}" in names
        within = EXPERT_NUMBER.sub("", within)
        if within == "input_layernorm.weight":
            within = FUSED_NORM
        elif within == "pre_mlp_layernorm.weight" and not has_experts:
            within = FUSED_MLP_NORM
        matched[name] = f"decoder.layers.{first_layer + int(index)}.{within}"
    return matched


def trained_names(names: Mapping[str, str], config: MegatronConfig) -> set[str]:
    """Returns megatron-core's names of the weights that are trained; `names` of `slime_names`."""
    selected = config.selected_weights
    if selected is None:
        return set(names)
    option, patterns = selected
    trained = set()
    for name, matched in names.items():
        is_selected = any(re.search(pattern, matched) for pattern in patterns)
        if is_selected == (option == "only_train_params_name_list"):
            trained.add(name)
    return trained


def matches(pattern: str, names: Mapping[str, str]) -> bool:
    """Returns whether a pattern selects a weight; `names` of `slime_names`."""
    return any(re.search(pattern, matched) for matched in names.values())


def unmatched_message(option: str, pattern: str, names: Mapping[str, str], *, tied: bool) -> str:
    """Returns the error message about a pattern that selects no weight.

    It lists names outside of layers, and those of one layer.
    """
    hint = ""
    if tied and re.search(pattern, OUTPUT_LAYER):
        hint = f" The output layer is tied to {EMBEDDING}."
    return (
        f"{flag(option)} has {quoted(pattern)}, which is found in no weight's name;"
        f" names are {_listed(names.values())}.{hint}"
    )


def untrained_message(option: str, pipeline_size: int) -> str:
    """Returns the error message about a rank that would train nothing."""
    if pipeline_size == 1:
        return f"{flag(option)} leaves no weight to train; change the patterns."
    return (
        f"{flag(option)} leaves a pipeline stage without a weight to train, and its gradient has"
        " nowhere to go; lower --pipeline-model-parallel-size, or change the patterns."
    )


def freeze_weights(model: Model, config: MegatronConfig, parallel: Parallel) -> None:
    """Freezes the weights that the options exclude; a collective if an option is set.

    It must precede megatron-core's gradient buffers and optimizer, which leave frozen weights out.

    Raises:
        ValueError: A pattern selects no weight, or a pipeline stage has nothing to train.
    """
    selected = config.selected_weights
    if selected is None:
        return
    option, patterns = selected
    tied = bool(model.hf_config.tie_word_embeddings)
    weights = dict(model.module.named_parameters())
    first_layer = parallel.pipeline_rank * (model.config.num_layers // parallel.pipeline_size)
    names = slime_names(weights, first_layer=first_layer, tied=tied)
    for pattern in patterns:
        # Other pipeline stages have other names.
        if not parallel.largest(int(matches(pattern, names))):
            raise ValueError(unmatched_message(option, pattern, names, tied=tied))
    trained = trained_names(names, config)
    if parallel.largest(int(not trained)):
        raise ValueError(untrained_message(option, parallel.pipeline_size))
    for name, weight in weights.items():
        weight.requires_grad_(name in trained)


def begin_graph(_module: torch.nn.Module, _inputs: object, output: Tensor) -> None:
    """Forward hook of the embedding: its output requires a gradient, though the weight is frozen.

    Recomputed layers are one function for autograd, which sees their inputs, not their weights.
    Without a gradient of the input, the weights of these layers would get none either.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _listed(names: Iterable[str]) -> str:
    """Returns names for a message: those outside of layers, and those of the first layer."""
    listed: list[str] = []
    layer = None
    for name in names:
        if name.startswith("decoder.layers."):
            number = name.split(".")[2]
            layer = number if layer is None else layer
            if number != layer:
                continue
        if name not in listed:
            listed.append(name)
    text = ", ".join(listed[:MAX_NAMES])
    if len(listed) > MAX_NAMES:
        text += ", …"
    return text
