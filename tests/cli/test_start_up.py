"""Imports before the command line is accepted."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import slime_tis
from slime_tis import correction
from tests.runs import ROOT

HEAVY = (
    "torch",
    "transformers",
    "megatron",
    "sympy",
    "numpy",
    "math_verify",
    "matplotlib",
    "tensorboard",
    "pyarrow",
)
COMMANDS = {
    "a wrong flag": ("train.py", ["--no-such-flag"], 2),
    "an option without effect": ("train.py", ["--rs-upper-bound", "2"], 2),
    "a number out of its limits": ("train.py", ["--lr", "7"], 2),
    "help of train.py": ("train.py", ["--help"], 0),
    "help of slime-tis train": ("slime_tis/main.py", ["train", "--help"], 0),
    "slime-tis alone": ("slime_tis/main.py", [], 0),
    "slime-tis --version": ("slime_tis/main.py", ["--version"], 0),
    "python -m slime_tis": ("slime_tis/__main__.py", ["--version"], 0),
    "slime-tis completion": ("slime_tis/main.py", ["completion", "bash"], 0),
    "slime-tis port": ("slime_tis/main.py", ["port", "run.sh"], 0),
}
RUN = """
import atexit, runpy, sys
atexit.register(lambda: print(*sys.modules, sep=chr(10), file=sys.stderr))
script, sys.argv[1:] = sys.argv[1], sys.argv[2:]
sys.path.insert(0, {root!r})
runpy.run_path({root!r} + "/" + script, run_name="__main__")
"""


@pytest.mark.parametrize("case", COMMANDS)
def test_nothing_heavy_is_imported_before_a_command_line_is_accepted(case, tmp_path):
    script, argv, status = COMMANDS[case]
    (tmp_path / "run.sh").write_text(
        "python3 train.py --hf-checkpoint /m --prompt-data /p.jsonl --rm-type math --num-rollout 1 "
        "--rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 8\n"
    )
    command = [sys.executable, "-c", RUN.format(root=str(ROOT)), script, *argv]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    modules = {name.split(".")[0] for name in ended.stderr.split()}
    assert "slime_tis" in modules  # the list was written
    assert not modules.intersection(HEAVY)


def test_lazy_packages_export_what_they_can_import():
    # A name in one of the two tables alone would be listed and missing, or there and not listed.
    assert set(slime_tis.__all__) <= set(correction.__all__)
    for package in (slime_tis, correction):
        (checked,) = (
            node
            for node in ast.parse(Path(package.__file__ or "").read_text()).body
            if isinstance(node, ast.If)
        )
        imported = [
            name.name
            for node in checked.body
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        ]
        assert sorted(imported) == sorted(package.__all__)  # what type checkers see
    code = (
        "import slime_tis, slime_tis.correction; modules = slime_tis, slime_tis.correction\n"
        "print([set(m.__all__) - set(dir(m)) for m in modules])\n"
        "print([[name for name in m.__all__ if not hasattr(m, name)] for m in modules])"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert asked.stdout == "[set(), set()]\n[[], []]\n"
