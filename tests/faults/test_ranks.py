"""Two ranks: signals to one rank, all ranks and torchrun's agent; a rank that fails, and a killed
rank."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import (
    ROOT,
    Completed,
    make_task,
    metrics_of,
    read_metrics,
    run_apart,
    start_apart,
    training_metrics,
)

HANG = 60.0
"""Seconds after which ranks count as hanging."""
CODE = """
import os

def raises_on_rank_1(args, sample):
    if os.environ["RANK"] == "1":
        raise KeyError("no such label")
    return float(sample.index % 2)

def dies_on_rank_1(args, sample):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    return float(sample.index % 2)

def overflows_in_the_second_rollout(args, sample):
    huge = 1e100 if 1 in sample.weight_versions else 1.0
    return huge * (sample.index % 2)

def unhappy(args, sample):
    raise ValueError("this reward is never happy")
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("task")
    task = make_task(directory)
    (directory / "code.py").write_text(CODE)
    return [*task, "--num-rollout", "400", "--use-tis"]


def reward_flags(flags: list[str], name: str) -> list[str]:
    """The option of a reward of `CODE`."""
    directory = Path(flags[flags.index("--custom-rm-path") + 1]).parent
    return ["--custom-rm-path", f"{directory / 'code.py'}:{name}"]


@dataclass
class SignalledRanks:
    """Two ranks of which one or both received a signal."""

    number: int
    save: Path
    ended: Completed


SIGNALS: dict[str, tuple[int, tuple[int, ...]]] = {
    "rank 1": (signal.SIGUSR1, (1,)),
    "rank 0": (signal.SIGTERM, (0,)),
    "both": (signal.SIGINT, (0, 1)),
}
"""Signal and receiving ranks."""


@pytest.fixture(scope="module", params=SIGNALS)
def signalled(
    request: pytest.FixtureRequest, flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> SignalledRanks:
    number, receivers = SIGNALS[request.param]
    directory = tmp_path_factory.mktemp("signalled")
    save = directory / "save"
    metrics = directory / "run" / "metrics.jsonl"
    ranks = start_apart([*flags, "--save", str(save)], directory / "run", ranks=2)
    ranks.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    for rank in receivers:
        os.kill(ranks.processes[rank].pid or 0, number)
    return SignalledRanks(number, save, ranks.wait(HANG))


def test_a_signal_to_any_rank_ends_all_ranks(signalled: SignalledRanks) -> None:
    assert signalled.ended.statuses == [128 + signalled.number] * 2, signalled.ended.stderr


def test_a_signalled_job_says_once_how_to_resume(signalled: SignalledRanks) -> None:
    error = signalled.ended.stderr
    assert error.count("stopped by") == 1
    assert f"--load {signalled.save} resumes" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises_on_rank_1", "no such label"),
        ("dies_on_rank_1", "rank 0 stops because another rank ended without a message"),
        ("unhappy", "this reward is never happy"),
    ],
    ids=["one raises", "one dies", "both raise"],
)
def test_the_rank_that_fails_is_the_one_that_reports(
    name: str, words: str, flags: list[str], tmp_path: Path
) -> None:
    ended = run_apart([*flags, *reward_flags(flags, name)], tmp_path / "run", 2, HANG)
    assert None not in ended.statuses and all(ended.statuses), ended.stderr
    assert words in ended.stderr
    # without the trainer's own message, gloo's lost connection would be the only one
    assert "gloo" not in ended.stderr
    assert "Traceback" not in (tmp_path / "run.0.err").read_text()


LAYOUTS = {
    "data, distributed optimizer": ("--use-distributed-optimizer",),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
    "context": ("--context-parallel-size", "2"),
}


@pytest.fixture(scope="module")
def overflow_flags(flags: list[str]) -> list[str]:
    """Flags of a run whose second rollout has rewards that overflow."""
    rewards = reward_flags(flags, "overflows_in_the_second_rollout")
    return [*flags, *rewards, "--disable-grpo-std-normalization"]


@pytest.fixture(scope="module")
def skipping_flags(overflow_flags: list[str]) -> list[str]:
    return [*overflow_flags, "--nonfinite-gradient", "skip", "--num-rollout", "3"]


