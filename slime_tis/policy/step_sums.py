"""The sums of a step's loss: how they merge over micro-batches and ranks, and the metrics that follow from them.

Shapes: suffix _L the response tokens a rank holds, packed; _S the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from slime_tis.correction import Ranks, RolloutCorrectionConfig, Statistics
from slime_tis.policy.breakdown import STALENESS, TURN, metrics_by
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.tokens import expand


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What the loss of a token consists of, and what is reported with it; or the sum of each over tokens.

    All are [L] per token, or float64 scalars as sums.
    """

    pg_loss: Tensor
    """Policy loss after weights."""
    pg_clipfrac: Tensor
    """1 where a clip took the gradient away."""
    ppo_kl: Tensor
    """log π_old − log π_θ."""
    ois: Tensor
    """π_θ/π_old."""
    entropy_loss: Tensor
    """Entropy of the distribution that the token was predicted from."""
    entropy_gap: Tensor
    """Entropy plus log π_θ: 0 on average where tokens are drawn from the very distribution they are predicted from."""
    kl_loss: Tensor
    """Estimate of the KL divergence from the reference policy."""

    def stack(self) -> Tensor:
        """[7, …], in the order of the fields."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def unstack(cls, values: Tensor) -> LossTerms:
        """The inverse of `stack`."""
        return cls(**{field.name: value for field, value in zip(fields(cls), values.unbind(), strict=True)})


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """The mergeable sums of the loss. Metrics come from the merged sums, once per step; all are float64."""

    terms: LossTerms
    """Numerators over accepted tokens or sequences, of this rank's tokens."""
    loss_denominator: Tensor
    """Accepted tokens, or rollouts that have any. This and the next three are 0 but on context-parallel rank 0."""
    original_denominator: Tensor
    """The same before rejection."""
    accepted_tokens: Tensor
    masked_in_tokens: Tensor
    """Tokens of the loss mask."""
    statistics: Statistics
    """The correction's statistics."""
    old_policy_statistics: Statistics
    """Those between π_old itself and π_rollout, under --get-mismatch-metrics; else empty."""
    staleness: Tensor
    """[buckets, 4] sums of the mismatch by staleness, of this rank's tokens."""
    turns: Tensor
    """[buckets, 4] the same by turn."""
    opsm_clipped: Tensor | None
    """Numerator over `original_denominator` of the share that off-policy sequence masking omits; None where it is
    off."""
    custom: dict[str, Tensor]
    """Numerators of the metrics that a custom function returned: over `original_denominator` of a custom correction,
    over `loss_denominator` of a custom loss."""

    def merge(self, other: StepSums) -> StepSums:
        """The sums of two micro-batches together."""
        return replace(
            self._with_added(self._added() + other._added()),
            statistics=self.statistics.merge(other.statistics),
            old_policy_statistics=self.old_policy_statistics.merge(other.old_policy_statistics),
        )

    def all_reduce(self, ranks: Ranks) -> StepSums:
        """The sums of all context- and data-parallel ranks; a collective of the last pipeline stage."""
        return replace(
            self._with_added(ranks.all_reduce(self._added())),
            statistics=self.statistics.all_reduce(ranks),
            old_policy_statistics=self.old_policy_statistics.all_reduce(ranks),
        )

    def _added(self) -> Tensor:
        """All that is added over micro-batches and ranks, as one tensor."""
        counts = (self.loss_denominator, self.original_denominator, self.accepted_tokens, self.masked_in_tokens)
        custom = [self.custom[name] for name in sorted(self.custom)]
        opsm = [] if self.opsm_clipped is None else [self.opsm_clipped]
        scalars = torch.stack([*counts, *opsm, *custom])
        return torch.cat([self.terms.stack(), scalars, self.staleness.view(-1), self.turns.view(-1)])

    def _with_added(self, values: Tensor) -> StepSums:
        """These sums with the values of `_added` replaced."""
        has_opsm = self.opsm_clipped is not None
        sizes = [len(fields(LossTerms)), 4 + has_opsm + len(self.custom), self.staleness.numel()]
        terms, scalars, staleness, turns = values.split([*sizes, self.turns.numel()])
        loss_denominator, original_denominator, accepted, masked_in, *rest = scalars.unbind()
        opsm_clipped, custom = (rest[0], rest[1:]) if has_opsm else (None, rest)
        return replace(
            self,
            terms=LossTerms.unstack(terms),
            loss_denominator=loss_denominator,
            original_denominator=original_denominator,
            accepted_tokens=accepted,
            masked_in_tokens=masked_in,
            staleness=staleness.view_as(self.staleness),
            turns=turns.view_as(self.turns),
            opsm_clipped=opsm_clipped,
            custom=dict(zip(sorted(self.custom), custom, strict=True)),
        )


