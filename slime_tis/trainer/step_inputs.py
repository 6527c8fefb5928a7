"""The samples of one optimizer step as tensors, and their advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_tis.correction import Ranks
from slime_tis.policy.advantages import advantages, optimal_token_baseline
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import loss_batch
from slime_tis.policy.response_tokens import ResponseTokens
from slime_tis.trainer.data.sample import Sample, by_rollout
from slime_tis.trainer.megatron.batch import TrainingBatch, make_batch
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.routing_replay import RoutingRecord
from slime_tis.trainer.rollout.rollout_metrics import rollout_reward


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step's samples on this data-parallel rank."""

    samples: Sequence[Sample]
    rollouts: Sequence[int]
    """Number of the rollout to which each sample belongs; the segments of a rollout share one."""
    assigned_together: int
    """Consecutive rollouts of the step that are assigned to one rank."""
    batch: TrainingBatch
    recorded: TrainingBatch
    """The samples with the rollout's experts, also if training does not replay them."""
    partition: list[list[int]]
    load: float | None
    """Tokens of the largest micro-batch of all ranks, as a share of the token budget; None without
    a budget."""
    routing_record: RoutingRecord | None
    """Experts of the old log-prob pass, for training to replay; None without
    `--use-routing-replay`."""
    samples_without_routing: int


def user_batch(
    step: Step, tokens: ResponseTokens, advantages: Sequence[float]
) -> dict[str, list[Any]]:
    """Returns the columns that --custom-advantage-function-path gets for one step, in slime's names."""
    columns: dict[str, list[Any]] = loss_batch(tokens, step.batch.tokens)
    del columns["advantages"]
    return columns | {
        "tokens": columns["unconcat_tokens"],
        "kl": [torch.zeros_like(values) for values in columns["rollout_log_probs"]],
        "rewards": list(advantages),
        "raw_reward": [sample.reward for sample in step.samples],
        "sample_indices": [sample.index for sample in step.samples],
        "metadata": [sample.metadata for sample in step.samples],
    }


def advantages_of(
    groups: Sequence[Sequence[Sample]],
    accepted: Sequence[bool] | None,
    policy: PolicyConfig,
    user_advantages: Sequence[float] | None = None,
) -> list[float]:
    """Returns the advantage of every sample, group by group; all segments of a rollout share its advantage."""
    rollouts = [rollout for group in groups for rollout in by_rollout(group)]
    units = (
        rollouts
        if user_advantages is None
        else [[sample] for rollout in rollouts for sample in rollout]
    )
    if user_advantages is not None and accepted is not None:
        accepted = [keep for keep, rollout in zip(accepted, rollouts, strict=True) for _ in rollout]

    def grouped(values: Sequence[float] | Sequence[bool]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).view(
            len(groups) if user_advantages is None else 1, -1
        )

    per_unit = advantages(
        grouped([rollout_reward(unit) for unit in units]),
        grouped([float(sum(sum(sample.loss_mask) for sample in unit)) for unit in units]),
        policy,
        None if accepted is None else grouped(accepted) > 0,
        None if user_advantages is None else grouped(user_advantages),
    )
    values: list[float] = per_unit.flatten().tolist()
    return [value for value, unit in zip(values, units, strict=True) for _ in unit]


def with_token_baseline(
    steps: Sequence[Step],
    rewards: Sequence[Sequence[float]],
    corrections: Sequence[tuple[Tensor, Tensor]],
    group_numbers: Mapping[int | None, int],
    ranks: Ranks,
) -> list[Step]:
    """Returns the steps of a rollout with the optimal token baseline subtracted from the rewards; a collective.

    Args:
        steps: This rank's share of every step, with log π_old and Σ_v π_v².
        rewards: Reward of each of their samples, given at its last token.
        corrections: The mask and the importance weights [L] of each step's tokens.
        group_numbers: Number of each group, by its index.
        ranks: The ranks that share the steps.
    """
    rows: list[Tensor] = []
    for step, (mask_L, weights_L) in zip(steps, corrections, strict=True):
        tokens = step.batch.responses
        values = tokens.old_log_probs_L, tokens.sum_pi_squared_L, mask_L > 0, weights_L
        columns_L = torch.stack(
            [value.to(mask_L.device).double() for value in values if value is not None], 1
        )
        rows += ranks.over_context(tokens.slices.scatter(columns_L)).split(tokens.response_lengths)
    log_probs_BT, squares_BT, mask_BT, weights_BT = pad_sequence(rows, batch_first=True).unbind(2)
    is_last_BT = (mask_BT > 0) & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
    all_rewards: list[float] = []
    groups: list[int] = []
    for step, step_rewards in zip(steps, rewards, strict=True):
        all_rewards += step_rewards
        groups += [group_numbers[sample.group_index] for sample in step.samples]
    reward_B = torch.tensor(all_rewards, dtype=torch.float64)
    advantages_BT = optimal_token_baseline(
        torch.where(is_last_BT, reward_B.to(mask_BT)[:, None], 0.0),
        mask_BT,
        torch.tensor(groups, device=mask_BT.device),
        log_probs_BT,
        squares_BT,
        weights_BT=weights_BT,
        ranks=Ranks(data=ranks.data),
    ).float()
    # without the padding, sample by sample in the order of the steps
    sample_values = [
        values_T[: len(row)] for values_T, row in zip(advantages_BT, rows, strict=True)
    ]
    remaining = iter(sample_values)
    with_advantages = []
    for step in steps:
        values_N = torch.cat([next(remaining) for _ in step.samples])
        values_L = step.batch.responses.slices.slice_flat(values_N).cpu()
        batch = step.batch.with_token_values(advantages_L=values_L)
        with_advantages.append(replace(step, batch=batch))
    return with_advantages


def training_batch(
    samples: Sequence[Sample], parallel: Parallel, rollouts: Sequence[int] | None = None
) -> TrainingBatch:
    """Returns this rank's samples as tensors; `rollouts` is None if each sample is a separate rollout."""
    return make_batch(
        [sample.tokens for sample in samples],
        [sample.loss_mask for sample in samples],
        [sample.rollout_log_probs for sample in samples],
        [sample.weight_versions for sample in samples],
        parallel.context_rank,
        parallel.context_size,
        workers=[sample.worker_of_each for sample in samples],
        sampling_masks=[sample.sampling_mask for sample in samples],
        rollouts=rollouts,
    )