@pytest.fixture(scope="module")
def one_rank(
    skipping_flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Metrics of one rank that skips its second step."""
    return metrics_of(skipping_flags, tmp_path_factory.mktemp("one") / "run")


@pytest.fixture(scope="module", params=LAYOUTS)
def two_ranks(
    request: pytest.FixtureRequest,
    skipping_flags: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """The same of two ranks."""
    output = tmp_path_factory.mktemp("two") / "run"
    return metrics_of([*skipping_flags, *LAYOUTS[request.param]], output, ranks=2)


def skipped_steps(rows: list[dict[str, Any]]) -> list[float]:
    return [row["train/nonfinite_gradient_steps"] for row in rows]


def test_one_rank_skips_the_step_that_is_not_finite(one_rank: list[dict[str, Any]]) -> None:
    assert skipped_steps(one_rank) == [0.0, 1.0, 0.0]


def test_all_ranks_skip_the_step_that_is_not_finite(two_ranks: list[dict[str, Any]]) -> None:
    assert skipped_steps(two_ranks) == [0.0, 1.0, 0.0]


def test_the_step_after_a_skipped_one_is_that_of_one_rank(
    one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]]
) -> None:
    expected = training_metrics(one_rank[2])
    assert training_metrics(two_ranks[2]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_name_the_token_of_a_bad_gradient(
    layout: str, overflow_flags: list[str], tmp_path: Path
) -> None:
    flags = [*overflow_flags, "--num-rollout", "2", *LAYOUTS[layout]]
    ended = run_apart(flags, tmp_path / "run", 2, HANG)
    assert ended.returncode == 1
    sentence = r"The first token at fault is token \d+ \(id \d+\) of the response of sample \d+"
    assert len(re.findall(sentence, ended.stderr)) == 1
    assert "the gradient of step 2 is not finite" in ended.stderr


@dataclass
class ResumedRanks:
    """Two ranks that resume from checkpoints of which the latest one is damaged."""

    save: Path
    ended: Completed
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def resumed(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> ResumedRanks:
    directory = tmp_path_factory.mktemp("resumed")
    save = directory / "save"
    common = [*flags, "--save", str(save), "--load", str(save), "--save-interval", "1"]
    first = [*common, "--num-rollout", "2", "--save-retain", "2"]
    metrics_of(first, directory / "run", ranks=2)
    file = max((save / "iter_0000002").glob("__*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    ended = run_apart([*common, "--num-rollout", "3"], directory / "run", ranks=2)
    assert ended.returncode == 0, ended.stderr
    return ResumedRanks(save, ended, read_metrics(directory / "run"))


def test_ranks_load_the_latest_complete_checkpoint(resumed: ResumedRanks) -> None:
    assert f"resumed from {resumed.save}/iter_0000001" in resumed.ended.stdout
    assert [row["step"] for row in resumed.rows] == [1, 2, 3]


def test_one_rank_warns_of_a_damaged_checkpoint(resumed: ResumedRanks) -> None:
    assert resumed.ended.stderr.count("warning: passed over") == 1


@dataclass
class TorchrunJob:
    """A job of a real torchrun that a signal has ended."""

    returncode: int
    log: str
    """What agent and ranks wrote to stderr."""
    remaining: list[int]
    """Process ids of ranks that still run."""
    num_checkpoints: int


def ranks_of(output: Path) -> list[int]:
    """Process ids of the living ranks with this output directory."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_agent = "torch.distributed.run" in words
        if "train.py" in words and str(output) in words and not is_agent:
            pids.append(process.pid)
    return pids


@contextmanager
def running_agent(flags: list[str], directory: Path) -> Iterator[subprocess.Popen[str]]:
    """The agent of two ranks that have made two steps; kills remaining processes at the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "train.py", *flags]
    command += ["--save", str(directory / "save"), "--output-dir", str(directory / "run")]
    with (directory / "log").open("w") as log:
        agent = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert agent.stdout is not None
    try:
        for line in agent.stdout:
            if line.startswith("step   2/"):
                break
        yield agent
    finally:
        agent.kill()
        agent.stdout.close()
        agent.wait()
        for pid in ranks_of(directory / "run"):
            os.kill(pid, signal.SIGKILL)


def job_after(agent: subprocess.Popen[str], directory: Path) -> TorchrunJob:
    """Waits for the agent."""
    agent.communicate(timeout=HANG)
    return TorchrunJob(
        returncode=agent.returncode,
        log=(directory / "log").read_text(),
        remaining=ranks_of(directory / "run"),
        num_checkpoints=len(list((directory / "save").glob("iter_*"))),
    )


@pytest.fixture(scope="module")
def terminated_job(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> TorchrunJob:
    """The agent received SIGTERM."""
    directory = tmp_path_factory.mktemp("terminated")
    with running_agent(flags, directory) as agent:
        agent.send_signal(signal.SIGTERM)
        return job_after(agent, directory)


def test_sigterm_to_torchruns_agent_ends_its_ranks(terminated_job: TorchrunJob) -> None:
    assert terminated_job.remaining == []


def test_sigterm_to_torchruns_agent_saves(terminated_job: TorchrunJob) -> None:
    assert "stopped by SIGTERM. The run stops after step" in terminated_job.log
    assert terminated_job.num_checkpoints > 0


@pytest.fixture(scope="module")
def broken_job(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> TorchrunJob:
    """One of the ranks was killed."""
    directory = tmp_path_factory.mktemp("broken")
    with running_agent(flags, directory) as agent:
        os.kill(min(ranks_of(directory / "run")), signal.SIGKILL)
        return job_after(agent, directory)


def test_a_killed_rank_ends_the_others(broken_job: TorchrunJob) -> None:
    assert broken_job.remaining == []
    assert broken_job.returncode != 0


def test_the_other_ranks_report_a_killed_rank(broken_job: TorchrunJob) -> None:
    assert "stops because another rank ended without a message" in broken_job.log
