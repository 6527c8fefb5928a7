"""The command line of train.py: reads and checks flags, YAML and presets; returns frozen configs.

Cheap checks come first: flags, combinations of options, files, config.json, then the headers of the
weights.
"""

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.errors import quoted_path
from slime_tis.hf_directory import read_model_config
from slime_tis.hf_hub import CONFIG, local_directory
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
from slime_tis.trainer.cli.bf16_if_fast import detection_note, with_detected_precision
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
from slime_tis.trainer.cli.server_models import with_latent_epsilon
from slime_tis.trainer.cli.slime_flags import RENAMED, advice_for, refusal
from slime_tis.trainer.cli.train_options import ALIASES, COMMAND_LINE, FLAGS, OPTIONS, Arguments
from slime_tis.trainer.cli.true_on_policy import check_family, check_true_on_policy
from slime_tis.trainer.configs.loop import MOST_SAMPLES, LoopConfig, ReportingConfig
from slime_tis.trainer.configs.megatron import MegatronConfig, read_environment
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.configs.server_engines import SERVER_ENGINES
from slime_tis.trainer.configs.servers import (
    ServerConfig,
    check_server_args,
    server_config,
    server_options,
)


def parse_args(argv: Sequence[str] | None = None, *, prog: str = "train.py") -> Arguments:
    """Reads and checks the configuration of a run, and prints warnings about it.

    Args:
        argv: The words of the command line; None takes this process's.
        prog: Name of the program in --help.

    Raises:
        SystemExit: The configuration is refused, with status 2 and a message on stderr; or --help
            was printed, with status 0.
    """
    if argv is None:
        argv = sys.argv[1:]
    try:
        arguments = configure(argv, os.environ, prog=prog)
        check_weights(arguments.megatron)
    except OSError as error:
        message = str(error)
        if error.filename is not None:
            message = f"{error.strerror}: {quoted_path(error.filename)}."
        print(message, file=sys.stderr)
        raise SystemExit(2) from None
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    # Every rank reads the command line; only rank 0 prints its warnings.
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings_of(arguments):
            print(f"warning: {warning}", file=sys.stderr)
    return arguments


def configure(
    argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "train.py"
) -> Arguments:
    """Reads and checks the configuration of a run, without the weights of its model.

    Args:
        argv: The words of the command line.
        environ: The environment, for the number of ranks.
        prog: Name of the program in --help.

    Raises:
        ValueError: The command line is refused; the message is for the user.
    """
    # Flags that repeat config.json can be compared only after it was read.
    given, restated = _read_command_line(argv, prog)
    options = with_detected_precision(merge_sources(COMMAND_LINE, given))
    with naming_sources(options):
        arguments = _build_arguments(options)
        if arguments.rollout.rollout_engine != "local":
            arguments.servers[arguments.rollout.rollout_engine].check_has_servers()
        check_correction(arguments)
    world_size = read_environment(environ).world_size
    check_arguments(arguments)
    check_true_on_policy(arguments)
    check_files(arguments.rollout, arguments.megatron)
    check_dump(arguments)
    # Last of the files, because it may download the model.
    arguments = dataclasses.replace(arguments, megatron=_with_local_models(arguments.megatron))
    model = check_model(arguments.megatron, arguments.rollout, world_size)
    architecture = model["architectures"][0]
    check_family(arguments, architecture)
    engine = arguments.rollout.rollout_engine
    megatron = with_latent_epsilon(arguments.megatron, engine, architecture)
    arguments = dataclasses.replace(arguments, megatron=megatron)
    check_ranks(arguments, world_size)
    _refuse_unknown(restated, model)
    first_dumps = _first_dumps(arguments.loop)
    check_outputs(arguments.rollout, arguments.megatron, arguments.reporting, first_dumps)
    values = effective_config(arguments)
    check_resumption(arguments.megatron, values)
    namespace = _slime_names(values, arguments.correction, arguments.policy)
    return dataclasses.replace(arguments, namespace=namespace)


def _build_arguments(options: Mapping[str, Given]) -> Arguments:
    """Builds all configs, which check their fields."""
    rollout = build(RolloutConfig, options)
    loop = build(LoopConfig, options).with_dump_patterns()
    return Arguments(
        correction=build(RolloutCorrectionConfig, options),
        policy=build(PolicyConfig, options),
        megatron=build(MegatronConfig, options),
        rollout=rollout,
        servers={engine: _build_servers(engine, options) for engine in SERVER_ENGINES},
        loop=_resolve_steps(rollout, loop),
        reporting=build(ReportingConfig, options),
        custom_tis_function_path=build(CodeConfig, options).custom_tis_function_path,
        namespace=argparse.Namespace(),
        user_options=user_options(options),
    )


