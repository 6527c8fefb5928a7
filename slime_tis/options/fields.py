"""What the fields of a config may be, written in their annotations and checked when the config is made.

    lr: Annotated[float, Limits(ge=0, le=1)] = 1e-6
    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"

Upper limits are far above what any real run needs: they refuse a slip of the finger before it takes
all memory.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import types
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from slime_tis.errors import quoted

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
"""Types of fields, and of the items of lists, in the words of messages."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The range of a number, or of each item of a list: ge <= value <= le, gt < value < lt."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: tuple[float, ...] = ()
    """Special values outside of the range, such as -1 for all, or infinity."""
    hint: str = ""
    """End of the message of a refusal."""

    def allow(self, value: float) -> bool:
        """Whether a number lies within the limits; NaN never does, and infinity only where `also` has it."""
        if value in self.also:
            return True
        if not _is_finite(value):
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
            bounds = {"above": self.gt, "at least": self.ge, "at most": self.le, "below": self.lt}
            words = " and ".join(
                f"{word} {_plain(bound)}" for word, bound in bounds.items() if bound is not None
            )
            if self.gt is not None and self.le is None and self.lt is None:
                words += " and finite"  # whole numbers have ge
        return ", or ".join([words, *map(_plain, self.also)])


@dataclass(frozen=True, kw_only=True)
class FieldType:
    """The type in a field's annotation; `kind` is a Literal, bool, int, float, str or a `tuple[X, ...]` of these."""

    kind: Any
    limits: Limits | None
    optional: bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal, empty for other types."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def is_list(self) -> bool:
        """Whether it is a tuple of any length."""
        return get_origin(self.kind) is tuple

    @property
    def item(self) -> Any:
        """Type of the items of a list; of anything else its own."""
        return get_args(self.kind)[0] if self.is_list else self.kind

    def __str__(self) -> str:
        """The type in the words of messages: `a whole number, 1 to 4096`, `one of truncate, clip, mask`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        limits = "" if self.limits is None else f", {self.limits}"
        return ("a list, each " if self.is_list else "") + NAMES[self.item] + limits


def option(
    default: Any = dataclasses.MISSING,
    *,
    group: str,
    metavar: str = "",
    needs: tuple[str, ...] = (),
    suffices: tuple[str, ...] = (),
) -> Any:
    """Declares a dataclass field as an option of the command line.

    Args: default: The default; without one the option is required. group: Title of the option's
        group in --help. metavar: The value in --help; numbers show N (whole) or X without it.
        needs: Flags, as `--flag` or `--flag=value`; the option has no effect without one of them.
        suffices: Further flags that give the option an effect. Help and messages do not name them:
        a user function may
            read any option, and in bypass mode weights are measured but not applied.
    """
    metadata = {"group": group, "metavar": metavar, "needs": needs, "suffices": suffices}
    return dataclasses.field(default=default, metadata=metadata)


REJECTS = (
    "--use-rs",
    "--rollout-rs",
    "--rs-veto-threshold",
    "--rs-veto-upper-threshold",
    "--rs-second-moment-bound",
    "--divergence-mask",
    "--tis-mode=mask",
)
"""Flags that reject tokens."""


@functools.cache
def field_types(config: type) -> dict[str, FieldType]:
    """The types and limits of a dataclass's fields, by name."""
    hints = get_type_hints(config, include_extras=True)
    return {field.name: _field_type(hints[field.name]) for field in dataclasses.fields(config)}


@functools.cache
def field_docs(config: type) -> dict[str, str]:
    """Returns the docstring under each field of a dataclass, on one line."""
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(config)).body
        if isinstance(node, ast.ClassDef)
    )
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def check_fields(config: object) -> None:
    """Checks the values of a dataclass against the types and limits of its fields; raises ValueError."""
    for name, field in field_types(type(config)).items():  # type: ignore[arg-type]  # mypy: no class is hashable
        value = getattr(config, name)
        if value is None and field.optional:
            continue
        if field.choices and not (isinstance(value, str) and value in field.choices):
            raise ValueError(f"{flag(name)} is {quoted(value)} but must be {field}.")
        for item in value if field.is_list else (value,):
            if not _has_type(item, field.item):
                raise ValueError(f"{flag(name)} is {quoted(item)} but must be {field}.")
            if field.limits is not None and not field.limits.allow(item):
                hint = f"; {field.limits.hint}" if field.limits.hint else ""
                raise ValueError(
                    f"{flag(name)} is {quoted(item)} but must be {field.limits}{hint}."
                )


def flag(name: str) -> str:
    """The flag of a field: `--tis-upper-bound` for tis_upper_bound."""
    return "--" + name.replace("_", "-")


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a value is the switch, the number or the text that it has to be; True for other types."""
    if kind is bool:
        return isinstance(value, bool)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return not isinstance(value, list | tuple | dict | bool) if kind is str else True


def _field_type(hint: Any) -> FieldType:
    limits = None
    if get_origin(hint) is Annotated:
        limits = next((extra for extra in hint.__metadata__ if isinstance(extra, Limits)), None)
        hint = get_args(hint)[0]
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [part for part in parts if part is not type(None)]
    return FieldType(
        kind=str if str in kinds else kinds[0], limits=limits, optional=len(kinds) < len(parts)
    )


def _is_finite(value: float) -> bool:
    """Whether a number is one that a float can be."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _plain(number: float) -> str:
    return f"{number:.12g}"
