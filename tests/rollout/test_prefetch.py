"""Rollouts that are prefetched, and unfinished groups under a buffer filter."""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.engines.engine import RolloutEngine
from slime_tis.trainer.rollout.hooks import RolloutHooks
from slime_tis.trainer.rollout.prefetch import Prefetcher, Unfinished
from tests.samples import make_sample


@dataclass
class Log:
    """A data set of numbers, two a batch, and the batches that were submitted."""

    place: int = 0
    submitted: list[tuple[int, list[int]]] = field(default_factory=list)

    def next_batch(self, size):
        self.place += size
        return list(range(self.place - size, self.place))

    def state_dict(self):
        return {"place": self.place}

    def submit(self, prompts, number):
        self.submitted.append((number, prompts))
        return SimpleNamespace(result=lambda: prompts)


def run(depth, rollouts=4):
    log, found, places = Log(), [], []
    prefetcher = Prefetcher(log, log.submit, prompts=lambda: 2, depth=depth)
    for number in range(rollouts):
        found.append(prefetcher.next(number, rollouts - 1))
        places.append(prefetcher.state_dict()["place"])
    return found, log, places


def test_rollouts_in_flight_follow_the_lookahead_up_to_the_last():
    found, log, places = run(0)
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [number for number, _ in log.submitted] == [0, 1, 2, 3]
    assert places == [2, 4, 6, 8]
    for depth in (1, 2, 9):
        found, log, places = run(depth)
        assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert log.submitted == list(enumerate(found))
        assert places == [2, 4, 6, 8]  # what is in flight is taken again by a resumed run
    log = Log()
    prefetcher = Prefetcher(log, log.submit, prompts=lambda: 2, depth=2)
    prefetcher.next(0, 3)
    assert [number for number, _ in log.submitted] == [0, 1, 2]


class Engine:
    def __init__(self, groups):
        self.groups = groups

    def unfinished(self):
        return self.groups

    def resume_unfinished(self, groups):
        self.groups = groups


def group(number):
    prompt = Prompt(index=number, text="p", token_ids=(1,))
    return [make_sample(prompt, [2, 3], group_index=number, status=Sample.Status.ABORTED) for _ in range(2)]


def made(filter_function, count=4):
    engine = Engine([group(number) for number in range(count)])
    functions = {} if filter_function is None else {"buffer_filter_path": filter_function}
    choose = RolloutHooks(args=Namespace(), functions=functions).choose
    return Unfinished(engine=cast(RolloutEngine, engine), choose=choose), engine


def numbers(groups):
    return [samples[0].group_index for samples in groups]


def pop_last(args, rollout_id, buffer, num_samples):
    chosen = [buffer.pop()]
    del buffer[0]
    return chosen


def test_groups_that_are_left_wait_and_come_first():
    unfinished, engine = made(pop_last)
    assert unfinished.take(8) == 1
    assert numbers(engine.groups) == [3]
    assert unfinished.metrics() == {"rollout/buffer_waiting": 2, "rollout/buffer_dropped": 1}
    engine.groups = [group(9)]  # what the batch left unfinished
    assert numbers(unfinished.groups()) == [1, 2, 9]
    assert unfinished.take(8) == 1
    assert numbers(engine.groups) == [9]
    assert numbers(unfinished.waiting) == [2]
    assert unfinished.metrics() == {"rollout/buffer_waiting": 1, "rollout/buffer_dropped": 1}


def test_returned_groups_are_taken_once_and_all_without_a_filter():
    unfinished, engine = made(lambda args, rollout_id, buffer, num_samples: buffer[1:2])
    assert unfinished.take(8) == 1
    assert (numbers(engine.groups), numbers(unfinished.waiting)) == ([1], [0, 2, 3])
    unfinished, engine = made(None)
    assert unfinished.take(2) == 4
    assert (numbers(engine.groups), unfinished.waiting, unfinished.metrics()) == ([0, 1, 2, 3], [], {})


def mutate(args, rollout_id, buffer, num_samples):
    buffer[0][0].tokens[0] = 7
    return buffer[:1]


WHAT_A_FILTER = {
    "None": (lambda args, rollout_id, buffer, num_samples: None, "returned None; Input should be a valid list"),
    "copy": (lambda args, rollout_id, buffer, num_samples: [list(buffer[0])], "different lists of the buffer"),
    "twice": (lambda args, rollout_id, buffer, num_samples: [buffer[0], buffer[0]], "different lists of the buffer"),
    "too many": (
        lambda args, rollout_id, buffer, num_samples: buffer,
        "returned 4 groups; return at most num_samples, 3",
    ),
    "raises": (lambda args, rollout_id, buffer, num_samples: 1 / 0, "ZeroDivisionError"),
    "mutates": (mutate, "changed"),
}


@pytest.mark.parametrize(("function", "message"), WHAT_A_FILTER.values(), ids=WHAT_A_FILTER)
def test_what_a_filter_may_not_do_is_one_message(function, message):
    with pytest.raises(CustomFunctionError, match=message) as error:
        made(function)[0].take(3)
    assert Path(__file__).name in str(error.value)
