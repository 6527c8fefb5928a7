"""The command line of train.py: flags, YAML and presets, checked once, as one frozen config per subject."""

import argparse
import dataclasses
import json
import os
import shlex
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.criteria import Criterion
from slime_tis.errors import quoted, quoted_path
from slime_tis.integrations.arguments import CORRECTION_ALIASES
from slime_tis.limits import Limits, check_fields, flag, option
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.proximal_policy import clip_is_inactive, needs_old_log_probs
from slime_tis.rules import corrects_staleness
from slime_tis.trainer.cli.command_line import (
    CORRECTION_SWITCHES,
    CommandLine,
    Flags,
    SourceConfig,
    build,
    make_parser,
    merge_sources,
    naming_sources,
    read_flags,
    unmet_needs,
)
from slime_tis.trainer.cli.options import Given, Source, declare_options
from slime_tis.trainer.cli.output_paths import check_outputs, check_resumption
from slime_tis.trainer.cli.preflight import check_files, check_model, check_weights
from slime_tis.trainer.cli.slime_flags import RENAMED
from slime_tis.trainer.cli.unknown_flags import UnknownFlag, refusal, split_unknown_flags
from slime_tis.trainer.cli.verl_options import is_override
from slime_tis.trainer.megatron.environment import read_environment
from slime_tis.trainer.options.megatron import MegatronConfig
from slime_tis.trainer.options.reporting import ReportingConfig
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.options.sglang import SGLangConfig, split_server_flags

loop_option = partial(option, group="training loop")
correction_option = partial(option, group="rollout correction")
debug_option = partial(option, group="debugging")

ENDLESS_WARM_UP = 1000
"""Times the optimizer steps of a run from which on a warm-up is a slip of the finger, not a trial of a longer run."""

