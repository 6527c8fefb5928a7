"""Time and peak memory of the parts of a training run against its sizes, one size varied at a time.

    python -m benchmarks.growth [--parts NAME …] [--factors NAME …] [--rounds 5]
    python -m benchmarks.growth --draw

CPU time of one thread; every round measures all levels of a factor, and a row has the median. Peak memory is the
additional memory during a call, as Linux counts it. The work is the unavoidable number of tokens, floating-point
operations or bytes. Appends rows to growth.csv, and prints for each part and factor the exponents at the last levels:
time, memory and work ~ size^exponent. `--draw` draws growth.png from the latest rows.
"""

import argparse
import asyncio
import csv
import itertools
import json
import math
import platform
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import commit, machine
from benchmarks.shared_prompts import peak_mib
from custom_tis import mis
from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.hf_directory import ModelSizes
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import CustomTis
from slime_tis.policy.policy_loss import LossInputs, LossStep, policy_loss
from slime_tis.policy.step_sums import StepSums, step_metrics
from slime_tis.trainer.agents.custom_generate import build_generate_function
from slime_tis.trainer.data.dump import from_dict, to_dict
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.functions import FunctionBatch, resumed_groups
from slime_tis.trainer.engines.generation import Generation, Request, TokenEngine
from slime_tis.trainer.engines.local.engine import LocalEngine
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.megatron.micro_batches import PrefixTree, token_budget_partitions
from slime_tis.trainer.megatron.packing import pack
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.options.megatron import MegatronConfig
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.rewards.rewards import build_reward
from slime_tis.trainer.rollout.metrics import rollout_metrics
from slime_tis.trainer.step import advantages_of, training_batch
from slime_tis.trainer.train_dump import DumpSettings, StepDump, table_of
from tests.checkpoints import make_checkpoint, make_tokenizer

TABLE, PLOT = Path(__file__).with_suffix(".csv"), Path(__file__).with_suffix(".png")
BUDGET = 8192
"""Tokens of a micro-batch."""
HIDDEN, INNER, LAYERS, HEADS = 64, 192, 2, 4
TILE = 2**21
"""Logits that exist at a time."""
EXPONENTIAL = 16
"""Operations that an exponential and what belongs to it count as."""
LAYER_WEIGHTS = LAYERS * (3 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)  # as many keys and values as half of the queries
CORRECTION = RolloutCorrectionConfig(
    use_tis=True, tis_batch_normalize=True, use_rs=True, rs_level="geometric", rs_lower_bound=1e-12, rs_upper_bound=1e12
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a rollout; an agent's rollout has several turns of `response_tokens` each."""

    prompts: int
    samples: int = 4
    prompt_tokens: int
    response_tokens: int
    vocabulary: int = 1024
    turns: int = 1

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def responses(self) -> int:
        """Response tokens."""
        return self.sequences * self.response_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)

    @property
    def computed(self) -> int:
        """Tokens of the model's passes: each prompt once."""
        return self.prompts * self.prompt_tokens + self.responses

    @property
    def pairs(self) -> float:
        """Queries times the keys that they see."""
        prompt, response = self.prompt_tokens, self.response_tokens
        return self.prompts * (prompt**2 / 2 + self.samples * (response * prompt + response**2 / 2))

    @property
    def forward(self) -> float:
        """Floating-point operations of a forward pass with logits for response tokens only."""
        layers = 2 * LAYER_WEIGHTS * self.computed + (4 * HIDDEN + HEADS * EXPONENTIAL) * LAYERS * self.pairs
        return layers + (2 * HIDDEN + EXPONENTIAL) * self.vocabulary * self.responses

    @property
    def weights(self) -> int:
        return LAYER_WEIGHTS + 2 * self.vocabulary * HIDDEN


LIBRARY = Size(prompts=16, prompt_tokens=128, response_tokens=512)
"""The middle of the parts without a model."""
MODEL = Size(prompts=4, prompt_tokens=64, response_tokens=64, vocabulary=2048)
"""The middle of those with one."""
AGENT = Size(prompts=2, samples=2, prompt_tokens=64, response_tokens=16, turns=8)

