"""Trains a language model by reinforcement learning on Megatron-core, with rollout correction.

    start the process groups → build the training engine, the rollout engine and the data
    for every rollout:
        prompts → responses (of this rollout, and of the next ones in the background) → rewards → advantages
        for every step: old log-probs where needed → correction and loss → optimizer step
        weights to the rollout engine → evaluation → checkpoint, which counts once the steps are reported
    write the policy as a Hugging Face directory

`python train.py --help` lists the flags; docs/quick_start.md walks through a run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from torch import Tensor
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from slime_tis.errors import NonFiniteGradient, RunStopped, quoted_path
from slime_tis.hf_directory import load_config, model_sizes, moe_sizes, read_model_config
from slime_tis.policy.custom_loss import ObjectiveFunctions
from slime_tis.policy.custom_tis import CustomTisFunction
from slime_tis.policy.proximal_policy import old_policy_name
from slime_tis.trainer.agents.custom_generate import (
    GenerateFunction,
    build_generate_function,
    load_generate_function,
    settle,
)
from slime_tis.trainer.agents.rollout_function import CustomRollout, build_rollout_function, load_rollout_function
from slime_tis.trainer.agents.slime_client import LOCAL_ADDRESS
from slime_tis.trainer.checkpointer import (
    Checkpointer,
    Identity,
    Position,
    ResumePoint,
    find_resume_point,
    model_identity,
)
from slime_tis.trainer.cli.arguments import Arguments, describe, effective_config, options_in_force
from slime_tis.trainer.cli.output_paths import held_outputs
from slime_tis.trainer.cli.preflight import prompt_sizes
from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.dump import load_samples, save_samples
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.engines.build import build_engine, training_sampling
from slime_tis.trainer.engines.engine import RolloutEngine, RolloutFuture, RolloutUnavailable
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.weight_rounding import WeightRounder
from slime_tis.trainer.engines.weight_updates import WeightUpdates
from slime_tis.trainer.evaluation import Evaluation, local_evaluation_engine
from slime_tis.trainer.exit_status import exit_status, message_of, report_error
from slime_tis.trainer.interrupt import Interrupted, Interrupts
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.megatron.export import save_hf
from slime_tis.trainer.megatron.parallel import Parallel, connect_store, initialize, shut_down
from slime_tis.trainer.options.megatron import MegatronConfig
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.reporting.health import Health
from slime_tis.trainer.reporting.progress import shown_progress
from slime_tis.trainer.reporting.reporters import Reporter, open_reporters
from slime_tis.trainer.reporting.run_directory import check_metrics
from slime_tis.trainer.reporting.timing import Timer
from slime_tis.trainer.rewards.rewards import assign_rewards, build_reward, check_prompts, check_reward_server
from slime_tis.trainer.rollout.dynamic_sampling import Collected, collect
from slime_tis.trainer.rollout.evaluate import load_evaluation_prompts
from slime_tis.trainer.rollout.hooks import RolloutHooks
from slime_tis.trainer.rollout.metrics import rollout_metrics
from slime_tis.trainer.rollout.prefetch import BATCH, Prefetcher
from slime_tis.trainer.rollout.sampling_masks import check_sampling_masks, require_sampling_masks
from slime_tis.trainer.rollout.staleness import mask_removed_samples, mask_stale_samples
from slime_tis.trainer.rollout.unfinished import Unfinished
from slime_tis.trainer.train_dump import DumpSettings, TrainDump
from slime_tis.trainer.weight_sync import PROBE_TOKENS, SyncCheck, check_weight_sync, make_probe
from slime_tis.user_functions import load_custom_tis


def train(run: Run) -> None:
    """The loop of the module's docstring.

    Raises:
        Interrupted: a signal asks the run to stop, at a safe point.
        NonFiniteGradient: a step's gradient is not finite, and such steps are not to be skipped.
        RolloutUnavailable: no rollout engine is left.
    """
    if run.evaluation.is_due_first(run.rollout_id):
        with run.interrupts.abandonable():
            run.reporters.log(run.evaluation(run.learner.step, run.rollout_id), run.learner.step)
        run.timer.take()
    while run.rollout_id < run.num_rollout:
        safe_point(run)
        run.checkpointer.position = position(run)
        with run.interrupts.abandonable():
            groups, sampled = sample(run)
            mask_removed_samples(groups)
            sampled["rollout/stale_samples"] = mask_stale_samples(
                groups, run.learner.step, run.arguments.rollout.max_weight_staleness
            )
            sampled |= check_sampling_masks(groups, truncates_sampling=run.arguments.rollout.truncates_sampling)
            safe_point(run)
            shaped = run.hooks.shape_rewards(groups)
            if shaped is not None:
                sampled["rollout/raw_reward"] = sum(shaped.raw) / len(shaped.raw)
            advantages = None if shaped is None else shaped.advantages
            run.unreported = [{}] if run.arguments.loop.debug_rollout_only else train_on(run, groups, advantages)
        run.rollout_id += 1
        run.checkpointer.position = position(run)
        if run.rollout_id % run.arguments.rollout.update_weights_interval == 0:
            sampled |= run.update_weights()
        run.unreported[-1] |= {**sampled, **evaluate_when_due(run)}
        if run.checkpointer.is_due(run.rollout_id, run.num_rollout):
            run.checkpointer.save(before_it_counts=partial(report_rollout, run))
        else:
            report_rollout(run)
    finish(run)


def sample(run: Run) -> tuple[list[list[Sample]], dict[str, float]]:
    """Prompts → scored groups to train on, the same on every rank, and the metrics of the rollout."""
    loop, rollout = run.arguments.loop, run.arguments.rollout
    start = time.monotonic()
    if loop.load_debug_rollout_data is not None:
        path = loop.load_debug_rollout_data.format(rollout_id=run.rollout_id)
        sizes = model_sizes(read_model_config(run.arguments.megatron.hf_checkpoint))
        groups = load_samples(path, rollout.rollout_batch_size, rollout.n_samples_per_prompt, sizes)
        if rollout.truncates_sampling and not rollout.allow_truncation_bias:
            require_sampling_masks(path, groups)
        found = Collected(groups=groups, sampled=groups)
    elif run.own_rollout is not None:
        with run.timer("generate"):
            groups, extra = run.own_rollout(run.rollout_id)
        with run.timer("reward"):
            assign_rewards(groups, run.reward)
        found = Collected(groups=groups, sampled=groups, metrics=extra)
    else:
        found = collect(
            scored_batches(run),
            rollout.rollout_batch_size,
            run.hooks.judge,
            max_batches=rollout.dynamic_sampling_max_batches,
        )
    if loop.load_debug_rollout_data is None:
        run.hooks.filter_samples(found.groups)
        run.hooks.process_all(found.sampled, run.data_source)
        if loop.save_debug_rollout_data is not None and run.parallel.is_main:
            save_samples(loop.save_debug_rollout_data.format(rollout_id=run.rollout_id), found.groups)
    are_episodes = rollout.custom_generate_function_path is not None
    metrics = found.metrics | rollout_metrics(found.groups, run.learner.step, are_episodes=are_episodes)
    if not run.hooks.logs_rollout(run.rollout_id, found.groups, found.metrics, time.monotonic() - start):
        metrics = {}
    return found.groups, metrics | run.sampler.metrics() | run.unfinished.metrics()


def scored_batches(run: Run) -> Iterator[list[list[Sample]]]:
    """Batches of prompts, answered and scored, as many as are asked for; the same on every rank."""
    shown = run.parallel.is_main and run.arguments.reporting.progress
    while True:
        with run.timer("generate"), shown_progress(run.prefetcher.progress, "responses", shown=shown):
            groups = run.prefetcher.next(run.rollout_id, run.num_rollout - 1)
        failures = settle(groups) if run.arguments.rollout.custom_generate_function_path is not None else None
        if failures is not None and run.parallel.is_main:
            tqdm.write(f"warning: rollout {run.rollout_id}: {failures}", file=sys.stderr)
        with run.timer("reward"):
            assign_rewards(groups, run.reward)
        yield groups


def train_on(run: Run, groups: list[list[Sample]], advantages: list[float] | None) -> list[dict[str, float]]:
    """The optimizer steps of one rollout; what they made of its tokens is dumped, that of a refused step included."""
    try:
        return run.learner.train(groups, advantages)
    finally:
        if run.learner.dump is not None:
            with run.timer("train_dump"):
                run.learner.dump.end_rollout(run.rollout_id)


def evaluate_when_due(run: Run) -> dict[str, float]:
    """Held-out accuracy where this rollout is followed by an evaluation; empty elsewhere."""
    if not run.evaluation.is_due(run.rollout_id, run.num_rollout):
        return {}
    try:
        with run.interrupts.abandonable():
            return run.evaluation(run.learner.step, run.rollout_id)
    except Interrupted:  # the run stops at the next safe point; it evaluates when it is resumed
        run.evaluation.abandon()
        return {}


def report_rollout(run: Run) -> None:
    """Logs the steps of the last rollout; a checkpoint that counts before would lose them to a kill."""
    run.unreported[-1] |= step_times(run.timer)
    report(run, run.unreported, run.learner.step or run.rollout_id)
    run.unreported = []


def report(run: Run, rows: Sequence[dict[str, float]], last_step: int) -> None:
    """Logs the metrics of consecutive steps, the last of which has number `last_step`, and prints health warnings."""
    for step, row in enumerate(rows, start=last_step - len(rows) + 1):
        health = run.health.check(row)
        run.reporters.log(row | health.metrics, step)
        for message in health.messages if run.parallel.is_main else ():
            tqdm.write(f"warning: step {step}: {message}", file=sys.stderr)


def step_times(timer: Timer) -> dict[str, float]:
    """perf/… seconds since the last step; the backward is what the forward leaves of both."""
    times = timer.take()
    if "perf/forward_time" in times:
        times["perf/backward_time"] = times["perf/forward_backward_time"] - times["perf/forward_time"]
    return times


def position(run: Run) -> Position:
    """Where a run that is resumed from here goes on."""
    return Position(
        step=run.learner.step,
        rollout_id=run.rollout_id,
        dataset=run.prefetcher.state_dict(),
        unfinished=run.unfinished.groups(),
    )


def safe_point(run: Run) -> None:
    """Stops the run where any rank was asked to; a collective.

    Raises:
        Interrupted: a signal reached one of the ranks.
    """
    number = run.parallel.largest(run.interrupts.number)
    if number:
        raise Interrupted(signal.Signals(number).name)


def finish(run: Run) -> None:
    """Writes the policy as a Hugging Face directory, and prints the held-out accuracy before and after."""
    if run.arguments.megatron.save is not None:
        safe_point(run)  # what follows a resumed run does
    directory = run.arguments.megatron.save_hf
    if directory is not None and not run.arguments.loop.debug_rollout_only:
        run.checkpointer.check_weights()
        written = save_hf(directory, run.learner.engine)
        if written is not None and written != Path(directory).resolve():
            print(f"warning: {directory} contains other files by now; the policy is at {written}", file=sys.stderr)
    evaluation = run.evaluation
    if evaluation.is_overdue:
        safe_point(run)
    if not evaluation.has_run:
        evaluation(run.learner.step, run.rollout_id)  # resumed after the last rollout
    if run.parallel.is_main and evaluation.prompts:
        print(evaluation.summary, flush=True)


@contextmanager
def closing(resource: RolloutEngine | Reporter | TrainDump) -> Iterator[None]:
    """Closes an engine, a reporter or a dump at the end; after an error, that error is the one that is raised."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the disk may be what failed
            resource.close()
        raise
    resource.close()


