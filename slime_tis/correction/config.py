"""Options of the rollout correction: a frozen dataclass that checks itself, and its presets."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

from slime_tis.correction.modes import (
    LEVELS,
    MODES,
    SEQUENCE_LEVELS,
    Criterion,
    Level,
    Mode,
    ModeName,
    parse_criteria,
)
from slime_tis.options.fields import REJECTS, Limits, check_fields, flag, option

loss_option = partial(option, group="policy loss")
correction_option = partial(option, group="rollout correction")
CUSTOM = "--custom-tis-function-path"
weight_option = partial(correction_option, needs=("--use-tis",), suffices=(CUSTOM,))
rejection_option = partial(correction_option, needs=("--use-rs",), suffices=(CUSTOM,))
mask_option = partial(correction_option, needs=("--divergence-mask",))

DivergenceName = Literal["binary_tv", "binary_kl", "binary_kl_max"]
DIVERGENCE_BOUNDS: dict[DivergenceName, float] = {
    "binary_tv": 0.2,
    "binary_kl": 0.05,
    "binary_kl_max": 0.1,
}
"""Defaults of divergence_mask_bound: from prime-rl and DPPO, from DPPO, and from KPop."""
Normalizer = Literal["kept", "original"]
NonfinitePolicy = Literal["reject", "neutral", "raise"]
LOG_PROB_LIMIT = 9984.0
"""A log-prob of this size is an engine's code for minus infinity, or garbage, and is treated as
non-finite.

