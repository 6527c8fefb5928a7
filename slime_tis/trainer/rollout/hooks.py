"""User functions around a rollout, in slime's signatures: loaded, called on rank 0, held to a contract.

buffer_filter(args, rollout_id, buffer, num_samples) -> groups           of the unfinished ones; the rest waits
dynamic_sampling_filter(args, samples) -> DynamicFilterOutput | bool      for every group, once it is scored
rollout_sample_filter(args, groups) -> None                               sets sample.remove_sample
rollout_all_samples_process(args, groups, data_source) -> None            also of the groups that were dropped
custom_reward_post_process(args, samples) -> (raw_rewards, rewards)       rewards → advantages
custom_rollout_log_function(rollout_id, args, samples, extra_metrics, time) -> bool
custom_eval_rollout_log_function(rollout_id, args, data, extra_metrics) -> bool
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.collectives import on_rank_zero
from slime_tis.trainer.data.sample import Sample, SampleStatus
from slime_tis.trainer.data.written import Before, Written, reading
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.rollout.filter_hub import DynamicFilterOutput
from slime_tis.trainer.rollout.unfinished import BufferChoice, Choose
from slime_tis.user_functions import calling, describe, load_hook

Result = TypeVar("Result")
Function = Callable[..., Any]

ARGUMENTS = {
    "buffer_filter": ("args", "rollout_id", "buffer", "num_samples"),
    "dynamic_sampling_filter": ("args", "samples"),
    "rollout_sample_filter": ("args", "samples"),
    "rollout_all_samples_process": ("args", "samples", "data_source"),
    "custom_reward_post_process": ("args", "samples"),
    "custom_rollout_log_function": ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
    "custom_eval_rollout_log_function": ("rollout_id", "args", "data", "extra_metrics"),
}
"""Hooks by the name of their option without `_path`, and what each is called with."""
LONGEST_REASON = 100
"""Characters of a filter's reason, which becomes a part of a metric's name."""


@dataclass(frozen=True, kw_only=True)
class ShapedRewards:
    """What --custom-reward-post-process-path makes of the rewards of a rollout, one each per sample."""

    raw: list[float]
    """Reported as rollout/raw_reward."""
    advantages: list[float]
    """Take the place of the estimator's."""