MOST_SAMPLES = 1_048_576
"""Samples of one rollout; a run of 4,096 prompts with 256 samples each has as many."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long the loop runs, how a rollout is cut into optimizer steps, and what is dumped or replayed."""

    num_rollout: Annotated[int | None, Limits(ge=1, le=10_000_000)] = loop_option(None)
    """Rollouts of the whole run; unset means num_epoch passes over the prompts."""

    num_epoch: Annotated[int | None, Limits(ge=1, le=1_000_000)] = loop_option(None)
    """Passes over the training prompts; replaces num_rollout."""

    global_batch_size: Annotated[int | None, Limits(ge=1, le=MOST_SAMPLES)] = loop_option(None)
    """Samples of one optimizer step over all ranks; unset means the rollout's samples divided by
    num_steps_per_rollout."""

    num_steps_per_rollout: Annotated[int | None, Limits(ge=1, le=MOST_SAMPLES)] = loop_option(None)
    """Optimizer steps per rollout; unset means the rollout's samples divided by global_batch_size,
    or 1."""

    debug_rollout_only: bool = debug_option(False)
    """Sample and score without training."""

    save_debug_rollout_data: str | None = debug_option(None, metavar="FILE")
    """File that samples are saved to; {rollout_id} in it becomes the rollout's number, and has to be in it where
    there are several rollouts."""

    save_debug_train_data: str | None = debug_option(None, metavar="FILE")
    """File that what training made of every token is saved to: log-probs, weights, masks, advantages (docs/dumps.md).
    {rollout_id} and {rank} in it become numbers; parquet, or slime's layout where it ends in .pt."""

    dump_details: str | None = debug_option(None, metavar="DIR")
    """Directory for save_debug_rollout_data (rollout_data/{rollout_id}.jsonl) and save_debug_train_data
    (train_data/{rollout_id}_{rank}.parquet), where these are not given."""

    load_debug_rollout_data: str | None = debug_option(None, metavar="FILE")
    """File that samples are read from, not generated; {rollout_id} in it becomes the rollout's number."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_rollout is None and self.num_epoch is None:
            raise ValueError("--num-rollout is unset and so is --num-epoch; add one of them to bound the run.")
        if self.num_rollout is not None and self.num_epoch is not None:
            raise ValueError(
                f"--num-rollout is {self.num_rollout} and --num-epoch is {self.num_epoch}, but a run has one length; "
                "remove one of the two."
            )
        if self.debug_rollout_only and self.load_debug_rollout_data is not None:
            raise ValueError(
                f"--load-debug-rollout-data is {quoted(self.load_debug_rollout_data)} but --debug-rollout-only "
                "does not train; remove one of the two."
            )
        for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
            _check_pattern(flag(name), getattr(self, name), ("rollout_id",))
        _check_pattern("--save-debug-train-data", self.save_debug_train_data, ("rollout_id", "rank"))
        for name in ("save_debug_rollout_data", "save_debug_train_data"):
            pattern = getattr(self, name)
            if pattern is None or self.num_rollout == 1:
                continue
            if pattern.format(rollout_id=0, rank=0) == pattern.format(rollout_id=1, rank=0):
                raise ValueError(
                    f"{flag(name)} is {quoted(pattern)}, one file for all rollouts; put {{rollout_id}} into it, or "
                    "each would overwrite the last."
                )
        if self.save_debug_train_data is not None and self.save_debug_train_data == self.save_debug_rollout_data:
            raise ValueError(
                f"--save-debug-train-data and --save-debug-rollout-data are both {quoted(self.save_debug_train_data)}; "
                "give each a separate file."
            )
        if self.debug_rollout_only and self.save_debug_train_data is not None:
            raise ValueError(
                f"--save-debug-train-data is {quoted(self.save_debug_train_data)} but --debug-rollout-only does not "
                "train; remove one of the two."
            )

    def with_dump_patterns(self) -> "LoopConfig":
        """The same options with the files that dump_details means, where none are given.

        Raises:
            ValueError: both kinds of files are given elsewhere, so that dump_details has no effect.
        """
        if self.dump_details is None:
            return self
        directory = self.dump_details.replace("{", "{{").replace("}", "}}")
        patterns: dict[str, str] = {}
        if self.load_debug_rollout_data is None:  # samples that are loaded are not saved again
            patterns["save_debug_rollout_data"] = f"{directory}/rollout_data/{{rollout_id}}.jsonl"
        if not self.debug_rollout_only:
            patterns["save_debug_train_data"] = f"{directory}/train_data/{{rollout_id}}_{{rank}}.parquet"
        given: dict[str, Any] = {name: getattr(self, name) or pattern for name, pattern in patterns.items()}
        if not given.items() & patterns.items():
            raise ValueError(
                f"--dump-details is {quoted(self.dump_details)} but {' and '.join(map(flag, given))} say where dumps "
                "go; remove it."
            )
        return dataclasses.replace(self, **given)


def _check_pattern(flag: str, pattern: str | None, names: tuple[str, ...]) -> None:
    """Returns whether a file's name has only these fields, written as {rollout_id}."""
    try:
        fields = [field[1:] for field in string.Formatter().parse(pattern or "") if field[1] is not None]
    except ValueError:
        fields = [("unbalanced braces", "", None)]
    if any(field not in [(name, "", None) for name in names] for field in fields):
        allowed = " and ".join(f"{{{name}}}" for name in names)
        raise ValueError(
            f"{flag} is {quoted(pattern)} but may have no field besides {allowed}; write other braces twice."
        )


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """User code."""

    custom_tis_function_path: str | None = correction_option(None, metavar="FUNCTION")
    """User function for the correction, as pkg.module.function or path/file.py:function."""


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

OPTIONS = dict(sorted(declare_options(CONFIGS).items(), key=lambda item: TITLES.index(item[1].group)))

ALIASES = {**CORRECTION_ALIASES, "save_retain_count": "save_retain"}
"""Old names of options and the name each one has now; both are read on the command line and in YAML."""

FLAGS = {flag(prefix + name) for name in (*OPTIONS, *ALIASES) for prefix in ("", "no_")} | {"--help"}
"""Every flag that is read here, --no- forms included."""

NOT_FOR_SERVERS = set(RENAMED)
"""Flags that start like server flags but belong to slime."""

