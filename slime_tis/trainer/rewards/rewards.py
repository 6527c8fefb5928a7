"""Scores of responses: the built-in ones by name, and user functions held to their contract."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.collectives import map_over_ranks
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.data.written import Before, Written, check_untouched, reading
from slime_tis.trainer.engines.tasks import run
from slime_tis.trainer.options.rm_types import BOXED, check_rm_type, is_remote, parse_weights
from slime_tis.trainer.rewards.builtin_rewards import WITHOUT_LABEL, builtin_reward
from slime_tis.trainer.rewards.remote_reward import RewardRequest, RewardServer
from slime_tis.user_functions import calling, check_signature, describe, load_function

if TYPE_CHECKING:
    from slime_tis.trainer.options.rollout import RolloutConfig

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

    written: Written | None = None
    """Fields that the function wrote into the sample; None for a built-in reward, which writes none."""

    def apply(self, sample: Sample) -> None:
        """Writes everything but the value into the sample."""
        sample.reward_parts = self.parts
        if self.written is not None:
            self.written.apply(sample)


ScoreGroups = Callable[[Sequence[list[Sample]]], list[list[Score]]]


@dataclass(frozen=True, kw_only=True)
class RewardKey:
    """How the reward follows from one that is a dict."""

    name: str | None = None
    """The key of the reward; None where rewards are numbers, or weighted sums."""

    flag: str
    """The flag of the key, for messages."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the components whose sum is the reward, by key; empty without weights."""


def build_reward(
    config: RolloutConfig,
    args: Namespace | None = None,
    check_interrupts: Callable[[], None] = lambda: None,
    *,
    evaluation: bool = False,
) -> RewardFunction:
    """The function that scores a list of samples, as `--rm-type` or `--custom-rm-path` says.

    A user function is called as `fn(args, sample)`, or, where its second parameter is named `samples`, as
    `fn(args, samples)` with all samples of one prompt, and returns a reward each: a number, or a dict, in which
    `--reward-key` names the reward, or `--reward-weights` its components. Either may be a coroutine
    function. In a torch.distributed job the prompts are shared over the ranks, so that each sample is scored once, and
    every rank gets all scores, and what the function wrote into the samples.

    Args:
        config: with `rm_type` or `custom_rm_path`.
        args: given to the user's function.
        check_interrupts: called before each call of a function and while one is awaited; an exception ends scoring.
        evaluation: score held-out prompts, with `eval_reward_key`.

    Raises:
        ValueError: here for an unknown name; when scoring for a missing label.
        CustomFunctionError: the function cannot be loaded or called, or, when scoring, it raises or breaks the
            contract.
    """
    key = RewardKey(name=config.reward_key, flag="--reward-key")
    if config.reward_weights is not None:
        key = RewardKey(flag="--reward-weights", weights=parse_weights(config.reward_weights))
    if evaluation and config.eval_reward_key is not None:
        key = RewardKey(name=config.eval_reward_key, flag="--eval-reward-key")
    if config.custom_rm_path is not None:
        score_groups = _custom_reward(load_function(config.custom_rm_path), args, key, check_interrupts)
    elif config.rm_type is None:  # RolloutConfig requires a generate function then
        score_groups = _missing_rewards
    else:
        check_rm_type("--rm-type", config.rm_type)
        _require_math_verify("--rm-type", config.rm_type)
        server = None if config.rm_url is None else RewardServer.build(config)
        score_groups = _builtin_reward(config.rm_type, key, check_interrupts, server)

    def reward(samples: list[Sample]) -> list[float]:
        groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]
        scores = [score for group in map_over_ranks(score_groups, groups) for score in group]
        for sample, score in zip(samples, scores, strict=True):
            score.apply(sample)
        return [score.value for score in scores]

    return reward


def assign_rewards(groups: Sequence[Sequence[Sample]], reward: RewardFunction) -> None:
    """Sets the reward of every sample that has none yet; a collective, as the reward is."""
    samples = [sample for group in groups for sample in group if sample.reward is None]
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
        if is_remote(name) and config.rm_url is None:
            raise ValueError(f"prompt {prompt.index} has the rm_type {name} in its metadata; add --rm-url.")
        if name != config.rm_type:
            check_rm_type(f"the rm_type in the metadata of prompt {prompt.index}", name)
            _require_math_verify(f"the rm_type in the metadata of prompt {prompt.index}", name)
        if prompt.label is None and name.removeprefix(BOXED) not in WITHOUT_LABEL:
            raise ValueError(f"prompt {prompt.index} has no label, which --rm-type {name} needs; set {flags}.")


