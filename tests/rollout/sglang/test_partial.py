"""Partial rollouts: the earliest groups are returned, the others continue in the next rollout from their tokens."""

from collections import Counter

import pytest

from slime_tis.trainer.data.sample import Sample, Sampling
from tests.rollout.sglang.fake_sglang import continuation, wait_until, when
from tests.rollout.sglang.rollouts import EARLY, LATE, PROMPTS, SAMPLING, assert_exact, assert_log_probs, held
from tests.samples import flat, reloaded


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
    assert Counter(group[0].prompt_index for group in [*groups, *left]) == Counter(p.index for p in mixed)
    begun = [sample for sample in flat(left) if sample.row in LATE]
    assert len(begun) == 4
    for sample in begun:
        assert sample.status is Sample.Status.ABORTED
        assert 0 < len(sample.response_ids) <= 8
        assert sample.response_ids == continuation(list(sample.row.token_ids), len(sample.response_ids))
        assert_log_probs(sample)
    kept = {(sample.prompt_index, place % 2): len(sample.response_ids) for place, sample in enumerate(flat(left))}
    stored = reloaded(left)

    assert_exact(run.engine.generate(PROMPTS[:2], SAMPLING, seed=0), PROMPTS[:2])  # an evaluation in between
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
    goes_on = [len(sample.response_ids) for sample in flat(left) if sample.status is Sample.Status.ABORTED]
    assert sorted(len(body["input_ids"]) - 3 for body in run.requests) == sorted([*goes_on, 0, 0])


def test_groups_that_are_complete_but_not_wanted_come_first_next_time_and_are_not_asked_for_again(start):
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
    assert (sample.row, sample.status, sample.response_length) == (LATE[0], Sample.Status.TRUNCATED, 30)
    asked = len(run.requests)
    assert_exact(run.engine.submit([], sampling, seed=0, num_groups=1).result(), [LATE[0]], sampling)
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
    assert pending.result() is pending.result()
