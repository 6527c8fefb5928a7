"""Built-in rewards: tables of responses, labels and scores, and where slime's score is another one."""

import pytest

from slime_tis.trainer.options.rm_types import REMOTE, RM_TYPES
from slime_tis.trainer.rewards.builtin_rewards import SCORES, dapo, deepscaler, exact_match, gpqa, math_match, token_f1


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [("0123", "0123", 1.0), (" 0123\n", "0123", 1.0), ("0132", "0123", 0.0), ("", "0123", 0.0)],
    ids=["equal", "white space around", "another order", "empty"],
)
def test_exact_match(response, label, score):
    assert exact_match(response, label) == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("so 3 + 4 = 7 apples.", "7", 1.0),
        ("so 3 + 4 = 7 apples.", "6 + 1 = 7\n#### 7", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("It costs $1,234.50.", "1234.5", 1.0),
        ("first 7, then 8", "7", 0.0),
        ("7 at first, then \\boxed{8} (not 9)", "8", 1.0),
        ("\\boxed{1} or \\boxed{2}", "\\boxed{2}", 1.0),
        ("\\boxed{\\frac{3}{4}}", "0.75", 1.0),
        ("\\boxed{\\dfrac{3}{4}}", "\\frac{6}{8}", 1.0),
        ("x = 3/4", "0.75", 1.0),
        ("-5", "5", 0.0),
        ("the answer is -5", "-5", 1.0),
        ("50\\%", "50", 1.0),
        (".5", "0.5", 1.0),
        ("0.30000000000000001", "0.3", 0.0),
        ("\\boxed{x^2 + 1}", "x^2+1", 1.0),
        ("\\boxed{x^2}", "x^3", 0.0),
        ("\\boxed{7", "7", 1.0),
        ("1/0", "0", 0.0),
        ("no number", "7", 0.0),
        ("", "7", 0.0),
        ("2+2", "4", 0.0),
        ("9" * 5000, "7", 0.0),
        ("1e999999999", "7", 0.0),
    ],
    ids=[
        "last number of a sentence",
        "label with ####",
        "thousands separator",
        "currency",
        "last of two numbers",
        "boxed before number",
        "last of two boxes",
        "fraction against decimal",
        "dfrac against fraction",
        "equation with a fraction",
        "sign differs",
        "negative",
        "per cent",
        "no leading zero",
        "sixteen digits off",
        "polynomial",
        "another power",
        "box left open",
        "division by zero",
        "no number",
        "empty",
        "sum left to do",
        "5000 digits",
        "huge exponent",
    ],
)
def test_math(response, label, score):
    assert math_match(response, label) == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat", "the black cat", 2 / 3),
        ("cat cat dog", "cat dog dog", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 1.0),
    ],
    ids=[
        "articles and punctuation",
        "two of three words",
        "repeated words",
        "nothing shared",
        "empty",
        "articles alone",
    ],
)
def test_f1(response, label, score):
    assert token_f1(response, label) == pytest.approx(score)


# Expressions, as in slime: a number has to be given as a number, words as they are, the rest up to equality.
@pytest.mark.parametrize(
    ("answer", "label", "score"),
    [
        ("1+x^2", "x^2+1", 1.0),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", 1.0),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{3}}{2}", 0.0),
        ("(1, 2)", "(1,2)", 1.0),
        ("(2,1)", "(1,2)", 0.0),
        ("[0,1)", "[0,1]", 0.0),
        ("2+2", "4", 0.0),
        (r"5\text{ cm}", "5", 1.0),
        ("x=5", "5", 1.0),
        (r"30^\circ", "30", 1.0),
        (r"\text{blue}", "Blue", 1.0),
        ("bule", "blue", 0.0),
        (r"1\frac{1}{2}", "3/2", 1.0),
        ("3+5i", "5i+3", 1.0),
        ("", "x", 0.0),
        ("}{", "x+1", 0.0),
        ("(" * 50, "x+1", 0.0),
    ],
    ids=[
        "order of terms",
        "rationalised root",
        "another root",
        "spaces in a pair",
        "pair reversed",
        "another interval",
        "sum left to do",
        "unit",
        "equation",
        "degrees",
        "words in another case",
        "another word",
        "mixed number",
        "complex",
        "empty",
        "unbalanced braces",
        "fifty parentheses",
    ],
)
def test_math_on_expressions(answer, label, score):
    assert math_match(f"so \\boxed{{{answer}}}", label) == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("<think>hm</think> It is \\boxed{12}.", "12", 1.0),
        ("<think>\\boxed{12}</think> It is 12.", "12", 0.0),
        ("a</think>\\boxed{1}</think>\\boxed{2}", "2", 1.0),
        ("\\boxed{12}", "12", 0.0),
        ("hm ###Response \\boxed{1/2} ###Response \\boxed{3}", "\\boxed{0.5}", 1.0),
        ("</think>\\boxed{12}", "", 0.0),
        ("</think>\\boxed{}", "12", 0.0),
    ],
    ids=[
        "box after thinking",
        "box within thinking",
        "last of two answers",
        "no end of thinking",
        "first of two ###Response",
        "empty label",
        "empty box",
    ],
)
def test_deepscaler(response, label, score):
    assert deepscaler(response, label) == score


