"""Division of samples into micro-batches and among data- and context-parallel ranks."""

import dataclasses
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.correction import Ranks
from slime_tis.policy.advantages import optimal_token_baseline
from slime_tis.trainer.megatron.batch import (
    TrainingBatch,
    assign_together,
    balanced_order,
    fixed_partition,
    make_batch,
    shard,
    unshard,
)
from slime_tis.trainer.megatron.micro_batches import PrefixTree, load_of, token_budget_partitions
from slime_tis.trainer.step_inputs import Step, with_token_baseline


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        pytest.param(5, 2, [[0, 1], [2, 3], [4]], id="the last one is smaller"),
        pytest.param(3, None, [[0, 1, 2]], id="all in one"),
    ],
)
def test_fixed_partitions(count, size, expected):
    assert fixed_partition(count, size) == expected


def test_rows_of_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match=r"weight_versions has \[1, 1\]"):
        make_batch([[1, 2]], [[1]], [[-0.5]], [[0], [0]])


@pytest.mark.parametrize(("rank", "expected"), [(0, [4.0]), (1, [0.0, 1.0, 2.0, 3.0])])
def test_context_ranks_own_every_token_once(rank, expected):
    values = [0.0, 1.0, 2.0, 3.0, 4.0]
    # 8 tokens, chunks of 2: rank 0 holds logits 0, 1 and 6, 7; the logit at p predicts token p + 1
    # and the response starts at token 3, so rank 0 owns only token 7 (response index 4) and rank 1
    # the tokens 3, 4, 5, 6.
    batch = make_batch([[1] * 8], [[1, 1, 0, 1, 1]], [values], [[0] * 5], rank, 2)
    assert batch.responses.rollout_log_probs_L.tolist() == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_context_ranks_have_complete_loss_masks(rank):
    tokens = [[1] * 8, [2] * 4]
    masks = [[1, 1, 0, 1, 1], [0, 1, 1]]
    log_probs = [[0.0] * 5, [0.0] * 3]
    versions = [[0] * 5, [0] * 3]
    batch = make_batch(tokens, masks, log_probs, versions, rank, 2)
    assert batch.responses.loss_mask_N.tolist() == [1, 1, 0, 1, 1, 0, 1, 1]
    assert batch.select([1, 0]).responses.loss_mask_N.tolist() == [0, 1, 1, 1, 1, 0, 1, 1]
    assert batch.select([1]).responses.loss_mask_N.tolist() == [0, 1, 1]


def test_the_token_baseline_of_a_rollout_covers_all_of_its_steps():
    """Two groups over two steps, packed, with a tool's output: equal to the padded batch."""
    masks = [[1, 1, 0, 1], [1], [1, 0], [1, 1, 1]]
    torch.manual_seed(0)
    probs = [torch.rand(len(mask)) for mask in masks]
    weights = [torch.rand(len(mask)) for mask in masks]
    rewards, groups = [3.0, 1.0, -2.0, 0.5], [7, 7, 9, 9]
    steps, corrections = [], []
    for chosen in ([0, 2], [1, 3]):
        empty = [[0] * len(masks[i]) for i in chosen]
        batch = make_batch([[1, *row] for row in empty], [masks[i] for i in chosen], empty, empty)
        flat = torch.cat([probs[i] for i in chosen])
        batch = batch.with_token_values(
            old_log_probs_L=flat.log(), sum_pi_squared_L=0.5 + flat.square() / 2
        )
        samples = [SimpleNamespace(group_index=groups[i]) for i in chosen]
        fields = dict.fromkeys([field.name for field in dataclasses.fields(Step)])
        steps.append(Step(**fields | {"samples": samples, "batch": batch}))
        corrections.append((batch.responses.loss_mask_L, torch.cat([weights[i] for i in chosen])))
    found = with_token_baseline(
        steps, [[3.0, -2.0], [1.0, 0.5]], corrections, {9: 0, 7: 1}, Ranks()
    )

    def padded(rows):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    last = [
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([1]),
        torch.tensor([1, 0]),
        torch.tensor([0, 0, 1]),
    ]
    expected = optimal_token_baseline(
        padded([reward * position for reward, position in zip(rewards, last, strict=True)]),
        padded([torch.tensor(mask) for mask in masks]),
        torch.tensor([0, 0, 1, 1]),
        padded(probs).log(),
        0.5 + padded(probs).square() / 2,
        weights_BT=padded(weights),
    )
    for step, chosen in zip(found, ([0, 2], [1, 3]), strict=True):
        packed = torch.cat([expected[i, : len(masks[i])] for i in chosen])
        advantages_L = step.batch.responses.advantages_L
        assert advantages_L is not None and torch.equal(advantages_L, packed.float())


