"""Samples in a file, as one JSON object per line, for analysis and for training on them again."""

import base64
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_tis.atomic_files import FOREIGN, atomic_file, json_lines
from slime_tis.errors import first_line, quoted, quoted_path
from slime_tis.hf_directory import ModelSizes
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.data.sample import (
    NUMBER_TYPES,
    Prompt,
    Sample,
    SampleStatus,
    SamplingMask,
    by_rollout,
)
from slime_tis.trainer.data.user_values import json_object

TENSORS = {"rollout_routed_experts": ("uint8", "int16"), "rollout_routing_weights": ("float32",)}
"""Fields of a sample that are tensors, and the types that each may have."""
MAX_SAMPLE_CHARACTERS = 1 << 28
"""Bound on the first line of a file that a run wants to replace, which may be any file."""
WRONG_MODEL = "give --load-debug-rollout-data samples of this model."


def save_samples(path: str | Path, groups: Sequence[Sequence[Sample]]) -> None:
    """Writes every sample of a rollout to a file that appears when it is complete."""
    path = Path(path)
    try:
        check_replaceable(path)
    except ValueError as error:
        raise ValueError(f"the samples were not saved to {quoted_path(path)}: {error}.") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as lines:
        for sample in chain(*groups):
            row = json.dumps(to_dict(sample), allow_nan=False) + "\n"
            lines.write(row.encode())


def save_batches(path: Path, batches: Sequence[Sequence[Sequence[Sample]]]) -> None:
    """Writes the groups of several batches, one sample per line.

    The file need not be atomic: its directory is renamed when it is complete.
    """
    with path.open("w", encoding="utf-8") as lines:
        for batch_index, groups in enumerate(batches):
            for group_index, group in enumerate(groups):
                for sample in group:
                    row = {"batch": batch_index, "group": group_index, "sample": to_dict(sample)}
                    lines.write(json.dumps(row) + "\n")


def load_batches(path: Path, count: int, sizes: ModelSizes) -> list[list[list[Sample]]]:
    """Returns the groups of the batches that `save_batches` wrote.

    Raises:
        ValueError: A line is not such a sample, or does not fit the model.
    """
    batches: list[dict[int, list[Sample]]] = [{} for _ in range(count)]
    for place, row in json_lines(path):
        try:
            groups = batches[row["batch"]]
            sample = from_dict(row["sample"]).compact()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"{place} is not a sample of a rollout in flight: {first_line(error)}"
            ) from error
        _check_fits(sample, place, sizes)
        groups.setdefault(row["group"], []).append(sample)
    return [list(groups.values()) for groups in batches]


def check_replaceable(path: Path) -> None:
    """Raises ValueError if a file exists that does not begin with a sample."""
    if not os.path.lexists(path):
        return
    try:
        if path.is_file():  # reading a pipe or a device would block
            with path.open(encoding="utf-8") as lines:
                from_dict(json.loads(lines.readline(MAX_SAMPLE_CHARACTERS)))
            return
    except (ValueError, RecursionError):
        pass
    raise ValueError(FOREIGN)


