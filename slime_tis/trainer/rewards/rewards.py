"""Rewards of responses: built-in rewards by name, and user functions."""

import asyncio
import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from slime_tis.errors import CustomFunctionError, quoted
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.configs.rollout import (
    REMOTE,
    RolloutConfig,
    base_name,
    check_rm_type,
    parse_weights,
)
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.data.user_values import SampleEdits, handed_out
from slime_tis.trainer.engines.event_loops import results_of, run
from slime_tis.trainer.rank_collectives import map_over_ranks
from slime_tis.trainer.rewards.builtin_rewards import WITHOUT_LABEL, builtin_reward, scored_text
from slime_tis.trainer.rewards.remote_reward import RewardServer
from slime_tis.trainer.rewards.symbolic import comparison_budget
from slime_tis.user_functions import calling, describe, load_user_function

OPTION = "custom_rm_path"
RewardFunction = Callable[[list[Sample]], list[float]]


@dataclass(frozen=True, kw_only=True)
class Score:
    """The reward of a sample, for all ranks."""

    value: float
    parts: dict[str, float]
    """The other numbers of a dictionary reward."""
    edits: SampleEdits | None = None


ScoreGroups = Callable[[Sequence[list[Sample]]], list[list[Score]]]


@dataclass(frozen=True, kw_only=True)
class RewardKey:
    """The reward of a dictionary: one key, or a weighted sum."""

    name: str | None = None
    flag: str
    weights: Mapping[str, float] = field(default_factory=dict)

    def score(self, reward: Any, function: str, index: int) -> tuple[float, dict[str, float]]:
        """Returns the reward as a number, and the other numbers of a dictionary."""
        numbers = {}
        if isinstance(reward, Mapping):
            for name, part in reward.items():
                numbers[str(name)] = _as_number(part)
        if self.weights:
            wanted = f"a dict with the numbers {', '.join(self.weights)} ({self.flag})"
            terms = []
            for name, weight in self.weights.items():
                terms.append(weight * numbers.get(name, math.nan))
            value = sum(terms)
        elif self.name is not None:
            wanted = f"a dict with the number {self.name} ({self.flag})"
            value = numbers.get(self.name, math.nan)
        else:
            wanted = f"a number, or add {self.flag} to choose a number of a dict"
            value = _as_number(reward)
        # Not `>`, because NaN must be refused, too.
        if not abs(value) <= MAX_REWARD:
            raise CustomFunctionError(
                f"{function} returned {quoted(reward)} for prompt {index}; return {wanted}, finite"
                f" and at most {MAX_REWARD:g} in magnitude."
            )
        parts = {}
        for name, part in numbers.items():
            if name != self.name and math.isfinite(part):
                parts[name] = part
        return value, parts


def build_reward(
    config: RolloutConfig,
    args: Namespace | None = None,
    check_interrupts: Callable[[], None] = lambda: None,
    *,
    evaluation: bool = False,
) -> RewardFunction:
    """Returns the function that scores samples with `--rm-type` or `--custom-rm-path`.

    The returned function is a collective: the ranks share the prompts, and all ranks get all
    scores.

    A user function is called as `fn(args, sample)`, or, if its second parameter is named `samples`,
    as `fn(args, samples)` with all samples of one prompt.
    """
    key = _reward_key(config, evaluation=evaluation)
    if config.custom_rm_path is not None:
        function = load_user_function(OPTION, config.custom_rm_path)
        score_groups = _custom_reward(function, args, key, check_interrupts)
    elif config.rm_type is None:  # RolloutConfig requires a generate function then
        score_groups = _missing_rewards
    else:
        server = None
        if config.rm_url is not None:
            server = RewardServer(url=config.rm_url, config=config)
        score_groups = _builtin_reward(config.rm_type, key, check_interrupts, server)

    def score_within_budget(groups: Sequence[list[Sample]]) -> list[list[Score]]:
        with comparison_budget():
            return score_groups(groups)

    def reward(samples: list[Sample]) -> list[float]:
        groups = []
        for _, group in groupby(samples, key=lambda sample: sample.group_index):
            groups.append(list(group))
        scores = list(chain(*map_over_ranks(score_within_budget, groups)))
        for sample, score in zip(samples, scores, strict=True):
            sample.reward_parts = score.parts
            if score.edits is not None:
                score.edits.apply(sample)
        return [score.value for score in scores]

    return reward


def _reward_key(config: RolloutConfig, *, evaluation: bool) -> RewardKey:
    """Returns how the reward is taken from a dictionary, in training or in evaluation."""
    if evaluation and config.eval_reward_key is not None:
        return RewardKey(name=config.eval_reward_key, flag="--eval-reward-key")
    if config.reward_weights is not None:
        return RewardKey(flag="--reward-weights", weights=parse_weights(config.reward_weights))
    return RewardKey(name=config.reward_key, flag="--reward-key")


def assign_rewards(groups: Sequence[Sequence[Sample]], reward: RewardFunction) -> None:
    """Sets the reward of every sample without one; a collective, like `reward`."""
    samples = [sample for group in groups for sample in group if sample.reward is None]
    for sample, value in zip(samples, reward(samples), strict=True):
        sample.reward = value


