"""Rewards of responses: built-in rewards by name, and user functions."""

import asyncio
import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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
        numbers = (
            {str(name): _as_number(part) for name, part in reward.items()}
            if isinstance(reward, Mapping)
            else {}
        )
        parts = {name: part for name, part in numbers.items() if name != self.name}
        if self.weights:
            wanted = f"a dict with the numbers {', '.join(self.weights)} ({self.flag})"
            value = sum(
                weight * numbers.get(name, math.nan) for name, weight in self.weights.items()
            )
        elif self.name is not None:
            wanted, value = (
                f"a dict with the number {self.name} ({self.flag})",
                numbers.get(self.name, math.nan),
            )
        else:
            wanted, value = (
                f"a number, or add {self.flag} to choose a number of a dict",
                _as_number(reward),
            )
        if not abs(value) <= MAX_REWARD:
            raise CustomFunctionError(
                f"{function} returned {quoted(reward)} for prompt {index}; return {wanted}, finite"
                f" and at most {MAX_REWARD:g} in magnitude."
            )
        return value, {name: part for name, part in parts.items() if math.isfinite(part)}


def build_reward(
    config: RolloutConfig,
    args: Namespace | None = None,
    check_interrupts: Callable[[], None] = lambda: None,
    *,
    evaluation: bool = False,
) -> RewardFunction:
    """Returns the function that scores a list of samples with `--rm-type` or `--custom-rm-path`; a collective.

    A user function is called as `fn(args, sample)`, or, if its second parameter is named `samples`,
    as `fn(args, samples)` with all samples of one prompt. The ranks share the prompts, and all
    ranks get all scores.
    """
    key = RewardKey(name=config.reward_key, flag="--reward-key")
    if config.reward_weights is not None:
        key = RewardKey(flag="--reward-weights", weights=parse_weights(config.reward_weights))
    if evaluation and config.eval_reward_key is not None:
        key = RewardKey(name=config.eval_reward_key, flag="--eval-reward-key")
    if config.custom_rm_path is not None:
        score_groups = _custom_reward(
            load_user_function(OPTION, config.custom_rm_path), args, key, check_interrupts
        )
    elif config.rm_type is None:  # RolloutConfig requires a generate function then
        score_groups = _missing_rewards
    else:
        server = None if config.rm_url is None else RewardServer(url=config.rm_url, config=config)
        score_groups = _builtin_reward(config.rm_type, key, check_interrupts, server)

    def score_within_budget(groups: Sequence[list[Sample]]) -> list[list[Score]]:
        with comparison_budget():
            return score_groups(groups)

    def reward(samples: list[Sample]) -> list[float]:
        groups = [
            list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)
        ]
        scores = [score for group in map_over_ranks(score_within_budget, groups) for score in group]
        for sample, score in zip(samples, scores, strict=True):
            sample.reward_parts = score.parts
            if score.edits is not None:
                score.edits.apply(sample)
        return [score.value for score in scores]

    return reward


def assign_rewards(groups: Sequence[Sequence[Sample]], reward: RewardFunction) -> None:
    """Sets the reward of every sample that has none yet; a collective, as the reward is."""
    samples = [sample for group in groups for sample in group if sample.reward is None]
    for sample, value in zip(samples, reward(samples), strict=True):
        sample.reward = value


def check_prompts(
    config: RolloutConfig, prompts: Sequence[Prompt], flags: str = "--label-key"
) -> None:
    """Raises ValueError if the built-in rewards cannot score the prompts of a file, whose labels come from `flags`."""
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
    if not any(
        base_name(str(_rm_type(config.rm_type, prompt.metadata))) == REMOTE for prompt in prompts
    ):
        raise ValueError(
            "--rm-url is given, but no prompt has a remote rm_type; add --rm-type remote_rm, or"
            " remove --rm-url."
        )


def _rm_type(default: str, metadata: Mapping[str, Any]) -> Any:
    return metadata.get("rm_type") or default


def _check_label(index: int, label: Any, name: str, flags: str) -> None:
    if label is None and base_name(name) not in WITHOUT_LABEL:
        raise ValueError(f"prompt {index} has no label, which --rm-type {name} needs; set {flags}.")


def _builtin_reward(
    default: str, key: RewardKey, check_interrupts: Callable[[], None], server: RewardServer | None
) -> ScoreGroups:
    def name_of(sample: Sample) -> str:
        name = str(_rm_type(default, sample.metadata))
        _check_label(sample.prompt_index, sample.label, name, "--label-key")
        return name

    def score_groups(groups: Sequence[list[Sample]]) -> list[list[Score]]:
        named = [(name_of(sample), sample) for group in groups for sample in group]
        requests = [
            {
                "prompt": sample.prompt_text,
                "response": scored_text(name, sample),
                "label": sample.label,
            }
            for name, sample in named
            if base_name(name) == REMOTE
        ]
        answers = iter(
            server.ask(requests, check_interrupts) if server is not None and requests else ()
        )

        def score(sample: Sample) -> Score:
            check_interrupts()
            name = name_of(sample)
            if server is not None and base_name(name) == REMOTE:
                reward, source = next(answers), f"the reward server {server.url}"
            else:
                reward, source = builtin_reward(name, sample), f"--rm-type {name}"
            value, parts = key.score(reward, source, sample.prompt_index)
            return Score(value=value, parts=parts)

        return [list(map(score, group)) for group in groups]

    return score_groups


def _custom_reward(
    function: Callable[..., Any],
    args: Namespace | None,
    key: RewardKey,
    check_interrupts: Callable[[], None],
) -> ScoreGroups:
    try:
        takes_groups = list(inspect.signature(function).parameters)[1:2] == ["samples"]
    except (TypeError, ValueError):  # a function in C without a signature
        takes_groups = False

    async def call(argument: Sample | list[Sample]) -> Any:
        check_interrupts()
        with calling(function):
            returned = function(args, argument)
            return await returned if inspect.isawaitable(returned) else returned

    async def score(group: list[Sample]) -> list[Score]:
        before = [handed_out(sample) for sample in group]
        rewards = (
            await call(list(group)) if takes_groups else await asyncio.gather(*map(call, group))
        )
        rewards, name = (
            rewards.tolist() if hasattr(rewards, "tolist") else rewards,
            describe(function),
        )
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
    if groups:
        raise CustomFunctionError(
            f"the user function gave a sample of prompt {groups[0][0].prompt_index} without a"
            " reward, and neither --rm-type nor --custom-rm-path is given; set sample.reward, or"
            " add one of them."
        )
    return []


def _as_number(value: Any) -> float:
    try:
        return math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, OverflowError):  # OverflowError: an integer beyond a float
        return math.nan
