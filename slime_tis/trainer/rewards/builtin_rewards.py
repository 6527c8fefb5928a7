"""The built-in rewards of `--rm-type`, and slime's names for them, which user functions import."""

import asyncio
import inspect
import json
import re
import string
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_tis.trainer.configs.rollout import BOXED, REMOTE, base_name
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.rewards.answers import (
    last_boxed,
    last_number,
    marked_answer,
    number_of,
    same_answer,
    same_boxed_answer,
)
from slime_tis.user_functions import load_function

Reward = float | dict[str, float]
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
VERDICTS = ("yes", "no", "noanswer")
DAPO_TAIL = 300
"""Characters at the end of a response in which dapo looks for the answer."""
DAPO_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
STRICT_TAIL = 100
"""Characters at the end of a solution in which `compute_score` looks for a strict \\boxed{}
answer."""
LETTERS = string.ascii_uppercase[:10]
"""Options of gpqa if the row does not list them."""
CHOICE = r"[*\s:(\[]*+\b([A-Z])\b"
"""Possessive (`*+`), as is the white space before it. Otherwise a long run of spaces would be split
between the two in every possible way."""
CHOSEN = (
    re.compile(rf"\b(?:answer|option|choice)\s*+(?:is)?{CHOICE}", re.IGNORECASE),
    re.compile(r"\b([A-Z])\b[)\].*\s]*is\s+(?:the\s+)?correct", re.IGNORECASE),
)


def exact_match(response: str, label: str) -> float:
    """Returns 1 if the response is the label, without surrounding white space, else 0."""
    return float(response.strip() == label.strip())


def math_match(response: str, label: str) -> float:
    r"""Returns 1 if response and label have the same answer (`answers.same_answer`), else 0.

    The answer is the content of the last \boxed{}, or else the text after the last `####`. Without
    either, the answer of a response is its last number if the label is a number; otherwise it is
    the complete text.
    """
    expected = marked_answer(label)
    if expected is None:
        expected = label
    answer = marked_answer(response)
    if answer is None and number_of(expected) is not None:
        answer = last_number(response)
    elif answer is None:
        answer = response
    return float(same_answer(answer, expected))


def deepscaler(response: str, label: str) -> float:
    r"""Returns 1 if the \boxed{} answer after the reasoning is the label, else 0.

    Reasoning ends at the last `</think>`, or at the first `###Response`. A response without either,
    or without a \boxed{} after it, is wrong. Source: DeepScaleR's reward, as in slime.
    """
    if "</think>" in response:
        solution = response.rpartition("</think>")[2]
    elif "###Response" in response:
        solution = response.split("###Response")[1]
    else:
        return 0.0
    return float(same_boxed_answer(solution, label))


def dapo(response: str, label: str) -> dict[str, float]:
    """Returns `score` 1 or −1 and `acc` 1 or 0, for a right or wrong answer.

    The answer is the text after the last `Answer:` in the last 300 characters of the response.
    Source: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", Yu et al.
    (https://arxiv.org/abs/2503.14476), eq. 7.
    """
    answer = dapo_answer(response)
    expected = last_boxed(label)
    if expected is None:
        expected = label
    is_correct = answer is not None and same_answer(answer, expected)
    score = -1.0
    if is_correct:
        score = 1.0
    return {"score": score, "acc": float(is_correct)}


def dapo_answer(response: str) -> str | None:
    r"""Returns the answer of a response, or None.

    It is the text after the last `Answer:` in the last 300 characters, or the content of a \boxed{}
    in that text.
    """
    answers = DAPO_ANSWER.findall(response[-DAPO_TAIL:])
    if not answers:
        return None
    answer: str = answers[-1].strip(" *")
    boxed = last_boxed(answer)
    if boxed is None:
        return answer.strip(" $.")
    return boxed


def token_f1(response: str, label: str) -> float:
    """Returns the harmonic mean of precision and recall of the label's words, as in SQuAD.

    Case, punctuation and articles do not count. If a text is yes, no or noanswer, both texts must
    be equal. Sources: "SQuAD: 100,000+ Questions for Machine
    Comprehension of Text", Rajpurkar et al. (https://arxiv.org/abs/1606.05250), section 6.1; yes,
    no and noanswer as in "HotpotQA", Yang et al. (https://arxiv.org/abs/1809.09600).
    """
    words = _words(response)
    expected = _words(label)
    is_verdict = "".join(words) in VERDICTS or "".join(expected) in VERDICTS
    if not words or not expected or is_verdict:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2.0 * common / (len(words) + len(expected))


