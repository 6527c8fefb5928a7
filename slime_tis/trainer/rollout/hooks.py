"""User functions around a rollout, in slime's signatures.

Rank 0 calls them, and sends their results and their edits of samples to the other ranks.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self, TypeVar

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import Sample, SampleStatus
from slime_tis.trainer.data.user_values import SampleEdits, handed_out, typed_value
from slime_tis.trainer.rank_collectives import on_rank_zero
from slime_tis.trainer.rollout.filter_hub import DynamicFilterOutput
from slime_tis.trainer.rollout.prefetch import Choose
from slime_tis.user_functions import calling, describe, load_user_function

Result = TypeVar("Result")
Function = Callable[..., Any]
BUFFER_FILTER = "buffer_filter_path"
DYNAMIC_FILTER = "dynamic_sampling_filter_path"
SAMPLE_FILTER = "rollout_sample_filter_path"
ALL_SAMPLES = "rollout_all_samples_process_path"
REWARDS = "custom_reward_post_process_path"
ROLLOUT_LOG = "custom_rollout_log_function_path"
EVAL_LOG = "custom_eval_rollout_log_function_path"
HOOKS = (BUFFER_FILTER, DYNAMIC_FILTER, SAMPLE_FILTER, ALL_SAMPLES, REWARDS, ROLLOUT_LOG, EVAL_LOG)
"""Options that name a function, as fields of `RolloutConfig`."""
MAX_REASON_LENGTH = 100
"""Characters of a filter's reason, which becomes part of a metric's name."""


@dataclass(frozen=True, kw_only=True)
class RolloutHooks:
    """The user's functions around a rollout; each method is a collective."""

    args: Namespace
    functions: dict[str, Function]

    @classmethod
    def load(cls, config: RolloutConfig, args: Namespace) -> Self:
        """Loads the functions; raises CustomFunctionError if one cannot be loaded or called."""
        functions: dict[str, Function] = {}
        for option in HOOKS:
            path = getattr(config, option)
            if path is not None:
                functions[option] = load_user_function(option, path)
        return cls(args=args, functions=functions)

    @property
    def choose(self) -> Choose | None:
        """The buffer filter; None without one."""
        if BUFFER_FILTER not in self.functions:
            return None
        return self._choose

    def _choose(self, groups: Sequence[list[Sample]], count: int) -> tuple[list[int], list[int]]:
        """Returns the indices of the chosen groups, and of the groups left in the buffer.

        As in slime, the filter may remove groups from its buffer.
        """
        buffer = list(groups)
        # By identity: the filter returns the lists it got, and two groups may have equal samples.
        indices = {id(group): index for index, group in enumerate(groups)}

        def call(function: Function) -> tuple[list[int], list[int]]:
            output = function(self.args, None, buffer, count)
            returned = typed_value(BUFFER_FILTER, function, output)
            chosen = [indices.get(id(group), -1) for group in returned]
            left = []
            for group in buffer:
                index = indices.get(id(group), -1)
                if index not in chosen:
                    left.append(index)
            is_foreign = -1 in chosen or -1 in left
            has_duplicates = len(set(chosen)) < len(chosen)
            if is_foreign or has_duplicates or len(chosen) > count:
                raise CustomFunctionError(
                    f"{describe(function)} returned {len(returned)} groups; return at most"
                    f" num_samples, {count}, different lists of the buffer, and leave no other list"
                    " in it."
                )
            return chosen, left

        return self._call(BUFFER_FILTER, groups, call)

    @property
    def judge(self) -> Callable[[Sequence[list[Sample]]], list[DynamicFilterOutput]] | None:
        """The dynamic sampling filter for the groups of a batch; None without one."""
        if DYNAMIC_FILTER not in self.functions:
            return None
        return self._judge

    def _judge(self, groups: Sequence[list[Sample]]) -> list[DynamicFilterOutput]:
        """Returns the filter's verdict per group."""

        def call(function: Function) -> list[DynamicFilterOutput]:
            return [_verdict(function(self.args, list(group)), function) for group in groups]

        return self._call(DYNAMIC_FILTER, groups, call)

    def process(self, option: str, groups: Sequence[list[Sample]], *more: object) -> None:
        """Calls the function of SAMPLE_FILTER or ALL_SAMPLES, which may edit the samples."""

        def call(function: Function) -> None:
            function(self.args, list(map(list, groups)), *more)

        if option in self.functions:
            self._call(option, groups, call)

    def shape_rewards(
        self, groups: Sequence[list[Sample]]
    ) -> tuple[list[float], list[float]] | None:
        """Returns raw rewards and advantages, one per sample; None without a user function."""
        if REWARDS not in self.functions:
            return None
        samples = list(chain.from_iterable(groups))

        def call(function: Function) -> tuple[list[float], list[float]]:
            output = function(self.args, list(samples))
            raw, rewards = typed_value(REWARDS, function, output)
            # NaN fails the comparison, too.
            are_valid = all(abs(value) <= MAX_REWARD for value in [*raw, *rewards])
            if not are_valid or not len(raw) == len(rewards) == len(samples):
                raise CustomFunctionError(
                    f"{describe(function)} returned {len(raw)} raw_rewards and {len(rewards)}"
                    f" rewards for {len(samples)} samples; return one of each per sample, finite"
                    f" and at most {MAX_REWARD:g} in magnitude."
                )
            return raw, rewards

        return self._call(REWARDS, groups, call)

    def logs_rollout(
        self,
        rollout_id: int,
        groups: Sequence[list[Sample]],
        metrics: Mapping[str, float],
        seconds: float,
    ) -> bool:
        """Calls the user's log function; returns whether the program must log the metrics too."""
        samples = list(chain.from_iterable(groups))
        return self._log(
            ROLLOUT_LOG, groups, rollout_id, self.args, samples, dict(metrics), seconds
        )

    def logs_evaluation(self, rollout_id: int, sets: Mapping[str, Sequence[Sample]]) -> bool:
        """Calls the log function for held-out prompts; returns whether the program must log too."""
        data = {}
        for name, samples in sets.items():
            data[name] = {
                "rewards": [sample.reward for sample in samples],
                "truncated": [sample.status is SampleStatus.TRUNCATED for sample in samples],
                "samples": list(samples),
            }
        groups = list(map(list, sets.values()))
        # slime's signature has `extra_metrics` last; this trainer has none.
        return self._log(EVAL_LOG, groups, rollout_id, self.args, data, None)

    def _log(self, option: str, groups: Sequence[list[Sample]], *arguments: object) -> bool:
        """Calls a log function; returns whether the program must log the metrics too."""
        if option not in self.functions:
            return True
        return self._call(option, groups, lambda log: not log(*arguments))

    def _call(
        self, option: str, groups: Sequence[list[Sample]], call: Callable[[Function], Result]
    ) -> Result:
        """Calls a function on rank 0, and applies its edits to the samples of every rank."""
        function = self.functions[option]
        samples = list(chain.from_iterable(groups))

        def on_this_rank() -> tuple[Result, list[SampleEdits]]:
            before = [(handed_out(sample), sample.reward) for sample in samples]
            edits = []
            with calling(function):
                result = call(function)
                for sample, (earlier, reward) in zip(samples, before, strict=True):
                    edits.append(SampleEdits.since(earlier, sample, describe(function)))
                    if sample.reward is not reward:
                        raise CustomFunctionError(
                            f"{describe(function)} changed the reward of a sample of prompt"
                            f" {sample.prompt_index}; --custom-reward-post-process-path shapes"
                            " rewards."
                        )
            return result, edits

        result, edits = on_rank_zero(on_this_rank)
        for sample, edit in zip(samples, edits, strict=True):
            edit.apply(sample)
        return result


def _verdict(output: Any, function: Function) -> DynamicFilterOutput:
    """Returns the verdict of a filter, which returned a bool, slime's class or ours."""
    keep = getattr(output, "keep", output)
    # A comparison of tensors or numpy numbers returns one, not a bool.
    if hasattr(keep, "item"):
        keep = keep.item()
    reason = getattr(output, "reason", None)
    if reason is not None:
        reason = one_line(str(reason), MAX_REASON_LENGTH)
    return DynamicFilterOutput(
        keep=typed_value(DYNAMIC_FILTER, function, keep),
        reason=reason,
        keep_when_insufficient=bool(getattr(output, "keep_when_insufficient", False)),
    )
