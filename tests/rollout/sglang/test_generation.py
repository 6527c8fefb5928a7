"""Whole and partial rollouts on servers: what is sampled, refused, in flight at the same time, and left at the end."""

import logging
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
import torch.distributed as dist

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.sglang.responses import Limits
from tests.checkpoints import make_checkpoint
from tests.rollout.sglang.fake_sglang import (
    LAYERS,
    continuation,
    fake_servers,
    log_prob,
    next_token,
    spoiled,
    wait_until,
    when,
)
from tests.rollout.sglang.rollouts import (
    EARLY,
    LATE,
    PROMPTS,
    SAMPLING,
    ByHand,
    Weights,
    assert_exact,
    assert_log_probs,
    held,
    make_engine,
    versions_of,
)
from tests.runs import spawn
from tests.samples import flat, make_sample, reloaded


def test_samples_are_those_of_the_model_in_the_prompts_order(start, checkpoint):
    run = start(3)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {0}
    decode = load_tokenizer(checkpoint).decode
    assert [s.response for s in flat(groups)] == [
        decode(s.response_ids, skip_special_tokens=True) for s in flat(groups)
    ]
    assert min(len(server.requests) for server in run.servers) > 0
    ids = [body["rid"] for body in run.requests]
    assert len(set(ids)) == len(ids) == 36 and len({len(request_id) for request_id in ids}) == 1
    assert run.engine.metrics() == {
        "rollout/sglang_retries": 0,
        "rollout/sglang_deaths": 0,
        "rollout/sglang_returns": 0,
        "rollout/sglang_live_servers": 3,
        "rollout/sglang_malformed_responses": 0,
    }


def begun(tokens):
    response = continuation(list(LATE[0].token_ids), tokens)
    return make_sample(LATE[0], response, status=Sample.Status.ABORTED)


def test_inputs_that_servers_do_not_take_are_not_sent(start):
    run = start(2, lambda servers: servers[0].info.update(max_req_input_len=8))
    long = Prompt(index=4, text="", token_ids=(3,) * 8)
    with pytest.raises(ValueError, match="prompt 4 has 8 tokens"):
        run.engine.generate([long], SAMPLING, seed=0)
    run.engine.resume_unfinished([[begun(5)]])
    ((sample,),) = run.engine.submit(
        [], Sampling(max_response_len=30), seed=0, num_groups=1
    ).result()
    assert (sample.response_ids, sample.status) == (begun(5).response_ids, Sample.Status.TRUNCATED)
    assert run.requests == []


@pytest.mark.parametrize(("length", "room"), [(4, 12), (9, 7), (10, 6), (11, 0)])
def test_room_ends_at_the_longest_input(length, room):
    limits = Limits(context_len=None, vocab_size=None, max_input_len=10, mask_tokens=None)
    assert limits.after(length, Sampling(max_response_len=100)) == room  # SGLang reserves 6 tokens


def test_every_response_has_a_seed_of_its_own_where_servers_take_one(start):
    def seeds(run, seed):
        for server in run.servers:
            server.requests.clear()
        assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=seed), PROMPTS)
        return [
            body["sampling_params"]["sampling_seed"]
            for body in sorted(run.requests, key=lambda body: body["rid"])
        ]

    run = start(
        2,
        lambda servers: [each.info.update(enable_deterministic_inference=True) for each in servers],
    )
    first = seeds(run, seed=5)
    assert len(set(first)) == 36 and 0 <= min(first) <= max(first) < 2**63
    assert seeds(run, seed=5) == first
    assert not set(seeds(run, seed=6)) & set(first)


