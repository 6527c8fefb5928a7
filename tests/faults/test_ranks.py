"""Two ranks: signals to one rank, all ranks and torchrun's agent; a rank that fails, and a killed rank."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.runs import (
    ROOT,
    _run_rank,
    fork_server,
    free_port,
    make_task,
    rank_environment,
    read_metrics,
    run_apart,
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


@dataclass
class Ranks:
    """Two ranks of a run."""

    processes: list[Any]
    logs: Path

    @classmethod
    def start(cls, flags: list[str], logs: Path) -> "Ranks":
        logs.mkdir()
        port, context = free_port(), fork_server()
        argv = [*flags, "--output-dir", str(logs / "run")]
        processes = [
            context.Process(target=_run_rank, args=(argv, rank_environment(rank, 2, port), f"{logs}/{rank}"))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        return cls(processes, logs)

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition while both run."""
        deadline = time.monotonic() + HANG
        while time.monotonic() < deadline and all(process.is_alive() for process in self.processes):
            if condition():
                return
            time.sleep(0.01)

    def trains(self) -> bool:
        """Whether the first step is reported."""
        metrics = self.logs / "run" / "metrics.jsonl"
        return metrics.exists() and metrics.read_text().count("\n") > 1

    def wait(self) -> tuple[list[int | None], list[str]]:
        """Returns the exit statuses, None for a rank that hangs, and the stderr of each rank."""
        deadline = time.monotonic() + HANG
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        statuses = [process.exitcode for process in self.processes]
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
        return statuses, [(self.logs / f"{rank}.err").read_text() for rank in range(2)]


def test_a_signal_to_one_rank_or_to_both_saves_and_ends_both(flags: list[str], tmp_path: Path, tally: Any) -> None:
    tries = tally("a signal to ranks")
    save = tmp_path / "save"
    chance = random.Random(0)
    cases = ((signal.SIGUSR1, (1,)), (signal.SIGTERM, (0,)), (signal.SIGINT, (0, 1)), (signal.SIGTERM, (1, 0)))
    for attempt, (number, receivers) in enumerate(cases):
        ranks = Ranks.start([*flags, "--save", str(save), "--load", str(save)], tmp_path / f"log{attempt}")
        ranks.until(ranks.trains)
        time.sleep(chance.uniform(0.0, 1.0))
        for rank in receivers:
            os.kill(ranks.processes[rank].pid, number)
        statuses, errors = ranks.wait()
        failure = None
        if statuses != [128 + number] * 2:
            failure = f"statuses {statuses}: {errors}"
        elif "Traceback" in "".join(errors) or f"--load {save} resumes" not in "".join(errors):
            failure = f"{errors}"
        elif "".join(errors).count("stopped by") != 1:
            failure = f"not said once: {errors}"
        tries.record(f"{number.name} to {receivers}", failure)
    steps = [row["step"] for row in read_metrics(tmp_path / f"log{len(cases) - 1}" / "run")]
    tries.record("the steps of the last run", None if steps == sorted(set(steps)) else str(steps))
    tries.check(at_least=5)


@pytest.mark.parametrize(
    ("name", "statuses", "said"),
    [
        ("raises_on_rank_1", [1, 2], "no such label"),
        ("dies_on_rank_1", [1, -9], "rank 0 stops because another rank ended without a message"),
        ("unhappy", [1, 1], "this reward is never happy"),
    ],
)
def test_the_rank_that_fails_is_the_one_that_reports(
    name: str, statuses: list[int], said: str, flags: list[str], tmp_path: Path, tally: Any
) -> None:
    tries = tally("a rank that fails")
    code = Path(flags[flags.index("--custom-rm-path") + 1]).parent / "code.py"
    ranks = Ranks.start([*flags, "--custom-rm-path", f"{code}:{name}"], tmp_path / "log")
    found, errors = ranks.wait()
    failure = None
    if None in found or not all(found):
        failure = f"statuses {found}: {errors}"
    elif said not in "".join(errors):
        failure = f"does not say {said!r}: {errors}"
    elif "Traceback" in errors[0] or "gloo" in "".join(errors):
        failure = f"noise: {errors}"
    tries.record(name, failure)
    tries.check(at_least=1)


