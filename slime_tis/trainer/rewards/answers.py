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

    If the expected answer is a number, the answer must be a number, too: 2+2 is not 4. Units and
    assignments are allowed: 5 cm and x = 5 are 5. Words are compared as text, without case and
    white space.
    """
    expected_number = number_of(expected)
    answer_number = number_of(answer)
    if expected_number is not None and answer_number is not None:
        return expected_number == answer_number
    plain_answer = _plain(answer)
    plain_expected = _plain(expected)
    if plain_answer == plain_expected:
        return True
    if max(len(answer), len(expected)) > MAX_LENGTH or not plain_answer or not plain_expected:
        return False
    # math-verify would read a word as a product of letters.
    if WORDS.fullmatch(plain_answer) or WORDS.fullmatch(plain_expected):
        return False
    return same_expression(answer, expected, as_number=expected_number is not None)


def marked_answer(text: str) -> str | None:
    r"""Returns the answer that a solution marks, or None.

    This is the content of the last \boxed{} (as in MATH), or else the text after the last `####`
    (as in GSM8K).
    """
    boxed = last_boxed(text)
    if boxed is None and "####" in text:
        return text.rpartition("####")[2].strip()
    return boxed


def same_boxed_answer(solution: str, expected: str) -> bool:
    r"""Returns whether the last \boxed{} of a solution has the expected answer.

    The expected answer may be boxed, too.
    """
    answer = last_boxed(solution)
    expected = last_boxed(expected) or expected
    return bool(answer is not None and expected and same_answer(answer, expected))


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{}, up to its brace; None if it is missing."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        if text[end] == "{":
            depth += 1
        elif text[end] == "}":
            depth -= 1
        if depth == 0:
            return text[start + len("\\boxed{") : end].strip()
    return None


def last_number(text: str) -> str:
    """Returns the last number in a text; an empty string if there is no number."""
    numbers: list[str] = NUMBER.findall(LATEX_FRACTION.sub(r" \1/\2", text))
    if not numbers:
        return ""
    return numbers[-1]


def number_of(text: str) -> Fraction | None:
    r"""Returns the value of a text that is exactly one number, or None.

    Numbers are 1,234.5, 3/4, \frac{3}{4}, 1\frac{1}{2}, $12 and 12% (which is 12). `12 apples` is
    not a number.
    """
    # The cut keeps the numbers below the 4,300 digits that int() takes.
    mixed = MIXED_NUMBER.fullmatch(text[:MAX_LENGTH])
    if mixed and int(mixed[4]):
        sign = Fraction(f"{mixed[1]}1")
        fraction = Fraction(int(mixed[3]), int(mixed[4]))
        # The sign is for both parts: -1\frac{1}{2} is -1.5, not -0.5.
        return sign * (int(mixed[2]) + fraction)
    text = LATEX_FRACTION.sub(r"\1/\2", text).replace("\\", "")
    text = text.lstrip(" \n\t$").rstrip(" \n\t$%.")
    if not NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    try:
        return Fraction(numerator.strip()) / Fraction(denominator.strip() or 1)
    except (ValueError, ZeroDivisionError):  # too many digits for an integer, or a zero below
        return None


def _plain(text: str) -> str:
    """Returns a text in lower case, without white space and LaTeX's commands for text."""
    words = TEXT_COMMAND.sub(r"\1", text).split()
    return "".join(words).lower()
