"""Values of a data row or of a user's function as JSON can hold them, so that samples can be saved and sent."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

DEEPEST = 100
LARGEST_INT = 1 << 4096
"""Integers beyond are written in hexadecimal: Python converts at most 4300 digits to decimal."""


def json_object(value: Mapping[Any, Any], place: str) -> dict[str, Any]:
    """The mapping as JSON values: tuples and sets become lists, non-finite numbers None, other objects their text."""
    return {str(key): _json_value(item, place, 1) for key, item in value.items()}


def _json_value(value: Any, place: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"{place} nests deeper than {DEEPEST} levels.")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value) if abs(int(value)) < LARGEST_INT else hex(int(value))
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _json_value(item, place, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_value(item, place, depth + 1) for item in value]
    return str(value)