def check_reward_server(config: RolloutConfig, prompts: Iterable[Prompt]) -> None:
    """Checks that a reward server is asked for something.

    Args:
        config: with its address, or nothing is checked.
        prompts: all of the run.

    Raises:
        ValueError: no prompt's answer is scored by it.
    """
    if config.rm_url is None or config.rm_type is None:
        return
    if not any(is_remote(str(_rm_type(config.rm_type, prompt.metadata))) for prompt in prompts):
        raise ValueError(
            f"--rm-url is given, but --rm-type is {config.rm_type} and no prompt has a remote rm_type in its metadata, "
            "so that no server is asked; add --rm-type remote_rm, or remove --rm-url."
        )


def _rm_type(default: str, metadata: Mapping[str, Any]) -> Any:
    return metadata.get("rm_type") or default


def _require_math_verify(source: str, name: str) -> None:
    if name.removeprefix(BOXED) in SYMBOLIC and importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            f"{source} is {name!r}, which compares answers with math-verify; install it with: "
            "pip install 'slime_tis[train]'."
        )


def _builtin_reward(
    default: str, key: RewardKey, check_interrupts: Callable[[], None], server: RewardServer | None
) -> ScoreGroups:
    def name_of(sample: Sample) -> str:
        name = str(_rm_type(default, sample.metadata))
        if sample.label is None and name.removeprefix(BOXED) not in WITHOUT_LABEL:
            raise ValueError(
                f"prompt {sample.prompt_index} has no label, which --rm-type {name} needs; set --label-key."
            )
        return name

    def score_one(sample: Sample, name: str, answer: Any) -> Score:
        check_interrupts()
        remote = server is not None and is_remote(name)
        source = f"the reward server {server.url}" if server is not None and remote else f"--rm-type {name}"
        reward = answer if remote else builtin_reward(name, sample)
        value, parts = _chosen(reward, key, source, sample)
        return Score(value=value, parts=parts)

    def score_groups(groups: Sequence[list[Sample]]) -> list[list[Score]]:
        names = [[name_of(sample) for sample in group] for group in groups]
        remote = [
            RewardRequest.of(sample, boxed=name.startswith(BOXED))
            for group, row in zip(groups, names, strict=True)
            for sample, name in zip(group, row, strict=True)
            if is_remote(name)
        ]
        answers = iter(server.ask(remote, check_interrupts) if server is not None and remote else ())
        return [
            [
                score_one(sample, name, next(answers) if is_remote(name) else None)
                for sample, name in zip(group, row, strict=True)
            ]
            for group, row in zip(groups, names, strict=True)
        ]

    return score_groups


def _custom_reward(
    function: Callable[..., Any], args: Namespace | None, key: RewardKey, check_interrupts: Callable[[], None]
) -> ScoreGroups:
    whole_groups = _takes_groups(function)
    check_signature(function, ("args", "samples" if whole_groups else "sample"), ())

    async def call(given: Sample | list[Sample]) -> Any:
        check_interrupts()
        with calling(function):
            found = function(args, given)
            return await found if inspect.isawaitable(found) else found

    async def score(group: list[Sample]) -> list[Score]:
        before = [Before.of(sample) for sample in group]
        if whole_groups:
            returned = await call(list(group))
            with reading(function, f"prompt {group[0].prompt_index} a reward or sample"):
                rewards = _as_list(returned, group, describe(function))
        else:
            rewards = await asyncio.gather(*map(call, group))
        found = []
        for reward, sample, was in zip(rewards, group, before, strict=True):
            with reading(function, f"prompt {sample.prompt_index} a reward or sample"):
                check_untouched(was, sample, describe(function))
                value, parts = _chosen(reward, key, describe(function), sample)
                written = Written.between(was, sample, describe(function))
                found.append(Score(value=value, parts=parts, written=written))
        return found

    async def score_all(groups: Sequence[list[Sample]]) -> list[list[Score]]:
        scores = asyncio.gather(*(score(group) for group in groups))
        while not scores.done():
            await asyncio.wait([scores], timeout=POLL)
            check_interrupts()
        return list(await scores)

    return lambda groups: run(score_all(groups))


