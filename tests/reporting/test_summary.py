"""The summary of a run, the progress bar and the timer."""

import io
import json
import subprocess
import sys
import time

import matplotlib
import pytest

from slime_tis.trainer.reporting import progress, summary
from slime_tis.trainer.reporting.summary import PANELS, plot_summary
from slime_tis.trainer.reporting.timing import Timer


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


def test_the_bar_follows_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.005)
    written, done = io.StringIO(), [0]
    with progress.shown_progress(lambda: (done[0], 8), "responses", shown=True, file=written):
        for done[0] in (3, 8):
            while f"{done[0]}/8" not in written.getvalue():
                time.sleep(0.005)
    assert "responses" in written.getvalue()
    assert written.getvalue().rsplit("\r", 2)[1].strip() == ""


@pytest.mark.parametrize("shown", [True, False], ids=["short work", "not shown"])
def test_no_bar(shown):
    written = io.StringIO()
    with pytest.raises(KeyError), progress.shown_progress(lambda: (0, 1), "responses", shown=shown, file=written):
        raise KeyError
    assert written.getvalue() == ""


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_parts_add_up_and_taking_starts_again():
    clock = Clock()
    timer = Timer(clock)
    assert Timer(clock).take() == {"perf/step_time": 0.0}
    clock.now += 60.0  # the first step starts with its first part
    for seconds in (1.0, 2.5):
        with timer("generate"):
            clock.now += seconds
    with timer("forward"), timer("log_probs"):
        clock.now += 0.25
    with pytest.raises(KeyError), timer("reward"):
        clock.now += 2.0
        raise KeyError
    clock.now += 4.0
    assert timer.take() == {
        "perf/generate_time": 3.5,
        "perf/forward_time": 0.25,
        "perf/log_probs_time": 0.25,
        "perf/reward_time": 2.0,
        "perf/step_time": 9.75,
    }
    clock.now += 0.5
    assert timer.take() == {"perf/step_time": 0.5}
