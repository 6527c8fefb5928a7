"""Poor environments: failing console streams, planted links, few descriptors, read-only
directories."""

import ctypes
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slime_tis.analysis.dumps.files import write
from slime_tis.atomic_files import write_atomically
from slime_tis.main import main
from slime_tis.trainer.data.sample_file import save_samples
from slime_tis.trainer.reporting.reporters import JsonLines
from slime_tis.trainer.storage.checkpoint_files import checkpoints
from tests.dumps.tables import full_table
from tests.faults.forked import run_forked
from tests.runs import ROOT, make_task, read_metrics

ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PARTIALS = (
    ".config.yaml.partial",
    ".run.json.partial",
    ".report.html.partial",
    "dump/train_data/.0_0.parquet.partial",
    "dump/rollout_data/.0.jsonl.partial",
)


def broken_pipe() -> int:
    """A descriptor for writing whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_device() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def close_stdout() -> None:
    sys.stdout.close()
    sys.stdout = None  # type: ignore[assignment]  # as the interpreter does after >&-


def break_both_streams() -> None:
    """As in `python train.py 2>&1 | head`."""
    os.dup2(broken_pipe(), 1)
    os.dup2(1, 2)


@pytest.mark.parametrize(
    ("break_streams", "warnings"),
    [
        (lambda: os.dup2(broken_pipe(), 1), 1),
        (lambda: os.dup2(full_device(), 1), 1),
        (close_stdout, 0),
        (break_both_streams, 0),
    ],
    ids=["broken pipe", "full disk", "closed", "broken pipe 2>&1"],
)
def test_a_run_survives_its_console(
    break_streams: Callable[[], Any], warnings: int, task: list[str], tmp_path: Path
) -> None:
    argv = [*task, "--save", str(tmp_path / "save"), "--output-dir", str(tmp_path / "run")]
    outcome = run_forked(argv, tmp_path / "log", before=break_streams)
    assert (outcome.status, outcome.traceback) == (0, False), outcome.error
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert len(checkpoints(tmp_path / "save")) == 1
    assert outcome.error.count("warning: stdout") == warnings


@pytest.fixture(scope="module")
def run(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dumps and a report, in a directory with links to the files `victims/0`,
    `victims/1` and so on."""
    run = tmp_path_factory.mktemp("linked") / "run"
    victims = run.parent / "victims"
    victims.mkdir()
    for place, name in enumerate(PARTIALS):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (victims / str(place)).write_text("thesis")
        (run / name).symlink_to(victims / str(place))
    flags = [*task, "--dump-details", str(run / "dump"), "--output-dir", str(run)]
    outcome = run_forked(flags, run.parent / "log")
    assert outcome.status == 0, outcome.error
    assert main(["report", str(run)]) == 0
    for name in PARTIALS:
        complete_name = Path(name).name.removeprefix(".").removesuffix(".partial")
        written = (run / name).with_name(complete_name)
        assert written.is_file() and not written.is_symlink()
    return run


@pytest.mark.parametrize("place", range(len(PARTIALS)), ids=PARTIALS)
def test_a_link_at_a_partial_file_is_not_followed(place: int, run: Path) -> None:
    assert (run.parent / "victims" / str(place)).read_text() == "thesis"


SWAP = """
import os, sys
partial, victim = sys.argv[1:]
print("ready", flush=True)
while True:
    try:
        os.unlink(partial)
        os.symlink(victim, partial)
    except OSError:
        pass
"""


def write_text(path: Path) -> None:
    write_atomically(path, "new\n")


def write_table(path: Path) -> None:
    write(path, full_table())


def write_samples(path: Path) -> None:
    save_samples(path, [[]])


