"""Starts, watches and stops servers; a small server takes the place of SGLang's module."""

import argparse
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from slime_tis.trainer.configs.servers import ServerConfig, server_config
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.servers import launch
from slime_tis.trainer.engines.servers.api import served_model
from slime_tis.trainer.engines.servers.launch import LaunchedServers, free_ports, server_command
from slime_tis.trainer.engines.sglang.sglang_api import SGLangApi
from tests.checkpoints import make_checkpoint
from tests.rollout.sglang.fake_sglang import wait_until
from tests.rollout.sglang.rollouts import MODEL
from tests.runs import fork_server

SECRET = "k'ey\\with-quotes"
FAKE = """
import argparse, http.server, json, multiprocessing, os, signal, sys, time

parser = argparse.ArgumentParser()
for name in ("model-path", "host", "port", "api-key", "base-gpu-id", "say", "admin-api-key",
             "ssl-keyfile-password"):
    parser.add_argument("--" + name)
for name in ("delay", "unwell"):
    parser.add_argument("--" + name, type=float)
for name in ("stubborn", "family"):
    parser.add_argument("--" + name, action="store_true")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > well_at else 503)
        self.end_headers()
        self.wfile.write(json.dumps(facts).encode())

    def log_message(self, *args):
        pass


def child():
    time.sleep(600)


if __name__ == "__main__":
    options = parser.parse_args()
    print("server_args=" + repr(vars(options)), json.dumps(sys.argv), flush=True)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(options.delay or 0)
    if options.say:
        print(options.say, file=sys.stderr)
        sys.exit(7)
    well_at = time.monotonic() + (options.unwell or 0)
    family = []
    if options.family:
        family.append(multiprocessing.get_context("spawn").Process(target=child))
        family[0].start()
    facts = {
        "pid": os.getpid(), "argv": sys.argv, "path": sys.path, "environ": dict(os.environ),
        "family": [one.pid for one in family],
    }
    server = http.server.HTTPServer((options.host, int(options.port)), Handler)
    server.serve_forever()
"""


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the small server as the package sglang, which the servers' Python
    imports."""
    directory = tmp_path_factory.mktemp("packages")
    package = directory / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(FAKE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        patch.delenv("SGLANG_API_KEY", raising=False)
        yield directory


def launched_servers(log_dir: Path, *flags: str, count: int = 1, **options: Any) -> LaunchedServers:
    port = 21000 + os.getpid() % 4000 * 2
    settings = {"startup_timeout": 30.0, "base_port": port, **options}
    config = server_config("sglang", launch=count, server_args=flags or None, **settings)
    return LaunchedServers(config, SGLangApi(model=MODEL), log_dir)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., LaunchedServers]]:
    with ExitStack() as stack:

        def make(*flags: str, **options: Any) -> LaunchedServers:
            launched = launched_servers(tmp_path / "logs", *flags, **options)
            stack.callback(launched.stop)
            return launched

        yield make


@dataclass(frozen=True)
class RunningServers:
    """Two servers that answer, and their facts."""

    launched: LaunchedServers
    logs: list[Path]
    facts: list[dict[str, Any]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServers]:
    directory = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "3")
        patch.setenv("MASTER_PORT", "29500")
        patch.setenv("TORCHELASTIC_RUN_ID", "x")
        patch.setenv("KEPT", "yes")
        launched = launched_servers(directory, "--delay", "0.3", "--unwell", "0.5", count=2)
    try:
        launched.start()
        yield RunningServers(
            launched=launched,
            logs=[directory / "sglang_0.log", directory / "sglang_1.log"],
            facts=[facts(url) for url in launched.urls],
        )
    finally:
        launched.stop()


def facts(url: str) -> dict[str, Any]:
    """The server's process id, arguments, import path, environment and children."""
    return httpx.get(f"{url}/any", trust_env=False).json()


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"


def wait_until_gone(*pids: int) -> None:
    for pid in pids:
        wait_until(lambda: not is_running(pid))  # noqa: B023  # called at once


def wait_for(url: str) -> None:
    def answers() -> bool:
        try:
            return httpx.get(url, trust_env=False) is not None
        except httpx.HTTPError:
            return False

    wait_until(answers)


def poll_until(started: LaunchedServers, enough: Callable[[list[str]], bool]) -> list[str]:
    """Polls until the messages are enough, and returns them."""
    messages: list[str] = []

    def is_enough() -> bool:
        messages.extend(started.poll())
        return enough(messages)

    wait_until(is_enough)
    return messages


both = pytest.mark.parametrize("index", [0, 1], ids=["first server", "second server"])


@both
def test_a_server_gets_the_model_and_its_address(running, index):
    port = running.launched.urls[index].rsplit(":")[-1]
    assert running.facts[index]["argv"][1:7] == [
        "--model-path",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]


@both
def test_servers_do_not_see_the_variables_of_torchrun(running, index):
    environment = running.facts[index]["environ"]
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(environment)


@both
def test_servers_get_the_other_variables(running, index):
    assert running.facts[index]["environ"]["KEPT"] == "yes"


@both
def test_servers_do_not_import_the_supervisors_modules(running, index):
    assert not [path for path in running.facts[index]["path"] if path.endswith("engines/servers")]


@both
def test_the_output_is_in_the_log(running, index):
    assert "server_args=" in running.logs[index].read_text()


@both
def test_only_the_user_can_read_the_log(running, index):
    assert stat.S_IMODE(running.logs[index].stat().st_mode) == 0o600


@both
def test_a_server_has_a_separate_process_group(running, index):
    group = os.getpgid(running.facts[index]["pid"])
    assert group not in (os.getpid(), os.getpgid(0))


def test_healthy_servers_are_not_restarted(running):
    assert running.launched.poll() == []
    assert running.launched.restarts == 0


def test_stop_ends_servers_with_their_children(servers):
    started = servers("--family", count=2)
    started.start()
    pids = []
    for url in started.urls:
        server = facts(url)
        pids += [server["pid"], *server["family"]]
    assert len(pids) == 4
    started.stop()
    wait_until_gone(*pids)


def test_stop_may_be_called_twice(servers):
    started = servers()
    started.start()
    started.stop()
    started.stop()
    assert not started.servers[0].is_running


def test_an_early_death_quotes_the_end_of_the_log(servers, tmp_path):
    log = tmp_path / "logs/sglang_0.log"
    log.parent.mkdir()
    log.write_text("of an earlier run\n")
    started = servers("--say", "RuntimeError: no such model")
    with pytest.raises(RolloutUnavailable) as error:
        started.start()
    message = str(error.value)
    assert message.startswith(
        f"the SGLang server at {started.urls[0]} ended before it was up, with exit status 7; "
    )
    assert message.endswith("| RuntimeError: no such model")
    assert "earlier" not in message


def test_a_server_that_is_not_healthy_in_time_is_reported(servers):
    started = servers("--unwell", "60", startup_timeout=1.0)
    message = (
        r"is not up after --sglang-startup-timeout 1 s; its log .* (ends: server_args=|is empty)"
    )
    with pytest.raises(RolloutUnavailable, match=message):
        started.start()


def test_a_python_that_does_not_run_is_reported(servers):
    with pytest.raises(RolloutUnavailable, match="does not run"):
        servers(python="/no/python").start()


