"""Builds a run in stages, each from finished objects.

user functions → checkpoint to resume → data → learner → rollout engine → samples → evaluation →
reporters
"""

import copy
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from slime_tis.errors import CommandLineError, CustomFunctionError, quoted_path
from slime_tis.health import Health, HealthState
from slime_tis.hf_directory import (
    ModelSizes,
    load_config,
    model_sizes,
    moe_sizes,
    read_model_config,
)
from slime_tis.options.fields import flag
from slime_tis.policy.config import needs_old_log_probs, old_policy_name
from slime_tis.policy.custom_loss import ObjectiveFunctions
from slime_tis.progress import print_line
from slime_tis.trainer.agents.custom_generate import GenerateFunction, build_generate_function
from slime_tis.trainer.agents.rollout_function import CustomRollout
from slime_tis.trainer.agents.slime_client import LOCAL_ADDRESS
from slime_tis.trainer.check_engines import ATTENTION, EngineCheck, show
from slime_tis.trainer.checkpointer import Checkpointer, find_resume_point, model_hash
from slime_tis.trainer.cli.file_checks import prompt_sizes
from slime_tis.trainer.cli.train_arguments import effective_config, options_in_force
from slime_tis.trainer.cli.train_options import Arguments
from slime_tis.trainer.data.data_source import CustomDataSource
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.engines.build import build_engine, training_sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.rollout_engine import EngineHost, RolloutEngine, RolloutFuture
from slime_tis.trainer.engines.weight_rounding import DTYPES
from slime_tis.trainer.evaluation import Evaluation, load_evaluation_prompts
from slime_tis.trainer.first_difference import difference_from_rollout
from slime_tis.trainer.invariant.self_check import Kernels, choose_kernels
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron.architecture import invariant_shapes, read_hf_config
from slime_tis.trainer.megatron.lora import lora_settings, oversized_targets
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.on_policy_gate import OnPolicyGate, parity_advice
from slime_tis.trainer.rank_collectives import on_every_rank, on_rank_zero
from slime_tis.trainer.reporting.reporters import Reporter, Reporters, Timer, open_reporters
from slime_tis.trainer.reporting.run_directory import check_metrics
from slime_tis.trainer.rewards.rewards import build_reward, check_prompts, check_reward_server
from slime_tis.trainer.rollout.hooks import RolloutHooks
from slime_tis.trainer.rollout.prefetch import BATCH, Prefetcher, Unfinished
from slime_tis.trainer.sample_pipeline import SampleSource
from slime_tis.trainer.stop_signals import Interrupts
from slime_tis.trainer.storage.checkpoint_files import TrainerState
from slime_tis.trainer.train_dump import DumpSettings, TrainDump, changed_fields
from slime_tis.trainer.weight_sync import PolicyWeights
from slime_tis.user_functions import load_custom_tis, load_user_function

RewardFunction = Callable[[list[Sample]], list[float]]


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process: options, ranks, signals, clock, and the resources to close at the end."""

    arguments: Arguments
    parallel: Parallel
    interrupts: Interrupts
    timer: Timer
    opened: ExitStack

    def close_at_end(self, resource: RolloutEngine | Reporter | TrainDump) -> None:
        """Closes a resource after the run.

        If the run ends with an error, that error takes precedence over an error of `close`.
        """

        def close(kind: type[BaseException] | None, *_: object) -> None:
            if kind is None:
                resource.close()
                return
            # After an error, which may be a full disk, `close` must not hide that error.
            with suppress(OSError):
                resource.close()

        self.opened.push(close)


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """The functions that options name; built-in functions if an option is unset."""

    custom_tis: Callable[..., Any] | None
    objective: ObjectiveFunctions
    hooks: RolloutHooks
    reward: RewardFunction
    eval_reward: RewardFunction


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts to train on and to evaluate on."""

    tokenizer: PreTrainedTokenizerBase
    sizes: ModelSizes
    dataset: PromptDataset | CustomDataSource
    eval_prompts: dict[str, list[Prompt]]
    num_rollout: int
    first_batch: int