def step_metrics(sums: StepSums, correction: RolloutCorrectionConfig, policy: PolicyConfig) -> dict[str, float]:
    """The metrics of one optimizer step by name, without the prefix train/.

    Args:
        sums: merged over micro-batches and ranks.
        correction: the options that the step was made under.
        policy: the options that the step was made under.
    """
    terms = sums.terms.stack() / sums.loss_denominator.clamp_min(1)
    metrics = dict(zip((field.name for field in fields(LossTerms)), terms.tolist(), strict=True))
    metrics["loss"] = (
        metrics["pg_loss"] - policy.entropy_coef * metrics["entropy_loss"] + policy.kl_loss_coef * metrics["kl_loss"]
    )
    if policy.loss_type == "custom_loss":
        metrics["loss"] = metrics["pg_loss"]
    if not policy.use_kl_loss:
        del metrics["kl_loss"]
    metrics |= sums.statistics.metrics()
    metrics["gradient_kept_fraction"] = float(sums.accepted_tokens / sums.masked_in_tokens.clamp_min(1))
    if correction.get_mismatch_metrics:
        of_old_policy = sums.old_policy_statistics.metrics()
        metrics |= {name: value for name, value in of_old_policy.items() if name != "gradient_kept_fraction"}
    metrics |= metrics_by(STALENESS, sums.staleness) | metrics_by(TURN, sums.turns)
    original = sums.original_denominator.clamp_min(1)
    # The function of a custom loss reduces its metrics itself, over accepted tokens.
    custom_denominator = sums.loss_denominator.clamp_min(1) if policy.loss_type == "custom_loss" else original
    if sums.opsm_clipped is not None:
        metrics["opsm_clipfrac"] = float(sums.opsm_clipped / original)
    return metrics | _under_free_names(
        {name: float(value / custom_denominator) for name, value in sums.custom.items()}, metrics
    )


RESERVED = ("grad_norm", "lr", "loss_denominator", "old_log_prob_forwards", "skipped_steps", "nonfinite_gradient_steps")
"""Metrics of a step that the learner adds."""


def _under_free_names(custom: dict[str, float], own: dict[str, float]) -> dict[str, float]:
    """The metrics of a custom function; one that is named like a metric of ours is called custom_NAME."""
    taken = {*own, *RESERVED}
    found = {name: value for name, value in custom.items() if name not in taken}
    for name in sorted(taken & custom.keys()):
        free = f"custom_{name}"
        while free in taken or free in found:
            free = f"custom_{free}"
        found[free] = custom[name]
    return found


@dataclass(frozen=True)
class LossReduction:
    """Masked sums whose quotient by `denominator` is the mean over tokens, or over rollouts of their token means."""

    scale_L: Tensor
    """float32: what one token counts, 0 where it is masked."""
    denominator: Tensor
    """float64 scalar: tokens, or rollouts that have any."""

    @classmethod
    def build(
        cls, mask_L: Tensor, counts_S: Tensor, lengths: Sequence[int], rollouts: Sequence[int], *, per_token: bool
    ) -> LossReduction:
        """The reduction over the tokens of a mask.

        Args:
            mask_L: bool, the tokens on this rank that count.
            counts_S: float64, the tokens that each whole sequence is averaged over.
            lengths: tokens of each sequence on this rank.
            rollouts: number of the rollout that each sequence is a segment of, from 0 on; the segments of one are
                averaged over together.
            per_token: average over tokens, not over sequences.
        """
        if per_token:
            return cls(mask_L.float(), counts_S.sum())
        rollout_S = torch.tensor(rollouts, dtype=torch.int64).to(counts_S.device, non_blocking=True)
        counts_R = counts_S.new_zeros(max(rollouts, default=-1) + 1).index_add_(0, rollout_S, counts_S)
        inverse_S = torch.where(counts_R > 0, 1 / counts_R.clamp_min(1), 0.0).float()[rollout_S]
        return cls(torch.where(mask_L, expand(inverse_S, lengths), 0.0), (counts_R > 0).sum().to(counts_S.dtype))

    def sum(self, term_L: Tensor) -> Tensor:
        """Σ scale · term, with gradient; a masked token contributes nothing, for every value of its term."""
        return torch.where(self.scale_L > 0, term_L, 0.0) @ self.scale_L

    def sum_each(self, terms: Tensor) -> Tensor:
        """The sums of several terms [n, L], float64 [n], without gradient."""
        return torch.where(self.scale_L > 0, terms.detach(), 0.0).double() @ self.scale_L.double()
