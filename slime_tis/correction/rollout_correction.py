"""The front door: log-probs of two policies in, weights, mask and mergeable statistics out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args, overload

import torch
from torch import Tensor

from slime_tis.correction.adaptive import AdaptiveBounds
from slime_tis.correction.adaptive import adaptive_bounds as bounds_of_tables
from slime_tis.correction.config import Normalizer, RolloutCorrectionConfig
from slime_tis.correction.context_parallel import ResponseSlices, join_slices, whole_sequence_levels
from slime_tis.correction.inputs import LogProbs
from slime_tis.correction.layout import as_layout
from slime_tis.correction.metrics import mean_weight, usable_mean
from slime_tis.correction.sequence_pass import SequencePass, sequence_pass
from slime_tis.correction.statistics import MAXIMA, MINIMA, Reduction, Statistics, sum_names
from slime_tis.correction.token_pass import TokenPass, column_names, token_pass
from slime_tis.correction.trimming import limit_of_batch, trim_second_moment

LayoutT = TypeVar("LayoutT", Tensor, list[Tensor])
Aggregation = Literal["token-mean", "seq-mean-token-mean"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


@dataclass(frozen=True)
class Correction(Generic[LayoutT]):
    """What to multiply into the loss, what to leave out, what was measured. Nothing carries a gradient."""

    weights: LayoutT
    """float32, in the layout of the input: 0 at invalid tokens, 1 at valid ones when IS is off."""
    mask: LayoutT
    """bool, in the layout of the input: the loss mask without what was rejected."""
    statistics: Statistics
    """To be merged over micro-batches and ranks, then read with `figures`."""
    valid_per_sequence: Tensor
    """[S] float64: tokens of the loss mask, over the whole sequence."""
    kept_per_sequence: Tensor
    """[S] float64: those of them that were kept."""
    per_sequence: dict[str, Tensor]
    """The table of sequences, name to [S] float64, over whole sequences: `valid` tokens, sums of `train`
    log-probs, of the `log_ratio` Δ and its absolute value, of the `excess` ρ − 1 and its square, and what the
    options add."""
    second_moment_limit: Tensor | None
    """Scalar, the smallest Δ² that was trimmed, +inf where none had to be; None without a second-moment bound."""
    adaptive_bounds: AdaptiveBounds | None
    """What sequences were judged by under `rs_z_score` or `rs_target_fraction`; else None."""
    lengths: tuple[int, ...]
    """Tokens of each sequence here, masked ones too; of a slice under context parallelism."""
    rejection_normalizer: Normalizer
    """Whether `mean` divides by what was kept or by all of the loss mask."""

    def units(self, aggregation: Aggregation = "token-mean") -> Tensor:
        """What `mean` divides by, a float64 scalar: tokens, or sequences that have any, kept or of the loss mask.

        Those of several micro-batches and data-parallel ranks add up to those of the global batch.
        """
        counts_S = self._counts_per_sequence()
        return counts_S.sum() if aggregation == "token-mean" else (counts_S > 0).sum().to(torch.float64)

    def mean(
        self, token_loss: LayoutT, *, aggregation: Aggregation = "token-mean", units: Tensor | None = None
    ) -> Tensor:
        """The corrected loss: Σ_t mask·weight·loss / units, and 0 with gradients of 0 where nothing is kept.

        Args:
            token_loss: Loss of each token in the layout of the input, with gradient. What stands at tokens that are
                not kept does not count, whatever it is; their gradient is 0, which a loss that is not finite there
                turns into NaN on its way back to the model.
            aggregation: verl's word for what is averaged: "token-mean" over all tokens, "seq-mean-token-mean" over
                the sequences' means.
            units: Of the global batch, where this is one of its micro-batches; `units(aggregation)` when None.

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
            repeats_S = torch.tensor(self.lengths, dtype=torch.int64, device=inverse_S.device)
            terms_N = terms_N * inverse_S.repeat_interleave(repeats_S, output_size=terms_N.numel()).to(terms_N.dtype)
        divisor = self.units(aggregation) if units is None else units
        return terms_N.sum() / divisor.clamp_min(1).to(terms_N.dtype)

    def _counts_per_sequence(self) -> Tensor:
        return self.kept_per_sequence if self.rejection_normalizer == "kept" else self.valid_per_sequence

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
    reduce_sequences: Reduction | None = ...,
    slices: ResponseSlices | None = ...,
    batch_norm_factor: Tensor | None = ...,
    second_moment_limit: Tensor | None = ...,
    adaptive_bounds: AdaptiveBounds | None = ...,
    reduce_batch: Reduction | None = ...,
) -> Correction[Tensor]: ...


