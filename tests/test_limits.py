"""Limits of numbers: what they allow, how they read, and the message of a refusal."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from slime_tis.options.fields import Limits, check_fields, field_types, flag

INFINITE = math.inf
NAN = math.nan

CASES = [
    (Limits(ge=1, le=4096), "1 to 4096", [1, 4096], [0, 4097, -1, INFINITE, -INFINITE, NAN]),
    (
        Limits(ge=0.01, le=100, also=(0,)),
        "0.01 to 100, or 0",
        [0, 0.01, 100],
        [1e-300, 0.009, 100.1, -1],
    ),
    (Limits(ge=1, le=10, also=(-1,)), "1 to 10, or -1", [-1, 1], [0, -2]),
    (Limits(gt=0, lt=1), "above 0 and below 1", [1e-300, 0.999], [0, 1, NAN]),
    (Limits(gt=0, le=1), "above 0 and at most 1", [1], [0, 1.0001]),
    (Limits(ge=0, lt=1), "at least 0 and below 1", [0], [1, -1e-300]),
    (Limits(gt=0), "above 0 and finite", [1e-300, 1e300], [0, INFINITE, NAN, 10**400]),
    (Limits(ge=1), "at least 1", [1, 10**9], [0, INFINITE]),
    (Limits(gt=1), "above 1 and finite", [1.001], [1, INFINITE]),
    (
        Limits(gt=0, le=9, also=(INFINITE,)),
        "above 0 and at most 9, or inf",
        [1e-300, 9, INFINITE],
        [0, 10, -INFINITE, NAN],
    ),
]


each_case = pytest.mark.parametrize(
    ("limits", "words", "inside", "outside"), CASES, ids=[words for _, words, _, _ in CASES]
)


@each_case
def test_limits_in_words(limits, words, inside, outside):
    assert str(limits) == words


@each_case
def test_values_within_limits_are_allowed(limits, words, inside, outside):
    assert all(limits.allow(value) for value in inside)


@each_case
def test_values_outside_of_limits_are_not_allowed(limits, words, inside, outside):
    assert not any(limits.allow(value) for value in outside)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    width: Annotated[int, Limits(ge=1, le=9, hint="3 is customary")] = 1
    ids: Annotated[tuple[int, ...] | None, Limits(ge=0, le=7)] = None
    scale: Annotated[float, Limits(gt=0)] = 1.0
    shape: Literal["square", "round"] = "square"
    edge: Literal["thin", "thick"] | None = None
    filled: bool = False
    name: str = ""

    def __post_init__(self):
        check_fields(self)


REFUSED = {
    "above": ({"width": 10}, "--width is 10 but must be 1 to 9; 3 is customary."),
    "item of a list": ({"ids": (0, 8)}, "--ids is 8 but must be 0 to 7."),
    "infinite": ({"scale": INFINITE}, "--scale is inf but must be above 0 and finite."),
    "not whole": ({"width": 2.0}, "--width is 2.0 but must be a whole number, 1 to 9."),
    "switch for a number": (
        {"scale": True},
        "--scale is True but must be a number, above 0 and finite.",
    ),
    "text for a number": (
        {"scale": "1"},
        "--scale is '1' but must be a number, above 0 and finite.",
    ),
    "number for a switch": ({"filled": 1}, "--filled is 1 but must be true or false."),
    "unset": ({"width": None}, "--width is None but must be a whole number, 1 to 9."),
    "other choice": ({"shape": "oval"}, "--shape is 'oval' but must be one of square, round."),
    "list for a choice": ({"edge": ["thin"]}, "--edge is ['thin'] but must be one of thin, thick."),
    "unset choice": ({"shape": None}, "--shape is None but must be one of square, round."),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_values_outside_of_the_annotations_are_refused(values, message):
    with pytest.raises(ValueError) as error:
        Sizes(**values)
    assert str(error.value) == message


ACCEPTED = [
    {},
    {"width": 9, "ids": (0, 7), "scale": 2},
    {"ids": None, "edge": None},
    {"shape": "round", "edge": "thick", "filled": True},
]


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_values_of_the_annotations_are_accepted(values):
    sizes = Sizes(**values)
    assert {name: getattr(sizes, name) for name in values} == values


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("width", "a whole number, 1 to 9"),
        ("ids", "a list, each a whole number, 0 to 7"),
        ("shape", "one of square, round"),
        ("filled", "true or false"),
        ("name", "text"),
    ],
    ids=["number", "list", "choice", "switch", "text"],
)
def test_types_in_words(name, words):
    assert str(field_types(Sizes)[name]) == words


def test_the_type_of_an_optional_choice():
    edge = field_types(Sizes)["edge"]
    assert edge.optional
    assert edge.choices == ("thin", "thick")


def test_the_type_of_a_list():
    ids = field_types(Sizes)["ids"]
    assert ids.is_list
    assert ids.item is int


def test_a_flag_has_dashes():
    assert flag("use_tis") == "--use-tis"
