"""Limits of numeric options, written beside the field and checked when its config is made.

    lr: Annotated[float, Limits(ge=0, le=1)] = 1e-6

Upper limits are far above what any real run needs: they refuse a slip of the finger before it takes all memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_type_hints

from slime_tis.errors import quoted


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The numbers that an option may be; of a list, each of its items."""

    ge: float | None = None
    """Smallest number."""

    gt: float | None = None
    """Number that it must be above."""

    le: float | None = None
    """Largest number."""

    lt: float | None = None
    """Number that it must be below."""

    also: tuple[float, ...] = ()
    """Numbers outside of the range that have a meaning of their own, such as -1 for all, or infinity."""

    hint: str = ""
    """What to do instead, added to the message of a refusal."""

    def allow(self, value: float) -> bool:
        """Whether a number lies within the limits; NaN never does."""
        if value in self.also:
            return True
        if not math.isfinite(value):
            return False
        return not (
            (self.ge is not None and value < self.ge)
            or (self.gt is not None and value <= self.gt)
            or (self.le is not None and value > self.le)
            or (self.lt is not None and value >= self.lt)
        )

    def __str__(self) -> str:
        """The limits as --help and messages give them: `1 to 4096`, `above 0 and below 1`, `0.01 to 100, or 0`."""
        if self.ge is not None and self.le is not None:
            words = f"{_plain(self.ge)} to {_plain(self.le)}"
        else:
            lower = f"above {_plain(self.gt)}" if self.gt is not None else f"at least {_plain(self.ge or 0)}"
            upper = f"below {_plain(self.lt)}" if self.lt is not None else f"at most {_plain(self.le or 0)}"
            words = f"{lower} and {upper}"
        return ", or ".join([words, *map(_plain, self.also)])


def check_limits(config: Any) -> None:
    """Checks every field of a config that has limits.

    Raises:
        ValueError: A number is out of its limits; names the flag, the number and the limits.
    """
    for name, limits in limits_of(type(config)).items():
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not limits.allow(number):
                hint = f"; {limits.hint}" if limits.hint else ""
                raise ValueError(f"--{name.replace('_', '-')} is {quoted(number)} but must be {limits}{hint}.")


def limits_of(config: type) -> dict[str, Limits]:
    """The limits of a config's fields, by name, of those that have any."""
    found = {name: find_limits(hint) for name, hint in get_type_hints(config, include_extras=True).items()}
    return {name: limits for name, limits in found.items() if limits is not None}


def find_limits(hint: Any) -> Limits | None:
    """The limits in `Annotated[…, Limits(…)]`, or None."""
    return next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Limits)), None)


def _plain(number: float) -> str:
    return f"{number:.12g}"
