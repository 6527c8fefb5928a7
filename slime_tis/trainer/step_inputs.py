"""The samples of one optimizer step as tensors, and their advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_tis.correction import Ranks, is_log_prob
from slime_tis.policy.advantages import (
    advantages,
    optimal_token_baseline,
    token_returns,
    whiten,
)
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import loss_batch
from slime_tis.policy.losses import kl_estimate
from slime_tis.policy.response_tokens import ResponseTokens
from slime_tis.trainer.data.sample import Sample, by_rollout
from slime_tis.trainer.megatron.batch import TrainingBatch, make_batch
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.routing_replay import RoutingRecord
from slime_tis.trainer.rollout.rollout_metrics import rollout_reward

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step's samples on this data-parallel rank."""

    samples: Sequence[Sample]
    rollouts: Sequence[int]
    """Each sample's rollout; the segments of a rollout have the same number."""
    assigned_together: int
    """Number of consecutive rollouts that are assigned to the same rank."""
    batch: TrainingBatch
    recorded: TrainingBatch
    """The same batch with the rollout's experts, even if training does not replay them."""
    partition: list[list[int]]
    load: float | None
    """Tokens of the largest micro-batch of all ranks, as a share of the token budget; None without
    a budget."""
    rank_load: float | None
    """Largest workload of a data-parallel rank, divided by the mean; None with one rank."""
    routing_record: RoutingRecord | None
    """Experts of the old log-prob pass, for training to replay; None without
    `--use-routing-replay`."""
    samples_without_routing: int

    def load_metrics(self) -> dict[str, float]:
        """Returns how evenly micro-batches and ranks are filled, where that was measured."""
        loads = {"perf/micro_batch_load": self.load, "perf/rank_load": self.rank_load}
        return {name: load for name, load in loads.items() if load is not None}


def user_batch(
    step: Step, tokens: ResponseTokens, advantages: Sequence[float]
) -> dict[str, list[Any]]:
    """Returns the input of --custom-advantage-function-path for one step, in slime's names."""
    columns: dict[str, list[Any]] = loss_batch(tokens, step.batch.tokens)
    # The function computes them.
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
    """Returns the advantage of every sample, group by group.

    All segments of a rollout have the same advantage, unless the user's function computes it.

    Args:
        groups: Samples per prompt.
        accepted: Whether each rollout has an accepted token; None if all have.
        policy: How advantages are computed.
        user_advantages: The advantage of every sample from the user's function; None without one.
    """
    rollouts = list(chain.from_iterable(map(by_rollout, groups)))
    # An advantage belongs to a rollout, or to a sample if the user's function computes it.
    units = rollouts
    num_groups = len(groups)
    if user_advantages is not None:
        units = [[sample] for sample in chain.from_iterable(rollouts)]
        num_groups = 1
        if accepted is not None:
            accepted = _per_sample(accepted, rollouts)

    def grouped(values: Sequence[float] | Sequence[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).view(num_groups, -1)

    rewards = [rollout_reward(unit) for unit in units]
    token_counts = []
    for unit in units:
        token_counts.append(sum(sum(sample.loss_mask) for sample in unit))
    accepted_units = None
    if accepted is not None:
        accepted_units = grouped(accepted) > 0
    given_advantages = None
    if user_advantages is not None:
        given_advantages = grouped(user_advantages)
    unit_advantages = advantages(
        grouped(rewards), grouped(token_counts), policy, accepted_units, given_advantages
    )
    return _per_sample(unit_advantages.flatten().tolist(), units)


def _per_sample(values: Sequence[T], units: Sequence[Sequence[Sample]]) -> list[T]:
    """Repeats the value of a unit for every sample in the unit."""
    repeated: list[T] = []
    for value, unit in zip(values, units, strict=True):
        repeated += [value] * len(unit)
    return repeated


def with_token_baseline(
    steps: Sequence[Step],
    rewards: Sequence[Sequence[float]],
    corrections: Sequence[tuple[Tensor, Tensor]],
    group_numbers: Mapping[int | None, int],
    ranks: Ranks,
) -> list[Step]:
    """Subtracts the optimal token baseline from the rewards of a rollout's steps; a collective.

    Args:
        steps: This rank's share of every step, with log π_old and Σ_v π_v².
        rewards: Rewards of the samples, step by step; the last token of a sample has the reward.
        corrections: Mask and importance weights [L] of the tokens, step by step.
        group_numbers: Group numbers by group index.
        ranks: The ranks that share the steps.

    Returns:
        The steps with advantages.
    """
    rows: list[Tensor] = []
    for step, (mask_L, weights_L) in zip(steps, corrections, strict=True):
        tokens = step.batch.responses
        assert tokens.old_log_probs_L is not None
        assert tokens.sum_pi_squared_L is not None
        values = (tokens.old_log_probs_L, tokens.sum_pi_squared_L, mask_L > 0, weights_L)
        rows += _complete_responses(tokens, values, mask_L.device, ranks)
    log_probs_BT, squares_BT, mask_BT, weights_BT = pad_sequence(rows, batch_first=True).unbind(2)
    # The number of trained tokens from each token on is 1 at the last trained token.
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
        # The rows are complete responses, so context-parallel ranks would count them twice.
        ranks=Ranks(data=ranks.data),
    )
    return _with_padded_advantages(steps, advantages_BT)