LAYOUTS = {
    "data": (),
    "data, distributed optimizer": ("--use-distributed-optimizer",),
    "tensor": ("--tensor-model-parallel-size", "2"),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
    "context": ("--context-parallel-size", "2"),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_all_ranks_skip_the_step_that_is_not_finite(layout: str, flags: list[str], tmp_path: Path, tally: Any) -> None:
    """The rewards of the second rollout overflow: every rank skips its step, with equal metrics."""
    tries = tally("a gradient that is not finite on two ranks (skip)")
    code = Path(flags[flags.index("--custom-rm-path") + 1]).parent / "code.py"
    common = [*flags, "--custom-rm-path", f"{code}:overflows_in_the_second_rollout", "--disable-grpo-std-normalization"]
    common += ["--nonfinite-gradient", "skip", "--num-rollout", "3"]
    one = run_apart(common, tmp_path / "one")
    two = run_apart([*common, *LAYOUTS[layout]], tmp_path / "two", ranks=2, timeout=2 * HANG)
    failure = None if one.returncode == two.returncode == 0 else f"{one.stderr}{two.stderr}"
    if failure is None:
        rows = [[training_metrics(row) for row in read_metrics(tmp_path / name)] for name in ("one", "two")]
        skipped = [[row["train/nonfinite_gradient_steps"] for row in run] for run in rows]
        if skipped != [[0.0, 1.0, 0.0]] * 2:
            failure = f"skipped {skipped}"
        elif rows[1][2] != pytest.approx(rows[0][2], rel=1e-4, abs=1e-4):
            failure = f"the step after it differs: {rows[0][2]} {rows[1][2]}"
    tries.record(layout, failure)
    tries.check(at_least=1)


def test_ranks_agree_on_the_latest_complete_checkpoint(flags: list[str], tmp_path: Path, tally: Any) -> None:
    """A flipped bit in the latest checkpoint: both ranks load the previous one, and one rank warns."""
    tries = tally("damaged checkpoint: two ranks take the one before")
    save = tmp_path / "save"
    common = [*flags, "--save", str(save), "--load", str(save), "--save-interval", "1"]
    whole = run_apart([*common, "--num-rollout", "2", "--save-retain", "2"], tmp_path / "run", ranks=2)
    failure = whole.stderr if whole.returncode else None
    for file in sorted((save / "iter_0000002").glob("__*.distcp"))[-1:]:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    resumed = run_apart([*common, "--num-rollout", "3"], tmp_path / "run", ranks=2)
    if resumed.returncode or resumed.stderr.count("warning: passed over") != 1:
        failure = failure or f"{resumed.returncode}: {resumed.stderr}"
    if f"resumed from {save}/iter_0000001" not in resumed.stdout:
        failure = failure or resumed.stdout
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    tries.record("a flipped bit", failure or (None if steps == [1, 2, 3] else str(steps)))
    tries.check(at_least=1)


@pytest.fixture
def torchrun(flags: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks under a real torchrun, in a process group of their own; killed at the end if they are left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
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
    assert agent.stdout is not None
    for line in agent.stdout:
        if line.startswith("step   2/"):
            break
    yield agent
    agent.kill()
    agent.stdout.close()
    agent.wait()
    for pid in ranks_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


def ranks_of(tmp_path: Path) -> list[int]:
    """The ranks of this test that are alive."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train.py" in words and str(tmp_path / "run").encode() in words and b"torch.distributed.run" not in words:
            found.append(int(file.parent.name))
    return found


def test_sigterm_to_torchruns_agent_saves_and_ends_its_ranks(
    torchrun: subprocess.Popen[str], tmp_path: Path, tally: Any
) -> None:
    tries = tally("torchrun")
    torchrun.send_signal(signal.SIGTERM)
    torchrun.communicate(timeout=HANG)
    log = (tmp_path / "log").read_text()
    failure = None if "stopped by SIGTERM. The run stops after step" in log else log
    if ranks_of(tmp_path):
        failure = "left ranks behind"
    if not list((tmp_path / "save").glob("iter_*")):
        failure = f"saved nothing: {log}"
    tries.record("SIGTERM to the agent", failure)
    tries.check(at_least=1)


def test_a_killed_rank_ends_the_others(torchrun: subprocess.Popen[str], tmp_path: Path, tally: Any) -> None:
    tries = tally("torchrun")
    victim, *_ = sorted(ranks_of(tmp_path))
    os.kill(victim, signal.SIGKILL)
    torchrun.communicate(timeout=HANG)
    log = (tmp_path / "log").read_text()
    failure = "left ranks behind" if ranks_of(tmp_path) else None
    if torchrun.returncode == 0 or "stops because another rank ended without a message" not in log:
        failure = f"status {torchrun.returncode}: {log}"
    tries.record("SIGKILL to a rank", failure)
    tries.check(at_least=1)
