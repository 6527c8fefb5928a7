"""Reads the samples that a user function returned.

Attributes and values of the user's objects can raise any exception. Only this module touches them,
so an exception elsewhere is a defect of this program and ends the run with a traceback.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from slime_tis.errors import quoted
from slime_tis.trainer.data.sample import Sample, SampleStatus, SamplingMask
from slime_tis.trainer.data.user_values import json_object

MAX_TEXT = 1 << 20
"""Most characters of a response, and of metadata as JSON."""
MAX_VERSION = 2**63 - 1
"""Largest weight version; samples hold versions as 64-bit integers."""


class NoSample(Exception):
    """A call gave no sample that can be trained on; the arguments are a reason and a message."""


def _json_values(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns metadata as JSON values.

    Raises:
        NoSample: The metadata is too large, or nested too deeply.
    """
    try:
        values = json_object(metadata, "its metadata")
    except ValueError as error:
        raise NoSample("metadata", f"gave metadata that cannot be saved: {error}") from error
    if len(json.dumps(values)) > MAX_TEXT:
        raise NoSample("metadata", f"gave metadata of more than {MAX_TEXT} characters")
    return values


def _json_label(label: Any) -> Any:
    """Returns a label as a JSON value."""
    return _json_values({"label": label})["label"]


def _json_prompt(prompt: Any) -> Any:
    """Returns messages as JSON values, and any other prompt as text."""
    if isinstance(prompt, list):
        # Through JSON and back: a message may be an object of the user's library.
        return json.loads(json.dumps(prompt, default=str))
    return str(prompt)


def _plain_reward(reward: float | dict[Any, Any]) -> float | dict[str, float | str]:
    """Returns the parts of a dictionary reward as numbers and texts."""
    if not isinstance(reward, dict):
        return reward
    parts: dict[str, float | str] = {}
    for name, part in reward.items():
        if isinstance(part, int | float):
            parts[str(name)] = float(part)
        else:
            parts[str(name)] = str(part)
    return parts


def _bounded_versions(versions: list[int | str]) -> list[int | str]:
    """Returns weight versions, which are texts in slime; refuses too large numbers."""
    for version in versions:
        if str(version).isdecimal() and int(version) > MAX_VERSION:
            raise ValueError(f"a weight version is above {MAX_VERSION}")
    return versions


def _consistent_mask(mask: SamplingMask) -> SamplingMask | None:
    """Returns a sampling mask; None if its lengths do not add up to its number of token ids."""
    if mask.lengths.sum() != len(mask.token_ids):
        return None
    return mask


class ReturnedSample(BaseModel):
    """The fields of `Sample` that a function sets, without objects of the user's classes."""

    model_config = ConfigDict(from_attributes=True)

    prompt: Annotated[Any, AfterValidator(_json_prompt)]
    tokens: list[Annotated[int, Field(ge=0)]]
    response_length: int
    response: Annotated[str, Field(max_length=MAX_TEXT)]
    label: Annotated[Any, AfterValidator(_json_label)] | None
    loss_mask: list[Literal[0, 1]] | None
    rollout_log_probs: list[float | None] | None
    weight_versions: Annotated[list[int | str], AfterValidator(_bounded_versions)]
    remove_sample: Annotated[Any, AfterValidator(bool)]
    status: SampleStatus
    metadata: Annotated[dict[Any, Any], AfterValidator(_json_values)] | None
    train_metadata: Annotated[dict[Any, Any], AfterValidator(_json_values)] | None
    session_id: Annotated[Any, AfterValidator(str)] | None
    sampling_mask: Annotated[InstanceOf[SamplingMask], AfterValidator(_consistent_mask)] | None
    reward: Annotated[float | dict[Any, Any], AfterValidator(_plain_reward)] | None
    non_generation_time: float


def read_samples(returned: Any) -> list[ReturnedSample]:
    """Returns the samples in the return value of a generate function.

    Args:
        returned: A `Sample`, or a list of the segments of one rollout.

    Raises:
        NoSample: The value is something else, or a field has another type or cannot be read.
    """
    try:
        samples = [returned]
        if isinstance(returned, list | tuple):
            samples = list(returned)
        if not samples or not all(isinstance(sample, Sample) for sample in samples):
            raise NoSample(
                "returned", f"returned {quoted(returned)}; return a Sample or a list of them"
            )
        return [_read_sample(sample) for sample in samples]
    except NoSample:
        raise
    # SystemExit is no Exception; raised by an attribute, it must not end the run.
    except (Exception, SystemExit) as error:
        raise NoSample(
            "returned", f"gave a sample that cannot be read: {type(error).__name__}: {error}"
        ) from error


def _read_sample(sample: Sample) -> ReturnedSample:
    """Returns the fields of one sample; raises NoSample if a field has another type."""
    try:
        return ReturnedSample.model_validate(sample)
    except ValidationError as error:
        first, *_ = error.errors(include_url=False)
        field = str(first["loc"][0])
        raise NoSample(
            field, f"gave {quoted(first['input'])} in {field}: {first['msg']}"
        ) from error
