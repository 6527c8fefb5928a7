"""summary.png: the series it reads, the lines it draws, and the command that draws it again."""

import json
import subprocess
import sys

import matplotlib
import pytest

from slime_tis.trainer.reporting import summary
from slime_tis.trainer.reporting.summary import PANELS, plot_summary


def write_metrics(directory, rows):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_panels_have_the_logged_series(tmp_path, monkeypatch):
    row = {"eval/digits/response_len": 11, "train/mismatch_kl": 1e-4, "train/mismatch_k3_kl": 2e-4}
    row |= {"train/train_rollout_logprob_abs_diff": 0.01, "train/grad_norm": 0.5}
    rows = [{"step": step, "rollout/raw_reward": step / 4, "eval/digits": step / 2, **row} for step in (1, 2)]
    write_metrics(tmp_path, rows)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert plot_summary(tmp_path).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    monkeypatch.undo()
    (figure,) = figures
    left = {axis.get_title(loc="left"): axis for axis in figure.axes if axis.get_title(loc="left")}
    assert list(left) == [panel.title for panel in PANELS]
    reward = {line.get_label(): line.get_xydata().tolist() for line in left[PANELS[0].title].lines}
    assert reward == {"rollout reward": [[1, 0.25], [2, 0.5]], "held-out digits": [[1, 0.5], [2, 1.0]]}
    legends = [[text.get_text() for text in axis.get_legend().texts] for axis in left.values() if axis.get_legend()]
    assert legends == [["rollout reward", "held-out digits"], ["mean |Δ|", "KL", "k3 KL"], ["gradient norm"]]
    assert [text.get_text() for text in left[PANELS[2].title].texts] == ["not logged in this run"]
    assert all(axis.get_ylabel() for axis in figure.axes) and left[PANELS[0].title].get_xlabel() == "step"
    pyplot.close("all")


@pytest.mark.parametrize(("name", "status"), [("", 0), ("missing", 1)], ids=["an empty run", "no run"])
def test_the_module_draws_a_run_again(name, status, tmp_path):
    write_metrics(tmp_path, [])
    command = [sys.executable, "-m", summary.__name__, str(tmp_path / name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == status
    assert "Traceback" not in result.stderr and ("does not exist" in result.stderr) == bool(status)
    assert (tmp_path / "summary.png").exists() == (status == 0)
