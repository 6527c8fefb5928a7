"""The progress bar and the timer."""

import io
import time

import pytest

from slime_tis.trainer import sample_pipeline
from slime_tis.trainer.reporting.reporters import Timer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    """A terminal in place of stderr."""
    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    return written


@pytest.fixture
def bar(terminal, monkeypatch) -> str:
    """Output of a bar that was shown at 3 of 8 responses and at 8 of 8."""
    monkeypatch.setattr(sample_pipeline, "PROGRESS_INTERVAL", 0.005)
    done = 0
    with sample_pipeline.shown_progress(lambda: (done, 8), shown=True):
        for count in (3, 8):
            done = count
            while f"{done}/8" not in terminal.getvalue():
                time.sleep(0.005)
    return terminal.getvalue()


def test_the_bar_shows_the_responses(bar):
    assert "responses" in bar


def test_the_bar_is_erased_at_the_end(bar):
    assert bar.rsplit("\r", 2)[1].strip() == ""


@pytest.mark.parametrize("shown", [True, False], ids=["short work", "not shown"])
def test_no_bar(shown, terminal):
    with pytest.raises(KeyError), sample_pipeline.shown_progress(lambda: (0, 1), shown=shown):
        raise KeyError
    assert terminal.getvalue() == ""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_timer_without_parts_has_no_time():
    assert Timer(Clock()).take() == {"perf/step_time": 0.0}


def test_the_times_of_equal_parts_add_up():
    clock = Clock()
    timer = Timer(clock)
    clock.now += 60.0  # the first step starts with its first part
    for seconds in (1.0, 2.5):
        with timer("generate"):
            clock.now += seconds
    assert timer.take() == {"perf/generate_time": 3.5, "perf/step_time": 3.5}


def test_a_part_includes_the_parts_in_it():
    clock = Clock()
    timer = Timer(clock)
    with timer("forward"), timer("log_probs"):
        clock.now += 0.25
    assert timer.take() == {
        "perf/forward_time": 0.25,
        "perf/log_probs_time": 0.25,
        "perf/step_time": 0.25,
    }


def test_the_time_of_a_part_that_raises_is_counted():
    clock = Clock()
    timer = Timer(clock)
    with pytest.raises(KeyError), timer("reward"):
        clock.now += 2.0
        raise KeyError
    assert timer.take() == {"perf/reward_time": 2.0, "perf/step_time": 2.0}


def test_the_step_time_includes_time_between_parts():
    clock = Clock()
    timer = Timer(clock)
    with timer("generate"):
        clock.now += 1.0
    clock.now += 4.0
    with timer("forward"):
        clock.now += 0.25
    clock.now += 0.5
    assert timer.take() == {
        "perf/generate_time": 1.0,
        "perf/forward_time": 0.25,
        "perf/step_time": 5.75,
    }


def test_taking_the_times_starts_a_new_step():
    clock = Clock()
    timer = Timer(clock)
    with timer("generate"):
        clock.now += 1.0
    timer.take()
    clock.now += 0.5
    assert timer.take() == {"perf/step_time": 0.5}
