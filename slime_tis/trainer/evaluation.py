"""Held-out accuracy while a run trains."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.agents.custom_generate import GenerateFunction, mark_failed_samples
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.prompts import load_prompts, prompt_options
from slime_tis.trainer.data.sample import Prompt, Sample, SampleStatus, by_rollout
from slime_tis.trainer.engines.build import evaluation_sampling
from slime_tis.trainer.engines.rollout_engine import RolloutEngine
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.rewards.rewards import assign_rewards
from slime_tis.trainer.rollout.rollout_metrics import has_status, mean_parts, rollout_reward

EVALUATION_OPTIONS = (
    "eval_prompt_data",
    "n_samples_per_eval_prompt",
    "eval_temperature",
    "eval_top_p",
    "eval_max_response_len",
)
"""Options that decide what a held-out accuracy means."""


def is_due(interval: int | None, rollout_id: int, num_rollout: int) -> bool:
    """Returns whether something is due after a number of rollouts: every `interval` rollouts and after the last one."""
    return rollout_id == num_rollout or bool(interval and rollout_id % interval == 0)


@dataclass(kw_only=True)
class Evaluation:
    """Evaluates the policy on the held-out prompt sets and stores the first and the last accuracy."""

    prompts: dict[str, list[Prompt]]
    """Prompts by the name of their set; the accuracy of the first set is the accuracy of the
    run."""
    reward: Callable[[list[Sample]], list[float]]
    logs: Callable[[int, Mapping[str, Sequence[Sample]]], bool]
    """Calls the user's log function with the rollout's number and the answers; returns whether to
    log metrics."""
    config: RolloutConfig
    engine: TrainingEngine
    build_engine: Callable[[], RolloutEngine]
    """Builds the engine that answers, at the first evaluation."""
    generate: GenerateFunction | None = None
    """The user's function that makes the answers; None lets the engine answer."""
    first_accuracy: float = math.nan
    """Before training, or where the run was first evaluated; NaN before that."""
    last_accuracy: float = math.nan
    is_first: bool = False
    """Whether the last evaluation is the run's first."""
    is_binary: bool = True
    """Whether all rewards of the last evaluation are 0 or 1, so that their mean is an accuracy."""
    is_overdue: bool = False
    """Whether a signal ended an evaluation, which a resumed run makes."""
    _answers: RolloutEngine | None = field(default=None, init=False)

    def is_due_first(self, rollout_id: int) -> bool:
        """Returns whether the loop starts with an evaluation: before training, or to repeat an interrupted one."""
        before = rollout_id == 0 and not self.config.skip_eval_before_train
        return bool(self.prompts) and (before or self.is_overdue)

    @property
    def summary(self) -> str:
        """The accuracies, or mean rewards, before and after training; only the last if it is the first."""
        name = "eval accuracy" if self.is_binary else "mean eval reward"
        before = "" if self.is_first else f"{self.first_accuracy:.2f} -> "
        return f"{name}: {before}{self.last_accuracy:.2f}"

    def __call__(self, version: int, rollout_id: int) -> dict[str, float]:
        """Returns held-out accuracy and lengths of this version as eval/SET and eval/SET/…; a collective."""
        if not self.prompts:
            return {}
        metrics: dict[str, float] = {}
        answers: dict[str, list[Sample]] = {}
        with self.engine.timer("eval"):
            if self._answers is None:
                self._answers = self.build_engine()
            if self._answers.weight_version != version:
                self._answers.update_weights(self.engine.named_hf_tensors, version)
            for name, prompts in self.prompts.items():
                answers[name] = self._answer(self._answers, prompts)
                values = accuracy_metrics(answers[name])
                metrics[f"eval/{name}"] = values.pop("accuracy")
                metrics |= {f"eval/{name}/{key}": value for key, value in values.items()}
        first_set = next(iter(self.prompts))
        self.last_accuracy = metrics[f"eval/{first_set}"]
        rewards = {rollout_reward(answer) for answer in by_rollout(answers[first_set])}
        self.is_binary = rewards <= {0.0, 1.0}
        self.is_first = math.isnan(self.first_accuracy)
        if self.is_first:
            self.first_accuracy = self.last_accuracy
        self.is_overdue = False
        return metrics if self.logs(rollout_id, answers) else {}

    def _answer(self, engine: RolloutEngine, prompts: Sequence[Prompt]) -> list[Sample]:
        sampling, concurrency = evaluation_sampling(self.config), self.config.generate_concurrency
        function = None if self.generate is None else self.generate.bind(sampling, evaluation=True)
        groups = engine.submit(
            prompts, sampling, 0, function=function, concurrency=concurrency
        ).result()
        if function is not None:
            mark_failed_samples(groups)
        assign_rewards(groups, self.reward)
        return [sample for group in groups for sample in group]


def load_evaluation_prompts(
    config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, sizes: ModelSizes | None = None
) -> dict[str, list[Prompt]]:
    """Returns the held-out prompt sets by name; see `load_prompts`."""
    keys = {
        "input_key": config.eval_input_key,
        "label_key": config.eval_label_key,
        "tool_key": config.eval_tool_key,
    }
    options = prompt_options(config) | {name: key for name, key in keys.items() if key is not None}
    return {
        name: load_prompts(path, tokenizer, sizes=sizes, **options)
        for name, path in config.eval_prompt_sets
    }


def accuracy_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns means over scored answers, in which the segments of an answer count together."""
    answers = by_rollout(samples)
    return {
        "accuracy": sum(map(rollout_reward, answers)) / len(answers),
        "response_length": (
            sum(sample.effective_response_length for sample in samples) / len(answers)
        ),
        "truncated_fraction": (
            sum(has_status(answer, SampleStatus.TRUNCATED) for answer in answers) / len(answers)
        ),
        **{f"reward/{key}": value for key, value in mean_parts(samples).items()},
    }
