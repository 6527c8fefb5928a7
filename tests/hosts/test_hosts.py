"""train.py on two hosts, with SGLang's servers on a third: layouts, cut links, a lost host, wrong
addresses.

Each case ends with progress or one message.

Processes of both hosts write to one file system, as on a cluster.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.hosts.conftest import SERVERS, Hosts, Job
from tests.real_servers.servers import ENGINES
from tests.rollout.sglang.fake_sglang import fake_servers
from tests.runs import Completed, make_task, metrics_of, read_metrics, with_sglang

SECONDS = 9.0
TIMEOUT = ["--distributed-timeout-minutes", str(SECONDS / 60)]
LIMIT = 60.0
"""Seconds after which no rank may still run; the message to other ranks and a busy machine take the
rest."""
SERVER_LIMIT = 120.0
"""The same without servers: a request waits 4 s, then 20 s for its abort, possibly on both servers;
then 6 s pass."""
LAYOUTS = {
    "data": [],
    "tensor": ["--tensor-model-parallel-size", "2"],
    "pipeline": ["--pipeline-model-parallel-size", "2"],
}
LOST = "another rank ended without a message"


def training_metrics(row: dict[str, Any]) -> dict[str, float]:
    """The metrics of a row that depend neither on the clock nor on failures of servers."""
    return {
        name: value for name, value in runs.training_metrics(row).items() if "sglang" not in name
    }


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run of two ranks with servers."""
    flags = make_task(tmp_path_factory.mktemp("task"))
    precision = flags.index("--rollout-precision")  # of the local engine
    return [
        *(
            *flags[:precision],
            *flags[precision + 2 :],
            "--rollout-engine",
            "sglang",
            "--num-rollout",
            "4",
        ),
        *("--sglang-request-timeout", "4", "--sglang-recovery-timeout", "6"),
    ]


