"""The command line of train.py: flags, YAML and presets, checked once, as one frozen config per subject."""

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.errors import quoted, quoted_path
from slime_tis.hf_directory import read_model_config
from slime_tis.options.command_line import (
    CodeConfig,
    Flags,
    build,
    make_parser,
    merge_sources,
    naming_sources,
    read_flags,
    split_words,
    unmet_needs,
)
from slime_tis.options.fields import flag
from slime_tis.options.flags import Flag
from slime_tis.options.values import Given, Source
from slime_tis.policy.config import PolicyConfig
from slime_tis.trainer.cli.file_checks import (
    check_files,
    check_model,
    check_outputs,
    check_resumption,
    check_weights,
)
from slime_tis.trainer.cli.option_checks import (
    check_arguments,
    check_correction,
    check_dump,
    check_ranks,
    warnings_of,
)
from slime_tis.trainer.cli.slime_flags import RENAMED, refusal
from slime_tis.trainer.cli.train_options import ALIASES, COMMAND_LINE, FLAGS, OPTIONS, Arguments
from slime_tis.trainer.options.loop import MOST_SAMPLES, LoopConfig, ReportingConfig
from slime_tis.trainer.options.megatron import MegatronConfig, read_environment
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.options.sglang import PREFIX, SGLangConfig, check_server_args


def parse_args(argv: Sequence[str] | None = None, *, prog: str = "train.py") -> Arguments:
    """Reads and checks the configuration of a run; exits with 2 and one line on stderr for a refusal."""
    try:
        arguments = configure(sys.argv[1:] if argv is None else argv, os.environ, prog=prog)
        check_weights(arguments.megatron)
    except OSError as error:
        named = error.filename is not None
        print(
            f"{error.strerror}: {quoted_path(error.filename)}." if named else error, file=sys.stderr
        )
        raise SystemExit(2) from None
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings_of(arguments):
            print(f"warning: {warning}", file=sys.stderr)
    return arguments


def configure(
    argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "train.py"
) -> Arguments:
    """What parse_args does, with the environment passed in and ValueError instead of an exit."""
    given, restated = _read_command_line(argv, prog)
    options = merge_sources(COMMAND_LINE, given)
    with naming_sources(options):
        rollout = build(RolloutConfig, options)
        arguments = Arguments(
            correction=build(RolloutCorrectionConfig, options),
            policy=build(PolicyConfig, options),
            megatron=build(MegatronConfig, options),
            rollout=rollout,
            sglang=build(SGLangConfig, options),
            loop=_resolve_steps(rollout, build(LoopConfig, options).with_dump_patterns()),
            reporting=build(ReportingConfig, options),
            custom_tis_function_path=build(CodeConfig, options).custom_tis_function_path,
            namespace=argparse.Namespace(),
            user_options=user_options(options),
        )
        if rollout.rollout_engine == "sglang":
            arguments.sglang.check_has_servers()
        check_correction(arguments)
    world_size = read_environment(environ).world_size
    check_arguments(arguments)
    check_files(arguments.rollout, arguments.megatron)
    check_dump(arguments)
    model = check_model(arguments.megatron, arguments.rollout, world_size)
    check_ranks(arguments, world_size)
    _refuse_unknown(restated, model)
    patterns = {
        name: getattr(arguments.loop, name)
        for name in ("save_debug_rollout_data", "save_debug_train_data")
    }
    dumps = {
        flag(name): pattern.format(rollout_id=0, rank=0)
        for name, pattern in patterns.items()
        if pattern
    }
    check_outputs(arguments.rollout, arguments.megatron, arguments.reporting, dumps)
    check_resumption(arguments.megatron, effective_config(arguments))
    namespace = _slime_names(effective_config(arguments), arguments.correction, arguments.policy)
    return dataclasses.replace(arguments, namespace=namespace)


def effective_config(arguments: Arguments) -> dict[str, Any]:
    """Returns options with presets, aliases and derived sizes resolved, in the order of the groups."""
    configs = [config for config in vars(arguments).values() if dataclasses.is_dataclass(config)]
    values = {
        field.name: getattr(config, field.name)
        for config in configs
        for field in dataclasses.fields(config)
    }
    values["custom_tis_function_path"] = arguments.custom_tis_function_path
    ordered = [name for name in OPTIONS if name in values]
    plain = {
        name: list(values[name]) if isinstance(values[name], tuple) else values[name]
        for name in ordered
    }
    return plain | dict(arguments.user_options)


