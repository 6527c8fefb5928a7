"""Built-in rewards: tables of responses, labels and scores, and where slime's score is another
one."""

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

from slime_tis.trainer.configs.rollout import REMOTE, RM_TYPES
from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.rewards import symbolic
from slime_tis.trainer.rewards.builtin_rewards import (
    SCORES,
    builtin_reward,
    dapo,
    deepscaler,
    exact_match,
    gpqa,
    math_match,
    token_f1,
)
from slime_tis.trainer.rewards.symbolic import comparison_budget, same_expression
from tests.samples import make_sample

EXACT_MATCH = {
    "equal": ("0123", "0123", 1.0),
    "white space around": (" 0123\n", "0123", 1.0),
    "empty": ("", "0123", 0.0),
}


MATH = {
    "last number of a sentence": ("so 3 + 4 = 7 apples.", "7", 1.0),
    "thousands separator": ("#### 1,234", "1234", 1.0),
    "currency": ("It costs $1,234.50.", "1234.5", 1.0),
    "last of two numbers": ("first 7, then 8", "7", 0.0),
    "boxed before number": ("7 at first, then \\boxed{8} (not 9)", "8", 1.0),
    "fraction against decimal": ("\\boxed{\\frac{3}{4}}", "0.75", 1.0),
    "equation with a fraction": ("x = 3/4", "0.75", 1.0),
    "sign differs": ("-5", "5", 0.0),
    "per cent": ("50\\%", "50", 1.0),
    "sixteen digits off": ("0.30000000000000001", "0.3", 0.0),
    "another power": ("\\boxed{x^2}", "x^3", 0.0),
    "box left open": ("\\boxed{7", "7", 1.0),
    "division by zero": ("1/0", "0", 0.0),
    "no number": ("no number", "7", 0.0),
    "sum left to do": ("2+2", "4", 0.0),
    "5000 digits": ("9" * 5000, "7", 0.0),
    "huge exponent": ("1e999999999", "7", 0.0),
}


F1 = {
    "articles and punctuation": ("The cat sat.", "a cat sat", 1.0),
    "two of three words": ("cat", "the black cat", 2 / 3),
    "nothing shared": ("dog", "cat", 0.0),
    "empty": ("", "cat", 0.0),
    "articles alone": ("the", "a", 1.0),
    "yes": ("yes", "Yes.", 1.0),
    "yes and more": ("yes it is", "yes", 0.0),
    "no against no answer": ("no", "no answer", 0.0),
    "yes against no": ("yes", "no", 0.0),
}