FACTORS = {
    "samples per prompt": "samples",
    "prompt tokens": "prompt_tokens",
    "response tokens": "response_tokens",
    "sequences": "prompts",
    "vocabulary": "vocabulary",
    "turns": "turns",
}
"""Name of a factor to the field of `Size` that is varied; sequences are varied by their prompts."""
LIBRARY_LEVELS = {
    "samples per prompt": (1, 2, 4, 8, 16, 32),
    "prompt tokens": (32, 128, 512, 2048, 8192),
    "response tokens": (32, 128, 512, 2048, 8192, 32768),
    "sequences": (4, 16, 64, 256, 1024),
}
MODEL_LEVELS = {
    "samples per prompt": (1, 2, 4, 8, 16, 32),
    "prompt tokens": (32, 128, 512, 2048),
    "response tokens": (32, 128, 512, 1024),
    "sequences": (2, 8, 32, 128),
    "vocabulary": (1024, 4096, 16384, 65536),
}
TURN_LEVELS = {"turns": (2, 8, 32, 128)}


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is measured."""

    prepare: Callable[[Size], Callable[[], object]]
    """Makes the inputs of a size; the call is what is measured."""
    work: Callable[[Size], float]
    memory: Callable[[Size], float] | None = None
    """What a call has to hold; None for the work."""
    middle: Size = LIBRARY
    levels: dict[str, tuple[int, ...]] = field(default_factory=lambda: LIBRARY_LEVELS)


# Inputs


@cache
def groups_of(size: Size) -> list[list[Sample]]:
    """Scored groups with random tokens and log-probs."""
    draw = torch.Generator().manual_seed(0)
    characters = range(3, min(size.vocabulary, 60))

    def tokens(count: int) -> list[int]:
        return torch.randint(characters.start, characters.stop, (count,), generator=draw).tolist()

    found: list[list[Sample]] = []
    for group in range(size.prompts):
        ids = tuple(tokens(size.prompt_tokens))
        prompt = Prompt(index=group, text="text " * (size.prompt_tokens // 5), token_ids=ids, label="12")
        found.append([])
        for place in range(size.samples):
            number = group * size.samples + place
            log_probs = -torch.rand(size.response_tokens, generator=draw) - 0.1
            found[-1].append(
                Sample(
                    prompt=prompt,
                    group_index=group,
                    index=number,
                    rollout_id=number,
                    tokens=[*ids, *tokens(size.response_tokens)],
                    response="so 3 + 9 is " * (size.response_tokens // 12) + "12",
                    response_length=size.response_tokens,
                    reward=float(place % 2),
                    rollout_log_probs=log_probs.tolist(),
                    loss_mask=[1] * size.response_tokens,
                    weight_versions=[0] * size.response_tokens,
                    status=Sample.Status.COMPLETED,
                )
            )
    return found


def samples_of(size: Size) -> list[Sample]:
    return [sample for group in groups_of(size) for sample in group]


@cache
def parallel() -> Any:
    return initialize(MegatronConfig(hf_checkpoint=str(checkpoint(1024)), micro_batch_size=1))


CHECKPOINTS = tempfile.TemporaryDirectory()


@cache
def checkpoint(vocabulary: int) -> Path:
    path = Path(CHECKPOINTS.name) / str(vocabulary)
    sizes = {"vocab_size": vocabulary, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 16384}
    return make_checkpoint(path, "llama", **sizes, **heads)


class Clock:
    """Adds up the CPU time of the training step's parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start


@cache
def learner_of(vocabulary: int) -> tuple[Learner, Clock]:
    clock = Clock()
    config = MegatronConfig(
        hf_checkpoint=str(checkpoint(vocabulary)), use_dynamic_batch_size=True, max_tokens_per_gpu=BUDGET
    )
    engine = TrainingEngine(config, parallel(), temperature=1.0, total_steps=1000, timer=clock)
    learner = Learner(
        engine=engine,
        correction=CORRECTION,
        policy=PolicyConfig(),
        rollout=RolloutConfig(prompt_data="p", rollout_batch_size=1, rollout_max_response_len=1),
        steps_per_rollout=1,
    )
    return learner, clock


@cache
def local_engine(vocabulary: int) -> LocalEngine:
    engine = LocalEngine(checkpoint(vocabulary), make_tokenizer())
    engine._eos_token_ids = [vocabulary]  # responses are as long as they may be
    return engine


