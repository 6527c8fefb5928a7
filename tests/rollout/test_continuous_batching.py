"""The scheduler against plain forward passes, for any order of arrival and size of its memory."""

import asyncio
import gc
import random
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, PreTrainedModel

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import (
    Generation,
    Request,
    RequestParams,
    SampleEngine,
    SampleKey,
    request_uniforms,
)
from slime_tis.trainer.engines.local import continuous_batching
from slime_tis.trainer.engines.local.continuous_batching import ContinuousBatching, whole_blocks
from slime_tis.trainer.engines.local.load_model import load_model, load_tokenizer
from slime_tis.trainer.engines.local.routing import RoutingRecorder
from slime_tis.trainer.engines.local.slot_cache import check_config
from slime_tis.trainer.engines.local.token_sampling import (
    filtered_logits,
    log_softmax,
    sample_tokens,
)
from tests.checkpoints import EOS, make_checkpoint

RUN = Sampling(max_response_len=12, temperature=0.9, stop_token_ids=(7,))
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}
FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm4_moe",
    "mistral",
    "phi3",
    "smollm3",
    "olmo2",
    "seed_oss",
    "mimo",
    "glm4",
    "gemma3",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_5",
]
SIZES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "gemma3": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
    },
    # Before a recurrence, attention makes padding differ from 0.
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention"]},
    "smollm3": {"num_hidden_layers": 4},  # the fourth one has no rotary embedding
}
"""Fields of config.json with the properties that distinguish a family."""


@dataclass
class Turn:
    """One request of a conversation, and its answer."""

    number: int
    """Number of the conversation."""
    token_ids: list[int]
    key: bytes
    answer: Generation


MakeScheduler = Callable[..., ContinuousBatching]


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory) -> MakeScheduler:
    """Makes a scheduler; the models are loaded once."""
    models: dict[str, dict[str, Any]] = {}

    def make(family: str, **options: Any) -> ContinuousBatching:
        if family not in models:
            fields = {"max_position_embeddings": 512, **SIZES.get(family, {})}
            path = make_checkpoint(tmp_path_factory.mktemp("model") / family, family, **fields)
            models[family] = {
                "model": load_model(path, torch.float32),
                "tokenizer": load_tokenizer(path),
            }
        defaults = {
            "eos_token_ids": frozenset([EOS]),
            "context_len": 512,
            "weight_version": 3,
            "records_routing": False,
            "max_batch": 64,
            "max_batch_tokens": 64 * 512,
            "check_interrupts": lambda: None,
        }
        return ContinuousBatching(**models[family], **{**defaults, **options})

    return make


