"""Applies LoRA adapters of PEFT to models of transformers."""

from typing import Any

from slime_tis.errors import quoted_path
from slime_tis.peft_directory import read_adapter_config, read_adapter_tensors
from slime_tis.trainer.engines.local.unmerged_adapters import UnmergedAdapters


def apply_adapter(model: Any, directory: str) -> None:
    """Adds a LoRA adapter to a model of transformers, without merging it.

    Raises:
        ValueError: The directory has no plain LoRA adapter, or its adapter is of another model.
    """
    subject = f"the adapter is {quoted_path(directory)}"
    config = read_adapter_config(directory, subject)
    adapters = UnmergedAdapters(model, config.scale)
    for name, tensor in read_adapter_tensors(directory, subject).items():
        try:
            adapters.assign(name, tensor)
        except ValueError as error:
            raise ValueError(f"{subject} but it is not one of this model: {error}.") from error
