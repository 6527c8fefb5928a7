"""SIGKILL at any moment of a run: files are complete, no process remains, and a resumed run is bitwise identical.

tests/storage kills at each file operation of a save and of an export.
"""

import hashlib
import random
import signal
import time

import psutil
import pytest

from slime_tis.trainer.storage.checkpoints import check, checkpoints, read_manifest
from tests.faults.forked import ForkedRun, group_is_empty, run_forked
from tests.faults.forked import check as check_tries
from tests.runs import make_task, read_metrics, training_metrics

STEPS = 10
CHAINS, KILLS, ENOUGH = 5, 9, {"anywhere": 8, "saving": 8, "after": 4}
"""Runs, kills per run, and the minimum number of kills of each kind."""
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("task"), prompts=24)
    return [
        *(*task, "--num-rollout", str(STEPS), "--save-interval", "1", "--save-retain", "2", "--rollout-shuffle"),
        *("--update-weights-interval", "3", "--use-tis", "--lr-decay-style", "cosine"),  # stale weights are saved too
    ]


def own(flags, directory, *, resumes=True):
    """The command line of a run with all files in a directory."""
    save = str(directory / "save")
    load = ["--load", save] if resumes else []
    return [*flags, "--save", save, *load, "--save-hf", str(directory / "hf"), "--output-dir", str(directory / "run")]


def results(directory):
    """The metrics of all steps and the SHA-256 of the exported weights."""
    rows = [{"step": row["step"], **training_metrics(row)} for row in read_metrics(directory / "run")]
    return [*rows, hashlib.sha256((directory / "hf" / "model.safetensors").read_bytes()).hexdigest()]


def kill(run, moment, delay):
    """Kills a run `delay` seconds after a moment; returns whether the run was still alive."""
    process = psutil.Process(run.pid)
    while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < run.started + TIMEOUT:
        if moment():
            time.sleep(delay)
            break
        time.sleep(0.001)
    reached = process.status() != psutil.STATUS_ZOMBIE
    run.kill(signal.SIGKILL)
    run.wait(TIMEOUT)
    return reached


def after_a_save(save, count):
    """A condition: `count` new checkpoints exist."""
    present = {path.name for path in save.glob("iter_*")}
    return lambda: len({path.name for path in save.glob("iter_*")} - present) >= count


def within_a_save(save, count):
    """A condition: a checkpoint is being written after `count` others."""
    enough = after_a_save(save, count)
    return lambda: enough() and any(save.glob(".iter_*.unfinished"))


def damage(save):
    """Returns the damage of a killed run's checkpoints, or None."""
    for checkpoint in checkpoints(save):
        try:
            check(checkpoint, read_manifest(checkpoint))
        except ValueError as error:
            return f"{checkpoint.name}: {error}"
    return None


def test_a_killed_run_resumes_bitwise(flags, tmp_path):
    whole = run_forked(own(flags, tmp_path / "whole", resumes=False), tmp_path / "whole", timeout=TIMEOUT)
    assert whole.status == 0, whole.error
    chance = random.Random(0)
    kills = {kind: {} for kind in ENOUGH}
    for chain in range(3 * CHAINS):
        if chain >= CHAINS and all(len(kills[kind]) >= enough for kind, enough in ENOUGH.items()):
            break  # a run that ended before the kill does not count
        directory = tmp_path / str(chain)
        save = directory / "save"
        for number in range(KILLS):
            run = ForkedRun(own(flags, directory), directory / f"log_{number}")
            kind, moment, delay = [
                ("saving", within_a_save(save, chance.randint(0, 1)), 0.04),
                ("after", after_a_save(save, chance.randint(1, 2)), 0.004),
                ("anywhere", lambda: True, 1.4),
            ][number % 3]
            if kill(run, moment, chance.uniform(0, delay)):
                failure = damage(save) if group_is_empty(run.pid) else "left a process running"
                kills[kind][f"run {chain}, kill {number}"] = failure
        outcome = run_forked(own(flags, directory), directory / "last", timeout=TIMEOUT)
        assert outcome.status == 0, outcome.error
        assert results(directory) == results(tmp_path / "whole")
        assert len(list(save.iterdir())) == 2
    for kind, enough in ENOUGH.items():
        check_tries(kills[kind], at_least=enough)