def with_token_rewards(
    steps: Sequence[Step],
    rewards: Sequence[Sequence[float]],
    policy: PolicyConfig,
    parallel: Parallel,
    *,
    is_bypassed: bool,
) -> list[Step]:
    """Adds the KL and the discount to the rewards of a rollout's steps; a collective.

        reinforce_plus_plus            A_t = whiten(G_t), G of `token_returns`
        reinforce_plus_plus_baseline   A_t = whiten(R − β · kl_t)

    Source: slime, backends/megatron_utils/loss.py, compute_advantages_and_returns.

    Args:
        steps: This rank's share of every step, with log π_ref if there is a KL.
        rewards: Rewards R of the samples, step by step.
        policy: Has the estimator, β, γ and the estimate of the KL.
        parallel: The ranks that share the steps.
        is_bypassed: Whether π_rollout is the old policy, whose KL is estimated.

    Returns:
        The steps with advantages, normalized over the trained tokens of all steps.
    """
    rows: list[Tensor] = []
    all_rewards: list[float] = []
    for step, step_rewards in zip(steps, rewards, strict=True):
        # NCCL reduces only tensors on the GPU.
        tokens = step.batch.responses.to(parallel.device)
        kl_L = torch.zeros_like(tokens.loss_mask_L)
        if policy.kl_coef > 0:
            old_L = tokens.old_log_probs_L
            if is_bypassed:
                old_L = tokens.rollout_log_probs_L
            assert old_L is not None
            assert tokens.ref_log_probs_L is not None
            kl_L = kl_estimate(old_L, tokens.ref_log_probs_L, policy.kl_loss_type)
            # A missing log-prob has NaN or −9999 nats, which would dominate the sums.
            has_both_L = is_log_prob(old_L) & is_log_prob(tokens.ref_log_probs_L)
            kl_L = torch.where(has_both_L, kl_L, 0.0)
        columns = (kl_L, tokens.loss_mask_L)
        rows += _complete_responses(tokens, columns, parallel.device, parallel.ranks)
        all_rewards += step_rewards
    kl_BT, mask_BT = pad_sequence(rows, batch_first=True).unbind(2)
    reward_B = torch.tensor(all_rewards, dtype=torch.float64, device=mask_BT.device)
    if policy.advantage_estimator == "reinforce_plus_plus":
        values_BT = token_returns(
            reward_B, kl_BT, mask_BT, kl_coef=policy.kl_coef, gamma=policy.gamma
        )
    else:
        values_BT = reward_B[:, None] - policy.kl_coef * kl_BT
    data_ranks = Ranks(data=parallel.ranks.data)
    return _with_padded_advantages(steps, whiten(values_BT, mask_BT, data_ranks))


def _complete_responses(
    tokens: ResponseTokens, values: Sequence[Tensor], device: torch.device, ranks: Ranks
) -> list[Tensor]:
    """Returns values [L] of this rank's slices as columns [T, values] of complete responses."""
    columns_L = torch.stack([value.to(device).double() for value in values], 1)
    columns_N = ranks.over_context(tokens.slices.scatter(columns_L))
    return list(columns_N.split(tokens.response_lengths))


def _with_padded_advantages(steps: Sequence[Step], advantages_BT: Tensor) -> list[Step]:
    """Returns the steps with advantages of padded complete responses, sample after sample."""
    with_advantages = []
    first = 0
    for step in steps:
        tokens = step.batch.responses
        unpadded = []
        for sample, length in enumerate(tokens.response_lengths, start=first):
            unpadded.append(advantages_BT[sample, :length].float())
        first += len(step.samples)
        values_L = tokens.slices.slice_flat(torch.cat(unpadded)).cpu()
        batch = step.batch.with_token_values(advantages_L=values_L)
        with_advantages.append(replace(step, batch=batch))
    return with_advantages


def training_batch(
    samples: Sequence[Sample], parallel: Parallel, rollouts: Sequence[int] | None = None
) -> TrainingBatch:
    """Returns this rank's samples as tensors.

    `rollouts` has the number of each sample's rollout; None if each sample is a separate rollout.
    """
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
