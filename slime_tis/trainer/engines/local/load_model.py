"""Loads a Hugging Face checkpoint directory for sampling."""

from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from slime_tis.errors import first_line
from slime_tis.families import family_of, stacks_experts
from slime_tis.hf_directory import read_model_config
from slime_tis.hf_model import load_causal_lm

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
)
"""A tokenizer has at least one of these files."""


def load_model(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the causal language model of a directory, in evaluation mode and without gradients.

    Raises:
        ValueError: The directory has no model, or tensors are missing, unknown to the model, or
            not finite.
    """
    config = read_model_config(path)
    try:
        model: PreTrainedModel = load_causal_lm(
            path, dtype, architecture=config["architectures"][0]
        )
    except ValueError as error:
        raise ValueError(f"--hf-checkpoint is {str(path)!r}, which {error}.") from error
    return model.requires_grad_(False)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a checkpoint directory.

    Raises:
        ValueError: The directory has no tokenizer, or the tokenizer does not load.
    """
    directory = Path(path)
    # Without a vocabulary file, transformers would return an empty tokenizer.
    if not any((directory / name).is_file() for name in VOCABULARIES):
        raise ValueError(
            f"--hf-checkpoint is {str(path)!r}, which has no tokenizer: none of"
            f" {', '.join(VOCABULARIES)}; copy its files there."
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    # Errors of transformers, tokenizers and huggingface_hub have no common base class.
    except Exception as error:
        raise ValueError(
            f"--hf-checkpoint is {str(path)!r}, whose tokenizer does not load: {first_line(error)}."
        ) from error
    return tokenizer


def weights_by_file_name(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns all weights by their names in a checkpoint file, as views of the model's tensors.

    transformers stores the experts of a layer in two tensors, `gate_up_proj` [experts, 2 · inner,
    hidden] and `down_proj` [experts, hidden, inner]. Files and serving engines have three matrices
    per expert.
    """
    are_stacked = has_stacked_experts(model)
    persistent = model.state_dict().keys()
    weights: dict[str, Tensor] = {}
    # Duplicates are kept: a tied output layer has a name too.
    parameters = model.named_parameters(remove_duplicate=False)
    for name, weight in chain(parameters, model.named_buffers()):
        layer = name.rpartition(".")[0]
        if are_stacked and name in persistent:
            weights[name] = weight
        elif name.endswith(".experts.gate_up_proj"):
            for i, expert in enumerate(weight):
                gate, up = expert.chunk(2)
                weights[f"{layer}.{i}.gate_proj.weight"] = gate
                weights[f"{layer}.{i}.up_proj.weight"] = up
        elif name.endswith(".experts.down_proj"):
            for i, expert in enumerate(weight):
                weights[f"{layer}.{i}.down_proj.weight"] = expert
        elif name in persistent:
            weights[name] = weight
    return weights


def has_stacked_experts(model: PreTrainedModel) -> bool:
    """Returns whether files of the model have one tensor with all experts of a layer."""
    return family_of(model.config).experts is not None and stacks_experts(model.config)


def linear_weight_names(model: PreTrainedModel) -> frozenset[str]:
    """Returns the checkpoint names of the weights that 8-bit and 4-bit engines round.

    These are linear layers and experts. Engines keep the output layer and the gate of a shared
    expert, a single row, in the model's precision.
    """
    if has_stacked_experts(model):
        raise ValueError(
            "--rollout-precision fp8, int8 and int4 round matrices of single experts, but the files"
            f" of {family_of(model.config).title} have one tensor for all; remove the flag."
        )
    output_layer = model.get_output_embeddings()
    names = {name for name in weights_by_file_name(model) if ".mlp.experts." in name}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is output_layer:
            continue
        if not name.endswith(".shared_expert_gate"):
            names.add(f"{name}.weight")
    return frozenset(names)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of the generation configuration, else the tokenizer's."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    # A generation configuration may have several.
    if isinstance(ids, (list, tuple)):
        return tuple(ids)
    return (ids,)
