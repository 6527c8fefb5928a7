"""The options of train.py: every configuration class, the order of the groups, and old names."""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.integrations.arguments import CORRECTION_ALIASES
from slime_tis.options.command_line import CodeConfig, CommandLine, SourceConfig
from slime_tis.options.fields import flag
from slime_tis.options.values import declare_options
from slime_tis.policy.config import PolicyConfig
from slime_tis.trainer.cli.slime_flags import value_advice
from slime_tis.trainer.configs.loop import LoopConfig, ReportingConfig
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.configs.sglang import SGLangConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Everything a run is configured by."""

    correction: RolloutCorrectionConfig
    policy: PolicyConfig
    megatron: MegatronConfig
    rollout: RolloutConfig
    sglang: SGLangConfig
    loop: LoopConfig
    reporting: ReportingConfig
    custom_tis_function_path: str | None
    """Path of the user's correction function, or None for the library's own."""
    namespace: argparse.Namespace
    """The same options flat, under slime's attribute names; custom functions get it as `args`."""
    user_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of user functions: keys of --custom-config-path that this program does not define."""


CONFIGS = (
    SourceConfig,
    RolloutCorrectionConfig,
    CodeConfig,
    PolicyConfig,
    MegatronConfig,
    RolloutConfig,
    SGLangConfig,
    LoopConfig,
    ReportingConfig,
)

TITLES = (
    "model and data",
    "rollout",
    "SGLang servers",
    "sampling",
    "rewards",
    "evaluation",
    "training loop",
    "optimizer",
    "policy loss",
    "rollout correction",
    "routing replay",
    "parallelism and precision",
    "checkpoints",
    "reporting",
    "debugging",
)
"""Titles of the groups of --help, in order."""

_DECLARED = {
    name: dataclasses.replace(option, advice=value_advice(flag(name)))
    for name, option in declare_options(CONFIGS).items()
}
OPTIONS = dict(sorted(_DECLARED.items(), key=lambda item: TITLES.index(item[1].group)))

ALIASES = {**CORRECTION_ALIASES, "save_retain_count": "save_retain"}
"""Old names of options and the name each one has now; both are read on the command line and in
YAML."""

COMMAND_LINE = CommandLine(options=OPTIONS, aliases=ALIASES)

FLAGS = {*COMMAND_LINE.spellings, "--help"}
"""Every flag that is read here, --no- forms included."""