@asynccontextmanager
async def running(scheduler: ContinuousBatching) -> AsyncIterator[None]:
    task = asyncio.create_task(scheduler.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def make_engine(
    scheduler: ContinuousBatching, number: int, sampling: Sampling = RUN
) -> tuple[SampleEngine, list[bytes]]:
    """The engine of a sample, and the keys of its requests, which grow."""
    keys = []

    async def answer(request: Request) -> Generation:
        keys.append(request.key)
        return await scheduler.answer(request)

    key = SampleKey(seed=11, prompt_index=number, occurrence=0, sample=0)
    engine = SampleEngine(answer, sampling, key, number=number, vocab_size=64)
    return engine, keys


@torch.inference_mode()
def reference(
    model: PreTrainedModel, token_ids: list[int], key: bytes
) -> tuple[list[int], list[float]]:
    """Expected tokens and log-probs: one pass over the complete sequence for each token."""
    ids = list(token_ids)
    uniforms = request_uniforms(key)
    log_probs: list[float] = []
    while len(log_probs) < RUN.max_response_len:
        tokens, token_log_probs, _ = sample_tokens(
            model(torch.tensor([ids]), use_cache=False).logits[:, -1],
            torch.tensor([next(uniforms)], dtype=torch.float64),
            temperature=RUN.temperature,
            top_p=RUN.top_p,
            top_k=RUN.top_k,
        )
        ids.append(int(tokens))
        log_probs.append(float(token_log_probs))
        if ids[-1] in (EOS, *RUN.stop_token_ids):
            break
    return ids[len(token_ids) :], log_probs


async def converse(
    scheduler: ContinuousBatching,
    number: int,
    sampling: Sampling,
    turns: int,
    delay: random.Random | None,
) -> list[Turn]:
    """A conversation: a prompt that others share, answers, and observations of uneven length."""
    engine, keys = make_engine(scheduler, number, sampling)
    draw = random.Random(number)
    ids = [1, *range(10, 22), 5 + number % 3, *draw.choices(range(3, 60), k=number % 5)]
    conversation = []
    for _ in range(turns):
        answer = await engine.generate(ids)
        conversation.append(Turn(number, list(ids), keys[-1], answer))
        ids += answer.token_ids + draw.choices(range(3, 60), k=1 + draw.randrange(9))
        if delay is not None:
            for _ in range(delay.randrange(12)):
                await asyncio.sleep(0)
    return conversation


def run_conversations(
    scheduler: ContinuousBatching,
    numbers: Iterable[int],
    *,
    shuffle: int | None = None,
    concurrency: int = 64,
    sampling: Sampling = RUN,
    turns: int = 3,
) -> list[Turn]:
    """The turns of all conversations, in the order of their numbers."""
    gate = asyncio.Semaphore(concurrency)
    results: list[Turn] = []

    async def run_one(number: int) -> None:
        delay = None
        if shuffle is not None:
            delay = random.Random(number + shuffle)
        async with gate:
            results.extend(await converse(scheduler, number, sampling, turns, delay))
            scheduler.end_sample(number)

    async def run_all() -> None:
        order = list(numbers)
        if shuffle is not None:
            random.Random(shuffle).shuffle(order)
        async with running(scheduler):
            await asyncio.gather(*map(run_one, order))

    asyncio.run(run_all())
    return sorted(results, key=lambda turn: (turn.number, len(turn.token_ids)))


def assert_same_turns(turns: list[Turn], others: list[Turn]) -> None:
    for turn, other in zip(turns, others, strict=True):
        assert (turn.number, turn.token_ids, turn.key) == (
            other.number,
            other.token_ids,
            other.key,
        )
        assert turn.answer.token_ids == other.answer.token_ids
        assert turn.answer.finish_reason == other.answer.finish_reason
        assert turn.answer.text == other.answer.text
        assert_same_log_probs(turn.answer, other.answer)


def assert_same_log_probs(answer: Generation, other: Generation) -> None:
    torch.testing.assert_close(
        torch.tensor(answer.log_probs), torch.tensor(other.log_probs), **EXACT
    )


@dataclass
class FamilyRun:
    """Six conversations with the model of one family."""

    scheduler: ContinuousBatching
    turns: list[Turn]


@pytest.fixture(scope="module", params=FAMILIES)
def family_run(request: pytest.FixtureRequest, batching: MakeScheduler) -> FamilyRun:
    scheduler = batching(request.param)
    return FamilyRun(scheduler, run_conversations(scheduler, range(6)))


def test_every_request_is_answered(family_run):
    assert len(family_run.turns) == 18


def test_answers_are_those_of_plain_forward_passes(family_run):
    for turn in family_run.turns:
        tokens, log_probs = reference(family_run.scheduler.model, turn.token_ids, turn.key)
        assert turn.answer.token_ids == tokens
        torch.testing.assert_close(
            torch.tensor(turn.answer.log_probs), torch.tensor(log_probs), **EXACT
        )


def test_the_finish_reason_tells_stop_from_length(family_run):
    for turn in family_run.turns:
        stops = turn.answer.token_ids[-1] in (EOS, 7)
        assert turn.answer.finish_reason == ("stop" if stops else "length")


def test_every_token_has_the_weight_version(family_run):
    for turn in family_run.turns:
        assert turn.answer.weight_versions == [3] * len(turn.answer.token_ids)


def test_half_of_the_input_tokens_are_reused(family_run):
    input_tokens = sum(len(turn.token_ids) for turn in family_run.turns)
    assert family_run.scheduler.counts["reused"] > input_tokens / 2


CACHES = {"keys and values": "qwen3", "states": "qwen3_next"}
"""Families by what their models remember of earlier tokens."""


@dataclass
class Alone:
    """Five conversations, each by a scheduler of its own."""

    family: str
    turns: list[Turn]


@pytest.fixture(scope="module", params=list(CACHES.values()), ids=list(CACHES))
def alone(request: pytest.FixtureRequest, batching: MakeScheduler) -> Alone:
    turns = []
    for number in range(5):
        turns += run_conversations(batching(request.param), [number])
    return Alone(request.param, turns)


ARRIVALS: dict[str, dict[str, Any]] = {
    "together": {},
    "shuffled": {"shuffle": 1},
    "two at once": {"shuffle": 2, "concurrency": 2},
}


@pytest.mark.parametrize("arrival", ARRIVALS.values(), ids=ARRIVALS)
def test_answers_do_not_depend_on_arrival(batching, alone, arrival):
    assert_same_turns(alone.turns, run_conversations(batching(alone.family), range(5), **arrival))


def test_answers_do_not_depend_on_the_batch_size(batching, alone):
    scheduler = batching(alone.family, max_batch=2)
    assert_same_turns(alone.turns, run_conversations(scheduler, range(5)))


@pytest.mark.parametrize("max_tokens", [8 * 32, 32], ids=["eight blocks", "one slot"])
def test_answers_do_not_depend_on_the_memory_of_any_cache(batching, alone, max_tokens):
    scheduler = batching(alone.family, max_batch_tokens=max_tokens)
    assert_same_turns(alone.turns, run_conversations(scheduler, range(5)))


LONG = Sampling(max_response_len=20, stop_token_ids=())


@dataclass
class SmallMemoryRun:
    """The same conversations with a large and with a small key/value cache."""

    large: ContinuousBatching
    large_turns: list[Turn]
    small: ContinuousBatching
    small_turns: list[Turn]
    max_tokens: int
    """Tokens of the small cache."""
    longest: int
    """Slot size that the longest sequence needs."""


@pytest.fixture(scope="module", params=[8 * 16, 16], ids=["eight blocks", "one slot"])
def small_memory(request: pytest.FixtureRequest, batching: MakeScheduler) -> SmallMemoryRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_batching, "BLOCK", 16)
        large = batching("llama")
        large_turns = run_conversations(large, range(5), sampling=LONG, turns=2)
        small = batching("llama", max_batch_tokens=request.param)
        small_turns = run_conversations(small, range(5), sampling=LONG, turns=2)
        lengths = [len(turn.token_ids) + len(turn.answer.token_ids) for turn in large_turns]
        longest = whole_blocks(max(lengths))
    return SmallMemoryRun(large, large_turns, small, small_turns, request.param, longest)


