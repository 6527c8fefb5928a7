"""Damaged checkpoints, directories that are not the run's own, two runs on one directory, full disks, changed options:
one message each, nothing lost, and what is resumed continues to the bit."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_tis.errors import quoted_path
from slime_tis.trainer.megatron import checkpoint
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.options.megatron import MegatronConfig
from slime_tis.trainer.storage.checkpoints import MANIFEST, TRAINER_STATE, checksums, files_of, write_manifest
from tests.faults.forked import ForkedRun, Outcome, run_forked
from tests.runs import make_task, read_metrics, spawn, training_metrics

TIMEOUT = 120.0


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    # stale weights that bypass corrects, so that no warning is printed beside the messages
    return [*make_task(tmp_path_factory.mktemp("task")), "--update-weights-interval", "2", "--use-rollout-logprobs"]


@pytest.fixture(scope="module")
def trained(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with the checkpoints of the last three: `save`, `run` (reports) and `hf`."""
    directory = tmp_path_factory.mktemp("trained")
    flags = [*task, "--num-rollout", "4", "--save-interval", "1", "--save-retain", "3"]
    flags += ["--save", str(directory / "save")]
    flags += ["--save-hf", str(directory / "hf"), "--output-dir", str(directory / "run")]
    outcome = run_forked(flags, directory / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    assert (directory / "save" / "iter_0000003" / "rollout_weights.safetensors").exists()  # stale weights
    return directory


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{"step": row["step"], **training_metrics(row)} for row in read_metrics(run)]


def not_one_message(outcome: Outcome, status: int, *words: str) -> str | None:
    """Why an outcome is not a refusal in one line of stderr with these words, or None."""
    lines = [line for line in outcome.error.splitlines() if line.strip() and not line.startswith("warning: ")]
    if outcome.status == status and len(lines) == 1 and all(word in lines[0] for word in words):
        return None
    return f"status {outcome.status}, {len(lines)} lines: {outcome.error[-600:]}"


def damages(chance: random.Random, names: list[str]) -> Iterator[tuple[str, str, Callable[[Path], Any]]]:
    """What may happen to a file of a checkpoint: a name, the file, and what does it."""

    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)

    def cut(file: Path) -> None:
        os.truncate(file, chance.randrange(file.stat().st_size))

    def replace_by_directory(file: Path) -> None:
        file.unlink()
        file.mkdir()

    for name in names:
        for number in range(3):
            yield f"bit {number} of {name} flipped", name, flip
        yield f"{name} cut", name, cut
        yield f"{name} emptied", name, lambda file: os.truncate(file, 0)
        yield f"{name} removed", name, lambda file: file.unlink()
        yield f"{name} longer", name, lambda file: file.write_bytes(file.read_bytes() + b"x\n")
        yield f"{name} a directory", name, replace_by_directory
        yield f"{name} of zeros", name, lambda file: file.write_bytes(bytes(file.stat().st_size))


def test_every_damaged_checkpoint_is_found(task: list[str], trained: Path, tmp_path: Path, tally: Any) -> None:
    damaged = tally("damaged checkpoint: found, the one before is taken")
    results = tmp_path / "results.json"
    # in a process of its own: one that has started gloo cannot fork runs any more
    spawn(damage_and_look, (task[task.index("--hf-checkpoint") + 1], str(trained / "save"), str(results)), 1)
    for what, failure in json.loads(results.read_text()):
        damaged.record(what, failure)
    damaged.check(at_least=70)


def damage_and_look(rank: int, model: str, trained: str, results: str) -> None:
    """Damages every file of the newest checkpoint in every way; writes what was tried and what went wrong."""
    initialize(MegatronConfig(hf_checkpoint=model))
    tried, save = [], Path(results).parent / "save"
    names = [*files_of(Path(trained) / "iter_0000003"), MANIFEST]
    for what, name, damage in damages(random.Random(0), names):
        shutil.copytree(trained, save)
        shutil.rmtree(save / "iter_0000004")
        damage(save / "iter_0000003" / name)
        found = checkpoint.latest_complete_checkpoint(save)
        right = found is not None and found.checkpoint.name == "iter_0000002" and len(found.damaged) == 1
        if found is not None and name != MANIFEST:  # a damaged sum is that of any file
            right = right and name in found.damaged[0]
        tried.append((what, None if right else f"took {found}"))
        shutil.rmtree(save)
    shut_down()
    Path(results).write_text(json.dumps(tried))