@contextmanager
def logging_before_an_error(run: Run) -> Iterator[None]:
    """After an error logs the steps that were made before it."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            report(run, run.unreported, run.learner.step or run.rollout_id)
        raise


@contextmanager
def saving_before_stopping(run: Run) -> Iterator[None]:
    """Saves a run that stops early.

    Raises:
        RunStopped: a signal, a lost rollout engine or a gradient that is not finite ended it.
    """
    checkpointer = run.checkpointer
    try:
        yield
    except Interrupted as error:
        raise RunStopped(f"stopped by {error.name}. {checkpointer.save_before_stopping()}", error.status) from error
    except NonFiniteGradient as error:
        report(run, error.rows, run.learner.step + 1)
        if run.learner.step > checkpointer.position.step:  # earlier steps are made; the rest of the rollout is dropped
            run.rollout_id += 1
            checkpointer.position = position(run)
        raise RunStopped(f"error: {error} {checkpointer.save_before_stopping()}", 1) from error
    except RolloutUnavailable as error:
        raise RunStopped(f"error: {message_of(error)} {checkpointer.save_before_stopping()}", 1) from error


@dataclass(kw_only=True)
class Run:
    """What a run consists of, and how far it is."""

    arguments: Arguments
    parallel: Parallel
    interrupts: Interrupts
    timer: Timer
    prefetcher: Prefetcher
    """Takes prompts from the data and has them answered ahead of training."""
    reward: Callable[[list[Sample]], list[float]]
    own_rollout: CustomRollout | None
    """The user's function for whole rollouts, in place of the prefetcher."""
    hooks: RolloutHooks
    data_source: object
    """Of the prompts, for the user's functions."""
    learner: Learner
    sampler: RolloutEngine
    update_weights: Callable[[], dict[str, float]]
    """Gives the policy's weights to the rollout engine; the metrics of the update."""
    evaluation: Evaluation
    checkpointer: Checkpointer
    health: Health
    reporters: Reporter
    unfinished: Unfinished
    """Groups whose stragglers were aborted."""
    num_rollout: int
    """Rollouts of the whole run."""
    rollout_id: int = 0
    """Rollouts trained on so far."""
    unreported: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the steps of a rollout that have been made and not been logged."""


def set_up(arguments: Arguments, parallel: Parallel, interrupts: Interrupts, opened: ExitStack) -> Run:
    """Builds all parts of a run, and takes up the checkpoint under --load where there is one.

    What has to be closed is entered into `opened` as soon as it is built, so that an error on the way closes it, too.
    """
    megatron, rollout = arguments.megatron, arguments.rollout
    custom_tis = None  # the user's functions are loaded before anything is built
    if arguments.custom_tis_function_path is not None:
        function = load_custom_tis(arguments.custom_tis_function_path, arguments.namespace)
        custom_tis = CustomTisFunction.bind(function, arguments.namespace)
    reward = build_reward(rollout, arguments.namespace, interrupts.check)
    hooks = RolloutHooks.load(rollout, arguments.namespace)
    functions = ObjectiveFunctions.load(arguments.policy, arguments.namespace)
    eval_reward = build_reward(rollout, arguments.namespace, interrupts.check, evaluation=True)
    timer = Timer()
    if rollout.custom_generate_function_path is not None:
        load_generate_function(rollout.custom_generate_function_path)
    if rollout.rollout_function_path is not None:
        load_rollout_function(rollout.rollout_function_path)

    identity = Identity(options=effective_config(arguments), model=model_identity(megatron.hf_checkpoint))
    resumed = find_resume_point(megatron, identity, is_main=parallel.is_main)
    run_id = uuid.uuid4().hex if resumed is None else resumed.state.run
    check_metrics(arguments.reporting.output_dir, run_id)

    tokenizer = load_tokenizer(megatron.hf_checkpoint)
    sizes = prompt_sizes(megatron, rollout)
    dataset: PromptDataset | CustomDataSource = (
        PromptDataset(rollout.prompt_data, tokenizer, rollout, sizes)
        if rollout.data_source_path is None
        else CustomDataSource(rollout.data_source_path, arguments.namespace, tokenizer, rollout, sizes)
    )
    if resumed is not None:
        dataset.load_state_dict(resumed.state.dataset)
    eval_prompts = load_evaluation_prompts(rollout, tokenizer, sizes)
    check_rewards(arguments, dataset, eval_prompts)
    rollouts = num_rollout(arguments, dataset)
    steps = arguments.loop.num_steps_per_rollout
    assert steps is not None  # parse_args derives it

    def between_micro_batches() -> None:
        """Abandons a rollout as long as no step was made on it; of several ranks none can do so alone."""
        if parallel.size == 1 and not learner.has_stepped:
            interrupts.check()

    engine = TrainingEngine(
        megatron,
        parallel,
        temperature=rollout.rollout_temperature,
        total_steps=rollouts * steps,
        keep_reference=arguments.policy.use_kl_loss,
        entropy_gradient=arguments.policy.entropy_coef != 0,
        gives_logits=functions.loss is not None,
        timer=timer,
        safe_point=between_micro_batches,
    )
    dump = open_dump(arguments, parallel)
    if dump is not None:
        opened.enter_context(closing(dump))
    learner = Learner(
        engine=engine,
        correction=arguments.correction,
        policy=arguments.policy,
        steps_per_rollout=steps,
        leaves_out_samples=rollout.max_weight_staleness is not None,
        custom_tis=custom_tis,
        functions=functions,
        replays_rollout_routing=rollout.use_rollout_routing_replay,
        replays_routing_weights=rollout.routing_replay_weights,
        measure_routing_mismatch=rollout.measure_routing_mismatch,
        dump=dump,
    )
    sampler = build_engine(
        rollout,
        arguments.sglang,
        megatron.hf_checkpoint,
        tokenizer,
        weights=lambda: weights(),
        weights_version=lambda: learner.step,
        output_dir=arguments.reporting.output_dir,
        device=parallel.backend.device,
        safe_point=interrupts.check,
    )
    opened.enter_context(closing(sampler))
    generate = build_generate_function(
        rollout,
        arguments.namespace,
        tokenizer,
        vocab_size=sizes.vocab_size,
        context_len=sizes.context_len,
        version=lambda: sampler.weight_version,
        address=sampler.http_address or LOCAL_ADDRESS,
    )
    own_rollout = build_rollout_function(
        rollout,
        arguments.namespace,
        tokenizer,
        dataset,
        sizes=sizes,
        version=lambda: sampler.weight_version,
        address=sampler.http_address,
    )
    rounder = WeightRounder(rollout.weight_update_rounding, megatron.seed)
    updates = WeightUpdates(rounder, sampler.weight_precision, samples_all=rollout.check_weight_sync)

    def weights() -> Iterable[tuple[str, Tensor]]:
        return updates.source(engine.named_hf_tensors, learner.step)()

    check = None
    if rollout.check_weight_sync:
        limits = [one for one in (PROBE_TOKENS, sizes.context_len, sampler.max_context_len) if one is not None]
        check = SyncCheck(
            probe=make_probe(dataset.prompts, min(limits)),
            bound=rollout.weight_sync_bound,
            trains_in="bf16" if megatron.bf16 else "fp32",
        )

    def update_weights() -> dict[str, float]:
        with timer("update_weights"):
            sampler.update_weights(weights, learner.step)
            metrics = updates.metrics()
        if check is not None:
            metrics |= check_weight_sync(engine, sampler, check, updates)
        return metrics

    local_engine = partial(local_evaluation_engine, megatron, engine, tokenizer, interrupts)
    evaluation = Evaluation(
        prompts=eval_prompts,
        reward=eval_reward,
        logs=hooks.logs_evaluation,
        config=rollout,
        engine=engine,
        build_engine=local_engine if rollout.evaluates_locally else lambda: sampler,
        timer=timer,
        generate=generate,
    )
    checkpointer = Checkpointer(
        config=megatron,
        learner=learner,
        sampler=sampler,
        evaluation=evaluation,
        updates=updates,
        data=dataset if isinstance(dataset, CustomDataSource) else None,
        timer=timer,
        run_id=run_id,
        identity=identity,
    )
    if resumed is not None:
        checkpointer.resume(resumed, update_weights)
    elif check is not None or not starts_with_policy(rollout, megatron):
        update_weights()
    timer.take()
    if parallel.is_main and engine.token_budget is not None and engine.token_budget.reason is not None:
        print(f"micro-batches: {engine.token_budget}", flush=True)
    if parallel.is_main and megatron.share_prompts is None and not engine.shares_prompts:
        print(f"shared prompts: off ({engine.no_shared_prompts})", flush=True)
    reporters = open_reporters(
        arguments.reporting,
        options_in_force(arguments),
        total_steps=rollouts * steps,
        resume_step=learner.step + 1 if learner.step else 0,
        evaluates_again=evaluation.is_overdue,
        run=run_id,
        enabled=parallel.is_main,
    )
    opened.enter_context(closing(reporters))
    unfinished = Unfinished(engine=sampler, choose=hooks.choose)
    run = Run(
        arguments=arguments,
        parallel=parallel,
        interrupts=interrupts,
        timer=timer,
        prefetcher=open_prefetcher(
            arguments, dataset, sampler, unfinished, generate, 0 if resumed is None else first_batch(resumed)
        ),
        unfinished=unfinished,
        reward=reward,
        own_rollout=own_rollout,
        hooks=hooks,
        data_source=dataset if isinstance(dataset, PromptDataset) else dataset.source,
        learner=learner,
        sampler=sampler,
        update_weights=update_weights,
        evaluation=evaluation,
        checkpointer=checkpointer,
        health=Health(arguments.correction),
        reporters=reporters,
        num_rollout=rollouts,
        rollout_id=0 if resumed is None else resumed.state.rollout_id,
    )
    checkpointer.position = position(run)
    return run


def starts_with_policy(rollout: RolloutConfig, megatron: MegatronConfig) -> bool:
    """Whether the rollout engine has loaded the very weights that are trained.

    Servers have whatever they were started with. A local engine that rounds is sent the first weights: they are rounded
    as asked, and what arrives of later updates is measured against them.
    """
    return rollout.rollout_engine == "local" and rollout.rollout_precision == "fp32" and not megatron.bf16


def check_rewards(
    arguments: Arguments, dataset: PromptDataset | CustomDataSource, eval_prompts: dict[str, list[Prompt]]
) -> None:
    """Checks that every prompt can be scored, before a model is built.

    Raises:
        ValueError: a label is missing or of another form than the reward needs.
    """
    if arguments.loop.load_debug_rollout_data is None:  # loaded samples have their rewards
        check_prompts(arguments.rollout, dataset.prompts)
    for name, prompts in eval_prompts.items():
        flags = f"--label-key or --eval-label-key (--eval-prompt-data {name})"
        check_prompts(arguments.rollout, prompts, flags)
    rollout = arguments.rollout
    sources = (rollout.data_source_path, rollout.rollout_function_path, rollout.custom_generate_function_path)
    if sources == (None, None, None):  # a user's own may name the server for any sample to come
        check_reward_server(rollout, [*dataset.prompts, *chain(*eval_prompts.values())])


def open_dump(arguments: Arguments, parallel: Parallel) -> TrainDump | None:
    """What writes --save-debug-train-data; None without it.

    Raises:
        ValueError: several ranks would write the same file.
    """
    pattern, steps = arguments.loop.save_debug_train_data, arguments.loop.num_steps_per_rollout
    if pattern is None:
        return None
    assert steps is not None  # parse_args derives it
    moe = moe_sizes(load_config(arguments.megatron.hf_checkpoint))
    settings = DumpSettings(
        pattern=pattern,
        correction=arguments.correction,
        policy=arguments.policy,
        old_policy=old_policy_name(arguments.correction, steps),
        has_custom_function=arguments.custom_tis_function_path is not None,
        metadata={
            "precision": "bf16" if arguments.megatron.bf16 else "fp32",
            "rollout_precision": rollout_precision(arguments),
            "num_experts": 0 if moe is None else moe.num_experts,
            "replays_experts": arguments.rollout.use_rollout_routing_replay,
            "temperature": arguments.rollout.rollout_temperature,
            "tokenizer": str(Path(arguments.megatron.hf_checkpoint).resolve()),
        },
    )
    if parallel.data_size > 1 and settings.path(0, 0) == settings.path(0, 1):
        raise ValueError(
            f"--save-debug-train-data is {quoted_path(pattern)}, one file for {parallel.data_size} data-parallel "
            "ranks; put {rank} into it."
        )
    return TrainDump(settings, parallel.rank)


def rollout_precision(arguments: Arguments) -> str | None:
    """Precision of the rollout engine's weights as far as options say it: servers may choose by their checkpoint."""
    if arguments.rollout.rollout_engine == "local":
        return arguments.rollout.rollout_precision
    return None


