"""SIGKILL at any moment of a run: files are complete, no process remains, and a resumed run is bitwise identical."""

import hashlib
import multiprocessing
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tqdm import tqdm

from slime_tis.trainer.storage.checkpoints import check, checkpoints, read_manifest
from slime_tis.trainer.storage.exports import MARKER
from tests.faults.forked import ForkedRun, group_is_empty, run_forked
from tests.runs import make_task, read_metrics, training_metrics

STEPS = 10
CHAINS, KILLS, ENOUGH = 5, 9, {"anywhere": 15, "saving": 10, "after": 5}
"""Runs, kills per run, and the minimum number of kills of each kind."""
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    task = make_task(tmp_path_factory.mktemp("task"), prompts=24)
    return [
        *(*task, "--num-rollout", str(STEPS), "--save-interval", "1", "--save-retain", "2", "--rollout-shuffle"),
        *("--update-weights-interval", "3", "--use-tis", "--lr-decay-style", "cosine"),  # stale weights are saved too
    ]


def results(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """The metrics of all steps and the SHA-256 of the exported weights."""
    rows = [{"step": row["step"], **training_metrics(row)} for row in read_metrics(directory / "run")]
    return rows, hashlib.sha256((directory / "hf" / "model.safetensors").read_bytes()).hexdigest()


def own(flags: list[str], directory: Path, *, resumes: bool = True) -> list[str]:
    """The command line of a run with all files in a directory."""
    save = str(directory / "save")
    load = ["--load", save] if resumes else []
    return [*flags, "--save", save, *load, "--save-hf", str(directory / "hf"), "--output-dir", str(directory / "run")]


@pytest.fixture(scope="module")
def expected(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """The results of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole")
    outcome = run_forked(own(flags, directory, resumes=False), directory / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    return results(directory)


def kill(run: ForkedRun, moment: Callable[[], bool], delay: float) -> bool:
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


def after_a_save(save: Path, count: int) -> Callable[[], bool]:
    """A condition: `count` new checkpoints exist."""
    present = {path.name for path in save.glob("iter_*")}
    return lambda: len({path.name for path in save.glob("iter_*")} - present) >= count


def within_a_save(save: Path, count: int) -> Callable[[], bool]:
    """A condition: a checkpoint is being written after `count` others."""
    enough = after_a_save(save, count)
    return lambda: enough() and any(save.glob(".iter_*.unfinished"))


def wrong_on_disk(save: Path) -> str | None:
    """Returns the damage of a killed run's checkpoints, or None."""
    for checkpoint in checkpoints(save):
        try:
            check(checkpoint, read_manifest(checkpoint))
        except ValueError as error:
            return f"{checkpoint.name}: {error}"
    return None


def test_a_killed_run_resumes_bitwise(
    flags: list[str], expected: tuple[list[dict[str, Any]], str], tmp_path: Path, tally: Callable[[str], Any]
) -> None:
    chance = random.Random(0)
    anywhere, saving = tally("SIGKILL at a random moment"), tally("SIGKILL within a save")
    after = tally("SIGKILL once a checkpoint counts")
    kills = {"anywhere": anywhere, "saving": saving, "after": after}
    for chain in range(3 * CHAINS):
        if chain >= CHAINS and all(kills[kind].tries >= enough for kind, enough in ENOUGH.items()):
            break  # a run that ended before the kill does not count
        directory = tmp_path / str(chain)
        save = directory / "save"
        for number in range(KILLS):
            run = ForkedRun(own(flags, directory), directory / f"log_{number}")
            kind, moment, delay = [
                (saving, within_a_save(save, chance.randint(0, 1)), 0.04),
                (after, after_a_save(save, chance.randint(1, 2)), 0.004),
                (anywhere, lambda: True, 2.0),
            ][number % 3]
            reached = kill(run, moment, chance.uniform(0, delay))
            if not reached:
                continue  # the run ended first
            wrong = wrong_on_disk(save)
            if not group_is_empty(run.pid):
                wrong = "left a process running"
            kind.record(f"run {chain}, kill {number}", wrong)
        outcome = run_forked(own(flags, directory), directory / "last", timeout=TIMEOUT)
        failure = None if outcome.status == 0 else outcome.error
        anywhere.record(f"run {chain}, to its end", failure or differs(results(directory), expected))
        left = sorted(path.name for path in save.iterdir())
        anywhere.record(f"run {chain}, retention", None if len(left) == 2 else str(left))
    for kind, enough in ENOUGH.items():
        kills[kind].check(at_least=enough)


def differs(found: tuple[list[dict[str, Any]], str], expected: tuple[list[dict[str, Any]], str]) -> str | None:
    """Returns the difference from the results of an uninterrupted run, or None."""
    if [row["step"] for row in found[0]] != [row["step"] for row in expected[0]]:
        return f"has steps {[row['step'] for row in found[0]]}"
    for row, other in zip(*(rows for rows, _ in (found, expected)), strict=True):
        if row != other:
            return f"step {row['step']} differs: {[name for name in other if row.get(name) != other[name]]}"
    return None if found[1] == expected[1] else "exported weights differ"


def test_an_export_that_is_killed_leaves_the_old_one_or_the_new_one(
    flags: list[str], tmp_path: Path, tally: Callable[[str], Any]
) -> None:
    chance = random.Random(1)
    flags = [*flags, "--lr-decay-style", "constant"]
    first = [*flags, "--num-rollout", "1"]
    assert run_forked(own(first, tmp_path, resumes=False), tmp_path / "log", timeout=TIMEOUT).status == 0
    old = snapshot(tmp_path / "hf")
    shutil.copytree(tmp_path / "save", tmp_path / "first_save")
    second = own([*flags, "--num-rollout", "2"], tmp_path)
    assert run_forked(second, tmp_path / "log", timeout=TIMEOUT).status == 0
    new = snapshot(tmp_path / "hf")
    assert old != new and old.keys() == new.keys()
    shutil.copytree(tmp_path / "save", tmp_path / "second_save")
    kills = tally("SIGKILL within an export")
    for number in range(8):
        trained, command = ("first", own(first, tmp_path)) if number % 2 else ("second", second)
        shutil.rmtree(tmp_path / "save")
        shutil.copytree(tmp_path / f"{trained}_save", tmp_path / "save")  # nothing is left to train: an export alone
        begun = (tmp_path / ".hf.unfinished" / MARKER).exists
        if begun():  # by the last one: this one sweeps it, or is killed before that
            kill(ForkedRun(command, tmp_path / "log"), lambda: True, chance.uniform(1.0, 2.0))
        else:
            kill(ForkedRun(command, tmp_path / "log"), begun, chance.uniform(0, 0.02))
        found = snapshot(tmp_path / "hf")
        kills.record(f"kill {number}", None if found in (old, new) else f"neither the old nor the new one: {found}")
    shutil.rmtree(tmp_path / "save")
    shutil.copytree(tmp_path / "second_save", tmp_path / "save")
    outcome = run_forked(second, tmp_path / "log", timeout=TIMEOUT)
    left = [path.name for path in tmp_path.glob(".hf*")]
    whole = outcome.status == 0 and snapshot(tmp_path / "hf") == new and not left
    kills.record("a run that is not killed", None if whole else f"{outcome.error} {left}")
    kills.check(at_least=8)


def test_a_run_prints_though_a_process_was_killed_while_it_printed(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Callable[[str], Any]
) -> None:
    lock = multiprocessing.RLock()
    killed = multiprocessing.get_context("fork").Process(target=lock.acquire)
    killed.start()
    killed.join()
    assert not lock.acquire(block=False)  # nobody will let it go
    monkeypatch.setattr(tqdm, "_lock", lock, raising=False)
    outcome = run_forked(
        [*own(flags, tmp_path, resumes=False), "--num-rollout", "1"], tmp_path / "log", timeout=TIMEOUT
    )
    prints = tally("a lock of a process that is gone")
    prints.record("tqdm's", None if outcome.status == 0 else f"status {outcome.status}: {outcome.output[-200:]}")
    prints.check(at_least=1)


def snapshot(directory: Path) -> dict[str, str]:
    """SHA-256 of each file of a directory, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}
