"""Scores of responses: the built-in ones by name, and functions of the user's own."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import string
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, Any

from slime_tis.custom import load_function
from slime_tis.rollout.collectives import map_over_ranks
from slime_tis.rollout.sample import Sample

if TYPE_CHECKING:
    from slime_tis.rollout.config import RolloutConfig

RewardFunction = Callable[[list[Sample]], list[float]]
DECIMAL = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"{DECIMAL}(?:\s*/\s*{DECIMAL})?")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
POLL = 1.0
"""Time between two safe points while scores are awaited, in seconds."""


def exact_match(response: str, label: str) -> float:
    """1 where the response is the label, white space around either aside."""
    return float(response.strip() == label.strip())


def math_match(response: str, label: str) -> float:
    r"""1 where the answers are the same number, or the same text where the label is no number.

    The answer of a text is what its last \boxed{} holds, else what follows its last `####`, else, for a
    number, the last one in it: the forms of MATH and GSM8K. Numbers may have thousands separators, a currency
    or percent sign, and may be fractions; they are compared exactly. Nothing is evaluated: 2+2 is not 4.
    """
    expected, answer = _marked_answer(label), _marked_answer(response)
    expected = label if expected is None else expected
    expected_number = _number(expected)
    if expected_number is None:
        return float(_plain(response if answer is None else answer) == _plain(expected))
    if answer is None:
        answer = (NUMBER.findall(LATEX_FRACTION.sub(r"\1/\2", response)) or [""])[-1]
    return float(_number(answer) == expected_number)


def token_f1(response: str, label: str) -> float:
    """Harmonic mean of precision and recall of the label's words, as in SQuAD.

    Case, punctuation and articles do not count. Source: "SQuAD: 100,000+ Questions for Machine Comprehension
    of Text", Rajpurkar et al. (https://arxiv.org/abs/1606.05250), section 6.1.
    """
    words, expected = _words(response), _words(label)
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2.0 * common / (len(words) + len(expected))


RM_TYPES: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "math": math_match,
    "f1": token_f1,
}


def build_reward(
    config: RolloutConfig, args: Namespace | None = None, safe_point: Callable[[], None] = lambda: None
) -> RewardFunction:
    """The function that scores a list of samples, as `--rm-type` or `--custom-rm-path` says.

    A function of the user's own is called as `fn(args, sample)` and returns a number, or, where its second
    parameter is named `samples`, as `fn(args, samples)` with all samples of one prompt, and returns a list of
    numbers. Either may be a coroutine function. In a torch.distributed job the prompts are shared over
    the ranks, so that each sample is scored once, and every rank gets all scores.

    Args:
      config: with `rm_type` or `custom_rm_path`.
      args: given to the user's function.
      safe_point: called before each call of the user's function and while one is awaited; what it raises ends the
        scoring.

    Raises:
      ValueError: here for an unknown name; when scoring for a missing label or a score that is no finite
        number.
    """
    if config.custom_rm_path is not None:
        score_group = _custom_reward(load_function(config.custom_rm_path), config.custom_rm_path, args, safe_point)
    elif config.rm_type in RM_TYPES:
        score_group = _builtin_reward(config.rm_type)
    else:
        raise ValueError(f"--rm-type is {config.rm_type!r} but must be one of {', '.join(RM_TYPES)}.")

    def reward(samples: list[Sample]) -> list[float]:
        groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]
        scores = map_over_ranks(score_group, groups)
        return [score for group in scores for score in group]

    return reward


def score(groups: Sequence[Sequence[Sample]], reward: RewardFunction) -> None:
    """Sets the reward of every sample; a collective, as the reward is."""
    samples = [sample for group in groups for sample in group]
    for sample, value in zip(samples, reward(samples), strict=True):
        sample.reward = value


def _builtin_reward(name: str) -> Callable[[Sequence[list[Sample]]], list[list[float]]]:
    function = RM_TYPES[name]

    def score_one(sample: Sample) -> float:
        if sample.label is None:
            raise ValueError(
                f"prompt {sample.prompt.index} has no label, which --rm-type {name} needs; set --label-key."
            )
        return function(sample.response, sample.label)

    return lambda groups: [[score_one(sample) for sample in group] for group in groups]


def _custom_reward(
    function: Callable[..., Any], path: str, args: Namespace | None, safe_point: Callable[[], None]
) -> Callable[[Sequence[list[Sample]]], list[list[float]]]:
    parameters = list(inspect.signature(function).parameters)
    whole_groups = len(parameters) > 1 and parameters[1] == "samples"

    async def call(samples: Sample | list[Sample]) -> Any:
        safe_point()
        found = function(args, samples)
        return await found if inspect.isawaitable(found) else found

    async def score(group: list[Sample]) -> list[float]:
        if whole_groups:
            scores = await call(group)
        else:
            scores = await asyncio.gather(*map(call, group))
        return _checked(scores, group, path)

    async def score_all(groups: Sequence[list[Sample]]) -> list[list[float]]:
        scores = asyncio.gather(*(score(group) for group in groups))
        while not scores.done():
            await asyncio.wait([scores], timeout=POLL)
            safe_point()
        return list(await scores)

    return lambda groups: asyncio.run(score_all(groups))


def _checked(scores: Any, group: list[Sample], path: str) -> list[float]:
    """The scores as floats, after refusing what is no finite number."""
    index = group[0].prompt.index
    if not isinstance(scores, (list, tuple)) or len(scores) != len(group):
        raise ValueError(
            f"reward function {path} returned {scores!r} for the {len(group)} samples of prompt {index}; "
            "it must return a list of as many numbers."
        )
    for score in scores:
        try:
            finite = math.isfinite(score)
        except (TypeError, ValueError):
            finite = False
        if not finite:
            raise ValueError(
                f"reward function {path} returned {score!r} for prompt {index}; it must return a finite number."
            )
    return [float(score) for score in scores]


def _marked_answer(text: str) -> str | None:
    boxed = _last_boxed(text)
    if boxed is None and "####" in text:
        return text.rpartition("####")[2].strip()
    return boxed


def _last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds, with braces inside it matched; None where none is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place].strip()
    return None


def _number(text: str) -> Fraction | None:
    r"""The number that the text is: 1,234.5, 3/4, \frac{3}{4}, $12 and 12% are, `12 apples` is not."""
    text = LATEX_FRACTION.sub(r"\1/\2", text).replace("\\", "").lstrip(" \n\t$").rstrip(" \n\t$%.")
    if not NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    try:
        return Fraction(numerator.strip()) / Fraction(denominator.strip() or 1)
    except (ValueError, ZeroDivisionError):  # too many digits for an integer, or a zero below
        return None


def _plain(text: str) -> str:
    return "".join(text.split()).lower()


def _words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return ARTICLES.sub(" ", text).split()
