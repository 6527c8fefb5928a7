"""Servers that the engine starts."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.servers.server_engine import ServerEngine
from tests.real_servers.engines import ServedModel, decode_steps, engine_with_weights
from tests.real_servers.references import BOUND
from tests.real_servers.servers import ENGINE, STARTUP, send
from tests.runs import free_port
from tests.samples import flat

KEY = "sk-not-to-be-seen"
SECURED = {
    "sglang": (("GET", "/model_info"), ("POST", "/pause_generation")),
    # vLLM's routes of the development mode take no key.
    "vllm": (("GET", "/v1/models"), ("POST", "/inference/v1/generate")),
}
"""Endpoints that demand the key."""
ENDING = 10.0
"""Longest wait for the end of killed processes, in seconds: the kernel needs some time for it."""
N_SAMPLES = 2
LONG = Sampling(max_response_len=300, n_samples=N_SAMPLES)


@dataclass
class Launch:
    """A launched server with a key, whose engine is killed during a rollout."""

    unauthorized: dict[str, int] = field(default_factory=dict)
    """Status of requests without a key, by path."""
    refusal: str = ""
    """The message to an engine with a wrong key."""
    samples: list[Sample] = field(default_factory=list)
    """The rollout during which its engine was killed."""
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
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_running(processes: set[psutil.Process]) -> list[psutil.Process]:
    """The processes that do not end within `ENDING` seconds."""
    deadline = time.monotonic() + ENDING
    running = [process for process in processes if is_running(process)]
    while running and time.monotonic() < deadline:
        time.sleep(0.1)
        running = [process for process in running if is_running(process)]
    return running


def sampler_among(processes: set[psutil.Process]) -> psutil.Process:
    """The process that samples: SGLang's scheduler, or vLLM's engine core."""
    title = {"sglang": "sglang::scheduler", "vllm": "VLLM::EngineCore"}[ENGINE.name]
    samplers = []
    for process in processes:
        if process.cmdline()[:1] == [title]:
            samplers.append(process)
    (sampler,) = samplers
    return sampler


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
    environment.setenv(f"{ENGINE.name.upper()}_API_KEY", "wrong")
    with (
        pytest.raises(ValueError) as error,
        engine_with_weights(
            model.checkpoint, model.reference, directory=model.directory, url=(url,)
        ),
    ):
        pass
    return str(error.value)


def rollout_with_killed_sampler(
    engine: ServerEngine,
    before: set[psutil.Process],
    prompts: list[Prompt],
) -> list[Sample]:
    pending = engine.submit(prompts, LONG, seed=0)
    sampler = sampler_among(children() - before)
    decode_steps(engine, prompts)
    sampler.kill()
    return flat(pending.result())


@pytest.fixture(scope="module")
def launch(
    model: ServedModel, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    directory = tmp_path_factory.mktemp("launch")
    log = directory / f"{ENGINE.name}_0.log"
    options: dict[str, Any] = {
        "launch": 1,
        "python": str(ENGINE.python),
        "server_args": ("--config", str(ENGINE.flags), "--dtype", "float32"),
        "base_port": free_port(),
        "log_dir": str(directory),
        # A killed server needs minutes to come back on a busy machine.
        "recovery_timeout": STARTUP,
    }
    launch = Launch()
    before = children()
    with pytest.MonkeyPatch.context() as environment, streams_in(directory / "streams"):
        environment.setenv(f"{ENGINE.name.upper()}_API_KEY", KEY)
        environment.setenv("HF_HUB_OFFLINE", "1")
        with engine_with_weights(
            model.checkpoint, model.reference, directory=directory, **options
        ) as engine:
            (url,) = engine.prompt_log_probs([1, 5, 9])
            for method, path in SECURED[ENGINE.name]:
                answer = send(method, f"{url}{path}", {})
                launch.unauthorized[path] = answer.status_code
            launch.refusal = refusal_of_a_wrong_key(model, url, environment)
            engine.update_weights(model.reference.named_tensors, 3)
            launch.samples = rollout_with_killed_sampler(engine, before, prompts)
            launch.num_restarts = engine.metrics()[ENGINE.metric("restarts")]
            processes = children() - before
            launch.num_processes = len(processes)
            command_lines = [" ".join(process.cmdline()) for process in processes]
            launch.texts = {
                "command lines": "\n".join(command_lines),
                "log": log.read_text(),
                "engine": repr(vars(engine)),
            }
    launch.texts["streams"] = (directory / "streams").read_text()
    launch.remaining = still_running(processes)
    return launch


def test_a_launched_server_demands_its_key(launch: Launch) -> None:
    assert launch.unauthorized == {path: 401 for _, path in SECURED[ENGINE.name]}


def test_a_wrong_key_is_refused_unshown(launch: Launch) -> None:
    assert "401" in launch.refusal
    assert "wrong" not in launch.refusal


def test_a_dead_launched_server_is_started_again(launch: Launch) -> None:
    assert launch.num_restarts == 1
    first_words = {"sglang": "server_args=", "vllm": "non-default args:"}
    assert launch.texts["log"].count(first_words[ENGINE.name]) == 2


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
