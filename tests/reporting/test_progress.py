"""The progress display and the timer."""

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_tis import progress
from slime_tis.progress import Progress, print_line, tracked, watched
from slime_tis.trainer.reporting.reporters import Console, Timer
from tests.runs import ROOT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    monotonic = __call__


@pytest.fixture
def open_terminal(monkeypatch) -> Callable[[], Terminal]:
    """Returns a function that puts a terminal in place of stderr.

    A fixture cannot do it: pytest sets stderr again before it calls the test.
    """

    def open_terminal():
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        return terminal

    return open_terminal


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of the progress display; tqdm has its own."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def responses(open_terminal, monkeypatch) -> str:
    """Output of a display of a thread's work, seen at 3 of 8 responses and at 8 of 8."""
    terminal = open_terminal()
    monkeypatch.setattr(progress, "REDRAW_INTERVAL", 0.005)
    done = 0
    with watched("responses", lambda: (done, 8), shown=True):
        for count in (3, 8):
            done = count
            while f"{done}/8" not in terminal.getvalue():
                time.sleep(0.005)
    return terminal.getvalue()


def last_line(terminal: Terminal) -> str:
    """What a terminal shows after the last carriage return."""
    return terminal.getvalue().rsplit("\r", 1)[1]


def test_the_line_shows_the_responses(responses):
    assert "responses" in responses


def test_the_line_shows_the_remaining_time(responses):
    assert "00:00 left" in responses


def test_the_line_is_erased_at_the_end(responses):
    assert responses.rsplit("\r", 2)[1].strip() == ""


def test_the_line_is_erased_after_ctrl_c(open_terminal):
    terminal = open_terminal()
    with pytest.raises(KeyboardInterrupt), Progress("runs", 8, delay=0.0) as runs:
        runs.update()
        raise KeyboardInterrupt
    assert "runs" in terminal.getvalue()
    assert terminal.getvalue().rsplit("\r", 2)[1].strip() == ""


@pytest.mark.parametrize("shown", [True, False], ids=["short work", "not shown"])
def test_nothing_is_shown(shown, open_terminal):
    terminal = open_terminal()
    with pytest.raises(KeyError), watched("responses", lambda: (0, 1), shown=shown):
        raise KeyError
    assert terminal.getvalue() == ""


def test_work_inside_other_work_shares_the_line(open_terminal, clock):
    terminal = open_terminal()
    with Progress("steps", 100, delay=0.0) as steps:
        with Progress("responses", 8, delay=0.0) as responses:
            clock.now += 10.0
            responses.update(2)
            assert "steps:" in last_line(terminal)
            assert "responses 2/8, 00:30 left" in last_line(terminal)
        steps.update()
        assert "responses" not in last_line(terminal)


def test_a_line_above_the_display_goes_to_stdout(open_terminal, capsys):
    open_terminal()
    with Progress("runs", 8, delay=0.0):
        print_line("run 1 of 8")
    assert capsys.readouterr().out.strip("\r\n ") == "run 1 of 8"


def test_a_log_file_gets_a_line_per_minute(clock, capsys):
    with Progress("scoring", 400, unit="tokens") as scoring:
        for _ in range(5):
            clock.now += 20.0
            scoring.update(10)
    assert capsys.readouterr().err == "scoring 30/400 tokens, 12:20 left\n"


def test_a_resumed_run_counts_only_its_own_time(clock, capsys):
    with Progress("steps", 100, initial=50) as steps:
        clock.now += 60.0
        steps.update(10)
    assert capsys.readouterr().err == "steps 60/100, 04:00 left\n"


@pytest.mark.parametrize(
    ("done", "total"), [(0, 8), (9, 8), (3, None)], ids=["not begun", "more than all", "unknown"]
)
def test_the_remaining_time_is_unknown(done, total):
    work = Progress("work", total)
    work.move_to(done)
    assert work.remaining_seconds is None
    assert "left" not in str(work)


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "hidden"])
def test_work_without_stderr_shows_nothing(shown, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with Progress("work", 8, shown=shown, delay=0.0) as work:
        work.update(3)
    assert work.done == 3


def test_items_are_counted(open_terminal):
    open_terminal()
    items = tracked("ab", "letters", 2)
    assert list(items) == ["a", "b"]


def test_steps_of_a_run_are_not_repeated_in_a_log_file(clock, capsys):
    console = Console(total_steps=2)
    clock.now += 1000.0
    console.log({"train/loss": 0.5}, step=1)
    console.close()
    assert capsys.readouterr().err == ""


def test_one_module_draws_progress():
    """Two libraries, or two displays, would overwrite each other's lines."""
    sources = [*(ROOT / "slime_tis").rglob("*.py"), *(ROOT / "studies").rglob("*.py")]
    drawing = [path for path in sources if "import tqdm" in path.read_text()]
    assert drawing == [Path(progress.__file__)]


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