def test_a_run_goes_on_from_the_latest_complete_checkpoint(
    task: list[str], trained: Path, tmp_path: Path, tally: Any
) -> None:
    resumed = tally("damaged checkpoint: resumed to the bit")
    cases: dict[str, Callable[[Path], Any]] = {
        "flipped bit": lambda save: flip_middle(save / "iter_0000004" / "__0_0.distcp"),
        "no metadata": lambda save: (save / "iter_0000004" / ".metadata").unlink(),
        "empty directory": lambda save: (save / "iter_0000009").mkdir(),
        "odd names": lambda save: [(save / name).mkdir() for name in ("iter_abc", "iter_", "iter_1.5", "x")],
        "link in a circle": lambda save: (save / "iter_0000009").symlink_to("iter_0000009"),
        "a file": lambda save: (save / "iter_0000009").write_text("mine"),
        "two damaged": lambda save: [(save / f"iter_000000{step}" / "common.pt").write_bytes(b"") for step in (3, 4)],
        "state cut": lambda save: os.truncate(save / "iter_0000004" / TRAINER_STATE, 100),
    }
    for name, damage in cases.items():
        directory = tmp_path / name.replace(" ", "_")
        for part in ("save", "run"):
            shutil.copytree(trained / part, directory / part)
        damage(directory / "save")
        outcome = run_forked(resume(task, directory), directory / "log", timeout=TIMEOUT)
        failure = None if outcome.status == 0 and not outcome.traceback else outcome.error
        if failure is None and metrics(directory / "run") != metrics(trained / "run"):
            failure = "metrics differ"
        if failure is None and outcome.error.count("warning: passed over") != {"two damaged": 2}.get(
            name, int(name in ("flipped bit", "no metadata", "empty directory", "state cut"))
        ):
            failure = f"warns: {outcome.error}"
        if failure is None and file_bytes(directory / "hf") != file_bytes(trained / "hf"):
            failure = "exported weights differ"
        resumed.record(name, failure)
    resumed.check(at_least=8)


def flip_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    file.write_bytes(data)


def file_bytes(export: Path) -> bytes:
    return (export / "model.safetensors").read_bytes()


def resume(task: list[str], directory: Path, *flags: str) -> list[str]:
    """The command line that continues in a copy of the trained run."""
    save = str(directory / "save")
    return [
        *(*task, "--num-rollout", "4", "--save-interval", "1", "--save-retain", "3", "--load", save, "--save", save),
        *("--save-hf", str(directory / "hf"), "--output-dir", str(directory / "run"), *flags),
    ]