def test_close_ends_what_is_in_flight(start, caplog):
    caplog.set_level(logging.INFO)
    threads = set(threading.enumerate())
    run = start(2, sglang_concurrency=4)
    with held(run, 3):
        pending = run.engine.submit(LATE[:8], SAMPLING, seed=0)
        wait_until(lambda: sum(server.at_once for server in run.servers) == 8)
        run.engine.close()
        with pytest.raises(ValueError, match="while a rollout was in flight"):
            pending.result()
        aborted = set().union(*(server.aborted for server in run.servers))
        assert aborted == {body["rid"] for body in run.requests} and len(aborted) == 8
    run.engine.close()
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert "sglang" not in left
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_rollouts_and_evaluations_are_in_flight_together(start):
    run = start(2)
    with held(run, 2):
        pending = [run.engine.submit(PROMPTS[k : k + 4], SAMPLING, seed=k) for k in (0, 4, 8)]
        assert [one.progress[1] for one in pending] == [12, 12, 12]
        assert all(one.progress[0] < 12 for one in pending)
    greedy = Sampling(temperature=0.0, max_response_len=6)
    assert_exact(run.engine.generate(PROMPTS, greedy, seed=0), PROMPTS, greedy)
    for k, one in zip((0, 4, 8), pending, strict=True):
        assert_exact(one.result(), PROMPTS[k : k + 4])
        assert one.progress == (12, 12)


def test_every_server_scores_a_probe(start):
    run = start(2)
    run.update(5)
    run.servers[1].version = 6
    ids = [1, 7, 20, 33]
    assert run.engine.prompt_log_probs(ids) == {
        server.url: [log_prob(token, version) for token in ids[1:]]
        for server, version in zip(run.servers, (5, 6), strict=True)
    }
    run.servers[0].faults.append(
        spoiled(lambda answer: answer["meta_info"]["input_token_logprobs"].pop())
    )
    with pytest.raises(RolloutUnavailable, match="cannot be used"):
        run.engine.prompt_log_probs(ids)


def test_servers_take_turns_to_give_the_likeliest_tokens(start, caplog):
    run = start(2)
    run.update(5)
    texts = [[1, 7, 20], [1, 9], [1, 30]]
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, return_sampling_mask=True, max_response_len=30
    )
    found = run.engine.top_log_probs(texts, sampling, 4)
    tokens = [next_token(text) for text in texts]
    assert found == [
        {each: log_prob(each, 5) for each in range(token, token + 3)} for token in tokens
    ]
    assert [len(server.requests) for server in run.servers] == [2, 1]
    body = run.servers[1].requests[0]
    params = body["sampling_params"]
    assert (body["input_ids"], body["top_logprobs_num"], params["max_new_tokens"]) == (
        texts[1],
        4,
        1,
    )
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 1.0, -1)
    wrong = {"no tokens": [], "other vocabulary": [[[-1.0, 64, None]]]}
    for top in wrong.values():
        run.servers[0].faults.append(
            spoiled(lambda answer, top=top: answer["meta_info"].update(output_top_logprobs=top))
        )
        assert run.engine.top_log_probs(texts[:2], sampling, 4) == [{}, found[1]]
    assert caplog.text.count("a probe of the likeliest tokens failed") == 2
    assert caplog.text.count("it has no output_top_logprobs") == 1


def test_prompts_that_no_server_could_answer_are_refused_before_any_is_sent(start, checkpoint):
    run = start(1)
    long = Prompt(index=4, text="", token_ids=(3,) * 128)
    messages = []
    for engine in (run.engine, LocalEngine(checkpoint, load_tokenizer(checkpoint))):
        with pytest.raises(
            ValueError, match="prompt 4 has 128 tokens, which leaves no tokens"
        ) as caught:
            engine.generate([PROMPTS[0], long], SAMPLING, seed=0)
        messages.append(str(caught.value))
        with pytest.raises(ValueError, match="prompt 4 has no tokens"):
            engine.generate([Prompt(index=4, text="", token_ids=())], SAMPLING, seed=0)
    assert messages[0] == messages[1]
    assert run.requests == []
    assert_exact(run.engine.generate([], SAMPLING, seed=0), [])


