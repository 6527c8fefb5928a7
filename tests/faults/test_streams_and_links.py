"""Console streams that fail and links that another user planted: no run is lost, no other file is written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_tis.main import main
from slime_tis.trainer.storage.checkpoints import checkpoints
from tests.faults.forked import run_forked
from tests.runs import ROOT, make_task, read_metrics

ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PARTIALS = (
    ".config.yaml.partial",
    ".run.json.partial",
    ".summary.png.partial",
    ".report.html.partial",
    "dump/train_data/.0_0.parquet.partial",
    "dump/rollout_data/.0.jsonl.partial",
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def broken_pipe():
    """A pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_device():
    return os.open("/dev/full", os.O_WRONLY)


def close_stdout():
    sys.stdout.close()
    sys.stdout = None  # as the interpreter does after >&-


@pytest.mark.parametrize(
    ("break_streams", "warnings"),
    [
        (lambda: os.dup2(broken_pipe(), 1), 1),
        (lambda: os.dup2(full_device(), 1), 1),
        (close_stdout, 0),
        (lambda: (os.dup2(broken_pipe(), 1), os.dup2(1, 2)), 0),
    ],
    ids=["broken pipe", "full disk", "closed", "broken pipe 2>&1"],
)
def test_a_run_survives_its_console(break_streams, warnings, flags, tmp_path):
    argv = [*flags, "--save", str(tmp_path / "save"), "--output-dir", str(tmp_path / "run")]
    outcome = run_forked(argv, tmp_path / "log", before=break_streams)
    assert (outcome.status, outcome.traceback) == (0, False), outcome.error
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert len(checkpoints(tmp_path / "save")) == 1
    assert outcome.error.count("warning: stdout") == warnings


@pytest.fixture(scope="module")
def run(flags, tmp_path_factory):
    """A run with dumps and a report, in a directory with links to the files `victims/0`, `victims/1` and so on."""
    run = tmp_path_factory.mktemp("linked") / "run"
    victims = run.parent / "victims"
    victims.mkdir()
    for place, name in enumerate(PARTIALS):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (victims / str(place)).write_text("thesis")
        (run / name).symlink_to(victims / str(place))
    plotted = [flag for flag in flags if flag != "--no-summary-plot"]
    outcome = run_forked([*plotted, "--dump-details", str(run / "dump"), "--output-dir", str(run)], run.parent / "log")
    assert outcome.status == 0, outcome.error
    assert main(["report", str(run)]) == 0
    for name in PARTIALS:
        written = (run / name).with_name(Path(name).name.removeprefix(".").removesuffix(".partial"))
        assert written.is_file() and not written.is_symlink()
    return run


@pytest.mark.parametrize("place", range(len(PARTIALS)), ids=PARTIALS)
def test_a_link_at_a_partial_file_is_not_followed(place, run):
    assert (run.parent / "victims" / str(place)).read_text() == "thesis"


def test_a_link_at_the_lock_is_refused(flags, tmp_path):
    (tmp_path / "victim").write_text("thesis")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "victim")
    outcome = run_forked([*flags, "--output-dir", str(tmp_path / "run")], tmp_path / "log")
    assert outcome.status == 2 and "--output-dir" in outcome.error
    assert (tmp_path / "victim").read_text() == "thesis"


@pytest.mark.parametrize("environment", [ASCII, C_LOCALE], ids=["ascii", "C locale"])
@pytest.mark.parametrize("command", ["train --help", "port", "diagnose"])
def test_commands_print_in_every_locale(command, environment, run, tmp_path):
    completed = run_command(command, environment, run, tmp_path, stdout=subprocess.PIPE)
    assert completed.returncode == 0, completed.stderr
    encoding = "utf-8" if command == "port" else "ascii"  # a script keeps its names
    assert len(completed.stdout.decode(encoding)) > 100


@pytest.mark.parametrize("command", ["train --help", "port", "report"])
def test_commands_end_quietly_with_their_reader(command, run, tmp_path):
    writer = broken_pipe()
    completed = run_command(command, {}, run, tmp_path, stdout=writer)
    os.close(writer)
    assert (completed.returncode, completed.stderr) == (0, b"")


def test_a_command_reports_a_full_disk(run, tmp_path):
    writer = full_device()
    completed = run_command("port", {}, run, tmp_path, stdout=writer)
    os.close(writer)
    assert completed.returncode == 1 and completed.stderr.count(b"\n") == 1
    assert b"stdout" in completed.stderr


def run_command(command, environment, run, directory, *, stdout):
    """Runs a command of slime-tis; `port` reads a script and the others a run."""
    script = directory / "run.sh"
    script.write_text("python3 train.py --hf-checkpoint /models/é… --rm-type math --rollout-batch-size 4\n")
    path = {"port": [str(script)], "diagnose": [str(run)], "report": [str(run)]}.get(command, [])
    return subprocess.run(
        [sys.executable, "-m", "slime_tis.main", *command.split(), *path],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )
