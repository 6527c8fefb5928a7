"""Lists of numbers in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, TypeAlias


class Numbers(array):  # type: ignore[type-arg]  # Python 3.11 has no array[Any]
    """A list of numbers of one type: `Numbers("d", [0.5])`, with a type code of the module `array`.

    It takes 1 to 8 bytes per number; a list takes 8, and 24 to 28 for the object. Functions that were written for
    lists can use it: +, == and assignments to slices take lists.
    """

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Numbers(self.typecode, found) if isinstance(index, slice) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, array(self.typecode, value) if isinstance(index, slice) else value)

    def __add__(self, other: Any) -> Any:
        is_same = isinstance(other, Numbers) and other.typecode == self.typecode
        return Numbers(self.typecode, super().__add__(other)) if is_same else [*self, *other]

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __iadd__(self, other: Iterable[Any]) -> Numbers:  # type: ignore[misc]
        self.extend(other)
        return self

    def __eq__(self, other: object) -> bool:
        return self.tolist() == other if isinstance(other, list) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    copy = array.tolist

    def __copy__(self) -> Numbers:
        return self[:]  # type: ignore[no-any-return]

    def __deepcopy__(self, _: object) -> Numbers:
        return self[:]  # type: ignore[no-any-return]


Ints: TypeAlias = list[int] | Numbers
Floats: TypeAlias = list[float] | Numbers
