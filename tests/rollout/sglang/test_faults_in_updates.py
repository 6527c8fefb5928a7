"""A server dies or hangs during a weight update: no sample is lost or has wrong weights."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from slime_tis.trainer.data.sample import Sample, Sampling
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.servers import api
from slime_tis.trainer.engines.servers.health import Timeouts
from slime_tis.trainer.engines.sglang import sglang_api
from tests.rollout.sglang.fake_sglang import FakeSGLang, wait_until
from tests.rollout.sglang.rollouts import LATE, PROMPTS, SAMPLING, Run, assert_exact, versions_of

Start = Callable[..., Run]
LONG = Sampling(max_response_len=12, n_samples=2)
HELD = LATE[:4]
"""Prompts of a rollout that waits for an update after two tokens of each response."""
DEATHS = {
    "disk, before the pause": ("disk", "/pause_generation", "before"),
    "disk, after the pause": ("disk", "/pause_generation", "after"),
    "disk, before the load": ("disk", "/update_weights_from_disk", "before"),
    "disk, after the load": ("disk", "/update_weights_from_disk", "after"),
    "disk, between load and resumption": ("disk", "/model_info", "before"),
    "disk, before the resumption": ("disk", "/continue_generation", "before"),
    "disk, after the resumption": ("disk", "/continue_generation", "after"),
    "broadcast, at the join": ("distributed", "/init_weights_update_group", "before"),
    "broadcast, at the session": ("distributed", "/begin_weight_update", "after"),
    "broadcast, at the bucket": ("distributed", "/update_weights_from_distributed", "before"),
    "broadcast, after the bucket": ("distributed", "/update_weights_from_distributed", "after"),
    "broadcast, at the end": ("distributed", "/end_weight_update", "before"),
    "broadcast, before the resumption": ("distributed", "/continue_generation", "before"),
}
"""Transport, endpoint, and whether the request still takes effect."""
FREEZES = {
    "at the pause": "/pause_generation",
    "at the load": "/update_weights_from_disk",
    "between load and resumption": "/model_info",
    "at the resumption": "/continue_generation",
}


@dataclass
class Interrupted:
    """A rollout in flight over an update during which a server died."""

    run: Run
    victim: FakeSGLang
    groups: list[list[Sample]] = field(default_factory=list)


def start_on(start: Start, count: int, transport: str, **options: object) -> Run:
    """An engine on servers with a real transport of weights."""
    return start(count, sglang_weight_sync=transport, weight_sync=None, **options)


def hold_rollout(run: Run):
    """Starts a rollout whose requests all wait after two tokens."""
    for server in run.servers:
        server.stop_after = 2
    pending = run.engine.submit(HELD, LONG, seed=0)
    wait_until(lambda: run.num_held == len(HELD) * LONG.n_samples)
    return pending


def sample_until_return(run: Run) -> None:
    """Makes short rollouts until a server that was marked down is used again.

    With broadcasts, a server that comes back gets weights while the trainer waits for a rollout.
    """

    def has_returned() -> bool:
        run.engine.generate(PROMPTS[:1], SAMPLING, seed=0)
        return run.engine.metrics()["rollout/sglang_returns"] >= 1

    wait_until(has_returned)


@pytest.fixture(params=list(DEATHS.values()), ids=list(DEATHS))
def interrupted(request: pytest.FixtureRequest, start: Start) -> Interrupted:
    """Two servers, of which the second one died during the update to version 1."""
    transport, endpoint, moment = request.param
    run = start_on(start, 2, transport)
    victim = run.servers[1]
    pending = hold_rollout(run)
    victim.dies_at[endpoint] = moment
    run.update(1)
    run.release()
    return Interrupted(run, victim, pending.result())


def test_a_death_in_an_update_loses_no_sample(interrupted: Interrupted) -> None:
    assert_exact(interrupted.groups, HELD, LONG)


def test_a_server_that_died_in_an_update_returns_with_its_weights(
    interrupted: Interrupted,
) -> None:
    interrupted.victim.come_back()
    sample_until_return(interrupted.run)
    assert interrupted.victim.weight_version == "1"


@pytest.mark.parametrize(("transport", "endpoint", "moment"), DEATHS.values(), ids=DEATHS)
def test_a_rollout_continues_when_the_only_server_returns(
    start: Start, transport: str, endpoint: str, moment: str
) -> None:
    run = start_on(start, 1, transport)
    (server,) = run.servers
    pending = hold_rollout(run)
    server.dies_at[endpoint] = moment
    run.update(1)
    run.release()
    server.come_back()
    groups = pending.result()
    assert_exact(groups, HELD, LONG)
    assert versions_of(groups) == {1}


def test_an_only_server_that_stays_dead_ends_the_rollout(start: Start) -> None:
    timeouts = Timeouts(recovery=0.2, first_retry=0.005, max_retry=0.02, health_interval=0.01)
    run = start_on(start, 1, "disk", timeouts=timeouts)
    pending = hold_rollout(run)
    run.servers[0].dies_at["/update_weights_from_disk"] = "before"
    run.update(1)
    with pytest.raises(RolloutUnavailable, match=r"no SGLang server is left.*resume with --load"):
        pending.result()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for a frozen server that end soon."""
    monkeypatch.setattr(sglang_api, "CONTROL_TIMEOUT", 0.3)
    monkeypatch.setattr(sglang_api, "HEALTH_TIMEOUT", 0.3)
    monkeypatch.setattr(api, "RELEASE_TIMEOUT", 0.1)


