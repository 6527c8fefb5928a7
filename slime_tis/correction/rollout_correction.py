"""The entry point: log-probs of two policies in, weights, mask and mergeable statistics out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args, overload

import torch
from torch import Tensor

from slime_tis.correction.adaptive import adaptive_bounds
from slime_tis.correction.config import Normalizer, RolloutCorrectionConfig
from slime_tis.correction.context_parallel import ResponseSlices, gather_slices, whole_sequence_levels
from slime_tis.correction.global_batch import THIS_CALL, GlobalBatch
from slime_tis.correction.inputs import LogProbs
from slime_tis.correction.layout import as_layout
from slime_tis.correction.metrics import usable_mean
from slime_tis.correction.ranks import Ranks
from slime_tis.correction.sequence_pass import SequencePass, sequence_pass
from slime_tis.correction.statistics import Statistics
from slime_tis.correction.sums import EXTREMES, SequenceSums, named, number_of_columns, sequence_columns
from slime_tis.correction.token_pass import TokenPass, TokenPassFunction, torch_token_pass
from slime_tis.correction.trimming import limit_of_batch, trim_second_moment

LayoutT = TypeVar("LayoutT", Tensor, list[Tensor])
Aggregation = Literal["token-mean", "seq-mean-token-mean"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


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
    """Whether `mean` divides by the accepted tokens ("kept") or by the tokens of the loss mask ("original")."""

    def loss_denominator(self, aggregation: Aggregation = "token-mean") -> Tensor:
        """What `mean` divides by, a float64 scalar: tokens, or sequences that have any, accepted or of the loss mask.

        The values of several micro-batches and data-parallel ranks add up to the global batch's values.
        """
        counts_S = self._counts_per_sequence()
        return counts_S.sum() if aggregation == "token-mean" else (counts_S > 0).sum().to(torch.float64)

    def mean(
        self, token_loss: LayoutT, *, aggregation: Aggregation = "token-mean", denominator: Tensor | None = None
    ) -> Tensor:
        """The corrected loss: Σ_t mask·weight·loss / denominator; 0 with gradients of 0 where all is rejected.

        Args:
            token_loss: Loss of each token in the layout of the input, with gradient. Rejected and masked tokens do
                not count, for every value of their loss; their gradient is 0, which a non-finite loss turns into NaN on
                its way back to the model.
            aggregation: verl's word for what is averaged: "token-mean" over all tokens, "seq-mean-token-mean" over
                the sequences' means.
            denominator: Of the global batch, where this is one of its micro-batches: the sum of their
                `loss_denominator(aggregation)`; this call's when None.

        Returns:
            Scalar of the loss's dtype, float32 at least. Nothing synchronises with the host.

        Raises:
            ValueError: if the loss is not in the layout of the mask, or the aggregation is unknown.
        """
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation is {aggregation!r}; choose one of {', '.join(AGGREGATIONS)}.")
        self._check_layout(token_loss)
        loss_N, weight_N, mask_N = (_flat(x) for x in (token_loss, self.weights, self.mask))
        terms_N = torch.where(mask_N.bool(), loss_N, 0.0) * weight_N
        if aggregation == "seq-mean-token-mean":
            inverse_S = self._counts_per_sequence().clamp_min(1).reciprocal()
            repeats_S = torch.tensor(self.lengths, dtype=torch.int64).to(inverse_S.device, non_blocking=True)
            terms_N = terms_N * inverse_S.repeat_interleave(repeats_S, output_size=terms_N.numel()).to(terms_N.dtype)
        divisor = self.loss_denominator(aggregation) if denominator is None else denominator
        return terms_N.sum() / divisor.clamp_min(1).to(terms_N.dtype)

    def _counts_per_sequence(self) -> Tensor:
        return self.accepted_per_sequence if self.rejection_normalizer == "kept" else self.masked_in_per_sequence

    def _check_layout(self, token_loss: LayoutT) -> None:
        given, own = _shapes(token_loss), _shapes(self.mask)
        if given != own:
            raise ValueError(f"token_loss has shape {given} but the mask {own}; pass the loss in the mask's layout.")


@overload
def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    lengths: Sequence[int] | None = ...,
    global_batch: GlobalBatch = ...,
    token_pass: TokenPassFunction = ...,
) -> Correction[Tensor]: ...


@overload
def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_mask: Sequence[Tensor],
    *,
    global_batch: GlobalBatch = ...,
    token_pass: TokenPassFunction = ...,
) -> Correction[list[Tensor]]: ...


@torch.no_grad()
def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: LogProbs,
    rollout_log_probs: LogProbs,
    loss_mask: LogProbs,
    *,
    lengths: Sequence[int] | None = None,
    global_batch: GlobalBatch = THIS_CALL,
    token_pass: TokenPassFunction = torch_token_pass,
) -> Correction[Any]:
    """Importance weights, rejection mask and statistics of a batch.

    Δ_t = log π_train − log π_rollout on valid tokens; L aggregates Δ at the level; w = exp(clamp(L, −20, 20)),
    bounded by the mode and divided by the batch mean if asked; what is out of bounds leaves the mask.

    Source: "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (Liu, Li et al. 2025, https://richardli.xyz/rl-collapse).

    Args:
        config: What to correct and how.
        train_log_probs: log π_train (π_old, or the current policy): a list of [T_i], [B, T], or packed [N].
        rollout_log_probs: log π_rollout in the same layout; in a list, None for a sample that has none.
        loss_mask: bool, int or float, nonzero at valid tokens, in the same layout.
        lengths: Lengths of the sequences in packed [N] tensors.
        global_batch: The batch that these sequences belong to: the ranks that share it, and what is known of it
            where this is one of its micro-batches. By default it is these sequences. Where it is sliced over
            context-parallel ranks, one [S, k] table is summed over them, and a few small ones more where this call
            finds the second-moment limit; at the levels prefix and segment the one sum is of the [N, 3] tokens of
            the whole responses, and takes lists or packed tokens with `Ranks.slices`.
        token_pass: The function that reads the tokens, for example fused kernels.

    Returns:
        Weights, mask, statistics, and tokens per sequence. Nothing synchronises with the host, but for the check of
        `nonfinite_policy="raise"`.

    Raises:
        TypeError: if the configuration is of another class, verl's for example.
        ValueError: if the layouts disagree, naming the sequence and both lengths; if a token is not finite
            under the "raise" policy; if a level needs whole sequences and there are slices without their places.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        raise TypeError(f"config is {type(config).__name__}; pass a slime_tis.RolloutCorrectionConfig.")
    ranks = global_batch.ranks
    if ranks.context is not None and whole_sequence_levels(config):
        slices = _places(config, ranks.slices)
        whole = gather_slices(train_log_probs, rollout_log_probs, loss_mask, lengths, slices, ranks.over_context)
        known = replace(global_batch, ranks=Ranks(data=ranks.data))
        found: Correction[Any] = correct(
            config, *whole, lengths=slices.lengths, global_batch=known, token_pass=token_pass
        )
        return _sliced(found, slices, global_batch.ranks, as_list=not isinstance(train_log_probs, Tensor))
    layout = as_layout(train_log_probs, rollout_log_probs, loss_mask, lengths)
    tokens = [token_pass(config, chunk) for chunk in layout.chunks()]
    if config.rs_second_moment_bound is not None:
        limit = global_batch.second_moment_limit
        if limit is None:
            limit = limit_of_batch(tokens, config.rs_second_moment_bound, layout.device, ranks)
            global_batch = replace(global_batch, second_moment_limit=limit)
        tokens = trim_second_moment(config, tokens, limit)
    columns = sequence_columns(config)
    no_sequence = torch.zeros(0, number_of_columns(columns), dtype=torch.float64, device=layout.device)
    table = ranks.over_context(torch.cat([no_sequence, *(part.table_S for part in tokens)]))
    sums_S: SequenceSums[Tensor] = named(columns, table.unbind(1))
    if config.adaptive and global_batch.adaptive_bounds is None:
        global_batch = replace(global_batch, adaptive_bounds=adaptive_bounds(config, [sums_S], ranks))
    sequences = sequence_pass(config, sums_S, global_batch.adaptive_bounds if config.adaptive else None)
    statistics = _statistics(config, tokens, sequences)
    scale = sequences.weight_S
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


