"""Whole rollouts by a user function (--rollout-function-path), called on rank 0.

generate_rollout(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput |
list[list[Sample]]
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from slime_tis.errors import CustomFunctionError, quoted
from slime_tis.trainer.agents.custom_generate import GenerateFunction, NoSample
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import Sample, by_rollout
from slime_tis.trainer.data.user_values import typed_value
from slime_tis.trainer.rank_collectives import on_rank_zero
from slime_tis.user_functions import calling, describe
from slime_tis.user_functions.tensors import check_metrics

Groups = list[list[Sample]]
OPTION, PREFIX = "rollout_function_path", "rollout/"


@dataclass
class RolloutFnTrainOutput:
    """slime's return value of a rollout function."""

    samples: list[list[Sample]]
    """--rollout-batch-size groups of --n-samples-per-prompt rollouts."""
    metrics: dict[str, Any] | None = None
    """Logged numbers; names get the prefix rollout/ if it is missing."""


class PromptSource:
    """The prompts of the file as slime's data source gives them, read-only; empty samples without a file."""

    def __init__(self, dataset: PromptDataset, n_samples: int) -> None:
        self._dataset, self._n_samples = dataset, n_samples

    def get_samples(self, num_samples: int) -> Groups:
        """Returns the next prompts as groups of samples without a response."""
        if not self._dataset.prompts:
            return [[Sample() for _ in range(self._n_samples)] for _ in range(num_samples)]
        return [
            [
                Sample(prompt_row=prompt, tokens=list(prompt.token_ids))
                for _ in range(self._n_samples)
            ]
            for prompt in self._dataset.next_batch(num_samples)
        ]

    def add_samples(self, samples: Groups) -> None:
        """Raises RuntimeError."""
        raise RuntimeError(
            "prompts of a file are read-only; --data-source-path takes samples back."
        )

    def __len__(self) -> int:
        return len(self._dataset)


@dataclass(kw_only=True)
class CustomRollout:
    """Rollouts by the user's function."""

    checks: GenerateFunction
    """The function of --rollout-function-path, and limits of its samples."""
    dataset: PromptDataset | CustomDataSource
    config: RolloutConfig

    def __call__(self, rollout_id: int) -> tuple[Groups, dict[str, float]]:
        """Returns the groups of a rollout and the function's metrics; a collective."""
        dataset, function, n_samples = (
            self.dataset,
            self.checks.function,
            self.config.n_samples_per_prompt,
        )
        source = (
            PromptSource(dataset, n_samples)
            if isinstance(dataset, PromptDataset)
            else dataset.source
        )

        def call() -> tuple[Groups, dict[str, float], dict[str, Any]]:
            with calling(function):
                returned = function(self.checks.args, rollout_id, source, evaluation=False)
                fields = getattr(returned, "samples", returned), getattr(returned, "metrics", None)
                samples, values = typed_value(OPTION, function, fields)
                metrics = {
                    name if name.startswith(PREFIX) else f"{PREFIX}{name}": v
                    for name, v in (values or {}).items()
                }
                check_metrics(describe(function), metrics)
                if not all(map(math.isfinite, metrics.values())):
                    raise CustomFunctionError(
                        f"{describe(function)} returned {metrics} as metrics; return finite"
                        " numbers."
                    )
                return self._groups(samples), metrics, dataset.state_dict()

        groups, metrics, state = on_rank_zero(call)
        if isinstance(dataset, PromptDataset):
            dataset.load_state_dict(state)  # rank 0 took the prompts
        return groups, metrics

    def _groups(self, returned: list[list[Any]]) -> Groups:
        name, size = describe(self.checks.function), self.config.rollout_batch_size
        n_samples = self.config.n_samples_per_prompt
        if len(returned) != size:
            raise CustomFunctionError(
                f"{name} returned {len(returned)} groups; return {size} (--rollout-batch-size)."
            )
        groups: Groups = []
        for index, group in enumerate(returned):
            samples = [
                one for part in group for one in (part if isinstance(part, list) else [part])
            ]
            rollouts = by_rollout([self._checked(sample) for sample in samples])
            if len(rollouts) != n_samples:
                raise CustomFunctionError(
                    f"{name} returned {len(rollouts)} samples in group {index}; return {n_samples} "
                    "(--n-samples-per-prompt), segments of one with the same rollout_id."
                )
            for number, rollout in enumerate(rollouts, start=index * n_samples):
                for sample in rollout:
                    sample.group_index, sample.index, sample.rollout_id = index, number, number
            groups.append([sample for rollout in rollouts for sample in rollout])
        return groups

    def _checked(self, sample: Any) -> Sample:
        name = describe(self.checks.function)
        if not isinstance(sample, Sample):
            raise CustomFunctionError(f"{name} returned {quoted(sample)}; return samples.")
        if sample.rollout_log_probs is None and any(sample.loss_mask or [1]):
            raise CustomFunctionError(
                f"{name} returned a sample without rollout_log_probs; give 0.0 for observations."
            )
        fresh = Sample(prompt=sample.prompt, prompt_row=sample.prompt_row, label=sample.label)
        try:
            (checked,) = self.checks.checked(sample, fresh, ())  # the engine recorded no requests
        except NoSample as error:
            raise CustomFunctionError(error.args[1]) from None
        return replace(checked, rollout_id=sample.rollout_id)
