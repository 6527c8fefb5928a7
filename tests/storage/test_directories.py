"""Locks that end with their process, directories swapped in one step, and why a directory cannot be written."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slime_tis.trainer.storage.directories import DirectoryInUse, exchange, held, remove_files, same_path, unwritable

HOLD = """
import sys
from pathlib import Path
from slime_tis.trainer.storage.directories import held
with held({Path(sys.argv[1]): "--save"}):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_of_one_process_and_dies_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "run" / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None and holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(DirectoryInUse) as refusal, held({lock: "--output-dir"}):
        pass
    since, host = json.loads(lock.read_text())["since"], os.uname().nodename
    assert str(refusal.value) == (
        f"--output-dir is '{tmp_path / 'run'}', which the run with process id {holder.pid} on {host} (since {since}) "
        "is writing; wait for it, stop it, or choose another directory."
    )
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert lock.exists()
    with held({lock: "--save"}):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path / "run") == []


def test_a_place_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match=r"^--save cannot be written: Not a directory"),
        held({tmp_path / "file" / "run" / ".lock": "--save"}),
    ):
        pass


def test_directories_are_exchanged(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    exchange(tmp_path / "one", tmp_path / "other")
    assert [(tmp_path / name / "file").read_text() for name in ("one", "other")] == ["other", "one"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "absent")


def test_only_named_files_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "sub").mkdir(parents=True)
    for name in ("a", "b", "sub/c"):
        (run / name).write_text("")
    remove_files(run, ["a", "sub/c", "gone"])
    assert sorted(path.name for path in run.iterdir()) == ["b"]
    remove_files(run, ["b"])
    assert not run.exists()


def test_why_a_directory_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert unwritable(tmp_path) is None and unwritable(tmp_path / "a" / "b") is None
    assert unwritable(tmp_path / "file") == "that is a file"
    assert unwritable(tmp_path / "file" / "x") == f"{str(tmp_path / 'file')!r} is a file"
    assert unwritable(tmp_path / "loop") == "that is a broken link"
    assert unwritable(tmp_path / ("x" * 300)) == "it cannot be used: File name too long"
    assert unwritable("a\0b") == "it cannot be used: embedded null byte"
    if not os.access("/sys/kernel", os.W_OK):
        assert unwritable("/sys/kernel/x/y") == "'/sys/kernel' cannot be written"


def test_paths_are_the_same_through_links_and_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    for path in ("a", "./a/", "a/../a", "link", "link/.", tmp_path / "a" / "x" / ".."):
        assert same_path("a", path), path
    assert not same_path("a", "b") and not same_path("a", "a/x")
