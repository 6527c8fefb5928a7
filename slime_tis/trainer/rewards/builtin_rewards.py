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
"""Options that gpqa knows where the row names none."""
CHOICE = r"[*\s:(\[]*+\b([A-Z])\b"
"""Possessive, as is the white space before it: together they would try every way to share a long
run of spaces."""
CHOSEN = (
    re.compile(rf"\b(?:answer|option|choice)\s*+(?:is)?{CHOICE}", re.IGNORECASE),
    re.compile(r"\b([A-Z])\b[)\].*\s]*is\s+(?:the\s+)?correct", re.IGNORECASE),
)


def exact_match(response: str, label: str) -> float:
    """1 where the response is the label, white space around either aside."""
    return float(response.strip() == label.strip())


def math_match(response: str, label: str) -> float:
    r"""1 where the answers are the same (`answers.same_answer`).

    The answer of a text is what its last \boxed{} holds, else what follows its last `####`; else, where the label is a
    number, the last number in it, and where it is none the whole text.
    """
    answer, expected = marked_answer(response), marked_answer(label)
    expected = label if expected is None else expected
    if answer is None:
        answer = response if number_of(expected) is None else last_number(response)
    return float(same_answer(answer, expected))


def deepscaler(response: str, label: str) -> float:
    r"""1 where the \boxed{} answer after the reasoning is the label.

    Reasoning ends at the last `</think>`, or at the first `###Response`; a response without either, or without a
    \boxed{} after it, is wrong. Source: DeepScaleR's reward, as slime has it.
    """
    if "</think>" in response:
        solution = response.rpartition("</think>")[2]
    elif "###Response" in response:
        solution = response.split("###Response")[1]
    else:
        return 0.0
    return float(same_boxed_answer(solution, label))


def dapo(response: str, label: str) -> dict[str, float]:
    """`score` 1 or −1 and `acc` 1 or 0, by the text after the last `Answer:` in the response's last 300 characters.

    Source: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", Yu et al.
    (https://arxiv.org/abs/2503.14476), eq. 7.
    """
    answer, expected = dapo_answer(response), last_boxed(label)
    correct = answer is not None and same_answer(answer, label if expected is None else expected)
    return {"score": 1.0 if correct else -1.0, "acc": float(correct)}


def dapo_answer(response: str) -> str | None:
    r"""Returns the text after the last `Answer:` in the response's last 300 characters, or its \boxed{} contents."""
    answers = DAPO_ANSWER.findall(response[-DAPO_TAIL:])
    if not answers:
        return None
    answer: str = answers[-1].strip(" *")
    boxed = last_boxed(answer)
    return answer.strip(" $.") if boxed is None else boxed


def token_f1(response: str, label: str) -> float:
    """Harmonic mean of precision and recall of the label's words, as in SQuAD; yes and no count whole.

    Case, punctuation and articles do not count. Sources: "SQuAD: 100,000+ Questions for Machine
    Comprehension of Text", Rajpurkar et al. (https://arxiv.org/abs/1606.05250), section 6.1; yes,
    no and noanswer as in "HotpotQA", Yang et al. (https://arxiv.org/abs/1809.09600).
    """
    words, expected = _words(response), _words(label)
    verdict = any("".join(each) in VERDICTS for each in (words, expected))
    if not words or not expected or verdict:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2.0 * common / (len(words) + len(expected))


def gpqa(response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """1 where the response chooses the right option of a multiple-choice question.

    The label is the letter or the text of the right option. The row's metadata may have `choices`
    (a list, or a mapping of letters to texts), `valid_letters` and `correct_letter`. The option
    chosen is the letter after `answer`, `option` or `choice`, or before `is correct`, else the last
    capital letter that is a separate word and an option; if no option is chosen, the response has
    to contain the text of the right option.
    """
    choices = metadata.get("choices") or ()
    choices = [
        str(choice) for choice in (choices.values() if isinstance(choices, Mapping) else choices)
    ]
    letters = [str(letter).upper() for letter in metadata.get("valid_letters") or ()]
    letters = letters or list(string.ascii_uppercase[: len(choices)] or LETTERS)
    texts = dict(zip(letters, choices, strict=False))
    right = str(metadata.get("correct_letter") or label).strip().upper()
    if right not in letters:
        right = next(
            (letter for letter, text in texts.items() if _plain(text) == _plain(label)), ""
        )
    conclusion = response.rpartition("</think>")[2]
    chosen = _chosen_letter(conclusion, letters)
    if chosen and right:
        return float(chosen == right)
    targets = {_plain(text) for text in (texts.get(right, ""), label)} - {""}
    return float(any(f" {target} " in f" {_plain(conclusion)} " for target in targets))


def random_reward(sample: Sample) -> float:
    """0 or 1 with equal chances, by the sample's place and tokens alone, so that a resumed run draws the same."""
    drawn = (sample.prompt_index, sample.group_index, sample.index, sample.response_ids)
    return float(zlib.crc32(repr(drawn).encode()) & 1)


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
    """The score of a sample by the built-in reward of that name, which may begin with `boxed_`."""
    return SCORES[name.removeprefix(BOXED)](sample, scored_text(name, sample))


def scored_text(name: str, sample: Sample) -> str:
    r"""The response, or the contents of its last \boxed{} for a name that begins with `boxed_`."""
    return (last_boxed(sample.response) or "") if name.startswith(BOXED) else sample.response


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """Returns the reward of one sample by --custom-rm-path, by its `metadata["rm_type"]`, or by --rm-type."""
    if args.custom_rm_path is not None:
        reward = load_function(args.custom_rm_path)(args, sample, **kwargs)
        return await reward if inspect.isawaitable(reward) else reward
    name = str(sample.metadata.get("rm_type") or args.rm_type or "")
    if not name or base_name(name) == REMOTE:
        raise ValueError(
            f"async_rm supports --custom-rm-path and local values of --rm-type, not {name!r}."
        )
    return builtin_reward(name, sample)


async def batched_async_rm(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """Returns the rewards of several samples. A function of --custom-rm-path gets the whole list, as in slime."""
    if args.custom_rm_path is not None:
        rewards: list[Any] = await async_rm(args, samples, **kwargs)  # type: ignore[arg-type]
        return rewards
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


extract_answer, grade_answer_verl = last_boxed, same_boxed_answer
"""slime's names."""


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    r"""Scores a solution by DAPO's rule: `score` 1 or -1, `acc` whether it is correct, `pred` the answer.

    `strict_box_verify` compares the last \boxed{} of the last 100 characters as text, instead of the text after
    the last `Answer:`. slime passes `pause_tokens_index`, which has no effect.
    """
    if strict_box_verify:
        answer = last_boxed(solution_str[-STRICT_TAIL:])
        correct = answer == ground_truth
    else:
        answer, correct = dapo_answer(solution_str), dapo(solution_str, ground_truth)["acc"] == 1
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer}


def _label(sample: Sample) -> str:
    assert sample.label is not None  # rewards.check_prompts requires labels
    return sample.label if isinstance(sample.label, str) else json.dumps(sample.label)


def _chosen_letter(text: str, letters: Sequence[str]) -> str:
    for pattern in CHOSEN:
        named: list[str] = pattern.findall(text)
        for letter in reversed(named):
            if letter.upper() in letters:
                return letter.upper()
    alone = [letter for letter in re.findall(r"\b[A-Z]\b", text) if letter in letters]
    return alone[-1] if alone else ""


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return ARTICLES.sub(" ", text).split()
