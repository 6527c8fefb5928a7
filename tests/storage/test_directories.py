"""Locks that end with their process, directories that are swapped atomically, and unwritable directories."""

import os
import subprocess
import sys

import pytest

from slime_tis.trainer.storage.directories import DirectoryInUse, held, unwritable

HOLD = """
import sys
from pathlib import Path
from slime_tis.trainer.storage.directories import held
with held({Path(sys.argv[1]): "--save"}):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_of_one_process_and_ends_with_it(tmp_path):
    lock = tmp_path / "run" / ".lock"
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with (
            pytest.raises(DirectoryInUse, match=f"process id {holder.pid} on {os.uname().nodename}"),
            held({lock: "--output-dir"}),
        ):
            pass
        holder.kill()
    assert lock.exists()
    with held({lock: "--save"}):
        assert str(os.getpid()) in lock.read_text()
    assert os.listdir(tmp_path / "run") == []


def test_a_directory_that_cannot_be_locked_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="--save cannot be written: Not a directory"),
        held({tmp_path / "file" / "run" / ".lock": "--save"}),
    ):
        pass


def test_why_a_directory_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert unwritable(tmp_path) is None and unwritable(tmp_path / "a" / "b") is None
    for name, words in (
        ("file", "that is a file"),
        ("file/x", "is a file"),
        ("loop", "that is a broken link"),
        ("x" * 300, "File name too long"),
        ("a\0b", "embedded null byte"),
    ):
        assert words in str(unwritable(tmp_path / name))
    if not os.access("/sys/kernel", os.W_OK):
        assert unwritable("/sys/kernel/x/y") == "'/sys/kernel' cannot be written"
