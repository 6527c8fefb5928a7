"""The mergeable table: sums, minima and maxima from which every metric is computed.

Micro-batches and ranks merge by adding and by min and max; nothing in here is an average. Which entries there
are depends on the options alone, so that a rank with no sequence merges with the others.

Shapes: suffix _S is per sequence.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.metrics import PERPLEXITIES, correction_metrics
from slime_tis.correction.ranks import ONE_RANK, Ranks
from slime_tis.correction.ratio import LOG_RATIO_BOUND
from slime_tis.correction.weights import mean_weight

LOG_PPL_BOUND = 80.0
"""exp of a perplexity is taken up to e^80, so that sums of perplexities stay finite."""

MISMATCH_SUMS = (
    "sequences",
    "measured_sequences",
    "original_tokens",
    "tokens",
    "nonfinite_tokens",
    "kept_tokens",
    *PERPLEXITIES,
    "log_ratio",
    "abs_log_ratio",
    "excess",
    "ratio_squared_excess",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "sequence_ratio_squared_excess",
)
WEIGHT_SUMS = (
    "weights",
    "raw_weight_excess",
    "weight",
    "weight_excess",
    "weight_excess_squared",
    "weight_high",
    "weight_low",
)
SEQUENCE_WEIGHT_SUMS = (
    "sequence_weight_excess",
    "sequence_weight_excess_squared",
    "sequence_weight_high",
    "sequence_weight_low",
)
"""Of the mean weight of each sequence, where weights differ from token to token."""
REJECTION_SUMS = ("rs_tokens", "rs_sequences")
ADAPTIVE_SUMS = ("rs_k3", "rs_z_score", "rs_log_lower", "rs_log_upper")
"""What all sequences of a global batch are judged by, once per sequence, so that merging leaves it as it is."""
VETO_SUMS = ("catastrophic_tokens", "catastrophic_sequences")
MINIMA = ("log_ppl_diff", "ratio", "sequence_weight")
MAXIMA = (*MINIMA, "weight")
"""ratio: the weight before the mode. sequence_weight: the mean weight of a sequence. weight: inside the bounds in
mask mode; in the other modes the same as ratio."""


@dataclass(frozen=True)
class Statistics:
    """What was measured of some sequences: sums [K], minima [M] and maxima [M], float64."""

    config: RolloutCorrectionConfig
    """The options under which it was measured."""
    sums: Tensor
    """Over whole sequences: the same on every context-parallel rank, to be added over data-parallel ranks."""
    mins: Tensor
    """Over this rank's tokens and sequences."""
    maxs: Tensor
    """Over this rank's tokens and sequences."""

    @classmethod
    def empty(cls, config: RolloutCorrectionConfig, device: torch.device | str = "cpu") -> "Statistics":
        """The neutral element of `merge`."""
        zero = torch.zeros(1, dtype=torch.float64, device=device)
        return cls(
            config=config,
            sums=zero.repeat(len(sum_names(config))),
            mins=(zero + torch.inf).repeat(len(MINIMA)),
            maxs=(zero - torch.inf).repeat(len(MAXIMA)),
        )

    def merge(self, other: "Statistics") -> "Statistics":
        """The statistics of both together.

        Raises:
            ValueError: if they were measured under different options.
        """
        if self.config != other.config:
            names = [
                f.name for f in fields(self.config) if getattr(self.config, f.name) != getattr(other.config, f.name)
            ]
            raise ValueError(
                f"the statistics to merge differ in {', '.join(names)}; merge those of one RolloutCorrectionConfig."
            )
        return replace(
            self,
            sums=self.sums + other.sums,
            mins=torch.minimum(self.mins, other.mins),
            maxs=torch.maximum(self.maxs, other.maxs),
        )

    def all_reduce(self, ranks: Ranks) -> "Statistics":
        """The statistics of all ranks; these here stay as they are.

        Sums, which are of whole sequences, are added over data-parallel ranks; extremes are taken over
        context-parallel ranks too.
        """
        return replace(
            self,
            sums=ranks.over_data(self.sums.clone()),
            mins=ranks.all_reduce(self.mins.clone(), "min"),
            maxs=ranks.all_reduce(self.maxs.clone(), "max"),
        )

    def batch_norm_factor(self, ranks: Ranks = ONE_RANK) -> Tensor:
        """Mean of the bounded weights, over valid tokens, or over sequences where weights are sequence-wide.

        Args:
            ranks: That share the batch, where these are the statistics of one of them.

        Returns:
            float64 scalar.

            1 where there is no weight, where all are zero, or where the configuration does not normalise.
        """
        if not (self.config.use_tis and self.config.tis_batch_normalize):
            return torch.ones_like(self.sums[0])
        names = sum_names(self.config)
        pair = torch.stack([self.sums[names.index("weight")], self.sums[names.index("weights")]])
        return mean_weight(*ranks.over_data(pair).unbind())

    def metrics(self) -> dict[str, float]:
        """All metrics that apply to the configuration, by their names in the log; one host synchronisation.

        Returns:
            Name to value; empty where there is no valid token at all. No value is ever NaN or infinite.
        """
        values = torch.cat([self.sums, self.mins, self.maxs]).tolist()
        names = sum_names(self.config)
        return correction_metrics(
            self.config,
            sums=dict(zip(names, values, strict=False)),
            mins=dict(zip(MINIMA, values[len(names) :], strict=False)),
            maxs=dict(zip(MAXIMA, values[len(names) + len(MINIMA) :], strict=True)),
        )


