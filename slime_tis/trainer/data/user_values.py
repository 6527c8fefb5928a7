"""Values that user functions return, and their edits of samples.

Values have the types of `USER_FUNCTIONS`, or become JSON.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from slime_tis.errors import CustomFunctionError, quoted
from slime_tis.trainer.data.sample import Sample
from slime_tis.user_functions import USER_FUNCTIONS, describe

DEEPEST = 100
"""Most levels of nested metadata, well below Python's recursion limit."""


def json_object(value: Mapping[Any, Any], place: str) -> dict[str, Any]:
    """Returns a mapping as JSON values.

    Tuples and sets become lists, non-finite numbers None, and other objects their text.

    Args:
        value: The mapping.
        place: Its name in messages.

    Raises:
        ValueError: The mapping is nested too deeply.
    """
    return {str(key): _json_value(item, place, 1) for key, item in value.items()}


def _json_value(value: Any, place: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"{place} nests deeper than {DEEPEST} levels.")
    if value is None or isinstance(value, bool | str):
        return value
    # numpy's scalars are registered as these numbers, but json cannot write most scalars.
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            return None
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _json_value(item, place, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_value(item, place, depth + 1) for item in value]
    return str(value)


def typed_value(option: str, function: Callable[..., Any], value: Any) -> Any:
    """Returns the value of a user function, converted to its type in `USER_FUNCTIONS`.

    Raises:
        CustomFunctionError: The value has another type.
    """
    try:
        return _adapter(option).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"{step}: " for step in first["loc"])
        returns = USER_FUNCTIONS[option].returns
        if isinstance(returns, type):
            name = returns.__name__
        else:  # list[list[Any]], for example, is no class
            name = str(returns).replace("typing.", "")
        raise CustomFunctionError(
            f"{describe(function)} returned {quoted(value)}; {place}{first['msg']}. Return {name}."
        ) from None


@cache
def _adapter(option: str) -> TypeAdapter[Any]:
    # Cached, because pydantic compiles a validator, which takes longer than its use.
    return TypeAdapter(
        USER_FUNCTIONS[option].returns, config=ConfigDict(arbitrary_types_allowed=True)
    )


SampleSnapshot = tuple[tuple[Any, ...], list[int]]
"""Fields of a sample that a user function may not change, and its loss mask, before the function
gets it."""


def handed_out(sample: Sample) -> SampleSnapshot:
    """Replaces a sample's compact numbers with lists for a user function; returns a snapshot."""
    sample.expand()
    return _fixed(sample), list(sample.loss_mask)


@dataclass(frozen=True, kw_only=True)
class SampleEdits:
    """The edits of a user function, which other ranks apply; None for fields without an edit."""

    metadata: dict[str, Any] | None
    loss_mask: list[int] | None
    remove_sample: bool

    @classmethod
    def since(cls, before: SampleSnapshot, sample: Sample, function: str) -> Self:
        """Returns the edits since `handed_out`, and makes the sample compact again.

        Raises:
            CustomFunctionError: An edit is not allowed.
        """
        fixed, old_mask = before
        mask = sample.loss_mask
        is_mask = isinstance(mask, list) and len(mask) == len(old_mask) and set(mask) <= {0, 1}
        if not is_mask or not isinstance(sample.metadata, dict) or _fixed(sample) != fixed:
            raise CustomFunctionError(
                f"{function} changed a sample of prompt {sample.prompt_index}; it may set metadata"
                " (a dict), loss_mask (0 or 1 for each response token) and remove_sample, nothing"
                " else."
            )
        new_metadata: dict[str, Any] | None = json_object(sample.metadata, "its metadata")
        if sample.prompt_row is not None and new_metadata == sample.prompt_row.metadata:
            new_metadata = None
        new_mask = [int(value) for value in mask]  # True and 1.0 are allowed, too
        sample.loss_mask = new_mask
        sample.compact()
        edited_mask = None
        if new_mask != old_mask:
            edited_mask = new_mask
        return cls(
            metadata=new_metadata,
            loss_mask=edited_mask,
            remove_sample=bool(sample.remove_sample),
        )

    def apply(self, sample: Sample) -> None:
        """Writes the edits into a sample, which another rank has scored."""
        if self.metadata is not None:
            sample.metadata = self.metadata
        if self.loss_mask is not None:
            sample.loss_mask = self.loss_mask
        sample.remove_sample = self.remove_sample


def _fixed(sample: Sample) -> tuple[Any, ...]:
    """Returns copies of the fields that a user function may not change."""
    return (
        list(sample.tokens),
        list(sample.rollout_log_probs),
        list(sample.weight_versions),
        sample.group_index,
        sample.index,
        sample.rollout_id,
        sample.response_length,
        sample.status,
    )