COMMAND_LINE = CommandLine(options=OPTIONS, aliases=ALIASES)


def parse_args(argv: Sequence[str] | None = None, *, prog: str = "train.py") -> Arguments:
    """Reads and checks the whole configuration of a run.

    Args:
        argv: The command line without the program's name; None means this process's.
        prog: Name of the program in `--help`.

    Returns:
        One frozen config per subject, ready to build engines from.

    Raises:
        SystemExit: code 2 with one line on stderr for anything that is refused; code 0 for --help.
    """
    try:
        arguments = configure(sys.argv[1:] if argv is None else argv, os.environ, prog=prog)
        check_weights(arguments.megatron)
    except OSError as error:
        named = error.filename is not None
        print(f"{error.strerror}: {quoted_path(error.filename)}." if named else error, file=sys.stderr)
        raise SystemExit(2) from None
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if os.environ.get("RANK", "0") == "0":
        for warning in _warnings(arguments):
            print(f"warning: {warning}", file=sys.stderr)
    return arguments


def configure(argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "train.py") -> Arguments:
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
            sglang=_build_sglang(rollout, options),
            loop=_resolve_steps(rollout, build(LoopConfig, options).with_dump_patterns()),
            reporting=build(ReportingConfig, options),
            custom_tis_function_path=build(CodeConfig, options).custom_tis_function_path,
            namespace=argparse.Namespace(),
            user_options=user_options(options),
        )
        _check_correction(arguments)
    _check_hooks(arguments)
    _check_routing_record(arguments)
    world_size = read_environment(environ).world_size
    _check_ranks(arguments, world_size)
    _check_rounding(arguments)
    _check_warm_up(arguments)
    check_files(arguments.rollout, arguments.megatron)
    _check_dump(arguments)
    _check_truncation(arguments)
    model = check_model(arguments.megatron, arguments.rollout, world_size)
    _refuse_unknown(restated, model)
    check_outputs(arguments.rollout, arguments.megatron, arguments.reporting, _first_dumps(arguments.loop))
    check_resumption(arguments.megatron, effective_config(arguments))
    return dataclasses.replace(arguments, namespace=_slime_namespace(arguments))


def effective_config(arguments: Arguments) -> dict[str, Any]:
    """Every option but the sources as plain values, in the order of the groups.

    Presets, aliases and derived sizes are resolved in it.
    """
    configs = (
        arguments.correction,
        arguments.policy,
        arguments.megatron,
        arguments.rollout,
        arguments.sglang,
        arguments.loop,
        arguments.reporting,
    )
    values = {field.name: getattr(config, field.name) for config in configs for field in dataclasses.fields(config)}
    values["custom_tis_function_path"] = arguments.custom_tis_function_path
    ordered = [name for name in OPTIONS if name in values]
    plain = {name: list(values[name]) if isinstance(values[name], tuple) else values[name] for name in ordered}
    return plain | dict(arguments.user_options)


def options_in_force(arguments: Arguments) -> dict[str, Any]:
    """The options of `effective_config` that have an effect.

    Written as YAML and fed back by --custom-config-path they give the same arguments.
    """
    values = effective_config(arguments)
    every = {name: option.default for name, option in OPTIONS.items()} | values
    return {name: value for name, value in values.items() if not unmet_needs(COMMAND_LINE, name, every)}


def describe(arguments: Arguments) -> str:
    """The options that depart from their defaults, and the training precision, as a command line would give them.

    One group per line.
    """
    values = effective_config(arguments)
    lines = []
    for title, options in COMMAND_LINE.groups.items():
        changed = [one.name for one in options if one.name in values and values[one.name] != one.default]
        shown = [_as_flag(name, values[name]) for name in changed]
        if title == "parallelism and precision" and not arguments.megatron.bf16:
            shown.append("--no-bf16 (trains in float32)")
        if shown:
            lines.append(f"{title}: {' '.join(shown)}")
    if arguments.user_options:
        lines.append("user functions: " + ", ".join(f"{key} {value}" for key, value in arguments.user_options.items()))
    return "\n".join(lines)


