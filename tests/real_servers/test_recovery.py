"""One of two real servers is killed during a rollout, and comes back after a weight update."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.servers.server_engine import ServerEngine
from tests.real_servers.engines import ServedModel
from tests.real_servers.references import BOUND, largest_difference
from tests.real_servers.servers import ENGINE, STARTUP, RealServer
from tests.samples import flat

N_SAMPLES = 3
LONG = Sampling(max_response_len=300, n_samples=N_SAMPLES)
SHORT = Sampling(max_response_len=32, n_samples=2)


@dataclass
class Recovery:
    """Rollouts with a server that is killed and comes back."""

    interrupted: list[list[Sample]]
    """Groups of the rollout during which the server was killed."""
    metrics_after_death: dict[str, float]
    during_restart: list[Sample] = field(default_factory=list)
    after_return: list[Sample] = field(default_factory=list)
    returned_version: str = ""
    """Weight version that the server reports after its return."""
    num_answers: int = 0
    """Requests that the server answered in the rollout after its return."""
    metrics_after_return: dict[str, float] = field(default_factory=dict)


def rollout_with_death(engine: ServerEngine, victim: RealServer, prompts: list[Prompt]) -> Recovery:
    # Stopped, it cannot answer its requests before it is killed.
    victim.hang()
    pending = engine.submit(prompts, LONG, seed=0)
    deadline = time.monotonic() + STARTUP
    while pending.progress[0] == 0:
        assert time.monotonic() < deadline, "the other server completes no response"
        time.sleep(0.02)
    victim.kill()
    return Recovery(interrupted=pending.result(), metrics_after_death=engine.metrics())


def rollouts_during_restart(engine: ServerEngine, prompts: list[Prompt]) -> list[Sample]:
    """Samples until the engine uses the server again."""
    samples: list[Sample] = []
    deadline = time.monotonic() + STARTUP
    while engine.metrics()[ENGINE.metric("returns")] < 1:
        assert time.monotonic() < deadline, "the engine does not use the restarted server"
        samples += flat(engine.generate(prompts, Sampling(max_response_len=32), seed=0))
    return samples


@pytest.fixture(scope="module", params=["distributed", "disk"])
def recovery(
    request: pytest.FixtureRequest,
    model: ServedModel,
    two_servers: tuple[RealServer, RealServer],
    prompts: list[Prompt],
) -> Recovery:
    victim = two_servers[1]
    policy = model.reference

    def weights() -> Iterator[tuple[str, Tensor]]:
        """The policy's current weights, for the server that comes back."""
        return policy.named_tensors()

    with model.engine(servers=two_servers, weights=weights, weight_sync=request.param) as engine:
        recovery = rollout_with_death(engine, victim, prompts)
        policy = model.other_reference
        engine.update_weights(policy.named_tensors, 1)
        victim.restart()
        victim.wait()
        recovery.during_restart = rollouts_during_restart(engine, prompts)
        recovery.returned_version = victim.weight_version()
        before = victim.num_requests()
        recovery.after_return = flat(engine.generate(prompts, SHORT, seed=0))
        recovery.num_answers = victim.num_requests() - before
        recovery.metrics_after_return = engine.metrics()
    return recovery


def test_a_killed_server_loses_no_sample(recovery: Recovery, prompts: list[Prompt]) -> None:
    for group, prompt in zip(recovery.interrupted, prompts, strict=True):
        assert [sample.row for sample in group] == [prompt] * N_SAMPLES
    indices = [sample.index for sample in flat(recovery.interrupted)]
    assert indices == list(range(N_SAMPLES * len(prompts)))


def test_no_sample_of_a_killed_server_stays_aborted(recovery: Recovery) -> None:
    statuses = {sample.status for sample in flat(recovery.interrupted)}
    assert statuses <= {Sample.Status.COMPLETED, Sample.Status.TRUNCATED}


def test_log_probs_are_exact_after_a_death(recovery: Recovery, model: ServedModel) -> None:
    for sample in flat(recovery.interrupted):
        assert largest_difference(sample, model.references()) < BOUND


def test_a_killed_server_is_counted(recovery: Recovery) -> None:
    assert recovery.metrics_after_death[ENGINE.metric("deaths")] == 1
    assert recovery.metrics_after_death[ENGINE.metric("retries")] >= 1


def test_log_probs_are_exact_during_a_restart(recovery: Recovery, model: ServedModel) -> None:
    for sample in recovery.during_restart:
        assert largest_difference(sample, model.references()) < BOUND


def test_a_restarted_server_is_given_the_current_weights(recovery: Recovery) -> None:
    assert recovery.returned_version == "1"


def test_a_restarted_server_answers_again(recovery: Recovery) -> None:
    assert recovery.num_answers > 0
    assert recovery.metrics_after_return[ENGINE.metric("returns")] == 1


def test_samples_after_a_return_have_the_current_weights(
    recovery: Recovery, model: ServedModel
) -> None:
    for sample in recovery.after_return:
        assert set(sample.weight_versions) == {1}
        assert model.other_reference.largest_difference(sample) < BOUND
