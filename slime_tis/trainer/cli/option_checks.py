"""Checks and warnings about combinations of options."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_tis.correction.modes import Criterion
from slime_tis.errors import quoted, quoted_path
from slime_tis.health import corrects_staleness
from slime_tis.options.command_line import CORRECTION_SWITCHES
from slime_tis.options.fields import flag
from slime_tis.peft_directory import read_adapter_config
from slime_tis.policy.config import clip_is_inactive, needs_old_log_probs
from slime_tis.trainer.cli.train_options import OPTIONS, Arguments
from slime_tis.trainer.cli.true_on_policy import true_on_policy_warnings
from slime_tis.trainer.configs.megatron import MegatronConfig


def check_arguments(arguments: Arguments) -> None:
    """Checks combinations of options, before files and the model are read.

    Raises:
        ValueError: Options contradict each other, or one has no effect.
    """
    _check_hooks(arguments)
    _check_rewards(arguments)
    _check_routing_record(arguments)
    if arguments.megatron.trains_adapters and arguments.policy.ref_update_interval is not None:
        raise ValueError(
            "--ref-update-interval does not work with LoRA, whose reference policy is the model"
            " without adapters; remove it."
        )
    if arguments.megatron.rollout_lora == "unmerged":
        _check_servers_of_adapters(arguments)
    # With --bf16-if-fast, the rounding is for processors on which training is in float32.
    if is_rounding_unused(arguments) and not arguments.megatron.bf16_if_fast:
        raise ValueError(
            f"--weight-update-rounding {arguments.rollout.weight_update_rounding} has no effect"
            f" with --{arguments.megatron.precision}, the weights' own type."
        )


def is_rounding_unused(arguments: Arguments) -> bool:
    """Whether --weight-update-rounding is set and the engine has the type of training's weights."""
    is_quantized = arguments.rollout.rollout_precision in ("fp8", "int8", "int4")
    # Merged LoRA adapters are float32.
    is_sent_in_float32 = (
        arguments.megatron.precision == "fp32" or arguments.megatron.trains_adapters
    )
    is_set = arguments.rollout.weight_update_rounding != "nearest"
    return is_set and not is_sent_in_float32 and not is_quantized


def _check_servers_of_adapters(arguments: Arguments) -> None:
    """Checks that the servers can load LoRA adapters.

    Raises:
        ValueError: They get weights in another way, are behind a router, or have no slots of the
            adapter's rank.
    """
    engine = arguments.rollout.rollout_engine
    if engine == "local":
        return
    merged = "send merged weights: --rollout-lora merged."
    servers = arguments.servers[engine]
    if servers.weight_sync != "disk":
        raise ValueError(
            f"--rollout-lora unmerged needs {servers.flag('weight_sync')} disk: servers read"
            f" adapters from a directory. Add it, or {merged}"
        )
    if servers.router_url is not None:
        raise ValueError(
            f"--rollout-lora unmerged does not work with {servers.flag('router_ip')}: only the"
            f" servers know their adapters. Name them with {servers.flag('url')}, or {merged}"
        )
    rank = _adapter_rank(arguments.megatron)
    most = servers.entry.max_adapter_rank
    if most is not None and rank > most:
        raise ValueError(
            f"{servers.entry.title} takes LoRA adapters up to rank {most}, but they have rank"
            f" {rank}; {merged}"
        )


def _adapter_rank(megatron: MegatronConfig) -> int:
    """Returns the rank of the run's LoRA adapters; raises ValueError as `read_adapter_config`."""
    if megatron.lora_rank is not None:
        return megatron.lora_rank
    path = megatron.lora_adapter_path
    assert path is not None  # the option needs one of the two
    return read_adapter_config(path, f"--lora-adapter-path is {quoted_path(path)}").rank


