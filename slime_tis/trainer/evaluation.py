"""Held-out accuracy while a run trains."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby

from transformers import PreTrainedTokenizerBase

from slime_tis.hf_directory import ModelSizes
from slime_tis.progress import watched
from slime_tis.trainer.agents.custom_generate import GenerateFunction, mark_failed_samples
from slime_tis.trainer.configs.eval_config import EvalSet
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.prompts import load_prompts, prompt_options
from slime_tis.trainer.data.sample import Prompt, Sample, SampleStatus, by_rollout
from slime_tis.trainer.engines.build import evaluation_sampling
from slime_tis.trainer.engines.rollout_engine import RolloutEngine
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.rewards.rewards import assign_rewards
from slime_tis.trainer.rollout.rollout_metrics import (
    has_status,
    mean_parts,
    pass_rates,
    rollout_reward,
)

EVALUATION_OPTIONS = (
    "eval_config",
    "eval_prompt_data",
    "n_samples_per_eval_prompt",
    "eval_temperature",
    "eval_top_p",
    "eval_top_k",
    "eval_max_response_len",
    "rollout_stop",
    "rollout_stop_token_ids",
)
"""Options that define the held-out accuracy."""


def is_due(interval: int | None, rollout_id: int, num_rollout: int) -> bool:
    """Returns whether it is the last rollout, or a multiple of `interval`."""
    return rollout_id == num_rollout or bool(interval and rollout_id % interval == 0)


@dataclass(kw_only=True)
class Evaluation:
    """Evaluates the policy on held-out prompt sets, and stores the first and the last accuracy."""

    prompts: dict[str, list[Prompt]]
    """Prompts by set name; the run's accuracy is that of the first set."""
    reward: Callable[[list[Sample]], list[float]]
    logs: Callable[[int, Mapping[str, Sequence[Sample]]], bool]
    """Calls the user's log function with the rollout's number and the answers; returns whether to
    log metrics."""
    config: RolloutConfig
    engine: TrainingEngine
    build_engine: Callable[[], RolloutEngine]
    """Builds the engine that answers, at the first evaluation."""
    shows_progress: bool = False
    """Whether this process shows the progress."""
    generate: GenerateFunction | None = None
    """The user's function that makes the answers; None lets the engine answer."""
    first_accuracy: float = math.nan
    """Accuracy before training, or of the run's first evaluation; NaN before that."""
    last_accuracy: float = math.nan
    is_first: bool = False
    """Whether the last evaluation is the run's first."""
    is_binary: bool = True
    """Whether all rewards of the last evaluation are 0 or 1, so that their mean is an accuracy."""
    is_overdue: bool = False
    """Whether a signal ended an evaluation, which the resumed run repeats."""
    _answers: RolloutEngine | None = field(default=None, init=False)

    def is_due_first(self, rollout_id: int) -> bool:
        """Returns whether the run starts with an evaluation.

        It does before training, or to repeat an evaluation that a signal ended.
        """
        before = rollout_id == 0 and not self.config.skip_eval_before_train
        return bool(self.prompts) and (before or self.is_overdue)

    @property
    def summary(self) -> str:
        """The accuracies, or mean rewards, before and after training.

        Only one value if the run was evaluated once.
        """
        name = "mean eval reward"
        if self.is_binary:
            name = "eval accuracy"
        before = ""
        if not self.is_first:
            before = f"{self.first_accuracy:.2f} -> "
        return f"{name}: {before}{self.last_accuracy:.2f}"

    def __call__(self, version: int, rollout_id: int) -> dict[str, float]:
        """Evaluates these weights; a collective.

        Args:
            version: Optimizer steps made so far, the version of the weights.
            rollout_id: Number of the rollout, for the user's log function.

        Returns:
            The accuracy as eval/SET and other metrics as eval/SET/NAME; empty if the user's
            function logs them.
        """
        if not self.prompts:
            return {}
        metrics: dict[str, float] = {}
        answers: dict[str, list[Sample]] = {}
        sets = {held_out.name: held_out for held_out in self.config.eval_sets}
        with self.engine.timer("eval"):
            # At the first evaluation, because a run may never need the engine's memory.
            if self._answers is None:
                self._answers = self.build_engine()
            if self._answers.weight_version != version:
                self._answers.update_weights(self.engine.named_hf_tensors, version)
            for name, prompts in self.prompts.items():
                answers[name] = self._answer(self._answers, prompts, sets[name])
                values = accuracy_metrics(answers[name])
                metrics[f"eval/{name}"] = values.pop("accuracy")
                for key, value in values.items():
                    metrics[f"eval/{name}/{key}"] = value
                if self.config.log_passrate:
                    # The answers of a prompt are adjacent.
                    groups = groupby(answers[name], key=lambda answer: answer.group_index)
                    rates = pass_rates([list(group) for _, group in groups])
                    for key, value in rates.items():
                        metrics[f"eval/{name}-{key}"] = value
        first_set = next(iter(self.prompts))
        self.last_accuracy = metrics[f"eval/{first_set}"]
        rewards = {rollout_reward(answer) for answer in by_rollout(answers[first_set])}
        self.is_binary = rewards <= {0.0, 1.0}
        self.is_first = math.isnan(self.first_accuracy)
        if self.is_first:
            self.first_accuracy = self.last_accuracy
        self.is_overdue = False
        if not self.logs(rollout_id, answers):
            return {}
        return metrics

    def _answer(
        self, engine: RolloutEngine, prompts: Sequence[Prompt], held_out: EvalSet
    ) -> list[Sample]:
        """Samples answers to the prompts of a set and scores them."""
        sampling = evaluation_sampling(self.config, held_out)
        function = None
        if self.generate is not None:
            function = self.generate.bind(sampling, evaluation=True)
        answers = engine.submit(
            prompts,
            sampling,
            # The same at every evaluation, so that two accuracies differ only by the weights.
            seed=0,
            function=function,
            concurrency=self.config.generate_concurrency,
        )
        title = f"answers of {held_out.name}"
        with watched(title, lambda: answers.progress, shown=self.shows_progress):
            groups = answers.result()
        if function is not None:
            mark_failed_samples(groups)
        assign_rewards(groups, self.reward)
        return list(chain.from_iterable(groups))


