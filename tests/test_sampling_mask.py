"""Sets of tokens in compressed rows: by hand, and against lists of lists."""

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.trainer.data.sampling_mask import SamplingMask

SETS = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=8)


def test_rows_by_hand():
    mask = SamplingMask.from_sets([[5, 7], [], [1]])
    assert mask.token_ids.tolist() == [5, 7, 1]
    assert mask.lengths.tolist() == [2, 0, 1]
    assert mask.position_of_token().tolist() == [0, 0, 2]
    assert mask.select(torch.tensor([2, 0, 2])).sets() == [[1], [5, 7], [1]]
    assert mask.contains(torch.tensor([7, 3, 2])).tolist() == [True, True, False]
    assert mask.without(torch.tensor([True, False, False])).sets() == [[], [], [1]]
    assert mask != SamplingMask.from_sets([[5], [7], [1]])
    assert mask == SamplingMask.from_sets([[5, 7], [], [1]])


@given(SETS, st.data())
def test_selection_is_that_of_a_list(sets, data):
    mask = SamplingMask.from_sets(sets)
    positions = data.draw(st.lists(st.integers(0, len(sets) - 1), max_size=6) if sets else st.just([]))
    assert mask.select(torch.tensor(positions, dtype=torch.int64)).sets() == [sets[i] for i in positions]


@given(SETS, st.data())
def test_split_and_cat_are_inverse(sets, data):
    mask = SamplingMask.from_sets(sets)
    cut = data.draw(st.integers(0, len(sets)))
    parts = mask.split([cut, len(sets) - cut])
    assert [part.sets() for part in parts] == [sets[:cut], sets[cut:]]
    assert SamplingMask.cat(parts) == mask


@given(SETS, st.integers(0, 9))
def test_contains_is_membership_or_an_unrecorded_set(sets, token):
    found = SamplingMask.from_sets(sets).contains(torch.full((len(sets),), token, dtype=torch.int32))
    assert found.tolist() == [not allowed or token in allowed for allowed in sets]


def test_the_part_of_a_large_mask_is_pickled_alone():
    first, _ = SamplingMask.from_sets([[3, 4], list(range(100_000))]).split([1, 1])
    assert len(pickle.dumps(first)) < 2_000