@pytest.fixture
def selected() -> TrainingBatch:
    """The second of two samples."""
    batch = make_batch([[1, 2], [3, 4, 5]], [[1], [1, 0]], [[-0.5], [-1.0, -2.0]], [[7], [8, 9]])
    batch = batch.with_token_values(old_log_probs_L=torch.tensor([0.0, 1.0, 2.0]))
    return batch.with_advantages([5.0, 6.0]).select([1])


def test_select_keeps_tokens(selected):
    assert [tokens.tolist() for tokens in selected.tokens] == [[3, 4, 5]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("response_lengths", (2,)),
        ("lengths", (2,)),
        ("total_lengths", (3,)),
        ("ref_log_probs_L", None),
    ],
)
def test_select_keeps_lengths(selected, name, expected):
    assert getattr(selected.responses, name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss_mask_L", [1, 0]),
        ("rollout_log_probs_L", [-1, -2]),
        ("weight_versions_L", [8, 9]),
        ("old_log_probs_L", [1, 2]),
        ("advantages_L", [6, 6]),
    ],
)
def test_select_keeps_token_values(selected, name, expected):
    assert getattr(selected.responses, name).tolist() == expected


def test_select_keeps_the_slices_of_a_context_rank():
    log_probs = [[0.5] * 5, [1.5] * 4]
    versions = [[0] * 5, [0] * 4]
    both = make_batch([[1] * 8, [2] * 6], [[1] * 5, [1] * 4], log_probs, versions, 1, 2)
    second = make_batch([[2] * 6], [[1] * 4], log_probs[1:], versions[1:], 1, 2).responses
    chosen = both.select([1]).responses
    assert chosen.slices == second.slices
    assert chosen.rollout_log_probs_L.tolist() == second.rollout_log_probs_L.tolist()
    assert both.select([0, 1]).responses.slices == both.responses.slices


def test_samples_are_dealt_to_ranks_in_turn():
    assert shard("abcdef", 1, 3) == ["b", "e"]
    assert unshard([["a", "c"], ["b", "d"]]) == list("abcd")


# (workloads, ranks, items of each rank)
BALANCED = {
    "one rank": ([3, 1, 2], 1, [[0, 1, 2]]),
    "the largest with the smallest": ([9, 1, 5, 5], 2, [[0, 1], [2, 3]]),
    "equally many items": ([9, 1, 1, 1], 2, [[0, 3], [1, 2]]),
    "equal items": ([1, 1, 1, 1], 2, [[0, 2], [1, 3]]),
    "three ranks": ([6, 5, 4, 3, 2, 1], 3, [[0, 5], [1, 4], [2, 3]]),
    "zeros": ([0, 0], 2, [[0], [1]]),
    "nothing": ([], 2, [[], []]),
}


@pytest.mark.parametrize(("workloads", "size", "expected"), BALANCED.values(), ids=BALANCED)
def test_balanced_shares(workloads, size, expected):
    order = balanced_order(workloads, size)
    assert [shard(order, rank, size) for rank in range(size)] == expected


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param("aaaabbbb", 4, id="a group per rank"),
        pytest.param("aaaabbbbcccc", 2, id="six samples per rank"),
        pytest.param("aaabbbbb", 1, id="unequal groups"),
    ],
)
def test_siblings_stay_together_if_ranks_get_equal_numbers(groups, expected):
    assert assign_together(groups, 2) == expected


@pytest.mark.parametrize(
    ("samples", "rank", "together", "expected"),
    [("aaaabbbb", 1, 4, "bbbb"), ("abcdefghijkl", 0, 2, "abefij")],
)
def test_shards_of_samples_that_stay_together(samples, rank, together, expected):
    assert shard(samples, rank, 2, together) == list(expected)


def test_a_rank_with_fewer_micro_batches_splits_its_fullest():
    siblings = [[1, 1, 5 + sample] for sample in range(4)]
    trees = [PrefixTree.apart([9] * 3, [1] * 3), PrefixTree.of(siblings, [1] * 4)]
    first, second = token_budget_partitions(trees, 9)
    assert first == [[0], [1], [2]]
    assert sorted(map(len, second)) == [1, 1, 2]
    assert sorted(chain(*second)) == [0, 1, 2, 3]


