"""Options of the rollout correction: one frozen dataclass, validated when it is made."""

import math
import sys
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from slime_tis.correction.criteria import LEVEL_AGGREGATION, TOKEN_AGGREGATIONS, Criterion, parse_criteria, shown
from slime_tis.correction.presets import PRESETS, preset_values

Level = Literal["token", "sequence", "geometric", "prefix", "segment"]
Mode = Literal["truncate", "clip", "mask"]
Normalizer = Literal["kept", "original"]
NonfinitePolicy = Literal["reject", "neutral", "raise"]
OldLogprobs = Literal["recompute", "interpolate"]
PolicyLoss = Literal["ppo", "cispo", "gspo", "reinforce"]

LEVELS: tuple[Level, ...] = get_args(Level)
MODES: tuple[Mode, ...] = get_args(Mode)
NORMALIZERS: tuple[Normalizer, ...] = get_args(Normalizer)
NONFINITE_POLICIES: tuple[NonfinitePolicy, ...] = get_args(NonfinitePolicy)
OLD_LOGPROBS: tuple[OldLogprobs, ...] = get_args(OldLogprobs)
POLICY_LOSSES: tuple[PolicyLoss, ...] = get_args(PolicyLoss)
SEQUENCE_LEVELS = ("geometric", "sequence")
"""Levels at which a sequence has one ratio."""
RATIO_LOSSES = ("ppo", "cispo", "gspo")
"""Losses whose own ratio is the importance weight when the rollout policy is the old policy."""


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """What to correct and how. Bounds are always on the ratio π_train/π_rollout."""

    use_tis: bool = False
    """Multiply the loss by importance weights (`--use-tis`)."""
    tis_mode: Mode = "truncate"
    """truncate: min(w, upper); clip: clamp(w, lower, upper); mask: w inside the bounds, rejected outside."""
    tis_level: Level = "token"
    """How log-ratios become a log-weight: token, sequence (sum), geometric (mean), prefix (sum up to the
    token), segment (sum over a turn)."""
    tis_lower_bound: float | None = None
    """Lower bound of the weight; 1/upper when None."""
    tis_upper_bound: float = 2.0
    """Upper bound of the weight."""
    tis_batch_normalize: bool = False
    """Divide the bounded weights by their mean over the global batch."""
    use_rs: bool = False
    """Reject tokens or sequences whose ratio is out of bounds (`--use-rs`)."""
    rs_level: Level = "token"
    """Level of the rejected ratio, as `tis_level`."""
    rs_lower_bound: float | None = None
    """Lower bound for rejection; 1/`rs_upper_bound`, or the weight's lower bound when neither is given."""
    rs_upper_bound: float | None = None
    """Upper bound for rejection; `tis_upper_bound` when None."""
    rs_z_score: float | None = None
    """Reject a sequence whose log-ratio is more than this many standard deviations from its mean, both of them from
    its length and the k3 of the global batch; 3 for example. In place of the bounds, at level geometric or
    sequence; off when None."""
    rs_target_fraction: float | None = None
    """Reject this share of the sequences of the global batch, those with the largest z-scores; 0.02 for example. In
    place of the bounds, as `rs_z_score`; off when None."""
    rs_veto_threshold: float | None = None
    """Reject a sequence with any token ratio below this (1e-4 to 1e-6); off when None."""
    rs_veto_upper_threshold: float | None = None
    """Reject a sequence with any token ratio above this (for example 100); off when None."""
    rs_second_moment_bound: float | None = None
    """Drop the tokens of the global batch with the largest Δ² until the mean Δ² of the rest is at most this; off
    when None."""
    rollout_rs: str | None = None
    """verl's comma-separated criteria, all of which must hold: `token_k1,seq_max_k3`."""
    rollout_rs_threshold: str | float | None = None
    """One threshold for all criteria or one each: `0.5_2.0,0.01`; a single number u for k1 means 1/u_u."""
    rejection_normalizer: Normalizer = "kept"
    """What the loss is averaged over: kept (rejected tokens leave the denominator too) or original."""
    nonfinite_policy: NonfinitePolicy = "reject"
    """A token whose log-prob is NaN, ±inf or missing: reject it, take its ratio as 1 (neutral), or raise."""
    use_rollout_logprobs: bool = False
    """Bypass: the rollout policy is the old policy, and the old-log-prob forward pass is skipped."""
    old_logprobs: OldLogprobs = "recompute"
    """recompute the old log-probs with a forward pass, or interpolate them between rollout and current."""
    policy_loss: PolicyLoss = "ppo"
    """ppo, cispo, gspo, or reinforce (no clipping; the importance weight carries the correction)."""
    get_mismatch_metrics: bool = False
    """Measure the mismatch even where nothing is corrected; the loss is left untouched."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_combinations()

    def _check_choices(self) -> None:
        choices = {
            "tis_mode": MODES,
            "tis_level": LEVELS,
            "rs_level": LEVELS,
            "rejection_normalizer": NORMALIZERS,
            "nonfinite_policy": NONFINITE_POLICIES,
            "old_logprobs": OLD_LOGPROBS,
            "policy_loss": POLICY_LOSSES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                value = shown(getattr(self, name))
                raise ValueError(f"{_flag(name)} is {value}; choose one of {', '.join(allowed)}.")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{_flag(field.name)} is {shown(value)}; give True or False.")

    def _check_numbers(self) -> None:
        for field in fields(self):
            if not field.name.endswith(("_bound", "_threshold", "_z_score", "_target_fraction")):
                continue
            if field.name == "rollout_rs_threshold":
                continue
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{_flag(field.name)} is {shown(value)}; give a number.")
            if not 0 < value <= sys.float_info.max:
                raise ValueError(f"{_flag(field.name)} is {shown(value)}; give a finite number above 0.")

    def _check_combinations(self) -> None:
        lower, upper = self.is_bounds
        if self.use_tis and lower >= upper and (self.tis_lower_bound is not None or self.tis_mode != "truncate"):
            raise ValueError(
                f"--tis-lower-bound {lower} is not below --tis-upper-bound {upper}; lower it or raise the upper bound."
            )
        if self.rs_veto_threshold is not None and self.rs_veto_threshold >= 1:
            raise ValueError(f"--rs-veto-threshold is {self.rs_veto_threshold}; give a ratio below 1, such as 1e-4.")
        if self.rs_veto_upper_threshold is not None and self.rs_veto_upper_threshold <= 1:
            raise ValueError(
                f"--rs-veto-upper-threshold is {self.rs_veto_upper_threshold}; give a ratio above 1, such as 100."
            )
        self._check_adaptive()
        for criterion in self.rejections:
            if criterion.lower is not None and criterion.lower >= criterion.upper:
                flag = "--rs-lower-bound" if criterion.name in LEVELS else "--rollout-rs-threshold"
                raise ValueError(
                    f"{flag}: the lower bound {criterion.lower} of {criterion.name} is not below "
                    f"its upper bound {criterion.upper}; lower it or raise the upper bound."
                )
        if self.use_tis and self.use_rollout_logprobs and self.policy_loss in RATIO_LOSSES:
            raise ValueError(
                f"--use-rollout-logprobs with --use-tis applies the correction twice under --policy-loss "
                f"{self.policy_loss}, whose ratio already is the importance weight; drop one of them or use "
                f"--policy-loss reinforce."
            )
        if self.use_rollout_logprobs and self.old_logprobs == "interpolate":
            raise ValueError(
                "--old-logprobs interpolate has no meaning with --use-rollout-logprobs, which takes the "
                "rollout log-probs as the old ones; drop one of them."
            )

    def _check_adaptive(self) -> None:
        given = [name for name in ("rs_z_score", "rs_target_fraction") if getattr(self, name) is not None]
        if not given:
            return
        if len(given) > 1:
            raise ValueError("--rs-z-score and --rs-target-fraction both say what is rejected; drop one of them.")
        flag = _flag(given[0])
        fixed = [name for name in ("rs_lower_bound", "rs_upper_bound") if getattr(self, name) is not None]
        if fixed:
            raise ValueError(
                f"{flag} stands in place of fixed bounds; drop {' and '.join(map(_flag, fixed))}, or {flag}."
            )
        if not self.use_rs:
            raise ValueError(f"{flag} acts on the rejection of --use-rs, which is off; add --use-rs, or drop {flag}.")
        if self.rs_level not in SEQUENCE_LEVELS:
            raise ValueError(
                f"{flag} judges whole sequences but --rs-level is {self.rs_level}; "
                f"choose --rs-level {' or '.join(SEQUENCE_LEVELS)}."
            )
        if self.rs_target_fraction is not None and self.rs_target_fraction >= 1:
            raise ValueError(
                f"--rs-target-fraction is {self.rs_target_fraction}; give a share of the sequences, such as 0.02."
            )

    @property
    def is_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the importance weight."""
        lower = 1.0 / self.tis_upper_bound if self.tis_lower_bound is None else self.tis_lower_bound
        return lower, self.tis_upper_bound

    @property
    def has_token_weights(self) -> bool:
        """Whether importance weights differ from token to token."""
        return self.use_tis and self.tis_level in TOKEN_AGGREGATIONS

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio at `rs_level`."""
        upper = self.tis_upper_bound if self.rs_upper_bound is None else self.rs_upper_bound
        if self.rs_lower_bound is not None:
            return self.rs_lower_bound, upper
        return (self.is_bounds[0] if self.rs_upper_bound is None else 1.0 / upper), upper

    @property
    def rejections(self) -> tuple[Criterion, ...]:
        """All rejection criteria in force: `rs_level` with its bounds, then those of `rollout_rs`."""
        own: tuple[Criterion, ...] = ()
        if self.use_rs:
            lower, upper = (None, math.inf) if self.adaptive else self.rs_bounds
            aggregation = LEVEL_AGGREGATION[self.rs_level]
            own = (
                Criterion(
                    name=self.rs_level,
                    aggregation=aggregation,
                    divergence="k1",
                    lower=lower,
                    upper=upper,
                    adaptive=self.adaptive,
                ),
            )
        return own + parse_criteria(self.rollout_rs, self.rollout_rs_threshold)

    @property
    def adaptive(self) -> bool:
        """Whether `rs_level` rejects by the length of a sequence and the noise of the global batch."""
        return self.rs_z_score is not None or self.rs_target_fraction is not None

    @property
    def vetoes(self) -> bool:
        """Whether one token can reject its whole sequence."""
        return self.rs_veto_threshold is not None or self.rs_veto_upper_threshold is not None

    @property
    def rejects(self) -> bool:
        """Whether anything but a non-finite log-prob can leave the mask."""
        masks = self.use_tis and self.tis_mode == "mask"
        return masks or self.vetoes or bool(self.rejections) or self.rs_second_moment_bound is not None

    @property
    def corrects(self) -> bool:
        """Whether weights or rejection are on."""
        return self.use_tis or self.rejects

    @property
    def touches_loss(self) -> bool:
        """Whether the mask and the weights act on the loss; metrics alone leave it as it is."""
        return self.corrects or self.use_rollout_logprobs

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the rollout engine must return log-probs."""
        interpolates = self.old_logprobs == "interpolate"
        return self.corrects or self.use_rollout_logprobs or self.get_mismatch_metrics or interpolates

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "RolloutCorrectionConfig":
        """The preset `name` of `PRESETS`, with any field replaced by `overrides`.

        Fixed bounds among the overrides replace a preset's adaptive ones, and the other way round.

        Raises:
            ValueError: if there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"--rollout-correction-preset is {name!r}; choose one of {', '.join(PRESETS)}.")
        return cls(**{**preset_values(name, overrides), **overrides})


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
