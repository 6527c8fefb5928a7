"""Reads config.json of any causal language model of transformers."""

from pathlib import Path
from typing import Any

from slime_tis.atomic_files import parse_object
from slime_tis.errors import quoted, quoted_path


def read_config(directory: str) -> dict[str, Any]:
    """Returns the content of config.json.

    Unlike `hf_directory.read_model_config`, it accepts architectures that this project does not
    train.

    Raises:
        ValueError: There is no config.json, it is not an object, or it names no architecture.
    """
    path = Path(directory) / "config.json"
    where = f"CHECKPOINT {quoted_path(directory)}"
    if not path.is_file():
        raise ValueError(
            f"{where} holds no config.json; give a Hugging Face directory, or ORG/NAME or"
            " ORG/NAME@REVISION of a model of the Hub."
        )
    config = parse_object(path.read_bytes(), f"{where}: config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ValueError(
            f"{where}: config.json has the architectures {quoted(architectures, 40)}; name the"
            " model's class there."
        )
    return config


def vocab_size_of(directory: str) -> int:
    """Returns the number of token ids in config.json.

    Raises:
        ValueError: The number is missing or not positive.
    """
    vocab_size = read_config(directory).get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ValueError(
            f"config.json of {quoted_path(directory)} has the vocab_size"
            f" {quoted(vocab_size, 40)}; it must be the number of token ids."
        )
    return vocab_size
