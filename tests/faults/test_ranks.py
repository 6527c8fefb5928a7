"""Two ranks: signals to one rank, all ranks and torchrun's agent; a rank that fails, and a killed
rank."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.runs import (
    ROOT,
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
def flags(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    task = make_task(directory)
    (directory / "code.py").write_text(CODE)
    return [*task, "--num-rollout", "400", "--use-tis"]


@pytest.mark.parametrize(
    ("number", "receivers"),
    [(signal.SIGUSR1, (1,)), (signal.SIGTERM, (0,)), (signal.SIGINT, (0, 1))],
    ids=["rank 1", "rank 0", "both"],
)
def test_a_signal_to_one_rank_or_to_both_saves_and_ends_both(number, receivers, flags, tmp_path):
    save, metrics = tmp_path / "save", tmp_path / "run" / "metrics.jsonl"
    ranks = start_apart([*flags, "--save", str(save)], tmp_path / "run", ranks=2)
    ranks.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    for rank in receivers:
        os.kill(ranks.processes[rank].pid or 0, number)
    ended = ranks.wait(HANG)
    assert ended.statuses == [128 + number] * 2, ended.stderr
    assert "Traceback" not in ended.stderr and f"--load {save} resumes" in ended.stderr
    assert ended.stderr.count("stopped by") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises_on_rank_1", "no such label"),
        ("dies_on_rank_1", "rank 0 stops because another rank ended without a message"),
        ("unhappy", "this reward is never happy"),
    ],
    ids=["one raises", "one dies", "both raise"],
)
def test_the_rank_that_fails_is_the_one_that_reports(name, words, flags, tmp_path):
    code = Path(flags[flags.index("--custom-rm-path") + 1]).parent / "code.py"
    ended = run_apart([*flags, "--custom-rm-path", f"{code}:{name}"], tmp_path / "run", 2, HANG)
    assert None not in ended.statuses and all(ended.statuses), ended.stderr
    assert words in ended.stderr and "gloo" not in ended.stderr
    assert "Traceback" not in (tmp_path / "run.0.err").read_text()


LAYOUTS = {
    "data, distributed optimizer": ("--use-distributed-optimizer",),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
    "context": ("--context-parallel-size", "2"),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_all_ranks_skip_the_step_that_is_not_finite(layout, flags, tmp_path):
    """The rewards of the second rollout overflow: every rank skips its step, with equal metrics."""
    code = Path(flags[flags.index("--custom-rm-path") + 1]).parent / "code.py"
    common = [
        *flags,
        "--custom-rm-path",
        f"{code}:overflows_in_the_second_rollout",
        "--disable-grpo-std-normalization",
    ]
    common += ["--nonfinite-gradient", "skip", "--num-rollout", "3"]
    one = metrics_of(common, tmp_path / "one")
    two = metrics_of([*common, *LAYOUTS[layout]], tmp_path / "two", ranks=2)
    for rows in (one, two):
        assert [row["train/nonfinite_gradient_steps"] for row in rows] == [0.0, 1.0, 0.0]
    assert training_metrics(two[2]) == pytest.approx(training_metrics(one[2]), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_all_layouts_name_the_token_of_a_bad_gradient(layout, flags, tmp_path):
    code = Path(flags[flags.index("--custom-rm-path") + 1]).parent / "code.py"
    options = [
        "--custom-rm-path",
        f"{code}:overflows_in_the_second_rollout",
        "--disable-grpo-std-normalization",
    ]
    ended = run_apart(
        [*flags, *options, "--num-rollout", "2", *LAYOUTS[layout]], tmp_path / "run", 2, HANG
    )
    assert ended.returncode == 1
    sentence = r"The first token at fault is token \d+ \(id \d+\) of the response of sample \d+"
    assert len(re.findall(sentence, ended.stderr)) == 1
    assert "the gradient of step 2 is not finite" in ended.stderr


def test_ranks_agree_on_the_latest_complete_checkpoint(flags, tmp_path):
    """A flipped bit in the latest checkpoint: both ranks load the previous one, and one rank
    warns."""
    save = tmp_path / "save"
    common = [*flags, "--save", str(save), "--load", str(save), "--save-interval", "1"]
    metrics_of([*common, "--num-rollout", "2", "--save-retain", "2"], tmp_path / "run", ranks=2)
    file = max((save / "iter_0000002").glob("__*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    resumed = run_apart([*common, "--num-rollout", "3"], tmp_path / "run", ranks=2)
    assert resumed.returncode == 0 and resumed.stderr.count("warning: passed over") == 1, (
        resumed.stderr
    )
    assert f"resumed from {save}/iter_0000001" in resumed.stdout
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.fixture
def torchrun(flags, tmp_path):
    """Two ranks under a real torchrun, in a process group of their own; killed at the end if they
    are left."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    command += [*flags, "--save", str(tmp_path / "save"), "--output-dir", str(tmp_path / "run")]
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    for line in agent.stdout:
        if line.startswith("step   2/"):
            break
    yield agent
    agent.kill()
    agent.stdout.close()
    agent.wait()
    for pid in ranks_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


def ranks_of(tmp_path):
    """The ranks of this test that are alive."""
    pids = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if {"train.py", str(tmp_path / "run")} <= set(
            words
        ) and "torch.distributed.run" not in words:
            pids.append(process.pid)
    return pids


def test_sigterm_to_torchruns_agent_saves_and_ends_its_ranks(torchrun, tmp_path):
    torchrun.send_signal(signal.SIGTERM)
    torchrun.communicate(timeout=HANG)
    assert "stopped by SIGTERM. The run stops after step" in (tmp_path / "log").read_text()
    assert ranks_of(tmp_path) == [] and list((tmp_path / "save").glob("iter_*"))


def test_a_killed_rank_ends_the_others(torchrun, tmp_path):
    os.kill(min(ranks_of(tmp_path)), signal.SIGKILL)
    torchrun.communicate(timeout=HANG)
    assert ranks_of(tmp_path) == [] and torchrun.returncode
    assert "stops because another rank ended without a message" in (tmp_path / "log").read_text()
