"""Imports before the command line is accepted, and commands without optional packages."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import slime_tis
from slime_tis import correction
from tests.checkpoints import make_checkpoint
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


RUN_WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from slime_tis.main import main
sys.exit(main({argv!r}))
"""
TRAIN = (
    "megatron",
    "psutil",
    "pydantic",
    "math_verify",
    "tensorboard",
    "matplotlib",
    "tree_sitter",
)
"""Packages that the extra analysis does not bring along."""
OPTIONAL = ("sglang", "transformer_engine", "verl")
ALL = (
    *TRAIN,
    *OPTIONAL,
    "transformers",
    "tokenizers",
    "safetensors",
    "yaml",
    "httpx",
    "aiohttp",
    "msgspec",
    "tqdm",
    "pyarrow",
)
"""Packages that a base install does not bring along."""
FLAGS = """
--hf-checkpoint model --prompt-data rows.jsonl --num-rollout 1 --rollout-batch-size 1
--n-samples-per-prompt 2
--rollout-max-response-len 4 --rm-type exact_match
"""
DUMP = '{"train_log_probs": [-1.0, -0.5], "rollout_log_probs": [-1.1, -0.5], "loss_mask": [1, 1]}\n'


def run_without(directory, missing, *argv):
    make_checkpoint(directory / "model", "qwen3")
    (directory / "rows.jsonl").write_text('{"prompt": "21>", "label": "12"}\n')
    (directory / "dump.jsonl").write_text(DUMP)
    (directory / "run_without.sh").write_text(
        "python3 train.py --lr 1e-6 --hf-checkpoint /m --num-rollout 1\n"
    )
    (directory / "run_without.yaml").write_text("num_rollout: 1\n")
    command = [sys.executable, "-c", RUN_WITHOUT.format(missing=missing, argv=list(argv))]
    return subprocess.run(
        command, cwd=directory, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


NEEDS = {
    "train": (("train", *FLAGS.split()), "train"),
    "train with YAML": (("train", "--custom-config-path", "run_without.yaml"), "train"),
    "demo": (("demo",), "train"),
    "port": (("port", "run_without.sh"), "train"),
    "report": (("report", "dump.jsonl"), "analysis"),
    "diagnose": (("diagnose", "dump.jsonl"), "analysis"),
}


@pytest.mark.parametrize("command", NEEDS)
def test_a_command_names_the_extra_that_it_needs(command, tmp_path):
    argv, extra = NEEDS[command]
    ended = run_without(tmp_path, ALL, *argv)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert f"pip install 'slime_tis[{extra}]'" in ended.stderr


@pytest.mark.parametrize(
    "argv", [("--version",), ("train", "--help"), ("report", "--help")], ids=" ".join
)
def test_a_base_install_is_enough(argv, tmp_path):
    ended = run_without(tmp_path, (*ALL, "numpy"), *argv)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    "argv", [("report", "dump.jsonl"), ("diagnose", "dump.jsonl")], ids=" ".join
)
def test_the_extra_analysis_is_enough(argv, tmp_path):
    ended = run_without(tmp_path, TRAIN, *argv)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("package", ["megatron", "transformers", "safetensors", "httpx", "psutil"])
def test_train_without_one_package_ends_in_one_line(package, tmp_path):
    ended = run_without(tmp_path, (package,), "train", *FLAGS.split())
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert f"the package {package};" in ended.stderr


def test_the_library_works_without_any_other_package(tmp_path):
    """NumPy is declared because torch warns without it; the library does not import it."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({(*ALL, 'numpy')!r}))\nimport torch,"
        " slime_tis, slime_tis.user_functions\nconfig ="
        " slime_tis.RolloutCorrectionConfig(use_tis=True,"
        " tis_upper_bound=2.0)\nprint(slime_tis.correct(config, torch.zeros(1, 1), -torch.ones(1,"
        " 1), torch.ones(1, 1)).weights.item())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "2.0\n"
