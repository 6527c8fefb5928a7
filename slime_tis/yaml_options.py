"""Options from a YAML file: flag names as keys, and verl's rollout_correction block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slime_tis.options import NULLS, Option, nearest, read_value

VERL_NAMES = {
    "rollout_is": "tis_level",
    "rollout_is_threshold": "tis_upper_bound",
    "rollout_is_batch_normalize": "tis_batch_normalize",
    "rollout_rs": "rs_level",
    "rollout_rs_threshold": "rs_upper_bound",
    "rollout_rs_threshold_lower": "rs_lower_bound",
    "rollout_token_veto_threshold": "rs_veto_threshold",
    "bypass_mode": "use_rollout_logprobs",
    "bypass_old_logprob_for_rollout": "use_rollout_logprobs",
    "use_policy_gradient": "policy_loss",
    "use_pure_rollout_correction": "policy_loss",
    "loss_type": "policy_loss",
}
"""Keys of verl's algorithm.rollout_correction block and the option each one is here."""

VERL_SWITCHES = {"rollout_is": "use_tis", "rollout_rs": "use_rs"}
"""Keys of verl that turn something on by not being null, and the switch each one is here."""

VERL_LOSSES = {"true": "reinforce", "false": "ppo", "ppo_clip": "ppo"}
"""Values of verl's use_policy_gradient and loss_type and the policy_loss each one is here."""

VERL_LOG_PROBS = {"rollout": {"calculate_log_probs": "true"}}
"""The actor_rollout_ref block that verl's correction asks for; here rollouts always have log-probs."""


def read_yaml(path: Path, options: Mapping[str, Option], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Reads the options of a YAML file.

    YAML's own typing is left out (BaseLoader): scalars stay text and are read as a command line's are.

    Args:
        path: the file.
        options: the options there are, by name.
        aliases: old names of options and the name each one has now.

    Returns:
        The values given, by the option's name.

    Raises:
        ValueError: one sentence, for a file that is not there or not YAML, an unknown key or a wrong value.
    """
    if not path.is_file():
        raise ValueError(f"--custom-config-path is '{path}' but there is no such file; give a YAML file.")
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--custom-config-path is '{path}' but it is not YAML: {reason}.") from None
    if not isinstance(document, dict):
        raise ValueError(f"--custom-config-path is '{path}' but it holds no keys; write one `key: value` a line.")
    values: dict[str, Any] = {}
    for key, value in _without_verl_blocks(document, path).items():
        name = aliases.get(key.replace("-", "_"), key.replace("-", "_"))
        if name not in options:
            raise ValueError(f"{key} in {path} is not an option; {nearest(key, (*options, *aliases))}")
        if name in values:
            raise ValueError(f"{key} in {path} gives {name} a second time; leave one of the two out.")
        values[name] = read_value(f"{key} in {path}", options[name], value)
    return values


def _without_verl_blocks(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """The document with verl's nested blocks turned into options of ours, which its flat keys override."""
    flat = dict(document)
    if flat.get("actor_rollout_ref") == VERL_LOG_PROBS:
        del flat["actor_rollout_ref"]
    algorithm = flat.pop("algorithm", {})
    block = algorithm.get("rollout_correction") if isinstance(algorithm, dict) else None
    if algorithm and (set(algorithm) != {"rollout_correction"} or not isinstance(block, dict)):
        raise ValueError(f"algorithm in {path} may only hold a rollout_correction block; give the rest as flags.")
    return {**_from_verl(block or {}, path), **flat}


def _from_verl(block: dict[str, Any], path: Path) -> dict[str, Any]:
    """verl's rollout_correction block, in its older and its newer keys, as options of ours."""
    for key in block:
        if key not in VERL_NAMES:
            raise ValueError(
                f"algorithm.rollout_correction.{key} in {path} is not an option; {nearest(key, VERL_NAMES)}"
            )
    given = {key: value for key, value in block.items() if str(value).lower() not in NULLS}
    options = {VERL_NAMES[key]: value for key, value in given.items()}
    if "policy_loss" in options:
        options["policy_loss"] = VERL_LOSSES.get(str(options["policy_loss"]).lower(), options["policy_loss"])
    options |= {switch: str(key in given) for key, switch in VERL_SWITCHES.items() if key in block}
    if options.get("rs_level", "token") not in ("token", "sequence", "geometric"):
        options |= {"use_rs": "false", "rollout_rs": options.pop("rs_level")}
        options["rollout_rs_threshold"] = options.pop("rs_upper_bound", "")
    if "_" in str(options.get("tis_upper_bound")):
        lower, upper = str(options["tis_upper_bound"]).split("_", 1)
        options |= {"tis_mode": "mask", "tis_lower_bound": lower, "tis_upper_bound": upper}
    bypass_ppo = options.get("use_rollout_logprobs") == "true" and options.get("policy_loss", "ppo") == "ppo"
    if bypass_ppo and "rollout_is" in given:  # verl computes the weights there for its metrics only
        options |= {"use_tis": "false", "get_mismatch_metrics": "true"}
    return options
