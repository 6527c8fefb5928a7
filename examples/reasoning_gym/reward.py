"""reasoning-gym's own scoring as a reward.

    --custom-rm-path examples/reasoning_gym/reward.py:score      # 0 to 1, partial credit included
    --custom-rm-path examples/reasoning_gym/reward.py:correct    # 1 if the score is 1, else 0

The metadata of a row, which prompts.py writes:

    {
        "dataset": name,
        "config": fields that differ from the dataset's defaults,
        "entry": the generated entry,
        "answer": how to read the answer
    }

Nothing in a row or in a response is run as code: the datasets whose scoring would do so are refused
(`EXECUTES`).
"""

import json
import logging
import re
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

logger = logging.getLogger(__name__)

EXECUTES = {
    "binary_matrix": "eval(answer)",
    "bitwise_arithmetic": "eval(problem)",
    "codeio": "exec(code)",
    "countdown": "sympy.parse_expr(answer)",
    "intermediate_integration": "sympy.parse_expr(answer)",
    "n_queens": "eval(answer)",
    "number_sorting": "eval(entry['answer'])",
    "polynomial_multiplication": "sympy.parse_expr(answer)",
    "puzzle24": "sympy.parse_expr(answer)",
    "simple_integration": "sympy.parse_expr(answer)",
    "spiral_matrix": "eval(answer)",
    "string_insertion": "eval(answer)",
}
"""Datasets of reasoning-gym 0.1.25 that run text as Python code, as sympy's parser does too, and
whose text that is."""
RIGHT = 1.0
"""Score of a right answer."""
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
HUGE = re.compile(r"\d[eE][+-]?\d{4}")
"""A number whose power of ten has four digits and more, with which Python's fractions would be busy
for minutes."""
READERS = ("tag", "number", "word", "text")
"""Ways to find the answer in a response: between `<answer>` tags, its last number, its first word,
or all of it."""


def score(args: Any, sample: Any, **kwargs: Any) -> float:
    """Returns the dataset's score of a response, 0 to 1; 0 if scoring raises an exception."""
    return entry_score(sample.metadata, sample.response)


def correct(args: Any, sample: Any, **kwargs: Any) -> float:
    """1 where the dataset gives a response its full score, else 0."""
    return float(entry_score(sample.metadata, sample.response) >= RIGHT)


def entry_score(metadata: dict[str, Any], response: str) -> float:
    """The score of a response by the metadata of its row.

    Raises:
        ValueError: The metadata is not what prompts.py writes, or names a dataset that is refused.
    """
    missing = [name for name in ("dataset", "config", "entry", "answer") if name not in metadata]
    if missing:
        raise ValueError(
            f"a row's metadata has no {missing[0]!r}; write the prompts with"
            " examples.reasoning_gym.prompts."
        )
    name = metadata["dataset"]
    dataset = scorer(name, json.dumps(metadata["config"], sort_keys=True))
    answer = read_answer(response, metadata["answer"])
    if answer is not None and HUGE.search(answer):
        return 0.0
    try:
        return float(dataset.score_answer(answer, decoded(metadata["entry"])))
    except Exception as error:  # of a response that the dataset's author did not think of
        logger.warning(
            "%s cannot score %.80r: %s; it counts as 0.", name, answer, type(error).__name__
        )
        return 0.0


@cache
def scorer(name: str, config: str) -> Any:
    """A dataset of reasoning-gym, by its name and the JSON of its configuration."""
    return reasoning_gym.create_dataset(
        checked(name), size=1, seed=0, **decoded(json.loads(config))
    )


def checked(name: str) -> str:
    """The name of a dataset that can be used.

    Raises:
        ValueError: the name is unknown, or the dataset runs answers as code.
    """
    if name not in DATASETS or name == "composite":
        from difflib import get_close_matches

        near = get_close_matches(name, DATASETS, n=3)
        raise ValueError(
            f"reasoning-gym has no dataset {name!r}{f'; near is {near}' if near else ''}; --list"
            " shows all."
        )
    if name in EXECUTES:
        raise ValueError(
            f"{name} is scored by {EXECUTES[name]}, which would run what a row or a response"
            " contains as code; it is not offered."
        )
    return name


def read_answer(response: str, reader: str) -> str | None:
    """The scored part of a response; None if it is missing.

    Args:
        response: Text of the policy.
        reader: One of `READERS`.

    Raises:
        ValueError: There is no such reader.
    """
    text = response.strip()
    match reader:
        case "tag":
            found: str | None = extract_answer(response)
            return found
        case "number":
            numbers = NUMBER.findall(text)
            return numbers[-1].replace(",", "") if numbers else None
        case "word":
            words = re.findall(r"\w+", text)
            return words[0] if words else None
        case "text":
            return text
    raise ValueError(
        f"a row's metadata has answer {reader!r}, but must be one of {', '.join(READERS)}."
    )


def encoded(value: Any) -> Any:
    """Returns a value as JSON.

    A tuple becomes `{"()": […]}`. A mapping with keys that are not text becomes
    `{"{}": [[key, value], …]}`.
    """
    if isinstance(value, tuple):
        return {"()": [encoded(each) for each in value]}
    if isinstance(value, list):
        return [encoded(each) for each in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: encoded(each) for key, each in value.items()}
        return {"{}": [[encoded(key), encoded(each)] for key, each in value.items()]}
    return value


def decoded(value: Any) -> Any:
    """What `encoded` was given; plain JSON is returned as it is."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {"()"}:
            return tuple(decoded(each) for each in value["()"])
        if value.keys() == {"{}"}:
            return {decoded(key): decoded(each) for key, each in value["{}"]}
        return {key: decoded(each) for key, each in value.items()}
    return value
