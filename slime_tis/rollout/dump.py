"""Samples in a file: one JSON object per line, to look at, to analyse, or to train on again."""

import base64
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_tis.errors import quoted_path
from slime_tis.files import FOREIGN, atomic_path
from slime_tis.rollout.sample import Prompt, Sample
from slime_tis.sampling_mask import SamplingMask

TENSORS = {"routed_experts": ("uint8", "int16"), "routing_weights": ("float32",)}
"""Fields of a sample that are tensors, and the types that each may have."""
LONGEST_SAMPLE = 1 << 28
"""Characters of a line."""


def save_samples(path: str | Path, groups: Sequence[Sequence[Sample]]) -> None:
    """Writes every sample of a rollout to a file that appears when it is complete.

    A log-prob that is missing or not finite becomes null.

    Raises:
        ValueError: another file has that name.
        OSError: the file cannot be written.
    """
    path = Path(path)
    try:
        check_replaceable(path)
    except ValueError as error:
        raise ValueError(f"the samples were not saved to {quoted_path(path)}: {error}.") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial, partial.open("w", encoding="utf-8") as lines:
        for sample in (sample for group in groups for sample in group):
            lines.write(json.dumps(to_dict(sample), allow_nan=False) + "\n")


def check_replaceable(path: Path) -> None:
    """Whether samples may be written over a file: it is absent, or begins with a sample.

    Raises:
        ValueError: it is something else.
    """
    if not os.path.lexists(path):
        return
    try:
        if path.is_file():  # a pipe or a device would be waited for
            with path.open(encoding="utf-8") as lines:
                from_dict(json.loads(lines.readline(LONGEST_SAMPLE)))
            return
    except (ValueError, RecursionError):
        pass
    raise ValueError(FOREIGN)


def load_samples(path: str | Path, prompts: int, n_samples: int) -> list[list[Sample]]:
    """Reads the groups of a rollout back.

    Args:
        path: of the file.
        prompts: groups that must be there.
        n_samples: samples that each must have.

    Raises:
        ValueError: no file, a line that is not a sample, with its number, or another number of samples.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"the rollout data {str(path)!r} does not exist; --save-debug-rollout-data writes it.")
    groups: dict[int, list[Sample]] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            sample = _sample(line, f"{path}, line {number}")
            groups.setdefault(sample.group_index, []).append(sample)
    found = sorted({len(group) for group in groups.values()})
    if len(groups) != prompts or found != [n_samples]:
        raise ValueError(
            f"the rollout data {str(path)!r} has {len(groups)} prompts with {found} samples each, but "
            f"--rollout-batch-size is {prompts} and --n-samples-per-prompt {n_samples}; set them to what it holds."
        )
    return list(groups.values())


def to_dict(sample: Sample) -> dict[str, Any]:
    """The sample as JSON takes it; metadata that is the prompt's own is left to the prompt."""
    without: dict[str, Any] = dict.fromkeys([*TENSORS, "sampling_mask"])  # asdict would copy them
    row = dataclasses.asdict(dataclasses.replace(sample, **without))
    row |= {name: encoded(getattr(sample, name)) for name in TENSORS}
    if sample.sampling_mask is not None:
        row["sampling_mask"] = {name: encoded(part) for name, part in vars(sample.sampling_mask).items()}
    if row["metadata"] == row["prompt"]["metadata"]:
        row["metadata"] = {}
    row["rollout_log_probs"] = [
        value if value is not None and math.isfinite(value) else None for value in row["rollout_log_probs"]
    ]
    return row


def from_dict(row: dict[str, Any]) -> Sample:
    """The sample of a row that `to_dict` made; a log-prob that is null becomes NaN.

    Raises:
        ValueError: the row is not a sample, or its lists differ in length.
    """
    try:
        prompt = Prompt(**{**row["prompt"], "token_ids": tuple(row["prompt"]["token_ids"])})
        log_probs = [math.nan if value is None else value for value in row["rollout_log_probs"]]
        mask = _sampling_mask(row.get("sampling_mask"))
        tensors = {name: decoded(row.get(name), name, dtypes) for name, dtypes in TENSORS.items()}
        sample = Sample(**{**row, "prompt": prompt, "rollout_log_probs": log_probs, **tensors, "sampling_mask": mask})
    except (KeyError, TypeError) as error:
        raise ValueError(f"is not a sample: {error}.") from error
    lengths = {
        name: len(getattr(sample, name))
        for name in ("response_ids", "rollout_log_probs", "loss_mask", "weight_versions")
    }
    if mask is not None:
        lengths["sampling_mask"] = len(mask)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"has lists of different lengths: {listed}.")
    return sample


def encoded(tensor: Tensor | None) -> dict[str, Any] | None:
    """A tensor as JSON takes it: type, shape, and its little-endian bytes in base64."""
    if tensor is None:
        return None
    data = tensor.contiguous().cpu().numpy()
    return {"dtype": data.dtype.name, "shape": list(data.shape), "base64": base64.b64encode(data.tobytes()).decode()}


def decoded(row: Any, name: str, dtypes: Sequence[str]) -> Tensor | None:
    """The tensor that `encoded` made a row of.

    Args:
        row: of a file; None means no tensor.
        name: of the field, for the message.
        dtypes: types that the tensor may have.

    Raises:
        ValueError: another type, or a shape that its bytes do not fill.
    """
    if row is None:
        return None
    try:
        dtype, shape, data = row["dtype"], row["shape"], base64.b64decode(row["base64"], validate=True)
        if dtype not in dtypes:
            raise ValueError(f"its dtype is {dtype!r:.40} but must be {' or '.join(dtypes)}")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"its shape is {shape!r:.40}")
        values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
        return torch.from_numpy(values.astype(dtype).reshape(shape))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"has {name} that are not a tensor: {error}.") from error


def _sampling_mask(row: Any) -> SamplingMask | None:
    if row is None:
        return None
    if not isinstance(row, dict):
        raise ValueError(f"has a sampling_mask that is {row!r:.40}.")
    token_ids = decoded(row.get("token_ids"), "the token_ids of a sampling_mask", ["int32"])
    lengths = decoded(row.get("lengths"), "the lengths of a sampling_mask", ["int32"])
    if token_ids is None or lengths is None or token_ids.dim() != 1 or lengths.dim() != 1:
        raise ValueError("has a sampling_mask that is not two lists of numbers, token_ids and lengths.")
    if bool((lengths < 0).any()) or int(lengths.sum()) != len(token_ids):
        raise ValueError(
            f"has a sampling_mask whose lengths add up to {int(lengths.sum())}, or are negative, with "
            f"{len(token_ids)} token_ids."
        )
    if bool((token_ids < 0).any()):
        raise ValueError(f"has a sampling_mask with the token id {int(token_ids.min())}.")
    return SamplingMask(token_ids, lengths)


def _sample(line: str, place: str) -> Sample:
    try:
        return from_dict(json.loads(line))
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not a sample: {error}.") from error
    except ValueError as error:
        raise ValueError(f"{place} {error}") from error