def user_options(given: Mapping[str, Given]) -> dict[str, Any]:
    """Returns the options of user functions.

    Raises:
        ValueError: There are some, but no user function.
    """
    unknown = {name: entry for name, entry in given.items() if name not in OPTIONS}
    named = (given[name].value for name, one in OPTIONS.items() if one.metavar == "FUNCTION" and name in given)
    if unknown and all(value is None for value in named):
        label = next(iter(unknown.values())).label
        raise ValueError(f"{label} is not an option, and no user function is given that could read it; remove it.")
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
        description="Trains a language model by reinforcement learning on Megatron-core, with the mismatch "
        "between rollout and training log-probs measured and corrected.",
    )


def _read_command_line(argv: Sequence[str], prog: str) -> tuple[Flags, list[UnknownFlag]]:
    """The values of the flags, and the flags that repeat config.json, which is still to be compared with them.

    Unknown flags for SGLang are the servers' own, where the run may start some.
    """
    argv = sorted(argv, key=lambda word: not is_override(word))  # else they would pass for values of unknown flags
    names = {token.split("=")[0] for token in argv}
    rest, server_args = list(argv), list[str]()
    if not names.isdisjoint(("--sglang-launch", "--custom-config-path")):
        rest, server_args = split_server_flags(argv, FLAGS | NOT_FOR_SERVERS)
    rest, unknown = split_unknown_flags(rest, FLAGS)
    _refuse_unknown(unknown, _peek_at_model(rest))
    flags = read_flags(COMMAND_LINE, build_parser(prog), rest)
    if server_args and {"sglang_launch", "custom_config_path"}.isdisjoint(flags.given):
        raise ValueError(
            f"{quoted('--sglang-' + server_args[0][2:])[1:-1]} is a flag of servers; add --sglang-launch N."
        )
    if server_args:
        label, source = flag("sglang_server_args"), Source.COMMAND_LINE
        flags.given["sglang_server_args"] = Given(value=tuple(server_args), label=label, source=source)
    return flags, unknown


def _refuse_unknown(unknown: Sequence[UnknownFlag], model: Mapping[str, Any] | None) -> None:
    message = refusal(unknown, list(map(flag, (*OPTIONS, *ALIASES))), model)
    if message:
        raise ValueError(message)


