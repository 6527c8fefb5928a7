"""TRL's notebook, in the environment of the adapters."""

import os
import shutil

from tests.runs import ROOT
from tools.notebooks import executed


def test_trls_notebook_corrects_reports_diagnoses(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    path = tmp_path / "trl.ipynb"
    shutil.copy(ROOT / "examples" / "notebooks" / "trl.ipynb", path)
    # logs are written at every tenth step
    notebook = executed(path, {"STEPS = 60": "STEPS = 10"})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "held-out accuracy: 0.3" in text
    assert "k3 " in text
    assert (tmp_path / "runs" / "trl" / "report.html").exists()