vLLM's server writes −9999, which bfloat16 rounds to −9984; others write −1e6. Each log-prob is
judged by itself: −1e6 − (−0.5) is not −1e6. A model's log-probs stay far above: −200 is rare.
"""
OldLogprobs = Literal["recompute", "interpolate"]
PolicyLoss = Literal[
    "ppo", "cispo", "gspo", "aspo", "sapo", "vespo", "clip_cov", "kl_cov", "dro", "reinforce",
    "experimental_ctpo", "experimental_cppo",
]  # fmt: skip

RATIO_LOSSES = tuple(name for name in get_args(PolicyLoss) if name not in ("dro", "reinforce"))
"""Losses whose ratio is the importance weight if the rollout policy is the old policy."""
FIXED_BOUNDS = ("rs_lower_bound", "rs_upper_bound")
ADAPTIVE_BOUNDS = ("rs_z_score", "rs_target_fraction")


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """The options of the correction. Bounds are always on the ratio π_train/π_rollout."""

    use_tis: bool = correction_option(False)
    """Multiply the loss by importance weights."""
    tis_mode: ModeName = weight_option("truncate")
    """truncate: min(w, upper); clip: clamp(w, lower, upper); mask: w inside the bounds, rejected
    outside."""
    tis_level: Level = weight_option("token", suffices=("--use-rollout-logprobs", CUSTOM))
    """Log-ratio of a weight: of the token, sequence (sum), geometric (mean), prefix (sum up to the
    token), segment (sum over a turn)."""
    tis_lower_bound: Annotated[float | None, Limits(ge=0)] = weight_option(
        None, needs=("--use-tis", "--use-rs")
    )
    """Lower bound of the weight; 1/upper when unset, no lower bound when 0."""
    tis_upper_bound: Annotated[float, Limits(gt=0, also=(math.inf,))] = weight_option(
        2.0, needs=("--use-tis", "--use-rs"), suffices=("--use-rollout-logprobs", CUSTOM)
    )
    """Upper bound of the weight; inf for none."""
    tis_lower_bound_negative: Annotated[
        float | None, Limits(ge=0, hint="remove it for --tis-lower-bound")
    ] = weight_option(None)
    """Lower bound at negative advantages; unset: tis_lower_bound."""
    tis_upper_bound_negative: Annotated[
        float | None, Limits(gt=0, also=(math.inf,), hint="remove it for --tis-upper-bound")
    ] = weight_option(None)
    """Upper bound at negative advantages; unset: tis_upper_bound. For a sequence, the sum of its
    advantages decides."""
    tis_batch_normalize: bool = weight_option(False)
    """Divide the bounded weights by their mean over the global batch."""
    use_rs: bool = correction_option(False)
    """Reject tokens or sequences whose ratio is out of bounds."""
    rs_level: Level = rejection_option("token")
    """Level of the rejected ratio, as tis_level."""
    rs_lower_bound: Annotated[float | None, Limits(ge=0)] = rejection_option(None)
    """Lower bound for rejection; unset: 1/rs_upper_bound, or the weight's if both are unset; 0:
    none."""
    rs_upper_bound: Annotated[float | None, Limits(gt=0)] = rejection_option(None)
    """Upper bound for rejection; unset: tis_upper_bound."""
    rs_z_score: Annotated[float | None, Limits(gt=0)] = rejection_option(None, suffices=())
    """Reject sequences whose geometric ratio is outside exp(-k3 ± this·√(2·k3/n)), for example 3;
    replaces the bounds at level geometric or sequence."""
    rs_target_fraction: Annotated[float | None, Limits(gt=0, lt=1, hint="0.02 is customary")] = (
        rejection_option(None, suffices=())
    )
    """Reject this share of the global batch's sequences, by z-score; replaces the bounds."""
    rs_veto_threshold: Annotated[float | None, Limits(gt=0, lt=1, hint="1e-4 is customary")] = (
        correction_option(None)
    )
    """Reject a sequence with a token ratio below this (1e-4 to 1e-6)."""
    rs_veto_upper_threshold: Annotated[float | None, Limits(gt=1, hint="100 is customary")] = (
        correction_option(None)
    )
    """Reject a sequence with a token ratio above this (for example 100)."""
    rs_second_moment_bound: Annotated[float | None, Limits(gt=0)] = correction_option(None)
    """Drop the global batch's largest Δ² until the mean Δ² is at most this."""
    rollout_rs: str | None = correction_option(None, metavar="CRITERION,…")
    """verl's criteria, which must all hold: `token_k1,seq_max_k3`."""
    rollout_rs_threshold: str | float | None = correction_option(
        None, metavar="LIMIT,…", needs=("--rollout-rs",)
    )
    """One threshold for all criteria or one each: `0.5_2.0,0.01`; u for k1 means 1/u_u."""
    divergence_mask: DivergenceName | None = correction_option(None)
    """Mask tokens whose probability is far from the anchor's: binary_tv (difference), binary_kl (KL
    from the anchor) or binary_kl_max (larger direction)."""
    divergence_mask_direction: Literal["away", "both"] = mask_option("away")
    """away: mask a token only if its advantage increases the divergence (DPPO); both: always."""
    divergence_mask_bound: Annotated[
        float | None, Limits(gt=0, le=1_000, hint="remove it for the default")
    ] = mask_option(None)
    """Largest accepted divergence; unset: binary_tv 0.2, binary_kl 0.05, binary_kl_max 0.1."""
    divergence_mask_bound_negative: Annotated[
        float | None, Limits(gt=0, le=1_000, hint="remove it for --divergence-mask-bound")
    ] = mask_option(None)
    """Bound at negative advantages; unset: divergence_mask_bound."""
    divergence_mask_level: Literal["token", "sequence"] = mask_option("token")
    """token, or sequence: mask sequences by their mean divergence, with direction both."""
    divergence_mask_anchor: Literal["rollout", "old"] = mask_option("rollout")
    """Anchor of the divergence."""
    rejection_normalizer: Normalizer = correction_option(
        "original", needs=REJECTS, suffices=("--use-opsm", CUSTOM)
    )
    """Divisor of the loss after rejection: all tokens (original, slime) or accepted ones (kept,
    verl)."""
    nonfinite_policy: NonfinitePolicy = correction_option("reject")
    """If a log-prob is NaN, ±inf or missing: reject the token, use ratio 1 (neutral), or raise."""
    use_rollout_logprobs: bool = correction_option(False)
    """Bypass: the rollout policy is the old policy, without its forward pass."""
    old_logprobs: OldLogprobs = correction_option("recompute")
    """Old log-probs: recompute with a forward pass, or interpolate between rollout and current."""
    policy_loss: PolicyLoss = loss_option("ppo")
    """The loss per token. reinforce does not clip: the importance weight carries the correction.
    Losses with the prefix experimental_ have weak evidence and may change."""
    get_mismatch_metrics: bool = correction_option(False)
    """Measure with π_old also in bypass, and log a custom correction's metrics; the loss is
    unchanged."""

    def __post_init__(self) -> None:
        check_fields(self)
        for problem in self._problems():
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        """Yields a message for each combination of options that contradict each other."""
        if self.use_tis:
            yield from self._problems_of_weights()
        yield from self._problems_of_adaptive_bounds()
        for criterion in self.rejections:
            if criterion.lower is not None and criterion.lower >= criterion.upper:
                option = "--rollout-rs-threshold"
                if criterion.name in LEVELS:
                    option = "--rs-lower-bound"
                yield (
                    f"{option}: the lower bound {criterion.lower} of {criterion.name} is not below"
                    f" {criterion.upper}; lower it or raise the upper bound."
                )
        if self.use_tis and self.use_rollout_logprobs and self.policy_loss in RATIO_LOSSES:
            yield (
                "--use-rollout-logprobs with --use-tis applies the correction twice under"
                f" --policy-loss {self.policy_loss}, whose ratio already is the importance weight;"
                " drop one of them or use --policy-loss reinforce."
            )
        if self.policy_loss == "vespo" and self.use_tis:
            yield (
                "--policy-loss vespo already weights sequences; drop --use-tis, and add"
                " --use-rollout-logprobs to weight by the ratio to the rollout policy."
            )
        yield from self._problems_of_divergence_mask()
        if self.policy_loss in ("clip_cov", "kl_cov") and self.old_logprobs == "interpolate":
            yield (
                f"--policy-loss {self.policy_loss} selects tokens by the old policy before"
                " training, which --old-logprobs interpolate does not have yet; drop one of them."
            )
        if self.use_rollout_logprobs and self.old_logprobs == "interpolate":
            yield (
                "--old-logprobs interpolate has no meaning with --use-rollout-logprobs, which takes"
                " the rollout log-probs as the old ones; drop one of them."
            )

    def _problems_of_weights(self) -> Iterator[str]:
        """Yields a message for each pair of bounds that leaves no weight."""
        all_bounds = {"": self.is_bounds, "-negative": self.is_bounds_negative}
        has_lower = self.mode.has_lower_bound or self.tis_lower_bound is not None
        # TOPR's weight is 1 at positive advantages, so equal bounds by sign are legal.
        allows_equal = self.signs_bounds and self.tis_mode == "clip"
        for suffix, (lower, upper) in all_bounds.items():
            if lower == upper and allows_equal:
                continue
            if has_lower and lower >= upper:
                yield (
                    f"--tis-lower-bound{suffix} {lower} is not below --tis-upper-bound{suffix}"
                    f" {upper}; lower it or raise the upper bound."
                )
        if self.tis_lower_bound_negative is not None and not self.mode.has_lower_bound:
            yield (
                f"--tis-lower-bound-negative has no effect with --tis-mode {self.tis_mode}; use"
                " clip or mask."
            )

    def _problems_of_divergence_mask(self) -> Iterator[str]:
        """Yields a message for each option of the divergence mask that contradicts another one."""
        if self.divergence_mask is None:
            return
        is_directed = self.divergence_mask_direction == "away"
        is_sequence = self.divergence_mask_level == "sequence"
        if self.divergence_mask == "binary_tv" and max(self.divergence_bounds) >= 1:
            yield (
                "--divergence-mask-bound of binary_tv is 1 or more, which accepts all tokens; use"
                " 0.2."
            )
        if not is_directed and self.divergence_mask_bound_negative is not None:
            yield (
                "--divergence-mask-bound-negative needs --divergence-mask-direction away; drop it."
            )
        if is_sequence and is_directed:
            yield (
                "--divergence-mask-level sequence needs --divergence-mask-direction both, because"
                " tokens of a sequence move both ways."
            )
        if self.divergence_mask_anchor == "old" and self.use_rollout_logprobs:
            yield (
                "--divergence-mask-anchor old is the rollout policy under --use-rollout-logprobs;"
                " drop one of them."
            )

    def _problems_of_adaptive_bounds(self) -> Iterator[str]:
        """Yields a message for each option that adaptive bounds exclude or need."""
        adaptive = self._set_flags(ADAPTIVE_BOUNDS)
        fixed = self._set_flags(FIXED_BOUNDS)
        if not adaptive:
            return
        option = adaptive[0]
        if len(adaptive) > 1:
            yield (
                "--rs-z-score and --rs-target-fraction both set the rejection bounds; drop one of"
                " them."
            )
        if fixed:
            yield f"{option} replaces fixed bounds; drop {' and '.join(fixed)}, or {option}."
        if not self.use_rs:
            yield (
                f"{option} acts on the rejection of --use-rs, which is off; add --use-rs, or drop"
                f" {option}."
            )
        if self.rs_level not in SEQUENCE_LEVELS:
            levels = " or ".join(SEQUENCE_LEVELS)
            yield (
                f"{option} rejects complete sequences but --rs-level is {self.rs_level}; choose"
                f" --rs-level {levels}."
            )

    def _set_flags(self, names: Sequence[str]) -> list[str]:
        """The flags of the fields that are not None."""
        return [flag(name) for name in names if getattr(self, name) is not None]

    @property
    def mode(self) -> Mode:
        """The entry of `MODES` for `tis_mode`."""
        return MODES[self.tis_mode]

    @property
    def is_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the importance weight."""
        if self.tis_lower_bound is None:
            return 1.0 / self.tis_upper_bound, self.tis_upper_bound
        return self.tis_lower_bound, self.tis_upper_bound

    @property
    def is_bounds_negative(self) -> tuple[float, float]:
        """Lower and upper bound of the importance weight at negative advantages."""
        upper = self.tis_upper_bound_negative
        if upper is None:
            upper = self.tis_upper_bound
        if self.tis_lower_bound_negative is not None:
            return self.tis_lower_bound_negative, upper
        if self.tis_lower_bound is not None:
            return self.tis_lower_bound, upper
        return 1.0 / upper, upper

    @property
    def signs_bounds(self) -> bool:
        """Whether the bounds of the importance weight depend on the sign of the advantage."""
        has_negative_bound = (
            self.tis_lower_bound_negative is not None or self.tis_upper_bound_negative is not None
        )
        return self.use_tis and has_negative_bound

    @property
    def has_token_weights(self) -> bool:
        """Whether importance weights differ from token to token."""
        return self.use_tis and LEVELS[self.tis_level].per_token

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio at `rs_level`."""
        lower, upper = self.is_bounds
        if self.rs_upper_bound is not None:
            upper = self.rs_upper_bound
            lower = 1.0 / upper
        if self.rs_lower_bound is not None:
            lower = self.rs_lower_bound
        return lower, upper

    @property
    def rejections(self) -> tuple[Criterion, ...]:
        """All criteria that are on: of `rs_level`, of `rollout_rs`, and the divergence mask."""
        criteria = []
        if self.use_rs:
            criteria.append(self._level_criterion())
        criteria += parse_criteria(self.rollout_rs, self.rollout_rs_threshold)
        if self.divergence_mask is not None:
            criteria.append(self._divergence_criterion(self.divergence_mask))
        return tuple(criteria)

    def _level_criterion(self) -> Criterion:
        """The criterion of `rs_level`, with its bounds unless they are adaptive."""
        lower = None
        upper = math.inf
        if not self.adaptive:
            lower, upper = self.rs_bounds
        return Criterion(
            name=self.rs_level,
            aggregation=LEVELS[self.rs_level].aggregation,
            divergence="k1",
            lower=lower,
            upper=upper,
            adaptive=self.adaptive,
        )

    def _divergence_criterion(self, divergence: DivergenceName) -> Criterion:
        """The criterion of the divergence mask."""
        bound: float
        bound_negative: float | None
        bound, bound_negative = self.divergence_bounds
        if self.divergence_mask_direction == "both":
            bound_negative = None
        aggregation = "mean"
        if self.divergence_mask_level == "token":
            aggregation = "token"
        return Criterion(
            name="divergence_mask",
            aggregation=aggregation,
            divergence=divergence,
            upper=bound,
            anchor=self.divergence_mask_anchor,
            bound_negative=bound_negative,
        )

    @property
    def adaptive(self) -> bool:
        """Whether `rs_level` rejects by the sequence's length and the global batch's noise."""
        return self.rs_z_score is not None or self.rs_target_fraction is not None

    @property
    def batch_options(self) -> list[str]:
        """The options in use that need order statistics or means of the global batch."""
        names = ("rs_z_score", "rs_target_fraction", "rs_second_moment_bound")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def vetoes(self) -> bool:
        """Whether one token can reject its complete sequence."""
        return self.rs_veto_threshold is not None or self.rs_veto_upper_threshold is not None

    @property
    def rejects_weights(self) -> bool:
        """Whether a weight out of bounds rejects its token or sequence."""
        return self.use_tis and self.mode.rejects

    @property
    def needs_advantages(self) -> bool:
        """Whether the divergence mask or the weights' bounds depend on the advantage's sign."""
        return self.signs_bounds or (
            self.divergence_mask is not None and self.divergence_mask_direction == "away"
        )

    @property
    def divergence_bounds(self) -> tuple[float, float]:
        """Bounds of the divergence mask at positive and at negative advantages."""
        assert self.divergence_mask is not None
        bound = self.divergence_mask_bound
        if bound is None:
            bound = DIVERGENCE_BOUNDS[self.divergence_mask]
        bound_negative = self.divergence_mask_bound_negative
        if bound_negative is None:
            bound_negative = bound
        return bound, bound_negative

    @property
    def rejects(self) -> bool:
        """Whether anything but a non-finite log-prob can leave the mask."""
        return (
            self.rejects_weights
            or self.vetoes
            or bool(self.rejections)
            or self.rs_second_moment_bound is not None
        )

    @property
    def corrects(self) -> bool:
        """Whether weights or rejection are on."""
        return self.use_tis or self.rejects

    @property
    def touches_loss(self) -> bool:
        """Whether the mask and the weights act on the loss; with only metrics they do not."""
        return self.corrects or self.use_rollout_logprobs

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the rollout engine must return log-probs."""
        return self.touches_loss or self.get_mismatch_metrics or self.old_logprobs == "interpolate"

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "RolloutCorrectionConfig":
        """The preset `name` of `PRESETS`, with any field replaced by `overrides`.

        Fixed bounds among the overrides replace the preset's adaptive ones, and vice versa.

        Raises:
            ValueError: if there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(
                f"--rollout-correction-preset is {name!r}; choose one of {', '.join(PRESETS)}."
            )
        return cls(**{**preset_values(name, overrides), **overrides})


