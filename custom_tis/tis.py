"""Truncated importance sampling, as slime's built-in one.

`--custom-tis-function-path custom_tis.tis.vanilla_tis`, in train.py, slime and miles.
Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(https://fengyao.notion.site/off-policy-rl).
"""

from argparse import Namespace
from functools import partial
from typing import Any

from torch import Tensor

from slime_tis.correction import MODES
from slime_tis.integrations.slime import TisResult, refuse_unread, weighted_by_token

check_args = partial(refuse_unread, function="vanilla_tis", read=("use_tis", "nonfinite_policy"))
"""Refuses options that `vanilla_tis` does not follow; train.py calls it before anything is
built."""


def vanilla_tis(args: Namespace, *, pg_loss: Tensor, **call: Any) -> TisResult:
    """pg_loss · clamp(π_train/π_rollout, tis_clip_low, tis_clip) per token; 0 at masked tokens.

    Args:
        args: Reads tis_clip (2.0 if missing), tis_clip_low (0.0 if missing) and nonfinite_policy.
        pg_loss: [N], flat over this rank's response tokens.
        call: The other arguments of slime's contract, which `weighted_by_token` describes.

    Returns:
        pg_loss, the loss masks without non-finite tokens, and tis (the raw ratio), tis_clipfrac,
        tis_abs, [N] each.
    """
    return weighted_by_token(args, MODES["clip"].bound, pg_loss, call)
