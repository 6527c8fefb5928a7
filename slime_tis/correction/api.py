"""The entry points: log-probs of two policies in, weights, masks and mergeable statistics out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args, overload

import torch
from torch import Tensor

from slime_tis.correction.config import NonfinitePolicy, Normalizer, RolloutCorrectionConfig
from slime_tis.correction.context_parallel import (
    ONE_RANK,
    Ranks,
    ResponseSlices,
    gather_slices,
    whole_sequence_levels,
)
from slime_tis.correction.layout import Layout, LogProbs, as_layout
from slime_tis.correction.ratio import is_log_prob
from slime_tis.correction.rejection import AdaptiveBounds, adaptive_bounds, second_moment_limit
from slime_tis.correction.sequence_pass import SequencePass, sequence_pass
from slime_tis.correction.statistics import Statistics, usable_mean
from slime_tis.correction.sums import (
    EXTREMES,
    SequenceSums,
    named,
    number_of_columns,
    sequence_columns,
)
from slime_tis.correction.token_pass import TokenPass, token_pass, trim

LayoutT = TypeVar("LayoutT", Tensor, list[Tensor])
Aggregation = Literal["token-mean", "seq-mean-token-mean"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The global batch that the sequences of one call belong to: who shares it, and what is known of it.

    A call with all sequences of the rank finds what is None, and returns it as
    `Correction.global_batch`; calls with one micro-batch each take it from there.
    """

    ranks: Ranks = ONE_RANK
    """The ranks that share it."""
    batch_norm_factor: Tensor | None = None
    """Scalar, the mean weight, under `tis_batch_normalize`."""
    second_moment_limit: Tensor | None = None
    """Scalar, the smallest Δ² that is trimmed, +inf where none is, under
    `rs_second_moment_bound`."""
    adaptive_bounds: AdaptiveBounds | None = None
    """What sequences are rejected by under `rs_z_score` or `rs_target_fraction`."""


THIS_CALL = GlobalBatch()
"""The global batch of a call with all of its sequences on one rank."""


@dataclass(frozen=True)
class Correction(Generic[LayoutT]):
    """Weights to multiply into the loss, the mask of accepted tokens, and statistics; nothing carries a gradient."""

    weights: LayoutT
    """float32, in the layout of the input: 0 at invalid tokens, 1 at valid ones when IS is off."""
    mask: LayoutT
    """bool, in the layout of the input: the loss mask without what was rejected."""
    statistics: Statistics
    """To be merged over micro-batches and ranks; then `statistics.metrics()`."""
    masked_in_per_sequence: Tensor
    """[S] float64: tokens of the loss mask, over the whole sequence."""
    accepted_per_sequence: Tensor
    """[S] float64: tokens of `mask`, over the whole sequence."""
    sequence_sums: SequenceSums[Tensor]
    """Sums over the tokens of each whole sequence, [S] float64."""
    global_batch: GlobalBatch
    """The given global batch, completed by this call: mean weight, second-moment limit, bounds."""
    lengths: tuple[int, ...]
    """Tokens of each sequence here, masked ones too; of a slice under context parallelism."""
    rejection_normalizer: Normalizer
    """Whether `mean` divides by the accepted tokens ("kept") or by the tokens of the loss mask
    ("original")."""

    def loss_denominator(self, aggregation: Aggregation = "token-mean") -> Tensor:
        """What `mean` divides by, a float64 scalar: tokens, or sequences that have any, accepted or of the loss mask.

        The values of several micro-batches and data-parallel ranks add up to the global batch's
        values.
        """
        counts_S = self._counts_per_sequence()
        return (
            counts_S.sum()
            if aggregation == "token-mean"
            else (counts_S > 0).sum().to(torch.float64)
        )

    def mean(
        self,
        token_loss: LayoutT,
        *,
        aggregation: Aggregation = "token-mean",
        denominator: Tensor | None = None,
    ) -> Tensor:
        """The corrected loss: Σ_t mask·weight·loss / denominator; 0 with gradients of 0 where all is rejected.

        Args: token_loss: Loss of each token in the layout of the input, with gradient. Rejected and
            masked tokens do
                not count, for every value of their loss; their gradient is 0, which a non-finite
                loss turns into NaN on its way back to the model.
            aggregation: verl's word for what is averaged: "token-mean" over all tokens,
                "seq-mean-token-mean" over the sequences' means.
            denominator: Of the global batch, where this is one of its micro-batches: the sum of
                their `loss_denominator(aggregation)`; this call's when None.

        Returns:
            Scalar of the loss's dtype, float32 at least. Nothing synchronises with the host.

        Raises:
            ValueError: if the loss is not in the layout of the mask, or the aggregation is unknown.
        """
        if aggregation not in AGGREGATIONS:
            raise ValueError(
                f"aggregation is {aggregation!r}; choose one of {', '.join(AGGREGATIONS)}."
            )
        shapes = _shapes(token_loss), _shapes(self.mask)
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"token_loss has shape {shapes[0]} but the mask {shapes[1]}; pass the loss in the"
                " mask's layout."
            )
        loss_N, weight_N, mask_N = (_flat(x) for x in (token_loss, self.weights, self.mask))
        terms_N = torch.where(mask_N.bool(), loss_N, 0.0) * weight_N
        if aggregation == "seq-mean-token-mean":
            inverse_S = self._counts_per_sequence().clamp_min(1).reciprocal()
            repeats_S = torch.tensor(self.lengths, dtype=torch.int64).to(
                inverse_S.device, non_blocking=True
            )
            terms_N = terms_N * inverse_S.repeat_interleave(
                repeats_S, output_size=terms_N.numel()
            ).to(terms_N.dtype)
        divisor = self.loss_denominator(aggregation) if denominator is None else denominator
        return terms_N.sum() / divisor.clamp_min(1).to(terms_N.dtype)

    def _counts_per_sequence(self) -> Tensor:
        return (
            self.accepted_per_sequence
            if self.rejection_normalizer == "kept"
            else self.masked_in_per_sequence
        )