@dataclass(frozen=True, kw_only=True)
class RolloutHooks:
    """The user's functions around a rollout; None where an option is not given.

    Each is called on rank 0 alone, and what it says and writes is sent to the others.
    """

    args: Namespace
    """The program's options, which every function gets."""
    buffer_filter: Function | None = None
    dynamic_sampling_filter: Function | None = None
    rollout_sample_filter: Function | None = None
    rollout_all_samples_process: Function | None = None
    custom_reward_post_process: Function | None = None
    custom_rollout_log_function: Function | None = None
    custom_eval_rollout_log_function: Function | None = None

    @classmethod
    def load(cls, config: RolloutConfig, args: Namespace) -> RolloutHooks:
        """Loads the functions that the options name.

        Raises:
            CustomFunctionError: one cannot be loaded, or be called as it will be.
        """
        found = {}
        for name, arguments in ARGUMENTS.items():
            path = getattr(config, f"{name}_path")
            found[name] = None if path is None else load_hook(path, arguments)
        return cls(args=args, **found)

    @property
    def choose(self) -> Choose | None:
        """The buffer filter, a collective; None without one."""
        function = self.buffer_filter
        if function is None:
            return None

        def choose(groups: Sequence[list[Sample]], count: int) -> BufferChoice:
            buffer = list(groups)
            returned: list[Any] = []

            def call() -> None:
                with calling(function):
                    returned.append(function(self.args, None, buffer, count))

            def read() -> BufferChoice:
                with reading(function, "groups"):
                    return _chosen(returned[0], buffer, groups, count, describe(function))

            return _call_with_samples(function, groups, call, read)

        return choose

    @property
    def judge(self) -> Callable[[Sequence[list[Sample]]], list[DynamicFilterOutput]] | None:
        """The dynamic sampling filter for the groups of a batch, a collective; None without one."""
        function = self.dynamic_sampling_filter
        if function is None:
            return None

        def judge(groups: Sequence[list[Sample]]) -> list[DynamicFilterOutput]:
            outputs = []

            def call() -> None:
                for group in groups:
                    with calling(function):
                        output = function(self.args, list(group))
                    with reading(function, f"prompt {group[0].prompt_index} a verdict"):
                        outputs.append(_verdict(output, function, group[0].prompt_index))

            return _call_with_samples(function, groups, call, lambda: outputs)

        return judge

    def filter_samples(self, groups: Sequence[list[Sample]]) -> None:
        """Lets the user's function choose the samples that are not trained on; a collective."""
        function = self.rollout_sample_filter
        if function is not None:
            self._process(function, groups)

    def process_all(self, groups: Sequence[list[Sample]], data_source: object) -> None:
        """Calls the user's function with all sampled groups, including dropped groups; a collective."""
        function = self.rollout_all_samples_process
        if function is not None:
            self._process(function, groups, data_source)

    def _process(self, function: Function, groups: Sequence[list[Sample]], *more: object) -> None:
        def call() -> None:
            with calling(function):
                function(self.args, [list(group) for group in groups], *more)

        _call_with_samples(function, groups, call, lambda: None)

    def shape_rewards(self, groups: Sequence[list[Sample]]) -> ShapedRewards | None:
        """The rewards as the user's function makes them, None without one; a collective."""
        function = self.custom_reward_post_process
        if function is None:
            return None
        samples = [sample for group in groups for sample in group]
        returned: list[Any] = []

        def call() -> None:
            with calling(function):
                returned.append(function(self.args, list(samples)))

        def read() -> ShapedRewards:
            with reading(function, "rewards"):
                return _shaped(returned[0], len(samples), describe(function))

        return _call_with_samples(function, groups, call, read)

    def logs_rollout(
        self, rollout_id: int, groups: Sequence[list[Sample]], metrics: Mapping[str, float], seconds: float
    ) -> bool:
        """Shows a rollout to the user's log function; whether the metrics of the rollout are logged besides.

        A collective.
        """
        function = self.custom_rollout_log_function
        if function is None:
            return True
        samples = [sample for group in groups for sample in group]
        return not self._log(function, groups, rollout_id, self.args, samples, dict(metrics), seconds)

    def logs_evaluation(self, rollout_id: int, sets: Mapping[str, Sequence[Sample]]) -> bool:
        """Shows the answers to held-out prompts to the user's log function; whether their metrics are logged besides.

        A collective.
        """
        function = self.custom_eval_rollout_log_function
        if function is None:
            return True
        data = {
            name: {
                "rewards": [sample.reward for sample in samples],
                "truncated": [sample.status is SampleStatus.TRUNCATED for sample in samples],
                "samples": list(samples),
            }
            for name, samples in sets.items()
        }
        return not self._log(function, list(map(list, sets.values())), rollout_id, self.args, data, None)

    def _log(self, function: Function, groups: Sequence[list[Sample]], *arguments: object) -> bool:
        """Calls a log function; whether it says that it logged what there is."""
        returned: list[Any] = []

        def call() -> None:
            with calling(function):
                returned.append(function(*arguments))

        def read() -> bool:
            with reading(function, "a return value"):
                return returned[0] is not None and bool(returned[0])

        return _call_with_samples(function, groups, call, read)


