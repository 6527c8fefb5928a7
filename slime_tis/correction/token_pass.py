"""The one pass over the tokens of a chunk: weight, verdict, and the row sums of everything that is measured.

This is the seam of a fused kernel: `token_pass` reads a chunk once and returns two blocks and a table; all that
follows works on that table, one line per sequence.

Shapes: suffix _RK is [rows, row width], _R per row, _S per sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction.adaptive import clamped_k3
from slime_tis.correction.blocks import Chunk
from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.criteria import Criterion
from slime_tis.correction.ratio import Tokens, clean, indicator, ratio_excess_, safe_exp, token_log_weights
from slime_tis.correction.rejection import accepted, catastrophic_tokens, token_statistic
from slime_tis.correction.weights import bounded_weights, inside

MISMATCH_COLUMNS = (
    "original",
    "valid",
    "nonfinite",
    "train",
    "log_ratio",
    "abs_log_ratio",
    "excess",
    "excess_squared",
)
WEIGHT_COLUMNS = ("raw_excess", "weight", "weight_excess", "weight_excess_squared", "high", "low")


@dataclass(frozen=True)
class TokenPass:
    """What one pass over a chunk yields."""

    weight_RK: Tensor
    """Bounded weight of the token, 0 at invalid tokens; 1 at valid ones where the level is sequence-wide."""
    keep_RK: Tensor
    """bool, True at valid tokens that no per-token criterion rejects."""
    squares_RK: Tensor | None
    """Δ² at valid tokens and +inf elsewhere, kept only for second-moment trimming."""
    table_S: Tensor
    """[sequences of the chunk, columns], float64, in the order of `column_names`."""
    extremes: "Extremes | None"
    """Of the weights of valid tokens; None where weights are sequence-wide or off."""
    sequence_R: Tensor
    """Which sequence of the chunk owns the row."""


@dataclass(frozen=True)
class Extremes:
    """Smallest and largest weight of a chunk's valid tokens; where there is none, +inf and 0."""

    ratio_min: Tensor
    """Of the weights before the mode."""
    ratio_max: Tensor
    """Of the weights before the mode."""
    weight_max: Tensor
    """Of the weights inside the bounds in mask mode; in other modes `ratio_max`, which the mode then bounds."""


