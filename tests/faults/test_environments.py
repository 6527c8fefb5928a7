"""Runs in poor environments: few descriptors, missing or read-only directories, small disks, another user."""

import ctypes
import os
import resource
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import pytest

from tests.faults.forked import run_forked
from tests.runs import ROOT, make_task, read_metrics

NOBODY = 65534
CLONE_NEWNS = 0x00020000  # linux/sched.h
NAMESPACES = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0
needs_root = pytest.mark.skipif(not NAMESPACES, reason="needs root with mount namespaces")


@pytest.fixture
def directory():
    """A directory that every user can use, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def hide_shared_memory():
    """Makes /dev/shm read-only for this process alone."""
    assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", "/dev/shm"], check=True)


def become_nobody():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    assert not os.access(ROOT, os.W_OK)


@pytest.mark.parametrize(
    "enter",
    [
        pytest.param(hide_shared_memory, id="read-only shared memory", marks=needs_root),
        pytest.param(lambda: os.environ.update(TMPDIR="/proc/self"), id="unwritable TMPDIR"),
        pytest.param(lambda: os.environ.pop("HOME", None), id="no HOME"),
        pytest.param(become_nobody, id="nobody in a read-only checkout", marks=needs_root),
    ],
)
def test_a_run_completes_in_a_poor_environment(enter, directory):
    argv = [*make_task(directory), "--output-dir", str(directory / "run"), "--save", str(directory / "save")]
    argv += ["--save-hf", str(directory / "hf"), "--dump-details", str(directory / "dump")]
    (directory / "model/model.safetensors").chmod(0o644)
    outcome = run_forked(argv, directory / "log", before=enter, cwd=ROOT)
    assert (outcome.status, outcome.traceback) == (0, False), outcome.error
    assert [row["step"] for row in read_metrics(directory / "run")] == [1, 2, 3]
    assert len(list((directory / "dump/train_data").iterdir())) == 3


@pytest.mark.parametrize("limit", [32, 64])
def test_a_low_limit_of_open_files_is_named(limit, tmp_path):
    enter = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, limit))
    outcome = run_forked([*make_task(tmp_path), "--output-dir", str(tmp_path / "run")], tmp_path / "log", before=enter)
    assert (outcome.status, outcome.traceback) == (1, False), outcome.error
    assert "ulimit -n" in outcome.error
