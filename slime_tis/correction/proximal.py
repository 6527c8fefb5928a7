"""The proximal policy without a forward pass: old log-probs interpolated between rollout and current ones."""

import torch
from torch import Tensor


def interpolate_old_log_probs(
    log_probs: Tensor, rollout_log_probs: Tensor, current_version: int, rollout_versions: Tensor
) -> Tensor:
    """log π_old = log π_rollout + α·(log π_θ − log π_rollout), α = clamp((v_θ − 1 − v)/(v_θ − v), 0, 1).

    Between the policy that sampled a token, of version v, and the current one, of version v_θ, the proximal policy
    is the one before the current: it lies all of the way but one step. A token sampled by the current version
    (v = v_θ) or the one before has α = 0, so that its old policy is the one that sampled it; so has a token whose
    version is not known (v < 0).

    Source: AReaL, "Proximal Log-Probability Approximation"
    (https://inclusionai.github.io/AReaL/algorithms/prox_approx.html), the method `loglinear`.

    Args:
        log_probs: log π_θ of the tokens, any shape.
        rollout_log_probs: log π_rollout, of the same shape.
        current_version: v_θ, the number of the weights that are trained.
        rollout_versions: v of each token, of the same shape; below 0 where it is not known.

    Returns:
        Detached old log-probs. If v < 0 or v > v_θ, or a log-prob is not finite, the rollout's log-prob.

    Raises:
        ValueError: if the shapes differ.
    """
    shapes = [tuple(x.shape) for x in (log_probs, rollout_log_probs, rollout_versions)]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"log_probs has shape {shapes[0]}, rollout_log_probs {shapes[1]}, rollout_versions {shapes[2]}; "
            f"pass three tensors of one shape."
        )
    log_probs, rollout = log_probs.detach(), rollout_log_probs.detach()
    lag = (current_version - rollout_versions).to(rollout.dtype)
    fraction = ((lag - 1) / lag.clamp_min(1)).clamp(0, 1)
    difference = log_probs - rollout
    known = (rollout_versions >= 0) & difference.isfinite()
    return torch.where(known, rollout + fraction * difference, rollout)
