"""What pip installs: every package, the right version, and the console script."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from setuptools import find_packages

from slime_tis.main import main
from slime_tis.torch_files import SAFE_TORCH

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_wheel_has_every_folder():
    files = [*(ROOT / "slime_tis").rglob("*.py"), *(ROOT / "custom_tis").rglob("*.py")]
    folders = {path.parent.relative_to(ROOT) for path in files}
    expected = {".".join(folder.parts) for folder in folders}
    selection = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert set(find_packages(str(ROOT), **selection)) == expected


def test_the_console_script_is_the_command():
    (script,) = [each for each in entry_points(group="console_scripts") if each.name == "slime-tis"]
    assert script.value == PROJECT["project"]["scripts"]["slime-tis"] == "slime_tis.main:main"
    assert script.load() is main


@pytest.mark.parametrize("extra", ["train", "analysis", "diffusion"])
def test_extras_that_load_torch_files_need_a_safe_torch(extra):
    (requirement,) = [
        each
        for each in PROJECT["project"]["optional-dependencies"][extra]
        if each.startswith("torch")
    ]
    assert requirement == f"torch>={'.'.join(map(str, SAFE_TORCH))}"