def _peek_at_model(argv: Sequence[str]) -> dict[str, Any] | None:
    """The config.json of --hf-checkpoint, so that one message can also say what differs from it; None without one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--hf-checkpoint")
    try:
        directory = parser.parse_known_args(list(argv))[0].hf_checkpoint
        model = json.loads((Path(directory or "") / "config.json").read_text(encoding="utf-8"))
    except (argparse.ArgumentError, OSError, ValueError, RecursionError):
        return None
    return model if isinstance(model, dict) else None


def _build_sglang(rollout: RolloutConfig, options: Mapping[str, Given]) -> SGLangConfig:
    sglang = build(SGLangConfig, options)
    if rollout.rollout_engine == "sglang":
        sglang.check_has_servers()
    return sglang


def _resolve_steps(rollout: RolloutConfig, loop: LoopConfig) -> LoopConfig:
    """The loop with both global_batch_size and num_steps_per_rollout set, each derived from the other."""
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    made = (
        f"a rollout has {samples} samples (--rollout-batch-size {rollout.rollout_batch_size} × "
        f"--n-samples-per-prompt {rollout.n_samples_per_prompt})"
    )
    if samples > MOST_SAMPLES:
        raise ValueError(f"{made}, more than the {MOST_SAMPLES} that are allowed; lower one of the two.")
    steps, size = loop.num_steps_per_rollout, loop.global_batch_size
    if size is not None and samples % size:
        raise ValueError(f"--global-batch-size is {size} but {made}; choose a divisor of {samples}.")
    if size is None and steps is not None and samples % steps:
        raise ValueError(f"--num-steps-per-rollout is {steps} but {made}; choose a divisor of {samples}.")
    if size is not None and steps is not None and size * steps != samples:
        raise ValueError(
            f"--num-steps-per-rollout is {steps} and --global-batch-size is {size} but {made}; "
            f"remove one of the two or make their product {samples}."
        )
    steps = steps or samples // (size or samples)
    return dataclasses.replace(loop, num_steps_per_rollout=steps, global_batch_size=samples // steps)


def _check_correction(arguments: Arguments) -> None:
    correction, function = arguments.correction, arguments.custom_tis_function_path
    if function is not None and not (correction.corrects or correction.get_mismatch_metrics):
        raise ValueError(
            f"--custom-tis-function-path is {function!r} but nothing calls it; "
            "add --use-tis, --use-rs or --get-mismatch-metrics."
        )
    if correction.policy_loss == "reinforce" and not correction.use_rollout_logprobs:
        raise ValueError(
            "--policy-loss is reinforce but it has no old policy to recompute log-probs of; add --use-rollout-logprobs."
        )
    steps = arguments.loop.num_steps_per_rollout
    on_policy = steps == 1 and not correction.use_rollout_logprobs and correction.old_logprobs == "recompute"
    if arguments.policy.use_opsm and arguments.policy.opsm_policy == "old" and on_policy:
        raise ValueError(
            "--opsm-policy is old but with one optimizer step per rollout the old policy is the one that is trained, "
            "and nothing is ever omitted; make it rollout, or raise --num-steps-per-rollout."
        )
    group, estimator = arguments.rollout.n_samples_per_prompt, arguments.policy.advantage_estimator
    if group < 2 and arguments.rollout.custom_reward_post_process_path is None:
        raise ValueError(
            f"--n-samples-per-prompt is {group} but --advantage-estimator {estimator} compares the "
            "samples of a prompt; raise it to 2 or more."
        )


def _check_hooks(arguments: Arguments) -> None:
    """Whether the user's functions leave every other option an effect, and get what they need."""
    policy = arguments.policy
    estimates = {
        "--disable-grpo-std-normalization": policy.disable_grpo_std_normalization,
        "--reject-before-advantage": policy.reject_before_advantage,
    }
    of_sample = {
        "--normalize-advantages": policy.normalize_advantages,
        "--use-opsm": policy.use_opsm,
        "--save-debug-train-data": arguments.loop.save_debug_train_data is not None,
    }
    of_loss = {
        "--custom-tis-function-path": arguments.custom_tis_function_path is not None,
        "--custom-pg-loss-reducer-function-path": policy.custom_pg_loss_reducer_function_path is not None,
        "--use-opsm": policy.use_opsm,
        "--entropy-coef": policy.entropy_coef != 0,
        "--rollout-top-p or --rollout-top-k": arguments.rollout.truncates_sampling,
    }
    of_file = {
        "--check-weight-sync": arguments.rollout.check_weight_sync,
        "--rollout-shuffle": arguments.rollout.rollout_shuffle,
        "--load-debug-rollout-data": arguments.loop.load_debug_rollout_data is not None,
    }
    rollout = arguments.rollout
    of_engine = {
        "--custom-generate-function-path": rollout.custom_generate_function_path is not None,
        "--dynamic-sampling-filter-path": rollout.dynamic_sampling_filter_path is not None,
        "--partial-rollout": rollout.partial_rollout,
        "--rollout-lookahead": rollout.rollout_lookahead > 0,
        "--use-rollout-routing-replay": rollout.use_rollout_routing_replay,
        "--load-debug-rollout-data": arguments.loop.load_debug_rollout_data is not None,
    }
    shapes = arguments.rollout.custom_reward_post_process_path is not None
    for path, used, without in (
        ("--custom-reward-post-process-path", shapes, estimates),
        ("--custom-advantage-function-path", policy.custom_advantage_function_path is not None, of_sample),
        ("--rollout-function-path", rollout.rollout_function_path is not None, of_engine),
        ("--data-source-path", arguments.rollout.data_source_path is not None, of_file),
        ("--loss-type custom_loss", policy.loss_type == "custom_loss", of_loss),
    ):
        for other, given in without.items():
            if used and given:
                raise ValueError(f"{path} is given and so is {other}, which has no effect with it; remove one of them.")
    if policy.loss_type == "custom_loss" and policy.custom_loss_function_path is None:
        raise ValueError("--loss-type is custom_loss but --custom-loss-function-path is unset; add your function.")


