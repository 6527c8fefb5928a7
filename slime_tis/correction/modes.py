"""The tables of the correction: modes of weights, levels of aggregation, rejection criteria. The options need no torch.

Sources of the modes: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(https://fengyao.notion.site/off-policy-rl) for truncation, "Every Step Evolves"
(https://arxiv.org/abs/2510.18855, IcePop) for the mask.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

ModeName = Literal["truncate", "clip", "mask"]
Level = Literal["token", "sequence", "geometric", "prefix", "segment"]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One mode of importance weights."""

    bound: "Callable[[Tensor, Any, Any], Tensor]"
    """(w, lower, upper) to the bounded weight in new memory, for w of any shape; bounds are numbers
    or tensors."""
    high_fraction: str
    """Metric: share of the weights above the upper bound."""
    low_fraction: str
    """Metric: share of the weights below the lower bound."""
    has_lower_bound: bool = True
    """Whether the lower bound changes weights."""
    rejects: bool = False
    """Whether a weight out of bounds becomes 0 and rejects its token or sequence."""


MODES: dict[ModeName, Mode] = {
    "truncate": Mode(
        bound=lambda raw, lower, upper: raw.clamp_max(upper),
        high_fraction="truncate_fraction",
        low_fraction="ratio_fraction_low",
        has_lower_bound=False,
    ),
    "clip": Mode(
        bound=lambda raw, lower, upper: raw.clamp(lower, upper),
        high_fraction="clip_fraction_high",
        low_fraction="clip_fraction_low",
    ),
    "mask": Mode(
        bound=lambda raw, lower, upper: (
            raw.clone().le_(upper).mul_(raw.clone().ge_(lower)).mul_(raw)
        ),
        high_fraction="mask_fraction_high",
        low_fraction="mask_fraction_low",
        rejects=True,
    ),
}
"""Modes by their command-line name (--tis-mode)."""


@dataclass(frozen=True, kw_only=True)
class LevelRule:
    """How log-ratios become a log-weight."""

    aggregation: str
    """token, prefix or segment: a value per token (`ratio.TOKEN_LEVELS`); sum or mean: one per
    sequence."""
    per_token: bool
    """Whether weights and verdicts differ from token to token."""
    needs_complete_sequences: bool = False
    """Whether a token's value depends on tokens of other context-parallel slices in more than their
    sum."""


LEVELS: dict[Level, LevelRule] = {
    "token": LevelRule(aggregation="token", per_token=True),
    "sequence": LevelRule(aggregation="sum", per_token=False),
    "geometric": LevelRule(aggregation="mean", per_token=False),
    "prefix": LevelRule(aggregation="prefix", per_token=True, needs_complete_sequences=True),
    "segment": LevelRule(aggregation="segment", per_token=True, needs_complete_sequences=True),
}
"""Levels by their command-line name (--tis-level, --rs-level)."""
SEQUENCE_LEVELS = tuple(sorted(name for name, rule in LEVELS.items() if not rule.per_token))
TOKEN_AGGREGATIONS = tuple(rule.aggregation for rule in LEVELS.values() if rule.per_token)

