"""Scores of responses: the built-in ones by name, and functions of the user's own held to their contract."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from slime_tis.custom import calling, check_signature, describe, load_function
from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.rollout.builtin_rewards import WITHOUT_LABEL, builtin_reward
from slime_tis.rollout.collectives import map_over_ranks
from slime_tis.rollout.json_values import json_object
from slime_tis.rollout.rm_types import BOXED, check_rm_type
from slime_tis.rollout.sample import Prompt, Sample

if TYPE_CHECKING:
    from slime_tis.rollout.config import RolloutConfig

RewardFunction = Callable[[list[Sample]], list[float]]
MOST_PARTS = 64
"""Numbers of a reward that is a dict."""
POLL = 1.0
"""Time between two safe points while scores are awaited, in seconds."""
SYMBOLIC = ("math", "deepscaler", "dapo")
"""Built-in rewards that compare with math-verify."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a reward function made of a sample, to be sent to the ranks that did not call it."""

    value: float
    """The reward."""

    parts: dict[str, float]
    """The other numbers of a reward that is a dict, by key."""

    metadata: dict[str, Any] | None = None
    """The sample's metadata where the function changed it, else None."""

    loss_mask: list[int] | None = None
    """The sample's loss mask where the function changed it, else None."""

    remove_sample: bool = False
    """Whether none of the sample's tokens is trained on."""

    def apply(self, sample: Sample) -> None:
        """Writes everything but the value into the sample."""
        sample.reward_parts = self.parts
        if self.metadata is not None:
            sample.metadata = self.metadata
        if self.loss_mask is not None:
            sample.loss_mask = self.loss_mask
        sample.remove_sample = self.remove_sample
        if self.remove_sample:
            sample.loss_mask = [0] * len(sample.loss_mask)


ScoreGroups = Callable[[Sequence[list[Sample]]], list[list[Score]]]


@dataclass(frozen=True)
class RewardKey:
    """Which number of a reward that is a dict is the reward."""

    name: str | None
    """The key; None where rewards are numbers."""

    flag: str
    """The flag that gives it, for messages."""


def build_reward(
    config: RolloutConfig,
    args: Namespace | None = None,
    safe_point: Callable[[], None] = lambda: None,
    *,
    evaluation: bool = False,
) -> RewardFunction:
    """The function that scores a list of samples, as `--rm-type` or `--custom-rm-path` says.

    A function of the user's own is called as `fn(args, sample)`, or, where its second parameter is named `samples`, as
    `fn(args, samples)` with all samples of one prompt, and returns a reward each: a number, or, with `--reward-key`, a
    dict of which that key is the reward. Either may be a coroutine function. In a torch.distributed job the prompts are
    shared over the ranks, so that each sample is scored once, and every rank gets all scores, and what the function
    wrote into the samples.

    Args:
        config: with `rm_type` or `custom_rm_path`.
        args: given to the user's function.
        safe_point: called before each call of a function and while one is awaited; what it raises ends the scoring.
        evaluation: score held-out prompts, with `eval_reward_key`.

    Raises:
        ValueError: here for an unknown name; when scoring for a missing label.
        CustomFunctionError: the function cannot be loaded or called, or, when scoring, it raises or breaks the
            contract.
    """
    key = RewardKey(config.reward_key, "--reward-key")
    if evaluation and config.eval_reward_key is not None:
        key = RewardKey(config.eval_reward_key, "--eval-reward-key")
    if config.custom_rm_path is not None:
        score_groups = _custom_reward(load_function(config.custom_rm_path), args, key, safe_point)
    else:
        assert config.rm_type is not None  # RolloutConfig requires one of the two
        check_rm_type("--rm-type", config.rm_type)
        _require_math_verify("--rm-type", config.rm_type)
        score_groups = _builtin_reward(config.rm_type, key, safe_point)

    def reward(samples: list[Sample]) -> list[float]:
        groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]
        scores = [score for group in map_over_ranks(score_groups, groups) for score in group]
        for sample, score in zip(samples, scores, strict=True):
            score.apply(sample)
        return [score.value for score in scores]

    return reward


def assign_rewards(groups: Sequence[Sequence[Sample]], reward: RewardFunction) -> None:
    """Sets the reward of every sample; a collective, as the reward is."""
    samples = [sample for group in groups for sample in group]
    for sample, value in zip(samples, reward(samples), strict=True):
        sample.reward = value