@overload
def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor | None],
    loss_mask: Sequence[Tensor],
    *,
    reduce_sequences: Reduction | None = ...,
    slices: ResponseSlices | None = ...,
    batch_norm_factor: Tensor | None = ...,
    second_moment_limit: Tensor | None = ...,
    adaptive_bounds: AdaptiveBounds | None = ...,
    reduce_batch: Reduction | None = ...,
) -> Correction[list[Tensor]]: ...


@torch.no_grad()
def correct(
    config: RolloutCorrectionConfig,
    train_log_probs: LogProbs,
    rollout_log_probs: LogProbs,
    loss_mask: LogProbs,
    *,
    lengths: Sequence[int] | None = None,
    reduce_sequences: Reduction | None = None,
    slices: ResponseSlices | None = None,
    batch_norm_factor: Tensor | None = None,
    second_moment_limit: Tensor | None = None,
    adaptive_bounds: AdaptiveBounds | None = None,
    reduce_batch: Reduction | None = None,
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
        reduce_sequences: Sums a float64 [S, k] table over context-parallel ranks, each of which passes its
            slices of the same sequences; called once, and a few times more where this call is to find the
            second-moment limit. None when sequences are whole.
        slices: Where those slices lie, as `response_slices` says. Needed at the levels prefix and segment alone,
            whose one reduction is of the [N, 3] tokens of the whole responses; lists or packed tokens only.
        batch_norm_factor: Scalar, the mean weight of the global batch, when the caller already knows it.
        second_moment_limit: Scalar, the Δ² from which tokens of the global batch are trimmed, likewise; where
            micro-batches are corrected one by one it has to be found before, by a call with all of them.
        adaptive_bounds: What `rs_z_score` or `rs_target_fraction` come to for the global batch, likewise: from a
            call with all of them, or by `adaptive_bounds` from the tables of one call with each.
        reduce_batch: Sums small float64 tables over data-parallel ranks, when this call is to find factor, limit or
            bounds itself. None on one rank.

    Returns:
        Weights, mask, statistics, and tokens per sequence. Nothing synchronises with the host.

    Raises:
        TypeError: if the configuration is of another class, verl's for example.
        ValueError: if the layouts disagree, naming the sequence and both lengths; if a token is not finite
            under the "raise" policy; if a level needs whole sequences and there are slices without their places.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        raise TypeError(f"config is {type(config).__name__}; pass a slime_tis.RolloutCorrectionConfig.")
    if reduce_sequences is not None and whole_sequence_levels(config):
        where = _places(config, slices)
        whole = join_slices(train_log_probs, rollout_log_probs, loss_mask, lengths, where, reduce_sequences)
        found: Correction[Any] = correct(
            config,
            *whole,
            lengths=where.lengths,
            batch_norm_factor=batch_norm_factor,
            second_moment_limit=second_moment_limit,
            adaptive_bounds=adaptive_bounds,
            reduce_batch=reduce_batch,
        )
        cut = where.cut if isinstance(train_log_probs, Tensor) else where.parts
        return replace(found, weights=cut(found.weights), mask=cut(found.mask), lengths=where.local_lengths)
    layout = as_layout(train_log_probs, rollout_log_probs, loss_mask, lengths)
    tokens = [token_pass(config, chunk) for chunk in layout.chunks()]
    names = column_names(config)
    if config.rs_second_moment_bound is not None:
        if second_moment_limit is None:
            bound, ranks = config.rs_second_moment_bound, (reduce_sequences, reduce_batch)
            second_moment_limit = limit_of_batch(tokens, bound, layout.device, *ranks)
        kept, trimmed = names.index("kept"), names.index("trimmed")
        tokens = trim_second_moment(tokens, second_moment_limit, kept, trimmed)
    table = torch.cat(
        [torch.zeros(0, len(names), dtype=torch.float64, device=layout.device), *(t.table_S for t in tokens)]
    )
    if reduce_sequences is not None:
        table = reduce_sequences(table)
    columns = dict(zip(names, table.unbind(1), strict=True))
    if config.adaptive and adaptive_bounds is None:
        adaptive_bounds = bounds_of_tables(config, [columns], reduce_batch)
    sequences = sequence_pass(config, columns, adaptive_bounds if config.adaptive else None)
    statistics = _statistics(tokens, sequences)
    scale = _scale(config, sequences, batch_norm_factor, reduce_batch)
    weights, mask = _finish(config, tokens, sequences, scale)
    return Correction(
        weights=layout.restore(weights, torch.float32),
        mask=layout.restore(mask, torch.bool),
        statistics=statistics,
        valid_per_sequence=columns["original"],
        kept_per_sequence=sequences.kept_S,
        per_sequence=columns,
        second_moment_limit=second_moment_limit,
        adaptive_bounds=adaptive_bounds,
        lengths=tuple(layout.lengths),
        rejection_normalizer=config.rejection_normalizer,
    )


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
            f"ranks; say where the slices lie with slices=response_slices(…), or choose another level."
        )
    return slices


