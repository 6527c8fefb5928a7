"""Complete and partial rollouts on servers: samples, refusals, concurrency and stragglers."""

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import torch.distributed as dist

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.rollout_engine import RolloutEngine, RolloutUnavailable
from slime_tis.trainer.engines.servers.responses import Limits
from tests.checkpoints import make_checkpoint
from tests.rollout.sglang.fake_sglang import (
    LAYERS,
    FakeSGLang,
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
    Run,
    Weights,
    assert_exact,
    assert_log_probs,
    held,
    make_engine,
    versions_of,
)
from tests.runs import spawn
from tests.samples import flat, make_sample, reloaded


def test_samples_keep_the_order_of_the_prompts(start):
    run = start(3)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {0}


def test_responses_are_decoded_without_special_tokens(start, checkpoint):
    run = start(3)
    decode = load_tokenizer(checkpoint).decode
    for sample in flat(run.engine.generate(PROMPTS, SAMPLING, seed=0)):
        assert sample.response == decode(sample.response_ids, skip_special_tokens=True)


def test_every_server_gets_requests(start):
    run = start(3)
    run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert min(len(server.requests) for server in run.servers) > 0


def test_request_ids_differ(start):
    run = start(3)
    run.engine.generate(PROMPTS, SAMPLING, seed=0)
    ids = [body["rid"] for body in run.requests]
    assert len(set(ids)) == len(ids) == 36
    assert len({len(request_id) for request_id in ids}) == 1


def test_a_rollout_without_faults_has_metrics_of_zero(start):
    run = start(3)
    run.engine.generate(PROMPTS, SAMPLING, seed=0)
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
    limits = Limits(
        context_len=None, vocab_size=None, max_input_len=10, max_total_len=16, mask_tokens=None
    )
    assert limits.after(length, Sampling(max_response_len=100)) == room


def deterministic(servers: list[FakeSGLang]) -> None:
    for server in servers:
        server.info.update(enable_deterministic_inference=True)


def sampling_seeds(run: Run, seed: int) -> list[int]:
    """The seeds that the servers get for one rollout, in the order of the request IDs."""
    for server in run.servers:
        server.requests.clear()
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=seed), PROMPTS)
    requests = sorted(run.requests, key=lambda body: body["rid"])
    return [body["sampling_params"]["sampling_seed"] for body in requests]


def test_every_response_has_its_own_seed(start):
    seeds = sampling_seeds(start(2, deterministic), seed=5)
    assert len(set(seeds)) == 36
    assert 0 <= min(seeds) <= max(seeds) < 2**63


def test_equal_rollout_seeds_give_equal_seeds(start):
    run = start(2, deterministic)
    assert sampling_seeds(run, seed=5) == sampling_seeds(run, seed=5)


def test_different_rollout_seeds_share_no_seed(start):
    run = start(2, deterministic)
    assert not set(sampling_seeds(run, seed=5)) & set(sampling_seeds(run, seed=6))


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


def test_an_evaluation_runs_beside_several_rollouts(start):
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


TEXTS = [[1, 7, 20], [1, 9], [1, 30]]
TRUNCATED = Sampling(
    temperature=0.7, top_p=0.9, top_k=5, return_sampling_mask=True, max_response_len=30
)


def likeliest(text: list[int]) -> dict[int, float]:
    """The three likeliest tokens after a text, with their log-probs under weights of version 5."""
    token = next_token(text)
    return {each: log_prob(each, 5) for each in range(token, token + 3)}


def test_the_likeliest_tokens_have_the_log_probs_of_the_model(start):
    run = start(2)
    run.update(5)
    top = run.engine.top_log_probs(TEXTS, TRUNCATED, 4)
    assert top == [likeliest(text) for text in TEXTS]


def test_servers_take_turns_to_give_the_likeliest_tokens(start):
    run = start(2)
    run.engine.top_log_probs(TEXTS, TRUNCATED, 4)
    assert [len(server.requests) for server in run.servers] == [2, 1]


def test_the_likeliest_tokens_are_asked_for_without_truncation(start):
    run = start(2)
    run.engine.top_log_probs(TEXTS, TRUNCATED, 4)
    body = run.servers[1].requests[0]
    params = body["sampling_params"]
    assert (body["input_ids"], body["top_logprobs_num"]) == (TEXTS[1], 4)
    assert params["max_new_tokens"] == 1
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 1.0, -1)


UNUSABLE_TOP = {
    "no tokens": ([], 1),
    "other vocabulary": ([[[-1.0, 64, None]]], 0),
}
"""Answers of a server, and how often the log then says that output_top_logprobs is missing."""


@pytest.mark.parametrize(("top", "missing"), UNUSABLE_TOP.values(), ids=UNUSABLE_TOP)
def test_an_unusable_answer_gives_no_likeliest_tokens(start, caplog, top, missing):
    run = start(2)
    run.update(5)
    run.servers[0].faults.append(
        spoiled(lambda answer: answer["meta_info"].update(output_top_logprobs=top))
    )
    assert run.engine.top_log_probs(TEXTS[:2], TRUNCATED, 4) == [{}, likeliest(TEXTS[1])]
    assert caplog.text.count("a probe of the likeliest tokens failed") == 1
    assert caplog.text.count("it has no output_top_logprobs") == missing


