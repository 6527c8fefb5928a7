"""Limits of numbers: what they allow, how they read, and the message of a refusal."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from slime_tis.options.fields import Limits, check_fields, field_types, flag

INFINITE, NAN = math.inf, math.nan

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


@pytest.mark.parametrize(
    ("limits", "words", "inside", "outside"), CASES, ids=[case[1] for case in CASES]
)
def test_limits(limits, words, inside, outside):
    assert str(limits) == words
    assert [value for value in inside if not limits.allow(value)] == []
    assert [value for value in outside if limits.allow(value)] == []


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


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_refuses_what_its_annotations_exclude(case):
    values, message = REFUSED[case]
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
def test_a_config_takes_what_its_annotations_allow(values):
    assert {name: getattr(Sizes(**values), name) for name in values} == values


def test_the_types_of_fields():
    found = field_types(Sizes)
    assert [str(found[name]) for name in ("width", "ids", "shape", "filled", "name")] == [
        "a whole number, 1 to 9",
        "a list, each a whole number, 0 to 7",
        "one of square, round",
        "true or false",
        "text",
    ]
    assert found["edge"].optional and found["edge"].choices == ("thin", "thick")
    assert found["ids"].is_list and found["ids"].item is int
    assert flag("use_tis") == "--use-tis"