def check_prompts(config: RolloutConfig, prompts: Sequence[Prompt], flags: str = "--label-key") -> None:
    """Checks that the built-in rewards can score the prompts: their labels, and the rm_type of their metadata.

    Args:
        config: with `rm_type`, or nothing is checked.
        prompts: of one file.
        flags: what sets the labels of that file.

    Raises:
        ValueError: naming the first prompt that cannot be scored.
    """
    if config.rm_type is None:
        return
    for prompt in prompts:
        name = _rm_type(config.rm_type, prompt.metadata)
        if not isinstance(name, str):
            raise ValueError(f"prompt {prompt.index} has an rm_type in its metadata that is not text: {_shown(name)}.")
        if name != config.rm_type:
            check_rm_type(f"the rm_type in the metadata of prompt {prompt.index}", name)
            _require_math_verify(f"the rm_type in the metadata of prompt {prompt.index}", name)
        if prompt.label is None and name.removeprefix(BOXED) not in WITHOUT_LABEL:
            raise ValueError(f"prompt {prompt.index} has no label, which --rm-type {name} needs; set {flags}.")


def _rm_type(default: str, metadata: Mapping[str, Any]) -> Any:
    return metadata.get("rm_type") or default


def _require_math_verify(source: str, name: str) -> None:
    if name.removeprefix(BOXED) in SYMBOLIC and importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            f"{source} is {name!r}, which compares answers with math-verify; install it with: "
            "pip install 'slime_tis[train]'."
        )


def _builtin_reward(default: str, key: RewardKey, safe_point: Callable[[], None]) -> ScoreGroups:
    def score_one(sample: Sample) -> Score:
        safe_point()
        name = str(_rm_type(default, sample.metadata))
        if sample.label is None and name.removeprefix(BOXED) not in WITHOUT_LABEL:
            raise ValueError(
                f"prompt {sample.prompt_index} has no label, which --rm-type {name} needs; set --label-key."
            )
        value, parts = _chosen(builtin_reward(name, sample), key, f"--rm-type {name}", sample)
        return Score(value=value, parts=parts)

    return lambda groups: [[score_one(sample) for sample in group] for group in groups]


def _custom_reward(
    function: Callable[..., Any], args: Namespace | None, key: RewardKey, safe_point: Callable[[], None]
) -> ScoreGroups:
    whole_groups = _takes_groups(function)
    check_signature(function, ("args", "samples" if whole_groups else "sample"), ())

    async def call(given: Sample | list[Sample]) -> Any:
        safe_point()
        with calling(function):
            found = function(args, given)
            return await found if inspect.isawaitable(found) else found

    async def score(group: list[Sample]) -> list[Score]:
        before = [_trained_on(sample) for sample in group]
        masks = [list(sample.loss_mask) for sample in group]
        if whole_groups:
            returned = await call(list(group))
            with _reading(function, group[0].prompt_index):
                rewards = _as_list(returned, group, describe(function))
        else:
            rewards = await asyncio.gather(*map(call, group))
        found = []
        for reward, sample, trained_on, mask in zip(rewards, group, before, masks, strict=True):
            with _reading(function, sample.prompt_index):
                _check_untouched(sample, trained_on, describe(function))
                found.append(_checked(reward, key, describe(function), sample, mask))
        return found

    async def score_all(groups: Sequence[list[Sample]]) -> list[list[Score]]:
        scores = asyncio.gather(*(score(group) for group in groups))
        while not scores.done():
            await asyncio.wait([scores], timeout=POLL)
            safe_point()
        return list(await scores)

    return lambda groups: asyncio.run(score_all(groups))


def _takes_groups(function: Callable[..., Any]) -> bool:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function in C without a signature
        return False
    return len(names) > 1 and names[1] == "samples"


def _trained_on(sample: Sample) -> tuple[Any, ...]:
    """What a reward function may not change, since it belongs together."""
    return (
        list(sample.tokens),
        list(sample.rollout_log_probs),
        list(sample.weight_versions),
        (sample.group_index, sample.index, sample.response_length, sample.status),
    )