def check_correction(arguments: Arguments) -> None:
    """Checks the correction against the loss, the steps and the group size.

    Raises:
        ValueError: They contradict each other, or an option has no effect.
    """
    correction = arguments.correction
    policy = arguments.policy
    function = arguments.custom_tis_function_path
    if function is not None and not (correction.corrects or correction.get_mismatch_metrics):
        raise ValueError(
            f"--custom-tis-function-path is {function!r} but nothing calls it; "
            "add --use-tis, --use-rs or --get-mismatch-metrics."
        )
    if correction.policy_loss == "reinforce" and not correction.use_rollout_logprobs:
        raise ValueError(
            "--policy-loss reinforce has no old policy to recompute; add --use-rollout-logprobs."
        )
    _check_old_policy(arguments)
    if policy.has_token_baseline:
        _check_token_baseline(arguments)
    if policy.use_rollout_entropy and correction.use_rollout_logprobs:
        raise ValueError(
            "--use-rollout-entropy needs the pass for old log-probs, which --use-rollout-logprobs"
            " leaves out; remove one of the two."
        )
    if policy.has_token_rewards:
        _check_token_rewards(arguments)
    if policy.reject_before_advantage and correction.needs_advantages:
        raise ValueError(
            "--reject-before-advantage has no advantages yet; drop it, or what needs them:"
            " --tis-upper-bound-negative, --tis-lower-bound-negative, --divergence-mask without"
            " --divergence-mask-direction both."
        )
    if policy.staleness_decay < 1 and _is_always_fresh(arguments):
        raise ValueError(
            "--staleness-decay has no effect, because the trained weights sample all tokens; add"
            " --num-steps-per-rollout, --update-weights-interval, --rollout-lookahead or"
            " --partial-rollout, or drop it."
        )
    group = arguments.rollout.n_samples_per_prompt
    compares_samples = (
        policy.advantage_estimator != "reinforce_plus_plus"
        and arguments.rollout.custom_reward_post_process_path is None
    )
    if group < 2 and compares_samples:
        raise ValueError(
            f"--n-samples-per-prompt is {group} but --advantage-estimator"
            f" {policy.advantage_estimator} compares the samples of a prompt; raise it to 2 or"
            " more."
        )


def _check_old_policy(arguments: Arguments) -> None:
    """Refuses options of the old policy if that always equals the trained policy."""
    correction = arguments.correction
    # The first step of a rollout recomputes old log-probs with the weights that it trains.
    on_policy = (
        arguments.loop.num_steps_per_rollout == 1
        and not correction.use_rollout_logprobs
        and correction.old_logprobs == "recompute"
    )
    if not on_policy:
        return
    if arguments.policy.use_opsm and arguments.policy.opsm_policy == "old":
        raise ValueError(
            "--opsm-policy old has no effect with one optimizer step; raise"
            " --num-steps-per-rollout."
        )
    if correction.divergence_mask is not None and correction.divergence_mask_anchor == "old":
        raise ValueError(
            "--divergence-mask-anchor old has no effect with one optimizer step; raise"
            " --num-steps-per-rollout."
        )


def _is_always_fresh(arguments: Arguments) -> bool:
    """Whether the trained weights sample every token."""
    rollout = arguments.rollout
    has_other_samples = (
        rollout.rollout_lookahead
        or rollout.partial_rollout
        or rollout.rollout_function_path
        or arguments.loop.load_debug_rollout_data
    )
    if has_other_samples:
        return False
    return arguments.loop.num_steps_per_rollout == 1 and rollout.update_weights_interval == 1


def _check_token_baseline(arguments: Arguments) -> None:
    """Refuses options that need one advantage per sample, or any before the baseline exists."""
    policy = arguments.policy
    correction = arguments.correction
    conflicts = {
        "--normalize-advantages": policy.normalize_advantages,
        "--use-opsm": policy.use_opsm,
        "--custom-advantage-function-path": policy.custom_advantage_function_path,
        "--custom-reward-post-process-path": arguments.rollout.custom_reward_post_process_path,
        "--save-debug-train-data": arguments.loop.save_debug_train_data,
        "--old-logprobs interpolate": correction.old_logprobs == "interpolate",
        "--use-tis and bounds or masks by the sign of the advantage": (
            correction.use_tis and correction.needs_advantages
        ),
    }
    for name, is_set in conflicts.items():
        if is_set:
            raise ValueError(
                f"--advantage-estimator optimal_token_baseline does not work with {name}; remove"
                " one."
            )


def _check_token_rewards(arguments: Arguments) -> None:
    """Refuses options that need one advantage per sample, with a KL or a discount per token."""
    policy = arguments.policy
    reason = "--gamma"
    if policy.kl_coef > 0:
        reason = "--kl-coef"
    conflicts = {
        "--use-opsm": policy.use_opsm,
        "--reject-before-advantage": policy.reject_before_advantage,
        "--custom-advantage-function-path": policy.custom_advantage_function_path,
        "--save-debug-train-data": arguments.loop.save_debug_train_data,
        "--old-logprobs interpolate": arguments.correction.old_logprobs == "interpolate",
    }
    for name, is_set in conflicts.items():
        if is_set:
            raise ValueError(f"{reason} does not work with {name}; remove one of the two.")