def num_rollout(arguments: Arguments, dataset: PromptDataset | CustomDataSource) -> int:
    """Rollouts of the run: --num-rollout, or as many as --num-epoch passes over the prompts take."""
    loop = arguments.loop
    if loop.num_rollout is not None:
        return loop.num_rollout
    assert loop.num_epoch is not None  # parse_args requires one of the two
    return max(loop.num_epoch * len(dataset) // arguments.rollout.rollout_batch_size, 1)


def first_batch(resumed: ResumePoint) -> int:
    """The number of the batch that a resumed run begins with; checkpoints of earlier versions count rollouts."""
    number: int = resumed.state.dataset.get(BATCH, resumed.state.rollout_id)
    return number


def open_prefetcher(
    arguments: Arguments,
    dataset: PromptDataset | CustomDataSource,
    sampler: RolloutEngine,
    unfinished: Unfinished,
    generate: GenerateFunction | None,
    number: int,
) -> Prefetcher:
    """The batches in flight, from `number` on: what they sample, and how many prompts each takes from the data."""
    rollout = arguments.rollout

    def submit(prompts: list[Prompt], number: int) -> RolloutFuture:
        num_groups = rollout.rollout_batch_size if rollout.partial_rollout else None
        seed = (rollout.rollout_seed << 32) + number
        sampling = training_sampling(rollout)
        if generate is None:
            return sampler.submit(prompts, sampling, seed, num_groups=num_groups)
        concurrency = rollout.generate_concurrency
        return sampler.submit_function(
            prompts, generate.bind(sampling), sampling, seed, concurrency=concurrency, num_groups=num_groups
        )

    def fresh_prompts() -> int:
        """Prompts that the next batch takes from the data, besides those that are not finished."""
        size = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        return size - unfinished.take(size)

    return Prefetcher(dataset, submit, prompts=fresh_prompts, depth=rollout.rollout_lookahead, number=number)


def main(arguments: Arguments) -> int:
    """Runs a training; returns its exit status. Every expected error ends in one message on stderr.

    `slime_tis.main.train` calls this once the command line is read and checked.
    """
    with Interrupts() as interrupts:
        prepare_terminal()
        outputs = ExitStack()
        try:
            main_process = os.environ.get("RANK", "0") == "0"
            outputs.enter_context(held_outputs(arguments.megatron, arguments.reporting, main=main_process))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        with outputs:
            return _run(arguments, interrupts)


def _run(arguments: Arguments, interrupts: Interrupts) -> int:
    rank = 0
    try:
        parallel = initialize(arguments.megatron)
        rank = parallel.rank
        interrupts.share(connect_store(), rank)
        if parallel.is_main:
            print(describe(arguments), flush=True)
        with ExitStack() as opened:
            run = set_up(arguments, parallel, interrupts, opened)
            interrupts.started()
            with logging_before_an_error(run), saving_before_stopping(run):
                train(run)
    except Exception as error:
        if os.environ.get("SLIME_TIS_TRACEBACK"):
            raise
        if report_error(error, rank, interrupts):
            return exit_status(error)
        raise
    finally:
        shut_down()
    return 0


def prepare_terminal() -> None:
    """Leaves the terminal to this program: what libraries only remark goes unsaid.

    tqdm's own lock is a semaphore that forked processes share: one that was killed while it printed, a worker of a
    reward function for instance, would hold it for ever, and the run would wait for it at its next line.
    """
    tqdm.set_lock(threading.RLock())
    for name in ("megatron", "transformers", "torch"):
        warnings.filterwarnings("ignore", module=rf"{name}\.")
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
