"""Prefix trees: segments by hand, and every sequence read from its path."""

from hypothesis import strategies as st

from slime_tis.trainer.megatron.micro_batches import MIN_SHARED, PrefixTree


def tree_of(samples):
    return PrefixTree.of([[*prompt, *response] for prompt, response in samples], [len(r) for _, r in samples])


def segments_of(samples):
    """The tokens of each segment, and the segment before it."""
    tokens = [[*prompt, *response] for prompt, response in samples]
    return [(tokens[one.sequence][one.start : one.start + one.length], one.parent) for one in tree_of(samples).segments]


def test_segments_by_hand():
    samples = [([5, 6, 7], [9, 1]), ([5, 6, 7], [8]), ([4], [3])]
    assert segments_of(samples) == [([4, 3], -1), ([5, 6, 7], -1), ([8], 1), ([9, 1], 1)]
    tree = tree_of(samples)
    assert tree.paths == ((1, 3), (1, 2), (0,))
    assert (tree.tokens, tree.is_shared) == (8, True)
    samples = [([5, 6], [7]), ([5, 6], [7, 8]), ([5, 6], []), ([5, 6], [7, 8])]  # beginnings of the second
    assert segments_of(samples) == [([5, 6, 7, 8], -1)]
    assert tree_of(samples).paths == ((0,), (0,), (0,), (0,))
    samples = [([5, 6], [7]), ([5, 6], [7, 8]), ([5, 6], [9])]  # the second continues one of two siblings
    assert segments_of(samples) == [([5, 6], -1), ([7, 8], 0), ([9], 0)]
    assert tree_of(samples).paths == ((0, 1), (0, 1), (0, 2))
    template = list(range(MIN_SHARED))  # long beginnings within prompts are shared
    assert segments_of([([*template, 20], [1]), ([*template, 21], [1])]) == [(template, -1), ([20, 1], 0), ([21, 1], 0)]
    short = tree_of([([*template[:-1], 20], [1]), ([*template[:-1], 21], [1])])
    assert not short.is_shared and short.paths == ((0,), (1,))
    turn = list(range(10, 10 + MIN_SHARED))  # turns are shared after the prompt
    samples = [([1, 2], [*turn, 5]), ([1, 2], [*turn, 6]), ([1, 2], [9])]
    assert segments_of(samples) == [([1, 2], -1), ([9], 0), (turn, 0), ([5], 2), ([6], 2)]
    samples = [([9], [1]), ([8], [1, 2]), ([7, 7], [3])]  # nothing is shared
    assert tree_of(samples) == PrefixTree.apart([2, 3, 3], [1, 2, 1])


groups = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
        st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)
"""Prompts with their responses, of few different tokens, so that beginnings are often equal."""