def test_a_python_without_the_engine_is_reported(servers, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(RolloutUnavailable, match=r"has no sglang; .* --sglang-python\.$"):
        servers().start()


def test_a_server_that_dies_is_restarted(servers, tmp_path):
    started = servers("--family", count=2)
    started.start()
    url = started.urls[0]
    before = [facts(url) for url in started.urls]
    os.kill(before[0]["pid"], signal.SIGKILL)
    (message,) = poll_until(started, lambda messages: started.restarts == 1)
    restarted = (
        f"the SGLang server at {url} ended with exit status 137 and is restarted (1 of 3); its log "
    )
    assert message.startswith(restarted)
    wait_until_gone(before[0]["family"][0])
    wait_for(url)
    assert facts(url)["pid"] != before[0]["pid"]
    assert facts(started.urls[1])["pid"] == before[1]["pid"]
    assert (tmp_path / "logs/sglang_0.log").read_text().count("server_args=") == 2


@dataclass
class Restarts:
    """The restarts of a server that fails at once, with a clock that the test sets."""

    launched: LaunchedServers
    messages: list[str]
    early: list[int]
    """Restarts shortly before each restart is due."""
    due: list[int]
    """Restarts when each restart is due."""
    last: int
    """Restarts long after the last message."""


@pytest.fixture(scope="module")
def restarts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    started = launched_servers(tmp_path_factory.mktemp("logs"), startup_timeout=60.0)
    try:
        started.start()
        now = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: now))
            started.servers[0].command += ["--say", "broken"]
            os.kill(facts(started.urls[0])["pid"], signal.SIGKILL)
            messages = []
            early = []
            due = []
            for wait in (1, 2, 4):
                messages += poll_until(started, bool)
                now += wait - 0.01
                messages += started.poll()
                early.append(started.restarts)
                now += 0.01
                messages += started.poll()
                due.append(started.restarts)
            messages += poll_until(started, bool)
            now += 1000.0
            messages += started.poll()
        yield Restarts(started, messages, early, due, last=started.restarts)
    finally:
        started.stop()


def test_restarts_wait_1_s_then_2_s_then_4_s(restarts):
    assert restarts.early == [0, 1, 2]
    assert restarts.due == [1, 2, 3]


def test_messages_count_the_restarts(restarts):
    counts = [message.split("(")[-1][:6] for message in restarts.messages[:3]]
    assert counts == ["1 of 3", "2 of 3", "3 of 3"]


def test_a_server_is_given_up_after_three_restarts(restarts):
    assert len(restarts.messages) == 4
    assert "is not restarted after 3 restarts" in restarts.messages[3]
    assert restarts.messages[3].endswith("| broken")
    assert restarts.last == 3


def test_a_server_that_ignores_sigterm_is_killed(servers, monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.5)
    started = servers("--stubborn", "--family")
    started.start()
    server = facts(started.urls[0])
    started.stop()
    wait_until_gone(server["pid"], server["family"][0])


def start_and_wait(packages: Path, log_dir: Path, url: Connection) -> None:
    os.environ["PYTHONPATH"] = str(packages)
    config = server_config("sglang", launch=1, base_port=29000, server_args=("--family",))
    launched = LaunchedServers(config, SGLangApi(model=MODEL), log_dir)
    launched.start()
    url.send(launched.urls[0])
    signal.pause()


def test_servers_end_with_this_program(packages, tmp_path):
    receiver, sender = fork_server().Pipe(duplex=False)
    program = fork_server().Process(target=start_and_wait, args=(packages, tmp_path, sender))
    program.start()
    server = facts(receiver.recv())
    program.kill()
    program.join()
    wait_until_gone(server["pid"], server["family"][0])


def launching(base_port: int, count: int) -> ServerConfig:
    return server_config("sglang", base_port=base_port, launch=count or None)


def test_ports_in_use_are_skipped():
    first = free_ports(launching(25000, 1))[0]
    with socket.create_server(("0.0.0.0", first)), socket.create_server(("127.0.0.1", first + 2)):
        ports = free_ports(launching(first, 2))
    assert ports[0] == first + 1
    assert ports[1] > first + 2


def test_no_ports_are_needed_without_servers():
    assert free_ports(launching(65535, 0)) == []


def test_too_few_free_ports_are_refused():
    with pytest.raises(ValueError, match="--sglang-base-port is 65535"):
        free_ports(launching(65535, 2))