# Parts


def training_step(size: Size) -> Callable[[], dict[str, float]]:
    """Seconds of the parts of a step; the empty name stands for everything else."""
    learner, clock = learner_of(size.vocabulary)
    groups, given = groups_of(size), advantages_where_alone(size)

    def call() -> dict[str, float]:
        clock.seconds = {}
        start = time.process_time()
        learner.train(groups, given)
        total = time.process_time() - start
        inner = {name: clock.seconds[name] for name in STEP_PARTS.values() if name in clock.seconds}
        return {"training step": total, **inner, "": total - sum(inner.values())}

    return call


STEP_PARTS = {
    "old log-probs": "old_log_probs",
    "forward and backward": "forward_backward",
    "optimizer": "optimizer_step",
    "metrics": "metrics",
}


def correction_of_lists(size: Size) -> Callable[[], object]:
    train, rollout, masks = log_prob_lists(size)
    return lambda: correct(CORRECTION, train, rollout, masks).statistics.metrics()


def correction_of_packed(level: str, size: Size) -> Callable[[], object]:
    train, rollout, masks = (torch.cat(values) for values in log_prob_lists(size))
    lengths = [size.response_tokens] * size.sequences
    config = replace(CORRECTION, tis_level=level)
    return lambda: correct(config, train, rollout, masks, lengths=lengths).statistics.metrics()


def log_prob_lists(size: Size) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    rollout = [torch.tensor(sample.rollout_log_probs) for sample in samples_of(size)]
    train = [values + 0.02 * torch.randn(len(values)) for values in rollout]
    return train, rollout, [torch.ones(len(values)) for values in rollout]


def loss_of_micro_batches(size: Size, custom: bool = False) -> Callable[[], object]:
    """The policy loss of all micro-batches with its gradient, and the metrics of the step."""
    tree = PrefixTree.apart([size.response_tokens] * size.sequences, [size.response_tokens] * size.sequences)
    (parts,) = token_budget_partitions([tree], BUDGET)
    batch = training_batch(samples_of(size), parallel())
    log_probs_L = batch.responses.rollout_log_probs_L + 0.01
    batch = batch.with_advantages([1.0] * size.sequences).with_token_values(old_log_probs_L=log_probs_L)
    namespace = Namespace(
        use_tis=True, tis_mode="truncate", tis_level="token", tis_lower_bound=None, tis_upper_bound=2.0, use_rs=False
    )
    function = mis.compute_mis_weights_with_cp

    def call() -> dict[str, float]:
        tis = CustomTis(function=function, args=namespace, seed=0) if custom else None
        step = LossStep(correction=CORRECTION, policy=PolicyConfig(), uses_recomputed_old_policy=True, custom=tis)
        total: StepSums | None = None
        for samples in parts:
            tokens = batch.select(samples).responses
            given = tokens.rollout_log_probs_L.clone().requires_grad_()
            outputs = policy_loss(LossInputs(tokens=tokens, log_probs_L=given, entropy_L=given.detach()), step)
            outputs.numerator.backward()  # type: ignore[no-untyped-call]
            total = outputs.sums if total is None else total.merge(outputs.sums)
        assert total is not None
        return step_metrics(total, CORRECTION, step.policy)

    return call


def batch_and_partition(size: Size) -> tuple[Any, list[list[int]]]:
    samples = samples_of(size)
    tree = PrefixTree.of([sample.tokens for sample in samples], [size.response_tokens] * len(samples))
    (parts,) = token_budget_partitions([tree], BUDGET)
    return training_batch(samples, parallel()), parts


def planning(size: Size) -> Callable[[], object]:
    samples = samples_of(size)

    def call() -> object:
        tree = PrefixTree.of([sample.tokens for sample in samples], [size.response_tokens] * len(samples))
        return token_budget_partitions([tree], BUDGET)

    return call


def planning_of_single_samples(size: Size) -> Callable[[], object]:
    """A micro-batch for each sequence."""
    lengths = [size.prompt_tokens + size.response_tokens] * size.sequences
    tree = PrefixTree.apart(lengths, [size.response_tokens] * size.sequences)
    return lambda: token_budget_partitions([tree], lengths[0])


