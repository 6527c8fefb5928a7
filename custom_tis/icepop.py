"""IcePop: tokens out of bounds have no gradient, and stay in the denominator.

`--custom-tis-function-path custom_tis.icepop.icepop`, in train.py, slime and miles.
Source: "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
(https://arxiv.org/abs/2510.18855).
"""

from argparse import Namespace
from functools import partial
from typing import Any

from torch import Tensor

from slime_tis.correction import MODES
from slime_tis.integrations.slime import TisResult, refuse_unread, weighted_by_token

check_args = partial(refuse_unread, function="icepop", read=("use_tis", "nonfinite_policy"))
"""Refuses options that `icepop` does not follow; train.py calls it before anything is built."""


def icepop(args: Namespace, *, pg_loss: Tensor, **call: Any) -> TisResult:
    """pg_loss · w, with w = π_train/π_rollout if tis_clip_low ≤ w ≤ tis_clip, else 0.

    Args and returns as `custom_tis.tis.vanilla_tis`.
    """
    return weighted_by_token(args, MODES["mask"].bound, pg_loss, call)