@pytest.mark.parametrize(
    ("response", "label", "acc"),
    [
        ("So\nAnswer: 42", "42", 1.0),
        ("answer : $42$.", "42", 1.0),
        ("**Answer:** 42", "42", 1.0),
        ("Answer: 41\nAnswer: \\boxed{42}", "42", 1.0),
        ("Answer: 42\nAnswer: 41", "42", 0.0),
        ("Answer: x = 42", "42", 1.0),
        ("Answer: 42" + " " * 300, "42", 0.0),
        ("42", "42", 0.0),
        ("Answer:", "42", 0.0),
        ("Answer: 42", "42.0", 1.0),
    ],
    ids=[
        "own line",
        "lower case and dollars",
        "bold",
        "last of two answers right",
        "last of two answers wrong",
        "equation",
        "too far from the end",
        "no Answer",
        "nothing after Answer",
        "decimal label",
    ],
)
def test_dapo(response, label, acc):
    assert dapo(response, label) == {"score": 2 * acc - 1, "acc": acc}


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [("yes", "Yes.", 1.0), ("yes it is", "yes", 0.0), ("no", "no answer", 0.0), ("yes", "no", 0.0)],
    ids=["yes", "yes and more", "no against no answer", "yes against no"],
)
def test_f1_of_a_verdict_is_all_or_nothing(response, label, score):
    assert token_f1(response, label) == score


CHOICES = {"choices": ["a red fox", "a blue whale", "a green frog", "none"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "score"),
    [
        ("The answer is B.", "B", {}, 1.0),
        ("The answer is (B)", "b", {}, 1.0),
        ("**Answer: B**", "B", {}, 1.0),
        ("Answer: A. No, wait. Answer: C", "C", {}, 1.0),
        ("A is wrong, so D", "D", {}, 1.0),
        ("B is the correct option", "B", {}, 1.0),
        ("The answer is correct: B", "B", {}, 1.0),  # slime reads C, the first letter of "correct"
        ("<think>answer A</think> I choose option B", "B", {}, 1.0),
        ("It is the blue whale", "a blue whale", CHOICES, 0.0),
        ("It is a blue whale", "a blue whale", CHOICES, 1.0),
        ("Answer: B", "a blue whale", CHOICES, 1.0),
        ("Answer: E", "B", CHOICES, 0.0),
        ("Answer: B", "ignored", {"correct_letter": "B"}, 1.0),
        ("Answer: Y", "Y", {"valid_letters": ["X", "Y"]}, 1.0),
        ("", "B", {}, 0.0),
        ("I like cats", "cat", {}, 0.0),
    ],
    ids=[
        "sentence",
        "parentheses and case",
        "bold",
        "last of two answers",
        "last letter",
        "letter first",
        "the word correct",
        "after thinking",
        "other article",
        "text of a choice",
        "letter of a choice",
        "letter out of range",
        "correct letter of metadata",
        "valid letters of metadata",
        "empty",
        "letter within a word",
    ],
)
def test_gpqa(response, label, metadata, score):
    assert gpqa(response, label, metadata) == score


def test_every_name_has_its_function():
    assert {*SCORES, REMOTE} == set(RM_TYPES)
