"""Damaged checkpoints, shared directories, full disks, changed options, values that are not finite:
nothing is lost."""

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves

from slime_tis.trainer.storage.checkpoint_files import (
    TRAINER_STATE,
    checksums,
    files_of,
    write_manifest,
)
from tests.faults.forked import ForkedRun, Outcome, run_forked
from tests.runs import largest_file, make_task, read_metrics, training_metrics

TIMEOUT = 120.0
"""Seconds after which a run counts as hanging."""


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    # stale weights that bypass corrects, so that no warning is printed beside the messages
    return [
        *make_task(tmp_path_factory.mktemp("stale")),
        "--update-weights-interval",
        "2",
        "--use-rollout-logprobs",
    ]


@pytest.fixture(scope="module")
def trained(stale: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with the checkpoints of the last three: `save`, `run` (reports) and
    `hf`."""
    directory = tmp_path_factory.mktemp("trained")
    flags = [*stale, "--num-rollout", "4", "--save-interval", "1", "--save-retain", "3"]
    flags += ["--save", str(directory / "save")]
    flags += ["--save-hf", str(directory / "hf"), "--output-dir", str(directory / "run")]
    outcome = run_forked(flags, directory / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    # the checkpoints have stale weights, too
    assert (directory / "save" / "iter_0000003" / "rollout_weights.safetensors").exists()
    return directory


def metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without times."""
    return [{"step": row["step"], **training_metrics(row)} for row in read_metrics(run)]


def assert_one_message(outcome: Outcome, status: int, *words: str) -> None:
    """The run ends with this status and one line of stderr with these words."""
    assert outcome.status == status, outcome.error[-600:]
    assert len(outcome.messages) == 1, outcome.error[-600:]
    missing = [word for word in words if word not in outcome.messages[0]]
    assert missing == [], outcome.messages[0]


def empty_files(save: Path) -> None:
    """Cuts a file of each checkpoint to zero bytes."""
    for step in (3, 4):
        os.truncate(save / f"iter_000000{step}" / "common.pt", 0)


def flip_bit(save: Path) -> None:
    """Flips a bit in the middle of the latest checkpoint's file of tensors."""
    file = save / "iter_0000004" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    file.write_bytes(data)


DAMAGED: dict[str, tuple[int, Callable[[Path], None]]] = {
    "flipped bit": (1, flip_bit),
    "empty directory": (1, lambda save: (save / "iter_0000009").mkdir()),
    "link in a circle": (0, lambda save: (save / "iter_0000009").symlink_to("iter_0000009")),
    "two damaged": (2, empty_files),
}
"""Damage of a directory of checkpoints, and the number of warnings."""


@pytest.fixture(scope="module", params=DAMAGED)
def damage(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def continued(
    damage: str, stale: list[str], trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Path]:
    """A run that resumes from damaged checkpoints, and its directory."""
    directory = tmp_path_factory.mktemp("continued")
    copy(trained, directory, "save", "run")
    DAMAGED[damage][1](directory / "save")
    outcome = run_forked(resume(stale, directory), directory / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    return outcome, directory


def test_each_damaged_checkpoint_is_one_warning(
    damage: str, continued: tuple[Outcome, Path]
) -> None:
    outcome, _ = continued
    assert outcome.error.count("warning: passed over") == DAMAGED[damage][0]
    assert not outcome.traceback


def test_a_damaged_checkpoint_changes_no_result(
    continued: tuple[Outcome, Path], trained: Path
) -> None:
    _, directory = continued
    assert metrics(directory / "run") == metrics(trained / "run")
    assert file_bytes(directory / "hf") == file_bytes(trained / "hf")


def copy(trained: Path, directory: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(trained / name, directory / name)


def file_bytes(export: Path) -> bytes:
    return (export / "model.safetensors").read_bytes()


def resume(stale: list[str], directory: Path, *flags: str) -> list[str]:
    """Flags of a run that continues in a directory."""
    save = str(directory / "save")
    arguments = [*stale, "--num-rollout", "4", "--save-interval", "1", "--save-retain", "3"]
    arguments += ["--load", save, "--save", save]
    arguments += ["--save-hf", str(directory / "hf"), "--output-dir", str(directory / "run")]
    return [*arguments, *flags]


def test_a_checkpoint_of_another_model_is_refused(
    stale: list[str], trained: Path, tmp_path: Path
) -> None:
    copy(trained, tmp_path, "save")
    for checkpoint in (tmp_path / "save").iterdir():
        state = json.loads((checkpoint / TRAINER_STATE).read_text())
        (checkpoint / TRAINER_STATE).write_text(json.dumps({**state, "model": "0"}))
        write_manifest(checkpoint, checksums(checkpoint, files_of(checkpoint)))
    outcome = run_forked(resume(stale, tmp_path), tmp_path / "log", timeout=TIMEOUT)
    assert_one_message(outcome, 1, "--hf-checkpoint is")


def test_no_complete_checkpoint_is_refused(stale: list[str], trained: Path, tmp_path: Path) -> None:
    copy(trained, tmp_path, "save")
    for path in (tmp_path / "save").iterdir():
        (path / "__0_1.distcp").unlink()
    outcome = run_forked(resume(stale, tmp_path), tmp_path / "log", timeout=TIMEOUT)
    words = ["no checkpoint under", "iter_0000002: __0_1.distcp is missing"]
    assert_one_message(outcome, 1, *words)


CHANGED = {
    ("--lr", "5e-4"): (5e-4, "--lr 0.001 → 0.0005"),
    ("--lr-decay-style", "linear", "--lr-decay-iters", "8"): (
        5e-4,
        "--lr-decay-style 'constant' → 'linear'",
    ),
    ("--n-samples-per-prompt", "2"): (1e-3, "--n-samples-per-prompt 4 → 2"),
}
"""Learning rate of the resumed step, and the report."""


@pytest.fixture(scope="module", params=CHANGED, ids=" ".join)
def changed_flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="module")
def changed_run(
    changed_flags: tuple[str, ...],
    stale: list[str],
    trained: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Outcome, Path]:
    """A run that repeats the last step with a changed option, and its directory."""
    directory = tmp_path_factory.mktemp("changed")
    copy(trained, directory, "save", "run")
    shutil.rmtree(directory / "save" / "iter_0000004")
    flags = resume(stale, directory, *changed_flags)
    outcome = run_forked(flags, directory / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    return outcome, directory


def test_a_changed_option_takes_effect(
    changed_flags: tuple[str, ...], changed_run: tuple[Outcome, Path]
) -> None:
    rows = read_metrics(changed_run[1] / "run")
    assert len(rows) == 4
    assert rows[-1]["train/lr"] == pytest.approx(CHANGED[changed_flags][0])


def test_a_changed_option_is_reported(
    changed_flags: tuple[str, ...], changed_run: tuple[Outcome, Path]
) -> None:
    lines = changed_run[0].output.splitlines()
    (report,) = [line for line in lines if line.startswith("options changed since then: ")]
    assert CHANGED[changed_flags][1] in report


def tree(directory: Path) -> dict[str, bytes | None]:
    """The contents of all files below a directory, by path; None for a directory."""
    contents: dict[str, bytes | None] = {}
    for path in sorted(directory.rglob("*")):
        contents[str(path)] = path.read_bytes() if path.is_file() else None
    return contents


MEDDLING = """
import pathlib

def reward(args, sample):
    target = pathlib.Path(args.save_hf)
    target.mkdir(exist_ok=True)
    (target / "thesis.txt").write_text("mine")
    return float(len(sample.response_ids) % 3)
"""


@pytest.mark.parametrize("name", ["absent", "empty", "export"])
def test_files_that_come_to_the_target_during_the_run_stay(
    name: str, stale: list[str], trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "meddling.py").write_text(MEDDLING)
    target = tmp_path / name
    if name == "empty":
        target.mkdir()
    if name == "export":
        shutil.copytree(trained / "hf", target)
    flags = [*stale, "--num-rollout", "1", "--custom-rm-path", f"{tmp_path / 'meddling.py'}:reward"]
    flags += ["--save-hf", str(target), "--output-dir", str(tmp_path / "run")]
    outcome = run_forked(flags, tmp_path / "log", timeout=TIMEOUT)
    assert outcome.status == 0 and f"the policy is at {target}-2" in outcome.error
    assert (target / "thesis.txt").read_text() == "mine"
    assert (target / "model.safetensors").exists() == (name == "export")
    assert (tmp_path / f"{name}-2" / "model.safetensors").exists()


DIRECTORIES = {"--save": "save", "--output-dir": "run", "--save-hf": "hf"}
"""Options of directories that one run has for itself, and their names in these tests."""


@dataclass
class SharedDirectories:
    """A run that is killed, and runs that want its directories before and after its end."""

    pid: int
    """Process id of the killed run."""
    refusals: dict[str, Outcome]
    """Runs with one directory of the living run, by option."""
    steps_of_killed: list[int]
    last_checkpoint: int
    """Step of the killed run's last checkpoint."""
    resumed: Outcome
    steps: list[int]
    """Steps that are reported after the resumed run."""
    started_anew: Outcome
    """A run with all directories that does not load the checkpoint."""


def directories_of(parent: Path) -> list[str]:
    words = []
    for option, name in DIRECTORIES.items():
        words += [option, str(parent / name)]
    return words


def run_with_one_directory(option: str, stale: list[str], parent: Path) -> Outcome:
    """A run with directories of its own, except for one of the living run."""
    name = DIRECTORIES[option]
    flags = [*stale, *directories_of(parent / f"beside_{name}"), "--num-rollout", "1"]
    flags += [option, str(parent / name)]
    if option == "--save":
        # without --load, a used --save is refused for another reason
        flags += ["--load", str(parent / name)]
    return run_forked(flags, parent / "log", timeout=TIMEOUT)


def steps_in(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run)]


@pytest.fixture(scope="module")
def shared(stale: list[str], tmp_path_factory: pytest.TempPathFactory) -> SharedDirectories:
    parent = tmp_path_factory.mktemp("shared")
    save = parent / "save"
    flags = [*stale, *directories_of(parent)]
    first = ForkedRun([*flags, "--num-rollout", "400", "--save-interval", "1"], parent / "first")
    while not list(save.glob("iter_*")):
        assert time.monotonic() < first.started + TIMEOUT
        time.sleep(0.05)
    refusals = {}
    for option in DIRECTORIES:
        refusals[option] = run_with_one_directory(option, stale, parent)
    first.kill(signal.SIGKILL)
    first.wait(TIMEOUT)
    steps_of_killed = steps_in(parent / "run")
    last_checkpoint = max(int(path.name.removeprefix("iter_")) for path in save.glob("iter_*"))
    one_more = [*flags, "--num-rollout", str(last_checkpoint + 1), "--load", str(save)]
    resumed = run_forked(one_more, parent / "log", timeout=TIMEOUT)
    steps = steps_in(parent / "run")
    started_anew = run_forked([*flags, "--num-rollout", "1"], parent / "log", timeout=TIMEOUT)
    return SharedDirectories(
        pid=first.pid,
        refusals=refusals,
        steps_of_killed=steps_of_killed,
        last_checkpoint=last_checkpoint,
        resumed=resumed,
        steps=steps,
        started_anew=started_anew,
    )


@pytest.mark.parametrize("option", DIRECTORIES)
def test_a_directory_of_a_living_run_is_refused(option: str, shared: SharedDirectories) -> None:
    owner = f"process id {shared.pid} on {os.uname().nodename}"
    assert_one_message(shared.refusals[option], 2, f"error: {option} is", owner)


def test_refused_runs_leave_metrics_as_they_are(shared: SharedDirectories) -> None:
    assert shared.steps_of_killed == list(range(1, len(shared.steps_of_killed) + 1))


def test_the_lock_of_a_killed_run_ends_with_it(shared: SharedDirectories) -> None:
    assert shared.resumed.status == 0, shared.resumed.error
    assert shared.steps[-1] == shared.last_checkpoint + 1


def test_a_used_save_directory_needs_load(shared: SharedDirectories) -> None:
    assert_one_message(shared.started_anew, 2, "--load", "another --save")


@dataclass
class FullDisk:
    """A run whose files may not grow beyond a size, and what it leaves."""

    outcome: Outcome
    checkpoints: list[str]
    """Names of the checkpoints that it leaves."""
    export_before: dict[str, bytes | None]
    export_after: dict[str, bytes | None]
    resumed: Outcome
    """A run that continues without the limit."""
    metrics: list[dict[str, Any]]
    """Metrics after the resumed run."""


@pytest.fixture(scope="module", params=[10_000, 120_000, 200_000])
def full_disk(
    request: pytest.FixtureRequest,
    stale: list[str],
    trained: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> FullDisk:
    directory = tmp_path_factory.mktemp("full_disk")
    copy(trained, directory, "save", "run", "hf")
    shutil.rmtree(directory / "save" / "iter_0000004")
    export_before = tree(directory / "hf")
    with largest_file(request.param):
        outcome = run_forked(resume(stale, directory), directory / "log", timeout=TIMEOUT)
    checkpoints = sorted(path.name for path in (directory / "save").iterdir())
    export_after = tree(directory / "hf")
    resumed = run_forked(resume(stale, directory), directory / "log", timeout=TIMEOUT)
    return FullDisk(
        outcome=outcome,
        checkpoints=checkpoints,
        export_before=export_before,
        export_after=export_after,
        resumed=resumed,
        metrics=metrics(directory / "run"),
    )


def test_a_full_disk_is_one_message(full_disk: FullDisk) -> None:
    assert_one_message(full_disk.outcome, 1, "could not write", "File too large")


def test_a_full_disk_leaves_the_complete_checkpoints(full_disk: FullDisk) -> None:
    assert full_disk.checkpoints == ["iter_0000002", "iter_0000003"]


def test_a_full_disk_leaves_the_export(full_disk: FullDisk) -> None:
    assert full_disk.export_after == full_disk.export_before


def test_a_run_resumes_after_a_full_disk(full_disk: FullDisk, trained: Path) -> None:
    assert full_disk.resumed.status == 0, full_disk.resumed.error
    assert full_disk.metrics == metrics(trained / "run")


CODE = """
def huge(args, sample):
    return 1e100 * sample.response_ids[0]

def huge_for_odd_samples(args, sample):
    return 1e100 * (sample.index % 2)

def overflow(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss * 3e38, loss_masks, {}
"""
GROWING = ["--lr", "1", "--weight-decay", "100", "--num-rollout", "30", "--save-interval", "1"]
DIVERGING = {
    "weights that grow a hundredfold each step": GROWING,
    "the same in bfloat16": [*GROWING, "--bf16"],
    "huge rewards": [
        "--custom-rm-path",
        "{directory}/huge.py:huge",
        "--disable-grpo-std-normalization",
    ],
}
"""Flags with which a gradient is not finite."""


@pytest.fixture(scope="module")
def directory(task: list[str]) -> Path:
    """The task's directory, with user code and a copy of its model with a weight that is NaN."""
    directory = Path(task[task.index("--hf-checkpoint") + 1]).parent
    (directory / "huge.py").write_text(CODE)
    shutil.copytree(directory / "model", directory / "nan")
    weights = load_file(directory / "nan" / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = math.nan
    save_file(weights, directory / "nan" / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass
class DivergedRun:
    """A run with a gradient that is not finite."""

    outcome: Outcome
    output: Path
    """Reports in `run`, checkpoints in `save`."""


def diverged_run(
    name: str, policy: str, task: list[str], directory: Path, output: Path
) -> DivergedRun:
    flags = [*task, "--save", str(output / "save"), "--output-dir", str(output / "run")]
    flags += [flag.format(directory=directory) for flag in DIVERGING[name]]
    flags += ["--nonfinite-gradient", policy]
    return DivergedRun(run_forked(flags, output / "log"), output)


@pytest.fixture(scope="module", params=DIVERGING)
def stopped_run(
    request: pytest.FixtureRequest,
    task: list[str],
    directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> DivergedRun:
    return diverged_run(request.param, "stop", task, directory, tmp_path_factory.mktemp("stop"))


@pytest.fixture(scope="module", params=DIVERGING)
def skipping_run(
    request: pytest.FixtureRequest,
    task: list[str],
    directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> DivergedRun:
    return diverged_run(request.param, "skip", task, directory, tmp_path_factory.mktemp("skip"))


def assert_saved_weights_are_finite(run: DivergedRun) -> None:
    for path in (run.output / "save").glob("iter_*"):
        dcp_to_torch_save(path, run.output / "plain.pt")
        state = torch.load(run.output / "plain.pt", weights_only=True)
        names = [name for name in state if name.startswith(("embedding.", "decoder."))]
        leaves = tree_leaves([state[name] for name in names])
        # the other leaves are states of fp8, which are bytes
        weights = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        assert weights
        assert all(weight.isfinite().all() for weight in weights)


def test_a_gradient_that_is_not_finite_ends_the_run(stopped_run: DivergedRun) -> None:
    assert_one_message(stopped_run.outcome, 1, "the gradient of step", "is not finite")


def test_a_stopped_run_has_saved_finite_weights(stopped_run: DivergedRun) -> None:
    assert_saved_weights_are_finite(stopped_run)


def test_a_gradient_that_is_not_finite_is_skipped(skipping_run: DivergedRun) -> None:
    assert skipping_run.outcome.status == 0, skipping_run.outcome.error
    rows = read_metrics(skipping_run.output / "run")
    assert 1.0 in [row["train/nonfinite_gradient_steps"] for row in rows]


def test_a_run_that_skips_steps_saves_finite_weights(skipping_run: DivergedRun) -> None:
    assert_saved_weights_are_finite(skipping_run)


UNUSABLE: dict[str, tuple[list[str], int, str]] = {
    "a loss that overflows": (
        ["--use-tis", "--custom-tis-function-path", "{directory}/huge.py:overflow"],
        2,
        "made a finite pg_loss NaN or infinite",
    ),
    "a weight that is NaN": (
        ["--hf-checkpoint", "{directory}/nan"],
        1,
        "holds NaN or infinity",
    ),
}
"""Flags of values that are not finite before there is a gradient; status and message."""


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("name", UNUSABLE)
def test_values_before_the_gradient_are_never_skipped(
    name: str, policy: str, task: list[str], directory: Path, tmp_path: Path
) -> None:
    words, status, message = UNUSABLE[name]
    flags = [*task, "--output-dir", str(tmp_path / "run"), "--nonfinite-gradient", policy]
    flags += [word.format(directory=directory) for word in words]
    assert_one_message(run_forked(flags, tmp_path / "log"), status, message)


def test_a_stopped_run_saves_the_step_it_loaded(
    task: list[str], directory: Path, tmp_path: Path
) -> None:
    """The run loads from one directory and saves to another one."""
    flags = [*task, "--output-dir", str(tmp_path / "run"), "--disable-grpo-std-normalization"]
    first = [*flags, "--save", str(tmp_path / "first"), "--num-rollout", "1"]
    assert run_forked(first, tmp_path / "a").status == 0
    other = [*flags, "--load", str(tmp_path / "first"), "--save", str(tmp_path / "second")]
    reward = ["--custom-rm-path", f"{directory / 'huge.py'}:huge_for_odd_samples"]
    stopped = run_forked([*other, *reward], tmp_path / "b")
    assert stopped.status == 1
    assert f"saved under {tmp_path / 'second'}" in stopped.error
    assert [path.name for path in (tmp_path / "second").glob("iter_*")] == ["iter_0000001"]


@dataclass
class Resumption:
    """A run that stops in its third step, and a run with other rewards that resumes it."""

    parent: Path
    stopped: Outcome
    resumed: Outcome


@pytest.fixture(scope="module")
def resumption(
    task: list[str], directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Resumption:
    parent = tmp_path_factory.mktemp("resumption")
    flags = [*task, "--save", str(parent / "save"), "--load", str(parent / "save")]
    flags += ["--output-dir", str(parent / "run"), "--disable-grpo-std-normalization"]
    good = run_forked([*flags, "--num-rollout", "2"], parent / "good")
    assert good.status == 0, good.error
    reward = ["--custom-rm-path", f"{directory / 'huge.py'}:huge_for_odd_samples"]
    stopped = run_forked([*flags, *reward], parent / "stopped")
    return Resumption(parent, stopped, run_forked(flags, parent / "resumed"))


def test_the_last_good_step_is_saved(resumption: Resumption) -> None:
    assert resumption.stopped.status == 1
    words = f"The run stops after step 2, saved under {resumption.parent / 'save'}"
    assert words in resumption.stopped.error


def test_a_run_resumes_after_the_last_good_step(resumption: Resumption) -> None:
    assert resumption.resumed.status == 0, resumption.resumed.error
    rows = read_metrics(resumption.parent / "run")
    steps = [(row["step"], row["train/nonfinite_gradient_steps"]) for row in rows]
    assert steps == [(1, 0.0), (2, 0.0), (3, 0.0)]