Preset = dict[str, bool | str | float]

_BYPASS: Preset = {"use_rollout_logprobs": True}
_PURE_GRADIENT: Preset = {"use_rollout_logprobs": True, "policy_loss": "reinforce"}
_TOKEN_IS: Preset = {"use_tis": True, "tis_level": "token"}
_SEQUENCE_IS: Preset = {"use_tis": True, "tis_level": "sequence"}
_TOKEN_ICEPOP: Preset = {
    **_TOKEN_IS,
    "tis_mode": "mask",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 5.0,
}
# verl averages over the accepted tokens.
_KEPT: Preset = {"rejection_normalizer": "kept"}
_FIXED: Preset = {
    "use_rs": True,
    "rs_level": "geometric",
    "rs_lower_bound": 0.999,
    "rs_upper_bound": 1.001,
}
_GEOMETRIC_RS: Preset = {**_FIXED, **_KEPT}
_SEQUENCE_RS: Preset = {
    **_FIXED,
    "rs_level": "sequence",
    "rs_lower_bound": 0.5,
    "rs_upper_bound": 2.0,
    **_KEPT,
}
_ADAPTIVE_RS: Preset = {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}
_K3_RS: Preset = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01, **_KEPT}
_VETO: Preset = {"rs_veto_threshold": 1e-4}