@dataclass
class Run:
    """The parts of a run, and its progress."""

    process: Process
    samples: SampleSource
    learner: Learner
    weights: PolicyWeights
    engine_check: EngineCheck
    evaluation: Evaluation
    checkpointer: Checkpointer
    health: Health
    reporters: Reporter
    num_rollout: int
    rollout_id: int = 0
    unreported: list[dict[str, float]] = field(default_factory=list)
    """Metrics of finished optimizer steps that are not logged yet."""

    def health_state(self) -> HealthState:
        """Returns the counters of the health warnings after all steps.

        These include steps that are not logged yet.
        """
        health = copy.deepcopy(self.health)
        for row in self.unreported:
            health.check(row)
        return health.state()


def set_up(
    arguments: Arguments, parallel: Parallel, interrupts: Interrupts, opened: ExitStack
) -> Run:
    """Builds all parts of a run; restores the latest checkpoint under --load, if one exists."""
    process = Process(
        arguments=arguments, parallel=parallel, interrupts=interrupts, timer=Timer(), opened=opened
    )
    check_equal_precision(arguments)
    functions = load_functions(process)
    checkpoint = find_resume_point(
        arguments.megatron, effective_config(arguments), is_main=parallel.is_main
    )
    resumed = None
    if checkpoint is None:
        run_id = on_rank_zero(lambda: uuid.uuid4().hex)
    else:
        _, resumed = checkpoint
        run_id = resumed.run
    check_metrics(arguments.reporting.output_dir, run_id)
    data = load_data(process, resumed)
    kernels = shared_kernels(process)
    learner = build_learner(process, functions, data, kernels)
    weights = PolicyWeights(learner=learner, config=arguments.rollout, megatron=arguments.megatron)
    sampler = build_sampler(process, data, weights, kernels)
    if kernels is not None:
        learner.gate = build_gate(process, learner, sampler)
    learner.dump = open_dump(process, run_id, sampler)
    weights.connect(sampler, data.dataset.prompts, data.sizes.context_len)
    generate = build_generate_function(
        arguments.rollout,
        arguments.namespace,
        data.tokenizer,
        sizes=data.sizes,
        version=lambda: sampler.weight_version,
        address=sampler.http_address or LOCAL_ADDRESS,
    )
    samples = build_samples(process, functions, data, sampler, generate)
    evaluation = build_evaluation(process, functions, data, weights, generate)
    checkpointer = build_checkpointer(process, data, weights, evaluation, run_id)
    health = Health(arguments.correction)
    if checkpoint is not None:
        checkpointer.resume(*checkpoint)
        path, state = checkpoint
        samples.prefetcher.restore(checkpointer.rollouts_in_flight(path, state, samples.sizes))
        health.restore(state.health)
    # Only a local engine in fp32 has loaded exactly these weights. The check compares sent tensors.
    elif weights.check is not None or not weights.are_loaded_by_the_engine:
        weights.send()
    if arguments.loop.load_debug_rollout_data is None:
        show(parallel, weights.prove_adapter())
    engine_check = build_engine_check(process, data, weights, resumed)
    show(parallel, engine_check.before_training())
    # The seconds of the set-up must not count in the first rollout.
    process.timer.take()
    report_settings(process, learner.engine)
    rollout_id = 0
    if resumed is not None:
        rollout_id = resumed.rollout_id
    run = Run(
        process=process,
        samples=samples,
        learner=learner,
        weights=weights,
        engine_check=engine_check,
        evaluation=evaluation,
        checkpointer=checkpointer,
        health=health,
        reporters=build_reporters(process, data, learner, evaluation, run_id),
        num_rollout=data.num_rollout,
        rollout_id=rollout_id,
    )
    checkpointer.health = run.health_state
    return run


def build_gate(process: Process, learner: Learner, sampler: RolloutEngine) -> OnPolicyGate:
    """Builds the comparison of log-probs of --true-on-policy."""
    assert isinstance(sampler, LocalEngine)  # other engines are refused
    return OnPolicyGate(
        locate=partial(difference_from_rollout, learner, sampler),
        advice=parity_advice(process.arguments.megatron),
    )


