"""Which prompts are in flight when, and where a resumed run begins."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from slime_tis.trainer.rollout.prefetch import Prefetcher


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


def test_without_lookahead_each_rollout_is_submitted_when_it_is_taken():
    found, log, places = run(0)
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [number for number, _ in log.submitted] == [0, 1, 2, 3]
    assert places == [2, 4, 6, 8]


def test_lookahead_keeps_rollouts_in_flight_and_stops_at_the_last():
    for depth in (1, 2, 9):
        found, log, places = run(depth)
        assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert log.submitted == list(enumerate(found))
        assert places == [2, 4, 6, 8]  # what is in flight is taken again by a resumed run
    log = Log()
    prefetcher = Prefetcher(log, log.submit, prompts=lambda: 2, depth=2)
    prefetcher.next(0, 3)
    assert [number for number, _ in log.submitted] == [0, 1, 2]
