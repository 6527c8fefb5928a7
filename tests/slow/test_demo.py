"""`slime-tis demo` as a user of an installed package runs it: in an empty directory, without a checkout there."""

import json
import subprocess
import sys

from tests.runs import ROOT, read_metrics


def demo(directory):
    command = [sys.executable, "-m", "slime_tis.main", "demo", "--out", "made"]
    return subprocess.run(command, cwd=directory, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


def test_the_demo_ends_with_a_report_that_names_its_cause(tmp_path):
    first = demo(tmp_path)
    assert first.returncode == 0, first.stderr
    report = tmp_path / "made/run/report.html"
    assert report.is_file() and "open made/run/report.html" in first.stdout
    code = ["-m", "slime_tis.main", "diagnose", "made/run", "--json"]
    asked = [sys.executable, *code]
    found = subprocess.run(
        asked, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout)["findings"][0]["cause"] == "stale_weights"
    metrics = read_metrics(tmp_path / "made/run")
    accuracies = [row["eval/accuracy"] for row in metrics if "eval/accuracy" in row]
    assert accuracies[-1] > accuracies[0]
    again = demo(tmp_path)
    assert again.returncode == 2 and "another --out" in again.stderr
