r"""slime's reward helpers for user functions: `async_rm`, `batched_async_rm`, graders of mathematics."""

import asyncio
import inspect
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.options.rm_types import REMOTE, base_name
from slime_tis.trainer.rewards.answers import last_boxed, same_boxed_answer
from slime_tis.trainer.rewards.builtin_rewards import builtin_reward, dapo, dapo_answer
from slime_tis.user_functions import load_function

STRICT_TAIL = 100
"""Characters at the end of a solution in which `compute_score` looks for a strict \\boxed{} answer."""


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """Returns the reward of one sample by --custom-rm-path, by its `metadata["rm_type"]`, or by --rm-type."""
    if args.custom_rm_path is not None:
        reward = load_function(args.custom_rm_path)(args, sample, **kwargs)
        return await reward if inspect.isawaitable(reward) else reward
    name = str(sample.metadata.get("rm_type") or args.rm_type or "")
    if not name or base_name(name) == REMOTE:
        raise ValueError(f"async_rm supports --custom-rm-path and local values of --rm-type, not {name!r}.")
    return builtin_reward(name, sample)


async def batched_async_rm(args: Namespace, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """Returns the rewards of several samples. A function of --custom-rm-path gets the whole list, as in slime."""
    if args.custom_rm_path is not None:
        rewards: list[Any] = await async_rm(args, samples, **kwargs)  # type: ignore[arg-type]
        return rewards
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


extract_answer, grade_answer_verl = last_boxed, same_boxed_answer
"""slime's names."""


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    r"""Scores a solution by DAPO's rule: `score` 1 or -1, `acc` whether it is correct, `pred` the answer.

    `strict_box_verify` compares the last \boxed{} of the last 100 characters as text, instead of the text after
    the last `Answer:`. slime passes `pause_tokens_index`, which has no effect.
    """
    if strict_box_verify:
        answer = last_boxed(solution_str[-STRICT_TAIL:])
        correct = answer == ground_truth
    else:
        answer, correct = dapo_answer(solution_str), dapo(solution_str, ground_truth)["acc"] == 1
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer}
