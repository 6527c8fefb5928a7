"""Checks and warnings about combinations of options."""

from pathlib import Path

from slime_tis.correction.modes import Criterion
from slime_tis.errors import quoted
from slime_tis.limits import flag
from slime_tis.policy.proximal_policy import clip_is_inactive, needs_old_log_probs
from slime_tis.rules import corrects_staleness
from slime_tis.trainer.cli.command_line import CORRECTION_SWITCHES
from slime_tis.trainer.cli.run_options import OPTIONS, Arguments

ENDLESS_WARM_UP = 1000
"""A warm-up of this many times the run's optimizer steps is refused; a shorter one may test a longer run."""


def check_arguments(arguments: Arguments, world_size: int) -> None:
    """Checks combinations of options, before files and the model are read.

    Raises:
        ValueError: Options exclude each other, or sizes do not divide.
    """
    _check_hooks(arguments)
    _check_routing_record(arguments)
    _check_ranks(arguments, world_size)
    _check_rounding(arguments)
    _check_warm_up(arguments)


def check_correction(arguments: Arguments) -> None:
    """Checks the correction against the loss, the steps and the group size."""
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


def check_dump(arguments: Arguments) -> None:
    """Whether the samples to train on are there; a resumed run begins with a later file."""
    pattern, load = arguments.loop.load_debug_rollout_data, arguments.megatron.load
    if pattern is None or (load is not None and Path(load).is_dir()):
        return
    if not Path(pattern.format(rollout_id=0)).is_file():
        raise ValueError(
            f"--load-debug-rollout-data is {quoted(pattern)} but there is no file "
            f"{quoted(pattern.format(rollout_id=0))}; --save-debug-rollout-data writes it."
        )


def check_truncation(arguments: Arguments) -> None:
    """Whether --allow-truncation-bias allows anything: the local engine reports all sets, files may lack them."""
    rollout, loads = arguments.rollout, arguments.loop.load_debug_rollout_data is not None
    if rollout.allow_truncation_bias and rollout.rollout_engine == "local" and not loads:
        raise ValueError(
            "--allow-truncation-bias is set but has no effect with --rollout-engine local, which records the tokens "
            "that can be sampled; remove it."
        )


def warnings_of(arguments: Arguments) -> list[str]:
    """Returns warnings about options that are accepted but probably not intended."""
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