@pytest.fixture(scope="module")
def expected(sglang: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Metrics of the run without faults, on one host."""
    directory = tmp_path_factory.mktemp("whole")
    with fake_servers(2) as servers:
        flags = [
            *sglang,
            "--sglang-url",
            *(server.url for server in servers),
            "--save",
            str(directory / "save"),
        ]
        return [training_metrics(row) for row in runs.metrics_of(flags, directory / "run", ranks=2)]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return [*make_task(tmp_path), *TIMEOUT]


def assert_one_message(job: Job, host: int, words: str) -> None:
    """The rank on this host has ended with status 1 and one message."""
    job.launchers[host].wait(LIMIT)
    text = job.text(host)
    messages = [
        line for line in text.splitlines() if line.startswith("error:") or "did not connect" in line
    ]
    assert len(messages) == 1 and words in messages[0], text[-3000:]
    assert (
        re.search(r"exitcode *: [12] ", text)
        and "Traceback" not in text.split("torch/distributed/elastic")[0]
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_two_hosts_train_as_one(
    layout: list[str], hosts: Hosts, flags: list[str], tmp_path: Path
) -> None:
    job = hosts.start([*flags, *layout], tmp_path / "hosts")
    assert job.wait() == [0, 0], job.text(0)[-3000:]
    expected = metrics_of([*flags, *layout], tmp_path / "one", ranks=2)
    for row, other in zip(read_metrics(tmp_path / "hosts"), expected, strict=True):
        assert training_metrics(row) == pytest.approx(training_metrics(other), rel=1e-5, abs=1e-7)


def test_a_link_that_is_down_for_two_seconds_delays_the_run(
    hosts: Hosts, flags: list[str], tmp_path: Path
) -> None:
    job = hosts.start(
        [*flags, "--num-rollout", "30", "--save", str(tmp_path / "save")], tmp_path / "run"
    )
    for step in (2, 10, 20):
        job.until(lambda: job.steps() >= step)  # noqa: B023  # called at once
        hosts.cut()
        time.sleep(2)  # the length of the fault
        hosts.join()
    assert job.wait() == [0, 0], job.text(0)[-3000:]
    assert job.steps() == 30


@pytest.mark.parametrize("fault", [Hosts.cut, Hosts.drop], ids=["cut", "dropped"])
def test_a_lost_link_ends_every_rank(
    fault: Callable[[Hosts], None], hosts: Hosts, flags: list[str], tmp_path: Path
) -> None:
    job = hosts.start([*flags, "--num-rollout", "1000"], tmp_path / "run")
    job.until(lambda: job.steps() >= 2)
    fault(hosts)
    for host in (0, 1):
        assert_one_message(job, host, LOST)


def test_a_run_resumes_bitwise_after_a_lost_host(
    hosts: Hosts, flags: list[str], tmp_path: Path
) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    flags = [*flags, "--num-rollout", "8", "--save-interval", "2", "--seed", "3"]
    job = hosts.start([*flags, "--save", checkpoints], tmp_path / "lost")
    job.until(lambda: job.steps() >= 5)
    hosts.lose(1, job)
    assert_one_message(job, 0, LOST)
    hosts.join()
    resumed = hosts.start(
        [*flags, "--save", checkpoints, "--load", checkpoints], tmp_path / "lost", port=29501
    )
    assert resumed.wait() == [0, 0], resumed.text(0)[-3000:]
    whole = hosts.start([*flags[:-4], "--seed", "3"], tmp_path / "whole", port=29502)
    assert whole.wait() == [0, 0], whole.text(0)[-3000:]
    assert [training_metrics(row) for row in read_metrics(tmp_path / "lost")] == [
        training_metrics(row) for row in read_metrics(tmp_path / "whole")
    ]


def test_a_wrong_interface_is_named(hosts: Hosts, flags: list[str], tmp_path: Path) -> None:
    job = hosts.start(flags, tmp_path / "run", interface="slime9")
    for host in (0, 1):
        assert_one_message(job, host, "slime9")


def test_two_runs_on_one_port(hosts: Hosts, flags: list[str], tmp_path: Path) -> None:
    first = hosts.start([*flags, "--num-rollout", "40"], tmp_path / "first")
    first.until(lambda: first.steps() >= 1)
    second = hosts.start(flags, tmp_path / "second", ranks=1)
    assert second.launchers[0].wait(LIMIT) != 0 and "EADDRINUSE" in second.text(0)
    assert first.wait() == [0, 0], first.text(0)[-3000:]


@dataclass(frozen=True)
class Fault:
    """What happens to the host of the servers at a numbered request to a path."""

    path: str
    number: int
    fault: Callable[[Hosts, int], None]
    seconds: float | None = None
    """The length of the fault; None for one that lasts until the run has ended."""


UPDATE, ROLLOUT = "/update_weights_from_distributed", "/generate"
FAULTS = {
    "rollout, cut for 2 s": Fault(ROLLOUT, 20, Hosts.cut, seconds=2),
    "rollout, dropped for 2 s": Fault(ROLLOUT, 20, Hosts.drop, seconds=2),
    "weight update, cut for 2 s": Fault(UPDATE, 6, Hosts.cut, seconds=2),
    "weight update, cut": Fault(UPDATE, 6, Hosts.cut),
    "weight update, dropped for 2 s": Fault(UPDATE, 6, Hosts.drop, seconds=2),
    "rollout, dropped": Fault(ROLLOUT, 70, Hosts.drop),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=list(FAULTS))
def test_servers_on_a_third_host(
    case: Fault, sglang: list[str], expected: list[dict[str, float]], hosts: Hosts, tmp_path: Path
) -> None:
    urls, held = hosts.serve(case.path, case.number)
    flags = [
        *sglang,
        "--sglang-url",
        *urls,
        "--save",
        str(tmp_path / "save"),
        "--load",
        str(tmp_path / "save"),
    ]
    run = hosts.fork(flags, tmp_path / "run")
    assert held.poll(60), run.wait(1)
    case.fault(hosts, SERVERS)
    if case.seconds is None:
        assert_stopped(run.wait(SERVER_LIMIT), "none came back within 6 s", "saved under")
    else:
        time.sleep(case.seconds)
    hosts.join(SERVERS)
    held.send("answer")
    done = run.wait(120) if case.seconds else hosts.fork(flags, tmp_path / "run").wait(120)
    assert done.statuses == [0, 0], done.stderr[-3000:]
    assert [training_metrics(row) for row in read_metrics(tmp_path / "run")] == expected


def assert_stopped(done: Completed, *words: str) -> None:
    """Both ranks have ended with status 1, rank 0 with the only message."""
    messages = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.statuses == [1, 1] and len(messages) == 1, done.stderr[-3000:]
    assert all(word in messages[0] for word in words), messages


def test_a_firewall_between_servers_and_rank_0(
    sglang: list[str], hosts: Hosts, tmp_path: Path
) -> None:
    """Requests pass; the servers cannot connect to the port that rank 0 opens for weights."""
    urls, _ = hosts.serve("", 0)
    hosts.firewall(0)
    run = hosts.fork([*sglang, "--sglang-url", *urls], tmp_path / "run")
    assert_stopped(run.wait(SERVER_LIMIT), "/init_weights_update_group did not answer within 4 s")


@pytest.mark.skipif(
    not ENGINES["sglang"].python.exists(),
    reason="`make sglang-env` builds the environment of SGLang's servers",
)
def test_a_real_server_on_a_third_host(hosts, tmp_path):
    """Weights reach it from rank 0 of another host; the link is down for 2 s after the first
    step."""
    flags = with_sglang(make_task(tmp_path, hidden_size=64))[
        :-2
    ]  # weights over gloo, not over the disk
    flags += [
        "--sglang-url",
        hosts.serve_real(tmp_path / "model"),
        "--sglang-startup-timeout",
        "300",
    ]
    flags += ["--num-rollout", "6", "--lr", "1e-4", "--check-weight-sync"]
    run = hosts.fork(flags, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    run.until(lambda: metrics.exists() and "train/grad_norm" in metrics.read_text(), 400)
    hosts.cut(SERVERS)
    time.sleep(2)  # the length of the fault
    hosts.join(SERVERS)
    done = run.wait(120)
    assert done.statuses == [0, 0], done.stderr[-3000:]
    rows = [row for row in read_metrics(tmp_path / "run") if "train/grad_norm" in row]
    assert len(rows) == 6 and all(
        row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows
    )


def test_a_link_cut_while_a_checkpoint_is_written(
    hosts: Hosts, flags: list[str], tmp_path: Path
) -> None:
    """Rank 1 is stopped during a save, so that the cut comes before its end."""
    save = tmp_path / "save"
    flags = [*flags, "--num-rollout", "6"]
    saving = [*flags, "--save-interval", "1", "--save", str(save), "--load", str(save)]
    run = hosts.fork(saving, tmp_path / "run")
    rank = run.processes[1].pid
    assert rank

    def is_saving() -> bool:
        if len(list(save.glob("iter_*"))) < 2 or not any(save.glob(".iter_*.unfinished")):
            return False
        os.kill(rank, signal.SIGSTOP)
        if any(save.glob(".iter_*.unfinished")):
            return True
        os.kill(rank, signal.SIGCONT)
        return False

    run.until(is_saving)
    hosts.cut(1)
    os.kill(rank, signal.SIGCONT)
    done = run.wait(LIMIT)
    assert done.statuses == [1, 1] and done.stderr.count(LOST) == 2, done.stderr[-3000:]
    hosts.join(1)
    done = hosts.fork(saving, tmp_path / "run").wait(120)
    assert done.statuses == [0, 0], done.stderr[-3000:]
    whole = metrics_of(flags, tmp_path / "whole", ranks=2)
    assert list(map(training_metrics, read_metrics(tmp_path / "run"))) == list(
        map(training_metrics, whole)
    )
