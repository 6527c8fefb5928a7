"""The commands and the code that README.md shows."""

import re
import shlex
import tomllib

import pytest
import torch

from slime_tis.trainer.cli.arguments import configure
from tests.checkpoints import make_checkpoint, make_task
from tests.runs import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language):
    return [text for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S) if name == language]


def test_the_extras_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for names in re.findall(r"\[([\w,]+)\]'", README) for name in names.split(",")}
    assert extras == {"analysis", "train"} and extras <= set(project["optional-dependencies"])
    assert project["license"] == "Apache-2.0" and (ROOT / "LICENSE").exists()


def test_the_command_is_accepted(tmp_path):
    (command,) = [block for block in blocks("") if block.startswith("python train.py")]
    make_checkpoint(tmp_path / "model", "qwen3", max_position_embeddings=4096)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    command = command.replace("DIR", str(tmp_path / "model")).replace("FILE.jsonl", str(tmp_path / "prompts.jsonl"))
    got = configure(shlex.split(command.replace("\\\n", " "))[2:], {})
    assert got.correction.is_bounds[1] == 2.0 and got.correction.rs_z_score == 3.0


def test_the_slime_flags_name_a_function_that_is_there():
    from slime_tis.user_functions import load_function

    (flags,) = [block for block in blocks("") if block.startswith("--use-tis --custom")]
    assert callable(load_function(flags.split()[-1]))


@pytest.mark.parametrize("layout", ["list", "padded"])
@pytest.mark.parametrize("rejected", ["nothing", "everything"])
def test_the_five_lines_run(layout, rejected):
    """Healthy samples are all kept; where nothing is, the loss and its gradient are 0."""
    generator = torch.Generator().manual_seed(0)
    rollout_log_probs = -torch.rand(8, 12, generator=generator)
    old_log_probs = rollout_log_probs + 0.02 * torch.randn(8, 12, generator=generator)
    leaf = torch.ones(8, 12, requires_grad=True)
    names = {
        "old_log_probs": old_log_probs + (torch.nan if rejected == "everything" else 0),
        "rollout_log_probs": rollout_log_probs,
        "loss_mask": torch.ones(8, 12),
        "token_loss": leaf * 3,
    }
    if layout == "list":
        names = {name: list(value) for name, value in names.items()}
    block = blocks("python")[0]
    exec("import slime_tis\n" + block[block.index("config =") :], names)
    names["loss"].backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    if rejected == "everything":
        assert names["loss"].item() == 0.0 and not leaf.grad.any()
        return
    assert names["metrics"]["gradient_kept_fraction"] == 1.0
    assert names["loss"].item() == pytest.approx(3 * (old_log_probs - rollout_log_probs).exp().mean().item())


def test_the_blocks_run_in_the_order_in_which_they_are_read(tmp_path, monkeypatch):
    """Commands are parsed where only the data exist that earlier blocks make; Python runs, each block by itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    makefile = (ROOT / "Makefile").read_text()
    runs = set()
    seen = set()
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S):
        if language == "python":
            exec(text, {})
        for line in text.replace("\\\n", " ").splitlines() if not language else ():
            words = shlex.split(line, comments=True) if re.match(r"make |pip |slime-tis |python |\.venv/", line) else []
            match words:
                case ["slime-tis", "demo"]:
                    assert "pip install" in seen
                case ["make", target]:
                    assert re.search(rf"^{target}:", makefile, re.M), target
                    if target in ("data", "train"):
                        make_task(tmp_path / "data/sort_digits")
                case ["pip", "install", package]:
                    assert re.fullmatch(r"\.(\[(analysis|train)\])?", package)
                case [python, "train.py", *flags] if not any(word in ("DIR", "FILE.jsonl") for word in flags):
                    assert python == ".venv/bin/python"
                    configure(flags, {})
                    runs.update(flags[flags.index("--output-dir") + 1 :][:1] if "--output-dir" in flags else ())
                case [".venv/bin/slime-tis", "report" | "diagnose", run]:
                    assert run in runs
            seen.add(" ".join(words[:2]))
    assert {"make install", "make train", "pip install", ".venv/bin/python train.py"} <= seen


def test_every_page_is_linked():
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in README] == []
