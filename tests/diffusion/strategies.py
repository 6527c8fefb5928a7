"""Hypothesis strategies: dense batches of trajectories, all of one length."""

from hypothesis import strategies as st

from tests.correction.strategies import DELTAS, LOG_PROBS, WILD

Rows = list[list[float]]


@st.composite
def trajectories(draw, wild=False):
    """(train, rollout) log-probs, [B][T]; with `wild`, non-finite and absurd values are planted."""
    batch, steps = draw(st.integers(1, 5)), draw(st.integers(1, 4))

    def rows(values):
        return [draw(st.lists(values, min_size=steps, max_size=steps)) for _ in range(batch)]

    rollout = rows(LOG_PROBS)
    train = [
        [r + d for r, d in zip(*pair, strict=True)]
        for pair in zip(rollout, rows(DELTAS), strict=True)
    ]
    if wild:
        for table in (train, rollout):
            for _ in range(draw(st.integers(0, 2))):
                table[draw(st.integers(0, batch - 1))][draw(st.integers(0, steps - 1))] = draw(WILD)
    return train, rollout
