"""SGLang's model gateway (smg) before two test servers."""

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.sglang.sglang_api import ROUTING_KEY
from tests.real_servers.servers import ENGINES, ONLY_SGLANG
from tests.rollout.sglang.fake_sglang import FakeSGLang, fake_servers, wait_until
from tests.rollout.sglang.rollouts import PROMPTS, SAMPLING, Run, assert_exact
from tests.rollout.sglang.test_functions import RUN, assert_two_turns, two_turns
from tests.runs import free_port
from tests.samples import flat

pytestmark = ONLY_SGLANG
GATEWAY_KEY = ROUTING_KEY.lower()


def num_healthy(port: int) -> int:
    """Servers that a gateway reports as healthy; 0 before it answers."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/workers", trust_env=False)
    except httpx.HTTPError:
        return 0
    return sum(worker["is_healthy"] for worker in answer.json()["workers"])


@contextmanager
def running_gateway(policy: str, servers: list[FakeSGLang], log_path: Path) -> Iterator[int]:
    """The port of a gateway before the servers."""
    port = free_port()
    command = [
        str(ENGINES["sglang"].python.with_name("smg")),
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-port",
        str(free_port()),
        "--policy",
        policy,
        "--worker-urls",
    ]
    command += [server.url for server in servers]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(lambda: num_healthy(port) == len(servers))
            yield port
        finally:
            process.terminate()
            process.wait()


@dataclass
class GatewayRun:
    """Rollouts through a gateway."""

    groups: list[list[Sample]]
    conversations: list[Sample]
    """Samples of two turns."""
    turns_by_server: list[Counter[str]]
    """For each server the number of requests with each routing key."""


@pytest.fixture(scope="module", params=["consistent_hashing", "manual"])
def gateway_run(request: pytest.FixtureRequest, checkpoint: Path, directory: Path) -> GatewayRun:
    log = directory / f"gateway_{request.param}.log"
    with fake_servers(2) as servers, running_gateway(request.param, servers, log) as port:
        router = {"sglang_url": None, "sglang_router_ip": "127.0.0.1", "sglang_router_port": port}
        run = Run(servers, checkpoint, **router)
        try:
            run.update(2)
            groups = run.engine.generate(PROMPTS, SAMPLING)
            for server in servers:
                server.headers.clear()
            pending = run.engine.submit(PROMPTS, RUN, seed=3, function=two_turns, concurrency=5)
            conversations = flat(pending.result())
        finally:
            run.engine.close()
        turns_by_server = []
        for server in servers:
            keys = [headers[GATEWAY_KEY] for headers in server.headers if GATEWAY_KEY in headers]
            turns_by_server.append(Counter(keys))
    return GatewayRun(groups, conversations, turns_by_server)


def test_samples_through_a_gateway_are_exact(gateway_run: GatewayRun) -> None:
    assert_exact(gateway_run.groups, PROMPTS)


def test_turns_through_a_gateway_are_exact(gateway_run: GatewayRun) -> None:
    for sample in gateway_run.conversations:
        assert_two_turns(sample)


def test_a_gateway_uses_both_servers(gateway_run: GatewayRun) -> None:
    first, second = gateway_run.turns_by_server
    assert first and second


def test_turns_of_a_sample_stay_on_one_server(gateway_run: GatewayRun) -> None:
    first, second = gateway_run.turns_by_server
    assert [*first.values(), *second.values()] == [2] * len(gateway_run.conversations)