def test_an_answer_of_another_program_is_refused(servers):
    started = servers("--delay", "60")
    other = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--host",
        "127.0.0.1",
        "--port",
        started.urls[0][-5:],
    ]
    process = subprocess.Popen(other, stdout=subprocess.DEVNULL)
    try:
        wait_for(started.urls[0])
        with pytest.raises(RolloutUnavailable, match="another program answers"):
            started.start()
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class SecretRun:
    """A server with keys and a password in its environment."""

    launched: LaunchedServers
    argv: list[str]
    """The server's arguments in its memory."""
    words: list[str]
    """Command lines in the list of processes."""
    log: str


@pytest.fixture(scope="module")
def secret_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecretRun]:
    directory = tmp_path_factory.mktemp("logs")
    flags = ("--family", "--ssl-keyfile-password-env", "PASSWORD", "--say-env=NO_SUCH_VARIABLE")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MY_KEY", "SGLANG_ADMIN_API_KEY", "PASSWORD"):
            patch.setenv(name, f"{SECRET}-{name}")
        started = launched_servers(directory, *flags, api_key_env="MY_KEY")
    try:
        started.start()
        process = started.servers[0].process
        assert process is not None
        supervisor = psutil.Process(process.pid)
        words = []
        for program in (supervisor, *supervisor.children(recursive=True)):
            words += program.cmdline()
        argv = facts(started.urls[0])["argv"]
        yield SecretRun(started, argv, words, (directory / "sglang_0.log").read_text())
    finally:
        started.stop()


def test_the_server_gets_the_secrets(secret_run):
    assert secret_run.argv[8:] == [
        f"--ssl-keyfile-password={SECRET}-PASSWORD",
        f"--admin-api-key={SECRET}-SGLANG_ADMIN_API_KEY",
        f"--api-key={SECRET}-MY_KEY",
    ]


def test_no_list_of_processes_shows_secrets(secret_run):
    assert "--ssl-keyfile-password-env" in secret_run.words
    assert not [word for word in secret_run.words if "with-quotes" in word]


def test_secrets_are_redacted_in_the_log(secret_run):
    assert "'api_key': " in secret_run.log
    assert "--api-key=***" in secret_run.log
    assert "with-quotes" not in secret_run.log


def test_the_launcher_does_not_hold_the_secrets_as_flags(secret_run):
    command = secret_run.launched.servers[0].command
    assert not [word for word in command if "with-quotes" in word]


GPUS = {
    "one GPU each": ((), [None, "1", "2"]),
    "two GPUs each from 4 on": (("--base-gpu-id", "4", "--tp-size", "2"), ["4", "6", "8"]),
    "four GPUs each from 1 on": (
        ("--tensor-parallel-size=2", "--pp", "2", "--base-gpu-id=1"),
        ["1", "5", "9"],
    ),
    "CPU": (("--device", "cpu"), [None, None, None]),
}


@pytest.mark.parametrize(("flags", "gpus"), GPUS.values(), ids=GPUS)
def test_servers_share_the_gpus(flags, gpus):
    config = server_config("sglang", launch=3, server_args=flags or None)
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-gpu-id")
    first_gpus = []
    for index in range(3):
        command = server_command(config, SGLangApi(model=MODEL), index, 1, Path("log"))
        options, _ = parser.parse_known_args(command)
        first_gpus.append(options.base_gpu_id)
    assert first_gpus == gpus


@pytest.mark.parametrize("records_experts", [True, False], ids=["replayed", "not replayed"])
def test_servers_record_experts_if_they_are_replayed(records_experts, tmp_path):
    family = "qwen3_moe" if records_experts else "qwen3"
    checkpoint = make_checkpoint(tmp_path / "model", family)
    api = SGLangApi(model=served_model(checkpoint, records_experts=records_experts))
    flags = api.flags(server_config("sglang", launch=1), index=0, port=1)
    assert ("--enable-return-routed-experts" in flags) == records_experts
