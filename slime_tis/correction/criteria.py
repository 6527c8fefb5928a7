"""Rejection criteria: verl's names and thresholds, and the levels of this library, as one kind of object."""

import math
from dataclasses import dataclass

TOKEN_AGGREGATIONS = ("token", "prefix", "segment")

# verl's names of a criterion: how the divergence is aggregated, and which divergence.
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
}
LEVEL_AGGREGATION = {
    "token": "token",
    "sequence": "sum",
    "geometric": "mean",
    "prefix": "prefix",
    "segment": "segment",
}


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One rejection criterion: accept where lower ≤ statistic ≤ upper."""

    name: str
    """Name in the metrics: verl's for `rollout_rs` criteria, the level's for `rs_level`."""
    aggregation: str
    """token, prefix or segment (a verdict per token); sum, mean or max (a verdict per sequence)."""
    divergence: str
    """k1 = Δ, bounded on the ratio exp(Δ); k2 = Δ²/2 and k3 = exp(Δ) − Δ − 1, bounded above."""
    lower: float | None
    """Lower bound on the ratio (k1), 0 for none; None for k2 and k3."""
    upper: float
    """Upper bound: on the ratio for k1, on the divergence itself for k2 and k3."""
    adaptive: bool = False
    """Whether `AdaptiveBounds` provides the bounds, instead of `lower` and `upper`."""

    @property
    def log_bounds(self) -> tuple[float, float]:
        """Bounds on the log-ratio, of a k1 criterion."""
        return (math.log(self.lower) if self.lower else -math.inf), math.log(self.upper)

    @property
    def per_token(self) -> bool:
        """Whether the verdict is taken token by token."""
        return self.aggregation in TOKEN_AGGREGATIONS

    @property
    def sums_divergence(self) -> bool:
        """Whether k2 or k3 is summed over a sequence; the sum of k1 is the sum of Δ, which every criterion shares."""
        return self.aggregation in ("sum", "mean") and self.divergence != "k1"


def parse_criteria(names: str | None, thresholds: str | float | None) -> tuple[Criterion, ...]:
    """verl's comma-separated criteria and thresholds, repeated names taken once.

    Args:
        names: `token_k1,seq_max_k3`, or None for no criterion.
        thresholds: `0.5_2.0,0.01`: one for all or one each; `lower_upper` or `upper` for k1, else `upper`. A lower
            bound of 0 is none.

    Raises:
        ValueError: if a name is unknown, a threshold is missing or not a positive number, or counts differ.
    """
    if names is not None and not isinstance(names, str):
        raise ValueError(f"--rollout-rs is {shown(names)}; give names separated by commas: token_k1,seq_max_k3.")
    if isinstance(thresholds, bool) or not isinstance(thresholds, str | int | float | None):
        raise ValueError(f"--rollout-rs-threshold is {shown(thresholds)}; write 0.5_2.0 or 0.01.")
    if isinstance(thresholds, int) and thresholds.bit_length() > 1024:
        raise ValueError("--rollout-rs-threshold is beyond any ratio; give finite numbers above 0.")
    if not names:
        return ()
    options = list(dict.fromkeys(part.strip() for part in names.split(",") if part.strip()))
    if not options:
        raise ValueError(
            f"--rollout-rs is {names[:80]!r}, which names no criterion; choose from {', '.join(CRITERIA)}."
        )
    for option in options:
        if option in LEVEL_AGGREGATION:
            raise ValueError(
                f"--rollout-rs names {option!r}, which is a level; write --use-rs --rs-level {option} with "
                "--rs-upper-bound."
            )
        if option == "seq_max_k1":
            raise ValueError(
                "--rollout-rs names 'seq_max_k1', which is no criterion; bound every ratio of a sequence with "
                "--rs-veto-threshold and --rs-veto-upper-threshold."
            )
        if option not in CRITERIA:
            raise ValueError(f"--rollout-rs names {option[:80]!r}; choose from {', '.join(CRITERIA)}.")
    if thresholds is None:
        raise ValueError(
            f"--rollout-rs {names[:80]} needs --rollout-rs-threshold; give one value for all criteria or one each."
        )
    specs = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if len(specs) not in (1, len(options)):
        raise ValueError(
            f"--rollout-rs-threshold gives {len(specs)} values for {len(options)} criteria of --rollout-rs; "
            f"give one for all or one each."
        )
    specs = specs * len(options) if len(specs) == 1 else specs
    return tuple(_criterion(option, spec) for option, spec in zip(options, specs, strict=True))


def _criterion(option: str, spec: str) -> Criterion:
    aggregation, divergence = CRITERIA[option]
    parts = spec.split("_")
    if len(parts) > (2 if divergence == "k1" else 1):
        raise ValueError(
            f"--rollout-rs-threshold {spec[:80]!r} for {option}: give "
            + ("lower_upper or a single upper bound." if divergence == "k1" else "a single upper bound.")
        )
    try:
        numbers = [float(part) for part in parts]
    except ValueError as error:
        raise ValueError(
            f"--rollout-rs-threshold {spec[:80]!r} for {option} is not a number; write 0.5_2.0 or 0.01."
        ) from error
    *lowers, upper = numbers
    if not (0 < upper < math.inf and all(0 <= number < math.inf for number in lowers)):
        raise ValueError(
            f"--rollout-rs-threshold {spec[:80]!r} for {option}; give finite numbers above 0, or 0 for no lower bound."
        )
    lower = None if divergence != "k1" else (lowers[0] if lowers else 1.0 / upper)
    return Criterion(name=option, aggregation=aggregation, divergence=divergence, lower=lower, upper=upper)


def shown(value: object) -> str:
    """A value as a message quotes it; Python refuses to write integers of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)[:80]