def test_stragglers_are_kept_and_gone_on_with(start):
    run = start(2)
    sampling = Sampling(max_response_len=30, n_samples=2)
    mixed = [LATE[0], EARLY[0], LATE[1], EARLY[1], EARLY[2]]
    with held(run, 0):
        pending = run.engine.submit(mixed, sampling, seed=0, num_groups=2)
        wait_until(lambda: sum(server.at_once for server in run.servers) == 10)
        assert run.engine.unfinished() == []
        for server in run.servers:
            server.stop_after = 8
        groups = pending.result()
    assert len(groups) == 2 and all(group[0].row in EARLY[:3] for group in groups)
    assert_exact(groups, [group[0].row for group in groups], sampling)
    left = run.engine.unfinished()
    assert Counter(group[0].prompt_index for group in [*groups, *left]) == Counter(
        p.index for p in mixed
    )
    begun = [sample for sample in flat(left) if sample.row in LATE]
    assert len(begun) == 4
    for sample in begun:
        assert sample.status is Sample.Status.ABORTED
        assert 0 < len(sample.response_ids) <= 8
        assert sample.response_ids == continuation(
            list(sample.row.token_ids), len(sample.response_ids)
        )
        assert_log_probs(sample)
    kept = {
        (sample.prompt_index, place % 2): len(sample.response_ids)
        for place, sample in enumerate(flat(left))
    }
    stored = reloaded(left)

    assert_exact(
        run.engine.generate(PROMPTS[:2], SAMPLING, seed=0), PROMPTS[:2]
    )  # an evaluation in between
    assert run.engine.unfinished() == left
    run.update(1)
    for server in run.servers:
        server.requests.clear()
    run.engine.resume_unfinished(stored)
    groups = run.engine.submit([EARLY[3]], sampling, seed=1, num_groups=4).result()
    prompts = [*(group[0].row for group in left), EARLY[3]]
    assert_exact(groups, prompts, sampling)
    assert run.engine.unfinished() == []
    for sample in flat(groups):
        if sample in flat(groups[:-1]) and sample.row in LATE:
            old = kept[sample.prompt_index, sample.index % 2]
            assert sample.weight_versions == [0] * old + [1] * (30 - old)
    goes_on = [
        len(sample.response_ids) for sample in flat(left) if sample.status is Sample.Status.ABORTED
    ]
    assert sorted(len(body["input_ids"]) - 3 for body in run.requests) == sorted([*goes_on, 0, 0])


def test_groups_that_are_complete_but_not_wanted_come_first_next_time_and_are_not_asked_for_again(
    start,
):
    run = start(1)
    sampling = Sampling(max_response_len=30)
    with held(run, 10):
        pending = run.engine.submit([LATE[0], *EARLY[:4]], sampling, seed=0, num_groups=4)
        groups = pending.result()
    assert_exact(groups, EARLY[:4], sampling)
    run.engine.resume_unfinished([*run.engine.unfinished(), *groups])
    asked = len(run.requests)
    with held(run, 0):
        groups = run.engine.submit([LATE[2]], sampling, seed=0, num_groups=3).result()
    assert_exact(groups, EARLY[:3], sampling)
    assert [group[0].row for group in run.engine.unfinished()] == [LATE[0], EARLY[3], LATE[2]]
    assert len(run.requests) == asked


def test_a_straggler_that_ends_while_it_is_aborted_is_complete(start):
    run = start(1)
    run.servers[0].deaf = True  # it takes note of no abort: every request ends by itself
    sampling = Sampling(max_response_len=30)
    run.servers[0].stop_after = 10
    pending = run.engine.submit([EARLY[0], LATE[0]], sampling, seed=0, num_groups=1)
    when(lambda: run.servers[0].aborted, run.release)
    assert_exact(pending.result(), [EARLY[0]], sampling)
    ((sample,),) = run.engine.unfinished()
    assert (sample.row, sample.status, sample.response_length) == (
        LATE[0],
        Sample.Status.TRUNCATED,
        30,
    )
    asked = len(run.requests)
    assert_exact(
        run.engine.submit([], sampling, seed=0, num_groups=1).result(), [LATE[0]], sampling
    )
    assert len(run.requests) == asked


