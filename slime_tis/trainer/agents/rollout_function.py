"""Whole rollouts by a user function (--rollout-function-path), called on rank 0 and held to a contract.

generate_rollout(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput | list[list[Sample]]
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.agents.custom_generate import GenerateFunction, NoSample
from slime_tis.trainer.agents.sampled_tokens import RecordedEngine
from slime_tis.trainer.collectives import on_rank_zero
from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import Prompt, Sample, by_rollout
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.user_functions import calling, describe, load_user_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Groups = list[list[Sample]]


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns, as slime has it."""

    samples: list[list[Sample]]
    """--rollout-batch-size groups of --n-samples-per-prompt rollouts."""
    metrics: dict[str, Any] | None = None
    """Numbers to be logged, under rollout/ where their names do not begin so."""


class PromptSource:
    """The prompts of the file as slime's data source gives them, read-only."""

    def __init__(self, dataset: PromptDataset, n_samples: int) -> None:
        self._dataset, self._n_samples = dataset, n_samples

    def get_samples(self, num_samples: int) -> Groups:
        """The next prompts, `n_samples` samples without a response for each."""
        return [
            [Sample(prompt=prompt, tokens=list(prompt.token_ids)) for _ in range(self._n_samples)]
            for prompt in self._dataset.next_batch(num_samples)
        ]

    def add_samples(self, samples: Groups) -> None:
        """Refuses to take samples back.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("prompts of a file are read-only; --data-source-path takes samples back.")

    def __len__(self) -> int:
        return len(self._dataset)


@dataclass(kw_only=True)
class CustomRollout:
    """Rollouts by the user's function."""

    function: Callable[..., Any]
    checks: GenerateFunction
    """What every sample is held to, with the function's arguments."""
    dataset: PromptDataset | CustomDataSource
    rollout_batch_size: int
    n_samples: int

    def __call__(self, rollout_id: int) -> tuple[Groups, dict[str, float]]:
        """The groups of a rollout, and the function's metrics; a collective.

        Raises:
            CustomFunctionError: the function raised, or returned what its contract does not allow.
        """
        dataset = self.dataset
        source = PromptSource(dataset, self.n_samples) if isinstance(dataset, PromptDataset) else dataset.source

        def call() -> tuple[Groups, dict[str, float], dict[str, Any]]:
            with calling(self.function):
                returned = self.function(self.checks.args, rollout_id, source, evaluation=False)
                groups = self._groups(getattr(returned, "samples", returned))
                metrics = self._metrics(getattr(returned, "metrics", None))
            return groups, metrics, dataset.state_dict()

        groups, metrics, state = on_rank_zero(call)
        if isinstance(dataset, PromptDataset):
            dataset.load_state_dict(state)  # rank 0 took the prompts
        return groups, metrics

    def _groups(self, returned: Any) -> Groups:
        name = describe(self.function)
        if not isinstance(returned, list | tuple) or len(returned) != self.rollout_batch_size:
            shown = f"{len(returned)} groups" if isinstance(returned, list | tuple) else one_line(repr(returned))
            raise CustomFunctionError(
                f"{name} returned {shown}; return {self.rollout_batch_size} groups (--rollout-batch-size)."
            )
        groups: Groups = []
        for place, group in enumerate(returned):
            samples = [one for part in group for one in (part if isinstance(part, list) else [part])]
            wrong = next((one for one in samples if not isinstance(one, Sample)), None)
            if wrong is not None:
                raise CustomFunctionError(f"{name} returned {one_line(repr(wrong))} in group {place}; return samples.")
            rollouts = by_rollout(samples)
            if len(rollouts) != self.n_samples:
                raise CustomFunctionError(
                    f"{name} returned {len(rollouts)} samples in group {place}; return {self.n_samples} "
                    "(--n-samples-per-prompt), segments of one with the same rollout_id."
                )
            first = place * self.n_samples
            groups.append(
                [
                    replace(self._checked(one), group_index=place, index=first + number, rollout_id=first + number)
                    for number, rollout in enumerate(rollouts)
                    for one in rollout
                ]
            )
        return groups

    def _checked(self, sample: Sample) -> Sample:
        """The sample in the form that training takes."""
        if sample.rollout_log_probs is None and any(sample.loss_mask or [1]):
            raise CustomFunctionError(
                f"{describe(self.function)} returned a sample without rollout_log_probs; give the log-prob that each "
                "token was sampled with, 0.0 for observations."
            )
        row = sample.prompt if isinstance(sample.prompt, Prompt) else sample.prompt_row
        given = Sample(prompt=sample.prompt, prompt_row=row, label=sample.label)
        try:
            # No engine of ours has sampled: what the function says of its tokens is all there is.
            (found,) = self.checks.checked(sample, given, RecordedEngine(None, given))  # type: ignore[arg-type]
        except NoSample as error:
            raise CustomFunctionError(str(error)) from None
        return found

    def _metrics(self, returned: Any) -> dict[str, float]:
        if returned is None:
            return {}
        name = describe(self.function)
        if not isinstance(returned, Mapping):
            raise CustomFunctionError(
                f"{name} returned {one_line(repr(returned))} as metrics; return a dict of numbers."
            )
        metrics = {}
        for key, value in returned.items():
            if not isinstance(key, str) or not key.isprintable() or not math.isfinite(float(value)):
                raise CustomFunctionError(
                    f"{name} returned {one_line(repr(value))} as metric {one_line(repr(key))}; return finite numbers "
                    "under printable names."
                )
            metrics[key if key.startswith("rollout/") else f"rollout/{key}"] = float(value)
        return metrics


def load_rollout_function(path: str) -> Callable[..., Any]:
    """The function at a path, which can be called as the contract says.

    Raises:
        CustomFunctionError: it cannot be loaded or called so.
    """
    return load_user_function("rollout_function_path", path)


def build_rollout_function(
    config: RolloutConfig,
    args: Namespace,
    tokenizer: PreTrainedTokenizerBase,
    dataset: PromptDataset | CustomDataSource,
    *,
    sizes: ModelSizes,
    version: Callable[[], int],
    address: tuple[str, int] | None,
) -> CustomRollout | None:
    """The function of --rollout-function-path; None without.

    Args:
        config: with the path and the sizes of a rollout.
        args: given to the function.
        tokenizer: of the model.
        dataset: where it takes prompts.
        sizes: of the model.
        version: of the rollout engine's weights.
        address: host and port of the rollout engine; None where it has none.

    Raises:
        CustomFunctionError: it cannot be loaded or called.
    """
    if config.rollout_function_path is None:
        return None
    function = load_rollout_function(config.rollout_function_path)
    if address is not None:
        args = Namespace(**{**vars(args), "sglang_router_ip": address[0], "sglang_router_port": address[1]})
    limits = [limit for limit in (sizes.context_len, config.rollout_max_context_len) if limit is not None]
    checks = GenerateFunction(
        function=function,
        args=args,
        tokenizer=tokenizer,
        vocab_size=sizes.vocab_size,
        context_len=min(limits, default=None),
        timeout=math.inf,
        retokenization="error",
        version=version,
    )
    return CustomRollout(
        function=function,
        checks=checks,
        dataset=dataset,
        rollout_batch_size=config.rollout_batch_size,
        n_samples=config.n_samples_per_prompt,
    )
