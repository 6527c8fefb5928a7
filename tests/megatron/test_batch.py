"""Division of samples into micro-batches and among data- and context-parallel ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.trainer.megatron.batch import assign_together, fixed_partition, make_batch, shard, unshard
from slime_tis.trainer.megatron.micro_batches import load_of, token_budget_partitions
from slime_tis.trainer.megatron.prefix_tree import PrefixTree


def apart(lengths: list[int]) -> PrefixTree:
    """Sequences that share nothing."""
    return PrefixTree.apart(lengths, [1] * len(lengths))


def test_fixed_partition() -> None:
    assert fixed_partition(5, 2) == [[0, 1], [2, 3], [4]]
    assert fixed_partition(3, None) == [[0, 1, 2]]


def test_token_budget_packs_first_fit_decreasing() -> None:
    # 7 | 6 3 | 5 4 of a budget of 9; the shorter ones go where they first fit.
    assert token_budget_partitions([apart([3, 7, 4, 6, 5])], 9) == [[[1], [0, 3], [2, 4]]]


@given(
    st.integers(1, 3).flatmap(
        lambda ranks: st.integers(1, 12).flatmap(
            lambda n: st.lists(st.lists(st.integers(1, 50), min_size=n, max_size=n), min_size=ranks, max_size=ranks)
        )
    ),
    st.integers(1, 120),
)
def test_every_sample_is_in_one_micro_batch_within_the_budget(lengths: list[list[int]], budget: int) -> None:
    partitions = token_budget_partitions([apart(of_rank) for of_rank in lengths], budget)
    assert len({len(partition) for partition in partitions}) == 1
    for mine, partition in zip(lengths, partitions, strict=True):
        assert sorted(i for bin in partition for i in bin) == list(range(len(mine)))
        assert all(len(bin) == 1 or sum(mine[i] for i in bin) <= budget for bin in partition)


def test_context_ranks_own_every_response_token_once() -> None:
    values = [0.0, 1.0, 2.0, 3.0, 4.0]
    pieces = [
        make_batch([[1] * 8], [[1, 1, 0, 1, 1]], [values], [[0] * 5], rank, 2).responses.rollout_log_probs_L
        for rank in range(2)
    ]
    # 8 tokens, chunks of 2: rank 0 holds logits 0, 1 and 6, 7; the logit at p predicts token p + 1 and the response
    # starts at token 3, so rank 0 owns token 7 alone (response index 4) and rank 1 the tokens 3, 4, 5, 6.
    assert pieces[0].tolist() == [4.0]
    assert pieces[1].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_every_context_rank_has_the_loss_masks_of_whole_responses() -> None:
    masks = [[1, 1, 0, 1, 1], [0, 1, 1]]
    for rank in range(2):
        batch = make_batch([[1] * 8, [2] * 4], masks, [[0.0] * 5, [0.0] * 3], [[0] * 5, [0] * 3], rank, 2)
        assert batch.responses.loss_mask_N.tolist() == [1, 1, 0, 1, 1, 0, 1, 1]
        assert batch.select([1, 0]).responses.loss_mask_N.tolist() == [0, 1, 1, 1, 1, 0, 1, 1]
        assert batch.select([1]).responses.loss_mask_N.tolist() == [0, 1, 1]


def test_rows_of_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight_versions has \[1, 1\]"):
        make_batch([[1, 2]], [[1]], [[-0.5]], [[0], [0]])


def test_select_keeps_all_fields_of_a_sample() -> None:
    batch = make_batch([[1, 2], [3, 4, 5]], [[1], [1, 0]], [[-0.5], [-1.0, -2.0]], [[7], [8, 9]])
    chosen = (
        batch.with_token_values(old_log_probs_L=torch.tensor([0.0, 1.0, 2.0])).with_advantages([5.0, 6.0]).select([1])
    )
    responses = chosen.responses
    assert chosen.tokens[0].tolist() == [3, 4, 5]
    assert responses.response_lengths == responses.lengths == (2,) and responses.total_lengths == (3,)
    assert responses.loss_mask_L.tolist() == [1, 0]
    assert responses.rollout_log_probs_L.tolist() == [-1, -2]
    assert responses.weight_versions_L.tolist() == [8, 9]
    assert responses.old_log_probs_L is not None and responses.old_log_probs_L.tolist() == [1, 2]
    assert responses.advantages_L is not None and responses.advantages_L.tolist() == [6, 6]
    assert responses.ref_log_probs_L is None


def test_select_keeps_the_slices_of_a_context_rank() -> None:
    whole = make_batch([[1] * 8, [2] * 6], [[1] * 5, [1] * 4], [[0.5] * 5, [1.5] * 4], [[0] * 5, [0] * 4], 1, 2)
    alone = make_batch([[2] * 6], [[1] * 4], [[1.5] * 4], [[0] * 4], 1, 2)
    assert whole.select([1]).responses.slices == alone.responses.slices
    assert whole.select([1]).responses.rollout_log_probs_L.tolist() == alone.responses.rollout_log_probs_L.tolist()
    assert whole.select([0, 1]).responses.slices == whole.responses.slices


def test_siblings_stay_together_if_ranks_get_equal_numbers() -> None:
    assert shard("abcdef", 1, 3) == ["b", "e"] and unshard([["a", "c"], ["b", "d"]]) == list("abcd")
    assert assign_together(["a"] * 4 + ["b"] * 4, 2) == 4
    assert shard("aaaabbbb", 1, 2, 4) == list("bbbb")
    assert assign_together(["a"] * 4 + ["b"] * 4 + ["c"] * 4, 2) == 2  # six each
    assert shard("abcdefghijkl", 0, 2, 2) == list("abefij")
    assert assign_together(["a"] * 3 + ["b"] * 5, 2) == 1


@given(st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_shards_of_runs_are_the_samples_in_their_order(size: int, groups: list[int]) -> None:
    samples = [(group, i) for group, count in enumerate(groups * size) for i in range(count)]
    together = assign_together([group for group, _ in samples], size)
    shards = [shard(samples, rank, size, together) for rank in range(size)]
    assert {len(of_rank) for of_rank in shards} == {len(samples) // size}
    assert unshard(shards, together) == samples


def test_a_group_counts_its_prompt_once() -> None:
    # 3 + 2 · 2 tokens each: two groups are 14 tokens, 20 if prompts counted for each sample
    tokens = [[1, 1, 1, 5, 6], [1, 1, 1, 7, 8], [2, 2, 2, 5, 6], [2, 2, 2, 7, 8]]
    tree = PrefixTree.of(tokens, [2] * 4)
    assert token_budget_partitions([tree], 14) == [[[0, 1, 2, 3]]]
    assert token_budget_partitions([tree], 13) == [[[0, 1], [2, 3]]]
    assert token_budget_partitions([tree], 6) == [[[0], [1], [2], [3]]]


def test_a_group_over_the_budget_is_divided_into_samples() -> None:
    tree = PrefixTree.of([[1, 1, 1, 5 + i, 6] for i in range(5)], [2] * 5)
    assert token_budget_partitions([tree], 7) == [[[0, 1], [2, 3], [4]]]


def test_shared_response_tokens_count_for_each_response() -> None:
    tree = PrefixTree.of([[1, 5, 6, 7]] * 4, [3] * 4)
    assert tree.tokens == 4
    assert token_budget_partitions([tree], 6) == [[[0, 1], [2, 3]]]


def test_the_only_group_of_a_micro_batch_is_split_to_match_another_rank() -> None:
    shared = PrefixTree.of([[1, 1, 5 + i] for i in range(4)], [1] * 4)
    first, second = token_budget_partitions([apart([9, 9, 9]), shared], 9)
    assert first == [[0], [1], [2]]
    assert sorted(map(len, second)) == [1, 1, 2] and sorted(i for one in second for i in one) == [0, 1, 2, 3]


def test_tokens_that_the_segments_of_a_rollout_share_count_once() -> None:
    # The segments of a rollout share 12 tokens, and one has 1 more: 13 tokens are computed instead of 25.
    tokens = [[*range(20 * n, 20 * n + 10), *more] for n in (0, 1) for more in ([90, 91], [90, 91, 92])]
    tree = PrefixTree.of(tokens, [2, 3, 2, 3])
    assert tree.tokens == 26 and [load_of(tree, [0, 1]), load_of(tree, [0, 1, 2, 3])] == [13, 26]
    assert token_budget_partitions([tree], 26, [[0, 0, 1, 1]]) == [[[0, 1, 2, 3]]]
    assert token_budget_partitions([tree], 25, [[0, 0, 1, 1]]) == [[[0, 1], [2, 3]]]


def test_the_segments_of_a_rollout_over_the_budget_are_together_and_alone() -> None:
    # Rollout 0 has two segments that share nothing, and the second begins as rollout 1 does.
    tokens = [[1] * 9, [2] * 8 + [3], [2] * 8 + [4], [5, 6]]
    tree = PrefixTree.of(tokens, [1, 1, 1, 1])
    assert token_budget_partitions([tree], 12, [[0, 0, 1, 2]]) == [[[0, 1], [2, 3]]]
    assert token_budget_partitions([tree], 21, [[0, 0, 1, 2]]) == [[[0, 1, 2, 3]]]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=3), min_size=1, max_size=8
    ),
    st.integers(1, 60),
)
def test_rollouts_are_whole_and_within_the_budget(drawn: list[list[tuple[int, int]]], budget: int) -> None:
    tokens = [[*[prompt] * 9, *range(10, 10 + own)] for rollout in drawn for prompt, own in rollout]
    responses = [own for rollout in drawn for _, own in rollout]
    rollouts = [number for number, rollout in enumerate(drawn) for _ in rollout]
    tree = PrefixTree.of(tokens, responses)
    (partition,) = token_budget_partitions([tree], budget, [rollouts])
    assert sorted(i for samples in partition for i in samples) == list(range(len(tokens)))
    for samples in partition:
        chosen = {rollouts[i] for i in samples}
        assert samples == [i for i, number in enumerate(rollouts) if number in chosen]
        assert len(chosen) == 1 or load_of(tree, samples) <= budget