def packing(size: Size) -> Callable[[], object]:
    batch, parts = batch_and_partition(size)

    def call() -> None:
        for samples in parts:
            pack(batch.select(samples), share_prompts=True)

    return call


def tensors(size: Size) -> Callable[[], object]:
    samples = samples_of(size)
    parallel()
    return lambda: training_batch(samples, parallel())


def rewards(size: Size) -> Callable[[], object]:
    samples = samples_of(size)
    config = RolloutConfig(prompt_data="p", rollout_batch_size=1, rollout_max_response_len=1, rm_type="math")
    reward = build_reward(config)
    return lambda: reward(samples)


def metrics_of_rollout(size: Size) -> Callable[[], object]:
    groups, given = groups_of(size), advantages_where_alone(size)
    return lambda: (rollout_metrics(groups, 1), advantages_of(groups, None, PolicyConfig(), given))


def advantages_where_alone(size: Size) -> list[float] | None:
    """Advantages where a prompt has one sample, with which the estimator could compare nothing."""
    return [1.0] * size.sequences if size.samples == 1 else None


def samples_as_json(size: Size) -> Callable[[], object]:
    samples = samples_of(size)

    def call() -> None:
        for sample in samples:
            from_dict(json.loads(json.dumps(to_dict(sample))))

    return call


def dump_of_tokens(size: Size) -> Callable[[], object]:
    samples = samples_of(size)
    metadata = {"source": "slime_tis", "old_policy": "current"}
    settings = DumpSettings(pattern="", correction=CORRECTION, has_custom_function=False, metadata=metadata)
    batch = training_batch(samples, parallel())
    record = batch.responses.rollout_log_probs_L[:, None].expand(-1, 6).contiguous()
    from slime_tis.correction import GlobalBatch

    step = StepDump(
        samples=samples, advantages=[1.0] * len(samples), record_N=record, step=0, global_batch=GlobalBatch()
    )
    return lambda: table_of(step, settings)


def sampling(size: Size) -> Callable[[], object]:
    engine, prompts = local_engine(size.vocabulary), [group[0].row for group in groups_of(size)]
    options = Sampling(max_response_len=size.response_tokens, n_samples=size.samples)
    return lambda: engine.generate(prompts, options, 0)


def functions_on_engine(size: Size) -> Callable[[], object]:
    engine, prompts = local_engine(size.vocabulary), [group[0].row for group in groups_of(size)]
    options = Sampling(max_response_len=size.response_tokens, n_samples=size.samples)

    async def play(sample: Sample, asked: TokenEngine) -> list[Sample]:
        answer = await asked.generate(sample.tokens)
        sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs)
        return [sample]

    return lambda: engine.submit(prompts, options, 0, function=play, concurrency=256).result()


def calls_of_functions(size: Size) -> Callable[[], object]:
    """Bookkeeping of calls: an engine that answers at once."""
    prompts = [group[0].row for group in groups_of(size)]
    answered = [Generation(token_ids=[5], log_probs=[-1.0], weight_versions=[0], finish_reason="length", text="a")]

    async def answer(request: Request) -> Generation:
        await asyncio.sleep(0)
        return answered[0]

    async def play(sample: Sample, asked: TokenEngine) -> list[Sample]:
        found = await asked.generate(sample.tokens)
        sample.append_response_tokens(tokens=found.token_ids, log_probs=found.log_probs)
        return [sample]

    def call() -> None:
        groups = resumed_groups([], prompts, size.samples, 0)
        batch = FunctionBatch(
            groups, play, answer, Sampling(max_response_len=1), concurrency=256, vocab_size=size.vocabulary
        )
        asyncio.run(batch.run())

    return call


