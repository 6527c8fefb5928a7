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