@contextmanager
def _reading(function: Callable[..., Any], index: int) -> Iterator[None]:
    """Reads what a reward function returned and wrote, objects of the user's own among it, whose methods may raise."""
    try:
        yield
    except CustomFunctionError:
        raise
    except (Exception, SystemExit) as error:
        raise CustomFunctionError(
            f"{describe(function)} gave prompt {index} a reward or sample that cannot be read: "
            f"{type(error).__name__}: {one_line(str(error))}"
        ) from error


def _check_untouched(sample: Sample, before: tuple[Any, ...], function: str) -> None:
    is_list = isinstance(sample.loss_mask, list) and len(sample.loss_mask) == sample.response_length
    untouched = is_list and all(isinstance(value, int) and value in (0, 1) for value in sample.loss_mask)
    untouched = untouched and _trained_on(sample) == before
    if not untouched:
        raise CustomFunctionError(
            f"{function} changed the tokens, log-probs, versions or places of a sample of prompt "
            f"{sample.prompt_index}, or its loss_mask to other than a 0 or 1 for each response token; it may set "
            "metadata, loss_mask and remove_sample."
        )


def _as_list(rewards: Any, group: list[Sample], function: str) -> list[Any]:
    rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if not isinstance(rewards, list | tuple) or len(rewards) != len(group):
        raise CustomFunctionError(
            f"{function} returned {_shown(rewards)} for the {len(group)} samples of prompt {group[0].prompt_index}; it "
            "must return a list of as many rewards."
        )
    return list(rewards)


def _checked(reward: Any, key: RewardKey, function: str, sample: Sample, mask: list[int]) -> Score:
    value, parts = _chosen(reward, key, function, sample)
    if not isinstance(sample.metadata, Mapping):
        raise CustomFunctionError(
            f"{function} left {_shown(sample.metadata)} as the metadata of prompt {sample.prompt_index}; leave a dict."
        )
    metadata = json_object(sample.metadata, "its metadata")
    return Score(
        value=value,
        parts=parts,
        metadata=None if metadata == getattr(sample.prompt, "metadata", None) else metadata,
        loss_mask=None if sample.loss_mask == mask else [int(value) for value in sample.loss_mask],
        remove_sample=bool(sample.remove_sample),
    )


def _chosen(reward: Any, key: RewardKey, function: str, sample: Sample) -> tuple[float, dict[str, float]]:
    """The reward as a number, and the other numbers where it is a dict."""
    index = sample.prompt_index
    if not isinstance(reward, Mapping):
        if key.name is not None:
            raise CustomFunctionError(
                f"{function} returned {_shown(reward)} for prompt {index}, but {key.flag} is {key.name!r}; return a "
                f"dict with that key, or leave {key.flag} out."
            )
        return _number(reward, function, index, ""), {}
    keys = one_line(", ".join(map(repr, reward)), 200) or "no keys"
    if key.name is None:
        raise CustomFunctionError(
            f"{function} returned a dict for prompt {index}; say which of {keys} is the reward with {key.flag}."
        )
    if key.name not in reward:
        raise CustomFunctionError(
            f"{function} returned a dict without {key.name!r}, which {key.flag} names, for prompt {index}; it has "
            f"{keys}."
        )
    found = {str(name): _as_number(part) for name, part in reward.items() if name != key.name}
    parts = {name: part for name, part in found.items() if part is not None and math.isfinite(part)}
    if len(parts) > MOST_PARTS:
        raise CustomFunctionError(
            f"{function} returned a dict of {len(parts) + 1} numbers for prompt {index}; {MOST_PARTS} can be reported."
        )
    return _number(reward[key.name], function, index, f" as {key.name!r}"), parts


def _number(reward: Any, function: str, index: int, role: str) -> float:
    number = _as_number(reward)
    if number is None or not math.isfinite(number):
        raise CustomFunctionError(
            f"{function} returned {_shown(reward)}{role} for prompt {index}; it must return a finite number."
        )
    return number


def _as_number(value: Any) -> float | None:
    """The value as a float, None where it is not a number; true is 1 and false 0."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # OverflowError: an integer beyond a float
        return None


def _shown(value: Any) -> str:
    """The value for a message: its repr, but the size of an integer of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 1 << 256:
        return f"an integer of {value.bit_length()} bits"
    return one_line(repr(value))
