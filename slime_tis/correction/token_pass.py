"""The one pass over the tokens of a chunk: weight, verdict, and the row sums of everything that is measured.

This is the seam of a fused kernel: `token_pass` reads a chunk once and returns two blocks and a table; all that
follows works on that table, one line per sequence.

Shapes: suffix _RK is [rows, row width], _R per row, _S per sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.correction.blocks import Chunk
from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.criteria import TOKEN_AGGREGATIONS, Criterion
from slime_tis.correction.ratio import Tokens, clean, indicator, safe_exp, token_log_weights
from slime_tis.correction.rejection import accepted, catastrophic_tokens, k3_divergence, token_statistic
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
WEIGHT_COLUMNS = ("raw_excess", "weight", "weight_squared", "high", "low")
BEYOND_ANY_WEIGHT = 1e30
"""Added at invalid tokens before a minimum is taken; weights end at exp(20)."""


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
    weight_min: Tensor | None
    """Smallest bounded weight of a valid token; None where weights are sequence-wide or off."""
    weight_max: Tensor | None
    """Largest one."""
    sequence_R: Tensor
    """Which sequence of the chunk owns the row."""


def column_names(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """Names of the columns of the table of sequences; they depend on the options only, never on data."""
    names = list(MISMATCH_COLUMNS)
    if has_token_weights(config):
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
    weight, lowest, highest, columns = _weigh(config, tokens, chunk, ratio)
    columns |= _mismatch_columns(tokens, ratio)
    columns.setdefault("raw_excess", columns["excess"])
    rs_keep = keep = _apply_criteria(config.rejections, tokens, chunk, columns)
    if has_token_weights(config) and config.tis_mode == "mask":
        keep = rs_keep * inside(weight)
    if config.adaptive:
        columns["k3"] = k3_divergence(tokens.log_ratio_RK.double()).sum(-1)  # float32 keeps three digits of 1e-4
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
        weight_min=lowest,
        weight_max=highest,
        sequence_R=chunk.sequence_R,
    )


def has_token_weights(config: RolloutCorrectionConfig) -> bool:
    """Whether importance weights differ from token to token."""
    return config.use_tis and config.tis_level in TOKEN_AGGREGATIONS


def _mismatch_columns(tokens: Tokens, ratio_RK: Tensor) -> dict[str, Tensor]:
    """Row sums of what is measured in every configuration; takes `ratio_RK` over.

    excess is ρ − 1, 0 at invalid tokens: Σ(e^Δ − Δ − 1), Σρ and Σ(ρ² − 1) all follow from Σ(ρ − 1) and
    Σ(ρ − 1)² without a large sum being subtracted from another.
    """
    excess = ratio_RK.sub_(1)
    original, valid = tokens.original_RK.sum(-1), tokens.valid_RK.sum(-1)
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
) -> tuple[Tensor, Tensor | None, Tensor | None, dict[str, Tensor]]:
    """Weight of every token (1 where weights are sequence-wide or off), smallest, largest, and row sums."""
    if not has_token_weights(config):
        return tokens.valid_RK, None, None, {}
    raw = ratio_RK if config.tis_level == "token" else safe_exp(token_log_weights(config.tis_level, tokens, chunk))
    bounded = bounded_weights(raw, config.tis_mode, *config.is_bounds)
    lowest = _smallest(config, bounded, tokens)
    weight = bounded.mul_(tokens.valid_RK)
    return weight, lowest, weight.amax(), _weight_columns(config, raw, weight, tokens)


def _smallest(config: RolloutCorrectionConfig, bounded_RK: Tensor, tokens: Tokens) -> Tensor:
    """The smallest bounded weight of a valid token: division by the mask makes the others infinite.

    The mask mode has weights of 0, and 0/0 is no number, so there a large number is added to the others.
    """
    if config.tis_mode == "mask":
        return torch.add(bounded_RK, 1 - tokens.valid_RK, alpha=BEYOND_ANY_WEIGHT).amin()
    return torch.div(bounded_RK, tokens.valid_RK, out=tokens.scratch_RK).amin()


def _weight_columns(
    config: RolloutCorrectionConfig, raw_RK: Tensor, weight_RK: Tensor, tokens: Tokens
) -> dict[str, Tensor]:
    """Row sums of the weights; for the token level Σ(w − 1) before the mode is `excess`, measured anyway."""
    lower, upper = config.is_bounds
    valid, scratch = tokens.valid_RK, tokens.scratch_RK
    varies = config.tis_level != "token"
    columns = {
        "weight": weight_RK.sum(-1),
        "weight_squared": _sum_of_squares(weight_RK),
        "high": _count_valid(indicator(torch.gt, raw_RK, upper, scratch), valid, needed=varies or upper < 1),
    }
    if config.tis_mode == "truncate":
        columns["low"] = torch.zeros_like(columns["high"])
    else:
        columns["low"] = _count_valid(indicator(torch.lt, raw_RK, lower, scratch), valid, needed=varies or lower > 1)
    if varies:
        columns["raw_excess"] = torch.sub(raw_RK, 1, out=scratch).mul_(valid).sum(-1)
    return columns


def _count_valid(found_RK: Tensor, valid_RK: Tensor, *, needed: bool) -> Tensor:
    """Valid tokens where something was found; not needed where nothing can be found at the others, of ratio 1."""
    return (found_RK.mul_(valid_RK) if needed else found_RK).sum(-1)


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
