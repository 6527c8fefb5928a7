"""Timer against a clock that the test sets."""

import pytest

from slime_tis.trainer.reporting.timing import Timer


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_parts_add_up_and_taking_starts_again():
    clock = Clock()
    timer = Timer(clock)
    for seconds in (1.0, 2.5):
        with timer("generate"):
            clock.now += seconds
    with timer("forward"), timer("log_probs"):
        clock.now += 0.25
    clock.now += 4.0
    assert timer.take() == {
        "perf/generate_time": 3.5,
        "perf/forward_time": 0.25,
        "perf/log_probs_time": 0.25,
        "perf/step_time": 7.75,
    }
    clock.now += 0.5
    assert timer.take() == {"perf/step_time": 0.5}


def test_first_step_starts_with_its_first_part():
    clock = Clock()
    timer = Timer(clock)
    clock.now += 60.0
    with timer("generate"):
        clock.now += 1.0
    assert timer.take() == {"perf/generate_time": 1.0, "perf/step_time": 1.0}


def test_nothing_timed_is_a_step_of_no_time():
    assert Timer(Clock()).take() == {"perf/step_time": 0.0}


def test_a_part_that_raises_is_counted():
    clock = Clock()
    timer = Timer(clock)
    with pytest.raises(KeyError), timer("reward"):
        clock.now += 2.0
        raise KeyError
    assert timer.take()["perf/reward_time"] == 2.0