CRITERIA = {
    **{f"token_{divergence}": ("token", divergence) for divergence in ("k1", "k2", "k3")},
    **{
        f"seq_{kind}_{divergence}": (kind, divergence)
        for kind in ("sum", "mean")
        for divergence in ("k1", "k2", "k3")
    },
    **{f"seq_max_{divergence}": ("max", divergence) for divergence in ("k2", "k3")},
    "seq_mean_error": ("mean", "error"),
}
"""verl's names of a criterion, and NeMo-RL's error: how the divergence is aggregated, and which
divergence (`rules.DIVERGENCES`)."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One rejection criterion: accept where lower ≤ statistic ≤ upper."""

    name: str
    """Name in the metrics: verl's for `rollout_rs` criteria, the level's for `rs_level`."""
    aggregation: str
    """token, prefix or segment (a verdict per token); sum, mean or max (a verdict per sequence)."""
    divergence: str
    """k1 = Δ, bounded on the ratio exp(Δ); others are bounded above."""
    lower: float | None = None
    """Lower bound on the ratio (k1), 0 for none; None for other divergences."""
    upper: float
    """Upper bound: on the ratio for k1, on the divergence itself for others."""
    adaptive: bool = False
    """Whether `AdaptiveBounds` provides the bounds, instead of `lower` and `upper`."""
    anchor: str | None = None
    """rollout or old, with which the divergence mask compares the current policy; None of other
    criteria."""
    bound_negative: float | None = None
    """Bound at negative advantages, of a divergence mask with direction away."""

    @property
    def log_bounds(self) -> tuple[float, float]:
        """Bounds on the log-ratio, of a k1 criterion."""
        return (math.log(self.lower) if self.lower else -math.inf), math.log(self.upper)

    @property
    def per_token(self) -> bool:
        """Whether the verdict is taken token by token."""
        return self.aggregation in TOKEN_AGGREGATIONS

    @property
    def uses_log_ratio(self) -> bool:
        """Whether the statistic follows from the Σ Δ of a sequence, which needs no sum of its own."""
        return not (self.per_token or self.aggregation == "max") and self.divergence == "k1"

    @property
    def sums_divergence(self) -> bool:
        """Whether the divergence is summed over a sequence; otherwise its tokens out of bounds are counted."""
        return not (self.per_token or self.aggregation == "max") and self.divergence != "k1"


def parse_criteria(names: str | None, thresholds: str | float | None) -> tuple[Criterion, ...]:
    """verl's comma-separated criteria and thresholds, repeated names taken once.

    Args:
        names: `token_k1,seq_max_k3`, or None for no criterion.
        thresholds: `0.5_2.0,0.01`: one for all or one each; `lower_upper` or `upper` for k1, else
            `upper`. A lower bound of 0 is none.

    Raises:
        ValueError: if a name is unknown, a threshold is missing or not a positive number, or counts
            differ.
    """
    if not names:
        return ()
    options = list(dict.fromkeys(_items(names))) or [","]
    for option in options:
        if option not in CRITERIA:
            hint = f"write --use-rs --rs-level {option}; or " if option in LEVELS else ""
            if option == "seq_max_k1":
                hint = (
                    "bound every ratio with --rs-veto-threshold and --rs-veto-upper-threshold; or "
                )
            raise ValueError(
                f"--rollout-rs names {option[:80]!r}; {hint}choose from {', '.join(CRITERIA)}."
            )
    specs = _items(thresholds)
    if len(specs) not in (1, len(options)):
        raise ValueError(
            f"--rollout-rs-threshold gives {len(specs)} values for {len(options)} criteria of"
            " --rollout-rs; give one for all or one each."
        )
    specs = specs * len(options) if len(specs) == 1 else specs
    return tuple(_criterion(option, spec) for option, spec in zip(options, specs, strict=True))


def _items(text: str | float | None) -> list[str]:
    return [item.strip() for item in str("" if text is None else text).split(",") if item.strip()]


@lru_cache
def _criterion(name: str, spec: str) -> Criterion:
    aggregation, divergence = CRITERIA[name]
    is_ratio = divergence == "k1"
    message = f"--rollout-rs-threshold {spec[:80]!r} for {name} is not "
    message += (
        "lower_upper or a single upper bound, such as 0.5_2.0"
        if is_ratio
        else "a single upper bound"
    )
    try:
        *lowers, upper = (float(part) for part in spec.split("_"))
    except ValueError as error:
        raise ValueError(f"{message}: write numbers.") from error
    if len(lowers) > is_ratio:
        raise ValueError(f"{message}.")
    if not (0 < upper < math.inf and all(0 <= number < math.inf for number in lowers)):
        raise ValueError(f"{message}; give finite numbers above 0, or 0 for no lower bound.")
    if divergence == "error" and upper < 1:
        raise ValueError(
            f"--rollout-rs-threshold {upper:g} of {name} rejects all: mean exp(|Δ|) is at least 1;"
            " use 2."
        )
    lower = (lowers[0] if lowers else 1.0 / upper) if is_ratio else None
    return Criterion(
        name=name, aggregation=aggregation, divergence=divergence, lower=lower, upper=upper
    )
