"""What a user function wrote into samples: checked against what it may write, and sent to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.trainer.data.json_values import json_object
from slime_tis.trainer.data.sample import Sample
from slime_tis.user_functions import describe


@dataclass(frozen=True, kw_only=True)
class Before:
    """What a sample was before a function got it."""

    fixed: tuple[Any, ...]
    """Tokens, log-probs, versions and places, which belong together and stay as they are."""
    loss_mask: list[int]

    @classmethod
    def of(cls, sample: Sample) -> Before:
        """Copies of the compared fields."""
        return cls(fixed=_fixed(sample), loss_mask=list(sample.loss_mask))


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a function changed in a sample."""

    metadata: dict[str, Any] | None
    """The sample's metadata where they are not its prompt's, else None."""

    loss_mask: list[int] | None
    """The sample's loss mask where the function changed it, else None."""

    remove_sample: bool
    """Whether none of the sample's tokens is trained on."""

    @classmethod
    def between(cls, before: Before, sample: Sample, function: str) -> Written:
        """What was written since `before`.

        Raises:
            CustomFunctionError: the function changed what it may not, or wrote what is no mask or no metadata.
        """
        check_untouched(before, sample, function)
        if not isinstance(sample.metadata, Mapping):
            raise CustomFunctionError(
                f"{function} left {one_line(repr(sample.metadata))} as the metadata of prompt {sample.prompt_index}; "
                "leave a dict."
            )
        metadata = json_object(sample.metadata, "its metadata")
        return cls(
            metadata=None if metadata == getattr(sample.prompt, "metadata", None) else metadata,
            loss_mask=None if sample.loss_mask == before.loss_mask else [int(value) for value in sample.loss_mask],
            remove_sample=bool(sample.remove_sample),
        )

    def apply(self, sample: Sample) -> None:
        """Writes the same into the sample of another rank."""
        if self.metadata is not None:
            sample.metadata = self.metadata
        if self.loss_mask is not None:
            sample.loss_mask = self.loss_mask
        sample.remove_sample = self.remove_sample


def check_untouched(before: Before, sample: Sample, function: str) -> None:
    """Checks that a sample is the one that a function got, but for what it may write.

    Raises:
        CustomFunctionError: it is not.
    """
    mask = sample.loss_mask
    untouched = isinstance(mask, list) and len(mask) == len(before.loss_mask)
    untouched = untouched and all(isinstance(value, int) and value in (0, 1) for value in mask)
    if not (untouched and _fixed(sample) == before.fixed):
        raise CustomFunctionError(
            f"{function} changed the tokens, log-probs, versions or places of a sample of prompt "
            f"{sample.prompt_index}, or its loss_mask to other than a 0 or 1 for each response token; it may set "
            "metadata, loss_mask and remove_sample."
        )


@contextmanager
def reading(function: Callable[..., Any], what: str) -> Iterator[None]:
    """Reads returned and written values, including user-defined objects whose methods may raise.

    Args:
        function: The user function.
        what: what may turn out not to be readable, for the message.

    Raises:
        CustomFunctionError: for every exception.
    """
    try:
        yield
    except CustomFunctionError:
        raise
    except (Exception, SystemExit) as error:
        raise CustomFunctionError(
            f"{describe(function)} gave {what} that cannot be read: {type(error).__name__}: {one_line(str(error))}"
        ) from error


def _fixed(sample: Sample) -> tuple[Any, ...]:
    return (
        list(sample.tokens),
        list(sample.rollout_log_probs),
        list(sample.weight_versions),
        (sample.group_index, sample.index, sample.rollout_id, sample.response_length, sample.status),
    )