@given(st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_shards_of_runs_are_the_samples_in_their_order(size, groups):
    samples = [(group, i) for group, count in enumerate(groups * size) for i in range(count)]
    together = assign_together([group for group, _ in samples], size)
    shards = [shard(samples, rank, size, together) for rank in range(size)]
    assert {len(of_rank) for of_rank in shards} == {len(samples) // size}
    assert unshard(shards, together) == samples


GROUPS = [[1, 1, 1, 5, 6], [1, 1, 1, 7, 8], [2, 2, 2, 5, 6], [2, 2, 2, 7, 8]]
# The segments of a rollout share 12 tokens, and one has 1 more: 13 tokens are computed instead of
# 25.
SEGMENTS = [
    [*range(20 * n, 20 * n + 10), *more] for n in (0, 1) for more in ([90, 91], [90, 91, 92])
]
# Rollout 0 has two segments that share nothing, and the second begins as rollout 1 does.
MIXED = [[1] * 9, [2] * 8 + [3], [2] * 8 + [4], [5, 6]]


@pytest.mark.parametrize(
    ("tokens", "responses", "rollouts", "budget", "expected"),
    [
        # 7 | 6 3 | 5 4 of a budget of 9; the shorter ones go where they first fit
        pytest.param(
            [[n] * n for n in (3, 7, 4, 6, 5)],
            [1] * 5,
            None,
            9,
            [[1], [0, 3], [2, 4]],
            id="decreasing",
        ),
        # 3 + 2 · 2 tokens each: two groups are 14 tokens, 20 if prompts counted for each sample
        pytest.param(GROUPS, [2] * 4, None, 14, [[0, 1, 2, 3]], id="two groups"),
        pytest.param(GROUPS, [2] * 4, None, 13, [[0, 1], [2, 3]], id="a group each"),
        pytest.param(GROUPS, [2] * 4, None, 6, [[0], [1], [2], [3]], id="a sample each"),
        pytest.param(
            [[1, 1, 1, 5 + i, 6] for i in range(5)],
            [2] * 5,
            None,
            7,
            [[0, 1], [2, 3], [4]],
            id="a large group",
        ),
        # four tokens are computed, but each response counts
        pytest.param([[1, 5, 6, 7]] * 4, [3] * 4, None, 6, [[0, 1], [2, 3]], id="equal responses"),
        pytest.param(
            SEGMENTS,
            [2, 3, 2, 3],
            [0, 0, 1, 1],
            26,
            [[0, 1, 2, 3]],
            id="shared segments of two rollouts",
        ),
        pytest.param(
            SEGMENTS,
            [2, 3, 2, 3],
            [0, 0, 1, 1],
            25,
            [[0, 1], [2, 3]],
            id="shared segments of one rollout",
        ),
        pytest.param(
            MIXED,
            [1] * 4,
            [0, 0, 1, 2],
            12,
            [[0, 1], [2, 3]],
            id="a rollout over the budget is alone",
        ),
        pytest.param(
            MIXED, [1] * 4, [0, 0, 1, 2], 21, [[0, 1, 2, 3]], id="different segments in one rollout"
        ),
    ],
)
def test_micro_batches_by_hand(tokens, responses, rollouts, budget, expected):
    tree = PrefixTree.of(tokens, responses)
    assert token_budget_partitions([tree], budget, None if rollouts is None else [rollouts]) == [
        expected
    ]


rollouts_of_a_rank = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=3),
    min_size=1,
    max_size=8,
)
"""Each rollout's segments: the number of a prompt of nine tokens, and the length of a response."""


@st.composite
def planned_ranks(draw):
    """The tree, the rollout numbers and the partition of every rank, and the budget."""
    ranks = draw(st.lists(rollouts_of_a_rank, min_size=1, max_size=3))
    budget = draw(st.integers(1, 60))
    shortest = min(map(len, ranks))  # every rank gets the same number of rollouts
    trees = []
    numbers = []
    for rank in ranks:
        tokens = []
        lengths = []
        rank_numbers = []
        for number, rollout in enumerate(rank[:shortest]):
            for prompt, length in rollout:
                tokens.append([prompt] * 9 + list(range(10, 10 + length)))
                lengths.append(length)
                rank_numbers.append(number)
        trees.append(PrefixTree.of(tokens, lengths))
        numbers.append(rank_numbers)
    partitions = token_budget_partitions(trees, budget, numbers)
    return list(zip(trees, numbers, partitions, strict=True)), budget


@given(planned_ranks())
def test_ranks_have_equal_numbers_of_micro_batches(plan):
    ranks, _ = plan
    assert len({len(partition) for _, _, partition in ranks}) == 1


@given(planned_ranks())
def test_every_sequence_is_in_one_micro_batch(plan):
    for tree, _, partition in plan[0]:
        assert sorted(chain(*partition)) == list(range(len(tree)))


@given(planned_ranks())
def test_rollouts_are_complete_in_a_micro_batch(plan):
    for _, numbers, partition in plan[0]:
        for samples in partition:
            chosen = {numbers[sample] for sample in samples}
            complete = [sample for sample, number in enumerate(numbers) if number in chosen]
            assert samples == complete


@given(planned_ranks())
def test_micro_batches_of_several_rollouts_fit_the_budget(plan):
    ranks, budget = plan
    for tree, numbers, partition in ranks:
        for samples in partition:
            chosen = {numbers[sample] for sample in samples}
            assert len(chosen) == 1 or load_of(tree, samples) <= budget