_UNBOUNDED: Preset = {**_TOKEN_IS, "tis_upper_bound": math.inf}
_DPPO: Preset = {**_PURE_GRADIENT, **_UNBOUNDED}
_BOTH: Preset = {"divergence_mask_direction": "both"}

POLICY_PRESETS: dict[str, Preset] = {
    "dppo_tv": {**_DPPO, "divergence_mask": "binary_tv"},
    "dppo_kl": {**_DPPO, "divergence_mask": "binary_kl"},
    "ipo": {**_DPPO, **_BOTH, "divergence_mask": "binary_tv", "divergence_mask_bound": 0.1},
    "kpop": {**_DPPO, **_BOTH, "divergence_mask": "binary_kl_max"},
    "topr": {
        **_PURE_GRADIENT,
        "use_tis": True,
        "tis_level": "geometric",
        "tis_mode": "clip",
        "tis_lower_bound": 1.0,
        "tis_upper_bound": 1.0,
        "tis_lower_bound_negative": 0.0,
    },
}
"""Presets that need the advantages or the current policy.

They are the objective of DPPO with each divergence mask (prime-rl's default, DPPO's KL, prime-rl's
IPO, and KPop), and TOPR as in verl#6986.
"""

PRESETS: dict[str, Preset] = {
    "decoupled_token_is": _TOKEN_IS,
    "decoupled_seq_is": _SEQUENCE_IS,
    "decoupled_seq_is_rs": {**_SEQUENCE_IS, **_SEQUENCE_RS},
    "decoupled_geo_rs": {**_GEOMETRIC_RS, **_VETO},
    # The level of the measured weights.
    "ppo_is_bypass": {**_BYPASS, "tis_level": "token"},
    "pg_is": {**_PURE_GRADIENT, **_SEQUENCE_IS},
    "pg_rs": {**_PURE_GRADIENT, **_GEOMETRIC_RS, **_VETO},
    "disabled": {"get_mismatch_metrics": True},
    "decoupled_token_icepop": _TOKEN_ICEPOP,
    "decoupled_geo_rs_seq_tis": {**_SEQUENCE_IS, **_GEOMETRIC_RS},
    "decoupled_geo_rs_token_tis": {**_TOKEN_IS, **_GEOMETRIC_RS},
    "decoupled_k3_rs": _K3_RS,
    "decoupled_k3_rs_seq_tis": {**_SEQUENCE_IS, **_K3_RS},
    "decoupled_k3_rs_token_tis": {**_TOKEN_IS, **_K3_RS},
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": {**_BYPASS, **_GEOMETRIC_RS},
    "bypass_ppo_clip_k3_rs": {**_BYPASS, **_K3_RS},
    "bypass_pg_is": {**_PURE_GRADIENT, **_SEQUENCE_IS},
    "bypass_pg_token_icepop": {**_PURE_GRADIENT, **_TOKEN_ICEPOP},
    "bypass_pg_geo_rs": {**_PURE_GRADIENT, **_GEOMETRIC_RS},
    "bypass_pg_geo_rs_seq_tis": {**_PURE_GRADIENT, **_SEQUENCE_IS, **_GEOMETRIC_RS},
    "bypass_pg_geo_rs_token_tis": {**_PURE_GRADIENT, **_TOKEN_IS, **_GEOMETRIC_RS},
    "decoupled_geo_rs_adaptive": {**_ADAPTIVE_RS, **_VETO},
    "decoupled_geo_rs_token_tis_adaptive": {**_TOKEN_IS, **_ADAPTIVE_RS, **_VETO},
    "bypass_ppo_clip_geo_rs_adaptive": {**_BYPASS, **_ADAPTIVE_RS, **_VETO},
    **POLICY_PRESETS,
    "seq_mask_tis": {**_UNBOUNDED, **_FIXED, "rs_upper_bound": 1.002},
}
"""Named configurations as overrides of the defaults.

They are verl's presets in its old and new spelling, with verl's numbers; three with adaptive
bounds; `POLICY_PRESETS`; and NeMo-RL's seq-mask-tis, the setting of MLPerf's GRPO benchmark.
"""


def preset_values(name: str, overrides: Mapping[str, object]) -> Preset:
    """The options of a preset.

    Fixed rejection bounds among the overrides remove the preset's adaptive ones, and vice versa.
    """
    removed: list[str] = []
    if any(overrides.get(field) is not None for field in FIXED_BOUNDS):
        removed += ADAPTIVE_BOUNDS
    if any(overrides.get(field) is not None for field in ADAPTIVE_BOUNDS):
        removed += FIXED_BOUNDS
    return {field: value for field, value in PRESETS[name].items() if field not in removed}
