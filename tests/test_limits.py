"""Limits of numbers: what they allow, how they read, and the message of a refusal."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from slime_tis.limits import Limits, check_limits, limits_of

INFINITE, NAN = math.inf, math.nan

CASES = [
    (Limits(ge=1, le=4096), "1 to 4096", [1, 4096], [0, 4097, -1, INFINITE, -INFINITE, NAN]),
    (Limits(ge=0.01, le=100, also=(0,)), "0.01 to 100, or 0", [0, 0.01, 100], [1e-300, 0.009, 100.1, -1]),
    (Limits(ge=1, le=10, also=(-1,)), "1 to 10, or -1", [-1, 1], [0, -2]),
    (Limits(gt=0, lt=1), "above 0 and below 1", [1e-300, 0.999], [0, 1, NAN]),
    (Limits(gt=0, le=1), "above 0 and at most 1", [1], [0, 1.0001]),
    (Limits(ge=0, lt=1), "at least 0 and below 1", [0], [1, -1e-300]),
    (
        Limits(gt=0, le=9, also=(INFINITE,)),
        "above 0 and at most 9, or inf",
        [1e-300, 9, INFINITE],
        [0, 10, -INFINITE, NAN],
    ),
]


@pytest.mark.parametrize(("limits", "words", "inside", "outside"), CASES, ids=[case[1] for case in CASES])
def test_limits(limits: Limits, words: str, inside: list[float], outside: list[float]) -> None:
    assert str(limits) == words
    assert [value for value in inside if not limits.allow(value)] == []
    assert [value for value in outside if limits.allow(value)] == []


@dataclass(frozen=True, kw_only=True)
class Sizes:
    width: Annotated[int, Limits(ge=1, le=9, hint="3 is customary")] = 1
    ids: Annotated[tuple[int, ...] | None, Limits(ge=0, le=7)] = None
    name: str = ""

    def __post_init__(self) -> None:
        check_limits(self)


def test_a_config_checks_its_fields_and_each_item_of_a_list() -> None:
    assert set(limits_of(Sizes)) == {"width", "ids"}
    Sizes(width=9, ids=(0, 7))
    with pytest.raises(ValueError, match=r"^--width is 10 but must be 1 to 9; 3 is customary\.$"):
        Sizes(width=10)
    with pytest.raises(ValueError, match=r"^--ids is 8 but must be 0 to 7\.$"):
        Sizes(ids=(0, 8))
