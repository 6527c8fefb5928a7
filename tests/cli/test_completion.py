"""The scripts of `slime-tis completion`, in a real shell."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slime_tis.main import main
from slime_tis.trainer.cli.train_options import FLAGS
from tests.runs import ROOT

BASH = """
source {script}
function=$(complete -p {program} | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
$function
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
"""Prints what bash offers for the last word of a command line."""

COMPLETED = {
    "commands": ("slime-tis re", "report recommend"),
    "a flag of a command": ("slime-tis diagnose --fa", "--fail-on"),
    "choices of a command": ("slime-tis completion ''", "bash zsh"),
    "a flag of train.py": ("slime-tis train --tis-m", "--tis-mode"),
    "an old name of a flag": ("slime-tis train --save-retain-c", "--save-retain-count"),
    "a form with no": ("slime-tis train --no-use-ti", "--no-use-tis"),
    "choices of a flag": ("slime-tis train --use-tis --tis-mode ''", "truncate clip mask"),
    "the second item of a list": ("slime-tis train --report-to wandb t", "tensorboard trackio"),
    "presets": ("slime-tis train --rollout-correction-preset dppo", "dppo_tv dppo_kl"),
    "rewards": ("slime-tis train --rm-type d", "deepscaler dapo"),
    "a directory": ("slime-tis train --hf-checkpoint m", "model"),
    "a file": ("slime-tis report --out m", "model my.txt my.yaml"),
    "a YAML file": ("slime-tis train --custom-config-path my", "my.yaml"),
    "the second run": ("slime-tis report --compare model my", "my.txt my.yaml"),
    "flags of plan": ("slime-tis plan --world-size 8 --pipe", "--pipeline-model-parallel-size"),
    "a flag after a dump": ("slime-tis what-if my.txt --tis-mo", "--tis-mode"),
    "no optimizer for a dump": ("slime-tis what-if my.txt --lr", ""),
    "train.py": ("python ./train.py --use-tis --tis-m", "--tis-mode"),
    "another script": ("python setup.py --tis-m", ""),
}


@pytest.fixture
def script(tmp_path, capsys):
    """Returns a function that writes the script of a shell."""

    def write(shell):
        assert main(["completion", shell, "--python"]) == 0
        path = tmp_path / f"slime-tis.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


def completions(script: Path, directory: Path, line: str) -> list[str]:
    """Returns what bash offers for the last word of a command line."""
    program = shlex.split(line)[0]
    code = BASH.format(script=shlex.quote(str(script)), program=program, words=line)
    ended = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=directory, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.split()


@pytest.mark.parametrize("case", COMPLETED)
def test_bash_completes(case, script, tmp_path):
    line, expected = COMPLETED[case]
    directory = tmp_path / "work"
    (directory / "model").mkdir(parents=True)
    (directory / "my.yaml").touch()
    (directory / "my.txt").touch()
    offered = completions(script("bash"), directory, line)
    assert sorted(offered) == sorted(expected.split())


def test_every_flag_of_training_completes(script, tmp_path):
    offered = completions(script("bash"), tmp_path, "slime-tis train --")
    assert set(offered) == FLAGS


def test_a_new_bash_completes_after_the_command_of_the_page(tmp_path):
    page = (ROOT / "docs/quick_start.md").read_text()
    (command,) = [
        line for line in page.splitlines() if line.startswith("slime-tis completion bash")
    ]
    programs = str(Path(sys.executable).parent)
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    subprocess.run(["bash", "-c", command], env=environment, check=True)
    ask = ["bash", "--rcfile", f"{tmp_path}/.bashrc", "-i", "-c", "complete -p slime-tis"]
    # In a session of its own, an interactive bash does not take the terminal from the tests.
    shell = subprocess.run(
        ask, env=environment, capture_output=True, text=True, start_new_session=True
    )
    assert "-F _shtab_slime_tis slime-tis" in shell.stdout


def test_python_keeps_its_completion_without_the_option(capsys):
    main(["completion", "bash"])
    registered = [line for line in capsys.readouterr().out.splitlines() if "complete -o" in line]
    assert registered == ["complete -o bashdefault -F _shtab_slime_tis slime-tis"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_reads_the_script(script):
    ended = subprocess.run(["zsh", "-n", script("zsh")], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_zsh_script_has_choices(script):
    assert ":{truncate,clip,mask}:(truncate clip mask)" in script("zsh").read_text()


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "fish"])
    assert "choose from" in capsys.readouterr().err
