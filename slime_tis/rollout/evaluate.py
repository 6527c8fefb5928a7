"""How well the policy answers held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime_tis.rollout.engine import RolloutEngine
from slime_tis.rollout.sample import Prompt, Sample, Sampling


def evaluate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    reward_fn: Callable[[list[Sample]], list[float]],
    sampling: Sampling,
    *,
    seed: int = 0,
) -> dict[str, float]:
    """Answers every prompt and scores the answers; a collective, as the engine's methods are.

    Args:
      engine: with the weights to evaluate.
      prompts: at least one.
      reward_fn: scores of a list of samples.
      sampling: temperature 0 for greedy answers.
      seed: of the sampling.

    Returns:
      accuracy: mean reward, which is the share of right answers where the reward is 0 or 1;
      response_length: mean tokens of a response; truncated_fraction: share that the length limit ended.

    Raises:
      ValueError: no prompts.
    """
    if not prompts:
        raise ValueError("there are no prompts to evaluate on; give a file that has some.")
    samples = [sample for group in engine.generate(prompts, sampling, seed) for sample in group]
    rewards = reward_fn(samples)
    return {
        "accuracy": sum(rewards) / len(samples),
        "response_length": sum(len(sample.response_ids) for sample in samples) / len(samples),
        "truncated_fraction": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
    }
