"""Inputs of the policy loss: one micro-batch, and what all micro-batches of a step share.

Shapes: suffix _L is the response tokens on this rank, packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slime_tis.correction import GlobalBatch, RolloutCorrectionConfig
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import CustomLoss, CustomTis, ObjectiveFunctions
from slime_tis.policy.losses import CovarianceLimit
from slime_tis.policy.response_tokens import ResponseTokens


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch after its forward pass."""

    tokens: ResponseTokens
    log_probs_L: Tensor
    """log π_θ, with gradient."""
    entropy_L: Tensor
    """Entropies of the distributions that predict the tokens."""
    sequences: Sequence[Tensor] = ()
    """Tokens of prompt and response per sample, int64; only for a user's loss."""
    logits: Tensor | None = None
    """[1, L, V] of these tokens with gradient; only for a user's loss."""

    @property
    def advantages_L(self) -> Tensor:
        """The advantages; the learner sets them before training."""
        assert self.tokens.advantages_L is not None
        return self.tokens.advantages_L


@dataclass(frozen=True, kw_only=True)
class LossStep:
    """Values that are the same for all micro-batches of an optimizer step."""

    correction: RolloutCorrectionConfig
    policy: PolicyConfig
    uses_recomputed_old_policy: bool
    """Whether π_old is in `old_log_probs_L`; otherwise it is π_θ of this forward pass,
    detached."""
    version: int = 0
    """Version of the policy's weights, in optimizer steps."""
    global_batch: GlobalBatch = field(default_factory=GlobalBatch)
    """The context-parallel ranks and precomputed statistics of the global batch."""
    covariance: CovarianceLimit | None = None
    """Selection of clip_cov or kl_cov in the global batch; None selects in each micro-batch."""
    counts: bool = True
    """Whether this rank counts tokens and sequences: one of the context-parallel ranks does."""
    custom: CustomTis | None = None
    """A user's function instead of the library's correction."""
    custom_loss: CustomLoss | None = None
    """A user's function instead of the loss."""
    functions: ObjectiveFunctions = field(default_factory=ObjectiveFunctions)
    """The user's other functions."""