def test_answers_do_not_depend_on_the_memory(small_memory):
    assert_same_turns(small_memory.large_turns, small_memory.small_turns)


def test_a_small_memory_is_not_exceeded(small_memory):
    num_bytes = 0
    for tensor in small_memory.small._cache._tensors():
        if tensor._data is not None:
            num_bytes += tensor._data.nbytes
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    assert num_bytes <= per_token * max(small_memory.max_tokens, small_memory.longest)


def test_a_small_memory_of_several_slots_preempts(small_memory):
    # A cache of 16 tokens has a single slot, so that no running request has to make room.
    assert (small_memory.small.counts["preempted"] > 0) == (small_memory.max_tokens > 16)


def test_a_large_memory_preempts_nothing(small_memory):
    assert small_memory.large.counts["preempted"] == 0


def test_the_memory_is_freed_without_the_garbage_collector(batching):
    gc.disable()
    try:
        scheduler = batching("llama")
        run_conversations(scheduler, range(2))
        cache = weakref.ref(scheduler._cache)
        keys = weakref.ref(scheduler._cache._layers[0].slot_keys)
        del scheduler
        assert (cache(), keys()) == (None, None)
    finally:
        gc.enable()


def generate_all(
    scheduler: ContinuousBatching,
    inputs: Sequence[list[int]],
    *,
    params: Sequence[RequestParams] | None = None,
    sessions: Sequence[str | None] | None = None,
    sampling: Sampling = RUN,
) -> list[Generation]:
    """The answers to concurrent requests of one sample."""
    if params is None:
        params = [None] * len(inputs)
    if sessions is None:
        sessions = [str(number) for number in range(len(inputs))]

    async def generate() -> list[Generation]:
        engine, _ = make_engine(scheduler, 0, sampling)
        requests = []
        for ids, request_params, session in zip(inputs, params, sessions, strict=True):
            requests.append(engine.generate(ids, request_params, session_id=session))
        async with running(scheduler):
            return await asyncio.gather(*requests)

    return asyncio.run(generate())


