"""Runs of train.py on a tiny random model, in this process or under torchrun."""

import gc
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent
REWARD = """
def reward(args, sample):
    return len(sample.response_ids) % 3 + sample.response_ids[0] / 50
"""


def make_task(directory, family="qwen3", prompts=16, **sizes):
    """Makes a checkpoint, prompts and a reward without ties; returns flags that train on them."""
    from tests.checkpoints import (
        make_checkpoint,
    )  # slow to import, and this file is part of every session

    make_checkpoint(directory / "model", family, **sizes)
    chance = random.Random(0)
    rows = ["".join(chance.choices("0123456789", k=chance.randint(3, 12))) for _ in range(prompts)]
    with open(directory / "train.jsonl", "w") as lines:
        lines.writelines(
            json.dumps({"prompt": f"<bos>{row}>", "label": "".join(sorted(row))}) + "\n"
            for row in rows
        )
    (directory / "reward.py").write_text(REWARD)
    return [
        *("--hf-checkpoint", str(directory / "model")),
        *(
            "--prompt-data",
            str(directory / "train.jsonl"),
            "--input-key",
            "prompt",
            "--label-key",
            "label",
        ),
        *("--custom-rm-path", f"{directory / 'reward.py'}:reward"),
        *(
            "--rollout-batch-size",
            "4",
            "--n-samples-per-prompt",
            "4",
            "--rollout-max-response-len",
            "10",
        ),
        *("--num-rollout", "3", "--lr", "1e-3", "--rollout-precision", "int8", "--no-progress"),
        *("--num-threads", "1"),  # the same sums in the same order, in this process and in others
    ]


def with_sglang(flags):
    """A task's flags with SGLang servers, updated over the disk, instead of the local engine."""
    place = flags.index("--rollout-precision")
    return [
        *flags[:place],
        *flags[place + 2 :],
        "--rollout-engine",
        "sglang",
        "--sglang-weight-sync",
        "disk",
    ]


@contextmanager
def largest_file(size):
    """Writes beyond a size fail in this process and those forked meanwhile, as on a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, handler)


def run_here(flags, output):
    """Runs train.py in this process and returns the rows of its metrics.jsonl.

    The engines are compared before the first step only if `flags` ask for it. The comparison takes
    half of the time of a tiny run and changes no number (`tests/test_check_engines.py`). Runs in
    other processes (`run_apart`) have it.
    """
    from slime_tis.main import train

    unchecked = ["--check-engines", "off"]
    assert train([*unchecked, *flags, "--output-dir", str(output)]) == 0
    # a run's process groups lie in reference cycles, and each gloo group keeps two threads
    gc.collect()
    return read_metrics(output)


@dataclass(frozen=True)
class Completed:
    """A run that ended: the largest exit status of its ranks, and their output, rank after rank."""

    statuses: list[int | None]
    """Exit status of each rank, negative for a signal; None for a rank that hung."""
    stdout: str
    stderr: str

    @property
    def returncode(self):
        return max(abs(9 if status is None else status) for status in self.statuses)


@dataclass
class Started:
    """Ranks of a run in new processes, whose output is in the files `logs`.out and `logs`.err."""

    processes: list[BaseProcess]
    logs: list[Path]

    def is_alive(self):
        return all(process.is_alive() for process in self.processes)

    def until(self, condition, timeout=60):
        """Waits for a condition while all ranks run."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.is_alive() and not condition():
            time.sleep(0.005)

    def kill(self):
        for process in self.processes:
            process.kill()

    def wait(self, timeout=600):
        """Waits until all ranks end; kills those that hang."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        statuses = [process.exitcode for process in self.processes]
        self.kill()
        for process in self.processes:
            process.join()
        out, err = (
            "".join(Path(f"{log}.{name}").read_text() for log in self.logs)
            for name in ("out", "err")
        )
        return Completed(statuses, out, err)


def run_apart(flags, output, ranks=1, timeout=600):
    """Runs train.py in `ranks` processes, forked from one that has imported the libraries.

    Forked from a process that has never run autograd (multiprocessing's fork server), each run
    starts in milliseconds instead of the nine seconds of imports.
    """
    return start_apart(flags, output, ranks).wait(timeout)


def start_apart(flags, output, ranks=1, prepare=None):
    """Starts train.py like `run_apart`; logs are next to `output`: NAME.out or NAME.RANK.out.

    `prepare` is called in each process before the run.
    """
    context, port, argv = fork_server(), free_port(), [*flags, "--output-dir", str(output)]
    output.parent.mkdir(parents=True, exist_ok=True)
    logs = (
        [output]
        if ranks == 1
        else [output.with_name(f"{output.name}.{rank}") for rank in range(ranks)]
    )
    processes = []
    for rank, log in enumerate(logs):
        environment = {} if ranks == 1 else rank_environment(rank, ranks, port)
        processes.append(
            context.Process(target=_run_rank, args=(argv, environment, str(log), prepare))
        )
        processes[-1].start()
    return Started(processes, logs)


def fork_server():
    """Makes processes by forking one that has imported train.py and has never run autograd."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["slime_tis.trainer.training_command", "tests.runs"])
    return context


def start_fork_server():
    """Makes the fork server a fork of this process, which spares it the seconds of imports.

    For a process that has imported everything, and has run nothing yet.
    """
    multiprocessing.resource_tracker.ensure_running()
    with mock.patch("multiprocessing.util.spawnv_passfds", _fork_instead):
        multiprocessing.forkserver.set_forkserver_preload([])
        multiprocessing.forkserver.ensure_running()


def _fork_instead(path, arguments, descriptors):
    """Runs the code of a `python -c …` in a fork of this process, with its descriptors."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # Others become /dev/null instead of being closed: pytest's streams, which loggers hold,
        # would else write to whatever gets their number next.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in {int(name) for name in os.listdir("/dev/fd")} - {
            0,
            1,
            2,
            null,
            *descriptors,
        }:
            os.dup2(null, descriptor, inheritable=False)
        exec(arguments[-1], {})
    finally:
        os._exit(1)


def spawn(function, args, nprocs):
    """Calls `function(rank, *args)` in `nprocs` forked processes, and fails if one fails."""
    import torch.multiprocessing

    fork_server()
    torch.multiprocessing.start_processes(function, args, nprocs, start_method="forkserver")


def free_port():
    """A TCP port of this machine that nobody listens on.

    It lies below the ports that the kernel gives out (from 32768 on Linux): another socket may get
    one of those before the program that this port is meant for listens.
    """
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError("none of 100 ports tried is free")


def rank_environment(rank, ranks, port):
    """The variables that torchrun gives to a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _run_rank(argv, environment, log, prepare):
    """One rank of a run, in the process that was forked for it."""
    import torch

    from slime_tis.main import train

    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(
            os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600),
            descriptor,
        )
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    if prepare is not None:
        prepare()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.exit(train(argv))


def run_program(flags, output, ranks=1):
    """Runs `python train.py`, or `torchrun` with several ranks, as a user does."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    command = [sys.executable, *launcher, "train.py", *flags, "--output-dir", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


def read_metrics(output):
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def metrics_of(flags, output, ranks=1):
    """The rows of metrics.jsonl of a successful `run_apart`."""
    result = run_apart(flags, output, ranks)
    assert result.returncode == 0, result.stderr[-4000:]
    return read_metrics(output)


def training_metrics(row):
    """The metrics of a row that do not depend on the clock."""
    return {
        name: value
        for name, value in row.items()
        if name.startswith(("train/", "rollout/", "eval/"))
    }