def _missing_rewards(groups: Sequence[list[Sample]]) -> list[list[Score]]:
    """Refuses samples without a reward where nothing scores them.

    Raises:
        CustomFunctionError: there are some.
    """
    if groups:
        raise CustomFunctionError(
            f"the generate function gave a sample of prompt {groups[0][0].prompt_index} without a reward, and neither "
            "--rm-type nor --custom-rm-path is given; set sample.reward, or add one of them."
        )
    return []


def _takes_groups(function: Callable[..., Any]) -> bool:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function in C without a signature
        return False
    return len(names) > 1 and names[1] == "samples"


def _as_list(rewards: Any, group: list[Sample], function: str) -> list[Any]:
    rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if not isinstance(rewards, list | tuple) or len(rewards) != len(group):
        raise CustomFunctionError(
            f"{function} returned {_shown(rewards)} for the {len(group)} samples of prompt {group[0].prompt_index}; it "
            "must return a list of as many rewards."
        )
    return list(rewards)


def _chosen(reward: Any, key: RewardKey, function: str, sample: Sample) -> tuple[float, dict[str, float]]:
    """The reward as a number, and the other numbers where it is a dict."""
    index = sample.prompt_index
    if key.weights:
        return _weighted(reward, key.weights, function, index)
    if not isinstance(reward, Mapping):
        if key.name is not None:
            raise CustomFunctionError(
                f"{function} returned {_shown(reward)} for prompt {index}, but {key.flag} is {key.name!r}; return a "
                f"dict with that key, or remove {key.flag}."
            )
        return _number(reward, function, index, ""), {}
    keys = one_line(", ".join(map(repr, reward)), 200) or "no keys"
    if key.name is None:
        raise CustomFunctionError(
            f"{function} returned a dict for prompt {index}; say which of {keys} is the reward with {key.flag}, or "
            "their weights with --reward-weights."
        )
    if key.name not in reward:
        raise CustomFunctionError(
            f"{function} returned a dict without {key.name!r}, which {key.flag} names, for prompt {index}; it has "
            f"{keys}."
        )
    parts = _parts({name: part for name, part in reward.items() if name != key.name}, function, index)
    return _number(reward[key.name], function, index, f" as {key.name!r}"), parts


def _weighted(reward: Any, weights: Mapping[str, float], function: str, index: int) -> tuple[float, dict[str, float]]:
    """The weighted sum of a reward's components, and all its numbers."""
    missing = [name for name in weights if not isinstance(reward, Mapping) or name not in reward]
    if missing:
        shown = "a dict" if isinstance(reward, Mapping) else _shown(reward)
        raise CustomFunctionError(
            f"{function} returned {shown} without {missing[0]!r}, which --reward-weights names, for prompt {index}; "
            "return a dict with a number for each of them."
        )
    terms = [weight * _number(reward[name], function, index, f" as {name!r}") for name, weight in weights.items()]
    return _number(sum(terms), function, index, " as the weighted sum"), _parts(reward, function, index)


def _parts(reward: Mapping[Any, Any], function: str, index: int) -> dict[str, float]:
    """The finite numbers of a dict."""
    found = {str(name): _as_number(part) for name, part in reward.items()}
    parts = {name: part for name, part in found.items() if part is not None and math.isfinite(part)}
    if len(parts) > MOST_PARTS:
        raise CustomFunctionError(
            f"{function} returned a dict of {len(parts)} numbers for prompt {index}; {MOST_PARTS} can be reported."
        )
    return parts


def _number(reward: Any, function: str, index: int, role: str) -> float:
    number = _as_number(reward)
    if number is None or not math.isfinite(number):
        raise CustomFunctionError(
            f"{function} returned {_shown(reward)}{role} for prompt {index}; it must return a finite number."
        )
    if abs(number) > MAX_REWARD:
        raise CustomFunctionError(
            f"{function} returned {number:g}{role} for prompt {index}; it must return a number of at most "
            f"{MAX_REWARD:g} in magnitude, or advantages overflow."
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