ROUTED = ["qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next"]


@pytest.fixture(scope="module", params=ROUTED)
def routed_run(request: pytest.FixtureRequest, batching: MakeScheduler) -> FamilyRun:
    """Conversations that share a prompt, with experts and their weights recorded."""
    scheduler = batching(request.param, records_routing=True)
    sampling = Sampling(max_response_len=9, return_routed_experts=True, return_routing_weights=True)
    return FamilyRun(scheduler, run_conversations(scheduler, range(5), sampling=sampling))


def forward_routing(
    model: PreTrainedModel, token_ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and their weights in one forward pass over the sequence."""
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(torch.tensor([token_ids]), use_cache=False)
        experts, weights = recorder.take(1)
    return experts[0], weights[0]


def test_experts_are_those_of_one_forward_pass(routed_run):
    for turn in routed_run.turns:
        tokens = [*turn.token_ids, *turn.answer.token_ids[:-1]]
        experts, _ = forward_routing(routed_run.scheduler.model, tokens)
        assert torch.equal(turn.answer.routed_experts, experts)


def test_routing_weights_are_those_of_one_forward_pass(routed_run):
    for turn in routed_run.turns:
        tokens = [*turn.token_ids, *turn.answer.token_ids[:-1]]
        _, weights = forward_routing(routed_run.scheduler.model, tokens)
        torch.testing.assert_close(turn.answer.routing_weights, weights, **EXACT)


def test_routed_requests_share_their_prompt(routed_run):
    assert routed_run.scheduler.counts["reused"] > 0


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot, top-k": {"temperature": 1.5, "top_k": 4},
    "top-p": {"top_p": 0.5},
    "options of the run": {},
    "stop tokens": {"stop_token_ids": list(range(5, 60, 3))},
    "stop strings": {"stop": ["a", "9k", "b"], "max_new_tokens": 60},
    "short": {"temperature": 0.0, "max_new_tokens": 3, "skip_special_tokens": False},
}
PROMPT = [1, *range(20, 40)]


@dataclass
class MixedRequest:
    """One request of a batch with other options in each request."""

    params: dict[str, Any]
    answer: Generation
    log_probs: torch.Tensor
    """Expected log-probs of all tokens at each position, [T, V]; -inf if filtered out."""
    text: str

    @property
    def is_stopped(self) -> bool:
        if self.answer.token_ids[-1] in (EOS, *self.params.get("stop_token_ids", [])):
            return True
        return any(stop in self.text for stop in self.params.get("stop", []))


@pytest.fixture(scope="module")
def mixed_batch(batching: MakeScheduler) -> dict[str, MixedRequest]:
    scheduler = batching("qwen3")
    sampling = Sampling(max_response_len=15, return_sampling_mask=True)
    answers = generate_all(
        scheduler, [PROMPT] * len(REQUESTS), params=list(REQUESTS.values()), sampling=sampling
    )
    requests = {}
    for (name, params), answer in zip(REQUESTS.items(), answers, strict=True):
        sequence = torch.tensor([[*PROMPT, *answer.token_ids[:-1]]])
        with torch.no_grad():
            logits = scheduler.model(sequence).logits[0, len(PROMPT) - 1 :]
        if params.get("temperature") == 0:
            log_probs = logits.log_softmax(-1)
        else:
            filtered = filtered_logits(
                logits,
                temperature=params.get("temperature", 1.0),
                top_p=params.get("top_p", 1.0),
                top_k=params.get("top_k", -1),
            )
            log_probs = log_softmax(filtered)
        text = "".join(scheduler.tokenizer.decode([token]) for token in answer.token_ids)
        requests[name] = MixedRequest(params, answer, log_probs, text)
    return requests


@pytest.fixture(params=REQUESTS)
def mixed_request(
    request: pytest.FixtureRequest, mixed_batch: dict[str, MixedRequest]
) -> MixedRequest:
    return mixed_batch[request.param]


def test_a_request_ends_at_its_own_stops(mixed_request):
    reason = "stop" if mixed_request.is_stopped else "length"
    assert mixed_request.answer.finish_reason == reason


def test_a_request_without_a_stop_has_its_length(mixed_request):
    length = mixed_request.params.get("max_new_tokens", 15)
    assert mixed_request.is_stopped or len(mixed_request.answer.token_ids) == length


def test_no_token_follows_a_stop_token(mixed_request):
    stops = {EOS, *mixed_request.params.get("stop_token_ids", [])}
    assert not stops & set(mixed_request.answer.token_ids[:-1])


@pytest.mark.parametrize("name", ["greedy", "short"])
def test_temperature_zero_takes_the_likeliest_token(mixed_batch, name):
    request = mixed_batch[name]
    assert request.answer.token_ids == request.log_probs.argmax(-1).tolist()


def test_log_probs_follow_the_options_of_the_request(mixed_request):
    tokens = torch.tensor(mixed_request.answer.token_ids)[:, None]
    log_probs = mixed_request.log_probs.gather(-1, tokens)[:, 0]
    torch.testing.assert_close(torch.tensor(mixed_request.answer.log_probs), log_probs, **EXACT)


def test_the_sets_that_could_be_sampled_are_recorded(mixed_request):
    token_sets = []
    for row in mixed_request.log_probs > -torch.inf:
        # an empty set stands for the complete vocabulary
        token_sets.append([] if row.all() else row.nonzero()[:, 0].tolist())
    assert mixed_request.answer.sampling_mask.sets() == token_sets


def test_a_shared_prompt_is_computed_once(batching):
    scheduler = batching("llama")
    generate_all(scheduler, [[1, *range(3, 60)]] * 6)
    assert scheduler.counts["passes"] == 1
    assert scheduler.counts["prefilled"] == 58
    assert scheduler.counts["reused"] == 5 * 58


@pytest.mark.parametrize(
    ("prompt_len", "response_len"),
    [(25, 0), (20, 0), (12, 8)],
    ids=["longer than the context", "fills the context", "shorter"],
)
def test_the_context_ends_a_response(batching, prompt_len, response_len):
    sampling = Sampling(max_response_len=90, max_context_len=20)
    scheduler = batching("llama", eos_token_ids=frozenset(), context_len=30)
    (answer,) = generate_all(scheduler, [[1] * prompt_len], sampling=sampling)
    assert len(answer.token_ids) == response_len
    assert answer.finish_reason == "length"
    assert (answer.text == "") == (response_len == 0)


def test_requests_that_reach_the_context_share_a_batch(batching):
    sampling = Sampling(max_response_len=90, max_context_len=20)
    scheduler = batching("llama", eos_token_ids=frozenset(), context_len=30)
    answers = generate_all(scheduler, [[1] * 25, [1] * 12, [1] * 20], sampling=sampling)
    assert [len(answer.token_ids) for answer in answers] == [0, 8, 0]


@dataclass
class SecondTurn:
    """Tokens that the second turn of a conversation fed, and the slots after it."""

    prefilled: int
    slots: int


@pytest.fixture(scope="module")
def second_turn(batching: MakeScheduler) -> SecondTurn:
    scheduler = batching("llama")

    async def converse_twice() -> SecondTurn:
        engine, _ = make_engine(scheduler, 0)
        async with running(scheduler):
            first = [1, *range(3, 60)]
            answer = await engine.generate(first)
            before = scheduler.counts["prefilled"]
            await engine.generate([*first, *answer.token_ids, 9, 8, 7])
            return SecondTurn(scheduler.counts["prefilled"] - before, len(scheduler._slots))

    return asyncio.run(converse_twice())


def test_a_turn_feeds_only_what_is_new(second_turn):
    # three new tokens, and the last sampled one, which was not fed before
    assert second_turn.prefilled == 4


def test_a_turn_continues_in_the_slot_of_its_conversation(second_turn):
    assert second_turn.slots == 1


@dataclass
class ChunkedPrefill:
    """Answers to the same inputs, prefilled in one part and in several."""

    one_part: list[Generation]
    several_parts: list[Generation]
    passes: int
    """Passes of the prefill in several parts."""


@pytest.fixture(scope="module", params=list(CACHES.values()), ids=list(CACHES))
def chunked_prefill(request: pytest.FixtureRequest, batching: MakeScheduler) -> ChunkedPrefill:
    family = request.param
    draw = random.Random(0)
    inputs = []
    for length in (300, 40, 7, 2, 0):
        inputs.append([1, *draw.choices(range(3, 60), k=length)])
    sessions = [None] * len(inputs)
    one_part = generate_all(batching(family), inputs, sessions=sessions)
    scheduler = batching(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_batching, "PREFILL_COLUMNS", 16)
        patch.setattr(continuous_batching, "PREFILL_TOKENS", 40)
        several_parts = generate_all(scheduler, inputs, sessions=sessions)
    return ChunkedPrefill(one_part, several_parts, scheduler.counts["passes"])


def test_prefill_in_parts_changes_no_answer(chunked_prefill):
    parts = zip(chunked_prefill.one_part, chunked_prefill.several_parts, strict=True)
    for answer, other in parts:
        assert answer.token_ids == other.token_ids
        assert_same_log_probs(answer, other)


def test_long_inputs_are_prefilled_in_parts(chunked_prefill):
    assert chunked_prefill.passes >= 19


def test_equal_inputs_of_a_recurrence_are_computed_once(batching):
    scheduler = batching("qwen3_next")
    generate_all(scheduler, [PROMPT] * 5)
    assert scheduler.counts["prefilled"] == len(PROMPT)


def test_a_part_of_a_recurrence_is_not_shared(batching):
    scheduler = batching("qwen3_next")
    generate_all(scheduler, [PROMPT, [*PROMPT[:-1], 3]])
    assert scheduler.counts["reused"] == 0


def test_the_state_of_a_beginning_is_shared(batching):
    scheduler = batching("qwen3_next")
    (first,) = generate_all(scheduler, [PROMPT])
    longer = [*PROMPT, *first.token_ids, 3, 4]
    # Another conversation, which continues a copy of the first one's state.
    (shared,) = generate_all(scheduler, [longer], sessions=["other"])
    (alone,) = generate_all(batching("qwen3_next"), [longer], sessions=["other"])
    assert scheduler.counts["reused"] == len(PROMPT) + len(first.token_ids) - 1
    assert_same_log_probs(shared, alone)


@dataclass
class AfterCancellation:
    """A request after three cancelled ones: decode steps until its answer, and the answer."""

    steps: int
    answer: Generation


@pytest.fixture(scope="module")
def after_cancellation(batching: MakeScheduler) -> AfterCancellation:
    scheduler = batching("llama", max_batch=2)

    async def cancel_requests() -> AfterCancellation:
        engine, _ = make_engine(scheduler, 0, Sampling(max_response_len=400, stop_token_ids=()))
        async with running(scheduler):
            # The third waits for a slot; none of the three has another way to end before the
            # context does.
            requests = []
            for token in (5, 6, 7):
                requests.append(asyncio.create_task(engine.generate([1, token] * 9)))
            while scheduler.counts["decoded"] < 20:
                await asyncio.sleep(0)
            for task in requests:
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            before = scheduler.counts["steps"]
            answer = await engine.generate([1, 5, 6], {"max_new_tokens": 3})
            return AfterCancellation(scheduler.counts["steps"] - before, answer)

    return asyncio.run(cancel_requests())


def test_a_cancelled_request_leaves_the_batch(after_cancellation):
    assert after_cancellation.steps <= 4


def test_a_request_after_cancelled_ones_is_answered(after_cancellation):
    assert len(after_cancellation.answer.token_ids) <= 3


def test_a_sliding_window_cannot_be_batched():
    with pytest.raises(ValueError, match="a cache of DynamicSlidingWindowLayer"):
        check_config(Gemma2Config())


def test_dynamic_rotary_embeddings_cannot_be_batched():
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="dynamic rotary embeddings"):
        check_config(LlamaConfig(rope_parameters=parameters))
