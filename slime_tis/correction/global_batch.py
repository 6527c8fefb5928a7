"""What one call of `correct` has to know of the global batch."""

from dataclasses import dataclass

from torch import Tensor

from slime_tis.correction.adaptive import AdaptiveBounds
from slime_tis.correction.ranks import ONE_RANK, Ranks


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The global batch that the sequences of one call belong to: who shares it, and what is known of it.

    A call with all sequences of the rank finds what is None, and returns it as `Correction.global_batch`; calls with
    one micro-batch each take it from there.
    """

    ranks: Ranks = ONE_RANK
    """The ranks that share it."""
    batch_norm_factor: Tensor | None = None
    """Scalar, the mean weight, under `tis_batch_normalize`."""
    second_moment_limit: Tensor | None = None
    """Scalar, the smallest Δ² that is trimmed, +inf where none is, under `rs_second_moment_bound`."""
    adaptive_bounds: AdaptiveBounds | None = None
    """What sequences are rejected by under `rs_z_score` or `rs_target_fraction`."""


THIS_CALL = GlobalBatch()
"""The global batch of a call with all of its sequences on one rank."""
