"""Servers that are started, watched and stopped: a small server instead of SGLang's module of the same name."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from slime_tis.trainer.configs.sglang import SGLangConfig
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.sglang import launch
from slime_tis.trainer.engines.sglang.launch import LaunchedServers, free_ports, server_command
from slime_tis.trainer.engines.sglang.server_group import SGLangSettings
from tests.rollout.sglang.fake_sglang import wait_until
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


@pytest.fixture(autouse=True)
def fake_sglang(tmp_path, monkeypatch):
    package = tmp_path / "packages/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)


@pytest.fixture
def servers(tmp_path):
    with ExitStack() as stack:

        def make(*flags, count=1, **options):
            port = 21000 + os.getpid() % 4000 * 2
            settings = {"sglang_startup_timeout": 30.0, "sglang_base_port": port, **options}
            config = SGLangConfig(sglang_launch=count, sglang_server_args=flags or None, **settings)
            launched = LaunchedServers(config, "the/model", tmp_path / "logs")
            stack.callback(launched.stop)
            return launched

        yield make


def facts(url):
    return httpx.get(f"{url}/any", trust_env=False).json()


def wait_until_gone(*pids):
    wait_until(
        lambda: (
            not any(
                psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids
            )
        )
    )


def wait_for(url):
    def answers():
        try:
            return httpx.get(url, trust_env=False) is not None
        except httpx.HTTPError:
            return False

    wait_until(answers)


def poll_until(started, enough):
    reported = []
    wait_until(lambda: reported.extend(started.poll()) or enough(reported))
    return reported


def test_start_and_stop(servers, tmp_path, monkeypatch):
    for name, value in {
        "RANK": "3",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "KEPT": "yes",
    }.items():
        monkeypatch.setenv(name, value)
    started = servers("--delay", "0.3", "--unwell", "0.5", "--family", count=2)
    urls = started.start()
    found = [facts(url) for url in urls]
    ports = [url.rsplit(":")[-1] for url in urls]
    for each, port, log in zip(found, ports, ("sglang_0.log", "sglang_1.log"), strict=True):
        assert each["argv"][1:7] == [
            "--model-path",
            "the/model",
            "--host",
            "127.0.0.1",
            "--port",
            port,
        ]
        assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(each["environ"])
        assert each["environ"]["KEPT"] == "yes"
        assert not [path for path in each["path"] if path.endswith("rollout/sglang")]
        assert "server_args=" in (tmp_path / "logs" / log).read_text()
        assert stat.S_IMODE((tmp_path / "logs" / log).stat().st_mode) == 0o600
        assert os.getpgid(each["pid"]) not in (os.getpid(), os.getpgid(0))
    assert started.poll() == [] and started.restarts == 0
    started.stop()
    wait_until_gone(*(pid for each in found for pid in (each["pid"], *each["family"])))
    started.stop()


def test_early_death_is_reported_with_the_end_of_the_log(servers, tmp_path):
    log = tmp_path / "logs/sglang_0.log"
    log.parent.mkdir()
    log.write_text("of an earlier run\n")
    started = servers("--say", "RuntimeError: no such model")
    with pytest.raises(RolloutUnavailable) as lost:
        started.start()
    message = str(lost.value)
    assert message.startswith(
        f"the SGLang server at {started.urls[0]} ended before it was up, with exit status 7; "
    )
    assert message.endswith("| RuntimeError: no such model") and "earlier" not in message


def test_servers_that_do_not_come_up(servers):
    started = servers("--unwell", "60", sglang_startup_timeout=1.0)
    message = (
        r"is not up after --sglang-startup-timeout 1 s; its log .* (ends: server_args=|is empty)"
    )
    with pytest.raises(RolloutUnavailable, match=message):
        started.start()
    with pytest.raises(RolloutUnavailable, match="does not run"):
        servers(sglang_python="/no/python").start()


def test_death_and_new_start(servers, tmp_path):
    started = servers("--family", count=2)
    urls = started.start()
    before = [facts(url) for url in urls]
    os.kill(before[0]["pid"], signal.SIGKILL)
    (message,) = poll_until(started, lambda reported: started.restarts == 1)
    restarted = (
        f"the SGLang server at {urls[0]} ended with exit status 137 and is restarted (1 of 3); its"
        " log "
    )
    assert message.startswith(restarted)
    wait_until_gone(before[0]["family"][0])
    wait_for(urls[0])
    after = [facts(url) for url in urls]
    assert after[0]["pid"] != before[0]["pid"] and after[1]["pid"] == before[1]["pid"]
    assert (tmp_path / "logs/sglang_0.log").read_text().count("server_args=") == 2


def test_given_up_after_three_restarts(servers, monkeypatch):
    started = servers(sglang_startup_timeout=60.0)
    started.start()
    now = time.monotonic()
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: now))
    started.servers[0].command += ["--say", "broken"]
    os.kill(facts(started.urls[0])["pid"], signal.SIGKILL)
    reported = []
    for wait in (1, 2, 4):
        reported += poll_until(started, bool)
        now += wait - 0.01
        assert started.poll() == [] and started.restarts == len(reported) - 1, (
            "no new start before it is due"
        )
        now += 0.01
        assert started.poll() == [] and started.restarts == len(reported)
    reported += poll_until(started, bool)
    assert [message.split("(")[-1][:6] for message in reported[:3]] == [
        "1 of 3",
        "2 of 3",
        "3 of 3",
    ]
    assert "is not restarted after 3 restarts" in reported[3]
    assert reported[3].endswith("| broken")
    now += 1000.0
    assert started.poll() == [] and started.restarts == 3
    monkeypatch.undo()


def test_a_server_that_ignores_sigterm_is_killed(servers, monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.5)
    started = servers("--stubborn", "--family")
    (url,) = started.start()
    found = facts(url)
    started.stop()
    wait_until_gone(found["pid"], found["family"][0])


def start_and_wait(directory, url):
    os.environ["PYTHONPATH"] = str(directory / "packages")
    config = SGLangConfig(sglang_launch=1, sglang_base_port=29000, sglang_server_args=("--family",))
    url.send(LaunchedServers(config, "m", directory).start()[0])
    signal.pause()


def test_servers_end_with_this_program(tmp_path):
    ours, theirs = fork_server().Pipe(duplex=False)
    program = fork_server().Process(target=start_and_wait, args=(tmp_path, theirs))
    program.start()
    found = facts(ours.recv())
    program.kill()
    program.join()
    wait_until_gone(found["pid"])


def test_ports_in_use_are_passed_over(tmp_path):
    first = free_ports(25000, 1)[0]
    with socket.create_server(("0.0.0.0", first)), socket.create_server(("127.0.0.1", first + 2)):
        found = free_ports(first, 2)
        assert found[0] == first + 1 and found[1] > first + 2
    assert free_ports(65535, 0) == []
    with pytest.raises(ValueError, match="--sglang-base-port is 65535"):
        free_ports(65535, 2)


def test_an_answer_of_another_program_is_not_taken_for_the_servers(servers):
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


def test_secrets_are_in_no_list_of_processes_and_no_log(servers, tmp_path, monkeypatch):
    for name in ("MY_KEY", "SGLANG_ADMIN_API_KEY", "PASSWORD"):
        monkeypatch.setenv(name, f"{SECRET}-{name}")
    flags = ("--family", "--ssl-keyfile-password-env", "PASSWORD", "--say-env=NO_SUCH_VARIABLE")
    started = servers(*flags, sglang_api_key_env="MY_KEY")
    (url,) = started.start()
    assert facts(url)["argv"][8:] == [
        f"--ssl-keyfile-password={SECRET}-PASSWORD",
        f"--admin-api-key={SECRET}-SGLANG_ADMIN_API_KEY",
        f"--api-key={SECRET}-MY_KEY",
    ]
    supervisor = psutil.Process(started.servers[0].process.pid)
    words = [
        word for one in (supervisor, *supervisor.children(recursive=True)) for word in one.cmdline()
    ]
    assert "--ssl-keyfile-password-env" in words and not [
        word for word in words if "with-quotes" in word
    ]
    log = (tmp_path / "logs/sglang_0.log").read_text()
    assert "'api_key': " in log and "--api-key=***" in log and "with-quotes" not in log
    assert SECRET not in repr([vars(server) for server in started.servers])


GPUS = {
    "one GPU each": ((), [None, "1", "2"]),
    "two GPUs each from 4 on": (("--base-gpu-id", "4", "--tp-size", "2"), ["4", "6", "8"]),
    "four GPUs each from 1 on": (
        ("--tensor-parallel-size=2", "--pp", "2", "--base-gpu-id=1"),
        ["1", "5", "9"],
    ),
    "CPU": (("--device", "cpu"), [None, None, None]),
}


@pytest.mark.parametrize(("flags", "firsts"), GPUS.values(), ids=GPUS)
def test_servers_share_the_gpus_out(flags, firsts):
    config = SGLangConfig(sglang_launch=3, sglang_server_args=flags or None)
    for index, first in enumerate(firsts):
        words = server_command(config, "m", index, 1, Path("log"))
        words = [part for word in words for part in word.split("=")]
        last = (
            len(words) - 1 - words[::-1].index("--base-gpu-id")
            if "--base-gpu-id" in words
            else None
        )
        assert (last and words[last + 1]) == first, json.dumps(words)


def test_servers_record_experts_where_they_are_replayed():
    for records, flags in ((True, ("--enable-return-routed-experts",)), (False, None)):
        sampling = Sampling(max_response_len=1, return_routed_experts=records)
        settings = SGLangSettings(config=SGLangConfig(sglang_launch=1), sampling=sampling)
        assert settings.launch_config.sglang_server_args == flags
