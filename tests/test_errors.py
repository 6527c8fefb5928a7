"""Text of others inside error messages."""

import pytest

from slime_tis.errors import one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\n b\tc", "a b c"), ("x" * 20, "x" * 20), ("x" * 21, "x" * 19 + "…"), ("\0" * 100, r"\x00\x00\x00\x00\x0…")],
    ids=["lines", "at the limit", "above it", "control characters"],
)
def test_a_text_is_put_on_one_line_of_a_bounded_length(text: str, shown: str) -> None:
    assert one_line(text, 20) == shown