def options_in_force(arguments: Arguments) -> dict[str, Any]:
    """Returns the options that have an effect; as YAML for --custom-config-path they give the same arguments."""
    values = effective_config(arguments)
    every = {name: option.default for name, option in OPTIONS.items()} | values
    return {
        name: value for name, value in values.items() if not unmet_needs(COMMAND_LINE, name, every)
    }


def describe(arguments: Arguments) -> str:
    """Returns the options that differ from their defaults, and the precision, as flags; one group per line."""
    values = effective_config(arguments)
    lines = []
    for title, options in COMMAND_LINE.groups.items():
        changed = [
            one.name for one in options if one.name in values and values[one.name] != one.default
        ]
        shown = [_as_flag(name, values[name]) for name in changed]
        if title == "parallelism and precision" and arguments.megatron.precision == "fp32":
            shown.append("--no-bf16 (trains in float32)")
        if shown:
            lines.append(f"{title}: {' '.join(shown)}")
    if arguments.user_options:
        lines.append(
            "user functions: "
            + ", ".join(f"{key} {value}" for key, value in arguments.user_options.items())
        )
    return "\n".join(lines)


def user_options(given: Mapping[str, Given]) -> dict[str, Any]:
    """Returns the options of user functions; refuses them without a user function."""
    unknown = {name: entry for name, entry in given.items() if name not in OPTIONS}
    named = (
        given[name].value
        for name, one in OPTIONS.items()
        if one.metavar == "FUNCTION" and name in given
    )
    if unknown and all(value is None for value in named):
        label = next(iter(unknown.values())).label
        raise ValueError(
            f"{label} is not an option, and no user function is given that could read it;"
            " remove it."
        )
    return {name: entry.value for name, entry in unknown.items()}


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag(name if value else "no_" + name)
    words = value if isinstance(value, list) else [value]
    return " ".join([flag(name), *(shlex.quote(str(word)) for word in words)])


def build_parser(prog: str = "train.py") -> argparse.ArgumentParser:
    """The parser of the command line: titled groups of flags, whose values it keeps as text."""
    return make_parser(
        COMMAND_LINE,
        prog=prog,
        usage=f"{prog} --hf-checkpoint DIR --prompt-data FILE [options]",
        description=(
            "Trains a language model by reinforcement learning on Megatron-core, with the mismatch "
            "between rollout and training log-probs measured and corrected."
        ),
    )


def _read_command_line(argv: Sequence[str], prog: str) -> tuple[Flags, list[Flag]]:
    """Returns the values of the flags, and the flags to compare with config.json."""
    words, overrides = split_words(build_parser(prog), argv)
    names = {one.name for one in words}
    is_launching = not names.isdisjoint(("--sglang-launch", "--custom-config-path"))
    known, unknown, server_args = list[Flag](), list[Flag](), list[str]()
    for one in words:
        if one.name in FLAGS or not one.name:
            known.append(one)
        elif is_launching and one.name.startswith(PREFIX) and one.name not in RENAMED:
            server_args += [f"--{one.word.removeprefix(PREFIX)}", *one.following]
        else:
            unknown.append(one)
    _refuse_unknown(unknown, _peek_at_model(known))
    if server_args:
        check_server_args(server_args)
    flags = read_flags(COMMAND_LINE, known, overrides)
    if server_args and flags.given.keys().isdisjoint(("sglang_launch", "custom_config_path")):
        raise ValueError(
            f"{quoted('--sglang-' + server_args[0][2:])[1:-1]} is a flag of servers; add"
            " --sglang-launch N."
        )
    if server_args:
        label, source = flag("sglang_server_args"), Source.COMMAND_LINE
        flags.given["sglang_server_args"] = Given(
            value=tuple(server_args), label=label, source=source
        )
    return flags, unknown


def _refuse_unknown(unknown: Sequence[Flag], model: Mapping[str, Any] | None) -> None:
    message = refusal(unknown, list(map(flag, (*OPTIONS, *ALIASES))), model)
    if message:
        raise ValueError(message)


def _peek_at_model(flags: Sequence[Flag]) -> dict[str, Any] | None:
    """The config.json of --hf-checkpoint, so that one message can also say what differs from it; None without one."""
    directories = [one.values[0] for one in flags if one.name == "--hf-checkpoint" and one.values]
    try:
        return read_model_config(directories[-1]) if directories else None
    except ValueError:
        return None