# Expressions, as in slime: a number has to be given as a number, words as they are, the rest up to
# equality.
MATH_ON_EXPRESSIONS = {
    "order of terms": ("1+x^2", "x^2+1", 1.0),
    "rationalised root": (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", 1.0),
    "spaces in a pair": ("(1, 2)", "(1,2)", 1.0),
    "pair reversed": ("(2,1)", "(1,2)", 0.0),
    "another interval": ("[0,1)", "[0,1]", 0.0),
    "sum left to do": ("2+2", "4", 0.0),
    "unit": (r"5\text{ cm}", "5", 1.0),
    "degrees": (r"30^\circ", "30", 1.0),
    "words in another case": (r"\text{blue}", "Blue", 1.0),
    "another word": ("bule", "blue", 0.0),
    "mixed number": (r"1\frac{1}{2}", "3/2", 1.0),
    "unbalanced braces": ("}{", "x+1", 0.0),
    "fifty parentheses": ("(" * 50, "x+1", 0.0),
}


DEEPSCALER = {
    "box after thinking": ("<think>hm</think> It is \\boxed{12}.", "12", 1.0),
    "box within thinking": ("<think>\\boxed{12}</think> It is 12.", "12", 0.0),
    "last of two answers": ("a</think>\\boxed{1}</think>\\boxed{2}", "2", 1.0),
    "no end of thinking": ("\\boxed{12}", "12", 0.0),
    "first of two ###Response": (
        "hm ###Response \\boxed{1/2} ###Response \\boxed{3}",
        "\\boxed{0.5}",
        1.0,
    ),
    "empty label": ("</think>\\boxed{12}", "", 0.0),
}


DAPO = {
    "own line": ("So\nAnswer: 42", "42", 1.0),
    "lower case and dollars": ("answer : $42$.", "42", 1.0),
    "bold": ("**Answer:** 42", "42", 1.0),
    "last of two answers right": ("Answer: 41\nAnswer: \\boxed{42}", "42", 1.0),
    "last of two answers wrong": ("Answer: 42\nAnswer: 41", "42", 0.0),
    "too far from the end": ("Answer: 42" + " " * 300, "42", 0.0),
    "nothing after Answer": ("Answer:", "42", 0.0),
}


CHOICES = {"choices": ["a red fox", "a blue whale", "a green frog", "none"]}


GPQA = {
    "sentence": ("The answer is B.", "B", {}, 1.0),
    "parentheses and case": ("The answer is (B)", "b", {}, 1.0),
    "last of two answers": ("Answer: A. No, wait. Answer: C", "C", {}, 1.0),
    "the word correct": ("The answer is correct: B", "B", {}, 1.0),
    "after thinking": ("<think>answer A</think> I choose option B", "B", {}, 1.0),
    "other article": ("It is the blue whale", "a blue whale", CHOICES, 0.0),
    "text of a choice": ("It is a blue whale", "a blue whale", CHOICES, 1.0),
    "letter of a choice": ("Answer: B", "a blue whale", CHOICES, 1.0),
    "letter out of range": ("Answer: E", "B", CHOICES, 0.0),
    "correct letter of metadata": ("Answer: B", "ignored", {"correct_letter": "B"}, 1.0),
    "valid letters of metadata": ("Answer: Y", "Y", {"valid_letters": ["X", "Y"]}, 1.0),
    "letter within a word": ("I like cats", "cat", {}, 0.0),
}


SCORED: dict[str, tuple[Any, dict[str, Any]]] = {
    "exact_match": (exact_match, EXACT_MATCH),
    "math": (math_match, MATH),
    "math of expressions": (
        lambda answer, label: math_match(f"so \\boxed{{{answer}}}", label),
        MATH_ON_EXPRESSIONS,
    ),
    "f1": (token_f1, F1),
    "deepscaler": (deepscaler, DEEPSCALER),
    "dapo": (lambda response, label: dapo(response, label)["acc"], DAPO),
    "gpqa": (gpqa, GPQA),
}


@pytest.mark.parametrize(
    ("score", "arguments", "expected"),
    [
        pytest.param(score, arguments, expected, id=f"{reward}: {name}")
        for reward, (score, table) in SCORED.items()
        for name, (*arguments, expected) in table.items()
    ],
)
def test_scores(score, arguments, expected):
    assert score(*arguments) == pytest.approx(expected)


def test_every_name_has_its_function():
    assert {*SCORES, REMOTE} == set(RM_TYPES)


def test_dapo_reports_its_accuracy():
    assert dapo("Answer: 41", "42") == {"score": -1.0, "acc": 0.0}


def test_threads_may_compare_at_once():
    results = []

    def compare(number: int) -> None:
        results.append(same_expression(f"x+{number}+1", f"x+{number + 1}"))

    threads = [threading.Thread(target=compare, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_comparisons_continue_after_their_process_was_killed():
    assert same_expression("x+w", "w+x")
    process = symbolic._worker._process
    process.send_signal(signal.SIGKILL)
    process.wait()
    # the comparison that finds the killed process counts as wrong
    assert not same_expression("y+w", "w+y")
    assert same_expression("z+w", "w+z")


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "LIMITS", ((0.5, 0.5), (1.0, 0.25)))


ENDLESS = "1000000007^{1000000009}"


def test_an_expression_without_end_is_wrong(short_limits, caplog):
    assert not same_expression(ENDLESS, "x^2")
    assert "1 answers count as wrong" in caplog.text
    assert ENDLESS in caplog.text
    assert same_expression("a+b", "b+a")


def test_an_expression_without_end_keeps_the_process(short_limits):
    assert same_expression("a+e", "e+a")
    process = symbolic._worker._process
    assert not same_expression(ENDLESS, "x^3")
    assert same_expression("a+f", "f+a")
    assert symbolic._worker._process is process


def test_stopping_ends_all_processes():
    symbolic._worker._stop()
    started = psutil.Process().children(recursive=True)
    assert same_expression("a+g", "g+a")
    assert len(psutil.Process().children(recursive=True)) == len(started) + 2
    symbolic._worker._stop()
    assert psutil.Process().children(recursive=True) == started


def test_a_rollout_of_endless_expressions_is_bounded(short_limits, caplog):
    expressions = [f"{number}^{{1000000009}}" for number in range(10**9, 10**9 + 20)]
    with comparison_budget():
        assert not any(same_expression(expression, "x^2") for expression in expressions)
        assert same_expression("b+h", "h+b")
    (message,) = [text for text in caplog.messages if "answers count as wrong" in text]
    assert "20 answers count as wrong" in message
    assert "all together took 3 s" in message


def test_a_repeated_endless_expression_costs_once(short_limits):
    with comparison_budget():
        assert not any(same_expression(ENDLESS, "x^4") for _ in range(1000))
        assert same_expression("b+k", "k+b")


HOSTILE = {
    "long": "a" * 100_000,
    "sum": "+".join("x" * 200),
    "parentheses": "(" * 5_000,
    "braces": "{" * 26 + "1" + "}" * 26,
    "roots": r"\sqrt{" * 30 + "2" + "}" * 30,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_long_or_deep_expressions_are_not_parsed(name, monkeypatch):
    monkeypatch.setattr(symbolic, "_compared", pytest.fail)
    assert not same_expression(HOSTILE[name], "x+1")
    assert not same_expression("x+1", HOSTILE[name])


def test_an_expression_of_ordinary_length_is_parsed():
    terms = [f"{number}x^{{{number}}}" for number in range(2, 30)]
    assert same_expression("+".join(terms), "+".join(reversed(terms)))


LONG_RESPONSES = {
    "answer and spaces": "answer" + " " * 200_000,
    "many answers": "answer is " * 20_000,
    "letters": "A " * 100_000,
    "a letter and spaces": "A" + " " * 200_000,
    "is and spaces": "A is" + " " * 200_000,
    "digits": "1" * 200_000,
    "commas": "1,111" * 40_000,
    "fractions": "\\frac{1" * 30_000,
    "slashes": "1 / " * 50_000,
    "boxes": "\\boxed{" * 30_000,
    "points": "." * 200_000,
}


@pytest.mark.parametrize("reward", ["exact_match", "math", "deepscaler", "dapo", "f1", "gpqa"])
@pytest.mark.parametrize("name", LONG_RESPONSES)
def test_a_long_response_is_scored_in_linear_time(name, reward):
    response = "</think>" + LONG_RESPONSES[name]
    began = time.process_time()
    for label in ("12", "x+1"):
        prompt = Prompt(index=0, text="?", token_ids=(1,), label=label)
        builtin_reward(reward, make_sample(prompt, [3], response=response))
    assert time.process_time() - began < 5


def test_the_process_ends_with_the_program():
    read, write = os.pipe()
    program = os.fork()
    if program == 0:
        same_expression("c+d", "d+c")
        children = psutil.Process().children()
        os.write(write, b" ".join(str(child.pid).encode() for child in children))
        os._exit(0)
    os.waitpid(program, 0)
    (worker,) = map(int, os.read(read, 100).split())
    deadline = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
