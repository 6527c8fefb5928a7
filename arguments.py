"""The command line: `parse_args` for `train.py`, and flags of the correction for other parsers."""

from slime_tis.integrations.arguments import (
    add_rollout_correction_arguments,
    rollout_correction_config,
)
from slime_tis.trainer.cli.train_arguments import parse_args
from slime_tis.trainer.cli.train_options import Arguments

__all__ = [
    "Arguments",
    "add_rollout_correction_arguments",
    "parse_args",
    "rollout_correction_config",
]