def _call_with_samples(
    function: Function, groups: Sequence[list[Sample]], call: Callable[[], None], read: Callable[[], Result]
) -> Result:
    """Calls a function that gets samples, on rank 0, and writes what it wrote into the samples of every rank.

    Args:
        function: for messages.
        groups: the samples that it gets.
        call: calls it.
        read: what it returned, checked.

    Raises:
        CustomFunctionError: it raised, or changed what it may not.
    """
    samples = [sample for group in groups for sample in group]

    def on_this_rank() -> tuple[Result, list[Written]]:
        before = [Before.of(sample) for sample in samples]
        rewards = [sample.reward for sample in samples]
        call()
        written = []
        for sample, was, reward in zip(samples, before, rewards, strict=True):
            with reading(function, f"prompt {sample.prompt_index} a sample"):
                written.append(Written.between(was, sample, describe(function)))
                if sample.reward is not reward:
                    raise CustomFunctionError(
                        f"{describe(function)} changed the reward of a sample of prompt {sample.prompt_index}; rewards "
                        "are shaped by --custom-reward-post-process-path."
                    )
        return read(), written

    result, written = on_rank_zero(on_this_rank)
    for sample, change in zip(samples, written, strict=True):
        change.apply(sample)
    return result


def _chosen(
    returned: Any, buffer: list[list[Sample]], groups: Sequence[list[Sample]], count: int, function: str
) -> BufferChoice:
    """Returns the indices of groups that a buffer filter returned, and of groups that it left in the buffer."""
    places = {id(group): place for place, group in enumerate(groups)}
    if not isinstance(returned, list | tuple):
        raise CustomFunctionError(f"{function} returned {one_line(repr(returned))}; return a list of groups.")
    found = [places.get(id(group)) for group in returned]
    left = [places.get(id(group)) for group in buffer if not any(group is one for one in returned)]
    if None in found or None in left or len({*found}) < len(found):
        raise CustomFunctionError(
            f"{function} returned or left groups that are not of the buffer, or one of them twice; return some of the "
            "lists that it got."
        )
    if len(found) > count:
        raise CustomFunctionError(f"{function} returned {len(found)} groups, more than num_samples, {count}.")
    return BufferChoice(
        returned=[place for place in found if place is not None], left=[place for place in left if place is not None]
    )


def _verdict(output: Any, function: Function, index: int) -> DynamicFilterOutput:
    """What a filter returned, slime's own class or a bool among it, as plain values."""
    place = f"{describe(function)} returned"
    if hasattr(output, "keep"):
        reason = getattr(output, "reason", None)
        if reason is not None:
            reason = str(reason)
            if not reason.isprintable() or len(reason) > LONGEST_REASON:
                raise CustomFunctionError(
                    f"{place} the reason {one_line(repr(reason))} for prompt {index}; it becomes a metric's name: "
                    f"write at most {LONGEST_REASON} printable characters."
                )
        return DynamicFilterOutput(
            keep=_flag(output.keep, f"{place} keep", index),
            reason=reason or None,
            keep_when_insufficient=_flag(
                getattr(output, "keep_when_insufficient", False), f"{place} keep_when_insufficient", index
            ),
        )
    return DynamicFilterOutput(keep=_flag(output, place, index))


def _flag(value: Any, place: str, index: int) -> bool:
    """A bool, or a 0-dimensional array or tensor of one."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, bool):
        raise CustomFunctionError(
            f"{place} {one_line(repr(value))} for prompt {index}; return a DynamicFilterOutput or a bool."
        )
    return value


def _shaped(returned: Any, count: int, function: str) -> ShapedRewards:
    """The two lists of a reward post-processing function as floats."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise CustomFunctionError(
            f"{function} returned {one_line(repr(returned))}; return the tuple (raw_rewards, rewards)."
        )
    lists = []
    for name, values in zip(("raw_rewards", "rewards"), returned, strict=True):
        values = values.flatten().tolist() if hasattr(values, "flatten") else values
        if not isinstance(values, list | tuple) or len(values) != count:
            shown = f"{len(values)}" if isinstance(values, list | tuple) else one_line(repr(values))
            raise CustomFunctionError(f"{function} returned {shown} {name} for {count} samples; return as many.")
        numbers = [float(value) for value in values]
        wrong = next((number for number in numbers if not abs(number) <= MAX_REWARD), None)
        if wrong is not None:
            raise CustomFunctionError(
                f"{function} returned {wrong} among the {name}; return finite numbers of at most {MAX_REWARD:g} in "
                "magnitude."
            )
        lists.append(numbers)
    return ShapedRewards(raw=lists[0], advantages=lists[1])
