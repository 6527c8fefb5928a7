"""train.py on two hosts: layouts, cut links, a lost host, wrong addresses. Each case ends with progress or one message.

Processes of both hosts write to one file system, as on a cluster.
"""

import re
import time
from pathlib import Path

import pytest

from tests.hosts.conftest import Hosts, Job
from tests.runs import make_task, metrics_of, read_metrics, training_metrics

SECONDS = 9.0
TIMEOUT = ["--distributed-timeout-minutes", str(SECONDS / 60)]
LIMIT = 60.0
"""Seconds after which no rank may still run; the message to other ranks and a busy machine take the rest."""
LAYOUTS = {
    "data": [],
    "tensor": ["--tensor-model-parallel-size", "2"],
    "pipeline": ["--pipeline-model-parallel-size", "2"],
}
LOST = "another rank ended without a message"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return [*make_task(tmp_path), *TIMEOUT]


def assert_one_message(job: Job, host: int, words: str) -> None:
    """The rank on this host has ended with status 1 and one message."""
    job.launchers[host].wait(LIMIT)
    text = job.text(host)
    messages = [line for line in text.splitlines() if line.startswith("error:") or "did not connect" in line]
    assert len(messages) == 1 and words in messages[0], text[-3000:]
    assert re.search(r"exitcode *: [12] ", text) and "Traceback" not in text.split("torch/distributed/elastic")[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_two_hosts_train_as_one(layout: list[str], hosts: Hosts, flags: list[str], tmp_path: Path) -> None:
    job = hosts.start([*flags, *layout], tmp_path / "hosts")
    assert job.wait() == [0, 0], job.text(0)[-3000:]
    expected = metrics_of([*flags, *layout], tmp_path / "one", ranks=2)
    for row, other in zip(read_metrics(tmp_path / "hosts"), expected, strict=True):
        assert training_metrics(row) == pytest.approx(training_metrics(other), rel=1e-5, abs=1e-7)


def test_a_link_that_is_down_for_two_seconds_delays_the_run(hosts: Hosts, flags: list[str], tmp_path: Path) -> None:
    job = hosts.start([*flags, "--num-rollout", "30", "--save", str(tmp_path / "save")], tmp_path / "run")
    for step in (2, 10, 20):
        job.until(lambda step=step: job.steps() >= step)
        hosts.cut()
        time.sleep(2)  # the length of the fault
        hosts.join()
    assert job.wait() == [0, 0], job.text(0)[-3000:]
    assert job.steps() == 30


def test_a_cut_link_ends_every_rank(hosts: Hosts, flags: list[str], tmp_path: Path) -> None:
    job = hosts.start([*flags, "--num-rollout", "1000"], tmp_path / "run")
    job.until(lambda: job.steps() >= 2)
    hosts.cut()
    for host in (0, 1):
        assert_one_message(job, host, LOST)


def test_a_run_resumes_bitwise_after_a_lost_host(hosts: Hosts, flags: list[str], tmp_path: Path) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    flags = [*flags, "--num-rollout", "8", "--save-interval", "2", "--seed", "3"]
    job = hosts.start([*flags, "--save", checkpoints], tmp_path / "lost")
    job.until(lambda: job.steps() >= 5)
    hosts.lose(1, job)
    assert_one_message(job, 0, LOST)
    hosts.join()
    resumed = hosts.start([*flags, "--save", checkpoints, "--load", checkpoints], tmp_path / "lost", port=29501)
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