def _statistics(tokens: list[TokenPass], sequences: SequencePass) -> Statistics:
    """The statistics of the sequences, and the extremes of weights that differ from token to token."""
    mins, maxs = sequences.mins, sequences.maxs
    found = [part.extremes for part in tokens if part.extremes is not None]
    if found:
        mins[MINIMA.index("ratio")] = torch.stack([part.ratio_min for part in found]).amin()
        maxs[MAXIMA.index("ratio")] = torch.stack([part.ratio_max for part in found]).amax()
        maxs[MAXIMA.index("weight")] = torch.stack([part.weight_max for part in found]).amax()
    return Statistics(sums=sequences.sums, mins=mins, maxs=maxs)


def _scale(
    config: RolloutCorrectionConfig,
    sequences: SequencePass,
    batch_norm_factor: Tensor | None,
    reduce_batch: Reduction | None,
) -> Tensor | None:
    """What the weight block of a sequence is multiplied with, [S] or scalar; None for 1."""
    scale = sequences.weight_S
    if not (config.use_tis and config.tis_batch_normalize):
        return scale
    if batch_norm_factor is None:
        names = sum_names(config)
        pair = torch.stack([sequences.sums[names.index(name)] for name in ("weight", "weights")])
        batch_norm_factor = mean_weight(*(pair if reduce_batch is None else reduce_batch(pair)))
    factor = usable_mean(batch_norm_factor.to(torch.float64))
    return factor.reciprocal() if scale is None else scale / factor


def _finish(
    config: RolloutCorrectionConfig, tokens: list[TokenPass], sequences: SequencePass, scale: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Blocks of final weights and masks: what each token got, times what its sequence got."""
    weights, masks, first = [], [], 0
    while tokens:
        part = tokens.pop(0)
        owner_R = part.sequence_R + first
        first += part.table_S.shape[0]
        weight, keep = part.weight_RK, part.keep_RK
        if scale is not None:
            row_scale = scale if scale.dim() == 0 else scale.index_select(0, owner_R)[:, None]
            weight.mul_(row_scale.to(weight.dtype))
        if config.touches_loss:
            keep.view(torch.uint8).mul_(sequences.keep_S.index_select(0, owner_R).to(torch.uint8)[:, None])
        weights.append(weight.to(torch.float32))
        masks.append(keep)
    return weights, masks