@pytest.mark.parametrize(
    ("name", "writes", "write_file"),
    [
        ("config.yaml", 1000, write_text),
        ("0.parquet", 200, write_table),
        ("0.pt", 200, write_table),
        ("0.jsonl", 200, write_samples),
    ],
)
def test_a_link_swapped_in_during_a_write_is_not_followed(
    name: str, writes: int, write_file: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / name
    victim = tmp_path / "victim"
    victim.write_text("thesis")
    attacker = subprocess.Popen(
        [sys.executable, "-c", SWAP, str(tmp_path / f".{name}.partial"), str(victim)],
        stdout=subprocess.PIPE,
    )
    assert attacker.stdout is not None and attacker.stdout.readline() == b"ready\n"
    overwritten = 0
    interrupted = 0
    try:
        for _ in range(writes):
            try:
                write_file(path)
            except OSError:
                interrupted += 1
            overwritten += victim.read_bytes() != b"thesis"
            path.unlink(missing_ok=True)
    finally:
        attacker.kill()
        attacker.communicate()
    print(f"{name}: {writes} writes, {interrupted} interrupted, {overwritten} overwritten")
    assert overwritten == 0


def test_a_link_at_the_metrics_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text('{"step": 1}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "victim")
    reporter = JsonLines(tmp_path / "metrics.jsonl", resume_step=2)
    reporter.log({"train/loss": 1.0}, 2)
    reporter.close()
    assert (tmp_path / "victim").read_text() == '{"step": 1}\n'
    assert not (tmp_path / "metrics.jsonl").is_symlink()


def test_a_link_at_the_lock_is_refused(task: list[str], tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("thesis")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "victim")
    outcome = run_forked([*task, "--output-dir", str(tmp_path / "run")], tmp_path / "log")
    assert outcome.status == 2 and "--output-dir" in outcome.error
    assert (tmp_path / "victim").read_text() == "thesis"


@pytest.mark.parametrize("environment", [ASCII, C_LOCALE], ids=["ascii", "C locale"])
@pytest.mark.parametrize("command", ["train --help", "port", "diagnose"])
def test_commands_print_in_every_locale(
    command: str, environment: dict[str, str], run: Path, tmp_path: Path
) -> None:
    completed = run_command(command, environment, run, tmp_path, stdout=subprocess.PIPE)
    assert completed.returncode == 0, completed.stderr
    # a script keeps its names
    encoding = "utf-8" if command == "port" else "ascii"
    assert len(completed.stdout.decode(encoding)) > 100


def test_training_refuses_an_ascii_locale(task: list[str]) -> None:
    completed = subprocess.run(
        [sys.executable, "train.py", *task],
        cwd=ROOT,
        env={**os.environ, **C_LOCALE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 2
    assert completed.stderr.startswith("error: the locale's encoding is ASCII")


@pytest.mark.parametrize("command", ["train --help", "port", "report"])
def test_commands_end_quietly_with_their_reader(command: str, run: Path, tmp_path: Path) -> None:
    writer = broken_pipe()
    completed = run_command(command, {}, run, tmp_path, stdout=writer)
    os.close(writer)
    assert (completed.returncode, completed.stderr) == (0, b"")


def test_a_command_reports_a_full_disk(run: Path, tmp_path: Path) -> None:
    writer = full_device()
    completed = run_command("port", {}, run, tmp_path, stdout=writer)
    os.close(writer)
    assert completed.returncode == 1 and completed.stderr.count(b"\n") == 1
    assert b"stdout" in completed.stderr


def run_command(
    command: str, environment: Mapping[str, str], run: Path, directory: Path, *, stdout: int
) -> subprocess.CompletedProcess[bytes]:
    """Runs a command on a script or a run."""
    script = directory / "run.sh"
    flags = "--hf-checkpoint /models/é… --prompt-data /data/p.jsonl --rm-type math --num-rollout 1"
    sizes = "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 64"
    script.write_text(f"python3 train.py {flags} {sizes}\n")
    paths = {"port": [str(script)], "diagnose": [str(run)], "report": [str(run)]}
    return subprocess.run(
        [sys.executable, "-m", "slime_tis.main", *command.split(), *paths.get(command, [])],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )


NOBODY = 65534
CLONE_NEWNS = 0x00020000  # linux/sched.h
NAMESPACES = (
    os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0
)
needs_root = pytest.mark.skipif(not NAMESPACES, reason="needs root with mount namespaces")


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that every user can use, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def hide_shared_memory() -> None:
    """Makes /dev/shm read-only for this process only."""
    assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", "/dev/shm"], check=True)


@needs_root
def test_a_report_for_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    read_only = tmp_path / "read_only"
    read_only.mkdir()
    write(tmp_path / "dump.parquet", full_table())
    python = [sys.executable, "-m", "slime_tis.main", "report", str(tmp_path / "dump.parquet")]
    command = shlex.join([*python, "--out", str(read_only / "page.html")])
    mount = shlex.join(["mount", "-t", "tmpfs", "-o", "ro", "none", str(read_only)])
    shell = ["unshare", "-m", "sh", "-c", f"{mount} && exec {command}"]
    process = subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr.endswith("directory that cannot be written; give another --out.\n")


def become_nobody() -> None:
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
def test_a_run_completes_in_a_poor_environment(enter: Callable[[], Any], directory: Path) -> None:
    argv = [*make_task(directory), "--output-dir", str(directory / "run")]
    argv += ["--save", str(directory / "save")]
    argv += ["--save-hf", str(directory / "hf"), "--dump-details", str(directory / "dump")]
    (directory / "model/model.safetensors").chmod(0o644)
    outcome = run_forked(argv, directory / "log", before=enter, cwd=ROOT)
    assert (outcome.status, outcome.traceback) == (0, False), outcome.error
    assert [row["step"] for row in read_metrics(directory / "run")] == [1, 2, 3]
    assert len(list((directory / "dump/train_data").iterdir())) == 3


@pytest.mark.parametrize("limit", [32, 64])
def test_a_low_limit_of_open_files_is_named(limit: int, tmp_path: Path) -> None:
    enter = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, limit))
    argv = [*make_task(tmp_path), "--output-dir", str(tmp_path / "run")]
    outcome = run_forked(argv, tmp_path / "log", before=enter)
    assert (outcome.status, outcome.traceback) == (1, False), outcome.error
    assert "ulimit -n" in outcome.error
