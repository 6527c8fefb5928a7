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
    level_of_complete_sequences,
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
    """The global batch of a call: the ranks that share it, and the statistics that it needs.

    A call with all sequences of the rank computes the statistics that are None, and returns them as
    `Correction.global_batch`. Pass that object to calls with one micro-batch each.
    """

    ranks: Ranks = ONE_RANK
    """The ranks that share the batch."""
    batch_norm_factor: Tensor | None = None
    """Scalar, the mean weight; needed with `tis_batch_normalize`."""
    second_moment_limit: Tensor | None = None
    """Scalar, the smallest Δ² that is trimmed, in nats²; +inf if no token is trimmed. Needed with
    `rs_second_moment_bound`."""
    adaptive_bounds: AdaptiveBounds | None = None
    """Rejection bounds; needed with `rs_z_score` or `rs_target_fraction`."""


THIS_CALL = GlobalBatch()
"""The default: the sequences of the call are the global batch."""


@dataclass(frozen=True)
class Correction(Generic[LayoutT]):
    """Weights to multiply into the loss, mask of accepted tokens, and statistics.

    No tensor carries a gradient.
    """

    weights: LayoutT
    """float32, in the layout of the input: 0 at invalid tokens, 1 at valid ones when IS is off."""
    mask: LayoutT
    """bool, in the layout of the input: the loss mask without rejected tokens."""
    statistics: Statistics
    """To be merged over micro-batches and ranks; then `statistics.metrics()`."""
    masked_in_per_sequence: Tensor
    """[S] float64: tokens of the loss mask in the complete sequence, over all ranks."""
    accepted_per_sequence: Tensor
    """[S] float64: tokens of `mask` in the complete sequence, over all ranks."""
    sequence_sums: SequenceSums[Tensor]
    """Per-sequence sums over the tokens, [S] float64; of complete sequences, over all ranks."""
    global_batch: GlobalBatch
    """The given global batch, completed by this call: mean weight, second-moment limit, bounds."""
    lengths: tuple[int, ...]
    """Tokens per sequence, including masked tokens. Under context parallelism, of this rank's
    slice."""
    rejection_normalizer: Normalizer
    """Whether `mean` divides by the accepted tokens ("kept") or by the tokens of the loss mask
    ("original")."""

    def loss_denominator(self, aggregation: Aggregation = "token-mean") -> Tensor:
        """Returns the divisor of `mean`, a float64 scalar.

        It is the number of tokens, or of sequences with at least one token; `rejection_normalizer`
        decides whether accepted tokens count or all tokens of the loss mask. Add the values of all
        micro-batches and data-parallel ranks to get the divisor of the global batch.
        """
        counts_S = self._counts_per_sequence()
        if aggregation == "token-mean":
            return counts_S.sum()
        return (counts_S > 0).sum().to(torch.float64)

    def mean(
        self,
        token_loss: LayoutT,
        *,
        aggregation: Aggregation = "token-mean",
        denominator: Tensor | None = None,
    ) -> Tensor:
        """The corrected loss: Σ_t mask·weight·loss / denominator.

        If everything is rejected, the loss is 0 and its gradients are 0.

        Args:
            token_loss: Loss per token in the layout of the input, with gradient. Rejected and
                masked tokens do not count, whatever their loss is. Their gradient here is 0, but
                the chain rule multiplies it with the derivative of the loss, so a non-finite loss
                still gives NaN in the model.
            aggregation: verl's `loss_agg_mode`: "token-mean" averages over all tokens,
                "seq-mean-token-mean" averages per-sequence means.
            denominator: For a micro-batch: the sum of `loss_denominator(aggregation)` over the
                global batch. If None, this call's own denominator.

        Returns:
            Scalar of the loss's dtype, at least float32. There is no host synchronisation.

        Raises:
            ValueError: if the loss is not in the layout of the mask, or the aggregation is unknown.
        """
        if aggregation not in AGGREGATIONS:
            raise ValueError(
                f"aggregation is {aggregation!r}; choose one of {', '.join(AGGREGATIONS)}."
            )
        loss_shape = _shapes(token_loss)
        mask_shape = _shapes(self.mask)
        if loss_shape != mask_shape:
            raise ValueError(
                f"token_loss has shape {loss_shape} but the mask {mask_shape}; pass the loss in the"
                " mask's layout."
            )
        # `where`, not a product: 0·inf is NaN
        loss_N = torch.where(_flat(self.mask).bool(), _flat(token_loss), 0.0)
        terms_N = loss_N * _flat(self.weights)
        if aggregation == "seq-mean-token-mean":
            inverse_S = self._counts_per_sequence().clamp_min(1).reciprocal()
            inverse_N = _per_token(inverse_S, self.lengths, terms_N.numel())
            terms_N = terms_N * inverse_N.to(terms_N.dtype)
        if denominator is None:
            denominator = self.loss_denominator(aggregation)
        return terms_N.sum() / denominator.clamp_min(1).to(terms_N.dtype)

    def _counts_per_sequence(self) -> Tensor:
        """Tokens per sequence by which the loss is divided, [S]."""
        if self.rejection_normalizer == "kept":
            return self.accepted_per_sequence
        return self.masked_in_per_sequence


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

    On valid tokens Δ_t = log π_train − log π_rollout. The level aggregates Δ to a log-weight L.
    The weight is w = exp(clamp(L, −20, 20)), bounded by the mode, and divided by the batch mean if
    `tis_batch_normalize` is set. Rejected tokens and sequences leave the mask.
    `slime_tis.correction.reference` has the same mathematics on one page, without speed.

    Source: "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch" (Liu, Li et al. 2025, https://richardli.xyz/rl-collapse).

    Args:
        config: The options of the correction.
        train_log_probs: log π_train (π_old, or the current policy): a list of [T_i], [B, T], or
            packed [N].
        rollout_log_probs: log π_rollout in the same layout. In a list, None for a sample without
            rollout log-probs.
        loss_mask: bool, int or float, nonzero at valid tokens, in the same layout.
        lengths: Lengths of the sequences in packed [N] tensors.
        current_log_probs: log π_θ in the same layout, for the divergence mask. If None, it is
            train_log_probs.
        advantages: Advantages in the same layout. A divergence mask with direction away and bounds
            by sign need them.
        global_batch: The ranks that share the global batch, and its statistics if this call is one
            micro-batch. By default these sequences are the global batch. Context-parallel ranks sum
            one [S, k] table. The levels prefix and segment gather complete responses instead, and
            need `Ranks.slices`.
        are_densities: Whether the log-probs are log-densities of continuous samples, for example
            of diffusion steps. These may have any size, but a token's log-prob of −9984 or less is
            an engine's code for minus infinity.

    Returns:
        Weights, mask, statistics, and tokens per sequence. There is a host synchronisation only
        with `nonfinite_policy="raise"`.

    Raises:
        TypeError: if the configuration has another class, for example verl's.
        ValueError: if the layouts disagree (it names the sequence and both lengths); if a token is
            not finite under the "raise" policy; if a level needs complete sequences but the slices
            have no positions.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        raise TypeError(
            f"config is {type(config).__name__}; pass a slime_tis.RolloutCorrectionConfig."
        )
    inputs = {
        "train_log_probs": train_log_probs,
        "rollout_log_probs": rollout_log_probs,
        "loss_mask": loss_mask,
    }
    if config.divergence_mask is not None or config.needs_advantages:
        inputs |= _policy_inputs(config, current_log_probs=current_log_probs, advantages=advantages)
    layout = as_layout(inputs, lengths)
    level = level_of_complete_sequences(config)
    if level is None or global_batch.ranks.context is None:
        return _correct(config, layout, global_batch, are_densities)
    if global_batch.ranks.slices is None:
        raise ValueError(
            f"{level} needs complete sequences, but they are sliced over context-parallel ranks;"
            " pass their positions with Ranks(…, slices=response_slices(…)), or choose another"
            " level."
        )
    return _correct_gathered(config, layout, global_batch.ranks.slices, global_batch, are_densities)


def _correct(
    config: RolloutCorrectionConfig, layout: Layout, global_batch: GlobalBatch, are_densities: bool
) -> Correction[Any]:
    """The correction from the layout of the inputs, in the order of docs/math.md."""
    ranks = global_batch.ranks
    tokens = []
    for number in range(layout.number_of_chunks):
        # No name holds the chunk: its memory is reused for the next one, while it is in the cache.
        tokens.append(token_pass(config, layout.chunk(number, are_densities=are_densities)))
    if config.rs_second_moment_bound is not None:
        limit = global_batch.second_moment_limit
        if limit is None:
            squares_N = _squares(tokens, layout.device)
            limit = second_moment_limit(squares_N, config.rs_second_moment_bound, ranks)
            global_batch = replace(global_batch, second_moment_limit=limit)
        tokens = [trim(config, chunk_pass, limit) for chunk_pass in tokens]
    sums_S = _sequence_sums(config, tokens, layout.device, ranks)
    bounds = None
    if config.adaptive:
        bounds = global_batch.adaptive_bounds
        if bounds is None:
            bounds = adaptive_bounds(config, [sums_S], ranks)
            global_batch = replace(global_batch, adaptive_bounds=bounds)
    sequences = sequence_pass(config, sums_S, bounds)
    statistics = sequences.statistics
    _take_extremes(tokens, statistics)
    scale = sequences.weight_S
    if config.use_tis and config.tis_batch_normalize:
        factor = global_batch.batch_norm_factor
        if factor is None:
            factor = statistics.batch_norm_factor(ranks)
            global_batch = replace(global_batch, batch_norm_factor=factor)
        scale = _normalized(scale, factor)
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


def _correct_gathered(
    config: RolloutCorrectionConfig,
    local: Layout,
    slices: ResponseSlices,
    global_batch: GlobalBatch,
    are_densities: bool,
) -> Correction[Any]:
    """Corrects complete sequences on every context-parallel rank, and keeps this rank's slices."""
    ranks = global_batch.ranks
    gathered = as_layout(gather_slices(local, slices, ranks), slices.lengths)
    # Each context-parallel rank has all tokens now, so only data-parallel ranks reduce.
    data_ranks = replace(global_batch, ranks=Ranks(data=ranks.data))
    complete = _correct(config, gathered, data_ranks, are_densities)
    return replace(
        complete,
        weights=local.shaped(slices.slice_flat(complete.weights)),
        mask=local.shaped(slices.slice_flat(complete.mask)),
        lengths=slices.local_lengths,
        global_batch=replace(complete.global_batch, ranks=ranks),
    )


def _squares(tokens: list[TokenPass], device: torch.device) -> Tensor:
    """Δ² of all chunks, [N]; +inf at invalid tokens."""
    # `cat` refuses an empty list, which a rank without a sequence has.
    squares = [torch.zeros(0, device=device)]
    for chunk_pass in tokens:
        assert chunk_pass.squares_RK is not None, "called without a second-moment bound"
        squares.append(chunk_pass.squares_RK.reshape(-1))
    return torch.cat(squares)


def _sequence_sums(
    config: RolloutCorrectionConfig, tokens: list[TokenPass], device: torch.device, ranks: Ranks
) -> SequenceSums[Tensor]:
    """Sums over complete sequences, [S], from the passes over all chunks and ranks' slices."""
    columns: SequenceSums[Any] = sequence_columns(config)
    # A rank without a sequence must reduce a table with the same columns as the others.
    no_sequence = torch.zeros(0, number_of_columns(columns), dtype=torch.float64, device=device)
    tables = [no_sequence]
    for chunk_pass in tokens:
        tables.append(chunk_pass.table_S)
    table = ranks.over_context(torch.cat(tables))
    sums_S: SequenceSums[Tensor] = named(columns, table.unbind(1))
    return sums_S


def _policy_inputs(
    config: RolloutCorrectionConfig, **inputs: LogProbs | None
) -> dict[str, LogProbs]:
    """The inputs of a divergence mask or of bounds by the advantage's sign, without None.

    Raises:
        ValueError: the mask or the bounds depend on the advantages, which are missing.
    """
    if config.needs_advantages and inputs["advantages"] is None:
        option = "divergence_mask"
        instead = "set divergence_mask_direction='both'"
        if config.signs_bounds:
            option = "tis_upper_bound_negative or tis_lower_bound_negative"
            instead = "remove it"
        raise ValueError(f"{option} needs advantages=; pass them, or {instead}.")
    return {name: values for name, values in inputs.items() if values is not None}


def _normalized(scale: Tensor | None, batch_norm_factor: Tensor) -> Tensor:
    """The scale of the weights, None for 1, divided by the mean weight of the batch."""
    divisor = usable_mean(batch_norm_factor.to(torch.float64))
    if scale is None:
        return divisor.reciprocal()
    return scale / divisor


def _flat(values: Tensor | list[Tensor]) -> Tensor:
    """All tokens, one sequence after another."""
    if isinstance(values, Tensor):
        return values.reshape(-1)
    if not values:
        return torch.zeros(0)
    return torch.cat(values)


def _shapes(values: Tensor | list[Tensor]) -> tuple[int, ...] | list[tuple[int, ...]]:
    """The shape of a tensor, or the shapes in a list, for comparisons and messages."""
    if isinstance(values, Tensor):
        return tuple(values.shape)
    return [tuple(value.shape) for value in values]


def _per_token(values_S: Tensor, lengths: Sequence[int], tokens: int) -> Tensor:
    """Repeats the value of a sequence for its tokens, [N]."""
    repeats_S = torch.tensor(lengths, dtype=torch.int64).to(values_S.device, non_blocking=True)
    # Without `output_size` a GPU would have to report the sum of the lengths to the host.
    return values_S.repeat_interleave(repeats_S, output_size=tokens)


def _take_extremes(tokens: list[TokenPass], statistics: Statistics) -> None:
    """Writes the extremes of per-token weights into the statistics, in place."""
    extremes = [part.extremes for part in tokens if part.extremes is not None]
    if not extremes:
        return
    # `smallest` has one column if the bounds depend on the advantage, else none
    lowest, highest, weight, *smallest = torch.stack(extremes).unbind(1)
    # Views, so that copy_ writes through.
    mins = statistics.mins.unbind()
    maxs = statistics.maxs.unbind()
    mins[EXTREMES.ratio].copy_(lowest.amin())
    maxs[EXTREMES.ratio].copy_(highest.amax())
    maxs[EXTREMES.weight].copy_(weight.amax())
    for values in smallest:
        mins[EXTREMES.weight].copy_(values.amin())


def _finish(
    config: RolloutCorrectionConfig,
    tokens: list[TokenPass],
    sequences: SequencePass,
    scale: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Multiplies token weights and masks by the sequence's weight and verdict, in place.

    Empties `tokens`, so that the memory of a chunk is free before the next one is finished.

    Args:
        config: The options.
        tokens: The passes over the chunks, in order.
        sequences: Sequence-wide verdicts.
        scale: Scalar, or [S], by which weights are multiplied; None for 1.

    Returns:
        Blocks of float32 weights, and of bool masks, one per chunk.
    """
    weights = []
    masks = []
    first = 0  # number of the chunk's first sequence
    while tokens:
        # Not a loop over `tokens`, which would keep all chunks until the end.
        part = tokens.pop(0)
        owner_R = part.sequence_R + first
        first += part.table_S.shape[0]
        weight = part.weight_RK
        if scale is not None:
            row_scale = scale
            if scale.dim() == 1:
                row_scale = scale.index_select(0, owner_R)[:, None]
            weight.mul_(row_scale.to(weight.dtype))
        if config.touches_loss:
            accept_R = sequences.accept_S.index_select(0, owner_R).to(torch.uint8)
            # Products of bytes vectorise on a CPU, products of bools do not.
            part.accepted_RK.view(torch.uint8).mul_(accept_R[:, None])
        weights.append(weight.to(torch.float32))
        masks.append(part.accepted_RK)
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
    """accept_t = not (A_t < 0 and mean_s(log π_old − log π_θ) > δ), s over the sequence's tokens.

    A token's own advantage decides. If a rejected sequence has advantages of both signs, its tokens
    with A_t ≥ 0 are trained. Masked tokens do not count in the mean.

    In the source, π_old is the policy as the inference engine sampled from it, so the bound covers
    both staleness and the mismatch between the engines. TRL does the same. slime uses π_old of the
    training engine, which equals π_θ until the second optimizer step of a rollout.

    Source: "DeepSeek-V3.2" (https://arxiv.org/abs/2512.02556), section 3.1, off-policy sequence
    masking, eq. 9.

    Args:
        log_probs: log π_θ, as a list of [T_i], padded [B, T], or packed [N] with `lengths`.
        old_log_probs: log π_rollout, or log π_old for slime's variant, in the same layout.
        advantages: One per token, in the same layout, or one per sequence, [S].
        loss_mask: Nonzero at valid tokens, in the same layout.
        delta: Bound on the mean log-ratio in nats per token, above 0. 0.1 is customary against
            π_rollout; slime's default against π_old is 1e-4.
        nonfinite_policy: How the mean treats tokens with a non-finite log-prob: "reject" excludes
            them, "neutral" counts them with a difference of 0, "raise" raises an error.
        lengths: Lengths of packed sequences.
        ranks: The ranks that share the sequences. Context-parallel ranks sum one table.

    Returns:
        bool in the layout of the advantages: True at accepted tokens, or at accepted sequences.
        Masked tokens are not accepted. Empty sequences are accepted.

    Raises:
        ValueError: if there is not one advantage per token or per sequence, or a token is not
            finite under "raise".
    """
    config = RolloutCorrectionConfig(nonfinite_policy=nonfinite_policy)
    inputs: tuple[Any, Any, Any] = (log_probs, old_log_probs, loss_mask)
    correction: Correction[Any] = correct(
        config, *inputs, lengths=lengths, global_batch=GlobalBatch(ranks=ranks)
    )
    sums_S = correction.sequence_sums
    # The sums are of log π_θ − log π_old, the negative of the formula's difference.
    mean_S = -sums_S.log_ratio / sums_S.valid.clamp_min(1)
    is_far_S = mean_S > delta
    if isinstance(advantages, Tensor) and advantages.shape == is_far_S.shape:
        return ~((advantages < 0) & is_far_S)
    if _shapes(advantages) != _shapes(correction.mask):
        raise ValueError(
            f"advantages has shape {_shapes(advantages)} for {len(correction.lengths)} sequences"
            f" and a mask of shape {_shapes(correction.mask)}; pass one per token or one per"
            " sequence."
        )
    advantage_N = _flat(advantages)
    mask_N = _flat(inputs[2])
    is_far_N = _per_token(is_far_S, correction.lengths, advantage_N.numel())
    accepted_N = (mask_N != 0) & ~((advantage_N < 0) & is_far_N)
    if isinstance(advantages, Tensor):
        return accepted_N.view(advantages.shape)
    return list(accepted_N.split(correction.lengths))


def interpolate_old_log_probs(
    log_probs: Tensor, rollout_log_probs: Tensor, current_version: int, rollout_versions: Tensor
) -> Tensor:
    """log π_old = log π_rollout + α·(log π_θ − log π_rollout) per token.

    α = clamp((v_θ − 1 − v)/(v_θ − v), 0, 1). v is the version of the weights that sampled the
    token, and v_θ is the current version. The old policy is taken to be version v_θ − 1, one step
    before the end of a straight line from v to v_θ. Tokens of the versions v_θ and v_θ − 1 have
    α = 0, so their old policy is the policy that sampled them. The same holds if v is unknown (<
    0).

    Source: AReaL, "Proximal Log-Probability Approximation"
    (https://inclusionai.github.io/AReaL/algorithms/prox_approx.html), the method `loglinear`.

    Args:
        log_probs: log π_θ of the tokens, any shape.
        rollout_log_probs: log π_rollout, of the same shape.
        current_version: v_θ, the version of the trained weights.
        rollout_versions: v per token, of the same shape; below 0 if unknown.

    Returns:
        Detached old log-probs. If v < 0 or v > v_θ, or a log-prob is not finite, they are the
        rollout's log-probs.

    Raises:
        ValueError: if the shapes differ.
    """
    shapes = [tuple(x.shape) for x in (log_probs, rollout_log_probs, rollout_versions)]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"log_probs has shape {shapes[0]}, rollout_log_probs {shapes[1]}, rollout_versions"
            f" {shapes[2]}; pass three tensors of one shape."
        )
    log_probs = log_probs.detach()
    rollout = rollout_log_probs.detach()
    # The subtraction is of integers: float32 counts exactly only up to 2²⁴.
    lag = (current_version - rollout_versions).to(rollout.dtype)
    # A token of a later version has a lag below 0, and (lag − 1)/lag would be above 1.
    fraction = ((lag - 1) / lag.clamp_min(1)).clamp(0, 1)
    difference = log_probs - rollout
    is_usable = (rollout_versions >= 0) & is_log_prob(log_probs) & is_log_prob(rollout)
    return torch.where(is_usable, rollout + fraction * difference, rollout)
