"""The mergeable table: sums, minima and maxima from which every metric is computed.

Micro-batches and ranks merge by adding and by min and max; nothing in here is an average. Which entries there
are depends on the options alone, so that a rank with no sequence merges with the others.
"""

from dataclasses import dataclass, fields, replace
from itertools import islice

import torch
from torch import Tensor

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.metrics import correction_metrics, mean_weight
from slime_tis.correction.ranks import ONE_RANK, Ranks
from slime_tis.correction.sums import EXTREMES, BatchSums, batch_columns, named, number_of_columns


@dataclass(frozen=True)
class Statistics:
    """What was measured of some sequences under one configuration."""

    config: RolloutCorrectionConfig
    """The options under which it was measured."""
    sums: Tensor
    """`BatchSums` as columns, float64 [k], of whole sequences: the same on every context-parallel rank, to be added
    over data-parallel ranks."""
    mins: Tensor
    """Minima over this rank's tokens and sequences, `Extremes` as columns, float64 [m]."""
    maxs: Tensor
    """Maxima over them, likewise."""

    @classmethod
    def empty(cls, config: RolloutCorrectionConfig, device: torch.device | str = "cpu") -> "Statistics":
        """The neutral element of `merge`."""
        zero = torch.zeros(1, dtype=torch.float64, device=device)
        return cls(
            config=config,
            sums=zero.repeat(number_of_columns(batch_columns(config))),
            mins=(zero + torch.inf).repeat(number_of_columns(EXTREMES)),
            maxs=(zero - torch.inf).repeat(number_of_columns(EXTREMES)),
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
            raise ValueError(f"the statistics to merge differ in {', '.join(names)}; merge statistics of one config.")
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

    def named_sums(self) -> BatchSums[Tensor]:
        """The sums by their names, each a scalar."""
        sums: BatchSums[Tensor] = named(batch_columns(self.config), self.sums.unbind())
        return sums

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
        weights = self.named_sums().weights
        assert weights is not None, "under use_tis there are weights"
        return mean_weight(*ranks.over_data(torch.stack([weights.total, weights.count])).unbind())

    def metrics(self) -> dict[str, float]:
        """All metrics that apply to the configuration, by their names in the log; one host synchronisation.

        Returns:
            Name to value; empty where there is no valid token at all. No value is ever NaN or infinite.
        """
        values = iter(torch.cat([self.sums, self.mins, self.maxs]).tolist())
        return correction_metrics(
            self.config,
            sums=named(batch_columns(self.config), islice(values, len(self.sums))),
            mins=named(EXTREMES, islice(values, len(self.mins))),
            maxs=named(EXTREMES, values),
        )
