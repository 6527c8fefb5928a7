"""The command line of train.py: flags, YAML and presets, checked once, as one frozen config per room."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tis.command_line import (
    CORRECTION_ALIASES,
    CommandLine,
    SourceConfig,
    build,
    flag,
    make_parser,
    merge_sources,
    read_flags,
)
from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.criteria import Criterion
from slime_tis.inputs import check_files, check_model
from slime_tis.megatron.config import MegatronConfig
from slime_tis.megatron.environment import read_environment
from slime_tis.options import declare_options
from slime_tis.output_paths import check_outputs, check_resumption
from slime_tis.policy.config import PolicyConfig
from slime_tis.reporting.config import ReportingConfig
from slime_tis.rollout.config import RolloutConfig
from slime_tis.rollout.sglang.config import SGLangConfig
from slime_tis.rollout.sglang.server_flags import split_server_flags
from slime_tis.slime_flags import RENAMED
from slime_tis.unknown_flags import UnknownFlag, refusal, split_unknown_flags


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long the loop runs, how a rollout is cut into optimizer steps, and what is dumped or replayed."""

    num_rollout: int | None = None
    """Rollouts of the whole run, a count; unset means num_epoch passes over the prompts."""

    num_epoch: int | None = None
    """Passes over the training prompts, a count; num_rollout, where given, wins."""

    global_batch_size: int | None = None
    """Samples of one optimizer step over all ranks, a count; unset means the rollout's samples divided by
    num_steps_per_rollout."""

    num_steps_per_rollout: int | None = None
    """Optimizer steps per rollout, a count; unset means the rollout's samples divided by global_batch_size,
    or 1."""

    debug_rollout_only: bool = False
    """Sample and score without training."""

    save_debug_rollout_data: str | None = None
    """File that samples are saved to; {rollout_id} in it becomes the rollout's number."""

    load_debug_rollout_data: str | None = None
    """File that samples are read from, not generated; {rollout_id} in it becomes the rollout's number."""

    def __post_init__(self) -> None:
        for name in ("num_rollout", "num_epoch", "global_batch_size", "num_steps_per_rollout"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{flag(name)} is {value} but must be 1 or more.")
        if self.num_rollout is None and self.num_epoch is None:
            raise ValueError("--num-rollout is unset and so is --num-epoch; add one of them to bound the run.")
        if self.debug_rollout_only and self.load_debug_rollout_data is not None:
            raise ValueError(
                f"--load-debug-rollout-data is {self.load_debug_rollout_data!r} but --debug-rollout-only "
                "does not train; leave one of the two out."
            )


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """Code of the user's own."""

    custom_tis_function_path: str | None = None
    """Correction function of your own, as pkg.module.function or path/file.py:function."""


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


CONFIGS = (
    RolloutCorrectionConfig,
    PolicyConfig,
    MegatronConfig,
    RolloutConfig,
    SGLangConfig,
    LoopConfig,
    ReportingConfig,
    SourceConfig,
    CodeConfig,
)

OPTIONS = declare_options(CONFIGS)

GROUPS = {
    "model and data": (
        "hf_checkpoint ref_load prompt_data input_key label_key metadata_key apply_chat_template rollout_shuffle"
    ),
    "rollout": (
        "rollout_engine rollout_precision update_weights_interval check_weight_sync weight_sync_bound "
        "rollout_lookahead max_weight_staleness partial_rollout over_sampling_batch_size rollout_batch_size "
        "n_samples_per_prompt rollout_max_prompt_len rollout_max_response_len "
        "rollout_max_context_len"
    ),
    "SGLang servers": (
        "sglang_url sglang_router_ip sglang_router_port sglang_launch sglang_server_args sglang_python "
        "sglang_base_port sglang_log_dir sglang_startup_timeout sglang_request_timeout sglang_concurrency "
        "sglang_max_retries sglang_recovery_timeout sglang_weight_sync sglang_weight_dir sglang_sync_address "
        "sglang_bucket_mb sglang_api_key_env sglang_admin_api_key_env"
    ),
    "sampling": "rollout_temperature rollout_top_p rollout_top_k rollout_stop_token_ids rollout_seed",
    "rewards": "rm_type custom_rm_path reward_key eval_reward_key",
    "evaluation": (
        "eval_prompt_data eval_interval eval_input_key eval_label_key n_samples_per_eval_prompt "
        "eval_temperature eval_top_p eval_max_response_len eval_engine skip_eval_before_train"
    ),
    "training loop": (
        "num_rollout num_epoch num_steps_per_rollout global_batch_size micro_batch_size "
        "use_dynamic_batch_size max_tokens_per_gpu log_probs_chunk_size seed"
    ),
    "optimizer": (
        "lr min_lr lr_warmup_iters lr_decay_style lr_decay_iters weight_decay adam_beta1 adam_beta2 adam_eps clip_grad"
    ),
    "policy loss": (
        "advantage_estimator disable_grpo_std_normalization normalize_advantages reject_before_advantage policy_loss "
        "eps_clip eps_clip_high eps_clip_c use_opsm opsm_policy opsm_delta use_kl_loss kl_loss_coef kl_loss_type "
        "entropy_coef calculate_per_token_loss"
    ),
    "rollout correction": (
        "use_rollout_correction rollout_correction_preset custom_config_path use_rollout_logprobs "
        "old_logprobs get_mismatch_metrics use_tis tis_mode tis_level tis_lower_bound "
        "tis_upper_bound tis_batch_normalize use_rs rs_level rs_lower_bound rs_upper_bound rs_z_score "
        "rs_target_fraction rs_veto_threshold rs_veto_upper_threshold rs_second_moment_bound rollout_rs "
        "rollout_rs_threshold rejection_normalizer nonfinite_policy custom_tis_function_path"
    ),
    "parallelism and precision": (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size sequence_parallel use_distributed_optimizer bf16 "
        "recompute_granularity recompute_method recompute_num_layers num_threads"
    ),
    "checkpoints": "load save save_interval save_retain save_hf",
    "reporting": (
        "output_dir progress use_tensorboard tb_project_name tb_experiment_name use_wandb "
        "wandb_project wandb_group wandb_mode wandb_dir"
    ),
    "debugging": "debug_rollout_only save_debug_rollout_data load_debug_rollout_data",
}
"""Titled groups of --help, and the options of each in their order there."""

ALIASES = {**CORRECTION_ALIASES, "save_retain_count": "save_retain"}
"""Old names of options and the name each one has now; both are read on the command line and in YAML."""

METAVARS = {
    "DIR": "hf_checkpoint ref_load load save save_hf output_dir wandb_dir sglang_log_dir sglang_weight_dir",
    "URL": "sglang_url",
    "ADDRESS": "sglang_router_ip sglang_sync_address",
    "WORD": "sglang_server_args",
    "PYTHON": "sglang_python",
    "FILE": "prompt_data save_debug_rollout_data load_debug_rollout_data",
    "FILE.yaml": "custom_config_path",
    "FUNCTION": "custom_rm_path custom_tis_function_path",
    "KEY": "input_key label_key metadata_key eval_input_key eval_label_key reward_key eval_reward_key",
    "[NAME] PATH": "eval_prompt_data",
    "ID": "rollout_stop_token_ids",
    "NAME": "rollout_correction_preset rm_type tb_project_name tb_experiment_name wandb_project wandb_group "
    "sglang_api_key_env sglang_admin_api_key_env",
}
"""What --help shows as the value, and the options it stands for; numbers show N (whole) or X."""

FLAGS = {flag(prefix + name) for name in (*OPTIONS, *ALIASES) for prefix in ("", "no_")} | {"--help"}
"""Every flag that is read here, --no- forms included."""

NOT_FOR_SERVERS = {*RENAMED, "--sglang-config"}
"""Flags that begin like those of the servers and are slime's own."""

COMMAND_LINE = CommandLine(options=OPTIONS, groups=GROUPS, aliases=ALIASES, metavars=METAVARS)


def parse_args(argv: Sequence[str] | None = None) -> Arguments:
    """Reads and checks the whole configuration of a run.

    Args:
        argv: the command line without the program's name; None means that of this process.

    Returns:
        One frozen config per room, ready to build engines from.

    Raises:
        SystemExit: code 2 with one sentence on stderr for anything that is refused; code 0 for --help.
    """
    try:
        arguments = configure(sys.argv[1:] if argv is None else argv, os.environ)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if os.environ.get("RANK", "0") == "0":
        for warning in _warnings(arguments):
            print(f"warning: {warning}", file=sys.stderr)
    return arguments


def configure(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """What parse_args does, with the environment passed in and ValueError instead of an exit."""
    given, restated = _read_command_line(argv)
    values = merge_sources(COMMAND_LINE, given)
    rollout = build(RolloutConfig, values)
    arguments = Arguments(
        correction=build(RolloutCorrectionConfig, values),
        policy=build(PolicyConfig, values),
        megatron=build(MegatronConfig, values),
        rollout=rollout,
        sglang=_build_sglang(rollout, values),
        loop=_resolve_steps(rollout, build(LoopConfig, values)),
        reporting=build(ReportingConfig, values),
        custom_tis_function_path=values.get("custom_tis_function_path"),
        namespace=argparse.Namespace(),
    )
    _check_correction(arguments)
    _check_ranks(arguments, read_environment(environ).world_size)
    check_files(arguments.rollout, arguments.megatron)
    model = check_model(arguments.megatron, arguments.rollout)
    _refuse_unknown(restated, model)
    check_outputs(arguments.rollout, arguments.megatron, arguments.reporting)
    check_resumption(arguments.megatron, effective_config(arguments))
    return dataclasses.replace(arguments, namespace=_slime_namespace(arguments))


def effective_config(arguments: Arguments) -> dict[str, Any]:
    """The configuration in force as plain values, in the order of the groups.

    Written as YAML and fed back by --custom-config-path it gives the same arguments: presets, aliases and
    derived sizes are resolved in it.
    """
    rooms = (
        arguments.correction,
        arguments.policy,
        arguments.megatron,
        arguments.rollout,
        arguments.sglang,
        arguments.loop,
        arguments.reporting,
    )
    values = {field.name: getattr(room, field.name) for room in rooms for field in dataclasses.fields(room)}
    values["custom_tis_function_path"] = arguments.custom_tis_function_path
    ordered = [name for names in GROUPS.values() for name in names.split() if name in values]
    return {name: list(values[name]) if isinstance(values[name], tuple) else values[name] for name in ordered}


def describe(arguments: Arguments) -> str:
    """The options that depart from their defaults, one group a line, as a command line would give them."""
    values = effective_config(arguments)
    lines = []
    for title, names in GROUPS.items():
        changed = [name for name in names.split() if name in values and values[name] != OPTIONS[name].default]
        if changed:
            lines.append(f"{title}: " + " ".join(_as_flag(name, values[name]) for name in changed))
    return "\n".join(lines)


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag(name if value else "no_" + name)
    return f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line: titled groups of flags, whose values it keeps as text."""
    return make_parser(
        COMMAND_LINE,
        prog="train.py",
        usage="train.py --hf-checkpoint DIR --prompt-data FILE [options]",
        description="Trains a language model by reinforcement learning on Megatron-core, with the mismatch "
        "between rollout and training log-probs measured and corrected.",
    )


def _read_command_line(argv: Sequence[str]) -> tuple[dict[str, Any], list[UnknownFlag]]:
    """The values of the flags, and the flags that repeat config.json, which is still to be compared with them.

    Unknown flags for SGLang are the servers' own, where the run may start some.
    """
    names = {token.split("=")[0] for token in argv}
    rest, server_args = list(argv), list[str]()
    if not names.isdisjoint(("--sglang-launch", "--custom-config-path")):
        rest, server_args = split_server_flags(argv, FLAGS | NOT_FOR_SERVERS)
    rest, unknown = split_unknown_flags(rest, FLAGS)
    _refuse_unknown(unknown, _peek_at_model(rest))
    given = read_flags(COMMAND_LINE, build_parser(), rest)
    if server_args and {"sglang_launch", "custom_config_path"}.isdisjoint(given):
        raise ValueError(f"--sglang-{server_args[0][2:]} is a flag of servers; add --sglang-launch N.")
    return given | ({"sglang_server_args": tuple(server_args)} if server_args else {}), unknown


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


def _build_sglang(rollout: RolloutConfig, values: dict[str, Any]) -> SGLangConfig:
    sglang = build(SGLangConfig, values)
    if rollout.rollout_engine == "sglang":
        sglang.check_has_servers()
    elif sglang != SGLangConfig():
        field = next(f.name for f in dataclasses.fields(sglang) if getattr(sglang, f.name) != f.default)
        raise ValueError(f"{flag(field)} is set but --rollout-engine is {rollout.rollout_engine}; make it sglang.")
    return sglang


def _resolve_steps(rollout: RolloutConfig, loop: LoopConfig) -> LoopConfig:
    """The loop with both global_batch_size and num_steps_per_rollout set, each derived from the other."""
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    made = (
        f"a rollout has {samples} samples (--rollout-batch-size {rollout.rollout_batch_size} × "
        f"--n-samples-per-prompt {rollout.n_samples_per_prompt})"
    )
    steps, size = loop.num_steps_per_rollout, loop.global_batch_size
    if size is not None and samples % size:
        raise ValueError(f"--global-batch-size is {size} but {made}; choose a divisor of {samples}.")
    if size is None and steps is not None and samples % steps:
        raise ValueError(f"--num-steps-per-rollout is {steps} but {made}; choose a divisor of {samples}.")
    if size is not None and steps is not None and size * steps != samples:
        raise ValueError(
            f"--num-steps-per-rollout is {steps} and --global-batch-size is {size} but {made}; "
            f"leave one of the two out or make their product {samples}."
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
            "and nothing is ever left out; make it rollout, or raise --num-steps-per-rollout."
        )
    group, estimator = arguments.rollout.n_samples_per_prompt, arguments.policy.advantage_estimator
    if group < 2:
        raise ValueError(
            f"--n-samples-per-prompt is {group} but --advantage-estimator {estimator} compares the "
            "samples of a prompt; raise it to 2 or more."
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


def _warnings(arguments: Arguments) -> list[str]:
    rollout, correction = arguments.rollout, arguments.correction
    sentences = [
        f"{flag} is {value}, so rollout log-probs are those of the truncated distribution, and mismatch "
        "figures and weights include the truncation."
        for flag, value, everything in (
            ("--rollout-top-p", rollout.rollout_top_p, 1.0),
            ("--rollout-top-k", rollout.rollout_top_k, -1),
        )
        if value != everything
    ]
    bounds_rejection = correction.use_rs and correction.rs_upper_bound is None
    if correction.use_tis and correction.tis_mode == "truncate" and not bounds_rejection and correction.tis_lower_bound:
        sentences.append(
            f"--tis-lower-bound is {correction.tis_lower_bound} but --tis-mode truncate has no lower bound; "
            "choose clip or mask for both."
        )
    sentences += [
        f"the bounds {criterion.lower:.4g} to {criterion.upper:.4g} of {criterion.name} on the mean log-ratio are "
        "within ±1 %, which already rejects 25 % of healthy sequences of 26 tokens in bf16 and 94 % in fp8 "
        "(docs/choosing.md); use --use-rs --rs-level geometric --rs-z-score 3 in place of the bounds."
        for criterion in correction.rejections
        if _rejects_any_precision(criterion)
    ]
    return sentences


def _rejects_any_precision(criterion: Criterion) -> bool:
    """Whether fixed bounds on the geometric mean ratio are tighter than 1 %: bf16 alone differs by more."""
    by_mean = criterion.aggregation == "mean" and criterion.lower is not None
    return by_mean and min(criterion.upper, 1 / (criterion.lower or 1.0)) < 1.01 - 1e-9


def _slime_namespace(arguments: Arguments) -> argparse.Namespace:
    """Every option under its name, and under the names that slime's correction functions read.

    Bounds that nobody set are those that the built-in correction derives, so that whoever reads them rejects alike.
    """
    values, correction = effective_config(arguments), arguments.correction
    lowest = correction.tis_lower_bound
    lower, upper = correction.is_bounds
    if lower < upper:  # not so where an upper bound below 1 has no lower one, as in mode truncate it may
        values["tis_lower_bound"] = lower
    if not correction.adaptive:
        values["rs_lower_bound"], values["rs_upper_bound"] = correction.rs_bounds
    values |= {old: values[new] for old, new in ALIASES.items()}
    values["eps_clip_high"] = arguments.policy.clip_high
    values["opsm_delta"] = arguments.policy.opsm_bound
    values["tis_clip_low"] = lowest or 0.0
    return argparse.Namespace(**values)