REPLACED = {
    "custom_reward_post_process_path": (
        "disable_grpo_std_normalization",
        "reject_before_advantage",
    ),
    "custom_advantage_function_path": ("normalize_advantages", "use_opsm", "save_debug_train_data"),
    "rollout_function_path": (
        "custom_generate_function_path",
        "dynamic_sampling_filter_path",
        "partial_rollout",
        "rollout_lookahead",
        "use_rollout_routing_replay",
        "load_debug_rollout_data",
    ),
    "disable_rollout_global_dataset": ("check_weight_sync", "rollout_shuffle", "num_epoch"),
    "data_source_path": ("check_weight_sync", "rollout_shuffle", "load_debug_rollout_data"),
    "custom_loss_function_path": (
        "custom_tis_function_path",
        "custom_pg_loss_reducer_function_path",
        "use_opsm",
        "entropy_coef",
        "rollout_pull_coef",
        "staleness_decay",
        "rollout_top_p",
        "rollout_top_k",
    ),
}
"""Options that have no effect with a user function, by the function's option."""


def _check_hooks(arguments: Arguments) -> None:
    """Refuses options that have no effect with a user function, and a loss without its function."""
    # `arguments` itself has custom_tis_function_path.
    configs = (arguments.policy, arguments.rollout, arguments.loop, arguments)
    values: dict[str, Any] = {}
    for config in configs:
        values |= {name: getattr(config, name) for name in OPTIONS if hasattr(config, name)}
    for function, options in REPLACED.items():
        for name in options:
            if values[function] and values[name] != OPTIONS[name].default:
                raise ValueError(
                    f"{flag(name)} has no effect with {flag(function)}; remove one of them."
                )
    if (
        arguments.policy.loss_type == "custom_loss"
        and arguments.policy.custom_loss_function_path is None
    ):
        raise ValueError(
            "--loss-type is custom_loss but --custom-loss-function-path is unset; add your"
            " function."
        )


def _check_rewards(arguments: Arguments) -> None:
    """Refuses a run without a reward for its samples or held-out answers."""
    rollout = arguments.rollout
    if rollout.rm_type is not None or rollout.custom_rm_path is not None:
        return
    if rollout.custom_generate_function_path is not None:
        # The function may set the reward.
        return
    # Loaded samples have rewards, and so may samples of user functions. The engine's answers to
    # held-out prompts have none.
    has_rewards = (
        arguments.loop.load_debug_rollout_data is not None
        or rollout.rollout_function_path is not None
    )
    if rollout.eval_sets or not has_rewards:
        raise ValueError(
            "--rm-type is unset and so is --custom-rm-path; add one of them to score responses."
        )


def _check_routing_record(arguments: Arguments) -> None:
    """Refuses --use-routing-replay without a pass to record, or if it disturbs a measurement."""
    steps = arguments.loop.num_steps_per_rollout
    rollout = arguments.rollout
    # train_arguments has derived it from the batch sizes.
    assert steps is not None
    if not arguments.megatron.use_routing_replay:
        return
    if rollout.measure_routing_mismatch is not None and not rollout.use_rollout_routing_replay:
        raise ValueError(
            "--measure-routing-mismatch compares training with and without the rollout engine's"
            " experts, but --use-routing-replay replays the trainer's own routing; add"
            " --use-rollout-routing-replay, or remove one of the two."
        )
    if not needs_old_log_probs(arguments.correction, steps, arguments.policy):
        raise ValueError(
            "--use-routing-replay is on but there is no pass for old log-probs to record"
            " (--use-rollout-logprobs, or one optimizer step per rollout); use"
            " --use-rollout-routing-replay, which needs no such pass."
        )


def check_ranks(arguments: Arguments, world_size: int) -> None:
    """Refuses a global batch that cannot be split into equal ranks and micro-batches."""
    megatron = arguments.megatron
    size = arguments.loop.global_batch_size or 0
    data_parallel = world_size // megatron.model_parallel_size
    if size % data_parallel:
        raise ValueError(
            f"--global-batch-size is {size} but {data_parallel} data-parallel ranks share it; "
            f"choose a multiple of {data_parallel}."
        )
    micro = megatron.micro_batch_size
    samples = size // data_parallel
    if micro is not None and samples % micro:
        raise ValueError(
            f"--micro-batch-size is {micro} but a rank has {samples} samples in a step; choose a"
            f" divisor of {samples}."
        )