def _build_servers(engine: str, options: Mapping[str, Given]) -> ServerConfig:
    """Builds the config of an engine's servers from the options with its prefix."""
    values = {}
    for name in server_options(engine):
        if name in options:
            values[name.removeprefix(f"{engine}_")] = options[name].value
    return server_config(engine, **values)


def _with_local_models(megatron: MegatronConfig) -> MegatronConfig:
    """Returns the options with directories in place of names of the Hugging Face Hub."""
    reference = megatron.ref_load
    if reference is not None:
        reference = local_directory(reference, "--ref-load")
    return dataclasses.replace(
        megatron, hf_checkpoint=local_directory(megatron.hf_checkpoint), ref_load=reference
    )


def _first_dumps(loop: LoopConfig) -> dict[str, str]:
    """Returns the first file of every kind of dump, by flag."""
    files = {}
    for name in ("save_debug_rollout_data", "save_debug_train_data"):
        pattern = getattr(loop, name)
        if pattern:
            files[flag(name)] = pattern.format(rollout_id=0, rank=0)
    return files


def effective_config(arguments: Arguments) -> dict[str, Any]:
    """Returns options in the order of --help, with presets, aliases and derived sizes resolved."""
    values: dict[str, Any] = {}
    for config in vars(arguments).values():
        if dataclasses.is_dataclass(config):
            for field in dataclasses.fields(config):
                values[field.name] = getattr(config, field.name)
    for engine, servers in arguments.servers.items():
        for field in dataclasses.fields(servers):
            values[f"{engine}_{field.name}"] = getattr(servers, field.name)
    values["custom_tis_function_path"] = arguments.custom_tis_function_path
    ordered = {}
    for name in OPTIONS:
        if name in values:
            ordered[name] = values[name]
            # JSON and YAML have lists, and a resumed run compares its options with saved ones.
            if isinstance(values[name], tuple):
                ordered[name] = list(values[name])
    return ordered | dict(arguments.user_options)


def options_in_force(arguments: Arguments) -> dict[str, Any]:
    """Returns the options that have an effect.

    A YAML file of them for --custom-config-path gives the same arguments.
    """
    values = effective_config(arguments)
    defaults = {name: option.default for name, option in OPTIONS.items()}
    all_values = defaults | values
    in_force = {}
    for name, value in values.items():
        if not unmet_needs(COMMAND_LINE, name, all_values):
            in_force[name] = value
    return in_force


def describe(arguments: Arguments) -> str:
    """Returns the options that differ from their defaults, as flags, with one group per line.

    float32 is shown although it is the default, because other trainers use bf16.
    """
    values = effective_config(arguments)
    lines = []
    for title, options in COMMAND_LINE.groups.items():
        flags = []
        for option in options:
            value = values.get(option.name, option.default)
            if value != option.default:
                flags.append(_as_flag(option.name, value))
        if title == "parallelism and precision" and arguments.megatron.precision == "fp32":
            flags.append("--no-bf16 (trains in float32)")
        if flags:
            lines.append(f"{title}: {' '.join(flags)}")
    note = detection_note(arguments)
    if note is not None:
        lines.append(note)
    if arguments.user_options:
        pairs = [f"{key} {value}" for key, value in arguments.user_options.items()]
        lines.append(f"user functions: {', '.join(pairs)}")
    return "\n".join(lines)


def user_options(given: Mapping[str, Given]) -> dict[str, Any]:
    """Returns the options of user functions, which are all options that the program lacks.

    Raises:
        ValueError: There are such options, but no user function.
    """
    unknown = {name: entry for name, entry in given.items() if name not in OPTIONS}
    if not unknown:
        return {}
    for name, option in OPTIONS.items():
        is_given = name in given and given[name].value is not None
        if option.metavar == "FUNCTION" and is_given:
            return {name: entry.value for name, entry in unknown.items()}
    first, *_ = unknown.values()
    raise ValueError(
        f"{first.label} is not an option, and no user function is given that could read it;"
        " remove it."
    )