def load_evaluation_prompts(
    config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, sizes: ModelSizes | None = None
) -> dict[str, list[Prompt]]:
    """Returns the held-out prompt sets by name; see `load_prompts`."""
    options = prompt_options(config)
    keys = {
        "input_key": config.eval_input_key,
        "label_key": config.eval_label_key,
        "tool_key": config.eval_tool_key,
    }
    for name, key in keys.items():
        if key is not None:
            options[name] = key
    prompts = {}
    for held_out in config.eval_sets:
        own = {}
        for name in ("input_key", "label_key", "metadata_key", "tool_key"):
            if getattr(held_out, name) is not None:
                own[name] = getattr(held_out, name)
        loaded = load_prompts(held_out.path, tokenizer, sizes=sizes, **{**options, **own})
        if held_out.rm_type is not None:
            # As in slime, the reward of a set replaces the reward of its rows.
            reward = {"rm_type": held_out.rm_type}
            loaded = [replace(prompt, metadata=prompt.metadata | reward) for prompt in loaded]
        prompts[held_out.name] = loaded
    return prompts


def accuracy_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns means over scored answers; the segments of an answer count as one answer."""
    answers = by_rollout(samples)
    rewards = [rollout_reward(answer) for answer in answers]
    lengths = [sample.effective_response_length for sample in samples]
    truncated = [has_status(answer, SampleStatus.TRUNCATED) for answer in answers]
    metrics = {
        "accuracy": sum(rewards) / len(answers),
        "response_length": sum(lengths) / len(answers),
        "truncated_fraction": sum(truncated) / len(answers),
    }
    for name, value in mean_parts(samples).items():
        metrics[f"reward/{name}"] = value
    return metrics
