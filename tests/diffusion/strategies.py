"""Hypothesis strategies: dense batches of trajectories, all of one length."""

from hypothesis import strategies as st

from tests.correction.strategies import DELTAS, LOG_PROBS, WILD

Rows = list[list[float]]


@st.composite
def trajectories(draw: st.DrawFn, wild: bool = False) -> tuple[Rows, Rows]:
    """(train, rollout) log-probs, [B][T]; with `wild`, non-finite and absurd values are planted."""
    batch = draw(st.integers(1, 5))
    steps = draw(st.integers(1, 4))

    def rows(values: st.SearchStrategy[float]) -> Rows:
        row = st.lists(values, min_size=steps, max_size=steps)
        return [draw(row) for _ in range(batch)]

    rollout = rows(LOG_PROBS)
    deltas = rows(DELTAS)
    train = [
        [r + d for r, d in zip(*pair, strict=True)] for pair in zip(rollout, deltas, strict=True)
    ]
    if wild:
        for table in (train, rollout):
            for _ in range(draw(st.integers(0, 2))):
                row = draw(st.integers(0, batch - 1))
                step = draw(st.integers(0, steps - 1))
                table[row][step] = draw(WILD)
    return train, rollout
