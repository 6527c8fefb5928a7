"""SGLang's model gateway (the package smg) in front of two test servers: an agent's turns stay on one server."""

import subprocess
from collections import Counter

import httpx
import pytest

from slime_tis.trainer.engines.sglang.client import ROUTING_KEY
from tests.rollout.sglang.fake_sglang import fake_servers, wait_until
from tests.rollout.sglang.rollouts import PROMPTS, SAMPLING, Run, assert_exact
from tests.rollout.sglang.test_functions import RUN, assert_two_turns, two_turns
from tests.runs import free_port
from tests.samples import flat
from tests.sglang_server.servers import PYTHON

KEY = ROUTING_KEY.lower()


@pytest.fixture(params=["consistent_hashing", "manual"])
def gateway(request, tmp_path):
    """The port of a gateway with a policy, and its servers."""
    with fake_servers(2) as servers, open(tmp_path / "gateway.log", "wb") as log:
        port = free_port()
        ports = ["--port", str(port), "--prometheus-port", str(free_port())]
        command = [PYTHON.with_name("smg"), "launch", "--host", "127.0.0.1", *ports, "--policy", request.param]
        urls = [server.url for server in servers]
        process = subprocess.Popen([*command, "--worker-urls", *urls], stdout=log, stderr=log)
        try:
            wait_until(lambda: num_healthy(port) == 2)
            yield port, servers
        finally:
            process.terminate()
            process.wait()


def num_healthy(port):
    """Servers that the gateway knows and finds healthy."""
    try:
        workers = httpx.get(f"http://127.0.0.1:{port}/workers", trust_env=False).json()["workers"]
    except httpx.HTTPError:
        return 0
    return sum(worker["is_healthy"] for worker in workers)


def test_turns_of_a_sample_stay_on_one_server(gateway, checkpoint):
    port, servers = gateway
    router = {"sglang_url": None, "sglang_router_ip": "127.0.0.1", "sglang_router_port": port}
    run = Run(servers, checkpoint, **router)
    try:
        run.update(2)
        assert_exact(run.engine.generate(PROMPTS, SAMPLING), PROMPTS)
        for server in servers:
            server.headers.clear()
        samples = flat(run.engine.submit(PROMPTS, RUN, seed=3, function=two_turns, concurrency=5).result())
    finally:
        run.engine.close()
    for sample in samples:
        assert_two_turns(sample)
    keys = [Counter(each[KEY] for each in server.headers if KEY in each) for server in servers]
    assert all(keys) and [*keys[0].values(), *keys[1].values()] == [2] * len(samples)
