"""The scheduler against plain forward passes, in any order of arrival, at any size of its memory."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
import torch

from slime_tis.rollout.checkpoint import load_model, load_tokenizer
from slime_tis.rollout.continuous_batching import BLOCK, ContinuousBatching, whole_blocks
from slime_tis.rollout.generation import SampleEngine, SampleKey, request_uniforms
from slime_tis.rollout.sample import Sampling
from slime_tis.rollout.sampling import sample_tokens
from tests.checkpoints import EOS, make_checkpoint

RUN = Sampling(max_response_len=12, temperature=0.9, stop_token_ids=(7,))
EXACT = {"rtol": 0.0, "atol": 1e-5}
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns the model and tokenizer of a family, made once."""
    made = {}

    def get(family):
        if family not in made:
            path = make_checkpoint(tmp_path_factory.mktemp("model") / family, family, max_position_embeddings=512)
            made[family] = load_model(path, torch.float32), load_tokenizer(path)
        return made[family]

    return get


def scheduler_of(model, tokenizer, **options):
    defaults = {
        "eos_token_ids": (EOS,),
        "context_len": 512,
        "weight_version": 3,
        "records_routing": False,
        "max_batch": 64,
        "max_batch_tokens": 64 * 512,
        "safe_point": lambda: None,
    }
    return ContinuousBatching(model, tokenizer, **{**defaults, **options})


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


def episodes(model, tokenizer, numbers, *, shuffle=None, concurrency=64, sampling=RUN, turns=3, **options):
    """All answers of some episodes, by episode and turn, and the scheduler."""
    scheduler = scheduler_of(model, tokenizer, **options)
    found = []

    async def go():
        gate = asyncio.Semaphore(concurrency)

        async def one(number):
            async with gate:
                delay = None if shuffle is None else random.Random(number + shuffle)
                await episode(engine_of(scheduler, number, sampling), number, turns=turns, found=found, delay=delay)
                scheduler.end_sample(number)

        order = list(numbers)
        if shuffle is not None:
            random.Random(shuffle).shuffle(order)
        async with running(scheduler):
            await asyncio.gather(*map(one, order))

    asyncio.run(go())
    return sorted(found, key=lambda entry: (entry[0], len(entry[1]))), scheduler


def assert_same(one, other):
    for (number, ids, key, a), (other_number, other_ids, other_key, b) in zip(one, other, strict=True):
        assert (number, ids, key) == (other_number, other_ids, other_key)
        assert (a.token_ids, a.finish_reason, a.text) == (b.token_ids, b.finish_reason, b.text)
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_plain_forward_passes(models, family):
    model, tokenizer = models(family)
    answers, scheduler = episodes(model, tokenizer, range(6))
    assert len(answers) == 18
    for _, ids, key, answer in answers:
        tokens, log_probs = reference(model, ids, key)
        assert answer.token_ids == tokens
        assert answer.finish_reason == ("stop" if tokens[-1] in (EOS, 7) else "length")
        assert answer.weight_versions == [3] * len(tokens)
        torch.testing.assert_close(torch.tensor(answer.log_probs), torch.tensor(log_probs), **EXACT)
    fed, counts = sum(len(ids) for _, ids, _, _ in answers), scheduler.counts
    assert counts.reused > fed / 2


def test_answers_depend_on_neither_arrival_nor_concurrency_nor_companions(models):
    model, tokenizer = models("qwen3")
    alone = [entry for number in range(9) for entry in episodes(model, tokenizer, [number])[0]]
    for options in ({}, {"shuffle": 1}, {"shuffle": 2, "concurrency": 3}, {"concurrency": 1}, {"max_batch": 2}):
        assert_same(alone, episodes(model, tokenizer, range(9), **options)[0])


def test_a_small_memory_is_kept_to_and_changes_nothing(models):
    model, tokenizer = models("llama")
    sampling = Sampling(max_response_len=70, stop_token_ids=())
    whole, large = episodes(model, tokenizer, range(8), sampling=sampling, turns=2)
    assert large.counts.preempted == 0
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    for tokens in (3 * BLOCK, BLOCK):
        found, small = episodes(model, tokenizer, range(8), sampling=sampling, turns=2, max_batch_tokens=tokens)
        assert_same(whole, found)
        longest = max(len(ids) + len(answer.token_ids) for _, ids, _, answer in found)
        assert small._cache.num_bytes <= per_token * max(tokens, whole_blocks(longest))
    assert small.counts.preempted == 0  # one slot alone
    assert episodes(model, tokenizer, range(8), sampling=sampling, max_batch_tokens=4 * BLOCK)[1].counts.preempted > 0