def episodes(size: Size, segments: bool) -> Callable[[], object]:
    """Calls of a generate function with several turns, checked against what the engine sampled."""
    prompts = [group[0].row for group in groups_of(size)]
    draw = random.Random(0)
    answers = itertools.cycle([[draw.randrange(3, 60) for _ in range(size.response_tokens)] for _ in range(97)])

    async def answer(request: Request) -> Generation:
        ids = next(answers)
        count = len(ids)
        return Generation(
            token_ids=ids, log_probs=[-1.0] * count, weight_versions=[0] * count, finish_reason="stop", text="a" * count
        )

    async def play(args: Namespace, sample: Sample, sampling_params: dict[str, Any], engine: TokenEngine) -> Any:
        found = []
        for _ in range(size.turns):
            out = await engine.generate(sample.tokens)
            before = list(sample.tokens)
            sample.append_response_tokens(tokens=out.token_ids, log_probs=out.log_probs, text=out.text)
            if segments:
                one = Sample(prompt=sample.prompt, tokens=before)
                one.append_response_tokens(tokens=out.token_ids, log_probs=out.log_probs, text=out.text)
                found.append(one)
        return found or sample

    config = RolloutConfig(
        prompt_data="p", rollout_batch_size=2, rollout_max_response_len=64,
        custom_generate_function_path="benchmarks.growth.generate",
    )  # fmt: skip
    function = build_generate_function(
        config, Namespace(reward_key=None), make_tokenizer(),
        sizes=ModelSizes(vocab_size=size.vocabulary, context_len=None), version=lambda: 0, address=("127.0.0.1", 0),
    )  # fmt: skip
    assert function is not None
    bound = replace(function, function=play).bind(Sampling(max_response_len=64))

    def call() -> None:
        groups = resumed_groups([], prompts, size.samples, 0)
        options = Sampling(max_response_len=64)
        asyncio.run(FunctionBatch(groups, bound, answer, options, concurrency=8, vocab_size=None).run())
        assert not any(sample.failure for group in groups for made in group for sample in made.samples)

    return call


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any], engine: TokenEngine) -> Sample:
    """Stands for the function that `episodes` puts into its place."""
    raise NotImplementedError


def inputs_of_turns(size: Size) -> float:
    """Tokens of all requests of a rollout: each turn hands over the turns before it."""
    turns = size.turns
    return size.sequences * turns * (size.prompt_tokens + size.response_tokens * (turns + 1) / 2)


def of_budget(tokens: Callable[[Size], float]) -> Callable[[Size], float]:
    """What a micro-batch holds: no more than its budget, or its longest sequence."""
    return lambda size: min(tokens(size), max(BUDGET, size.prompt_tokens + size.response_tokens))


def held_by_a_step(size: Size) -> float:
    """Numbers: activations of the largest micro-batch, a gradient of the weights, and a tile of logits."""
    tokens = of_budget(lambda one: one.computed)(size)
    return tokens * (LAYERS * (12.5 * HIDDEN + 4 * INNER) + 3 * HIDDEN) + size.weights + TILE


MODEL_OPTIONS: dict[str, Any] = {"middle": MODEL, "levels": MODEL_LEVELS}
AGENT_OPTIONS: dict[str, Any] = {"middle": AGENT, "levels": TURN_LEVELS}
PARTS: dict[str, Part] = {
    "training step": Part(
        prepare=training_step,
        work=lambda size: 4 * size.forward,
        memory=held_by_a_step,
        **MODEL_OPTIONS,
    ),
    "local engine": Part(
        prepare=sampling, work=lambda size: size.forward, memory=lambda size: size.tokens, **MODEL_OPTIONS
    ),
    "local engine, functions": Part(
        prepare=functions_on_engine, work=lambda size: size.forward, memory=lambda size: size.tokens, **MODEL_OPTIONS
    ),
    "correction, lists": Part(prepare=correction_of_lists, work=lambda size: size.responses),
    "correction, token level": Part(
        prepare=partial(correction_of_packed, "token"), work=lambda size: size.responses
    ),
    "correction, sequence level": Part(
        prepare=partial(correction_of_packed, "sequence"), work=lambda size: size.responses
    ),
    "policy loss": Part(
        prepare=loss_of_micro_batches, work=lambda size: size.responses, memory=of_budget(lambda size: size.responses)
    ),
    "policy loss, custom TIS": Part(
        prepare=partial(loss_of_micro_batches, custom=True),
        work=lambda size: size.responses,
        memory=of_budget(lambda size: size.responses),
    ),
    "batch": Part(prepare=tensors, work=lambda size: size.tokens),
    "micro-batches": Part(prepare=planning, work=lambda size: size.tokens),
    "micro-batches of one": Part(prepare=planning_of_single_samples, work=lambda size: size.sequences),
    "packing": Part(
        prepare=packing, work=lambda size: size.tokens, memory=of_budget(lambda size: size.computed)
    ),
    "rewards": Part(prepare=rewards, work=lambda size: size.responses),
    "metrics of a rollout": Part(prepare=metrics_of_rollout, work=lambda size: size.responses),
    "samples as JSON": Part(
        prepare=samples_as_json, work=lambda size: size.tokens, memory=lambda size: size.tokens / size.sequences
    ),
    "dump of tokens": Part(prepare=dump_of_tokens, work=lambda size: size.tokens),
    "calls of functions": Part(prepare=calls_of_functions, work=lambda size: size.sequences * size.prompt_tokens),
    "episodes": Part(
        prepare=partial(episodes, segments=False), work=inputs_of_turns,
        memory=inputs_of_turns, **AGENT_OPTIONS,
    ),
    "episodes, a segment per turn": Part(
        prepare=partial(episodes, segments=True), work=inputs_of_turns,
        memory=inputs_of_turns, **AGENT_OPTIONS,
    ),
}  # fmt: skip