def _sliced(found: Correction[Tensor], slices: ResponseSlices, ranks: Ranks, *, as_list: bool) -> Correction[Any]:
    """This rank's slices of a correction of whole sequences."""
    parts: list[Any] = [slices.slice_flat(whole) for whole in (found.weights, found.mask)]
    weights, mask = [list(part.split(slices.local_lengths)) for part in parts] if as_list else parts
    global_batch = replace(found.global_batch, ranks=ranks)
    whole: Correction[Any] = found
    return replace(whole, weights=weights, mask=mask, lengths=slices.local_lengths, global_batch=global_batch)


def _flat(values: Tensor | list[Tensor]) -> Tensor:
    """All tokens, one sequence after another."""
    if isinstance(values, Tensor):
        return values.reshape(-1)
    return torch.cat(values) if values else torch.zeros(0)


def _shapes(values: Tensor | list[Tensor]) -> tuple[int, ...] | list[tuple[int, ...]]:
    return tuple(values.shape) if isinstance(values, Tensor) else [tuple(value.shape) for value in values]


def _places(config: RolloutCorrectionConfig, slices: ResponseSlices | None) -> ResponseSlices:
    if slices is None:
        raise ValueError(
            f"{whole_sequence_levels(config)[0]} needs whole sequences, but they are sliced over context-parallel "
            f"ranks; say where the slices lie with Ranks(…, slices=response_slices(…)), or choose another level."
        )
    return slices


def _statistics(config: RolloutCorrectionConfig, tokens: list[TokenPass], sequences: SequencePass) -> Statistics:
    """The statistics of the sequences, and the extremes of weights that differ from token to token."""
    found = [part.extremes for part in tokens if part.extremes is not None]
    if found:
        mins, maxs = (named(EXTREMES, values.unbind()) for values in (sequences.mins, sequences.maxs))
        mins.ratio.copy_(torch.stack([part.ratio_min for part in found]).amin())
        maxs.ratio.copy_(torch.stack([part.ratio_max for part in found]).amax())
        maxs.weight.copy_(torch.stack([part.weight_max for part in found]).amax())
    return Statistics(config=config, sums=sequences.sums, mins=sequences.mins, maxs=sequences.maxs)


def _finish(
    config: RolloutCorrectionConfig, tokens: list[TokenPass], sequences: SequencePass, scale: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Blocks of final weights and masks: what each token got, times what its sequence got."""
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
            accepted.view(torch.uint8).mul_(sequences.accept_S.index_select(0, owner_R).to(torch.uint8)[:, None])
        weights.append(weight.to(torch.float32))
        masks.append(accepted)
    return weights, masks
