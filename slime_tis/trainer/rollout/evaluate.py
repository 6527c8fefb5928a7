"""How well the policy answers held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slime_tis.trainer.agents.custom_generate import GenerateFunction, settle
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.data.sample import Prompt, Sample, SampleStatus, Sampling, by_rollout
from slime_tis.trainer.engines.engine import RolloutEngine
from slime_tis.trainer.rewards.rewards import assign_rewards
from slime_tis.trainer.rollout.metrics import has_status, mean_parts, rollout_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_tis.hf_directory import ModelSizes
    from slime_tis.trainer.options.rollout import RolloutConfig


def load_evaluation_prompts(
    config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, sizes: ModelSizes | None = None
) -> dict[str, list[Prompt]]:
    """The held-out prompt sets by name; see `load_prompts`."""
    return {
        name: load_prompts(
            path,
            tokenizer,
            input_key=config.eval_input_key or config.input_key,
            label_key=config.eval_label_key or config.label_key,
            metadata_key=config.metadata_key,
            apply_chat_template=config.apply_chat_template,
            max_prompt_len=config.rollout_max_prompt_len,
            sizes=sizes,
        )
        for name, path in config.eval_prompt_sets
    }


def answer(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    reward_fn: Callable[[list[Sample]], list[float]],
    sampling: Sampling,
    generate: GenerateFunction | None = None,
    concurrency: int = 1,
) -> list[Sample]:
    """Answers every prompt and scores the answers; a collective, as the engine's methods are.

    Args:
        engine: with the weights to evaluate.
        prompts: at least one.
        reward_fn: scores of a list of samples.
        sampling: temperature 0 for greedy answers.
        generate: the user's function that makes the answers; None lets the engine answer.
        concurrency: most calls of it at once.

    Raises:
        ValueError: no prompts.
        CustomFunctionError: the user's function made no answer at all.
    """
    if not prompts:
        raise ValueError("there are no prompts to evaluate on; give a file that has some.")
    if generate is None:
        groups = engine.generate(prompts, sampling, seed=0)
    else:
        call = generate.bind(sampling, evaluation=True)
        groups = engine.submit_function(prompts, call, sampling, 0, concurrency=concurrency).result()
        settle(groups)
    assign_rewards(groups, reward_fn)
    return [sample for group in groups for sample in group]


def accuracy_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over scored answers; the segments of one are put together.

    Returns:
        accuracy: mean reward, which is the share of right answers where the reward is 0 or 1;
        response_length: mean tokens of a response; truncated_fraction: share that the length limit ended;
        reward/KEY: mean of each number of rewards that are dicts.
    """
    answers = by_rollout(samples)
    return {
        "accuracy": sum(map(rollout_reward, answers)) / len(answers),
        "response_length": sum(sample.effective_response_length for sample in samples) / len(answers),
        "truncated_fraction": sum(has_status(answer, SampleStatus.TRUNCATED) for answer in answers) / len(answers),
        **{f"reward/{key}": value for key, value in mean_parts(samples).items()},
    }
