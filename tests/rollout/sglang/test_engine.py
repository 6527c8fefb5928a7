"""Whole rollouts against servers that fail: nothing is lost, nothing counted twice, every token as it has to be."""

import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from torch import Tensor

from slime_tis.rollout.checkpoint import load_tokenizer
from slime_tis.rollout.dump import from_dict, to_dict
from slime_tis.rollout.engine import RolloutUnavailable, WeightSource
from slime_tis.rollout.local import LocalEngine
from slime_tis.rollout.sample import Prompt, Sample, Sampling
from slime_tis.rollout.sglang.client import Server
from slime_tis.rollout.sglang.config import SGLangConfig
from slime_tis.rollout.sglang.engine import SGLangEngine
from slime_tis.rollout.sglang.health import Timeouts
from tests.checkpoints import make_checkpoint
from tests.rollout.sglang.replay import STOP, Replay, continuation, log_prob, replays, spoiled

QUICK = Timeouts(recovery=30.0, first_retry=0.005, max_retry=0.02, health_interval=0.01)
LIMIT = 20
SAMPLING = Sampling(max_response_len=LIMIT, n_samples=3)


def prompt(index: int) -> Prompt:
    return Prompt(index=index, text=f"p{index}", token_ids=(1, 3 + index % 60, 4 + index // 60))


PROMPTS = [prompt(index) for index in range(12)]
EARLY = [p for p in map(prompt, range(300)) if len(continuation(list(p.token_ids), 60)) <= 5]
LATE = [p for p in map(prompt, range(300)) if len(continuation(list(p.token_ids), 60)) == 60]


class Weights:
    """A policy's weights, and how often they were iterated."""

    def __init__(self) -> None:
        self.iterated = 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        self.iterated += 1
        yield "model.norm.weight", torch.ones(2)


class ByHand:
    """A way of weights that needs the trainer each time, as the distributed one does."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.pushes: list[tuple[list[str], int]] = []
        self.between: Callable[[], None] = lambda: None
        """Called while servers are paused."""

    async def push(self, servers: Sequence[Server], source: WeightSource, version: int) -> list[Server]:
        self.errors = {}
        self.pushes.append(([server.url for server in servers], version))
        assert [name for name, _ in source()] == ["model.norm.weight"]
        for server in servers:
            try:
                await server.post("/pause_generation", {"mode": "retract"})
                self.between()
                await server.post("/update_weights_from_disk", {"weight_version": str(version)})
                await server.post("/continue_generation", {})
            except Exception as error:
                self.errors[server.url] = str(error)
        return [server for server in servers if server.url in self.errors]

    async def restore(self, server: Server) -> bool:
        return False

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


class Run:
    """Servers, an engine on them, and what it was made of."""

    def __init__(self, servers: list[Replay], checkpoint: Path, **options: Any) -> None:
        self.servers, self.weights, self.sync = servers, Weights(), ByHand()
        timeouts, version = options.pop("timeouts", QUICK), options.pop("weights_version", None)
        options = {"sglang_url": tuple(server.url for server in servers), "sglang_request_timeout": 30.0, **options}
        by_hand = {} if options.get("sglang_weight_sync") == "disk" else {"weight_sync": self.sync}
        self.engine = SGLangEngine(
            SGLangConfig(**options),
            checkpoint,
            load_tokenizer(checkpoint),
            output_dir=checkpoint,
            weights=self.weights,
            timeouts=timeouts,
            weights_version=version,
            **by_hand,
        )

    def update(self, version: int) -> None:
        self.engine.update_weights(self.weights, version)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [body for server in self.servers for body in server.requests]


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:

        def make(count: int, prepare: Callable[[list[Replay]], None] = lambda servers: None, **options: Any) -> Run:
            servers = stack.enter_context(replays(count))
            prepare(servers)
            run = Run(servers, checkpoint, **options)
            stack.callback(run.engine.close)
            return run

        yield make


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def flat(groups: list[list[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def assert_exact(groups: list[list[Sample]], prompts: Sequence[Prompt], sampling: Sampling = SAMPLING) -> None:
    """Every sample is there once, in its place, and is what the model says."""
    assert [[sample.prompt for sample in group] for group in groups] == [[p] * sampling.n_samples for p in prompts]
    for number, sample in enumerate(flat(groups)):
        assert (sample.group_index, sample.sample_index) == (number // sampling.n_samples, number)
        assert sample.response_ids == continuation(list(sample.prompt.token_ids), sampling.max_response_len)
        assert sample.finish_reason == ("stop" if sample.response_ids[-1] == STOP else "length")
        assert_log_probs(sample)


def assert_log_probs(sample: Sample) -> None:
    assert sample.rollout_log_probs == [
        log_prob(token, version) for token, version in zip(sample.response_ids, sample.weight_versions, strict=True)
    ]
    assert sample.loss_mask == [1] * len(sample.response_ids)


def test_samples_are_those_of_the_model_in_the_prompts_order(start: Callable[..., Run], checkpoint: Path) -> None:
    run = start(3)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    assert {version for sample in flat(groups) for version in sample.weight_versions} == {0}
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


def test_requests_in_flight_are_bounded(start: Callable[..., Run]) -> None:
    run = start(2, sglang_concurrency=4)
    with held(run, 1):
        pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
        wait_until(lambda: sum(server.at_once for server in run.servers) == 8)
    assert_exact(pending.result(), PROMPTS)
    assert [server.most_at_once for server in run.servers] == [4, 4]


def edit_log_probs(edit: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    return spoiled(lambda answer: edit(answer["meta_info"]["output_token_logprobs"]))


FAULTS = [
    500,
    503,
    429,
    "drop",
    lambda answer: "<html>",
    lambda answer: {},
    edit_log_probs(lambda entries: entries.pop()),
    edit_log_probs(lambda entries: entries.clear()),
    edit_log_probs(lambda entries: entries[0].__setitem__(0, math.nan)),
    edit_log_probs(lambda entries: entries[-1].__setitem__(0, None)),
    edit_log_probs(lambda entries: entries[-1].__setitem__(0, 3.0)),
    edit_log_probs(lambda entries: entries[0].__setitem__(1, 1)),
    spoiled(lambda answer: answer["output_ids"].pop()),
    spoiled(lambda answer: answer["meta_info"].pop("output_token_logprobs")),
    spoiled(lambda answer: answer["meta_info"]["weight_versions"].clear()),
    spoiled(lambda answer: answer["meta_info"].update(finish_reason=None)),
]


def test_every_fault_is_tried_again_and_counts_once(start: Callable[..., Run]) -> None:
    run = start(3, sglang_max_retries=50)
    run.servers[0].faults.extend(FAULTS)
    run.servers[1].faults.extend(reversed(FAULTS))
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    faults = 2 * len(FAULTS) - sum(len(server.faults) for server in run.servers)
    assert faults > 10
    ids = [body["rid"] for body in run.requests]
    assert len(set(ids)) == len(ids) == 36 + faults
    assert run.engine.metrics()["rollout/sglang_retries"] == faults
    assert set(Counter(request_id[:-5] for request_id in ids)) == {
        f"{ids[0][:18]}-g{group:06d}-s{place:04d}" for group in range(12) for place in range(3)
    }


def test_an_answer_from_other_weights_is_tried_again(start: Callable[..., Run]) -> None:
    run = start(2)
    for server in run.servers:
        server.faults.append(
            spoiled(lambda answer: answer["meta_info"].update(weight_versions=None, weight_version="99"))
        )
    assert_exact(
        run.engine.generate(PROMPTS[:1], Sampling(max_response_len=LIMIT), seed=0),
        PROMPTS[:1],
        Sampling(max_response_len=LIMIT),
    )
    assert run.engine.metrics()["rollout/sglang_retries"] == 2


def test_a_request_that_hangs_goes_elsewhere_and_its_late_answer_is_not_counted(start: Callable[..., Run]) -> None:
    run = start(2, sglang_request_timeout=0.3)
    run.servers[0].stop_after = 0  # it would answer, but later
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    wait_until(lambda: run.servers[0].requests)
    wait_until(lambda: run.servers[0].aborted)
    run.servers[0].stop_after = None
    assert_exact(pending.result(), PROMPTS)


def test_a_long_response_that_exceeds_the_timeout_goes_on_from_its_tokens(start: Callable[..., Run]) -> None:
    run = start(1, sglang_request_timeout=0.1)
    run.servers[0].stop_after = 4
    sampling = Sampling(max_response_len=10)
    groups = run.engine.generate([LATE[0]], sampling, seed=0)
    assert_exact(groups, [LATE[0]], sampling)
    whole = [*LATE[0].token_ids, *groups[0][0].response_ids]
    assert [body["input_ids"] for body in run.requests] == [whole[:3], whole[:7], whole[:11]]
    assert [body["sampling_params"]["max_new_tokens"] for body in run.requests] == [10, 6, 2]
    assert run.engine.metrics()["rollout/sglang_retries"] == 0


def test_a_server_dies_in_mid_batch_and_returns_with_the_current_weights(start: Callable[..., Run]) -> None:
    run = start(2)
    run.update(1)
    victim = run.servers[1]
    victim.stop_after = 3
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    wait_until(lambda: victim.at_once)
    victim.die()
    victim.stop_after = None
    assert_exact(pending.result(), PROMPTS)
    wait_until(lambda: run.engine.metrics()["rollout/sglang_deaths"] == 1)
    run.update(2)
    assert run.sync.pushes[-1] == ([run.servers[0].url], 2)

    served = len(victim.requests)
    victim.come_back()
    wait_until(lambda: victim.count("/model_info") >= 2)
    run.servers[0].stop_after = 1
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=1)
    threading.Timer(0.3, lambda: setattr(run.servers[0], "stop_after", None)).start()
    groups = pending.result()
    assert_exact(groups, PROMPTS)
    assert run.sync.pushes[-1] == ([victim.url], 2)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=2), PROMPTS)
    assert len(victim.requests) > served and victim.weight_version == "2"
    assert {version for sample in flat(groups) for version in sample.weight_versions} == {2}
    assert run.engine.metrics()["rollout/sglang_returns"] == 1


def test_weights_on_disk_are_given_to_a_returning_server_without_the_trainer(start: Callable[..., Run]) -> None:
    run = start(1, sglang_weight_sync="disk")
    run.update(1)
    iterated = run.weights.iterated
    run.servers[0].stop_after = 2
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    wait_until(lambda: run.servers[0].at_once)
    run.servers[0].die()
    run.servers[0].stop_after = None
    wait_until(lambda: run.engine.metrics()["rollout/sglang_deaths"] == 1)
    run.servers[0].come_back()
    wait_until(lambda: run.engine.metrics()["rollout/sglang_returns"] == 1)
    groups = pending.result()
    assert_exact(groups, PROMPTS)
    assert {version for sample in flat(groups) for version in sample.weight_versions} == {1}
    assert run.weights.iterated == iterated


def test_a_server_started_anew_unseen_gives_no_sample(start: Callable[..., Run]) -> None:
    run = start(2)
    run.update(1)
    run.servers[0].weight_version, run.servers[0].version = "default", 0
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    assert {version for sample in flat(groups) for version in sample.weight_versions} == {1}
    assert run.sync.pushes[-1] == ([run.servers[0].url], 1)


def test_servers_with_weights_of_an_earlier_run_get_the_policys_first(start: Callable[..., Run]) -> None:
    def used(servers: list[Replay]) -> None:
        servers[0].weight_version, servers[0].version = "7", 7

    run = start(2, used)
    run.servers[1].stop_after = 0
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    threading.Timer(0.2, lambda: setattr(run.servers[1], "stop_after", None)).start()
    assert_exact(pending.result(), PROMPTS)
    assert run.sync.pushes == [([run.servers[0].url], 0)]
    assert run.weights.iterated == 1


def test_weights_of_a_returning_server_carry_their_own_version(start: Callable[..., Run]) -> None:
    def used(servers: list[Replay]) -> None:
        servers[0].weight_version, servers[0].version = "7", 7

    run = start(1, used, weights_version=lambda: 9)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    assert {version for sample in flat(groups) for version in sample.weight_versions} == {9}
    assert run.engine.weight_version == 0


@pytest.mark.parametrize("has_spans", [True, False])
def test_tokens_carry_the_versions_that_sampled_them(start: Callable[..., Run], has_spans: bool) -> None:
    def prepare(servers: list[Replay]) -> None:
        for server in servers:
            server.has_spans = has_spans

    run = start(2, prepare)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    for server in run.servers:
        server.requests.clear()
        server.stop_after = 4
    sampling = Sampling(max_response_len=12, n_samples=2)
    pending = run.engine.submit(LATE[:4], sampling, seed=0)
    for version in (3, 4):
        wait_until(lambda: sum(server.at_once for server in run.servers) == 8)
        time.sleep(0.05)
        run.update(version)
        for server in run.servers:
            server.stop_after = None if version == 4 else 8 if has_spans else 4
    groups = pending.result()
    assert_exact(groups, LATE[:4], sampling)
    for sample in flat(groups):
        assert sample.weight_versions == [0] * 4 + [3] * 4 + [4] * 4
    assert len(run.requests) == (8 if has_spans else 24)
    assert run.engine.metrics()["rollout/sglang_retries"] == 0


def test_a_server_that_fails_to_take_weights_serves_again_once_it_has_them(start: Callable[..., Run]) -> None:
    run = start(2)
    run.servers[1].updates_fail = True
    run.update(1)
    assert run.engine.weight_version == 1
    assert_exact(run.engine.generate(PROMPTS[:4], SAMPLING, seed=0), PROMPTS[:4])
    assert run.servers[1].requests == []
    run.servers[1].updates_fail = run.servers[1].paused = False
    run.update(2)
    wait_until(lambda: run.servers[1].version == 2 or run.engine.generate(PROMPTS, SAMPLING, seed=0))
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=1)
    assert_exact(groups, PROMPTS)
    assert {version for sample in flat(groups) for version in sample.weight_versions} == {2}


@contextmanager
def held(run: Run, tokens: int) -> Iterator[None]:
    for server in run.servers:
        server.stop_after = tokens
    yield
    for server in run.servers:
        server.stop_after = None


def test_stragglers_are_kept_and_gone_on_with(start: Callable[..., Run]) -> None:
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
    assert len(groups) == 2 and all(group[0].prompt in EARLY[:3] for group in groups)
    assert_exact(groups, [group[0].prompt for group in groups], sampling)
    left = run.engine.unfinished()
    assert Counter(group[0].prompt.index for group in [*groups, *left]) == Counter(p.index for p in mixed)
    begun = [sample for sample in flat(left) if sample.prompt in LATE]
    assert len(begun) == 4
    for sample in begun:
        assert sample.finish_reason == "abort"
        assert 0 < len(sample.response_ids) <= 8
        assert sample.response_ids == continuation(list(sample.prompt.token_ids), len(sample.response_ids))
        assert_log_probs(sample)
    kept = {(sample.prompt.index, place % 2): len(sample.response_ids) for place, sample in enumerate(flat(left))}
    stored = json.loads(json.dumps([[to_dict(sample) for sample in group] for group in left]))

    assert_exact(run.engine.generate(PROMPTS[:2], SAMPLING, seed=0), PROMPTS[:2])  # an evaluation in between
    assert run.engine.unfinished() == left
    run.update(1)
    for server in run.servers:
        server.requests.clear()
    run.engine.resume_unfinished([[from_dict(row) for row in group] for group in stored])
    groups = run.engine.submit([EARLY[3]], sampling, seed=1, num_groups=4).result()
    prompts = [*(group[0].prompt for group in left), EARLY[3]]
    assert_exact(groups, prompts, sampling)
    assert run.engine.unfinished() == []
    for sample in flat(groups):
        if sample in flat(groups[:-1]) and sample.prompt in LATE:
            old = kept[sample.prompt.index, sample.sample_index % 2]
            assert sample.weight_versions == [0] * old + [1] * (30 - old)
    goes_on = [len(sample.response_ids) for sample in flat(left) if sample.finish_reason == "abort"]
    assert sorted(len(body["input_ids"]) - 3 for body in run.requests) == sorted([*goes_on, 0, 0])


def test_groups_that_are_complete_but_not_wanted_come_first_next_time_and_are_not_asked_for_again(
    start: Callable[..., Run],
) -> None:
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
    assert [group[0].prompt for group in run.engine.unfinished()] == [LATE[0], EARLY[3], LATE[2]]
    assert len(run.requests) == asked


def test_a_straggler_that_ends_while_it_is_aborted_is_complete(start: Callable[..., Run]) -> None:
    run = start(1)
    run.servers[0].deaf = True  # it takes note of no abort: every request ends by itself
    sampling = Sampling(max_response_len=30)
    run.servers[0].stop_after = 10
    pending = run.engine.submit([EARLY[0], LATE[0]], sampling, seed=0, num_groups=1)
    threading.Timer(0.2, lambda: setattr(run.servers[0], "stop_after", None)).start()
    assert_exact(pending.result(), [EARLY[0]], sampling)
    ((sample,),) = run.engine.unfinished()
    assert (sample.prompt, sample.finish_reason, len(sample.response_ids)) == (LATE[0], "length", 30)
    asked = len(run.requests)
    assert_exact(run.engine.submit([], sampling, seed=0, num_groups=1).result(), [LATE[0]], sampling)
    assert len(run.requests) == asked


def test_what_is_wanted_has_to_be_in_flight(start: Callable[..., Run]) -> None:
    run = start(1)
    for num_groups in (0, 3):
        with pytest.raises(ValueError, match=f"{num_groups} groups are wanted of 2 in flight"):
            run.engine.submit(PROMPTS[:2], SAMPLING, seed=0, num_groups=num_groups)
    pending = run.engine.submit(PROMPTS[:2], SAMPLING, seed=0, num_groups=1)
    with pytest.raises(ValueError, match="in flight already"):
        run.engine.submit(PROMPTS[:2], SAMPLING, seed=0, num_groups=1)
    assert len(pending.result()) == 1
    assert pending.result() is pending.result()


def test_prompts_that_no_server_could_answer_are_refused_before_any_is_sent(
    start: Callable[..., Run], checkpoint: Path
) -> None:
    run = start(1)
    long = Prompt(index=4, text="", token_ids=(3,) * 128)
    sentences = []
    for engine in (run.engine, LocalEngine(checkpoint, load_tokenizer(checkpoint))):
        with pytest.raises(
            ValueError, match="prompt 4 has 128 tokens, which leaves no tokens for a response"
        ) as caught:
            engine.generate([PROMPTS[0], long], SAMPLING, seed=0)
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]
    with pytest.raises(ValueError, match="prompt 4 has token 64, but the model's vocabulary ends at 63"):
        run.engine.generate([PROMPTS[0], Prompt(index=4, text="", token_ids=(1, 64))], SAMPLING, seed=0)
    with pytest.raises(ValueError, match="prompt 4 has no tokens"):
        run.engine.generate([Prompt(index=4, text="", token_ids=())], SAMPLING, seed=0)
    assert run.requests == []
    assert_exact(run.engine.generate([], SAMPLING, seed=0), [])


def test_responses_end_with_the_context(start: Callable[..., Run]) -> None:
    late = next(
        p
        for i in range(300)
        if len(continuation(list((p := Prompt(index=i, text="", token_ids=(1, *[3 + i % 60] * 119))).token_ids), 9))
        == 9
    )
    sampling = Sampling(max_response_len=50)
    ((sample,),) = start(1).engine.generate([late], sampling, seed=0)
    assert (len(sample.token_ids), sample.finish_reason) == (127, "length")  # 0.5.9 refuses to be asked for all 128


def test_inputs_that_servers_do_not_take_are_not_sent(start: Callable[..., Run]) -> None:
    def short(servers: list[Replay]) -> None:
        servers[0].longest = 8

    run = start(2, short)
    long = Prompt(index=4, text="", token_ids=(3,) * 8)
    with pytest.raises(ValueError, match="prompt 4 has 8 tokens, but the servers take 7 at most; set --rollout-max-p"):
        run.engine.generate([long], SAMPLING, seed=0)
    sampling = Sampling(max_response_len=30)
    begun = Sample(
        prompt=LATE[0],
        group_index=0,
        sample_index=0,
        response_ids=continuation(list(LATE[0].token_ids), 5),
        response="",
        rollout_log_probs=[-1.0] * 5,
        loss_mask=[1] * 5,
        weight_versions=[0] * 5,
        finish_reason="abort",
    )
    run.engine.resume_unfinished([[begun]])
    ((sample,),) = run.engine.submit([], sampling, seed=0, num_groups=1).result()
    assert (sample.response_ids, sample.finish_reason) == (begun.response_ids, "length")
    assert run.requests == []


def test_a_refused_request_stops_the_rollout_with_the_servers_words(start: Callable[..., Run]) -> None:
    run = start(2)
    run.servers[0].faults.append(400)
    with pytest.raises(
        RolloutUnavailable, match=f"{run.servers[0].url}/generate answered HTTP 400: max_new_tokens must be"
    ):
        run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)


def test_every_response_has_a_seed_of_its_own_where_servers_take_one(start: Callable[..., Run]) -> None:
    def seeds(run: Run, seed: int) -> dict[tuple[int, ...], list[int]]:
        """Of the responses to each prompt."""
        for server in run.servers:
            server.requests.clear()
        assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=seed), PROMPTS)
        found: dict[tuple[int, ...], list[int]] = {}
        for body in sorted(run.requests, key=lambda body: body["rid"]):
            found.setdefault(tuple(body["input_ids"]), []).append(body["sampling_params"]["sampling_seed"])
        return found

    def deterministic(servers: list[Replay]) -> None:
        for server in servers:
            server.deterministic = True

    run = start(2, deterministic)
    first = seeds(run, seed=5)
    assert len({one for ones in first.values() for one in ones}) == 36, "none twice, least of all within a group"
    assert all(0 <= one < 2**63 for ones in first.values() for one in ones)
    assert seeds(run, seed=5) == first
    assert not {one for ones in seeds(run, seed=6).values() for one in ones} & {
        one for o in first.values() for one in o
    }


def test_servers_that_take_no_seed_get_none(start: Callable[..., Run]) -> None:
    run = start(1)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=5), PROMPTS)
    assert not [body for body in run.requests if "sampling_seed" in body["sampling_params"]]


def test_a_server_with_another_key_is_left_to_the_others(start: Callable[..., Run]) -> None:
    run = start(2)
    run.servers[0].faults.extend([401, 403, 404])
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    assert run.engine.metrics()["rollout/sglang_retries"] == 3


def test_when_no_server_is_left_the_rollout_ends_and_what_is_unfinished_stays(start: Callable[..., Run]) -> None:
    run = start(2, timeouts=Timeouts(recovery=0.2, first_retry=0.005, max_retry=0.02, health_interval=0.01))
    sampling = Sampling(max_response_len=30)
    with held(run, 10):
        run.engine.submit([LATE[0], EARLY[0]], sampling, seed=0, num_groups=1).result()
    left = run.engine.unfinished()
    for server in run.servers:
        server.die()
    pending = run.engine.submit([EARLY[1]], sampling, seed=0, num_groups=1)
    for _ in range(2):
        with pytest.raises(RolloutUnavailable, match="no SGLang server is left"):
            pending.result()
    run.engine.close()
    assert run.engine.unfinished() == left and len(left) == 1
    assert run.engine.metrics()["rollout/sglang_deaths"] == 2


def test_no_server_at_the_start_is_told_at_once(checkpoint: Path) -> None:
    with replays(1) as servers:
        servers[0].healthy = False
        with pytest.raises(RolloutUnavailable, match=r"no SGLang server answered within 0\.2 s"):
            Run(servers, checkpoint, sglang_startup_timeout=0.2)


def test_close_ends_what_is_in_flight(start: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    threads = set(threading.enumerate())
    run = start(2, sglang_concurrency=4)
    with held(run, 3):
        pending = run.engine.submit(LATE[:8], SAMPLING, seed=0)
        wait_until(lambda: sum(server.at_once for server in run.servers) == 8)
        run.engine.close()
        with pytest.raises(RuntimeError, match="closed while a rollout was in flight"):
            pending.result()
        aborted = set().union(*(server.aborted for server in run.servers))
        assert aborted == {body["rid"] for body in run.requests} and len(aborted) == 8
    run.engine.close()
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert "sglang" not in left
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_rollouts_and_evaluations_are_in_flight_together(start: Callable[..., Run]) -> None:
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


def test_every_server_scores_a_probe(start: Callable[..., Run]) -> None:
    run = start(2)
    run.update(5)
    run.servers[1].version = 6
    ids = [1, 7, 20, 33]
    assert run.engine.prompt_log_probs(ids) == {
        server.url: [log_prob(token, version) for token in ids[1:]]
        for server, version in zip(run.servers, (5, 6), strict=True)
    }
    run.servers[0].faults.append(spoiled(lambda answer: answer["meta_info"]["input_token_logprobs"].pop()))
    with pytest.raises(
        RolloutUnavailable, match=f"{run.servers[0].url}/generate gave an answer that cannot be used: it has 2"
    ):
        run.engine.prompt_log_probs(ids)


def test_a_router_takes_requests_and_its_servers_weights(checkpoint: Path) -> None:
    with replays(3) as (router, *workers):
        router.workers = workers
        where = urlsplit(router.url)
        run = Run(workers, checkpoint, sglang_url=None, sglang_router_ip=where.hostname, sglang_router_port=where.port)
        try:
            run.update(1)
            groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
            assert_exact(groups, PROMPTS)
            assert {version for sample in flat(groups) for version in sample.weight_versions} == {1}
            assert len(router.requests) == 36 and router.version == 0
            assert run.sync.pushes == [([worker.url for worker in workers], 1)]
        finally:
            run.engine.close()


def test_the_key_is_in_no_representation(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-secret")
    with replays(1) as servers:
        servers[0].key = "sk-secret"
        run = Run(servers, checkpoint, sglang_api_key_env="A_KEY")
        run.update(1)
        assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
        held_by = [run.engine, run.engine._servers, *vars(run.engine).values(), *vars(run.engine._servers).values()]
        assert not any("sk-secret" in f"{thing!r} {getattr(thing, '__dict__', '')!r}" for thing in held_by)
        run.engine.close()


def test_weights_do_not_travel_with_checkpoints(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(1)
    assert run.engine.can_checkpoint_weights is False and LocalEngine.can_checkpoint_weights is True
    run.engine.save_weights(tmp_path)
    assert list(tmp_path.iterdir()) == []
    run.engine.load_weights(tmp_path, 3)
    assert (run.engine.weight_version, run.servers[0].weight_version) == (3, "3")
