"""Loads a causal language model of transformers, all of it or nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slime_tis.errors import first_line
from slime_tis.hf_directory import INDEX, SINGLE
from slime_tis.torch_files import NOT_TENSORS, check_torch


def load_causal_lm(directory: str | Path, dtype: torch.dtype, *, architecture: str) -> Any:
    """Returns the model of a directory on the CPU, in evaluation mode.

    transformers fills tensors that a checkpoint lacks with random numbers and drops those that the
    model does not know. Log-probs of such a model look like a fault of the engine that is compared
    with it. Here both are refused.

    Args:
        directory: A Hugging Face checkpoint.
        dtype: Of the parameters.
        architecture: The class that its config.json names first.

    Raises:
        ValueError: The checkpoint does not load, or has other tensors than the model, or NaN or
            infinity in a tensor. The message is the end of a sentence about the directory.
    """
    from transformers import AutoModelForCausalLM

    if not any((Path(directory) / name).is_file() for name in (SINGLE, INDEX)):
        check_torch(directory)  # transformers reads pytorch_model.bin
    try:
        with _silent_transformers():
            model, loaded = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported in `loaded`, by name
            )
    except (
        Exception
    ) as error:  # of transformers, safetensors, torch and huggingface_hub, which share no class
        reason = NOT_TENSORS if "weights_only" in str(error) else first_line(error)
        raise ValueError(f"does not load: {reason}") from error
    name = type(model).__name__
    if name != architecture:
        raise ValueError(
            f"has the model_type {model.config.model_type} of {name}, but its config.json names"
            f" {architecture}; copy config.json from the model again"
        )
    problems = {
        "lacks": loaded["missing_keys"],
        f"has tensors that {name} does not have:": loaded["unexpected_keys"],
        "has tensors of another shape:": loaded["mismatched_keys"],
        "holds NaN or infinity in": [
            name for name, tensor in _tensors(model) if not tensor.isfinite().all()
        ],
    }
    for problem, names in problems.items():
        if names:
            raise ValueError(
                f"{problem} {_some(names)}; give a complete checkpoint of {architecture}"
            )
    return model.eval()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _some(names: Any) -> str:
    """Returns the first three names of tensors, and how many more there are."""
    ordered = sorted(str(name[0] if isinstance(name, tuple) else name) for name in names)
    more = len(ordered) - 3
    return ", ".join(ordered[:3]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Keeps transformers from printing progress and its table of tensors, which the error message replaces."""
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
