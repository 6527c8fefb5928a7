"""Rollouts in flight, and groups that a rollout left unfinished."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.data.prompts import PromptDataset
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.engines.rollout_engine import RolloutEngine
from slime_tis.trainer.rollout.hooks import RolloutHooks
from slime_tis.trainer.rollout.prefetch import Prefetcher, Unfinished
from tests.samples import make_sample

Group = list[Sample]


@dataclass
class NumberSource:
    """A data set of numbers, and the batches that were submitted."""

    position: int = 0
    submitted: list[tuple[int, list[int]]] = field(default_factory=list)

    def next_batch(self, size: int) -> list[Any]:
        first = self.position
        self.position += size
        return list(range(first, self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def submit(self, prompts: list[Any], rollout: int) -> Any:
        self.submitted.append((rollout, prompts))
        return SimpleNamespace(result=lambda: prompts)


@dataclass
class PrefetchedRun:
    """Four rollouts of two prompts: their results, and the position that a checkpoint saves."""

    source: NumberSource
    results: list[Any]
    positions: list[int]


def make_prefetcher(source: NumberSource, submit: Callable[..., Any], depth: int) -> Prefetcher:
    """A prefetcher of batches of two prompts."""
    return Prefetcher(cast(PromptDataset, source), submit, prompts=lambda: 2, depth=depth)


def run_with_lookahead(depth: int) -> PrefetchedRun:
    source = NumberSource()
    run = PrefetchedRun(source, [], [])
    prefetcher = make_prefetcher(source, source.submit, depth)
    for rollout in range(4):
        run.results.append(prefetcher.next(rollout, 3))
        run.positions.append(prefetcher.state_dict()["position"])
    return run


@pytest.fixture(params=[0, 1, 2, 9], ids="lookahead {}".format)
def prefetched(request: pytest.FixtureRequest) -> PrefetchedRun:
    return run_with_lookahead(request.param)


def test_lookahead_keeps_the_order_of_prompts(prefetched):
    assert prefetched.results == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_every_rollout_is_submitted_once(prefetched):
    assert prefetched.source.submitted == list(enumerate(prefetched.results))


def test_a_resumed_run_repeats_rollouts_in_flight(prefetched):
    # the saved position is before them
    assert prefetched.positions == [2, 4, 6, 8]


def test_the_lookahead_is_the_number_of_rollouts_in_flight():
    source = NumberSource()
    prefetcher = make_prefetcher(source, source.submit, 2)
    prefetcher.next(0, 3)
    assert [rollout for rollout, _ in source.submitted] == [0, 1, 2]


@dataclass
class PendingRollout:
    """A rollout that is complete or not."""

    groups: list[Group]
    done: bool

    def is_done(self) -> bool:
        return self.done

    def result(self) -> list[Group]:
        return self.groups


def prefetcher_ahead(done: Sequence[bool]) -> Prefetcher:
    """A prefetcher after its first batch, with a batch in flight for each entry of `done`."""
    source = NumberSource()
    flags = iter([True, *done])

    def submit(numbers: list[int], rollout: int) -> PendingRollout:
        groups = []
        for number in numbers:
            prompt = Prompt(index=number, text="p", token_ids=(1,))
            groups.append([make_sample(prompt, [2, 3])])
        return PendingRollout(groups, next(flags))

    prefetcher = make_prefetcher(source, submit, len(done))
    prefetcher.next(0, 9)
    return prefetcher


FINISHED = [
    ((), 0),
    ((True,), 1),
    ((True, True), 2),
    ((False, True), 0),
    ((True, False), 1),
]


@pytest.mark.parametrize(("done", "count"), FINISHED, ids=str)
def test_batches_before_the_first_unfinished_one_are_saved(done, count):
    finished = prefetcher_ahead(done).finished()
    assert [batch.prompts for batch in finished] == [2] * count


@pytest.mark.parametrize("done", [done for done, _ in FINISHED], ids=str)
def test_the_saved_position_is_before_batches_in_flight(done):
    assert prefetcher_ahead(done).state_dict()["position"] == 2


@pytest.fixture
def saved_and_trained() -> tuple[Sample, Sample]:
    """A sample of a saved batch, and the same sample after training has changed it."""
    prefetcher = prefetcher_ahead((True,))
    (saved,) = prefetcher.finished()
    ((trained,), _) = prefetcher.next(1, 1)
    trained.loss_mask[0] = 0
    trained.metadata["seen"] = True
    trained.reward = 1.0
    return saved.groups[0][0], trained


def test_training_does_not_change_saved_samples(saved_and_trained):
    saved, _ = saved_and_trained
    assert list(saved.loss_mask) == [1, 1]
    assert saved.metadata == {}
    assert saved.reward is None


def test_saved_samples_share_the_row_of_their_prompt(saved_and_trained):
    saved, trained = saved_and_trained
    assert saved.prompt_row is trained.prompt_row


def test_saved_batches_of_other_prompts_are_refused():
    (saved,) = prefetcher_ahead((True,)).finished()
    source = NumberSource()
    source.next_batch = lambda size: [
        Prompt(index=7 + number, text="p", token_ids=(1,)) for number in range(size)
    ]
    prefetcher = make_prefetcher(source, source.submit, 1)
    with pytest.raises(ValueError, match="answer other prompts than those that come next"):
        prefetcher.restore([saved])


@dataclass
class EngineWithUnfinished:
    """An engine that keeps the groups that it is to resume."""

    groups: list[Group]

    def unfinished(self) -> list[Group]:
        return self.groups

    def resume_unfinished(self, groups: list[Group]) -> None:
        self.groups = groups


def unfinished_group(number: int) -> Group:
    """Two samples of a prompt that were aborted."""
    prompt = Prompt(index=number, text="p", token_ids=(1,))
    aborted = {"group_index": number, "status": Sample.Status.ABORTED}
    return [make_sample(prompt, [2, 3], **aborted), make_sample(prompt, [2, 3], **aborted)]


BufferFilter = Callable[[Namespace, int, list[Group], int], Any]


def unfinished_with(buffer_filter: BufferFilter | None) -> tuple[Unfinished, EngineWithUnfinished]:
    """Four unfinished groups with a `--buffer-filter-path`."""
    engine = EngineWithUnfinished([unfinished_group(number) for number in range(4)])
    functions = {}
    if buffer_filter is not None:
        functions["buffer_filter_path"] = buffer_filter
    choose = RolloutHooks(args=Namespace(), functions=functions).choose
    return Unfinished(engine=cast(RolloutEngine, engine), choose=choose), engine


def numbers(groups: list[Group]) -> list[int | None]:
    return [samples[0].group_index for samples in groups]


def pop_last(args, rollout_id, buffer, num_samples):
    """Takes the last group, and drops the first."""
    chosen = [buffer.pop()]
    del buffer[0]
    return chosen


def test_the_engine_resumes_the_chosen_groups():
    unfinished, engine = unfinished_with(pop_last)
    assert unfinished.take(8) == 1
    assert numbers(engine.groups) == [3]


def test_waiting_and_dropped_groups_are_counted():
    unfinished, _ = unfinished_with(pop_last)
    unfinished.take(8)
    counts = unfinished.metrics()
    assert counts == {"rollout/buffer_waiting": 2, "rollout/buffer_dropped": 1}


def test_newly_unfinished_groups_come_after_those_that_wait():
    unfinished, engine = unfinished_with(pop_last)
    unfinished.take(8)
    engine.groups = [unfinished_group(9)]
    assert numbers(unfinished.groups()) == [1, 2, 9]


def test_the_filter_chooses_again_at_the_next_rollout():
    unfinished, engine = unfinished_with(pop_last)
    unfinished.take(8)
    engine.groups = [unfinished_group(9)]
    assert unfinished.take(8) == 1
    assert numbers(engine.groups) == [9]
    assert numbers(unfinished.waiting) == [2]


def test_dropped_groups_are_counted_since_the_last_report():
    unfinished, engine = unfinished_with(pop_last)
    unfinished.take(8)
    unfinished.metrics()
    engine.groups = [unfinished_group(9)]
    unfinished.take(8)
    counts = unfinished.metrics()
    assert counts == {"rollout/buffer_waiting": 1, "rollout/buffer_dropped": 1}


def test_groups_returned_without_removal_are_taken_once():
    unfinished, engine = unfinished_with(lambda args, rollout_id, buffer, num_samples: buffer[1:2])
    assert unfinished.take(8) == 1
    assert numbers(engine.groups) == [1]
    assert numbers(unfinished.waiting) == [0, 2, 3]


def test_all_groups_are_taken_without_a_filter():
    unfinished, engine = unfinished_with(None)
    assert unfinished.take(2) == 4
    assert numbers(engine.groups) == [0, 1, 2, 3]
    assert unfinished.waiting == []


def test_nothing_is_counted_without_a_filter():
    unfinished, _ = unfinished_with(None)
    unfinished.take(2)
    assert unfinished.metrics() == {}


def change_tokens(args, rollout_id, buffer, num_samples):
    buffer[0][0].tokens[0] = 7
    return buffer[:1]


WRONG_FILTERS: dict[str, tuple[BufferFilter, str]] = {
    "None": (
        lambda args, rollout_id, buffer, num_samples: None,
        "returned None; Input should be a valid list",
    ),
    "copy": (
        lambda args, rollout_id, buffer, num_samples: [list(buffer[0])],
        "different lists of the buffer",
    ),
    "twice": (
        lambda args, rollout_id, buffer, num_samples: [buffer[0], buffer[0]],
        "different lists of the buffer",
    ),
    "too many": (
        lambda args, rollout_id, buffer, num_samples: buffer,
        "returned 4 groups; return at most num_samples, 3",
    ),
    "raises": (lambda args, rollout_id, buffer, num_samples: 1 / 0, "ZeroDivisionError"),
    "changes tokens": (change_tokens, "changed"),
}


@pytest.mark.parametrize(("function", "message"), WRONG_FILTERS.values(), ids=WRONG_FILTERS)
def test_a_wrong_buffer_filter_is_one_message(function, message):
    unfinished, _ = unfinished_with(function)
    with pytest.raises(CustomFunctionError, match=message) as error:
        unfinished.take(3)
    assert Path(__file__).name in str(error.value)