# Measuring


def measure(name: str, factor: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of a part and a factor."""
    part = PARTS[name]
    sizes = [replace(part.middle, **{FACTORS[factor]: level}) for level in part.levels[factor]]
    calls = [part.prepare(size) for size in sizes]
    repeats = [max(1, int(0.02 / max(seconds(call, 1)["training step"], 1e-6))) for call in calls]
    taken: list[list[dict[str, float]]] = [[] for _ in sizes]
    for _ in range(rounds):
        for own, call, repeat in zip(taken, calls, repeats, strict=True):
            own.append(seconds(call, repeat))
    rows = []
    for size, call, own in zip(sizes, calls, taken, strict=True):
        peak = peak_mib(call)
        for key, of_key in step_parts(name, own).items():
            rows.append(row_of(key, factor, size, of_key, peak if key == name else None))
    return rows


def step_parts(name: str, own: list[dict[str, float]]) -> dict[str, list[float]]:
    """Seconds of each round; of a training step, also the seconds of its parts."""
    if name != "training step":
        return {name: [one["training step"] for one in own]}
    names = {name: name, **STEP_PARTS, "around them": ""}
    return {shown: [one.get(key, 0.0) for one in own] for shown, key in names.items()}


def seconds(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """CPU time of a call, of a training step with its parts."""
    start = time.process_time()
    for _ in range(repeats):
        returned = call()
    taken = (time.process_time() - start) / repeats
    return returned if isinstance(returned, dict) and "training step" in returned else {"training step": taken}


WORK_OF_STEP_PARTS: dict[str, Callable[[Size], float]] = {
    "old log-probs": lambda size: size.forward,
    "forward and backward": lambda size: 3 * size.forward,
    "optimizer": lambda size: size.weights,
    "metrics": lambda size: 1.0,
    "around them": lambda size: size.tokens,
}


def row_of(name: str, factor: str, size: Size, taken: list[float], peak: float | None) -> dict[str, Any]:
    part = PARTS.get(name)
    work = WORK_OF_STEP_PARTS[name] if part is None else part.work
    holds = None if part is None or peak is None else (part.memory or part.work)(size)
    return {
        "date": date.today().isoformat(),
        "machine": machine(),
        "threads": 1,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "part": name,
        "factor": factor,
        "level": size.sequences if factor == "sequences" else getattr(size, FACTORS[factor]),
        "sequences": size.sequences,
        "samples_per_prompt": size.samples,
        "prompt_tokens": size.prompt_tokens,
        "response_tokens": size.response_tokens,
        "vocabulary": size.vocabulary,
        "turns": size.turns,
        "rounds": len(taken),
        "median_s": float(f"{statistics.median(taken):.4g}"),
        "work": float(f"{work(size):.6g}"),
        "peak_mib": "" if peak is None else round(peak, 2),
        "memory_work": "" if holds is None else float(f"{holds:.6g}"),
    }


# What the rows show

SMALL_S, SMALL_MIB = 2e-4, 2.0
"""Below these nothing but overhead is measured."""
LAST = 3
"""Levels that an exponent is fitted to: the largest, where constant costs weigh least."""


def exponent(levels: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log value over log level, by least squares."""
    x, y = ([math.log(value) for value in part] for part in (levels, values))
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The exponents of a part and a factor."""

    time: float
    work: float
    memory: float | None
    memory_work: float | None


def growth_of(rows: Sequence[dict[str, Any]]) -> Growth:
    """Of the rows of one part and one factor."""
    last = sorted(rows, key=lambda row: float(row["level"]))[-LAST:]
    levels = [float(row["level"]) for row in last]

    def fitted(column: str, least: float) -> float:
        return exponent(levels, [max(float(row[column]), least) for row in last])

    has_memory = all(row["peak_mib"] != "" for row in last)
    return Growth(
        time=fitted("median_s", SMALL_S),
        work=fitted("work", 1e-9),
        memory=fitted("peak_mib", SMALL_MIB) if has_memory else None,
        memory_work=fitted("memory_work", 1e-9) if has_memory else None,
    )


def by_part_and_factor(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows that were written last of each part, factor and level."""
    found: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["part"], row["factor"]), {})[float(row["level"])] = row
    return {key: list(of_levels.values()) for key, of_levels in found.items()}


