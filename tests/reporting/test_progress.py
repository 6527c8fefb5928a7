"""The progress bar and the timer."""

import io
import time

import pytest

from slime_tis.trainer import sample_pipeline
from slime_tis.trainer.reporting.reporters import Timer


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_follows_and_leaves_nothing(monkeypatch):
    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(sample_pipeline, "PROGRESS_INTERVAL", 0.005)
    done = [0]
    with sample_pipeline.shown_progress(lambda: (done[0], 8), shown=True):
        for done[0] in (3, 8):
            while f"{done[0]}/8" not in written.getvalue():
                time.sleep(0.005)
    assert "responses" in written.getvalue()
    assert written.getvalue().rsplit("\r", 2)[1].strip() == ""


@pytest.mark.parametrize("shown", [True, False], ids=["short work", "not shown"])
def test_no_bar(shown, monkeypatch):
    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    with pytest.raises(KeyError), sample_pipeline.shown_progress(lambda: (0, 1), shown=shown):
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
