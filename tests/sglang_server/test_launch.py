"""Servers that the engine starts, and SGLang's model gateway (smg) before two test servers."""

import subprocess
from collections import Counter

import httpx
import psutil
import pytest

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.sglang.client import ROUTING_KEY
from tests.rollout.sglang.fake_sglang import fake_servers, wait_until
from tests.rollout.sglang.rollouts import PROMPTS, SAMPLING, Run, assert_exact
from tests.rollout.sglang.test_functions import RUN, assert_two_turns, two_turns
from tests.runs import free_port
from tests.samples import flat
from tests.sglang_server.references import BOUND
from tests.sglang_server.servers import FLAGS, PYTHON, wait_for_decoding

KEY = "sk-not-to-be-seen"


@pytest.fixture
def launch(make_engine, monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = ("--config", str(FLAGS), "--dtype", "float32")
    launched = {"sglang_launch": 1, "sglang_python": str(PYTHON), "sglang_server_args": flags}
    return lambda: make_engine(**launched, sglang_base_port=free_port())


def test_a_launched_server_asks_for_a_key_that_nobody_sees_and_is_started_again_when_it_dies(
    launch, make_engine, prompts, reference, tmp_path, monkeypatch, capfd
):
    before = set(psutil.Process().children(recursive=True))
    engine = launch()
    (url,) = engine.prompt_log_probs([1, 5, 9])
    assert httpx.get(f"{url}/model_info").status_code == 401
    assert httpx.post(f"{url}/pause_generation", json={}).status_code == 401
    monkeypatch.setenv("SGLANG_API_KEY", "wrong")
    with pytest.raises(ValueError, match="401") as error:
        make_engine(sglang_url=(url,))
    assert "wrong" not in str(error.value)

    engine.update_weights(reference.named_tensors, 3)
    pending = engine.submit(prompts, Sampling(max_response_len=300, n_samples=2), seed=0)
    (scheduler,) = [
        each for each in psutil.Process().children(recursive=True) if is_scheduler(each, before)
    ]
    wait_for_decoding(tmp_path / "sglang_0.log")
    scheduler.kill()
    samples = flat(pending.result())
    assert [sample.index for sample in samples] == list(range(2 * len(prompts)))
    assert all(
        set(sample.weight_versions) == {3} and reference.gap(sample) < BOUND for sample in samples
    )
    assert engine.metrics()["rollout/sglang_restarts"] == 1

    launched = set(psutil.Process().children(recursive=True)) - before
    assert launched
    shown = [" ".join(process.cmdline()) for process in launched]
    log = (tmp_path / "sglang_0.log").read_text()
    assert log.count("server_args=") == 2
    assert not any(KEY in text for text in [*shown, log, *capfd.readouterr(), repr(vars(engine))])
    engine.close()
    assert not [
        process
        for process in launched
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def is_scheduler(process, before):
    return process not in before and process.cmdline()[:1] == ["sglang::scheduler"]


GATEWAY_KEY = ROUTING_KEY.lower()


@pytest.fixture(params=["consistent_hashing", "manual"])
def gateway(request, tmp_path):
    """The port of a gateway with a policy, and its servers."""
    with fake_servers(2) as servers, open(tmp_path / "gateway.log", "wb") as log:
        port = free_port()
        ports = ["--port", str(port), "--prometheus-port", str(free_port())]
        command = [
            PYTHON.with_name("smg"),
            "launch",
            "--host",
            "127.0.0.1",
            *ports,
            "--policy",
            request.param,
        ]
        urls = [server.url for server in servers]
        process = subprocess.Popen([*command, "--worker-urls", *urls], stdout=log, stderr=log)
        try:
            wait_until(lambda: num_healthy(port) == 2)
            yield port, servers
        finally:
            process.terminate()
            process.wait()


def num_healthy(port):
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
        samples = flat(
            run.engine.submit(PROMPTS, RUN, seed=3, function=two_turns, concurrency=5).result()
        )
    finally:
        run.engine.close()
    for sample in samples:
        assert_two_turns(sample)
    keys = [
        Counter(each[GATEWAY_KEY] for each in server.headers if GATEWAY_KEY in each)
        for server in servers
    ]
    assert all(keys) and [*keys[0].values(), *keys[1].values()] == [2] * len(samples)
