"""Damaged checkpoints, shared directories, full disks, changed options, values that are not finite:
nothing is lost."""

import json
import math
import os
import shutil
import signal
import time
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
from tests.faults.forked import ForkedRun, run_forked
from tests.runs import largest_file, make_task, read_metrics, training_metrics

TIMEOUT = 120.0


@pytest.fixture(scope="module")
def stale(tmp_path_factory):
    # stale weights that bypass corrects, so that no warning is printed beside the messages
    return [
        *make_task(tmp_path_factory.mktemp("stale")),
        "--update-weights-interval",
        "2",
        "--use-rollout-logprobs",
    ]


@pytest.fixture(scope="module")
def trained(stale, tmp_path_factory):
    """A run of four steps with the checkpoints of the last three: `save`, `run` (reports) and
    `hf`."""
    directory = tmp_path_factory.mktemp("trained")
    flags = [*stale, "--num-rollout", "4", "--save-interval", "1", "--save-retain", "3"]
    flags += ["--save", str(directory / "save")]
    flags += ["--save-hf", str(directory / "hf"), "--output-dir", str(directory / "run")]
    outcome = run_forked(flags, directory / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    assert (
        directory / "save" / "iter_0000003" / "rollout_weights.safetensors"
    ).exists()  # stale weights
    return directory


def metrics(run):
    return [{"step": row["step"], **training_metrics(row)} for row in read_metrics(run)]


def refusal(outcome, status, *words):
    """Returns None if the outcome is a refusal in one line of stderr with these words, and the
    outcome otherwise."""
    lines = [
        line
        for line in outcome.error.splitlines()
        if line.strip() and not line.startswith("warning: ")
    ]
    if outcome.status == status and len(lines) == 1 and all(word in lines[0] for word in words):
        return None
    return f"status {outcome.status}, {len(lines)} lines: {outcome.error[-600:]}"


def empty_files(save: Path) -> None:
    """Cuts a file of each checkpoint to zero bytes."""
    for step in (3, 4):
        os.truncate(save / f"iter_000000{step}" / "common.pt", 0)


DAMAGED: dict[str, tuple[int, Any]] = {
    "flipped bit": (1, lambda save: flip_middle(save / "iter_0000004" / "__0_0.distcp")),
    "empty directory": (1, lambda save: (save / "iter_0000009").mkdir()),
    "link in a circle": (0, lambda save: (save / "iter_0000009").symlink_to("iter_0000009")),
    "two damaged": (2, empty_files),
}
"""Damage of a directory of checkpoints, and the number of warnings."""


@pytest.mark.parametrize("name", DAMAGED)
def test_a_run_continues_from_the_latest_complete_checkpoint(name, stale, trained, tmp_path):
    warnings, damage = DAMAGED[name]
    copy(trained, tmp_path, "save", "run")
    damage(tmp_path / "save")
    outcome = run_forked(resume(stale, tmp_path), tmp_path / "log", timeout=TIMEOUT)
    assert outcome.status == 0 and not outcome.traceback, outcome.error
    assert outcome.error.count("warning: passed over") == warnings
    assert metrics(tmp_path / "run") == metrics(trained / "run")
    assert file_bytes(tmp_path / "hf") == file_bytes(trained / "hf")


def copy(trained, directory, *names):
    for name in names:
        shutil.copytree(trained / name, directory / name)


def flip_middle(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    file.write_bytes(data)


def file_bytes(export):
    return (export / "model.safetensors").read_bytes()


def resume(stale, directory, *flags):
    save = str(directory / "save")
    return [
        *(
            *stale,
            "--num-rollout",
            "4",
            "--save-interval",
            "1",
            "--save-retain",
            "3",
            "--load",
            save,
            "--save",
            save,
        ),
        *("--save-hf", str(directory / "hf"), "--output-dir", str(directory / "run"), *flags),
    ]


def test_a_checkpoint_of_another_model_is_refused(stale, trained, tmp_path):
    copy(trained, tmp_path, "save")
    for checkpoint_path in (tmp_path / "save").iterdir():
        state = json.loads((checkpoint_path / TRAINER_STATE).read_text())
        (checkpoint_path / TRAINER_STATE).write_text(json.dumps({**state, "model": "0"}))
        write_manifest(checkpoint_path, checksums(checkpoint_path, files_of(checkpoint_path)))
    outcome = run_forked(resume(stale, tmp_path), tmp_path / "log", timeout=TIMEOUT)
    assert refusal(outcome, 1, "--hf-checkpoint is") is None


def test_no_complete_checkpoint_is_refused(stale, trained, tmp_path):
    copy(trained, tmp_path, "save")
    for path in (tmp_path / "save").iterdir():
        (path / "__0_1.distcp").unlink()
    outcome = run_forked(resume(stale, tmp_path), tmp_path / "log", timeout=TIMEOUT)
    assert (
        refusal(outcome, 1, "no checkpoint under", "iter_0000002: __0_1.distcp is missing") is None
    )


CHANGED = {
    ("--lr", "5e-4"): (5e-4, "--lr 0.001 → 0.0005"),
    ("--lr-decay-style", "linear", "--lr-decay-iters", "8"): (
        5e-4,
        "--lr-decay-style 'constant' → 'linear'",
    ),
    ("--n-samples-per-prompt", "2"): (1e-3, "--n-samples-per-prompt 4 → 2"),
}
"""Learning rate of the resumed step, and the report."""


@pytest.mark.parametrize("flags", CHANGED, ids=" ".join)
def test_changed_options_take_effect(flags, stale, trained, tmp_path):
    lr, words = CHANGED[flags]
    copy(trained, tmp_path, "save", "run")
    shutil.rmtree(tmp_path / "save" / "iter_0000004")
    outcome = run_forked(resume(stale, tmp_path, *flags), tmp_path / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 4 and rows[-1]["train/lr"] == pytest.approx(lr)
    (report,) = [
        line
        for line in outcome.output.splitlines()
        if line.startswith("options changed since then: ")
    ]
    assert words in report


def tree(directory):
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


MEDDLING = """
import pathlib

def reward(args, sample):
    target = pathlib.Path(args.save_hf)
    target.mkdir(exist_ok=True)
    (target / "thesis.txt").write_text("mine")
    return float(len(sample.response_ids) % 3)
"""


@pytest.mark.parametrize("name", ["absent", "empty", "export"])
def test_files_that_come_to_the_target_during_the_run_stay(name, stale, trained, tmp_path):
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


def test_two_runs_do_not_share_a_directory(stale, tmp_path):
    names = {"--save": "save", "--output-dir": "run", "--save-hf": "hf"}
    own = [part for flag, name in names.items() for part in (flag, str(tmp_path / name))]
    first = ForkedRun(
        [*stale, *own, "--num-rollout", "400", "--save-interval", "1"], tmp_path / "first"
    )
    while not list((tmp_path / "save").glob("iter_*")):
        assert time.monotonic() < first.started + TIMEOUT
        time.sleep(0.05)

    def run(*flags):
        return run_forked([*stale, *flags], tmp_path / "log", timeout=TIMEOUT)

    for flag, name in names.items():
        other = [
            part for each in names for part in (each, str(tmp_path / f"other_{name}_{each[2:]}"))
        ]
        load = ["--load", str(tmp_path / name)] if flag == "--save" else []
        outcome = run(*other, "--num-rollout", "1", flag, str(tmp_path / name), *load)
        assert (
            refusal(
                outcome, 2, f"error: {flag} is", f"process id {first.pid} on {os.uname().nodename}"
            )
            is None
        )
    first.kill(signal.SIGKILL)
    first.wait(TIMEOUT)
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    trained = max(int(path.name[5:]) for path in (tmp_path / "save").glob("iter_*"))
    outcome = run(*own, "--num-rollout", str(trained + 1), "--load", str(tmp_path / "save"))
    assert outcome.status == 0, outcome.error  # the lock ended with the process
    assert read_metrics(tmp_path / "run")[-1]["step"] == trained + 1
    assert refusal(run(*own, "--num-rollout", "1"), 2, "--load", "another --save") is None


@pytest.mark.parametrize("size", [10_000, 120_000, 200_000])
def test_a_full_disk_loses_nothing(size, stale, trained, tmp_path):
    copy(trained, tmp_path, "save", "run", "hf")
    shutil.rmtree(tmp_path / "save" / "iter_0000004")
    export = tree(tmp_path / "hf")
    with largest_file(size):
        outcome = run_forked(resume(stale, tmp_path), tmp_path / "log", timeout=TIMEOUT)
    assert refusal(outcome, 1, "could not write", "File too large") is None
    assert sorted(path.name for path in (tmp_path / "save").iterdir()) == [
        "iter_0000002",
        "iter_0000003",
    ]
    assert tree(tmp_path / "hf") == export
    outcome = run_forked(resume(stale, tmp_path), tmp_path / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    assert metrics(tmp_path / "run") == metrics(trained / "run")


DIVERGES = ("--lr", "1", "--weight-decay", "100", "--num-rollout", "30", "--save-interval", "1")
STOPS = {
    "weights that grow a hundredfold each step": DIVERGES,
    "the same in bfloat16": (*DIVERGES, "--bf16"),
    "huge rewards": (
        "--custom-rm-path",
        "{directory}/huge.py:huge",
        "--disable-grpo-std-normalization",
    ),
    "a loss that overflows": (
        "--use-tis",
        "--custom-tis-function-path",
        "{directory}/huge.py:overflow",
    ),
    "a weight that is NaN": ("--hf-checkpoint", "{directory}/nan"),
}
CODE = """
def huge(args, sample):
    return 1e100 * sample.response_ids[0]

def overflow(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss * 3e38, loss_masks, {}
"""


@pytest.fixture(scope="module")
def directory(task):
    """The task's directory, with user code and a copy of its model with a weight that is NaN."""
    directory = Path(task[task.index("--hf-checkpoint") + 1]).parent
    (directory / "huge.py").write_text(CODE)
    shutil.copytree(directory / "model", directory / "nan")
    weights = load_file(directory / "nan" / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = math.nan
    save_file(weights, directory / "nan" / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("name", STOPS)
def test_a_gradient_that_is_not_finite_ends_the_run_or_is_skipped(
    name, policy, directory, task, tmp_path
):
    flags = [*task, "--save", str(tmp_path / "save"), "--output-dir", str(tmp_path / "run")]
    flags += [flag.format(directory=directory) for flag in STOPS[name]]
    outcome = run_forked([*flags, "--nonfinite-gradient", policy], tmp_path / "log")
    assert not outcome.traceback, outcome.error
    if policy == "skip" and outcome.status == 0:
        assert 1.0 in [
            row["train/nonfinite_gradient_steps"] for row in read_metrics(tmp_path / "run")
        ]
        return
    assert outcome.status in (1, 2)
    (message,) = [line for line in outcome.error.splitlines() if not line.startswith("warning: ")]
    assert outcome.status == 2 or "not finite" in message or "holds NaN or infinity" in message
    for path in (tmp_path / "save").glob("iter_*"):
        dcp_to_torch_save(path, tmp_path / "plain.pt")
        state = torch.load(tmp_path / "plain.pt", weights_only=True)
        layers = [
            value for key, value in state.items() if key.startswith(("embedding.", "decoder."))
        ]
        weights = [weight for weight in tree_leaves(layers) if isinstance(weight, torch.Tensor)]
        assert weights and all(weight.isfinite().all() for weight in weights)


def test_a_run_saves_the_step_it_loaded_in_another_directory(task, tmp_path):
    (tmp_path / "huge.py").write_text(
        "def reward(args, sample):\n    return 1e100 * (sample.index % 2)\n"
    )
    flags = [*task, "--output-dir", str(tmp_path / "run"), "--disable-grpo-std-normalization"]
    first = [*flags, "--save", str(tmp_path / "first"), "--num-rollout", "1"]
    assert run_forked(first, tmp_path / "a").status == 0
    other = [*flags, "--load", str(tmp_path / "first"), "--save", str(tmp_path / "second")]
    stopped = run_forked(
        [*other, "--custom-rm-path", f"{tmp_path / 'huge.py'}:reward"], tmp_path / "b"
    )
    assert stopped.status == 1
    assert f"saved under {tmp_path / 'second'}" in stopped.error
    assert [path.name for path in (tmp_path / "second").glob("iter_*")] == ["iter_0000001"]


def test_the_last_good_step_is_saved_and_resumed(task, tmp_path):
    """The reward of the third rollout overflows; a run with other rewards resumes after step 2."""
    (tmp_path / "late.py").write_text(
        "def reward(args, sample):\n    return 1e100 * (sample.index % 2)\n"
    )
    flags = [*task, "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    flags += ["--output-dir", str(tmp_path / "run"), "--disable-grpo-std-normalization"]
    good = run_forked([*flags, "--num-rollout", "2"], tmp_path / "good")
    bad = run_forked(
        [*flags, "--custom-rm-path", f"{tmp_path / 'late.py'}:reward"], tmp_path / "bad"
    )
    again = run_forked(flags, tmp_path / "again")
    assert (good.status, bad.status, again.status) == (0, 1, 0)
    assert f"The run stops after step 2, saved under {tmp_path / 'save'}" in bad.error
    steps = [
        (row["step"], row["train/nonfinite_gradient_steps"])
        for row in read_metrics(tmp_path / "run")
    ]
    assert steps == [(1, 0.0), (2, 0.0), (3, 0.0)]
