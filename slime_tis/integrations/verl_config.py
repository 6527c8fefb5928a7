"""verl's RolloutCorrectionConfig: its options in both spellings, its presets, and the way to ours."""

from dataclasses import dataclass, fields
from typing import Any

from slime_tis.correction import RolloutCorrectionConfig as Config

TIGHT = "0.999_1.001"


@dataclass
class RolloutCorrectionConfig:
    """Options of `algorithm.rollout_correction` in verl, newest and older spelling."""

    rollout_is: str | None = "sequence"
    """Level of the weights: token, sequence, or None for none."""
    rollout_is_threshold: str | float = 2.0
    """Upper bound, or `lower_upper` for IcePop."""
    rollout_is_batch_normalize: bool = False
    """Divide by the mean weight of the batch."""
    rollout_rs: str | None = None
    """Comma-separated criteria, or in the older API a level: token, sequence, geometric."""
    rollout_rs_threshold: str | float | None = None
    """One threshold or one per criterion; an upper bound in the older API."""
    rollout_rs_threshold_lower: float | None = None
    """Lower bound in the older API; 1/upper when None."""
    rollout_token_veto_threshold: float | None = None
    """Reject a sequence with a token ratio below this."""
    bypass_mode: bool = False
    """Take the rollout log-probs as the old ones."""
    bypass_old_logprob_for_rollout: bool = False
    """Older spelling of `bypass_mode`."""
    loss_type: str = "ppo_clip"
    """ppo_clip, or reinforce (in bypass mode)."""
    use_policy_gradient: bool = False
    """Older spelling of `loss_type="reinforce"`."""
    use_pure_rollout_correction: bool = False
    """Oldest spelling of `loss_type="reinforce"`."""

    def __post_init__(self) -> None:
        self.bypass_mode = self.bypass_mode or self.bypass_old_logprob_for_rollout
        if self.use_policy_gradient or self.use_pure_rollout_correction:
            self.loss_type = "reinforce"
        if self.loss_type not in ("ppo_clip", "reinforce"):
            raise ValueError(f"loss_type is {self.loss_type!r}; choose ppo_clip or reinforce.")
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type reinforce needs bypass_mode=True; set it, or use ppo_clip.")

    def get(self, name: str, default: Any = None) -> Any:
        """A field by name, as from verl's dictionary-like config."""
        return getattr(self, name) if name in {field.name for field in fields(self)} else default

    def to_config(self) -> Config:
        """The same correction as this library's configuration.

        In bypass mode with the PPO loss verl computes weights for its metrics alone, and so they are left out.
        """
        applies_weights = self.rollout_is is not None and not (self.bypass_mode and self.loss_type == "ppo_clip")
        options = weight_options(self.rollout_is, self.rollout_is_threshold) if applies_weights else {}
        options |= rejection_options(self.rollout_rs, self.rollout_rs_threshold, self.rollout_rs_threshold_lower)
        return Config(
            **options,
            tis_batch_normalize=bool(self.rollout_is_batch_normalize) and applies_weights,
            rs_veto_threshold=self.rollout_token_veto_threshold,
            use_rollout_logprobs=bool(self.bypass_mode),
            policy_loss="reinforce" if self.loss_type == "reinforce" else "ppo",
            get_mismatch_metrics=True,
        )

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> "RolloutCorrectionConfig":
        """Token weights, three policies."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> "RolloutCorrectionConfig":
        """Sequence weights, three policies."""
        return cls(rollout_is_threshold=threshold)

    @classmethod
    def decoupled_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> "RolloutCorrectionConfig":
        """Token weights, 0 outside the bounds."""
        return cls(rollout_is="token", rollout_is_threshold=f"{threshold_lower}_{threshold}")

    @classmethod
    def decoupled_seq_is_rs(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = "0.5_2.0"
    ) -> "RolloutCorrectionConfig":
        """Sequence weights and rejection of sequences by their ratio."""
        return cls(rollout_is_threshold=is_threshold, rollout_rs="seq_sum_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs(
        cls, rs_threshold: str | float = TIGHT, veto_threshold: float | None = 1e-4
    ) -> "RolloutCorrectionConfig":
        """Rejection by the geometric mean, and veto; no weights."""
        return cls(**_geometric(rs_threshold), rollout_is=None, rollout_token_veto_threshold=veto_threshold)

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = TIGHT
    ) -> "RolloutCorrectionConfig":
        """Rejection by the geometric mean with sequence weights."""
        return cls(**_geometric(rs_threshold), rollout_is_threshold=is_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = TIGHT
    ) -> "RolloutCorrectionConfig":
        """Rejection by the geometric mean with token weights."""
        return cls(**_geometric(rs_threshold), rollout_is="token", rollout_is_threshold=is_threshold)

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = 0.01) -> "RolloutCorrectionConfig":
        """Rejection by the mean k3 divergence; no weights."""
        return cls(**_k3(rs_threshold), rollout_is=None)

    @classmethod
    def decoupled_k3_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float = 0.01
    ) -> "RolloutCorrectionConfig":
        """Rejection by the mean k3 divergence with sequence weights."""
        return cls(**_k3(rs_threshold), rollout_is_threshold=is_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float = 0.01
    ) -> "RolloutCorrectionConfig":
        """Rejection by the mean k3 divergence with token weights."""
        return cls(**_k3(rs_threshold), rollout_is="token", rollout_is_threshold=is_threshold)

    @classmethod
    def ppo_is_bypass(cls, threshold: float = 2.0) -> "RolloutCorrectionConfig":
        """PPO against the rollout policy; the weights are measured, not applied."""
        return cls(rollout_is="token", rollout_is_threshold=threshold, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip(cls) -> "RolloutCorrectionConfig":
        """PPO against the rollout policy."""
        return cls(rollout_is=None, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: str | float = TIGHT) -> "RolloutCorrectionConfig":
        """PPO against the rollout policy, rejection by the geometric mean."""
        return cls(**_geometric(rs_threshold), rollout_is=None, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = 0.01) -> "RolloutCorrectionConfig":
        """PPO against the rollout policy, rejection by the mean k3 divergence."""
        return cls(**_k3(rs_threshold), rollout_is=None, bypass_mode=True)

    @classmethod
    def bypass_pg_is(cls, threshold: float = 2.0) -> "RolloutCorrectionConfig":
        """Policy gradient with sequence weights, two policies."""
        return cls(rollout_is_threshold=threshold, bypass_mode=True, loss_type="reinforce")

    pg_is = bypass_pg_is

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> "RolloutCorrectionConfig":
        """Policy gradient with token weights, 0 outside the bounds."""
        return cls(
            rollout_is="token",
            rollout_is_threshold=f"{threshold_lower}_{threshold}",
            bypass_mode=True,
            loss_type="reinforce",
        )

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: str | float = TIGHT) -> "RolloutCorrectionConfig":
        """Policy gradient, rejection by the geometric mean."""
        return cls(**_geometric(rs_threshold), rollout_is=None, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def pg_rs(cls, rs_threshold: str | float = TIGHT, veto_threshold: float | None = 1e-4) -> "RolloutCorrectionConfig":
        """Policy gradient, rejection by the geometric mean, and veto."""
        return cls(
            **_geometric(rs_threshold),
            rollout_is=None,
            rollout_token_veto_threshold=veto_threshold,
            bypass_mode=True,
            loss_type="reinforce",
        )

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = TIGHT
    ) -> "RolloutCorrectionConfig":
        """Policy gradient, rejection by the geometric mean, sequence weights."""
        return cls(
            **_geometric(rs_threshold), rollout_is_threshold=is_threshold, bypass_mode=True, loss_type="reinforce"
        )

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = TIGHT
    ) -> "RolloutCorrectionConfig":
        """Policy gradient, rejection by the geometric mean, token weights."""
        return cls(
            **_geometric(rs_threshold),
            rollout_is="token",
            rollout_is_threshold=is_threshold,
            bypass_mode=True,
            loss_type="reinforce",
        )

    @classmethod
    def disabled(cls) -> "RolloutCorrectionConfig":
        """Metrics only."""
        return cls(rollout_is=None)


def weight_options(rollout_is: str | None, threshold: str | float) -> dict[str, Any]:
    """verl's level and threshold of weights as fields of our configuration.

    Raises:
        ValueError: if the level is not token or sequence, or the threshold not a positive number or pair.
        TypeError: if the threshold is of another type.
    """
    if rollout_is not in ("token", "sequence"):
        raise ValueError(f"Invalid rollout_is: {rollout_is}. Must be one of token, sequence.")
    if isinstance(threshold, bool):
        raise TypeError(
            "rollout_is_threshold must be specified as a float or a string threshold specification, not a boolean."
        )
    if not isinstance(threshold, str | int | float):
        raise TypeError("rollout_is_threshold must be a float or a string threshold specification.")
    numbers = _numbers("rollout_is_threshold", threshold)
    bounds = {"tis_lower_bound": numbers[0], "tis_mode": "mask"} if len(numbers) == 2 else {}
    return {"use_tis": True, "tis_level": rollout_is, "tis_upper_bound": numbers[-1], **bounds}


def rejection_options(
    rollout_rs: str | None, threshold: str | float | None, threshold_lower: float | None
) -> dict[str, Any]:
    """verl's criteria, or a level of the older API, as fields of our configuration.

    Raises:
        ValueError: if criteria are given without a threshold, or a level with one that is no number or pair.
        TypeError: if the threshold is neither a number nor a string.
    """
    if rollout_rs is None:
        return {}
    if threshold is None:
        raise ValueError("rollout_rs_threshold must be explicitly provided when rollout_rs is enabled.")
    if isinstance(threshold, bool) or not isinstance(threshold, str | int | float):
        raise TypeError("rollout_rs_threshold must be a string or numeric value specifying per-option thresholds.")
    if rollout_rs not in ("token", "sequence", "geometric"):
        return {"rollout_rs": rollout_rs, "rollout_rs_threshold": threshold}
    *lower, upper = _numbers("rollout_rs_threshold", threshold)
    if lower and threshold_lower is not None:
        raise ValueError(
            f"rollout_rs_threshold '{threshold}' has a lower bound, and rollout_rs_threshold_lower is "
            f"{threshold_lower}; give one of them."
        )
    bounds = {"rs_lower_bound": lower[0] if lower else threshold_lower, "rs_upper_bound": upper}
    return {"use_rs": True, "rs_level": rollout_rs, **bounds}


def _numbers(name: str, threshold: str | float) -> list[float]:
    """`upper` or `lower_upper` as numbers; Python itself would read 0.5_2 as 0.52."""
    parts = str(threshold).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError as error:
        raise ValueError(f"Invalid {name} {str(threshold)[:80]!r}; give 2.0 or '0.5_5.0'.") from error
    if len(numbers) > 2:
        raise ValueError(f"Invalid {name} {str(threshold)[:80]!r}; give 2.0 or '0.5_5.0'.")
    return numbers


def _geometric(threshold: str | float) -> dict[str, Any]:
    return {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": threshold}


def _k3(threshold: float) -> dict[str, Any]:
    return {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": threshold}
