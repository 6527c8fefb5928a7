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
from slime_tis.options.values import Option, declare_options
from slime_tis.policy.config import PolicyConfig
from slime_tis.trainer.cli.slime_flags import value_advice
from slime_tis.trainer.configs.loop import LoopConfig, ReportingConfig
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.configs.server_engines import SERVER_ENGINES
from slime_tis.trainer.configs.servers import ServerConfig, server_options


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The configuration of a run."""

    correction: RolloutCorrectionConfig
    policy: PolicyConfig
    megatron: MegatronConfig
    rollout: RolloutConfig
    servers: Mapping[str, ServerConfig]
    """Servers by the name of their engine, for each of SERVER_ENGINES."""
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
    LoopConfig,
    ReportingConfig,
)

TITLES = (
    "model and data",
    "rollout",
    *(f"{entry.title} servers" for entry in SERVER_ENGINES.values()),
    "sampling",
    "rewards",
    "evaluation",
    "training loop",
    "optimizer",
    "LoRA adapters",
    "policy loss",
    "rollout correction",
    "routing replay",
    "parallelism and precision",
    "checkpoints",
    "reporting",
    "debugging",
)
"""Titles of the groups of --help, in order."""


def _declare() -> dict[str, Option]:
    """Returns the options in the order of --help."""
    options = list(declare_options(CONFIGS).values())
    for engine in SERVER_ENGINES:
        options += server_options(engine).values()
    # Stable: within a group, options keep the order of their fields.
    options.sort(key=lambda option: TITLES.index(option.group))
    declared = {}
    for option in options:
        advice = value_advice(flag(option.name))
        declared[option.name] = dataclasses.replace(option, advice=advice)
    return declared


OPTIONS = _declare()
"""Options by name, in the order of --help."""

ALIASES = {
    **CORRECTION_ALIASES,
    "save_retain_count": "save_retain",
    "lora_r": "lora_rank",  # TRL's
    "target_modules": "lora_target_modules",  # miles'
}
"""Present names of options by old name; the command line and YAML take both."""

COMMAND_LINE = CommandLine(options=OPTIONS, aliases=ALIASES)

FLAGS = {*COMMAND_LINE.spellings, "--help"}
"""All flags of train.py, with their --no- forms."""
