"""The tool: adds or subtracts two whole numbers."""

import re

CALL = re.compile(r"(-?[0-9]{1,6})([+-])([0-9]{1,6})")
REFUSAL = "!"
"""What is answered to anything but a call."""


def calculate(call: str) -> str:
    """The result of `47+38`, or `REFUSAL`; nothing of the text is run as code."""
    found = CALL.fullmatch(call)
    if found is None:
        return REFUSAL
    left, sign, right = found.groups()
    return str(int(left) + (int(right) if sign == "+" else -int(right)))