def sum_names(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """Names of the entries of `Statistics.sums`."""
    names = list(MISMATCH_SUMS)
    if config.use_tis:
        names += WEIGHT_SUMS
    if config.has_token_weights:
        names += SEQUENCE_WEIGHT_SUMS
    if config.rejections:
        names += REJECTION_SUMS
    for criterion in config.rejections:
        names += [f"rs_tokens:{criterion.name}", f"rs_sequences:{criterion.name}"]
    if config.adaptive:
        names += ADAPTIVE_SUMS
    if config.vetoes:
        names += VETO_SUMS
    if config.rs_second_moment_bound is not None:
        names.append("trimmed_tokens")
    return tuple(names)


def mismatch_terms(columns: dict[str, Tensor], present_S: Tensor) -> dict[str, Tensor]:
    """What each sequence adds to the sums that measure the gap; nothing where it has no valid token.

    Perplexities are of the tokens whose log-probs are finite. A token that counts as ratio 1 (the neutral policy) has
    no log-prob of its own.

    Args:
        columns: The table of sequences, name to [S].
        present_S: 1.0 where the sequence has a valid token.
    """
    finite = columns["original"] - columns["nonfinite"]
    measured = (finite > 0).to(torch.float64)
    log_ratio, n = columns["log_ratio"], finite.clamp_min(1)
    training = -columns["train"] / n
    difference = -log_ratio / n
    rollout = training - difference
    return {
        "sequences": present_S,
        "measured_sequences": measured,
        "original_tokens": columns["original"],
        "tokens": columns["valid"],
        "nonfinite_tokens": columns["nonfinite"],
        "training_log_ppl": training,
        "training_ppl": _exp(training) * measured,
        "rollout_log_ppl": rollout,
        "rollout_ppl": _exp(rollout) * measured,
        "log_ratio": log_ratio,
        "abs_log_ratio": columns["abs_log_ratio"],
        "excess": columns["excess"],
        "ratio_squared_excess": columns["excess_squared"] + 2 * columns["excess"],
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": _exp(difference) * measured,
        "sequence_ratio_squared_excess": torch.expm1(2 * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)),
    }


def _exp(log_value_S: Tensor) -> Tensor:
    return log_value_S.clamp(-LOG_PPL_BOUND, LOG_PPL_BOUND).exp_()