def _resolve_steps(rollout: RolloutConfig, loop: LoopConfig) -> LoopConfig:
    """Derives global_batch_size and num_steps_per_rollout from each other."""
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    total = f"a rollout has {samples} samples (--rollout-batch-size × --n-samples-per-prompt)"
    if samples > MOST_SAMPLES:
        raise ValueError(f"{total}, more than {MOST_SAMPLES}; lower one of the two.")
    steps, size = loop.num_steps_per_rollout, loop.global_batch_size
    if size is not None and (samples % size or (steps is not None and size * steps != samples)):
        raise ValueError(
            f"--global-batch-size is {size} and --num-steps-per-rollout {steps or 'unset'} but"
            f" {total}."
        )
    if steps is not None and samples % steps:
        raise ValueError(
            f"--num-steps-per-rollout is {steps} but {total}; choose a divisor of {samples}."
        )
    steps = steps or samples // (size or samples)
    return dataclasses.replace(
        loop, num_steps_per_rollout=steps, global_batch_size=samples // steps
    )


def read_layout(argv: Sequence[str]) -> MegatronConfig:
    """Returns the training engine's options among flags of train.py, for `slime-tis plan`."""
    needed = {
        name: option
        for name, option in OPTIONS.items()
        if option.default is not dataclasses.MISSING or name == "hf_checkpoint"
    }
    flags, _ = _read_command_line(argv, "slime-tis plan")
    return build(
        MegatronConfig, merge_sources(dataclasses.replace(COMMAND_LINE, options=needed), flags)
    )


WHAT_IF_LOSS_OPTIONS = (
    *(
        "policy_loss",
        "eps_clip",
        "eps_clip_high",
        "eps_clip_c",
        "sapo_tau_pos",
        "sapo_tau_neg",
        "dro_beta",
    ),
    *(
        "cov_ratio",
        "clip_cov_lower_bound",
        "clip_cov_upper_bound",
        "kl_cov_coef",
        "experimental_cppo_budget",
    ),
    *(
        "rollout_pull_coef",
        "staleness_decay",
        "use_opsm",
        "opsm_policy",
        "opsm_delta",
        "calculate_per_token_loss",
    ),
)
"""Options of the loss that a dump has the data for."""


def read_correction(
    argv: Sequence[str], policy: PolicyConfig
) -> tuple[RolloutCorrectionConfig, PolicyConfig, str | None, argparse.Namespace]:
    """Returns the options of `slime-tis what-if`.

    Returns: The correction, the run's policy options with the given ones, the custom TIS function
        or None, and its options.
    """
    optional = {
        name: option
        for name, option in OPTIONS.items()
        if option.default is not dataclasses.MISSING
    }
    line = dataclasses.replace(COMMAND_LINE, options=optional)
    flags = read_flags(COMMAND_LINE, *split_words(build_parser("slime-tis what-if"), argv))
    for name in flags.given:
        if OPTIONS[name].group != "rollout correction" and name not in WHAT_IF_LOSS_OPTIONS:
            raise ValueError(f"{flag(name)} is not a flag of a correction; remove it.")
    values = merge_sources(line, flags)
    given = {
        name: values[name].value
        for name in flags.given
        if name in PolicyConfig.__dataclass_fields__
    }
    policy = dataclasses.replace(policy, **given)
    correction = build(RolloutCorrectionConfig, values)
    path = build(CodeConfig, values).custom_tis_function_path
    if path and not correction.corrects:
        raise ValueError("--custom-tis-function-path needs --use-tis; add it.")
    known = dataclasses.asdict(policy) | dataclasses.asdict(correction)
    return correction, policy, path, _slime_names(known | user_options(values), correction, policy)


def _slime_names(
    values: dict[str, Any], correction: RolloutCorrectionConfig, policy: PolicyConfig
) -> argparse.Namespace:
    """Returns options under their names and slime's, with the bounds that the built-in correction derives."""
    lowest = correction.tis_lower_bound
    lower, upper = correction.is_bounds
    if (
        lower < upper
    ):  # not so where an upper bound below 1 has no lower one, as in mode truncate it may
        values["tis_lower_bound"] = lower
    if not correction.adaptive:
        values["rs_lower_bound"], values["rs_upper_bound"] = correction.rs_bounds
    values |= {old: values[new] for old, new in ALIASES.items() if new in values}
    values["eps_clip_high"] = policy.clip_high
    if "disable_rollout_global_dataset" in values:
        values["rollout_global_dataset"] = not values["disable_rollout_global_dataset"]
    values["opsm_delta"] = policy.opsm_bound
    values["tis_clip_low"] = lowest or 0.0
    return argparse.Namespace(**values)