def check_dump(arguments: Arguments) -> None:
    """Checks that the first file of samples exists."""
    rollout = arguments.rollout
    pattern = arguments.loop.load_debug_rollout_data
    load = arguments.megatron.load
    if rollout.allow_truncation_bias and rollout.rollout_engine == "local" and pattern is None:
        raise ValueError(
            "--allow-truncation-bias has no effect with --rollout-engine local, which records token"
            " sets."
        )
    if pattern is None:
        return
    # A resumed run begins with a later file.
    if load is not None and Path(load).is_dir():
        return
    first = pattern.format(rollout_id=0)
    if not Path(first).is_file():
        raise ValueError(
            f"--load-debug-rollout-data is {quoted(pattern)} but there is no file {quoted(first)}."
        )


def warnings_of(arguments: Arguments) -> Iterator[str]:
    """Yields warnings about options that are accepted but probably not intended."""
    correction = arguments.correction
    # Rejection without own bounds takes those of the weights.
    reads_lower_bound = correction.mode.has_lower_bound or (
        correction.use_rs and correction.rs_upper_bound is None
    )
    if correction.use_tis and not reads_lower_bound and correction.tis_lower_bound:
        yield (
            f"--tis-lower-bound is {correction.tis_lower_bound} but --tis-mode"
            f" {correction.tis_mode} has no lower bound; choose clip or mask for both."
        )
    for criterion in correction.rejections:
        if not _rejects_any_precision(criterion):
            continue
        yield (
            f"the bounds {criterion.lower:.6g} to {criterion.upper:.6g} of {criterion.name} on the"
            " mean log-ratio are within ±1 %, which already rejects 25 % of healthy sequences of"
            " 26 tokens in bf16 and 94 % in fp8 (docs/choosing.md); use --use-rs --rs-level"
            " geometric --rs-z-score 3 instead of the bounds."
        )
    if correction.get_mismatch_metrics and correction.corrects:
        acting = []
        for name in CORRECTION_SWITCHES:
            if getattr(correction, name) not in (False, None):
                acting.append(flag(name))
        yield (
            f"--get-mismatch-metrics does not turn off {' and '.join(acting)}; remove it to only"
            " measure."
        )
    loop = arguments.loop
    warm_up = arguments.megatron.lr_warmup_iters
    # 0 if --num-epoch decides the length of the run.
    steps = (loop.num_rollout or 0) * (loop.num_steps_per_rollout or 0)
    if steps and warm_up >= steps:
        yield (
            f"--lr-warmup-iters is {warm_up} but the run has {steps} optimizer steps; it never"
            " reaches --lr."
        )
    yield from _about_idle_options(arguments)
    yield from true_on_policy_warnings(arguments)


def _about_idle_options(arguments: Arguments) -> Iterator[str]:
    """Yields warnings about functions without a call, idle clip ranges and uncorrected samples."""
    rollout = arguments.rollout
    names = [
        "dynamic_sampling_filter_path",
        "rollout_sample_filter_path",
        "rollout_all_samples_process_path",
    ]
    if not rollout.eval_sets:
        names.append("custom_generate_function_path")
    unused = " and ".join(flag(name) for name in _changed(rollout, *names))
    if arguments.loop.load_debug_rollout_data is not None and unused:
        yield f"{unused} will not be called: --load-debug-rollout-data has samples already."
    steps = arguments.loop.num_steps_per_rollout
    policy = arguments.policy
    names = _changed(policy, "eps_clip", "eps_clip_high", "eps_clip_c")
    if steps is not None and names and clip_is_inactive(arguments.correction, steps):
        settings = [f"{flag(name)} is {getattr(policy, name):g}" for name in names]
        yield (
            f"{' and '.join(settings)}, but with one optimizer step per rollout all ratios are 1;"
            " raise --num-steps-per-rollout, or add --use-rollout-logprobs."
        )
    names = _changed(rollout, "rollout_lookahead", "update_weights_interval")
    if names and not (corrects_staleness(arguments.correction) or policy.stays_close_to_rollouts):
        settings = [f"{flag(name)} is {getattr(rollout, name)}" for name in names]
        yield (
            f"{' and '.join(settings)}, so samples come from older weights, and nothing corrects"
            " that; add --use-opsm, --use-tis or --use-rollout-logprobs."
        )


def _changed(config: object, *names: str) -> list[str]:
    """Returns the names of options that differ from their defaults."""
    return [name for name in names if getattr(config, name) != OPTIONS[name].default]


def _rejects_any_precision(criterion: Criterion) -> bool:
    """Whether fixed bounds on the geometric mean ratio are within 1 %, which bf16 exceeds."""
    if criterion.aggregation != "mean" or criterion.lower is None:
        return False
    # Bounds of exactly 1.01 get no warning, also after rounding.
    limit = 1.01 - 1e-9
    return criterion.upper < limit or criterion.lower > 1 / limit
