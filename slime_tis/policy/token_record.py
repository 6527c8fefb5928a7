"""Per-token values of the policy loss, for dumps."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """Values of a micro-batch's response tokens, without gradient; all are [L]."""

    log_probs_L: Tensor
    """log π_θ."""
    old_log_probs_L: Tensor
    """log π_old of the loss."""
    entropy_L: Tensor
    weights_L: Tensor
    """Loss weights: 1 without importance weights, 0 at masked tokens; NaN if a user's function
    applies them."""
    accepted_L: Tensor
    """bool: the tokens in the loss."""
    measured_log_probs_L: Tensor
    """log π_train of the mismatch metrics; see `measured_log_probs`."""

    def stack(self) -> Tensor:
        """float32 [L, 6], in the order of the fields."""
        columns = [getattr(self, field.name).detach().float() for field in fields(self)]
        return torch.stack(columns, 1)

    @classmethod
    def unstack(cls, values: Tensor) -> "TokenRecord":
        """Inverse of `stack`; dtypes become float32."""
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, values.unbind(1), strict=True)))