def gpqa(response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """Returns 1 if the response chooses the right option of a multiple-choice question, else 0.

    The label is the letter or the text of the right option. The row's metadata may have `choices`
    (a list, or a mapping of letters to texts), `valid_letters` and `correct_letter`. The chosen
    option is the letter after `answer`, `option` or `choice`, or before `is correct`. Otherwise it
    is the last capital letter that is a separate word and an option. If no option is chosen, the
    response must contain the text of the right option.
    """
    letters, texts = _options(metadata)
    right = str(metadata.get("correct_letter") or label).strip().upper()
    if right not in letters:
        right = _letter_of(label, texts)
    conclusion = response.rpartition("</think>")[2]
    chosen = _chosen_letter(conclusion, letters)
    if chosen and right:
        return float(chosen == right)
    # With spaces on both sides, so that the option `10` is not found in `100`.
    plain_conclusion = f" {_plain(conclusion)} "
    for text in (texts.get(right, ""), label):
        target = _plain(text)
        if target and f" {target} " in plain_conclusion:
            return 1.0
    return 0.0


def random_reward(sample: Sample) -> float:
    """Returns 0 or 1 with equal chances.

    It depends only on the indices and tokens of the sample, so that a resumed run draws the same.
    """
    key = (sample.prompt_index, sample.group_index, sample.index, sample.response_ids)
    # Not hash(), which differs from process to process.
    return float(zlib.crc32(repr(key).encode()) & 1)


SCORES: dict[str, Callable[[Sample, str], Reward]] = {
    "exact_match": lambda sample, response: exact_match(response, _label(sample)),
    "math": lambda sample, response: math_match(response, _label(sample)),
    "deepscaler": lambda sample, response: deepscaler(response, _label(sample)),
    "dapo": lambda sample, response: dapo(response, _label(sample)),
    "f1": lambda sample, response: token_f1(response, _label(sample)),
    "gpqa": lambda sample, response: gpqa(response, _label(sample), sample.metadata),
    "random": lambda sample, response: random_reward(sample),
}

WITHOUT_LABEL = ("random", REMOTE)


def builtin_reward(name: str, sample: Sample) -> Reward:
    """Returns the score of a sample by a built-in reward, whose name may begin with `boxed_`."""
    return SCORES[name.removeprefix(BOXED)](sample, scored_text(name, sample))


def scored_text(name: str, sample: Sample) -> str:
    r"""Returns the response, or for a name with `boxed_` the content of its last \boxed{}."""
    if name.startswith(BOXED):
        return last_boxed(sample.response) or ""
    return sample.response


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """Returns the reward of one sample.

    The reward is --custom-rm-path, or else the sample's `metadata["rm_type"]`, or else --rm-type.
    """
    if args.custom_rm_path is not None:
        reward = load_function(args.custom_rm_path)(args, sample, **kwargs)
        if inspect.isawaitable(reward):
            return await reward
        return reward
    name = str(sample.metadata.get("rm_type") or args.rm_type or "")
    if not name or base_name(name) == REMOTE:
        raise ValueError(
            f"async_rm supports --custom-rm-path and local values of --rm-type, not {name!r}."
        )
    return builtin_reward(name, sample)


async def batched_async_rm(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """Returns the rewards of several samples.

    As in slime, a function of --custom-rm-path gets the complete list in one call.
    """
    if args.custom_rm_path is not None:
        rewards: list[Any] = await async_rm(args, samples, **kwargs)  # type: ignore[arg-type]
        return rewards
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


extract_answer = last_boxed
"""slime's name."""

grade_answer_verl = same_boxed_answer
"""slime's name."""


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    r"""Returns DAPO's score of a solution, under slime's name and with slime's arguments.

    Args:
        solution_str: The response.
        ground_truth: The right answer.
        strict_box_verify: Compares the last \boxed{} of the last 100 characters as text, instead
            of the text after the last `Answer:`.
        pause_tokens_index: slime passes it; it has no effect.

    Returns:
        `score` 1 or -1, `acc` whether the answer is correct, `pred` the answer.
    """
    if strict_box_verify:
        answer = last_boxed(solution_str[-STRICT_TAIL:])
        correct = answer == ground_truth
    else:
        answer = dapo_answer(solution_str)
        correct = dapo(solution_str, ground_truth)["acc"] == 1
    score = -1.0
    if correct:
        score = 1.0
    return {"score": score, "acc": correct, "pred": answer}


def _label(sample: Sample) -> str:
    """Returns a label as text; a number or a list as JSON."""
    assert sample.label is not None  # rewards.check_prompts requires labels
    if isinstance(sample.label, str):
        return sample.label
    return json.dumps(sample.label)


def _options(metadata: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Returns the letters of a question's options, and the options' texts by letter."""
    choices = metadata.get("choices") or ()
    if isinstance(choices, Mapping):
        choices = choices.values()
    choices = [str(choice) for choice in choices]
    letters = [str(letter).upper() for letter in metadata.get("valid_letters") or ()]
    if not letters:
        letters = list(string.ascii_uppercase[: len(choices)] or LETTERS)
    # A row may have letters without texts, so the lists need not have the same length.
    return letters, dict(zip(letters, choices, strict=False))


def _letter_of(label: str, texts: Mapping[str, str]) -> str:
    """Returns the letter of the option whose text is the label, or an empty string."""
    for letter, text in texts.items():
        if _plain(text) == _plain(label):
            return letter
    return ""


def _chosen_letter(text: str, letters: Sequence[str]) -> str:
    """Returns the letter that a text chooses, or an empty string."""
    # The last one counts, because a response may discuss other options before it decides.
    for pattern in CHOSEN:
        named: list[str] = pattern.findall(text)
        for letter in reversed(named):
            if letter.upper() in letters:
                return letter.upper()
    for letter in reversed(re.findall(r"\b[A-Z]\b", text)):
        if letter in letters:
            return str(letter)
    return ""


def _plain(text: str) -> str:
    """Returns the words and numbers of a text, in lower case and with single spaces."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _words(text: str) -> list[str]:
    """Returns the words of a text as SQuAD's metric compares them."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return ARTICLES.sub(" ", text).split()
