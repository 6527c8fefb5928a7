"""The tables of the correction: modes of weights, levels of aggregation, rejection criteria.

This module imports no torch, so that the command line starts quickly.

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
    """Function of (w, lower, upper) that returns the bounded weight in new memory. w has any shape,
    bounds are numbers or tensors."""
    high_fraction: str
    """Metric for the share of weights above the upper bound."""
    low_fraction: str
    """Metric for the share of weights below the lower bound."""
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
        # Comparisons in place give floats: they vectorise on a CPU, `where` does not.
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
    """token, prefix or segment for a value per token (`ratio.TOKEN_LEVELS`), sum or mean for a
    value per sequence."""
    per_token: bool
    """Whether weights and verdicts differ from token to token."""
    needs_complete_sequences: bool = False
    """Whether a token's value depends on the order of tokens in other context-parallel slices.
    Otherwise the ranks only need to add up sums."""


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
    "token_k1": ("token", "k1"),
    "token_k2": ("token", "k2"),
    "token_k3": ("token", "k3"),
    "seq_sum_k1": ("sum", "k1"),
    "seq_sum_k2": ("sum", "k2"),
    "seq_sum_k3": ("sum", "k3"),
    "seq_mean_k1": ("mean", "k1"),
    "seq_mean_k2": ("mean", "k2"),
    "seq_mean_k3": ("mean", "k3"),
    "seq_max_k2": ("max", "k2"),
    "seq_max_k3": ("max", "k3"),
    "seq_mean_error": ("mean", "error"),
}
"""Aggregation and divergence (`rejection.DIVERGENCES`) of verl's criteria and of NeMo-RL's error,
by name."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One rejection criterion: accept if lower ≤ statistic ≤ upper."""

    name: str
    """Name in the metrics: verl's for `rollout_rs` criteria, the level's for `rs_level`."""
    aggregation: str
    """token, prefix or segment for a verdict per token; sum, mean or max for one per sequence."""
    divergence: str
    """k1 = Δ has bounds on the ratio exp(Δ); the others have only an upper bound."""
    lower: float | None = None
    """Lower bound on the ratio (k1), 0 for none; None for other divergences."""
    upper: float
    """Upper bound: on the ratio for k1, on the divergence itself for others."""
    adaptive: bool = False
    """Whether `AdaptiveBounds` provides the bounds, instead of `lower` and `upper`."""
    anchor: str | None = None
    """The policy with which a divergence mask compares the current one, "rollout" or "old"; None
    for other criteria."""
    bound_negative: float | None = None
    """Bound at negative advantages, for a divergence mask with direction away."""

    @property
    def log_bounds(self) -> tuple[float, float]:
        """Bounds on the log-ratio, for a k1 criterion."""
        log_lower = -math.inf
        if self.lower:
            log_lower = math.log(self.lower)
        return log_lower, math.log(self.upper)

    @property
    def per_token(self) -> bool:
        """Whether the verdict is taken token by token."""
        return self.aggregation in TOKEN_AGGREGATIONS

    @property
    def averages(self) -> bool:
        """Whether the statistic is computed from a sum over the sequence, as sums and means are."""
        return not self.per_token and self.aggregation != "max"

    @property
    def uses_log_ratio(self) -> bool:
        """Whether the statistic follows from Σ Δ, which every sequence has."""
        return self.averages and self.divergence == "k1"

    @property
    def sums_divergence(self) -> bool:
        """Whether a sequence's divergence is summed; otherwise tokens out of bounds are counted."""
        return self.averages and self.divergence != "k1"


def parse_criteria(names: str | None, thresholds: str | float | None) -> tuple[Criterion, ...]:
    """verl's comma-separated criteria and thresholds; a repeated name counts once.

    Args:
        names: `token_k1,seq_max_k3`, or None for no criterion.
        thresholds: `0.5_2.0,0.01`: one for all criteria or one each. For k1 a threshold is
            `lower_upper` or `upper`, for others `upper`. A lower bound of 0 is none.

    Raises:
        ValueError: if a name is unknown, a threshold is missing or not a positive number, or the
            numbers of names and thresholds differ.
    """
    if not names:
        return ()
    options = list(dict.fromkeys(_items(names)))
    if not options:
        # Refused below as an unknown name.
        options = [","]
    for option in options:
        if option not in CRITERIA:
            raise ValueError(
                f"--rollout-rs names {option[:80]!r}; {_hint(option)}choose from"
                f" {', '.join(CRITERIA)}."
            )
    specs = []
    if thresholds is not None:
        specs = _items(str(thresholds))
    # This also refuses criteria without a threshold.
    if len(specs) not in (1, len(options)):
        raise ValueError(
            f"--rollout-rs-threshold gives {len(specs)} values for {len(options)} criteria of"
            " --rollout-rs; give one for all or one each."
        )
    if len(specs) == 1:
        specs = specs * len(options)
    criteria = [_criterion(option, spec) for option, spec in zip(options, specs, strict=True)]
    return tuple(criteria)


def _hint(name: str) -> str:
    """Advice for a name that is no criterion, for users who mean another option."""
    if name == "seq_max_k1":
        return "bound every ratio with --rs-veto-threshold and --rs-veto-upper-threshold; or "
    if name in LEVELS:
        return f"write --use-rs --rs-level {name}; or "
    return ""


def _items(text: str) -> list[str]:
    """The words between commas; empty ones are left out."""
    items = [item.strip() for item in text.split(",")]
    return [item for item in items if item]


# A config parses its criteria anew at each use.
@lru_cache
def _criterion(name: str, spec: str) -> Criterion:
    """The criterion from its name and threshold."""
    aggregation, divergence = CRITERIA[name]
    bounds_ratio = divergence == "k1"
    form = "a single upper bound"
    if bounds_ratio:
        form = "lower_upper or a single upper bound, such as 0.5_2.0"
    message = f"--rollout-rs-threshold {spec[:80]!r} for {name} is not {form}"
    try:
        bounds = [float(number) for number in spec.split("_")]
    except ValueError as error:
        raise ValueError(f"{message}: write numbers.") from error
    if len(bounds) > 2 or (len(bounds) == 2 and not bounds_ratio):
        raise ValueError(f"{message}.")
    lowest = bounds[0]
    upper = bounds[-1]
    if not (0 <= lowest < math.inf and 0 < upper < math.inf):
        raise ValueError(f"{message}; give finite numbers above 0, or 0 for no lower bound.")
    if divergence == "error" and upper < 1:
        raise ValueError(
            f"--rollout-rs-threshold {upper:g} of {name} rejects all: mean exp(|Δ|) is at least 1;"
            " use 2."
        )
    lower = None
    if len(bounds) == 2:
        lower = lowest
    elif bounds_ratio:
        lower = 1.0 / upper
    return Criterion(
        name=name, aggregation=aggregation, divergence=divergence, lower=lower, upper=upper
    )
