"""Rollouts on servers that fail: nothing is lost, nothing counted twice, every token as it has to be."""

import math
from collections import Counter

import pytest

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.engines.sglang.health import Timeouts
from tests.rollout.sglang.fake_sglang import spoiled, wait_until, when
from tests.rollout.sglang.rollouts import EARLY, LATE, PROMPTS, SAMPLING, assert_exact, held, versions_of


def edit_log_probs(edit):
    return spoiled(lambda answer: edit(answer["meta_info"]["output_token_logprobs"]))


FAULTS = [
    500,
    429,
    "drop",
    lambda answer: "<html>",
    edit_log_probs(lambda entries: entries.pop()),
    edit_log_probs(lambda entries: entries[0].__setitem__(0, math.nan)),
    spoiled(lambda answer: answer["output_ids"].pop()),
    spoiled(lambda answer: answer["meta_info"]["weight_versions"].clear()),
]


def test_every_fault_is_tried_again_and_counts_once(start):
    run = start(3, sglang_max_retries=50)
    run.servers[0].faults.extend(FAULTS)
    run.servers[1].faults.extend(reversed(FAULTS))
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    faults = 2 * len(FAULTS) - sum(len(server.faults) for server in run.servers)
    assert faults > 8
    ids = [body["rid"] for body in run.requests]
    assert len(set(ids)) == len(ids) == 36 + faults
    assert run.engine.metrics()["rollout/sglang_retries"] == faults
    assert set(Counter(request_id[:-5] for request_id in ids)) == {
        f"{ids[0][:18]}-{number:08d}" for number in range(36)
    }


def test_a_request_that_hangs_goes_elsewhere_and_its_late_answer_is_not_counted(start):
    run = start(2, sglang_request_timeout=0.3)
    run.servers[0].stop_after = 0  # it would answer, but later
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    wait_until(lambda: run.servers[0].requests)
    wait_until(lambda: run.servers[0].aborted)
    run.servers[0].stop_after = None
    assert_exact(pending.result(), PROMPTS)


def test_a_long_response_that_exceeds_the_timeout_goes_on_from_its_tokens(start):
    run = start(1, sglang_request_timeout=0.1)
    run.servers[0].stop_after = 4
    sampling = Sampling(max_response_len=10)
    groups = run.engine.generate([LATE[0]], sampling, seed=0)
    assert_exact(groups, [LATE[0]], sampling)
    whole = [*LATE[0].token_ids, *groups[0][0].response_ids]
    assert [body["input_ids"] for body in run.requests] == [whole[:3], whole[:7], whole[:11]]
    assert [body["sampling_params"]["max_new_tokens"] for body in run.requests] == [10, 6, 2]
    assert run.engine.metrics()["rollout/sglang_retries"] == 0


def test_a_server_dies_in_mid_batch_and_returns_with_the_current_weights(start):
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
    when(lambda: run.sync.pushes[-1] == ([victim.url], 2), run.release)
    groups = pending.result()
    assert_exact(groups, PROMPTS)
    assert run.sync.pushes[-1] == ([victim.url], 2)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=2), PROMPTS)
    assert len(victim.requests) > served and victim.weight_version == "2"
    assert versions_of(groups) == {2}
    assert run.engine.metrics()["rollout/sglang_returns"] == 1


def test_a_refused_request_stops_the_rollout_with_the_servers_words(start):
    run = start(2)
    run.servers[0].faults.append(400)
    with pytest.raises(RolloutUnavailable, match="answered HTTP 400"):
        run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)


def test_a_server_with_another_key_is_left_to_the_others(start):
    run = start(2)
    run.servers[0].faults.extend([401, 403, 404])
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    assert run.engine.metrics()["rollout/sglang_retries"] == 3


def test_when_no_server_is_left_the_rollout_ends_and_what_is_unfinished_stays(start):
    run = start(2, timeouts=Timeouts(recovery=0.2, first_retry=0.005, max_retry=0.02, health_interval=0.01))
    sampling = Sampling(max_response_len=30)
    with held(run, 10):
        run.engine.submit([LATE[0], EARLY[0]], sampling, seed=0, num_groups=1).result()
    left = run.engine.unfinished()
    for server in run.servers:
        server.die()
    pending = run.engine.submit([EARLY[1]], sampling, seed=0, num_groups=1)
    for _ in range(2):
        with pytest.raises(RolloutUnavailable, match="no SGLang server is left") as error:
            pending.result()
    assert all(f"{server.url} since " in str(error.value) for server in run.servers)
    run.engine.close()
    assert run.engine.unfinished() == left and len(left) == 1
    assert run.engine.metrics()["rollout/sglang_deaths"] == 2
