"""The scheduler against plain forward passes, in any order of arrival, at any size of its memory."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import SampleEngine, SampleKey, request_uniforms
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
EXACT = {"rtol": 0.0, "atol": 1e-5}
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe"]


@pytest.fixture(scope="module")
def batching(tmp_path_factory):
    made = {}

    def make(family, **options):
        if family not in made:
            path = make_checkpoint(
                tmp_path_factory.mktemp("model") / family, family, max_position_embeddings=512
            )
            made[family] = {
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
        return ContinuousBatching(**made[family], **{**defaults, **options})

    return make


@asynccontextmanager
async def running(scheduler):
    task = asyncio.create_task(scheduler.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def engine_of(scheduler, number, sampling=RUN, seed=11):
    keys = []

    async def answer(request):
        keys.append(request.key)
        return await scheduler.answer(request)

    key = SampleKey(seed=seed, prompt_index=number, occurrence=0, sample=0)
    engine = SampleEngine(answer, sampling, key, number=number, vocab_size=64)
    engine.keys = keys
    return engine


@torch.inference_mode()
def reference(model, token_ids, key, sampling=RUN):
    """What a request has to sample: one forward pass over the whole sequence for each token."""
    ids, uniforms, log_probs = list(token_ids), request_uniforms(key), []
    while len(log_probs) < sampling.max_response_len:
        tokens, found, _ = sample_tokens(
            model(torch.tensor([ids]), use_cache=False).logits[:, -1],
            torch.tensor([next(uniforms)], dtype=torch.float64),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        ids.append(int(tokens))
        log_probs.append(float(found))
        if ids[-1] in (EOS, *sampling.stop_token_ids):
            break
    return ids[len(token_ids) :], log_probs


async def episode(engine, number, *, turns=3, found, delay=None):
    """A conversation: a prompt that others share, answers, and observations of uneven length."""
    draw = random.Random(number)
    ids = [1, *range(10, 22), 5 + number % 3, *draw.choices(range(3, 60), k=number % 5)]
    for _ in range(turns):
        answer = await engine.generate(ids)
        found.append((number, list(ids), engine.keys[-1], answer))
        ids += answer.token_ids + draw.choices(range(3, 60), k=1 + draw.randrange(9))
        if delay is not None:
            for _ in range(delay.randrange(12)):
                await asyncio.sleep(0)


def episodes(scheduler, numbers, *, shuffle=None, concurrency=64, sampling=RUN, turns=3):
    found = []

    async def go():
        gate = asyncio.Semaphore(concurrency)

        async def one(number):
            async with gate:
                delay = None if shuffle is None else random.Random(number + shuffle)
                await episode(
                    engine_of(scheduler, number, sampling),
                    number,
                    turns=turns,
                    found=found,
                    delay=delay,
                )
                scheduler.end_sample(number)

        order = list(numbers)
        if shuffle is not None:
            random.Random(shuffle).shuffle(order)
        async with running(scheduler):
            await asyncio.gather(*map(one, order))

    asyncio.run(go())
    return sorted(found, key=lambda entry: (entry[0], len(entry[1])))


def assert_same(one, other):
    for (number, ids, key, a), (other_number, other_ids, other_key, b) in zip(
        one, other, strict=True
    ):
        assert (number, ids, key) == (other_number, other_ids, other_key)
        assert (a.token_ids, a.finish_reason, a.text) == (b.token_ids, b.finish_reason, b.text)
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_plain_forward_passes(batching, family):
    scheduler = batching(family)
    answers = episodes(scheduler, range(6))
    assert len(answers) == 18
    for _, ids, key, answer in answers:
        tokens, log_probs = reference(scheduler.model, ids, key)
        assert answer.token_ids == tokens
        assert answer.finish_reason == ("stop" if tokens[-1] in (EOS, 7) else "length")
        assert answer.weight_versions == [3] * len(tokens)
        torch.testing.assert_close(torch.tensor(answer.log_probs), torch.tensor(log_probs), **EXACT)
    assert scheduler.counts["reused"] > sum(len(ids) for _, ids, _, _ in answers) / 2


def test_answers_depend_on_neither_arrival_nor_concurrency_nor_companions(batching):
    alone = [entry for number in range(5) for entry in episodes(batching("qwen3"), [number])]
    for options in ({}, {"shuffle": 1}, {"shuffle": 2, "concurrency": 2}):
        assert_same(alone, episodes(batching("qwen3"), range(5), **options))
    assert_same(alone, episodes(batching("qwen3", max_batch=2), range(5)))


def test_a_small_memory_is_kept_to_and_changes_nothing(batching, monkeypatch):
    monkeypatch.setattr(continuous_batching, "BLOCK", 16)
    sampling, large = Sampling(max_response_len=20, stop_token_ids=()), batching("llama")
    whole = episodes(large, range(5), sampling=sampling, turns=2)
    assert large.counts["preempted"] == 0
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    longest = whole_blocks(max(len(ids) + len(answer.token_ids) for _, ids, _, answer in whole))
    for tokens, preempts in ((8 * 16, True), (16, False)):  # the latter has one slot alone
        small = batching("llama", max_batch_tokens=tokens)
        assert_same(whole, episodes(small, range(5), sampling=sampling, turns=2))
        num_bytes = sum(
            tensor._data.nbytes for tensor in small._cache._tensors() if tensor._data is not None
        )
        assert num_bytes <= per_token * max(tokens, longest)
        assert (small.counts["preempted"] > 0) == preempts


def ask_all(scheduler, requests, sampling=RUN):
    async def go():
        engine = engine_of(scheduler, 0, sampling)
        async with running(scheduler):
            return await asyncio.gather(
                *(
                    engine.generate(ids, params, session_id=session)
                    for ids, params, session in requests
                )
            )

    return asyncio.run(go())


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "glm4_moe"])
def test_experts_and_their_weights_are_those_of_one_forward_pass(batching, family):
    """Of the prompt that requests share, of what is prefilled and of what is sampled."""
    scheduler = batching(family, records_routing=True)
    sampling = Sampling(max_response_len=9, return_routed_experts=True, return_routing_weights=True)
    answers = episodes(scheduler, range(5), sampling=sampling)
    assert scheduler.counts["reused"] > 0
    for _, ids, _, answer in answers:
        fed = [*ids, *answer.token_ids[:-1]]
        with RoutingRecorder(scheduler.model) as recorder, torch.no_grad():
            scheduler.model(torch.tensor([fed]), use_cache=False)
            experts, weights = recorder.take(1)
        assert torch.equal(answer.routed_experts, experts[0])
        torch.testing.assert_close(answer.routing_weights, weights[0], **EXACT)


def test_each_request_is_sampled_as_it_asks(batching):
    """Requests of one batch with other temperatures, cuts and stops; the sets that could be sampled are recorded."""
    scheduler = batching("qwen3")
    run = Sampling(max_response_len=15, return_sampling_mask=True)
    asked = [
        {"temperature": 0.0},
        {"temperature": 1.5, "top_k": 4},
        {"top_p": 0.5},
        {},
        {"stop_token_ids": list(range(5, 60, 3))},
        {"stop": ["a", "9k", "b"], "max_new_tokens": 60},
        {"temperature": 0.0, "max_new_tokens": 3, "skip_special_tokens": False},
    ]
    ids = [1, *range(20, 40)]
    answers = ask_all(
        scheduler, [(ids, params, str(place)) for place, params in enumerate(asked)], run
    )
    for params, answer in zip(asked, answers, strict=True):
        text = "".join(scheduler.tokenizer.decode([token]) for token in answer.token_ids)
        stops, length = params.get("stop_token_ids", []), params.get("max_new_tokens", 15)
        stopped = answer.token_ids[-1] in (EOS, *stops) or any(
            stop in text for stop in params.get("stop", [])
        )
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(answer.token_ids) == length
        assert not {EOS, *stops} & set(answer.token_ids[:-1])
        with torch.no_grad():
            logits = scheduler.model(torch.tensor([[*ids, *answer.token_ids[:-1]]])).logits[
                0, len(ids) - 1 :
            ]
        if params.get("temperature") == 0:
            expected = logits.log_softmax(-1)
            assert answer.token_ids == expected.argmax(-1).tolist()
        else:
            expected = log_softmax(
                filtered_logits(
                    logits,
                    temperature=params.get("temperature", 1.0),
                    top_p=params.get("top_p", 1.0),
                    top_k=params.get("top_k", -1),
                )
            )
        log_probs = expected.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), log_probs, **EXACT)
        cut = [
            row.nonzero()[:, 0].tolist() if not row.all() else [] for row in expected > -torch.inf
        ]
        assert answer.sampling_mask.sets() == cut


def test_a_shared_prompt_is_computed_once_and_the_context_ends_a_response(batching):
    scheduler, prompt = batching("llama"), [1, *range(3, 60)]
    ask_all(scheduler, [(prompt, None, str(place)) for place in range(6)])
    assert (scheduler.counts["passes"], scheduler.counts["prefilled"]) == (1, 58)
    assert scheduler.counts["reused"] == 5 * 58
    run = Sampling(max_response_len=90, max_context_len=20)
    scheduler = batching("llama", eos_token_ids=frozenset(), context_len=30)
    long, short, full = ask_all(
        scheduler, [([1] * 25, None, "a"), ([1] * 12, None, "b"), ([1] * 20, None, "c")], run
    )
    assert (long.token_ids, long.finish_reason, long.text) == ([], "length", "")
    assert (len(short.token_ids), short.finish_reason, full.token_ids) == (8, "length", [])


def test_a_turn_feeds_only_what_is_new(batching):
    scheduler = batching("llama")

    async def go():
        engine = engine_of(scheduler, 0)
        async with running(scheduler):
            first = [1, *range(3, 60)]
            answer = await engine.generate(first)
            second = [*first, *answer.token_ids, 9, 8, 7]
            before = scheduler.counts.copy()
            await engine.generate(second)
            return scheduler.counts["prefilled"] - before["prefilled"], len(scheduler._slots)

    assert asyncio.run(go()) == (4, 1)  # the last sampled token has not been fed


def test_long_inputs_are_prefilled_in_parts(batching, monkeypatch):
    draw = random.Random(0)
    inputs = [[1, *draw.choices(range(3, 60), k=length)] for length in (300, 40, 7, 2, 0)]
    whole = ask_all(batching("qwen3"), [(ids, None, None) for ids in inputs])
    monkeypatch.setattr(continuous_batching, "PREFILL_COLUMNS", 16)
    monkeypatch.setattr(continuous_batching, "PREFILL_TOKENS", 40)
    scheduler = batching("qwen3")
    for one, other in zip(
        whole, ask_all(scheduler, [(ids, None, None) for ids in inputs]), strict=True
    ):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(
            torch.tensor(one.log_probs), torch.tensor(other.log_probs), **EXACT
        )
    assert scheduler.counts["passes"] >= 19


def test_a_cancelled_request_leaves_the_batch(batching):
    scheduler = batching("llama", max_batch=2)

    async def go():
        engine = engine_of(scheduler, 0, Sampling(max_response_len=400, stop_token_ids=()))
        async with running(scheduler):
            # The third waits for a slot; none of the three has another way to end before the
            # context does.
            asked = [asyncio.create_task(engine.generate([1, first] * 9)) for first in (5, 6, 7)]
            while scheduler.counts["decoded"] < 20:
                await asyncio.sleep(0)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            steps = scheduler.counts["steps"]
            answer = await engine.generate([1, 5, 6], {"max_new_tokens": 3})
            return scheduler.counts["steps"] - steps, answer

    steps, answer = asyncio.run(go())
    assert steps <= 4 and len(answer.token_ids) <= 3


def test_models_that_cannot_be_batched_are_refused():
    with pytest.raises(ValueError, match="a cache of DynamicSlidingWindowLayer"):
        check_config(Gemma2Config())
    with pytest.raises(ValueError, match="dynamic rotary embeddings"):
        check_config(
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
        )
