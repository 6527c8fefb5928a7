"""Rollouts while weights change: every token carries the version of the weights that sampled it."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from slime_tis.rollout.local import LocalEngine
from slime_tis.rollout.sample import Sampling
from tests.rollout.sglang.fake_sglang import FakeSGLang, fake_servers, spoiled, wait_until, when
from tests.rollout.sglang.rollouts import LATE, LIMIT, PROMPTS, SAMPLING, Run, assert_exact, flat


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
    def used(servers: list[FakeSGLang]) -> None:
        servers[0].weight_version, servers[0].version = "7", 7

    run = start(2, used)
    run.servers[1].stop_after = 0
    pending = run.engine.submit(PROMPTS, SAMPLING, seed=0)
    when(lambda: run.sync.pushes, run.release)
    assert_exact(pending.result(), PROMPTS)
    assert run.sync.pushes == [([run.servers[0].url], 0)]
    assert run.weights.iterated == 1


def test_weights_of_a_returning_server_carry_their_own_version(start: Callable[..., Run]) -> None:
    def used(servers: list[FakeSGLang]) -> None:
        servers[0].weight_version, servers[0].version = "7", 7

    run = start(1, used, weights_version=lambda: 9)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    assert {version for sample in flat(groups) for version in sample.weight_versions} == {9}
    assert run.engine.weight_version == 0


@pytest.mark.parametrize("reports_token_versions", [True, False], ids=["per token", "per answer"])
def test_tokens_carry_the_versions_that_sampled_them(start: Callable[..., Run], reports_token_versions: bool) -> None:
    def prepare(servers: list[FakeSGLang]) -> None:
        for server in servers:
            server.reports_token_versions = reports_token_versions

    run = start(2, prepare)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS)
    for server in run.servers:
        server.requests.clear()
        server.stop_after = 4
    sampling = Sampling(max_response_len=12, n_samples=2)
    pending = run.engine.submit(LATE[:4], sampling, seed=0)
    for version in (3, 4):
        wait_until(lambda: run.num_held == 8)
        run.update(version)
        for server in run.servers:
            server.stop_after = None if version == 4 else 8 if reports_token_versions else 4
    groups = pending.result()
    assert_exact(groups, LATE[:4], sampling)
    for sample in flat(groups):
        assert sample.weight_versions == [0] * 4 + [3] * 4 + [4] * 4
    assert len(run.requests) == (8 if reports_token_versions else 24)
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


def test_a_router_takes_requests_and_its_servers_weights(checkpoint: Path) -> None:
    with fake_servers(3) as (router, *workers):
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


def test_weights_are_not_part_of_checkpoints(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(1)
    assert run.engine.can_checkpoint_weights is False and LocalEngine.can_checkpoint_weights is True
    run.engine.save_weights(tmp_path)
    assert list(tmp_path.iterdir()) == []
    run.engine.load_weights(tmp_path, 3)
    assert (run.engine.weight_version, run.servers[0].weight_version) == (3, "3")
