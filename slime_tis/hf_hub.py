"""Models of the Hugging Face Hub by name, through the cache of huggingface_hub.

    Qwen/Qwen3-4B            the newest commit of the branch main
    Qwen/Qwen3-4B@v1.0       a branch, a tag or a commit

A path that exists on this machine is never looked up. Files with code are not downloaded.
"""

import os
import re
import sys
from typing import NamedTuple

from slime_tis.errors import first_line, quoted

NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
"""ORG/NAME or ORG/NAME@REVISION."""
CONFIG = ("config.json",)
"""Files for the sizes of a model."""
TOKENIZER = ("tokenizer.json",)
"""Files of a tokenizer that decodes token ids."""
MODEL = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Files of a model: configuration, weights, tokenizer and chat template; no Python."""
NOT_MODEL = ("*/*", "consolidated*")
"""Sub-directories with other formats, and a second copy of the weights as Mistral publishes it."""


class HubModel(NamedTuple):
    """A model of the Hub."""

    repo: str
    """ORG/NAME."""
    revision: str | None
    """Branch, tag or commit; None is the branch main."""


def hub_model(text: str) -> HubModel | None:
    """Returns the model that a value of --hf-checkpoint names, or None for a path."""
    match = NAME.fullmatch(text)
    if match is None or os.path.exists(text):
        return None
    return HubModel(match["repo"], match["revision"])


def local_directory(
    text: str, flag: str = "--hf-checkpoint", *, files: tuple[str, ...] = MODEL
) -> str:
    """Returns the directory of a model, which is downloaded if it is one of the Hub.

    Args:
        text: A path, ORG/NAME, or ORG/NAME@REVISION.
        flag: The flag with this value, for messages.
        files: Patterns of the files that are needed.

    Raises:
        ValueError: The model or its revision does not exist, is not accessible, or is not in the
            cache while the Hub cannot be reached.
    """
    model = hub_model(text)
    if model is None:
        return text
    try:
        from huggingface_hub import errors, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ModuleNotFoundError:
        raise ValueError(
            f"{flag} is {quoted(text)}, which is not a directory; for a model of the Hugging Face"
            " Hub run pip install huggingface_hub."
        ) from None
    if not sys.stderr.isatty():
        # A log gets no redrawn lines.
        disable_progress_bars()
    try:
        return snapshot_download(
            model.repo,
            revision=model.revision,
            allow_patterns=list(files),
            ignore_patterns=list(NOT_MODEL),
        )
    except (errors.HFValidationError, OSError) as error:
        problem = _problem(error, model)
        raise ValueError(f"{flag} is {quoted(text)}, which is not a directory{problem}.") from error


def _problem(error: Exception, model: HubModel) -> str:
    """Returns why a model was not downloaded and what to do, as the end of a sentence."""
    from huggingface_hub import constants, errors

    login = "log in with `hf auth login` or HF_TOKEN"
    # Their classes inherit from each other: the special case comes first.
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{model.repo}"
        return f", and the model is gated: accept its terms at {page}, then {login}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f" and not a model at {constants.ENDPOINT}; correct the path or the name. For a private"
            f" model {login}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f", and {model.repo} at {constants.ENDPOINT} has no branch, tag or commit"
            f" {quoted(model.revision)}; correct the text after @"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _not_cached(model)
    if isinstance(error, errors.HFValidationError):
        return f" and not a name of the Hub: {first_line(error)}"
    return f", and its download failed: {first_line(error)}"


def _not_cached(model: HubModel) -> str:
    """Returns how to get a model without a network, as the end of a sentence."""
    from huggingface_hub import constants

    reason = f"{constants.ENDPOINT} cannot be reached"
    if constants.is_offline_mode():
        reason = "HF_HUB_OFFLINE is set"
    command = f"hf download {model.repo}"
    if model.revision is not None:
        command += f" --revision {model.revision}"
    return (
        f" and not completely in the cache {constants.HF_HUB_CACHE}, and {reason}; give a"
        f" directory, or run `{command}` where there is a network and copy the cache"
    )
