r"""Final answers in texts: extraction and comparison.

Numbers are compared exactly, words as text, and everything else symbolically by math-verify.
"""

import re
from fractions import Fraction

from slime_tis.trainer.rewards.symbolic import same_expression

DECIMAL = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"{DECIMAL}(?:\s*/\s*{DECIMAL})?")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
MIXED_NUMBER = re.compile(r"\s*([-+]?)\s*(\d+)\s*\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}\s*")
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
WORDS = re.compile(r"[^\d\\^_=+*/<>(){}\[\]|!]*")
"""Text without mathematical signs."""

MAX_LENGTH = 1000
"""Characters of an answer that is compared as a number or an expression."""


def same_answer(answer: str, expected: str) -> bool:
    r"""Whether two answers are the same number, the same text, or equal expressions.

    Where the expected answer is a number, the other has to be one too: 2+2 is not 4, while 5 cm and x = 5 are 5. Words
    are compared as text, without case and white space.
    """
    number, answered = number_of(expected), number_of(answer)
    if number is not None and answered is not None:
        return number == answered
    if _plain(answer) == _plain(expected):
        return True
    if max(len(answer), len(expected)) > MAX_LENGTH or not answer.strip() or not expected.strip():
        return False
    if WORDS.fullmatch(_plain(answer)) or WORDS.fullmatch(_plain(expected)):
        return False
    return same_expression(answer, expected, as_number=number is not None)


def marked_answer(text: str) -> str | None:
    r"""What the last \boxed{} holds, else what follows the last `####`: the forms of MATH and GSM8K; None without."""
    boxed = last_boxed(text)
    if boxed is None and "####" in text:
        return text.rpartition("####")[2].strip()
    return boxed


def same_boxed_answer(solution: str, expected: str) -> bool:
    r"""Whether the last \boxed{} answer of a solution is the expected answer, which may be boxed, too."""
    answer, expected = last_boxed(solution), last_boxed(expected) or expected
    return bool(answer is not None and expected and same_answer(answer, expected))


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds, with braces inside it matched; None where none is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end].strip()
    return None


def last_number(text: str) -> str:
    """The last number in a text, empty where it has none."""
    numbers: list[str] = NUMBER.findall(LATEX_FRACTION.sub(r" \1/\2", text))
    return numbers[-1] if numbers else ""


def number_of(text: str) -> Fraction | None:
    r"""The number that the text is: 1,234.5, 3/4, \frac{3}{4}, 1\frac{1}{2}, $12 and 12% are, `12 apples` is not."""
    mixed = MIXED_NUMBER.fullmatch(text[:MAX_LENGTH])
    if mixed and int(mixed[4]):
        return Fraction(f"{mixed[1]}1") * (int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4])))
    text = LATEX_FRACTION.sub(r"\1/\2", text).replace("\\", "").lstrip(" \n\t$").rstrip(" \n\t$%.")
    if not NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    try:
        return Fraction(numerator.strip()) / Fraction(denominator.strip() or 1)
    except (ValueError, ZeroDivisionError):  # too many digits for an integer, or a zero below
        return None


def _plain(text: str) -> str:
    return "".join(TEXT_COMMAND.sub(r"\1", text).split()).lower()