def column_names(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """Names of the columns of the table of sequences; they depend on the options only, never on data."""
    names = list(MISMATCH_COLUMNS)
    if config.has_token_weights:
        names += WEIGHT_COLUMNS
    for criterion in config.rejections:
        if criterion.per_token or criterion.aggregation == "max":
            names.append(f"outside:{criterion.name}")
        elif criterion.divergence != "k1":
            names.append(f"divergence:{criterion.name}")
    if config.adaptive:
        names.append("k3")
    if config.vetoes:
        names.append("catastrophic")
    if config.rs_second_moment_bound is not None:
        names.append("trimmed")
    return (*names, "rs_kept", "kept")


def token_pass(config: RolloutCorrectionConfig, chunk: Chunk) -> TokenPass:
    """Weights, verdicts and row sums of one chunk."""
    tokens = clean(chunk, config.nonfinite_policy)
    valid = tokens.valid_RK
    ratio = safe_exp(tokens.log_ratio_RK)
    weight, extremes, columns = _weigh(config, tokens, chunk, ratio)
    columns |= _mismatch_columns(tokens, ratio)
    columns.setdefault("raw_excess", columns["excess"])
    rs_keep = keep = _apply_criteria(config.rejections, tokens, chunk, columns)
    if config.has_token_weights and config.tis_mode == "mask":
        keep = rs_keep * inside(weight)
    if config.adaptive:
        columns["k3"] = clamped_k3(tokens.log_ratio_RK).sum(-1)
    if config.vetoes:
        columns["catastrophic"] = catastrophic_tokens(config, tokens).sum(-1)
    if config.rs_second_moment_bound is not None:
        columns["trimmed"] = torch.zeros_like(columns["valid"])
    if not config.touches_loss:
        weight = keep = tokens.original_RK
    columns["rs_kept"] = columns["valid"] if rs_keep is valid else rs_keep.sum(-1)
    columns["kept"] = columns["rs_kept"] if keep is rs_keep else keep.sum(-1)
    return TokenPass(
        weight_RK=weight,
        keep_RK=keep.bool(),
        squares_RK=_squares(tokens) if config.rs_second_moment_bound is not None else None,
        table_S=_add_rows(config, columns, chunk),
        extremes=extremes,
        sequence_R=chunk.sequence_R,
    )


def _mismatch_columns(tokens: Tokens, ratio_RK: Tensor) -> dict[str, Tensor]:
    """Row sums of what is measured in every configuration; takes `ratio_RK` over.

    excess is ρ − 1, 0 at invalid tokens: Σ(e^Δ − Δ − 1), Σρ and Σ(ρ² − 1) all follow from Σ(ρ − 1) and
    Σ(ρ − 1)² without a large sum being subtracted from another.
    """
    excess = ratio_excess_(ratio_RK, tokens.log_ratio_RK, tokens.scratch_RK)
    original, valid = tokens.original_RK.sum(-1), tokens.valid_R
    return {
        "original": original,
        "valid": valid,
        "nonfinite": original - valid if tokens.nonfinite_RK is None else tokens.nonfinite_RK.sum(-1),
        "train": tokens.train_R,
        "log_ratio": tokens.log_ratio_RK.sum(-1),
        "abs_log_ratio": torch.abs(tokens.log_ratio_RK, out=tokens.scratch_RK).sum(-1),
        "excess": excess.sum(-1),
        "excess_squared": _sum_of_squares(excess),
    }


def _apply_criteria(
    criteria: tuple[Criterion, ...], tokens: Tokens, chunk: Chunk, columns: dict[str, Tensor]
) -> Tensor:
    """1.0 at valid tokens that all per-token criteria keep; `columns` gets what the other criteria need."""
    keep = tokens.valid_RK
    for criterion in criteria:
        if not criterion.per_token and criterion.divergence == "k1":
            continue
        statistic = token_statistic(criterion, tokens, chunk)
        if criterion.aggregation in ("sum", "mean"):
            columns[f"divergence:{criterion.name}"] = statistic.sum(-1)
            continue
        within = accepted(criterion, statistic).mul_(tokens.valid_RK)
        columns[f"outside:{criterion.name}"] = columns["valid"] - within.sum(-1)
        if criterion.per_token:
            keep = within if keep is tokens.valid_RK else keep * within
    return keep


def _weigh(
    config: RolloutCorrectionConfig, tokens: Tokens, chunk: Chunk, ratio_RK: Tensor
) -> tuple[Tensor, Extremes | None, dict[str, Tensor]]:
    """Weight of every token (1 where weights are sequence-wide or off), the extremes, and row sums.

    At the token level `ratio_RK` is 0 at invalid tokens afterwards.
    """
    valid = tokens.valid_RK
    if not config.has_token_weights:
        return valid, None, {}
    raw = ratio_RK if config.tis_level == "token" else safe_exp(token_log_weights(config.tis_level, tokens, chunk))
    lowest = torch.div(raw, valid, out=tokens.scratch_RK).amin()  # x/0 is +inf: no minimum
    raw.mul_(valid)
    weight = bounded_weights(raw, config.tis_mode, *config.is_bounds)
    if config.tis_mode == "clip":
        weight.mul_(valid)
    highest = raw.amax()
    extremes = Extremes(lowest, highest, weight.amax() if config.tis_mode == "mask" else highest)
    return weight, extremes, _weight_columns(config, raw, weight, tokens)


def _weight_columns(
    config: RolloutCorrectionConfig, raw_RK: Tensor, weight_RK: Tensor, tokens: Tokens
) -> dict[str, Tensor]:
    """Row sums of the weights; for the token level Σ(w − 1) before the mode is `excess`, measured anyway.

    The deviation is taken from Σ(w − 1)²: that of weights near 1 is lost in the float32 sum of w².

    Args:
        config: The options.
        raw_RK: The weight before the mode, 0 at invalid tokens.
        weight_RK: The weight after it, 0 at invalid tokens.
        tokens: Of the chunk.
    """
    lower, upper = config.is_bounds
    valid, scratch = tokens.valid_RK, tokens.scratch_RK
    invalid = valid.shape[-1] - tokens.valid_R  # their ratio of 0 is below any bound
    columns = {
        "weight": weight_RK.sum(-1),
        "high": indicator(torch.gt, raw_RK, upper, scratch).sum(-1),
        "low": indicator(torch.lt, raw_RK, lower, scratch).sum(-1).sub_(invalid),
    }
    excess = torch.sub(weight_RK, valid, out=scratch)
    columns |= {"weight_excess": excess.sum(-1), "weight_excess_squared": _sum_of_squares(excess)}
    if config.tis_level != "token":
        columns["raw_excess"] = torch.sub(raw_RK, valid, out=scratch).sum(-1)
    return columns


def _squares(tokens: Tokens) -> Tensor:
    return torch.where(tokens.valid_RK > 0, tokens.log_ratio_RK.square(), torch.inf)


def _sum_of_squares(x_RK: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_RK, dim=-1).square_()


def _add_rows(config: RolloutCorrectionConfig, columns: dict[str, Tensor], chunk: Chunk) -> Tensor:
    """Rows added into sequences, in float64."""
    names = column_names(config)
    rows = torch.stack([columns[name] for name in names], 1).to(torch.float64)
    table = torch.zeros(chunk.count, len(names), dtype=torch.float64, device=rows.device)
    return table.index_add_(0, chunk.sequence_R, rows)