@overload
def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    lengths: Sequence[int] | None = ...,
    current_log_probs: Tensor | None = ...,
    advantages: Tensor | None = ...,
    global_batch: GlobalBatch = ...,
    are_densities: bool = ...,
) -> Correction[Tensor]: ...


@overload
def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_mask: Sequence[Tensor],
    *,
    current_log_probs: Sequence[Tensor] | None = ...,
    advantages: Sequence[Tensor] | None = ...,
    global_batch: GlobalBatch = ...,
    are_densities: bool = ...,
) -> Correction[list[Tensor]]: ...


@torch.no_grad()
def correct(  # noqa: PLR0913
    config: RolloutCorrectionConfig,
    train_log_probs: LogProbs,
    rollout_log_probs: LogProbs,
    loss_mask: LogProbs,
    *,
    lengths: Sequence[int] | None = None,
    current_log_probs: LogProbs | None = None,
    advantages: LogProbs | None = None,
    global_batch: GlobalBatch = THIS_CALL,
    are_densities: bool = False,
) -> Correction[Any]:
    """Importance weights, rejection mask and statistics of a batch.

    Δ_t = log π_train − log π_rollout on valid tokens; L aggregates Δ at the level; w = exp(clamp(L, −20, 20)),
    bounded by the mode and divided by the batch mean if asked; what is out of bounds leaves the mask.

    Source: "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
        Mismatch"
    (Liu, Li et al. 2025, https://richardli.xyz/rl-collapse).

    Args: config: What to correct and how. train_log_probs: log π_train (π_old, or the current
        policy): a list of [T_i], [B, T], or packed [N]. rollout_log_probs: log π_rollout in the
        same layout; in a list, None for a sample that has none. loss_mask: bool, int or float,
        nonzero at valid tokens, in the same layout. lengths: Lengths of the sequences in packed [N]
        tensors. current_log_probs: log π_θ in the same layout, for the divergence mask;
        train_log_probs when None. advantages: Advantages in the same layout, for a divergence mask
        with direction away, or bounds by sign. global_batch: The ranks that share the global batch,
        and its statistics if this call is one micro-batch. By
            default these sequences are the global batch. Context-parallel ranks sum one [S, k]
            table; the levels prefix and segment gather whole responses instead, and need
            `Ranks.slices`.
        are_densities: The log-probs are log-densities of continuous samples, as of diffusion steps.
            They may be of any size; a log-prob of a token of −9984 or less is an engine's code for
            minus infinity.

    Returns: Weights, mask, statistics, and tokens per sequence. Only `nonfinite_policy="raise"`
        synchronizes with the host.

    Raises: TypeError: if the configuration is of another class, verl's for example. ValueError: if
        the layouts disagree, naming the sequence and both lengths; if a token is not finite
            under the "raise" policy; if a level needs whole sequences and there are slices without
            their places.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        raise TypeError(
            f"config is {type(config).__name__}; pass a slime_tis.RolloutCorrectionConfig."
        )
    ranks = global_batch.ranks
    inputs = {
        "train_log_probs": train_log_probs,
        "rollout_log_probs": rollout_log_probs,
        "loss_mask": loss_mask,
    }
    if config.divergence_mask is not None or config.needs_advantages:
        inputs |= _policy_inputs(config, current_log_probs=current_log_probs, advantages=advantages)
    layout = as_layout(inputs, lengths)
    levels = whole_sequence_levels(config)
    if ranks.context is not None and levels:
        slices = _required_slices(ranks, levels[0])
        whole = gather_slices(layout, slices, ranks)
        known = replace(global_batch, ranks=Ranks(data=ranks.data))
        result = correct(
            config,
            **whole,
            lengths=slices.lengths,
            global_batch=known,
            are_densities=are_densities,
        )
        return _sliced(result, layout, slices, ranks)
    tokens = [token_pass(config, chunk) for chunk in layout.chunks(are_densities=are_densities)]
    if config.rs_second_moment_bound is not None:
        limit = global_batch.second_moment_limit
        if limit is None:
            limit = second_moment_limit(
                _squares(tokens, layout.device), config.rs_second_moment_bound, ranks
            )
            global_batch = replace(global_batch, second_moment_limit=limit)
        tokens = [trim(config, part, limit) for part in tokens]
    columns = sequence_columns(config)
    no_sequence = torch.zeros(
        0, number_of_columns(columns), dtype=torch.float64, device=layout.device
    )
    table = ranks.over_context(torch.cat([no_sequence, *(part.table_S for part in tokens)]))
    sums_S: SequenceSums[Tensor] = named(columns, table.unbind(1))
    if config.adaptive and global_batch.adaptive_bounds is None:
        global_batch = replace(
            global_batch, adaptive_bounds=adaptive_bounds(config, [sums_S], ranks)
        )
    sequences = sequence_pass(
        config, sums_S, global_batch.adaptive_bounds if config.adaptive else None
    )
    statistics, scale = sequences.statistics, sequences.weight_S
    _take_extremes(tokens, statistics)
    if config.use_tis and config.tis_batch_normalize:
        factor = global_batch.batch_norm_factor
        if factor is None:
            factor = statistics.batch_norm_factor(ranks)
            global_batch = replace(global_batch, batch_norm_factor=factor)
        divisor = usable_mean(factor.to(torch.float64))
        scale = divisor.reciprocal() if scale is None else scale / divisor
    weights, mask = _finish(config, tokens, sequences, scale)
    return Correction(
        weights=layout.restore(weights, torch.float32),
        mask=layout.restore(mask, torch.bool),
        statistics=statistics,
        masked_in_per_sequence=sums_S.masked_in,
        accepted_per_sequence=sequences.accepted_S,
        sequence_sums=sums_S,
        global_batch=global_batch,
        lengths=tuple(layout.lengths),
        rejection_normalizer=config.rejection_normalizer,
    )


def _required_slices(ranks: Ranks, level: str) -> ResponseSlices:
    if ranks.slices is None:
        raise ValueError(
            f"{level} needs whole sequences, but they are sliced over context-parallel ranks; pass"
            " their positions with Ranks(…, slices=response_slices(…)), or choose another level."
        )
    return ranks.slices


def _squares(tokens: list[TokenPass], device: torch.device) -> Tensor:
    """Δ² of all chunks, [N]; +inf at invalid tokens."""
    squares = [part.squares_RK.reshape(-1) for part in tokens if part.squares_RK is not None]
    return torch.cat([torch.zeros(0, device=device), *squares])


def _policy_inputs(
    config: RolloutCorrectionConfig, **inputs: LogProbs | None
) -> dict[str, LogProbs]:
    """The inputs of a divergence mask, or of bounds by the sign of the advantage, that are given.

    Raises:
        ValueError: the mask or the bounds depend on the advantages, which are missing.
    """
    if config.needs_advantages and inputs["advantages"] is None:
        option, instead = "divergence_mask", "set divergence_mask_direction='both'"
        if config.signs_bounds:
            option, instead = "tis_upper_bound_negative or tis_lower_bound_negative", "remove it"
        raise ValueError(f"{option} needs advantages=; pass them, or {instead}.")
    return {name: values for name, values in inputs.items() if values is not None}


def _sliced(
    whole: Correction[Any], local: Layout, slices: ResponseSlices, ranks: Ranks
) -> Correction[Any]:
    """This rank's slices of a correction of whole sequences."""
    weights, mask = (
        local.shaped(slices.slice_flat(values)) for values in (whole.weights, whole.mask)
    )
    global_batch = replace(whole.global_batch, ranks=ranks)
    return replace(
        whole, weights=weights, mask=mask, lengths=slices.local_lengths, global_batch=global_batch
    )