def _as_flag(name: str, value: Any) -> str:
    """Returns an option as words of a shell command."""
    if value is True:
        return flag(name)
    if value is False:
        return flag(f"no_{name}")
    values = [value]
    if isinstance(value, list):
        values = value
    words = []
    for word in map(str, values):
        if word.isprintable():
            words.append(shlex.quote(word))
        else:
            # Bash's $'…' keeps a newline on one line of the log.
            escaped = word.encode("unicode_escape").decode().replace("'", "\\'")
            words.append(f"$'{escaped}'")
    return " ".join([flag(name), *words])


def build_parser(prog: str = "train.py") -> argparse.ArgumentParser:
    """Returns the parser that prints --help."""
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
    """Reads a command line.

    Returns:
        The values of the flags, and the flags to compare with config.json.

    Raises:
        ValueError: A flag is refused, or has a wrong value.
    """
    words, overrides = split_words(build_parser(prog), argv)
    names = {item.name for item in words}
    # A YAML file, which is read later, may have sglang_launch.
    engines = list(SERVER_ENGINES)
    if "--custom-config-path" not in names:
        engines = [engine for engine in engines if f"--{engine}-launch" in names]
    known: list[Flag] = []
    unknown: list[Flag] = []
    server_args: dict[str, list[str]] = {}
    for item in words:
        engine = item.name[2:].partition("-")[0]
        if item.name in FLAGS or not item.name:
            known.append(item)
        elif engine in engines and item.name not in RENAMED and advice_for(item.name) is None:
            word = f"--{item.word.removeprefix(f'--{engine}-')}"
            server_args.setdefault(engine, []).extend([word, *item.following])
        else:
            unknown.append(item)
    _refuse_unknown(unknown, _peek_at_model(known))
    for engine, args in server_args.items():
        check_server_args(engine, args)
    flags = read_flags(COMMAND_LINE, known, overrides)
    for engine, args in server_args.items():
        name = f"{engine}_server_args"
        listed = flags.given.get(name)
        if listed is not None and not listed.unset:
            args = [*listed.value, *args]
        flags.given[name] = Given(
            value=tuple(args),
            label=flag(name),
            source=Source.COMMAND_LINE,
            # Only --ENGINE-server-args replaces all of YAML's list.
            extends=listed is None,
        )
    return flags, unknown


def _refuse_unknown(unknown: Sequence[Flag], model: Mapping[str, Any] | None) -> None:
    """Raises one ValueError about all flags that are refused."""
    known = [flag(name) for name in (*OPTIONS, *ALIASES)]
    message = refusal(unknown, known, model)
    if message:
        raise ValueError(message)


def _peek_at_model(flags: Sequence[Flag]) -> dict[str, Any] | None:
    """Returns the config.json of --hf-checkpoint, or None if it cannot be read.

    With it, the message about unknown flags also lists flags that contradict it.
    """
    directory = None
    for item in flags:
        # The last of several equal flags counts.
        if item.name == "--hf-checkpoint" and item.values:
            directory = item.values[0]
    if directory is None:
        return None
    try:
        return read_model_config(directory)
    except ValueError:
        # `configure` reads the file again, and reports the error.
        return None


