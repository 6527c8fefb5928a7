"""summary.png: the series it reads, the lines it draws, and the picture drawn anew from a run directory."""

import json
import runpy
import sys

import matplotlib
import pytest

from slime_tis.trainer.reporting import summary
from slime_tis.trainer.reporting.summary import PANELS, plot_summary, read_series, running_mean


def write_metrics(directory, rows):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_series_are_the_finite_values_by_step(tmp_path):
    write_metrics(tmp_path, [{"step": 0, "a": 1.0}, {"step": 1, "a": None, "b": 2}, {"step": 2, "a": 3.0}])
    assert read_series(tmp_path / "metrics.jsonl") == {"a": [(0, 1.0), (2, 3.0)], "b": [(1, 2)]}


def test_running_mean_takes_the_neighbours_there_are():
    assert running_mean([1.0, 2.0, 6.0, 7.0], 1) == [1.5, 3.0, 5.0, 6.5]
    assert running_mean([1.0, 2.0], 0) == [1.0, 2.0]


@pytest.fixture
def drawn(monkeypatch):
    """The figure that plot_summary saves, kept open."""
    figures = []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", figures.append)
    yield figures
    monkeypatch.undo()
    pyplot.close("all")


def test_panels_hold_the_logged_series_and_leave_out_the_rest(tmp_path, drawn):
    write_metrics(
        tmp_path,
        [
            {
                "step": step,
                "rollout/raw_reward": step / 4,
                "eval/digits": step / 2,
                "eval/digits/response_len": 11,
                "train/mismatch_kl": 1e-4,
                "train/mismatch_k3_kl": 2e-4,
                "train/train_rollout_logprob_abs_diff": 0.01,
                "train/grad_norm": 0.5,
            }
            for step in (1, 2)
        ],
    )
    path = plot_summary(tmp_path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (figure,) = drawn
    left = {axis.get_title(loc="left"): axis for axis in figure.axes if axis.get_title(loc="left")}
    assert list(left) == [panel.title for panel in PANELS]
    reward = {line.get_label(): line.get_xydata().tolist() for line in left[PANELS[0].title].lines}
    assert reward == {"rollout reward": [[1, 0.25], [2, 0.5]], "held-out digits": [[1, 0.5], [2, 1.0]]}
    legends = [[text.get_text() for text in axis.get_legend().texts] for axis in left.values() if axis.get_legend()]
    assert legends == [["rollout reward", "held-out digits"], ["mean |Δ|", "KL", "k3 KL"], ["gradient norm"]]
    assert [text.get_text() for text in left[PANELS[2].title].texts] == ["not logged in this run"]
    assert all(axis.get_ylabel() for axis in figure.axes) and left[PANELS[0].title].get_xlabel() == "step"


def test_a_run_that_logged_nothing_still_has_a_picture(tmp_path):
    write_metrics(tmp_path, [])
    assert plot_summary(tmp_path).stat().st_size > 1000
    assert not list(tmp_path.glob(".*"))


def test_module_draws_a_run_anew_and_refuses_what_is_none(tmp_path, monkeypatch, capsys):
    write_metrics(tmp_path, [{"step": 1, "train/loss": 0.5}])
    monkeypatch.delitem(sys.modules, summary.__name__)  # as in a process that has imported nothing
    monkeypatch.setattr(sys, "argv", ["summary.py", str(tmp_path)])
    runpy.run_module(summary.__name__, run_name="__main__")
    assert capsys.readouterr().out == f"{tmp_path / 'summary.png'}\n"
    monkeypatch.setattr(sys, "argv", ["summary.py", str(tmp_path / "gone")])
    with pytest.raises(SystemExit) as refused:
        runpy.run_module(summary.__name__, run_name="__main__")
    message = f"{tmp_path / 'gone' / 'metrics.jsonl'} does not exist; give the directory of a run, which contains"
    assert refused.value.code == message + " metrics.jsonl."