def load_samples(
    path: str | Path, prompts: int, n_samples: int, sizes: ModelSizes | None = None
) -> list[list[Sample]]:
    """Reads the groups of a rollout.

    Args:
        path: A file that `save_samples` wrote.
        prompts: Number of groups that the file must have.
        n_samples: Number of samples that each group must have.
        sizes: Sizes of the model that the samples must fit.

    Raises:
        ValueError: The file does not exist, is not such a file, or has other numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"the rollout data {str(path)!r} does not exist; --save-debug-rollout-data writes it."
        )
    groups: dict[int | None, list[Sample]] = {}
    for place, row in json_lines(path):
        try:
            sample = from_dict(row)
        except ValueError as error:
            raise ValueError(f"{place} {error}") from error
        if sizes is not None:
            _check_fits(sample, place, sizes)
        groups.setdefault(sample.group_index, []).append(sample)
    # A rollout that a generate function split into segments counts once.
    counts = sorted({len(by_rollout(group)) for group in groups.values()})
    if len(groups) != prompts or counts != [n_samples]:
        raise ValueError(
            f"the rollout data {str(path)!r} has {len(groups)} prompts with {counts} samples each,"
            f" but --rollout-batch-size is {prompts} and --n-samples-per-prompt {n_samples}; set"
            " them to what it holds."
        )
    return list(groups.values())


def _check_fits(sample: Sample, place: str, sizes: ModelSizes) -> None:
    reward = sample.reward
    # NaN fails this comparison, too.
    is_valid = reward is None or (isinstance(reward, int | float) and abs(reward) <= MAX_REWARD)
    if not is_valid:
        raise ValueError(
            f"{place} has the reward {quoted(reward)}; give a number of at most {MAX_REWARD:g}."
        )
    vocab_size = sizes.vocab_size or math.inf
    context_len = sizes.context_len or math.inf
    for token in sample.tokens:
        # not isinstance: True is an int, too
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{place} has token {quoted(token)}, but the model's token ids end at"
                f" {vocab_size - 1}; {WRONG_MODEL}"
            )
    if len(sample.tokens) > context_len:
        raise ValueError(
            f"{place} has {len(sample.tokens)} tokens, but the model's context has {context_len};"
            f" {WRONG_MODEL}"
        )


def to_dict(sample: Sample) -> dict[str, Any]:
    """Returns the sample as JSON values, without metadata and tokens that its prompt row has."""
    row = _fields(sample)
    for name in NUMBER_TYPES:
        row[name] = list(row[name] or [])  # some are None before a response
    for name in TENSORS:
        row[name] = encoded(row[name])
    row["status"] = sample.status.value
    if sample.sampling_mask is not None:
        row["sampling_mask"] = {
            "token_ids": encoded(sample.sampling_mask.token_ids),
            "lengths": encoded(sample.sampling_mask.lengths),
        }
    row["metadata"] = json_object(sample.metadata, "its metadata")
    if sample.train_metadata is not None:
        row["train_metadata"] = json_object(sample.train_metadata, "its train_metadata")
    if sample.prompt_row is not None:
        row["prompt_row"] = _fields(sample.prompt_row)
        if list(sample.prompt_row.token_ids) == sample.prompt_ids:
            row["prompt_row"]["token_ids"] = None
        if sample.metadata == sample.prompt_row.metadata:
            row["metadata"] = {}
    log_probs: list[float | None] = []
    for value in row["rollout_log_probs"]:
        is_finite = value is not None and math.isfinite(value)
        log_probs.append(value if is_finite else None)
    row["rollout_log_probs"] = log_probs
    return row


def _fields(record: Sample | Prompt) -> dict[str, Any]:
    """Returns the fields by name. dataclasses.asdict would copy their values."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def from_dict(row: dict[str, Any]) -> Sample:
    """Returns the sample of a row that `to_dict` made; a log-prob that is null becomes NaN.

    Raises:
        ValueError: The row is not a sample.
    """
    try:
        fields = dict(row)
        fields["prompt_row"] = _prompt_row(row)
        fields["status"] = SampleStatus(row["status"])
        fields["rollout_log_probs"] = [
            math.nan if value is None else value for value in row["rollout_log_probs"]
        ]
        fields["sampling_mask"] = _sampling_mask(row.get("sampling_mask"))
        for name, dtypes in TENSORS.items():
            fields[name] = decoded(row.get(name), name, dtypes)
        sample = Sample(**fields)
        _check_lengths(sample)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is not a sample: {first_line(error)}.") from error
    return sample


def _prompt_row(row: dict[str, Any]) -> Prompt | None:
    fields = row["prompt_row"]
    if fields is None:
        return None
    ids = fields["token_ids"]
    if ids is None:
        ids = row["tokens"][: len(row["tokens"]) - row["response_length"]]
    return Prompt(**{**fields, "token_ids": tuple(ids)})


def _check_lengths(sample: Sample) -> None:
    lengths = {
        "response_length": sample.response_length,
        "rollout_log_probs": len(sample.rollout_log_probs),
        "loss_mask": len(sample.loss_mask),
        "weight_versions": len(sample.weight_versions),
    }
    if sample.sampling_mask is not None:
        lengths["sampling_mask"] = len(sample.sampling_mask)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"lists of different lengths: {listed}")
    if not 0 <= sample.response_length <= len(sample.tokens):
        raise ValueError(
            f"a response_length of {sample.response_length} but {len(sample.tokens)} tokens"
        )


def encoded(tensor: Tensor | None) -> dict[str, Any] | None:
    """Returns a tensor as JSON values: type, shape, and little-endian bytes in base64."""
    if tensor is None:
        return None
    data = tensor.contiguous().cpu().numpy()
    return {
        "dtype": data.dtype.name,
        "shape": list(data.shape),
        "base64": base64.b64encode(data.tobytes()).decode(),
    }


def decoded(row: Any, name: str, dtypes: Sequence[str]) -> Tensor | None:
    """Returns the tensor of a row that `encoded` made.

    Raises:
        ValueError: The type is not one of `dtypes`, or bytes and shape do not fit.
    """
    if row is None:
        return None
    if row["dtype"] not in dtypes:
        raise ValueError(
            f"the dtype of {name} is {row['dtype']!r:.40} but must be {' or '.join(dtypes)}"
        )
    data = base64.b64decode(row["base64"], validate=True)
    values = np.frombuffer(data, np.dtype(row["dtype"]).newbyteorder("<"))
    # astype copies to the machine's byte order; memory of frombuffer would be read-only, and torch
    # takes no foreign byte order.
    return torch.from_numpy(values.astype(row["dtype"]).reshape(row["shape"]))


def _sampling_mask(row: Any) -> SamplingMask | None:
    if row is None:
        return None
    token_ids = decoded(row["token_ids"], "token_ids", ["int32"])
    lengths = decoded(row["lengths"], "lengths", ["int32"])
    if token_ids is None or lengths is None or token_ids.dim() != 1 or lengths.dim() != 1:
        raise ValueError("a sampling_mask without two lists of numbers, token_ids and lengths")
    has_negative = bool((lengths < 0).any()) or bool((token_ids < 0).any())
    if has_negative or int(lengths.sum()) != len(token_ids):
        raise ValueError(
            "a sampling_mask with negative numbers, or with lengths that do not add up"
        )
    return SamplingMask(token_ids, lengths)