def test_what_is_wanted_has_to_be_in_flight(start):
    run = start(1)
    for num_groups in (0, 3):
        with pytest.raises(ValueError, match=f"num_groups is {num_groups}"):
            run.engine.submit(PROMPTS[:2], SAMPLING, seed=0, num_groups=num_groups)
    pending = run.engine.submit(PROMPTS[:2], SAMPLING, seed=0, num_groups=1)
    with pytest.raises(ValueError, match="in flight already"):
        run.engine.submit(PROMPTS[:2], SAMPLING, seed=0, num_groups=1)
    assert len(pending.result()) == 1


SIZE = 2


def work(rank, checkpoint, url, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=SIZE)
    torch.save(play(rank, checkpoint, url), f"{out}/{rank}.pt")
    dist.destroy_process_group()


def play(rank, checkpoint, url):
    """What one rank sees of a run on a server that begins with the weights of another run."""
    weights, sync = Weights(), ByHand()
    sampling = replace(SAMPLING, return_routed_experts=True)
    options = {
        "weight_sync": sync,
        "sglang_url": (url,),
        "sglang_max_retries": 0,
        "sampling": sampling,
    }
    engine = make_engine(Path(checkpoint), weights, **options)
    first = engine.generate(PROMPTS, sampling, 0)
    seen = {"first": first, "iterated": [weights.iterated]}
    engine.update_weights(weights, 4)
    seen["iterated"].append(weights.iterated)
    seen["second"] = engine.generate(PROMPTS, SAMPLING, 0)
    seen["scores"] = engine.prompt_log_probs([1, 7, 20])
    for kind in (400, 500):
        if rank == 0:
            httpx.post(f"{url}/faults", json={"faults": [kind]})
        dist.barrier()
        try:
            engine.generate(PROMPTS, SAMPLING, 0)
        except (ValueError, RolloutUnavailable) as error:
            seen[kind] = (
                type(error) is RolloutUnavailable,
                isinstance(error, ValueError),
                str(error),
            )
    seen["third"] = engine.submit(
        [LATE[0], EARLY[0]], Sampling(max_response_len=30), 0, num_groups=1
    ).result()
    seen["left"] = engine.unfinished()
    seen["metrics"] = engine.metrics()
    engine.close()
    return seen


@pytest.mark.slow
def test_two_ranks_see_the_same(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "qwen3_moe", num_hidden_layers=LAYERS)
    with fake_servers(1) as (server,):
        server.weight_version, server.version = "7", 7
        spawn(work, args=(str(checkpoint), server.url, str(tmp_path)), nprocs=SIZE)
        first, second = (
            torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(SIZE)
        )
    assert_exact(first["first"], PROMPTS)
    for seen, has_experts in ((first, True), (second, False)):
        assert {sample.rollout_routed_experts is not None for sample in flat(seen["first"])} == {
            has_experts
        }
    assert_exact(first["second"], PROMPTS)
    assert versions_of(first["first"]) == {0}
    assert versions_of(first["second"]) == {4}
    assert first["iterated"] == [1, 2]
    assert first["scores"] == {server.url: [log_prob(7, 4), log_prob(20, 4)]}
    assert first[400][:2] == (True, False) and "HTTP 400: max_new_tokens must be" in first[400][2]
    assert first[500][:2] == (True, False) and "a request failed 1 time" in first[500][2]
    assert sorted(group[0].prompt_index for group in [*first["third"], *first["left"]]) == sorted(
        (LATE[0].index, EARLY[0].index)
    )
    assert first["metrics"]["rollout/sglang_live_servers"] == 1 and second.pop("metrics") == {}
    assert {name: first[name] for name in second} == second
