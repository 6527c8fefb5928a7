"""How samples are dealt into micro-batches and cut for context-parallel ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.megatron.batch import fixed_partition, make_batch, token_budget_partitions


def test_fixed_partition() -> None:
    assert fixed_partition(5, 2) == [[0, 1], [2, 3], [4]]
    assert fixed_partition(3, None) == [[0, 1, 2]]


def test_token_budget_packs_first_fit_decreasing() -> None:
    # 7 | 6 3 | 5 4 of a budget of 9; the shorter ones go where they first fit.
    assert token_budget_partitions([[3, 7, 4, 6, 5]], 9) == [[[1], [0, 3], [2, 4]]]


def test_a_sequence_over_the_budget_is_alone() -> None:
    assert token_budget_partitions([[20, 4, 4]], 9) == [[[0], [1, 2]]]


def test_ranks_make_the_same_number_of_passes() -> None:
    first, second = token_budget_partitions([[9, 9, 9], [2, 2, 2]], 9)
    assert first == [[0], [1], [2]]
    assert len(second) == 3 and sorted(i for bin in second for i in bin) == [0, 1, 2]


@given(
    st.integers(1, 3).flatmap(
        lambda ranks: st.integers(1, 12).flatmap(
            lambda n: st.lists(st.lists(st.integers(1, 50), min_size=n, max_size=n), min_size=ranks, max_size=ranks)
        )
    ),
    st.integers(1, 120),
)
def test_every_sample_is_in_one_micro_batch_within_the_budget(lengths: list[list[int]], budget: int) -> None:
    partitions = token_budget_partitions(lengths, budget)
    assert len({len(partition) for partition in partitions}) == 1
    for mine, partition in zip(lengths, partitions, strict=True):
        assert sorted(i for bin in partition for i in bin) == list(range(len(mine)))
        assert all(len(bin) == 1 or sum(mine[i] for i in bin) <= budget for bin in partition)


def test_context_ranks_own_every_response_token_once() -> None:
    response = torch.arange(5.0)
    pieces = [
        make_batch([[1] * 8], [5], [[1, 1, 0, 1, 1]], {"value": [response]}, rank, 2).local["value"][0]
        for rank in range(2)
    ]
    # 8 tokens, chunks of 2: rank 0 holds logits 0, 1 and 6, 7; the logit at p predicts token p + 1 and the response
    # starts at token 3, so rank 0 owns token 7 alone (response index 4) and rank 1 the tokens 3, 4, 5, 6.
    assert pieces[0].tolist() == [4.0]
    assert pieces[1].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_select_keeps_everything_of_a_sample_together() -> None:
    batch = make_batch([[1, 2], [3, 4, 5]], [1, 2], [[1], [1, 0]], {"value": [torch.ones(1), torch.zeros(2)]})
    chosen = batch.select([1]).with_local("more", [torch.full((2,), 7.0)])
    assert chosen.tokens[0].tolist() == [3, 4, 5]
    assert chosen.response_lengths == [2] and chosen.total_lengths == [3]
    assert {name: values[0].tolist() for name, values in chosen.local.items()} == {
        "value": [0.0, 0.0],
        "loss_masks": [1.0, 0.0],
        "more": [7.0, 7.0],
    }