TOO_LONG = Prompt(index=4, text="", token_ids=(3,) * 128)
EMPTY = Prompt(index=4, text="", token_ids=())
LEAVES_NO_TOKENS = "prompt 4 has 128 tokens, which leaves no tokens"


def refusal(engine: RolloutEngine, prompt: Prompt, message: str) -> str:
    """The error of a rollout with this prompt after a good one."""
    with pytest.raises(ValueError, match=message) as caught:
        engine.generate([PROMPTS[0], prompt], SAMPLING, seed=0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        pytest.param(TOO_LONG, LEAVES_NO_TOKENS, id="too long"),
        pytest.param(EMPTY, "prompt 4 has no tokens", id="empty"),
    ],
)
def test_an_unusable_prompt_is_refused_before_any_is_sent(start, prompt, message):
    run = start(1)
    refusal(run.engine, prompt, message)
    assert run.requests == []


def test_the_local_engine_refuses_an_empty_prompt(checkpoint):
    engine = LocalEngine(checkpoint, load_tokenizer(checkpoint))
    refusal(engine, EMPTY, "prompt 4 has no tokens")


def test_both_engines_refuse_a_long_prompt_with_one_message(start, checkpoint):
    local = LocalEngine(checkpoint, load_tokenizer(checkpoint))
    remote = start(1).engine
    assert refusal(remote, TOO_LONG, LEAVES_NO_TOKENS) == refusal(local, TOO_LONG, LEAVES_NO_TOKENS)


def test_a_rollout_without_prompts_has_no_groups(start):
    assert_exact(start(1).engine.generate([], SAMPLING, seed=0), [])


PARTIAL = Sampling(max_response_len=30, n_samples=2)
MIXED = [LATE[0], EARLY[0], LATE[1], EARLY[1], EARLY[2]]


def partial_rollout(run: Run) -> list[list[Sample]]:
    """The two groups that are complete when the rollout of MIXED stops its stragglers."""
    with held(run, 0):
        pending = run.engine.submit(MIXED, PARTIAL, seed=0, num_groups=2)
        wait_until(lambda: sum(server.at_once for server in run.servers) == 10)
        assert run.engine.unfinished() == []  # nothing is left while the rollout runs
        for server in run.servers:
            server.stop_after = 8
        return pending.result()


def test_a_partial_rollout_returns_the_first_complete_groups(start):
    groups = partial_rollout(start(2))
    assert len(groups) == 2
    assert all(group[0].row in EARLY[:3] for group in groups)
    assert_exact(groups, [group[0].row for group in groups], PARTIAL)


def test_every_group_is_complete_or_kept(start):
    run = start(2)
    groups = partial_rollout(run) + run.engine.unfinished()
    indices = [group[0].prompt_index for group in groups]
    assert sorted(indices) == sorted(prompt.index for prompt in MIXED)


def test_stragglers_keep_the_tokens_sampled_before_the_abort(start):
    run = start(2)
    partial_rollout(run)
    stragglers = [sample for sample in flat(run.engine.unfinished()) if sample.row in LATE]
    assert len(stragglers) == 4
    for sample in stragglers:
        length = len(sample.response_ids)
        assert sample.status is Sample.Status.ABORTED
        assert 0 < length <= 8
        assert sample.response_ids == continuation(list(sample.row.token_ids), length)
        assert_log_probs(sample)


def test_an_evaluation_leaves_the_stragglers_as_they_are(start):
    run = start(2)
    partial_rollout(run)
    stragglers = run.engine.unfinished()
    assert_exact(run.engine.generate(PROMPTS[:2], SAMPLING, seed=0), PROMPTS[:2])
    assert run.engine.unfinished() == stragglers


class Resumed(NamedTuple):
    """A rollout that continues reloaded stragglers with new weights, beside a new prompt."""

    run: Run
    stragglers: list[list[Sample]]
    groups: list[list[Sample]]


@pytest.fixture
def resumed(start) -> Resumed:
    run = start(2)
    partial_rollout(run)
    stragglers = run.engine.unfinished()
    stored = reloaded(stragglers)
    run.engine.generate(PROMPTS[:2], SAMPLING, seed=0)  # an evaluation in between
    run.update(1)
    for server in run.servers:
        server.requests.clear()
    run.engine.resume_unfinished(stored)
    groups = run.engine.submit([EARLY[3]], PARTIAL, seed=1, num_groups=4).result()
    return Resumed(run, stragglers, groups)


def test_resumed_stragglers_come_before_new_prompts(resumed: Resumed):
    prompts = [group[0].row for group in resumed.stragglers]
    assert_exact(resumed.groups, [*prompts, EARLY[3]], PARTIAL)
    assert resumed.run.engine.unfinished() == []