def _flat(values: Tensor | list[Tensor]) -> Tensor:
    """All tokens, one sequence after another."""
    if isinstance(values, Tensor):
        return values.reshape(-1)
    return torch.cat(values) if values else torch.zeros(0)


def _shapes(values: Tensor | list[Tensor]) -> tuple[int, ...] | list[tuple[int, ...]]:
    return (
        tuple(values.shape)
        if isinstance(values, Tensor)
        else [tuple(value.shape) for value in values]
    )


def _take_extremes(tokens: list[TokenPass], statistics: Statistics) -> None:
    """Completes the statistics, in place, by the extremes of weights that differ from token to token."""
    extremes = [part.extremes for part in tokens if part.extremes is not None]
    if not extremes:
        return
    lowest, highest, weight, *smallest = torch.stack(extremes).unbind(1)
    mins, maxs = (named(EXTREMES, values.unbind()) for values in (statistics.mins, statistics.maxs))
    mins.ratio.copy_(lowest.amin())
    maxs.ratio.copy_(highest.amax())
    maxs.weight.copy_(weight.amax())
    for values in smallest:
        mins.weight.copy_(values.amin())


def _finish(
    config: RolloutCorrectionConfig,
    tokens: list[TokenPass],
    sequences: SequencePass,
    scale: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Blocks of final weights and masks: those of each token, times those of its sequence. Empties `tokens`."""
    weights, masks, first = [], [], 0
    while tokens:
        part = tokens.pop(0)
        owner_R = part.sequence_R + first
        first += part.table_S.shape[0]
        weight, accepted = part.weight_RK, part.accepted_RK
        if scale is not None:
            row_scale = scale if scale.dim() == 0 else scale.index_select(0, owner_R)[:, None]
            weight.mul_(row_scale.to(weight.dtype))
        if config.touches_loss:
            accepted.view(torch.uint8).mul_(
                sequences.accept_S.index_select(0, owner_R).to(torch.uint8)[:, None]
            )
        weights.append(weight.to(torch.float32))
        masks.append(accepted)
    return weights, masks


@torch.no_grad()
def off_policy_sequence_mask(
    log_probs: LogProbs,
    old_log_probs: LogProbs,
    advantages: LayoutT,
    loss_mask: LogProbs,
    *,
    delta: float,
    nonfinite_policy: NonfinitePolicy = "reject",
    lengths: Sequence[int] | None = None,
    ranks: Ranks = ONE_RANK,
) -> LayoutT:
    """accept_t = not (A_t < 0 and mean_s(log π_old − log π_θ) > δ), with the mean over the tokens s of the sequence.

    Each token goes by its own advantage: where the tokens of a rejected sequence have advantages of
    both signs, those with A_t ≥ 0 are trained. Masked tokens have no part in the mean.

    The source's π_old is the policy as the inference engine sampled from it, so that what is
    bounded is made of both staleness and the mismatch between the engines; TRL does the same. slime
    takes π_old of the training engine, from which π_θ does not differ before the rollout's second
    optimizer step.

    Source: "DeepSeek-V3.2" (https://arxiv.org/abs/2512.02556), section 3.1, off-policy sequence
        masking, eq. 9.

    Args: log_probs: log π_θ, as a list of [T_i], padded [B, T], or packed [N] with `lengths`.
        old_log_probs: log π_rollout, or log π_old for slime's variant, in the same layout.
        advantages: One per token, in the same layout, or one per sequence, [S]. loss_mask: Nonzero
        at valid tokens, in the same layout. delta: Bound on the mean log-ratio in nats per token,
        above 0; 0.1 is customary against π_rollout, and slime's
            default against π_old is 1e-4.
        nonfinite_policy: What a token with a log-prob that is not finite does to the mean: "reject"
            excludes it, "neutral" counts it with a difference of 0, "raise" refuses it.
        lengths: Lengths of packed sequences.
        ranks: One table is summed over the context-parallel ones, where sequences are sliced.

    Returns: bool in the layout of the advantages: True at accepted tokens, or at accepted
        sequences. A masked token is not accepted, and a sequence without tokens is.

    Raises: ValueError: if there is not one advantage per token or per sequence, or a token is not
        finite under "raise".
    """
    config = RolloutCorrectionConfig(nonfinite_policy=nonfinite_policy)
    inputs: tuple[Any, Any, Any] = (log_probs, old_log_probs, loss_mask)
    found: Correction[Any] = correct(
        config, *inputs, lengths=lengths, global_batch=GlobalBatch(ranks=ranks)
    )
    sums_S = found.sequence_sums
    is_far_S = -sums_S.log_ratio / sums_S.valid.clamp_min(1) > delta
    if isinstance(advantages, Tensor) and advantages.shape == is_far_S.shape:
        return ~((advantages < 0) & is_far_S)
    if _shapes(advantages) != _shapes(found.mask):
        raise ValueError(
            f"advantages has shape {_shapes(advantages)} for {len(found.lengths)} sequences and a"
            f" mask of shape {_shapes(found.mask)}; pass one per token or one per sequence."
        )
    advantage_N = _flat(advantages)
    mask_N = _flat(inputs[2])
    repeats_S = torch.tensor(found.lengths, dtype=torch.int64).to(
        is_far_S.device, non_blocking=True
    )
    is_far_N = is_far_S.repeat_interleave(repeats_S, output_size=advantage_N.numel())
    accepted_N = (mask_N != 0) & ~((advantage_N < 0) & is_far_N)
    if isinstance(advantages, Tensor):
        return accepted_N.view(advantages.shape)
    return list(accepted_N.split(found.lengths))


def interpolate_old_log_probs(
    log_probs: Tensor, rollout_log_probs: Tensor, current_version: int, rollout_versions: Tensor
) -> Tensor:
    """log π_old = log π_rollout + α·(log π_θ − log π_rollout), α = clamp((v_θ − 1 − v)/(v_θ − v), 0, 1).

    Between the policy that sampled a token, of version v, and the current one, of version v_θ, the
    proximal policy is the one before the current: it lies all of the way but one step. A token
    sampled by the current version (v = v_θ) or the one before has α = 0, so that its old policy is
    the one that sampled it; so has a token whose version is not known (v < 0).

    Source: AReaL, "Proximal Log-Probability Approximation"
    (https://inclusionai.github.io/AReaL/algorithms/prox_approx.html), the method `loglinear`.

    Args:
        log_probs: log π_θ of the tokens, any shape.
        rollout_log_probs: log π_rollout, of the same shape.
        current_version: v_θ, the number of the weights that are trained.
        rollout_versions: v of each token, of the same shape; below 0 where it is not known.

    Returns: Detached old log-probs. If v < 0 or v > v_θ, or a log-prob is not finite, the rollout's
        log-prob.

    Raises:
        ValueError: if the shapes differ.
    """
    shapes = [tuple(x.shape) for x in (log_probs, rollout_log_probs, rollout_versions)]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"log_probs has shape {shapes[0]}, rollout_log_probs {shapes[1]}, rollout_versions"
            f" {shapes[2]}; pass three tensors of one shape."
        )
    log_probs, rollout = log_probs.detach(), rollout_log_probs.detach()
    lag = (current_version - rollout_versions).to(rollout.dtype)
    fraction = ((lag - 1) / lag.clamp_min(1)).clamp(0, 1)
    difference = log_probs - rollout
    known = (rollout_versions >= 0) & is_log_prob(log_probs) & is_log_prob(rollout)
    return torch.where(known, rollout + fraction * difference, rollout)
