"""Commands in environments without optional packages.

Each case starts Python, and most of them import torch anew.
"""

import subprocess
import sys

import pytest

from tests.checkpoints import make_checkpoint
from tests.runs import ROOT

RUN_WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from slime_tis.main import main
sys.exit(main({argv!r}))
"""
TRAIN = (
    "megatron",
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
    "shtab",
    "psutil",
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
    "completion": (("completion", "bash"), "analysis"),
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
    "argv",
    [("report", "dump.jsonl"), ("diagnose", "dump.jsonl"), ("completion", "bash")],
    ids=" ".join,
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