def _resolve_steps(rollout: RolloutConfig, loop: LoopConfig) -> LoopConfig:
    """Derives global_batch_size from num_steps_per_rollout or the reverse; default is one step."""
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    total = f"a rollout has {samples} samples (--rollout-batch-size × --n-samples-per-prompt)"
    if samples > MOST_SAMPLES:
        raise ValueError(f"{total}, more than {MOST_SAMPLES}; lower one of the two.")
    steps = loop.num_steps_per_rollout
    size = loop.global_batch_size
    if size is not None:
        contradicts = steps is not None and size * steps != samples
        if samples % size or contradicts:
            raise ValueError(
                f"--global-batch-size is {size} and --num-steps-per-rollout {steps or 'unset'} but"
                f" {total}."
            )
        steps = samples // size
    if steps is None:
        steps = 1
    if samples % steps:
        raise ValueError(
            f"--num-steps-per-rollout is {steps} but {total}; choose a divisor of {samples}."
        )
    return dataclasses.replace(
        loop, num_steps_per_rollout=steps, global_batch_size=samples // steps
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The options of `slime-tis plan`."""

    megatron: MegatronConfig
    rollout_engine: str
    rollout_precision: str
    servers: Mapping[str, ServerConfig]
    """Options of the servers, by the engine's name."""


def read_layout(argv: Sequence[str]) -> Layout:
    """Returns the options of `slime-tis plan` among flags of train.py.

    Of a model of the Hugging Face Hub, only config.json is downloaded.
    """
    # The plan needs neither prompts nor rewards, only the model; a YAML file may have them.
    options = {}
    for name, option in OPTIONS.items():
        options[name] = option
        if option.default is dataclasses.MISSING and name != "hf_checkpoint":
            options[name] = dataclasses.replace(option, default=None)
    line = dataclasses.replace(COMMAND_LINE, options=options)
    flags, _ = _read_command_line(argv, "slime-tis plan")
    merged = merge_sources(line, flags)
    megatron = build(MegatronConfig, merged)
    directory = local_directory(megatron.hf_checkpoint, files=CONFIG)
    rollout = {}
    for name in ("rollout_engine", "rollout_precision"):
        rollout[name] = OPTIONS[name].default
        if name in merged:
            rollout[name] = merged[name].value
    return Layout(
        megatron=dataclasses.replace(megatron, hf_checkpoint=directory),
        servers={engine: _build_servers(engine, merged) for engine in SERVER_ENGINES},
        **rollout,
    )


WHAT_IF_LOSS_OPTIONS = (
    "policy_loss",
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "sapo_tau_pos",
    "sapo_tau_neg",
    "dro_beta",
    "cov_ratio",
    "clip_cov_lower_bound",
    "clip_cov_upper_bound",
    "kl_cov_coef",
    "experimental_cppo_budget",
    "rollout_pull_coef",
    "staleness_decay",
    "use_opsm",
    "opsm_policy",
    "opsm_delta",
    "calculate_per_token_loss",
)
"""Options of the loss whose inputs are in a dump."""


def read_correction(
    argv: Sequence[str], policy: PolicyConfig
) -> tuple[RolloutCorrectionConfig, PolicyConfig, str | None, argparse.Namespace]:
    """Returns the options of `slime-tis what-if`.

    Args:
        argv: Flags of a correction and of its loss.
        policy: The policy options of the run that wrote the dump.

    Returns:
        The correction, the policy options with the given ones, the path of the custom TIS function
        or None, and the options of this function.

    Raises:
        ValueError: A flag is refused, or has a wrong value.
    """
    words, overrides = split_words(build_parser("slime-tis what-if"), argv)
    flags = read_flags(COMMAND_LINE, words, overrides)
    for name in flags.given:
        if OPTIONS[name].group != "rollout correction" and name not in WHAT_IF_LOSS_OPTIONS:
            raise ValueError(f"{flag(name)} is not a flag of a correction; remove it.")
    # A dump needs no model and no prompts, so nothing is required.
    optional = {
        name: option
        for name, option in OPTIONS.items()
        if option.default is not dataclasses.MISSING
    }
    line = dataclasses.replace(COMMAND_LINE, options=optional)
    values = merge_sources(line, flags)
    policy_fields = PolicyConfig.__dataclass_fields__
    changes = {name: values[name].value for name in flags.given if name in policy_fields}
    policy = dataclasses.replace(policy, **changes)
    correction = build(RolloutCorrectionConfig, values)
    path = build(CodeConfig, values).custom_tis_function_path
    if path and not correction.corrects:
        raise ValueError("--custom-tis-function-path needs --use-tis; add it.")
    options = dataclasses.asdict(policy) | dataclasses.asdict(correction) | user_options(values)
    return correction, policy, path, _slime_names(options, correction, policy)


def _slime_names(
    values: Mapping[str, Any], correction: RolloutCorrectionConfig, policy: PolicyConfig
) -> argparse.Namespace:
    """Returns options under their names and slime's, with the bounds that the correction derives.

    Custom functions get the result as `args`.
    """
    names = dict(values)
    lower, upper = correction.is_bounds
    # In mode truncate, an upper bound below 1 without a lower bound is legal.
    if lower < upper:
        names["tis_lower_bound"] = lower
    if not correction.adaptive:
        names["rs_lower_bound"], names["rs_upper_bound"] = correction.rs_bounds
    for old, new in ALIASES.items():
        if new in names:
            names[old] = names[new]
    names["eps_clip_high"] = policy.clip_high
    if "disable_rollout_global_dataset" in names:
        names["rollout_global_dataset"] = not names["disable_rollout_global_dataset"]
    names["opsm_delta"] = policy.opsm_bound
    # slime's default of --tis-clip-low is 0, not the derived bound.
    names["tis_clip_low"] = correction.tis_lower_bound or 0.0
    return argparse.Namespace(**names)
