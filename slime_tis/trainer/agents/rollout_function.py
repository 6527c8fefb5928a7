"""Calls a user function that makes complete rollouts (--rollout-function-path), on rank 0.

def generate_rollout(args, rollout_id, data_source, evaluation=False)
-> RolloutFnTrainOutput | list[list[Sample]]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_tis.errors import CustomFunctionError, quoted
from slime_tis.trainer.agents.custom_generate import GenerateFunction
from slime_tis.trainer.agents.returned_samples import NoSample
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import Prompt, Sample, by_rollout
from slime_tis.trainer.data.user_values import typed_value
from slime_tis.trainer.rank_collectives import on_rank_zero
from slime_tis.user_functions import calling, describe
from slime_tis.user_functions.tensors import check_metrics

Groups = list[list[Sample]]
OPTION = "rollout_function_path"
PREFIX = "rollout/"
"""Prefix of the function's metrics."""


@dataclass
class RolloutFnTrainOutput:
    """slime's return value of a rollout function."""

    samples: list[list[Sample]]
    """--rollout-batch-size groups of --n-samples-per-prompt rollouts."""
    metrics: dict[str, Any] | None = None
    """Logged numbers; the prefix rollout/ is added to names without it."""


class PromptSource:
    """The prompts of the file, read-only, with the methods of slime's data source."""

    def __init__(self, dataset: PromptDataset, n_samples: int) -> None:
        self._dataset = dataset
        self._n_samples = n_samples

    def get_samples(self, num_samples: int) -> Groups:
        """Returns groups of samples without a response: the next prompts, or none without a file.

        Args:
            num_samples: Number of groups, as in slime.
        """
        prompts: Sequence[Prompt | None] = [None] * num_samples
        if self._dataset.prompts:
            prompts = self._dataset.next_batch(num_samples)
        groups: Groups = []
        for prompt in prompts:
            tokens: tuple[int, ...] = ()
            if prompt is not None:
                tokens = prompt.token_ids
            group = []
            for _ in range(self._n_samples):
                group.append(Sample(prompt_row=prompt, tokens=list(tokens)))
            groups.append(group)
        return groups

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
    """The function of --rollout-function-path, and limits of the samples that it returns."""
    dataset: PromptDataset | CustomDataSource
    config: RolloutConfig

    def __call__(self, rollout_id: int) -> tuple[Groups, dict[str, float]]:
        """Returns the groups of a rollout and the function's metrics; a collective."""
        dataset = self.dataset
        function = self.checks.function
        source: Any
        if isinstance(dataset, PromptDataset):
            source = PromptSource(dataset, self.config.n_samples_per_prompt)
        else:
            source = dataset.source

        def call() -> tuple[Groups, dict[str, float], dict[str, Any]]:
            with calling(function):
                returned = function(self.checks.args, rollout_id, source, evaluation=False)
                # A list of groups, RolloutFnTrainOutput or slime's class of that name.
                fields = (
                    getattr(returned, "samples", returned),
                    getattr(returned, "metrics", None),
                )
                samples, values = typed_value(OPTION, function, fields)
                metrics = {}
                for name, value in (values or {}).items():
                    metrics[PREFIX + name.removeprefix(PREFIX)] = value
                check_metrics(describe(function), metrics)
                if not all(map(math.isfinite, metrics.values())):
                    raise CustomFunctionError(
                        f"{describe(function)} returned {metrics} as metrics; return finite"
                        " numbers."
                    )
                return self._groups(samples), metrics, dataset.state_dict()

        groups, metrics, state = on_rank_zero(call)
        if isinstance(dataset, PromptDataset):
            # Only rank 0 took prompts.
            dataset.load_state_dict(state)
        return groups, metrics

    def _groups(self, returned: list[list[Any]]) -> Groups:
        """Returns the checked and numbered samples; a rollout may be a list of segments."""
        name = describe(self.checks.function)
        size = self.config.rollout_batch_size
        n_samples = self.config.n_samples_per_prompt
        if len(returned) != size:
            raise CustomFunctionError(
                f"{name} returned {len(returned)} groups; return {size} (--rollout-batch-size)."
            )
        groups: Groups = []
        for index, group in enumerate(returned):
            samples: list[Sample] = []
            for item in group:
                segments = [item]
                if isinstance(item, list):
                    segments = item
                samples += map(self._checked, segments)
            rollouts = by_rollout(samples)
            if len(rollouts) != n_samples:
                raise CustomFunctionError(
                    f"{name} returned {len(rollouts)} samples in group {index}; return {n_samples} "
                    "(--n-samples-per-prompt), segments of one with the same rollout_id."
                )
            for number, rollout in enumerate(rollouts, start=index * n_samples):
                for sample in rollout:
                    sample.group_index = index
                    sample.index = number
                    sample.rollout_id = number
            groups.append(samples)
        return groups

    def _checked(self, sample: Any) -> Sample:
        """Returns the sample in the form that training takes."""
        name = describe(self.checks.function)
        if not isinstance(sample, Sample):
            raise CustomFunctionError(f"{name} returned {quoted(sample)}; return samples.")
        # Without a mask, every response token is trained on.
        if sample.rollout_log_probs is None and any(sample.loss_mask or [1]):
            raise CustomFunctionError(
                f"{name} returned a sample without rollout_log_probs; give 0.0 for observations."
            )
        fresh = Sample(prompt=sample.prompt, prompt_row=sample.prompt_row, label=sample.label)
        try:
            # No requests: the engine of the function is unknown.
            (checked,) = self.checks.checked(sample, fresh, [])
        except NoSample as error:
            raise CustomFunctionError(error.args[1]) from None
        return replace(checked, rollout_id=sample.rollout_id)