def _check_routing_record(arguments: Arguments) -> None:
    """Whether there is a pass that --use-routing-replay can record, and nothing that it would be confused with."""
    steps, correction, rollout = arguments.loop.num_steps_per_rollout, arguments.correction, arguments.rollout
    assert steps is not None
    if not arguments.megatron.use_routing_replay:
        return
    if rollout.measure_routing_mismatch is not None and not rollout.use_rollout_routing_replay:
        raise ValueError(
            f"--measure-routing-mismatch is {rollout.measure_routing_mismatch}, which compares training with and "
            "without the rollout engine's experts, but --use-routing-replay trains with others; add "
            "--use-rollout-routing-replay, or remove one of the two."
        )
    policy = arguments.policy
    if needs_old_log_probs(correction, steps, policy.reject_before_advantage, policy.has_own_objective):
        return
    reason = "with one optimizer step per rollout the training pass computes the old policy"
    if correction.use_rollout_logprobs:
        reason = "--use-rollout-logprobs uses the rollout engine's log-probs"
    raise ValueError(
        f"--use-routing-replay is on but there is no pass for old log-probs to record: {reason}; remove it, or use "
        "--use-rollout-routing-replay, which needs no such pass."
    )


def _check_ranks(arguments: Arguments, world_size: int) -> None:
    """Whether the samples of a step divide over the data-parallel ranks and their micro-batches."""
    megatron, size = arguments.megatron, arguments.loop.global_batch_size or 0
    replica = megatron.model_parallel_size
    if world_size % replica:
        raise ValueError(
            f"WORLD_SIZE is {world_size} but --tensor-model-parallel-size × --pipeline-model-parallel-size × "
            f"--context-parallel-size is {replica}; start a multiple of that with torchrun --nproc-per-node."
        )
    data_parallel = world_size // replica
    if size % data_parallel:
        raise ValueError(
            f"--global-batch-size is {size} but {data_parallel} data-parallel ranks share it; "
            f"choose a multiple of {data_parallel}."
        )
    micro = megatron.micro_batch_size
    if micro is not None and (size // data_parallel) % micro:
        raise ValueError(
            f"--micro-batch-size is {micro} but a rank has {size // data_parallel} samples in a step; "
            f"choose a divisor of {size // data_parallel}."
        )


def _check_rounding(arguments: Arguments) -> None:
    """Refuses to round weights that are in the rollout engine's precision already."""
    rounding, rollout = arguments.rollout.weight_update_rounding, arguments.rollout
    eight_bits = rollout.rollout_precision in ("fp8", "int8")
    if rounding != "nearest" and arguments.megatron.bf16 and not eight_bits:
        raise ValueError(
            f"--weight-update-rounding is {rounding} but with --bf16 the weights that are sent are bfloat16 already; "
            "remove one of the two."
        )


def _check_warm_up(arguments: Arguments) -> None:
    """Refuses a warm-up in which the learning rate never gets anywhere; a trial run of a few rollouts only warns."""
    steps, warm_up = _optimizer_steps(arguments), arguments.megatron.lr_warmup_iters
    if steps is not None and warm_up >= ENDLESS_WARM_UP * steps:
        raise ValueError(
            f"--lr-warmup-iters is {warm_up} but the run has {steps} optimizer steps, so that the learning rate would "
            f"stay below --lr / {ENDLESS_WARM_UP}; lower it."
        )


def _optimizer_steps(arguments: Arguments) -> int | None:
    """Optimizer steps of the run; None where num_epoch bounds it, whose length is known with the prompts."""
    loop = arguments.loop
    if loop.num_rollout is None or loop.num_steps_per_rollout is None:
        return None
    return loop.num_rollout * loop.num_steps_per_rollout


def _check_dump(arguments: Arguments) -> None:
    """Whether the samples to train on are there; a resumed run begins with a later file."""
    pattern, load = arguments.loop.load_debug_rollout_data, arguments.megatron.load
    if pattern is None or (load is not None and Path(load).is_dir()):
        return
    if not Path(pattern.format(rollout_id=0)).is_file():
        raise ValueError(
            f"--load-debug-rollout-data is {quoted(pattern)} but there is no file "
            f"{quoted(pattern.format(rollout_id=0))}; --save-debug-rollout-data writes it."
        )


def _first_dumps(loop: LoopConfig) -> dict[str, str]:
    """The first file of each kind of dump, by flag."""
    patterns = {name: getattr(loop, name) for name in ("save_debug_rollout_data", "save_debug_train_data")}
    return {flag(name): pattern.format(rollout_id=0, rank=0) for name, pattern in patterns.items() if pattern}


def _check_truncation(arguments: Arguments) -> None:
    """Whether --allow-truncation-bias allows anything: the local engine reports all sets, files may lack them."""
    rollout, loads = arguments.rollout, arguments.loop.load_debug_rollout_data is not None
    if rollout.allow_truncation_bias and rollout.rollout_engine == "local" and not loads:
        raise ValueError(
            "--allow-truncation-bias is set but has no effect with --rollout-engine local, which records the tokens "
            "that can be sampled; remove it."
        )


def _warnings(arguments: Arguments) -> list[str]:
    correction = arguments.correction
    warnings = []
    reads_lower_bound = correction.mode.has_lower_bound or (correction.use_rs and correction.rs_upper_bound is None)
    if correction.use_tis and not reads_lower_bound and correction.tis_lower_bound:
        warnings.append(
            f"--tis-lower-bound is {correction.tis_lower_bound} but --tis-mode {correction.tis_mode} has no lower "
            "bound; choose clip or mask for both."
        )
    warnings += [
        f"the bounds {criterion.lower:.6g} to {criterion.upper:.6g} of {criterion.name} on the mean log-ratio are "
        "within ±1 %, which already rejects 25 % of healthy sequences of 26 tokens in bf16 and 94 % in fp8 "
        "(docs/choosing.md); use --use-rs --rs-level geometric --rs-z-score 3 instead of the bounds."
        for criterion in correction.rejections
        if _rejects_any_precision(criterion)
    ]
    if correction.get_mismatch_metrics and correction.corrects:
        acting = [name for name in CORRECTION_SWITCHES if getattr(correction, name) not in (False, None)]
        warnings.append(
            "--get-mismatch-metrics measures alone only where nothing corrects; to measure alone remove "
            f"{' and '.join(map(flag, acting))}."
        )
    steps, warm_up = _optimizer_steps(arguments), arguments.megatron.lr_warmup_iters
    if steps is not None and warm_up >= steps:
        warnings.append(
            f"--lr-warmup-iters is {warm_up} but the run has {steps} optimizer steps, so that the learning rate never "
            "reaches --lr."
        )
    return [*warnings, *_about_loaded_samples(arguments), *_about_clipping(arguments), *_about_staleness(arguments)]


def _about_loaded_samples(arguments: Arguments) -> list[str]:
    """A warning where functions that take part in sampling are given, and samples are loaded."""
    rollout = arguments.rollout
    names = ["dynamic_sampling_filter_path", "rollout_sample_filter_path", "rollout_all_samples_process_path"]
    if not rollout.eval_prompt_data:
        names.append("custom_generate_function_path")
    given = [flag(name) for name in names if getattr(rollout, name) is not None]
    if arguments.loop.load_debug_rollout_data is None or not given:
        return []
    return [
        f"{' and '.join(given)} will not be called: --load-debug-rollout-data has samples that are made and chosen "
        "already."
    ]


def _about_clipping(arguments: Arguments) -> list[str]:
    """A warning where a clip range is given and the ratio that it clips is 1 at every token."""
    steps, policy = arguments.loop.num_steps_per_rollout, arguments.policy
    names = ("eps_clip", "eps_clip_high", "eps_clip_c")
    given = [name for name in names if getattr(policy, name) != OPTIONS[name].default]
    if steps is None or not given or not clip_is_inactive(arguments.correction, steps):
        return []
    return [
        f"{' and '.join(f'{flag(name)} is {getattr(policy, name):g}' for name in given)}, but with one optimizer step "
        "per rollout the policy is its own old policy, all ratios are 1, and nothing is clipped; raise "
        "--num-steps-per-rollout, or add --use-rollout-logprobs, which clips the ratio to the policy that sampled."
    ]


def _about_staleness(arguments: Arguments) -> list[str]:
    """A warning where samples come from older weights than those being trained, and nothing corrects that."""
    rollout = arguments.rollout
    settings = {
        "--rollout-lookahead": rollout.rollout_lookahead,
        "--update-weights-interval": rollout.update_weights_interval,
    }
    stale = [f"{name} is {value}" for name, value in settings.items() if value > (name == "--update-weights-interval")]
    if not stale or corrects_staleness(arguments.correction):
        return []
    return [
        f"{' and '.join(stale)}, so samples come from older weights than those being trained, and nothing corrects "
        "that; add --use-tis, or --use-rollout-logprobs, whose ratios are to the policy that sampled."
    ]


def _rejects_any_precision(criterion: Criterion) -> bool:
    """Whether fixed bounds on the geometric mean ratio are tighter than 1 %: bf16 alone differs by more."""
    by_mean = criterion.aggregation == "mean" and criterion.lower is not None
    return by_mean and (criterion.upper < 1.01 - 1e-9 or (criterion.lower or 0.0) > 1 / (1.01 - 1e-9))


def read_correction(
    argv: Sequence[str], policy: PolicyConfig
) -> tuple[RolloutCorrectionConfig, str | None, argparse.Namespace]:
    """Reads the flags of a correction alone, as `slime-tis what-if` takes them.

    Args:
        argv: Flags of the group "rollout correction", and --policy-loss.
        policy: Options of the policy loss, for a function.

    Returns:
        The correction, the path of a custom TIS function or None, and the options that this function gets.

    Raises:
        ValueError: a flag is unknown, belongs to another group, or has a wrong value.
    """
    optional = {name: option for name, option in OPTIONS.items() if option.default is not dataclasses.MISSING}
    line = dataclasses.replace(COMMAND_LINE, options=optional)
    flags = read_flags(COMMAND_LINE, build_parser("slime-tis what-if"), argv)
    for name in flags.given:
        if OPTIONS[name].group != "rollout correction" and name != "policy_loss":
            raise ValueError(f"{flag(name)} is not a flag of a correction; remove it.")
    values = merge_sources(line, flags)
    correction = build(RolloutCorrectionConfig, values)
    path = build(CodeConfig, values).custom_tis_function_path
    if path and not correction.corrects:
        raise ValueError("--custom-tis-function-path needs --use-tis; add it.")
    known = dataclasses.asdict(policy) | dataclasses.asdict(correction)
    return correction, path, _slime_names(known | user_options(values), correction, policy)


def _slime_namespace(arguments: Arguments) -> argparse.Namespace:
    """Every option under its name, and under the names that slime's correction functions read."""
    return _slime_names(effective_config(arguments), arguments.correction, arguments.policy)


def _slime_names(
    values: dict[str, Any], correction: RolloutCorrectionConfig, policy: PolicyConfig
) -> argparse.Namespace:
    """Options under their names and slime's.

    Unset bounds get the values that the built-in correction derives, so that user functions reject the same tokens.
    """
    lowest = correction.tis_lower_bound
    lower, upper = correction.is_bounds
    if lower < upper:  # not so where an upper bound below 1 has no lower one, as in mode truncate it may
        values["tis_lower_bound"] = lower
    if not correction.adaptive:
        values["rs_lower_bound"], values["rs_upper_bound"] = correction.rs_bounds
    values |= {old: values[new] for old, new in ALIASES.items() if new in values}
    values["eps_clip_high"] = policy.clip_high
    values["opsm_delta"] = policy.opsm_bound
    values["tis_clip_low"] = lowest or 0.0
    return argparse.Namespace(**values)