def check_prompts(
    config: RolloutConfig, prompts: Sequence[Prompt], flags: str = "--label-key"
) -> None:
    """Raises ValueError if the built-in rewards cannot score the prompts of a file.

    Args:
        config: The options, which choose the reward.
        prompts: The prompts of the file.
        flags: The flags that name the column of the labels, for the message.
    """
    if config.rm_type is None:
        return
    for prompt in prompts:
        name = _rm_type(config.rm_type, prompt.metadata)
        if not isinstance(name, str):
            raise ValueError(
                f"prompt {prompt.index} has an rm_type in its metadata that is not text:"
                f" {quoted(name)}."
            )
        if base_name(name) == REMOTE and config.rm_url is None:
            raise ValueError(
                f"prompt {prompt.index} has the rm_type {name} in its metadata; add --rm-url."
            )
        if name != config.rm_type:
            check_rm_type(f"the rm_type in the metadata of prompt {prompt.index}", name)
        _check_label(prompt.index, prompt.label, name, flags)


def check_reward_server(config: RolloutConfig, prompts: Iterable[Prompt]) -> None:
    """Checks that --rm-url has a use; raises ValueError if no prompt is scored by a server."""
    if config.rm_url is None or config.rm_type is None:
        return
    for prompt in prompts:
        name = str(_rm_type(config.rm_type, prompt.metadata))
        if base_name(name) == REMOTE:
            return
    raise ValueError(
        "--rm-url is given, but no prompt has a remote rm_type; add --rm-type remote_rm, or"
        " remove --rm-url."
    )


def _rm_type(default: str, metadata: Mapping[str, Any]) -> Any:
    """Returns the reward of a prompt: its metadata's, or else the run's."""
    return metadata.get("rm_type") or default


def _check_label(index: int, label: Any, name: str, flags: str) -> None:
    if label is None and base_name(name) not in WITHOUT_LABEL:
        raise ValueError(f"prompt {index} has no label, which --rm-type {name} needs; set {flags}.")


def _builtin_reward(
    default: str, key: RewardKey, check_interrupts: Callable[[], None], server: RewardServer | None
) -> ScoreGroups:
    """Returns the function that scores groups with built-in rewards and the reward server."""

    def name_of(sample: Sample) -> str:
        return str(_rm_type(default, sample.metadata))

    def score_groups(groups: Sequence[list[Sample]]) -> list[list[Score]]:
        # All requests are sent together, before any sample is scored here. The answers have the
        # order of the samples.
        requests = []
        for sample in chain(*groups):
            name = name_of(sample)
            _check_label(sample.prompt_index, sample.label, name, "--label-key")
            if base_name(name) == REMOTE:
                request = {
                    "prompt": sample.prompt_text,
                    "response": scored_text(name, sample),
                    "label": sample.label,
                }
                requests.append(request)
        answers: Iterator[Any] = iter(())
        if server is not None and requests:
            answers = iter(server.ask(requests, check_interrupts))

        def score(sample: Sample) -> Score:
            check_interrupts()
            name = name_of(sample)
            reward: Any
            if server is not None and base_name(name) == REMOTE:
                reward = next(answers)
                source = f"the reward server {server.url}"
            else:
                reward = builtin_reward(name, sample)
                source = f"--rm-type {name}"
            value, parts = key.score(reward, source, sample.prompt_index)
            return Score(value=value, parts=parts)

        scores = []
        for group in groups:
            scores.append([score(sample) for sample in group])
        return scores

    return score_groups


def _custom_reward(
    function: Callable[..., Any],
    args: Namespace | None,
    key: RewardKey,
    check_interrupts: Callable[[], None],
) -> ScoreGroups:
    """Returns the function that scores groups with a user function."""
    try:
        takes_groups = list(inspect.signature(function).parameters)[1:2] == ["samples"]
    except (TypeError, ValueError):  # a function in C without a signature
        takes_groups = False

    async def call(argument: Sample | list[Sample]) -> Any:
        check_interrupts()
        with calling(function):
            returned = function(args, argument)
            if inspect.isawaitable(returned):
                return await returned
            return returned

    async def score(group: list[Sample]) -> list[Score]:
        before = [handed_out(sample) for sample in group]
        if takes_groups:
            rewards = await call(list(group))
        else:
            rewards = await asyncio.gather(*map(call, group))
        if hasattr(rewards, "tolist"):  # a tensor or an array
            rewards = rewards.tolist()
        name = describe(function)
        if not isinstance(rewards, list | tuple) or len(rewards) != len(group):
            raise CustomFunctionError(
                f"{name} returned {quoted(rewards)} for the {len(group)} samples of prompt"
                f" {group[0].prompt_index}; return a list with one reward per sample."
            )
        scores = []
        with calling(function):
            for reward, sample, earlier in zip(rewards, group, before, strict=True):
                edits = SampleEdits.since(earlier, sample, name)
                value, parts = key.score(reward, name, sample.prompt_index)
                scores.append(Score(value=value, parts=parts, edits=edits))
        return scores

    return lambda groups: run(results_of(map(score, groups), check_interrupts))


def _missing_rewards(groups: Sequence[list[Sample]]) -> list[list[Score]]:
    """Refuses samples without a reward, if only a user function could have set it."""
    if groups:
        raise CustomFunctionError(
            f"the user function gave a sample of prompt {groups[0][0].prompt_index} without a"
            " reward, and neither --rm-type nor --custom-rm-path is given; set sample.reward, or"
            " add one of them."
        )
    return []


def _as_number(value: Any) -> float:
    """Returns a reward as a number; NaN if it is none."""
    if isinstance(value, str | bytes | bytearray):  # float("1") would be a number
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # OverflowError: an integer beyond a float
        return math.nan
