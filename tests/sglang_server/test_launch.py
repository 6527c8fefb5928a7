"""Servers that the engine starts, and SGLang's model gateway (smg) before two test servers."""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.servers.server_engine import ServerEngine
from slime_tis.trainer.engines.sglang.sglang_api import ROUTING_KEY
from tests.rollout.sglang.fake_sglang import FakeSGLang, fake_servers, wait_until
from tests.rollout.sglang.rollouts import PROMPTS, SAMPLING, Run, assert_exact
from tests.rollout.sglang.test_functions import RUN, assert_two_turns, two_turns
from tests.runs import free_port
from tests.samples import flat
from tests.sglang_server.engines import ServedModel, engine_with_weights
from tests.sglang_server.references import BOUND
from tests.sglang_server.servers import FLAGS, PYTHON, wait_for_decoding

KEY = "sk-not-to-be-seen"
N_SAMPLES = 2
LONG = Sampling(max_response_len=300, n_samples=N_SAMPLES)


@dataclass
class Launch:
    """A launched server with a key, whose scheduler is killed during a rollout."""

    unauthorized: dict[str, int] = field(default_factory=dict)
    """Status of requests without a key, by path."""
    refusal: str = ""
    """The message to an engine with a wrong key."""
    samples: list[Sample] = field(default_factory=list)
    """The rollout during which the scheduler was killed."""
    num_restarts: float = 0
    texts: dict[str, str] = field(default_factory=dict)
    """What others can read: command lines, the server's log, the streams and the engine."""
    num_processes: int = 0
    """Launched processes while the engine is open."""
    remaining: list[psutil.Process] = field(default_factory=list)
    """Launched processes that run after the engine is closed."""


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def scheduler_among(processes: set[psutil.Process]) -> psutil.Process:
    schedulers = []
    for process in processes:
        if process.cmdline()[:1] == ["sglang::scheduler"]:
            schedulers.append(process)
    (scheduler,) = schedulers
    return scheduler


@contextmanager
def streams_in(path: Path) -> Iterator[None]:
    """Writes stdout and stderr of this process to a file, like pytest's capfd.

    capfd itself lasts for one test, and a launch lasts for a module.
    """
    saved = [os.dup(1), os.dup(2)]
    try:
        with path.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
    finally:
        for descriptor, copy in enumerate(saved, start=1):
            os.dup2(copy, descriptor)
            os.close(copy)


def refusal_of_a_wrong_key(model: ServedModel, url: str, environment: pytest.MonkeyPatch) -> str:
    environment.setenv("SGLANG_API_KEY", "wrong")
    with (
        pytest.raises(ValueError) as error,
        engine_with_weights(
            model.checkpoint, model.reference, directory=model.directory, url=(url,)
        ),
    ):
        pass
    return str(error.value)


def rollout_with_killed_scheduler(
    engine: ServerEngine, before: set[psutil.Process], log: Path, prompts: list[Prompt]
) -> list[Sample]:
    pending = engine.submit(prompts, LONG, seed=0)
    scheduler = scheduler_among(children() - before)
    wait_for_decoding(log)
    scheduler.kill()
    return flat(pending.result())


@pytest.fixture(scope="module")
def launch(
    model: ServedModel, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    directory = tmp_path_factory.mktemp("launch")
    log = directory / "sglang_0.log"
    options: dict[str, Any] = {
        "launch": 1,
        "python": str(PYTHON),
        "server_args": ("--config", str(FLAGS), "--dtype", "float32"),
        "base_port": free_port(),
        "log_dir": str(directory),
    }
    launch = Launch()
    before = children()
    with pytest.MonkeyPatch.context() as environment, streams_in(directory / "streams"):
        environment.setenv("SGLANG_API_KEY", KEY)
        environment.setenv("HF_HUB_OFFLINE", "1")
        with engine_with_weights(
            model.checkpoint, model.reference, directory=directory, **options
        ) as engine:
            (url,) = engine.prompt_log_probs([1, 5, 9])
            for method, path in (("GET", "/model_info"), ("POST", "/pause_generation")):
                answer = httpx.request(method, f"{url}{path}", json={}, trust_env=False)
                launch.unauthorized[path] = answer.status_code
            launch.refusal = refusal_of_a_wrong_key(model, url, environment)
            engine.update_weights(model.reference.named_tensors, 3)
            launch.samples = rollout_with_killed_scheduler(engine, before, log, prompts)
            launch.num_restarts = engine.metrics()["rollout/sglang_restarts"]
            processes = children() - before
            launch.num_processes = len(processes)
            command_lines = [" ".join(process.cmdline()) for process in processes]
            launch.texts = {
                "command lines": "\n".join(command_lines),
                "log": log.read_text(),
                "engine": repr(vars(engine)),
            }
    launch.texts["streams"] = (directory / "streams").read_text()
    launch.remaining = [process for process in processes if is_running(process)]
    return launch


def test_a_launched_server_demands_its_key(launch: Launch) -> None:
    assert launch.unauthorized == {"/model_info": 401, "/pause_generation": 401}


def test_a_wrong_key_is_refused_unshown(launch: Launch) -> None:
    assert "401" in launch.refusal
    assert "wrong" not in launch.refusal


def test_a_dead_launched_server_is_started_again(launch: Launch) -> None:
    assert launch.num_restarts == 1
    assert launch.texts["log"].count("server_args=") == 2


def test_a_restart_loses_no_sample(launch: Launch, prompts: list[Prompt]) -> None:
    indices = [sample.index for sample in launch.samples]
    assert indices == list(range(N_SAMPLES * len(prompts)))


def test_a_restarted_server_has_the_version_of_the_dead_one(launch: Launch) -> None:
    for sample in launch.samples:
        assert set(sample.weight_versions) == {3}


def test_log_probs_are_exact_over_a_restart(launch: Launch, model: ServedModel) -> None:
    for sample in launch.samples:
        assert model.reference.largest_difference(sample) < BOUND


@pytest.mark.parametrize("place", ["command lines", "log", "streams", "engine"])
def test_the_key_is_shown_nowhere(place: str, launch: Launch) -> None:
    assert KEY not in launch.texts[place]


def test_closing_ends_all_launched_processes(launch: Launch) -> None:
    assert launch.num_processes > 0
    assert launch.remaining == []


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
        str(PYTHON.with_name("smg")),
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
        router = {"url": None, "router_ip": "127.0.0.1", "router_port": port}
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
