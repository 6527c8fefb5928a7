"""Loads a Hugging Face checkpoint directory for sampling."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from slime_tis.errors import first_line
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
    """Returns the complete causal language model of a directory, in evaluation mode and without gradients.

    Raises: ValueError: The directory has no model, or tensors are missing, unknown to the model, or
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
    """The tokenizer of a checkpoint directory; ValueError without one."""
    if not any(
        (Path(path) / name).is_file() for name in VOCABULARIES
    ):  # transformers would make an empty one
        raise ValueError(
            f"--hf-checkpoint is {str(path)!r}, which has no tokenizer: none of"
            f" {', '.join(VOCABULARIES)}; copy its files there."
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # of transformers, tokenizers and huggingface_hub, which share no class
        raise ValueError(
            f"--hf-checkpoint is {str(path)!r}, whose tokenizer does not load: {first_line(error)}."
        ) from error
    return tokenizer


def weights_by_file_name(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight of a model under its name in a checkpoint file, as views of the model's own tensors.

    transformers holds the experts of a layer in two tensors, `gate_up_proj` [experts, 2 · inner,
    hidden] and `down_proj` [experts, hidden, inner]; files, and serving engines, have three
    matrices of each expert.
    """
    persistent = model.state_dict().keys()
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    weights: dict[str, Tensor] = {}
    for name, weight in held:
        layer = name.rpartition(".")[0]
        if name.endswith(".experts.gate_up_proj"):
            for i, expert in enumerate(weight):
                weights[f"{layer}.{i}.gate_proj.weight"], weights[f"{layer}.{i}.up_proj.weight"] = (
                    expert.chunk(2)
                )
        elif name.endswith(".experts.down_proj"):
            weights |= {f"{layer}.{i}.down_proj.weight": expert for i, expert in enumerate(weight)}
        elif name in persistent:
            weights[name] = weight
    return weights


def linear_weight_names(model: PreTrainedModel) -> frozenset[str]:
    """Names, in a checkpoint file, of the weights that 8-bit and 4-bit engines round: linear layers and experts."""
    output_layer = model.get_output_embeddings()
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not output_layer
        and not name.endswith(".shared_expert_gate")
    }
    return frozenset(
        linear | {name for name in weights_by_file_name(model) if ".mlp.experts." in name}
    )


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End-of-sequence tokens of the generation configuration, or the tokenizer's where that names none."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