def test_resumed_tokens_have_the_version_that_sampled_them(resumed: Resumed):
    continued = flat(resumed.groups[:-1])
    for sample, straggler in zip(continued, flat(resumed.stragglers), strict=True):
        if sample.row in LATE:
            length = len(straggler.response_ids)
            assert sample.weight_versions == [0] * length + [1] * (30 - length)


def test_resumed_requests_contain_the_tokens_so_far(resumed: Resumed):
    lengths = [0, 0]  # the two samples of the new prompt
    for sample in flat(resumed.stragglers):
        if sample.status is Sample.Status.ABORTED:
            lengths.append(len(sample.response_ids))
    sent = [len(body["input_ids"]) - 3 for body in resumed.run.requests]
    assert sorted(sent) == sorted(lengths)


def test_surplus_complete_groups_come_first_next_time(start):
    """They are complete, so that no server is asked for them again."""
    run = start(1)
    with held(run, 10):
        pending = run.engine.submit([LATE[0], *EARLY[:4]], PARTIAL, seed=0, num_groups=4)
        groups = pending.result()
    assert_exact(groups, EARLY[:4], PARTIAL)
    run.engine.resume_unfinished([*run.engine.unfinished(), *groups])
    num_requests = len(run.requests)
    with held(run, 0):
        groups = run.engine.submit([LATE[2]], PARTIAL, seed=0, num_groups=3).result()
    assert_exact(groups, EARLY[:3], PARTIAL)
    assert [group[0].row for group in run.engine.unfinished()] == [LATE[0], EARLY[3], LATE[2]]
    assert len(run.requests) == num_requests


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


@pytest.mark.parametrize("num_groups", [0, 3])
def test_the_number_of_groups_must_fit_the_prompts(start, num_groups):
    with pytest.raises(ValueError, match=f"num_groups is {num_groups}"):
        start(1).engine.submit(PROMPTS[:2], SAMPLING, seed=0, num_groups=num_groups)


def test_a_second_partial_rollout_is_refused(start):
    run = start(1)
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


class TwoRanks(NamedTuple):
    """What both ranks see, and the address of their server."""

    first: dict[Any, Any]
    second: dict[Any, Any]
    url: str


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    out = tmp_path_factory.mktemp("two_ranks")
    checkpoint = make_checkpoint(out / "checkpoint", "qwen3_moe", num_hidden_layers=LAYERS)
    with fake_servers(1) as (server,):
        server.weight_version = "7"
        server.version = 7
        spawn(work, args=(str(checkpoint), server.url, str(out)), nprocs=SIZE)
        first = torch.load(out / "0.pt", weights_only=False)
        second = torch.load(out / "1.pt", weights_only=False)
        return TwoRanks(first, second, server.url)


@pytest.mark.slow
def test_two_ranks_have_the_same_results(two_ranks: TwoRanks):
    seen = {name: value for name, value in two_ranks.second.items() if name != "metrics"}
    assert {name: two_ranks.first[name] for name in seen} == seen


@pytest.mark.slow
def test_only_the_first_rank_has_metrics(two_ranks: TwoRanks):
    assert two_ranks.first["metrics"]["rollout/sglang_live_servers"] == 1
    assert two_ranks.second["metrics"] == {}


@pytest.mark.slow
def test_only_the_first_rank_has_routed_experts(two_ranks: TwoRanks):
    for sample in flat(two_ranks.first["first"]):
        assert sample.rollout_routed_experts is not None
    for sample in flat(two_ranks.second["first"]):
        assert sample.rollout_routed_experts is None


@pytest.mark.slow
@pytest.mark.parametrize(("rollout", "version"), [("first", 0), ("second", 4)])
def test_two_ranks_sample_with_the_weights_of_the_run(two_ranks: TwoRanks, rollout, version):
    groups = two_ranks.first[rollout]
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {version}


@pytest.mark.slow
def test_two_ranks_send_the_weights_once_per_version(two_ranks: TwoRanks):
    assert two_ranks.first["iterated"] == [1, 2]


@pytest.mark.slow
def test_two_ranks_score_a_probe(two_ranks: TwoRanks):
    assert two_ranks.first["scores"] == {two_ranks.url: [log_prob(7, 4), log_prob(20, 4)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "message"),
    [(400, "HTTP 400: max_new_tokens must be"), (500, "a request failed 1 time")],
)
def test_a_failed_rollout_is_unavailable_for_two_ranks(two_ranks: TwoRanks, status, message):
    is_unavailable, is_value_error, text = two_ranks.first[status]
    assert is_unavailable
    assert not is_value_error
    assert message in text


@pytest.mark.slow
def test_two_ranks_keep_the_straggler(two_ranks: TwoRanks):
    groups = two_ranks.first["third"] + two_ranks.first["left"]
    indices = [group[0].prompt_index for group in groups]
    assert sorted(indices) == sorted((LATE[0].index, EARLY[0].index))