def rewritten(save: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the trainer's state of all checkpoints, with checksums that fit."""
    for found in save.iterdir():
        state = json.loads((found / TRAINER_STATE).read_text())
        (found / TRAINER_STATE).write_text(json.dumps(change(state)))
        write_manifest(found, checksums(found, files_of(found)))


def test_what_cannot_be_resumed_ends_in_one_message(task: list[str], trained: Path, tmp_path: Path, tally: Any) -> None:
    refusals = tally("resumption that is refused")
    states: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
        "a list": (lambda state: [state], "trainer_state.json: content: "),
        "no step": (lambda state: {**state, "step": None}, "step: "),
        "nothing": (lambda state: {}, "run: "),
        "dataset a list": (lambda state: {**state, "dataset": []}, "dataset: "),
        "place of text": (
            lambda state: {**state, "dataset": {**state["dataset"], "position": "x"}},
            "is not a place in",
        ),
        "other prompts": (
            lambda state: {**state, "dataset": {**state["dataset"], "prompts": "0"}},
            "have changed since the start of the run",
        ),
        "unfinished of text": (lambda state: {**state, "unfinished": "x"}, "unfinished: "),
        "another model": (lambda state: {**state, "model": "0"}, "--hf-checkpoint is"),
    }
    lines = {
        "metrics of a list": (b"[1]\n", "line 2"),
        "metrics without step": (b'{"loss": 1}\n', "line 2"),
        "metrics of bytes": (b'{"step": 1, "x": "\xff"}\n', "line 2"),
    }
    options = {
        ("--seed", "5"): ("--seed is 5 but the run that --load resumes has 1234",),
        ("--rollout-shuffle",): ("--rollout-shuffle is True but the run that --load resumes has False",),
        ("--bf16",): ("--bf16 is True but the run that --load resumes has False",),
        ("--use-distributed-optimizer",): ("--use-distributed-optimizer is True",),
    }
    for number, (name, (change, words)) in enumerate(states.items()):
        save = tmp_path / f"state_{number}" / "save"
        shutil.copytree(trained / "save", save)
        rewritten(save, change)
        outcome = run_forked(resume(task, save.parent), save.parent / "log", timeout=TIMEOUT)
        refusals.record(name, not_one_message(outcome, 1, words))
    for number, (name, (line, words)) in enumerate(lines.items()):
        directory = tmp_path / f"metrics_{number}"
        for part in ("save", "run"):
            shutil.copytree(trained / part, directory / part)
        rows = (trained / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (directory / "run" / "metrics.jsonl").write_bytes(b"".join([rows[0], line, *rows[2:]]))
        outcome = run_forked(resume(task, directory), directory / "log", timeout=TIMEOUT)
        refusals.record(name, not_one_message(outcome, 1, str(directory / "run" / "metrics.jsonl"), words))
    directory = tmp_path / "options"
    shutil.copytree(trained / "save", directory / "save")
    for flags, said in options.items():
        outcome = run_forked(resume(task, directory, *flags), directory / "log", timeout=TIMEOUT)
        refusals.record(" ".join(flags), not_one_message(outcome, 2, *said))
    for found in (directory / "save").iterdir():
        (found / "__0_1.distcp").unlink()
    outcome = run_forked(resume(task, directory), directory / "log", timeout=TIMEOUT)
    refusals.record(
        "none whole", not_one_message(outcome, 1, "no checkpoint under", "iter_0000002: __0_1.distcp is missing")
    )
    refusals.check(at_least=16)


def test_changed_options_take_effect(task: list[str], trained: Path, tmp_path: Path, tally: Any) -> None:
    changes = tally("option changed on resuming")
    cases: dict[tuple[str, ...], tuple[float, str]] = {
        ("--lr", "5e-4"): (5e-4, "--lr 0.001 → 0.0005"),
        ("--lr-decay-style", "linear", "--lr-decay-iters", "8"): (5e-4, "--lr-decay-style 'constant' → 'linear'"),
        ("--lr-warmup-iters", "3", "--lr", "2e-3"): (2e-3, "--lr-warmup-iters 0 → 3"),
        ("--lr", "2e-3", "--min-lr", "1e-3", "--lr-decay-style", "linear", "--lr-decay-iters", "4"): (1e-3, "--min-lr"),
        ("--rollout-precision", "fp32"): (1e-3, "--rollout-precision 'int8' → 'fp32'"),
        ("--n-samples-per-prompt", "2"): (1e-3, "--n-samples-per-prompt 4 → 2"),
    }
    for number, (flags, (lr, words)) in enumerate(cases.items()):
        directory = tmp_path / str(number)
        for part in ("save", "run"):
            shutil.copytree(trained / part, directory / part)
        shutil.rmtree(directory / "save" / "iter_0000004")
        outcome = run_forked(resume(task, directory, *flags), directory / "log", timeout=TIMEOUT)
        failure = None if outcome.status == 0 else outcome.error
        if failure is None:
            rows = read_metrics(directory / "run")
            said = [line for line in outcome.output.splitlines() if line.startswith("options changed since then: ")]
            if abs(rows[-1]["train/lr"] - lr) > 1e-9 or len(rows) != 4:
                failure = f"{len(rows)} rows, the last one's lr is {rows[-1]['train/lr']}"
            elif len(said) != 1 or words not in said[0]:
                failure = f"said {said}"
        changes.record(" ".join(flags), failure)
    changes.check(at_least=6)


def test_no_export_takes_the_place_of_anything(task: list[str], trained: Path, tmp_path: Path, tally: Any) -> None:
    exports = tally("--save-hf over something: it survives")
    model = tmp_path / "data" / "model"
    shutil.copytree(task[task.index("--hf-checkpoint") + 1], model)
    shutil.copy(task[task.index("--prompt-data") + 1], tmp_path / "data" / "train.jsonl")
    shutil.copytree(trained / "save", tmp_path / "save")
    shutil.copytree(trained / "hf", tmp_path / "edited")
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "gone").symlink_to("nowhere")
    for folder in ("project", "deep/er", "hidden", ".taken.unfinished", "marked"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("project/thesis.txt", "deep/er/thesis.txt", "hidden/.env", ".taken.unfinished/thesis.txt", "file"):
        (tmp_path / file).write_text("mine")
    (tmp_path / "edited" / "README.md").write_text("mine")
    (tmp_path / "marked" / ".slime_tis_export.json").write_text('{"files": ["../file"]}')
    (tmp_path / "marked" / "thesis.txt").write_text("mine")
    targets = [
        *(".", "/", "..", str(tmp_path), "data", "data/", "data/model", "data/model/", "data/model/sub", "link/model"),
        *("data/../data/model", "save", "save/hf", "save/iter_0000004", "run", "run/tensorboard", "run/earlier/hf"),
        *("project", "deep", "hidden", "taken", "file", "file/hf", "edited", "marked", "gone"),
        *("data/train.jsonl", "/proc", "/dev/null", "x" * 300, os.path.expanduser("~")),
    ]  # fmt: skip
    before = tree(tmp_path)
    flags = [*task, "--hf-checkpoint", "data/model", "--prompt-data", "data/train.jsonl", "--num-rollout", "1"]
    flags += ["--output-dir", "run", "--load", "save"]
    for target in targets:
        outcome = run_forked(
            [*flags, "--save-hf", target], tmp_path.parent / "export_log", cwd=tmp_path, timeout=TIMEOUT
        )
        wrong = not_one_message(outcome, 2, f"--save-hf is {quoted_path(target)}")
        exports.record(f"--save-hf {target[:40]}", wrong if wrong else None if tree(tmp_path) == before else "changed")
    exports.check(at_least=28)


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every path below a directory with what a file holds."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(directory.rglob("*"))}


MEDDLING = """
import pathlib

def reward(args, sample):
    target = pathlib.Path(args.save_hf)
    target.mkdir(exist_ok=True)
    (target / "thesis.txt").write_text("mine")
    return float(len(sample.response_ids) % 3)
"""


def test_what_comes_to_the_target_during_the_run_stays(
    task: list[str], trained: Path, tmp_path: Path, tally: Any
) -> None:
    exports = tally("--save-hf to where somebody writes meanwhile")
    (tmp_path / "meddling.py").write_text(MEDDLING)
    flags = [*task, "--num-rollout", "1", "--custom-rm-path", f"{tmp_path / 'meddling.py'}:reward"]
    for name in ("absent", "empty", "export"):
        target = tmp_path / name
        if name == "empty":
            target.mkdir()
        if name == "export":
            shutil.copytree(trained / "hf", target)
        flags += ["--save-hf", str(target), "--output-dir", str(tmp_path / f"run_{name}")]
        outcome = run_forked(flags, tmp_path / "log", timeout=TIMEOUT)
        kept = (target / "thesis.txt").read_text() == "mine" and (target / "model.safetensors").exists() == (
            name == "export"
        )
        written = (
            tmp_path / f"{name}-2" / "model.safetensors"
        ).exists() and f"the policy is at {target}-2" in outcome.error
        exports.record(
            name, None if outcome.status == 0 and kept and written else outcome.error + str(tree(tmp_path).keys())
        )
    exports.check(at_least=3)


def test_two_runs_do_not_share_a_directory(task: list[str], tmp_path: Path, tally: Any) -> None:
    runs = tally("two runs on one directory")
    names = {"--save": "save", "--output-dir": "run", "--save-hf": "hf"}
    own = [part for flag, name in names.items() for part in (flag, str(tmp_path / name))]
    first = ForkedRun([*task, *own, "--num-rollout", "400", "--save-interval", "1"], tmp_path / "first")
    while not list((tmp_path / "save").glob("iter_*")):
        assert time.monotonic() < first.started + TIMEOUT
        time.sleep(0.05)
    for flag, name in names.items():
        other = [part for each in names for part in (each, str(tmp_path / f"other_{name}_{each[2:]}"))]
        same = str(tmp_path / name)
        flags = [*task, *other, "--num-rollout", "1", flag, same, *(["--load", same] if flag == "--save" else [])]
        outcome = run_forked(flags, tmp_path / "log", timeout=TIMEOUT)
        wrong = not_one_message(outcome, 2, f"error: {flag} is", f"process id {first.pid} on {os.uname().nodename}")
        runs.record(f"{flag} of a live run", wrong)
    outcome = run_forked([*task, "--save", str(tmp_path / "save"), "--num-rollout", "1"], tmp_path / "log")
    runs.record(
        "--save of a live run without --load", not_one_message(outcome, 2, "another run's checkpoints are there")
    )
    first.kill(signal.SIGKILL)
    first.wait(TIMEOUT)
    rows = [row["step"] for row in read_metrics(tmp_path / "run")]
    runs.record("the first run's metrics", None if rows == list(range(1, len(rows) + 1)) else str(rows))
    trained = max(int(path.name[5:]) for path in (tmp_path / "save").glob("iter_*"))
    again = [*task, *own, "--num-rollout", str(trained + 1), "--load", str(tmp_path / "save")]
    outcome = run_forked(again, tmp_path / "log", timeout=TIMEOUT)  # the lock ended with the process
    rows = [row["step"] for row in read_metrics(tmp_path / "run")]
    runs.record("after SIGKILL", None if outcome.status == 0 and rows[-1] == trained + 1 else outcome.error)
    outcome = run_forked([*task, *own, "--num-rollout", "1"], tmp_path / "log", timeout=TIMEOUT)
    runs.record("a fresh run into a used --save", not_one_message(outcome, 2, "--load", "another --save"))
    runs.check(at_least=7)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond a size fail in processes forked meanwhile, as on a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_a_full_disk_loses_nothing(task: list[str], trained: Path, tmp_path: Path, tally: Any) -> None:
    full = tally("full disk")
    for size in (10_000, 60_000, 120_000, 200_000):
        directory = tmp_path / str(size)
        for part in ("save", "run", "hf"):
            shutil.copytree(trained / part, directory / part)
        shutil.rmtree(directory / "save" / "iter_0000004")
        export = tree(directory / "hf")
        with largest_file(size):
            outcome = run_forked(resume(task, directory), directory / "log", timeout=TIMEOUT)
        left = sorted(path.name for path in (directory / "save").iterdir())
        wrong = not_one_message(outcome, 1, "could not write", "File too large")
        if wrong is None and (left != ["iter_0000002", "iter_0000003"] or tree(directory / "hf") != export):
            wrong = f"left {left}"
        full.record(f"files up to {size} bytes", wrong)
        outcome = run_forked(resume(task, directory), directory / "log", timeout=TIMEOUT)
        same = outcome.status == 0 and metrics(directory / "run") == metrics(trained / "run")
        full.record(f"after it, {size}", None if same else outcome.error)
    full.check(at_least=8)


def test_a_small_disk_is_reported_in_one_message(task: list[str], tmp_path: Path, tally: Any) -> None:
    full = tally("full disk")
    with disk(tmp_path, "1m"):
        flags = [*task, "--num-rollout", "3", "--save-interval", "1", "--output-dir", str(tmp_path / "run")]
        outcome = run_forked([*flags, "--save", str(tmp_path / "save")], tmp_path.parent / "small_log", timeout=TIMEOUT)
        full.record("1 MB", not_one_message(outcome, 1, "No space left on device"))
        left = [path.name for path in (tmp_path / "save").iterdir()]
        full.record("what is left", None if left == ["iter_0000001"] else str(left))
    full.check(at_least=2)


def test_a_checkpoint_whose_metrics_cannot_be_written_does_not_count(
    task: list[str], trained: Path, tmp_path: Path, tally: Any
) -> None:
    full = tally("full disk")
    (tmp_path / "run").mkdir()
    with disk(tmp_path / "run", "20k"):
        outcome = run_forked(resume(task, tmp_path), tmp_path / "log", timeout=TIMEOUT)
        full.record(
            "20 kB for metrics", not_one_message(outcome, 1, "could not write the metrics of step", "metrics.jsonl")
        )
        left = sorted(path.name for path in (tmp_path / "save").iterdir())
        whole = (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n")
        right = whole < 4 and left[-1] == f"iter_{whole:07d}" and left[0][0] != "."
        full.record("what is left", None if right else f"{left}, metrics of {whole} steps")
        subprocess.run(["mount", "-o", "remount,size=1m", str(tmp_path / "run")], check=True)
        outcome = run_forked(resume(task, tmp_path), tmp_path / "log", timeout=TIMEOUT)
        same = outcome.status == 0 and metrics(tmp_path / "run") == metrics(trained / "run")
        full.record("after it", None if same else outcome.error)
    full.check(at_least=3)


@contextmanager
def disk(path: Path, size: str) -> Iterator[None]:
    """A file system of a size at a path; skips the test where it may not be mounted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)