@pytest.fixture(params=list(FREEZES.values()), ids=list(FREEZES))
def frozen(request: pytest.FixtureRequest, start: Start, short_waits: None) -> Interrupted:
    """Two servers, of which the second one froze during the update to version 1."""
    run = start_on(start, 2, "disk", sglang_request_timeout=1.0)
    victim = run.servers[1]
    pending = hold_rollout(run)
    victim.freezes_at.add(request.param)
    run.update(1)
    run.release()
    return Interrupted(run, victim, pending.result())


def test_a_freeze_in_an_update_loses_no_sample(frozen: Interrupted) -> None:
    assert_exact(frozen.groups, HELD, LONG)


def test_a_frozen_server_gets_the_weights_again_when_it_thaws(frozen: Interrupted) -> None:
    before = frozen.victim.count("/update_weights_from_disk")
    frozen.victim.thaw()
    sample_until_return(frozen.run)
    assert frozen.victim.count("/update_weights_from_disk") > before


def test_late_requests_of_an_update_leave_no_old_weights(frozen: Interrupted) -> None:
    run = frozen.run
    run.update(2)
    frozen.victim.thaw()
    sample_until_return(run)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    assert versions_of(groups) == {2}


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_initial_weights_do_not_replace_the_first_update(start: Start, transport: str) -> None:
    # A restarted server has its own first weights, which may be random (--load-format dummy) or
    # lack a merged adapter, although the first update has version 0 as well.
    run = start_on(start, 1, transport)
    run.update(0)
    (server,) = run.servers
    pending = hold_rollout(run)
    server.die()
    run.release()
    wait_until(lambda: run.engine.metrics()["rollout/sglang_deaths"] == 1)
    server.come_back()
    pending.result()
    assert server.weight_version == "0"


def test_initial_weights_of_an_idle_server_are_not_sampled_from(start: Start) -> None:
    # It restarts between two health checks: nothing but its answers tells that it did.
    slow = Timeouts(recovery=30.0, first_retry=0.005, max_retry=0.02, health_interval=30.0)
    run = start_on(start, 1, "disk", timeouts=slow)
    run.update(0)
    (server,) = run.servers
    server.die()
    server.come_back()
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    assert server.weight_version == "0"
