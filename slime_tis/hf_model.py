"""Loads a causal language model of transformers; refuses a checkpoint that is not complete."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from slime_tis.errors import first_line
from slime_tis.families import FAMILIES, Family
from slime_tis.hf_directory import load_config
from slime_tis.hf_tensors import INDEX, SINGLE
from slime_tis.torch_files import NOT_TENSORS, check_torch

NO_FAMILY = Family(title="", model_type="", rotary_class="", weights={})
"""Stands for architectures that are not in `FAMILIES`."""


def load_causal_lm(directory: str | Path, dtype: torch.dtype, *, architecture: str) -> Any:
    """Returns the model of a directory on the CPU, in evaluation mode.

    transformers fills missing tensors with random numbers, and ignores tensors that the model does
    not have. Log-probs of such a model look like a fault of the engine that is compared with it.
    Here both are refused.

    Args:
        directory: A Hugging Face checkpoint.
        dtype: Data type of the parameters.
        architecture: The first class in config.json.

    Raises:
        ValueError: The checkpoint does not load, or has other tensors than the model, or NaN or
            infinity in a tensor. The message is the end of a sentence about the directory.
    """
    from transformers import AutoModelForCausalLM

    family = FAMILIES.get(architecture, NO_FAMILY)
    options = {}
    if family.aliases:
        options["config"] = load_config(directory)
    if not any((Path(directory) / name).is_file() for name in (SINGLE, INDEX)):
        check_torch(directory)  # transformers reads pytorch_model.bin
    try:
        with _silent_transformers():
            model, loaded = AutoModelForCausalLM.from_pretrained(
                directory,
                **options,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported in `loaded`, by name
            )
    except Exception as error:
        # errors of transformers, safetensors, torch and huggingface_hub have no common class
        reason = first_line(error)
        if "weights_only" in str(error):
            reason = NOT_TENSORS
        raise ValueError(f"does not load: {reason}") from error
    name = type(model).__name__
    if name != architecture and not options:
        raise ValueError(
            f"has the model_type {model.config.model_type} of {name}, but its config.json names"
            f" {architecture}; copy config.json from the model again"
        )
    keys = loaded["unexpected_keys"]
    unexpected = [key for key in keys if not key.startswith(family.unused_tensors)]
    problems = {
        "lacks": loaded["missing_keys"],
        f"has tensors that {name} does not have:": unexpected,
        "has tensors of another shape:": loaded["mismatched_keys"],
        "holds NaN or infinity in": _not_finite(model),
    }
    for problem, names in problems.items():
        if names:
            raise ValueError(
                f"{problem} {_some(names)}; give a complete checkpoint of {architecture}"
            )
    return model.eval()


def empty_causal_lm(directory: str | Path, *, architecture: str) -> Any:
    """Returns the model of a directory on the device meta: all modules and shapes, no weights.

    Args:
        directory: A Hugging Face checkpoint, of which only config.json is read.
        architecture: The first class in config.json.

    Raises:
        ValueError: config.json does not load. The message is the end of a sentence about the
            directory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    has_aliases = FAMILIES.get(architecture, NO_FAMILY).aliases
    try:
        with _silent_transformers(), torch.device("meta"):
            if has_aliases:
                config = load_config(directory)
            else:
                config = AutoConfig.from_pretrained(
                    directory, local_files_only=True, trust_remote_code=False
                )
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:
        # errors of transformers have no common class
        raise ValueError(f"does not load: {first_line(error)}") from error


def _not_finite(model: torch.nn.Module) -> list[str]:
    """Returns the names of tensors with NaN or infinity."""
    names = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not tensor.isfinite().all():
            names.append(name)
    return names


def _some(names: Any) -> str:
    """Returns the first three names of tensors, and how many more there are."""
    texts = []
    for name in names:
        if isinstance(name, tuple):  # (name, shape in the checkpoint, shape in the model)
            name, *_ = name
        texts.append(str(name))
    texts.sort()
    text = ", ".join(texts[:3])
    if len(texts) > 3:
        text += f" and {len(texts) - 3} more"
    return text


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Silences transformers' progress bar, and its table that the error message replaces."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    had_progress = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_progress:
            logging.enable_progress_bar()
