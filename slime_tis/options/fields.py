"""Fields of configs: annotations declare types and limits; `check_fields` checks the values.

    lr: Annotated[float, Limits(ge=0, le=1)] = 1e-6
    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"

Upper limits are far above the needs of any run; they refuse a typing error before it exhausts the
memory.
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
"""Types of fields and of list items, in the words of messages."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The range of a number or of a list's items: ge <= value <= le, gt < value < lt."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: tuple[float, ...] = ()
    """Allowed values outside of the range, such as -1 for all, or infinity."""
    hint: str = ""
    """Advice at the end of a refusal."""

    def allow(self, value: float) -> bool:
        """Whether a number is allowed; NaN never is, infinity only if `also` has it."""
        if value in self.also:
            return True
        if not _is_finite(value):
            return False
        above = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        below = (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)
        return above and below

    def __str__(self) -> str:
        """The limits in words: `1 to 4096`, `above 0 and below 1`, `1 to 9, or 0`."""
        specials = [_plain(value) for value in self.also]
        if self.ge is not None and self.le is not None:
            return ", or ".join([f"{_plain(self.ge)} to {_plain(self.le)}", *specials])
        bounds = {"above": self.gt, "at least": self.ge, "at most": self.le, "below": self.lt}
        phrases = [f"{word} {_plain(bound)}" for word, bound in bounds.items() if bound is not None]
        # Only floats have `gt`; the limits of integers need not say that infinity is refused.
        if self.gt is not None and self.le is None and self.lt is None:
            phrases.append("finite")
        return ", or ".join([" and ".join(phrases), *specials])


@dataclass(frozen=True, kw_only=True)
class FieldType:
    """The annotation of a field."""

    kind: Any
    """A Literal, bool, int, float, str, or a `tuple[X, ...]` of one of these."""
    limits: Limits | None
    optional: bool
    """Whether None is allowed."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal, or of a list's items; empty for other types."""
        if get_origin(self.item) is not Literal:
            return ()
        return get_args(self.item)

    @property
    def is_list(self) -> bool:
        """Whether the value is a tuple of any length."""
        return get_origin(self.kind) is tuple

    @property
    def item(self) -> Any:
        """The type of a list's items; `kind` for other types."""
        if not self.is_list:
            return self.kind
        return get_args(self.kind)[0]

    def __str__(self) -> str:
        """The type in words: `a whole number, 1 to 4096`, `one of truncate, clip, mask`."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        else:
            text = NAMES[self.item]
        if self.is_list:
            text = f"a list, each {text}"
        if self.limits is not None:
            text += f", {self.limits}"
        return text


def option(
    default: Any = dataclasses.MISSING,
    *,
    group: str,
    metavar: str = "",
    needs: tuple[str, ...] = (),
    suffices: tuple[str, ...] = (),
    verbatim: bool = False,
) -> Any:
    """Declares a dataclass field as an option of the command line.

    Args:
        default: The default; without one the option is required.
        group: Title of the option's group in --help.
        metavar: The value in --help; without it N for integers and X for other numbers and text.
        needs: Flags, as `--flag` or `--flag=value`; without any, the option has no effect.
        suffices: Further flags that give the option an effect. Help and messages do not name them:
            a user function may read any option, and bypass mode measures weights that it does not
            apply.
        verbatim: Whether a text counts as it is: it may be blank, such as a newline, and have
            control characters.

    Returns:
        A dataclass field; its metadata are arguments of `slime_tis.options.values.Option`.
    """
    metadata = {
        "group": group,
        "metavar": metavar,
        "needs": needs,
        "suffices": suffices,
        "verbatim": verbatim,
    }
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
    """Returns the types and limits of a dataclass's fields, by name."""
    # Without `include_extras`, Annotated would lose its limits.
    hints = get_type_hints(config, include_extras=True)
    return {field.name: _field_type(hints[field.name]) for field in dataclasses.fields(config)}


@functools.cache
def field_docs(config: type) -> dict[str, str]:
    """Returns the docstring under each field of a dataclass, on one line."""
    # Python does not keep docstrings of attributes; only the source has them.
    (definition,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, doc in itertools.pairwise(definition.body):
        match field, doc:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


def check_fields(config: object, *, prefix: str = "") -> None:
    """Checks a dataclass's values against the annotations of the fields.

    Args:
        config: The dataclass.
        prefix: Beginning of the flags in messages, as `sglang` in `--sglang-url`.

    Raises:
        ValueError: A value has another type, or is outside the limits.
    """
    for name, field in field_types(type(config)).items():  # type: ignore[arg-type]  # mypy: no class is hashable
        value = getattr(config, name)
        if value is None and field.optional:
            continue
        items = (value,)
        if field.is_list:
            items = value
        label = name
        if prefix:
            label = f"{prefix}_{name}"
        for item in items:
            _check_item(label, field, item)


def flag(name: str) -> str:
    """Returns the flag of a field: `--tis-upper-bound` for tis_upper_bound."""
    return "--" + name.replace("_", "-")


def _check_item(name: str, field: FieldType, item: Any) -> None:
    """Checks a value, or one item of a list."""
    is_valid = _has_type(item, field.item)
    if field.choices:
        is_valid = isinstance(item, str) and item in field.choices
    if not is_valid:
        raise ValueError(f"{flag(name)} is {quoted(item)} but must be {field}.")
    limits = field.limits
    if limits is not None and not limits.allow(item):
        hint = ""
        if limits.hint:
            hint = f"; {limits.hint}"
        raise ValueError(f"{flag(name)} is {quoted(item)} but must be {limits}{hint}.")


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a value has the type of a field; True for a Literal, which is checked before."""
    if kind is bool:
        return isinstance(value, bool)
    # `bool` is a subclass of `int`, and numpy's numbers are Integral or Real, but not int or float.
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind is str:
        # Objects of other classes pass, for example a Path.
        return not isinstance(value, list | tuple | dict | bool)
    return True


def _field_type(hint: Any) -> FieldType:
    """Returns the type of an annotation: `T`, `T | None` or `Annotated[T, Limits(…)]`."""
    limits = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        for extra in extras:
            if isinstance(extra, Limits):
                limits = extra
    members = (hint,)
    # `Optional[T]` is a Union, `T | None` a UnionType.
    if get_origin(hint) in (Union, types.UnionType):
        members = get_args(hint)
    kinds = [member for member in members if member is not type(None)]
    kind = kinds[0]
    # The command line gives text, which also covers the other types of such a field.
    if str in kinds:
        kind = str
    return FieldType(kind=kind, limits=limits, optional=len(kinds) < len(members))


def _is_finite(value: float) -> bool:
    """Whether a float can represent the number, and it is neither infinite nor NaN."""
    try:
        return math.isfinite(value)
    # `isfinite` converts to a float, which an integer of hundreds of digits does not fit.
    except OverflowError:
        return False


def _plain(number: float) -> str:
    """Returns a number without rounding errors of binary fractions: `0.1`, not `0.1000…055`."""
    return f"{number:.12g}"
