"""The notebooks that need no adapter: executed as a user runs them, and their committed outputs."""

import json
import os
import re
import shutil

import nbformat
import pytest

from tests.runs import ROOT
from tools.notebooks import clean, executed

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = ["library", "demo", "trl"]
LARGEST = 200_000
"""Bytes of a notebook with its outputs."""


def printed(notebook) -> str:
    """The text that the cells print."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts.append(output.get("text", ""))
    return "".join(texts)


def causes(text: str) -> list[str]:
    """The numbered causes of a printed diagnosis."""
    return re.findall(r"^\d+\. .+$", text, re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the notebooks' folder, in which they write."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    copy = tmp_path / "notebooks"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("demo", "data", "runs"))
    return copy


def test_the_library_prints_the_committed_results(folder):
    notebook = executed(folder / "library.ipynb")
    clean(notebook)
    committed = nbformat.read(FOLDER / "library.ipynb", as_version=4)
    assert printed(notebook) == printed(committed)


def test_the_demo_names_the_stale_weights(folder):
    text = printed(executed(folder / "demo.ipynb"))
    committed = printed(nbformat.read(FOLDER / "demo.ipynb", as_version=4))
    assert causes(text)[0] == "1. stale weights"
    assert causes(text) == causes(committed)
    assert (folder / "demo" / "run" / "report.html").stat().st_size > 1_000_000


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_committed_notebook_is_executed_without_error(name):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds
    assert kinds & {"stream", "display_data"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_committed_notebook_is_small_clean(name):
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    text = path.read_text()
    clean(notebook)
    assert path.stat().st_size < LARGEST
    assert json.loads(text) == json.loads(nbformat.writes(notebook))
    assert re.findall(r"/(?:home|root|tmp|work)/", text) == []