def report(rows: Sequence[dict[str, Any]]) -> None:
    """One line for each part and factor."""
    print(f"{'part':30} {'factor':20} {'time':>6} {'work':>6}   {'memory':>6} {'work':>6}")
    for (part, factor), own in by_part_and_factor(rows).items():
        found = growth_of(own)
        faster = found.time > found.work + 0.15
        memory = "" if found.memory is None else f"{found.memory:6.2f} {found.memory_work:6.2f}"
        if found.memory is not None and found.memory_work is not None and found.memory > found.memory_work + 0.15:
            memory += " <-"
        ordered = sorted(own, key=lambda row: float(row["level"]))
        top = f"{float(ordered[-1]['median_s']):.4g} s {ordered[-1]['peak_mib']} MiB"
        print(f"{part:30} {factor:20} {found.time:6.2f} {found.work:6.2f} {'<-' if faster else '  '} {memory:17} {top}")


def draw(rows: Sequence[dict[str, Any]]) -> None:
    """One picture for each factor: times of every part, with its exponent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = by_part_and_factor(rows)
    colours = {part: pyplot.get_cmap("turbo")(place / len(SHOWN)) for place, part in enumerate(SHOWN)}
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 12), layout="constrained")
    for axis, factor in zip(axes.flat, FACTORS, strict=True):
        for part in [part for part in SHOWN if (part, factor) in found]:
            own = sorted(found[part, factor], key=lambda row: float(row["level"]))
            growth = growth_of(own)
            levels, times = ([float(row[column]) for row in own] for column in ("level", "median_s"))
            label = f"{part}: {growth.time:.2f} of {growth.work:.2f}"
            axis.plot(levels, times, marker="o", markersize=3, label=label, color=colours[part])
        axis.set(xscale="log", yscale="log", title=factor, ylabel="CPU time of one thread, s")
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.08), "ncols": 2}
        axis.legend(fontsize=7, title="exponent of the time, of the work", title_fontsize=7, **below)
        axis.grid(alpha=0.3)
    figure.savefig(PLOT, dpi=90)


SHOWN = (
    *("training step", "old log-probs", "forward and backward", "optimizer", "around them"),
    *(part for part in PARTS if part != "training step"),
)
"""Parts of the picture."""


def append(rows: Sequence[dict[str, Any]]) -> None:
    is_new = not TABLE.exists()
    with TABLE.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--factors", nargs="+", choices=list(FACTORS), default=list(FACTORS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=10**9, help="skip larger levels")
    parser.add_argument("--draw", action="store_true", help="measure nothing; print and draw the existing rows")
    parser.add_argument("--dry-run", action="store_true", help="append no rows")
    options = parser.parse_args(argv)
    if options.draw:
        with TABLE.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        report(rows)
        draw(rows)
        return
    torch.set_num_threads(1)
    for part in options.parts:
        levels = {name: tuple(x for x in own if x <= options.largest) for name, own in PARTS[part].levels.items()}
        PARTS[part] = replace(PARTS[part], levels=levels)
        for factor in [factor for factor in options.factors if factor in levels]:
            rows = measure(part, factor, options.rounds)
            report(rows)
            groups_of.cache_clear()
            if not options.dry_run:
                append(rows)
    shut_down()


if __name__ == "__main__":
    main()