def build_checkpointer(
    process: Process, data: Data, weights: PolicyWeights, evaluation: Evaluation, run_id: str
) -> Checkpointer:
    """Builds the part that saves the run and restores it."""
    arguments = process.arguments
    source = None
    if isinstance(data.dataset, CustomDataSource):
        source = data.dataset
    return Checkpointer(
        config=arguments.megatron,
        weights=weights,
        evaluation=evaluation,
        data=source,
        run_id=run_id,
        options=effective_config(arguments),
        model=model_hash(arguments.megatron),
    )


def load_functions(process: Process) -> UserFunctions:
    """Loads every user function, so that an invalid function is refused before a model is built."""
    arguments = process.arguments
    check = process.interrupts.check
    rollout = arguments.rollout
    namespace = arguments.namespace
    custom_tis = None
    if arguments.custom_tis_function_path is not None:
        custom_tis = load_custom_tis(arguments.custom_tis_function_path, namespace)
    for option in ("custom_generate_function_path", "rollout_function_path", "data_source_path"):
        if getattr(rollout, option) is not None:
            load_user_function(option, getattr(rollout, option))
    return UserFunctions(
        custom_tis=custom_tis,
        objective=ObjectiveFunctions.load(arguments.policy, namespace),
        hooks=RolloutHooks.load(rollout, namespace),
        reward=build_reward(rollout, namespace, check),
        eval_reward=build_reward(rollout, namespace, check, evaluation=True),
    )


@contextmanager
def refusing_prompts() -> Iterator[None]:
    """Reports prompts that the flags do not fit as an error of the command line."""
    try:
        yield
    except CustomFunctionError:
        raise  # a ValueError too, but the user's function is wrong, not the command line
    except ValueError as error:
        raise CommandLineError(str(error)) from error


def load_data(process: Process, resumed: TrainerState | None) -> Data:
    """Loads the tokenizer and the prompts, and checks that every prompt can be scored."""
    arguments = process.arguments
    rollout = arguments.rollout
    tokenizer = load_tokenizer(arguments.megatron.hf_checkpoint)
    sizes = prompt_sizes(arguments.megatron, rollout)
    dataset: PromptDataset | CustomDataSource
    with refusing_prompts():
        if rollout.data_source_path is not None:
            dataset = CustomDataSource(
                rollout.data_source_path, arguments.namespace, tokenizer, rollout, sizes
            )
        else:
            file = rollout.prompt_data
            if rollout.disable_rollout_global_dataset:
                # The rollout function reads args.prompt_data, which may be any kind of file.
                file = None
            dataset = PromptDataset(file, tokenizer, rollout, sizes)
    first_batch = 0
    if resumed is not None:
        dataset.load_state_dict(resumed.dataset)
        first_batch = resumed.dataset[BATCH]
    with refusing_prompts():
        eval_prompts = load_evaluation_prompts(rollout, tokenizer, sizes)
        check_rewards(arguments, dataset, eval_prompts)
    num_rollout = arguments.loop.num_rollout
    if num_rollout is None:
        assert arguments.loop.num_epoch is not None  # parse_args requires one of the two
        num_rollout = max(arguments.loop.num_epoch * len(dataset) // rollout.rollout_batch_size, 1)
    return Data(
        tokenizer=tokenizer,
        sizes=sizes,
        dataset=dataset,
        eval_prompts=eval_prompts,
        num_rollout=num_rollout,
        first_batch=first_batch,
    )


def check_rewards(
    arguments: Arguments,
    dataset: PromptDataset | CustomDataSource,
    eval_prompts: dict[str, list[Prompt]],
) -> None:
    """Checks that every prompt has the label that its reward needs."""
    rollout = arguments.rollout
    if arguments.loop.load_debug_rollout_data is None:  # loaded samples have rewards
        check_prompts(rollout, dataset.prompts)
    for name, prompts in eval_prompts.items():
        flags = f"--label-key or --eval-label-key (--eval-prompt-data {name})"
        check_prompts(rollout, prompts, flags)
    user_functions = (
        rollout.data_source_path,
        rollout.rollout_function_path,
        rollout.custom_generate_function_path,
    )
    # A user function may choose the server for each sample.
    if user_functions == (None, None, None):
        check_reward_server(rollout, [*dataset.prompts, *chain(*eval_prompts.values())])


def check_equal_precision(arguments: Arguments) -> None:
    """Checks that --bf16-if-fast chose the same precision on every rank; a collective.

    Raises:
        ValueError: Ranks differ.
    """
    if not arguments.megatron.bf16_if_fast:
        return
    precisions = set(on_every_rank(lambda: arguments.megatron.precision))
    if len(precisions) > 1:
        raise ValueError(
            "--bf16-if-fast chose bf16 on some ranks and float32 on others, whose processors"
            " differ; add --bf16 or --no-bf16."
        )


def shared_kernels(process: Process) -> Kernels | None:
    """Chooses the operations of --true-on-policy, and tests them on this machine; a collective.

    Raises:
        ValueError: The machine has a GPU, an operation depends on the batch, or ranks differ.
    """
    arguments = process.arguments
    parallel = process.parallel
    if not arguments.rollout.true_on_policy:
        return None
    if parallel.device.type != "cpu":
        raise ValueError(
            "--true-on-policy has operations for a CPU, and this process has a GPU; hide it with"
            " CUDA_VISIBLE_DEVICES='', or remove the flag."
        )
    hf = read_hf_config(arguments.megatron.hf_checkpoint)
    shapes = invariant_shapes(hf, parallel.tensor_size)
    dtype = DTYPES[arguments.megatron.precision]
    start = time.process_time()
    choices = on_every_rank(lambda: choose_kernels(shapes, dtype))
    if any(choice != choices[0] for choice in choices):
        raise ValueError(
            "--true-on-policy: the processors of the ranks add in different orders; start all ranks"
            " on machines of one type with the same --num-threads."
        )
    if parallel.is_main:
        seconds = time.process_time() - start
        print(f"true on-policy: {choices[0]} (tested in {seconds:.1f} s of CPU time)", flush=True)
    return choices[0]


def build_learner(
    process: Process, functions: UserFunctions, data: Data, kernels: Kernels | None
) -> Learner:
    """Builds the training engine and the learner."""
    arguments = process.arguments
    rollout = arguments.rollout
    steps = steps_per_rollout(arguments)

    def check_interrupts() -> None:
        # One of several ranks must not stop without the others.
        if process.parallel.size == 1:
            process.interrupts.check()

    engine = TrainingEngine(
        arguments.megatron,
        process.parallel,
        temperature=rollout.rollout_temperature,
        total_steps=data.num_rollout * steps,
        keep_reference=arguments.policy.needs_reference,
        saves_reference=arguments.policy.ref_update_interval is not None,
        entropy_gradient=arguments.policy.entropy_coef != 0,
        gives_logits=functions.objective.loss is not None,
        kernels=kernels,
        timer=process.timer,
        check_interrupts=check_interrupts,
    )
    return Learner(
        engine=engine,
        correction=arguments.correction,
        policy=arguments.policy,
        steps_per_rollout=steps,
        rollout=rollout,
        custom_tis=functions.custom_tis,
        functions=functions.objective,
        after_step=process.interrupts.keep,
    )


def open_dump(process: Process, run_id: str, sampler: RolloutEngine) -> TrainDump | None:
    """Returns the writer of --save-debug-train-data, None without the flag; a collective."""
    arguments = process.arguments
    parallel = process.parallel
    pattern = arguments.loop.save_debug_train_data
    if pattern is None:
        return None
    rollout = arguments.rollout
    rollout_precision: str | None = rollout.rollout_precision
    if rollout.rollout_engine != "local":
        # Servers may choose their precision themselves.
        rollout_precision = on_rank_zero(lambda: sampler.weight_precision(ATTENTION))
    num_experts = 0
    moe = moe_sizes(load_config(arguments.megatron.hf_checkpoint))
    if moe is not None:
        num_experts = moe.num_experts
    steps = steps_per_rollout(arguments)
    settings = DumpSettings(
        pattern=pattern,
        correction=arguments.correction,
        has_custom_function=arguments.custom_tis_function_path is not None,
        recomputes_old_policy=needs_old_log_probs(arguments.correction, steps, arguments.policy),
        metadata={
            "source": "slime_tis",
            "run": run_id,
            "workers": list(sampler.workers),
            "old_policy": old_policy_name(arguments.correction, steps),
            "flags": changed_fields(arguments.correction),
            "policy": changed_fields(arguments.policy),
            "precision": arguments.megatron.precision,
            "rollout_precision": rollout_precision,
            "num_experts": num_experts,
            "replays_experts": rollout.use_rollout_routing_replay,
            "temperature": rollout.rollout_temperature,
            "tokenizer": str(Path(arguments.megatron.hf_checkpoint).resolve()),
        },
    )
    if parallel.data_size > 1 and settings.path(0, 0) == settings.path(0, 1):
        raise ValueError(
            f"--save-debug-train-data is {quoted_path(pattern)}, one file for {parallel.data_size}"
            " data-parallel ranks; add {rank} to the name."
        )
    dump = TrainDump(settings, parallel.rank)
    process.close_at_end(dump)
    return dump


def steps_per_rollout(arguments: Arguments) -> int:
    """Returns the number of optimizer steps per rollout."""
    assert arguments.loop.num_steps_per_rollout is not None  # parse_args derives it
    return arguments.loop.num_steps_per_rollout


def build_sampler(
    process: Process, data: Data, weights: PolicyWeights, kernels: Kernels | None
) -> RolloutEngine:
    """Builds the rollout engine."""
    arguments = process.arguments
    host = EngineHost(
        hf_checkpoint=arguments.megatron.hf_checkpoint,
        weights=weights.tensors,
        weights_version=weights.version,
        output_dir=Path(arguments.reporting.output_dir),
        dtype=DTYPES[arguments.megatron.precision],
        kernels=kernels,
        adapter=weights.unmerged_adapter,
        device=process.parallel.device,
        check_interrupts=process.interrupts.check,
    )
    sampler = build_engine(arguments.rollout, arguments.servers, data.tokenizer, host)
    process.close_at_end(sampler)
    return sampler


def build_engine_check(
    process: Process, data: Data, weights: PolicyWeights, resumed: TrainerState | None
) -> EngineCheck:
    """Builds the comparison of both engines.

    It is skipped when resuming, for debug rollouts and for loaded rollouts.
    """
    arguments = process.arguments
    rollout = arguments.rollout
    loop = arguments.loop
    has_other_rollouts = loop.load_debug_rollout_data is not None or loop.debug_rollout_only
    mode = rollout.check_engines
    if resumed is not None or has_other_rollouts:
        mode = "off"
    return EngineCheck(
        mode=mode,
        learner=weights.learner,
        sampler=weights.sampler,
        prompts=data.dataset.prompts,
        path=Path(arguments.reporting.output_dir) / "engine_check.pt",
        rollout_engine=rollout.rollout_engine,
        repeats=rollout.rollout_engine != "local",
    )


def build_samples(
    process: Process,
    functions: UserFunctions,
    data: Data,
    sampler: RolloutEngine,
    generate: GenerateFunction | None,
) -> SampleSource:
    """Builds the path of samples from the rollout engine to the learner."""
    arguments = process.arguments
    dataset = data.dataset
    rollout = arguments.rollout
    unfinished = Unfinished(engine=sampler, choose=functions.hooks.choose)

    def submit(prompts: list[Prompt], number: int) -> RolloutFuture:
        sampling = training_sampling(rollout)
        function = None
        if generate is not None:
            function = generate.bind(sampling)
        num_groups = None
        if rollout.partial_rollout:
            num_groups = rollout.rollout_batch_size
        return sampler.submit(
            prompts,
            sampling,
            # Numbers are below 2^32, so runs with different seeds share the seed of no batch.
            seed=(rollout.rollout_seed << 32) + number,
            function=function,
            concurrency=rollout.generate_concurrency,
            num_groups=num_groups,
        )

    def new_prompts() -> int:
        """Returns the number of new prompts of the next batch; unfinished groups fill the rest."""
        size = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        return size - unfinished.take(size)

    rollout_function = build_generate_function(
        rollout,
        arguments.namespace,
        data.tokenizer,
        sizes=data.sizes,
        version=lambda: sampler.weight_version,
        address=sampler.http_address,
        option="rollout_function_path",
    )
    # Functions written for slime use methods that only the user's object has.
    data_source: object = dataset
    if isinstance(dataset, CustomDataSource):
        data_source = dataset.source
    custom_rollout = None
    if rollout_function is not None:
        custom_rollout = CustomRollout(checks=rollout_function, dataset=dataset, config=rollout)
    return SampleSource(
        arguments=arguments,
        is_main=process.parallel.is_main,
        timer=process.timer,
        sizes=model_sizes(read_model_config(arguments.megatron.hf_checkpoint)),
        sampler=sampler,
        prefetcher=Prefetcher(
            dataset,
            submit,
            prompts=new_prompts,
            depth=rollout.rollout_lookahead,
            number=data.first_batch,
        ),
        unfinished=unfinished,
        custom_rollout=custom_rollout,
        reward=functions.reward,
        hooks=functions.hooks,
        data_source=data_source,
        num_rollout=data.num_rollout,
    )


def build_evaluation(
    process: Process,
    functions: UserFunctions,
    data: Data,
    weights: PolicyWeights,
    generate: GenerateFunction | None,
) -> Evaluation:
    """Builds the evaluation on held-out prompts.

    The rollout engine samples the answers, or an in-process engine with unrounded weights.
    """
    config = process.arguments.rollout
    megatron = process.arguments.megatron

    def answering_engine() -> RolloutEngine:
        """Returns the engine that answers held-out prompts."""
        if not config.evaluates_locally:
            return weights.sampler
        return LocalEngine(
            megatron.hf_checkpoint,
            data.tokenizer,
            precision=megatron.precision,
            device=process.parallel.device,
            check_interrupts=process.interrupts.check,
        )

    return Evaluation(
        prompts=data.eval_prompts,
        reward=functions.eval_reward,
        logs=functions.hooks.logs_evaluation,
        config=config,
        engine=weights.learner.engine,
        build_engine=answering_engine,
        shows_progress=process.parallel.is_main and process.arguments.reporting.progress,
        generate=generate,
    )


def build_reporters(
    process: Process, data: Data, learner: Learner, evaluation: Evaluation, run_id: str
) -> Reporter:
    """Opens the reporters of metrics; only the main rank has any."""
    arguments = process.arguments
    if not process.parallel.is_main:
        return Reporters(())
    resume_step = 0
    if learner.step:
        resume_step = learner.step + 1
    reporters = open_reporters(
        arguments.reporting,
        options_in_force(arguments),
        total_steps=data.num_rollout * steps_per_rollout(arguments),
        resume_step=resume_step,
        evaluates_again=evaluation.is_overdue,
        run=run_id,
    )
    process.close_at_end(reporters)
    return reporters


def report_settings(process: Process, engine: TrainingEngine) -> None:
    """Prints settings that the training engine derived."""
    if not process.parallel.is_main:
        return
    budget = engine.token_budget
    if budget is not None and budget.reason is not None:
        print_line(f"micro-batches: {budget}")
    if process.arguments.megatron.share_prompts is None and not engine.shares_prompts:
        print_line(f"shared prompts: off ({engine.no_shared_prompts})")
    selected = process.arguments.megatron.selected_weights
    if selected is not None:
        option, _ = selected
        trained, total = engine.parameter_counts()
        print_line(
            f"trained weights: {trained:,} of {total:,} parameters on rank 0 ({flag(option)})"
        )
    settings = lora_settings(process.arguments.megatron)
    if settings is not None:
        trained, total = engine.parameter_counts()
        print_line(
            f"LoRA adapters: rank {settings.rank}, alpha {settings.alpha:g},"
            f" {', '.join(settings.targets)}; {trained:,} trained and {total - trained:,} frozen"
            " parameters on rank 0"
        )
        oversized = oversized_targets(engine.model.module, settings.rank)
        if oversized:
            print_line(
                f"warning: the LoRA rank {settings.rank} is above the smaller side of"
                f" {', '.join(oversized)}; a smaller rank reaches every change of these matrices.",
                sys.stderr,
            )
