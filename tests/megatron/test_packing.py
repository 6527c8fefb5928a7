"""Packed rows and prefix trees: by hand, and layouts against a loop."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.layers import rotate
from slime_tis.trainer.megatron.micro_batches import MIN_SHARED, PrefixTree
from slime_tis.trainer.megatron.packing import MicroBatch, RotaryAngles, RowSplit, pack

groups = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
        st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)
"""Prompts with their responses, of few different tokens, so that beginnings are often equal."""


def batch_of(tokens, responses, rank=0, size=1):
    values = [[1] * response for response in responses]
    return make_batch(tokens, values, values, values, rank, size)


def rows_of(packed):
    """The rows whose logits predict the response tokens."""
    rows = packed.packed_seq_params.response_rows
    assert rows is not None
    return rows.tolist()


def values_of(packed: MicroBatch) -> dict[str, Any]:
    """The values that are computed by hand below."""
    return {
        "input_ids": packed.input_ids.tolist(),
        "position_ids": packed.position_ids.tolist(),
        "response_rows": rows_of(packed),
        "target_L": packed.target_L.tolist(),
        "cu_seqlens_q": packed.packed_seq_params.cu_seqlens_q.tolist(),
    }


def test_rows_without_shared_prompts():
    packed = pack(batch_of([[5, 6, 7], [8, 9]], [2, 1]))
    assert values_of(packed) == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "response_rows": [0, 1, 3],
        "target_L": [6, 7, 9],
        "cu_seqlens_q": [0, 3, 5],
    }
    assert packed.packed_seq_params.max_seqlen_q == 3


def test_rows_with_shared_prompts():
    batch = batch_of([[5, 6, 7], [5, 6, 8, 9], [1, 2], [5, 6]], [1, 2, 1, 0])
    packed = pack(batch, RowSplit(tensor_size=4), share_prompts=True)
    assert values_of(packed) == {
        "input_ids": [[1, 2, 5, 6, 7, 8, 9, 0]],
        "position_ids": [[0, 1, 0, 1, 2, 2, 3, 0]],
        "response_rows": [3, 3, 5, 0],  # the prompt's last token is before both responses
        "target_L": [7, 8, 9, 2],
        "cu_seqlens_q": [0, 2, 4, 5, 7, 8],
    }
    assert packed.is_fed_T.tolist() == [True, False, True, True, False, True, False, False]


@given(groups, st.integers(1, 3))
def test_every_packed_token_sees_the_beginning_of_its_sequence(drawn, tensor_size):
    samples = [(prompt, response) for prompt, responses in drawn for response in responses]
    tokens = [[*prompt, *response] for prompt, response in samples]
    batch = batch_of(tokens, [len(response) for _, response in samples])
    packed = pack(batch, RowSplit(tensor_size=tensor_size), share_prompts=True)
    layout, count = packed.packed_seq_params, packed.input_ids.shape[1]
    beginnings = {
        tuple(ids[:end]) for ids in (*tokens, [0] * tensor_size) for end in range(len(ids) + 1)
    }
    x = torch.arange(count).float()[:, None, None]
    assert torch.equal(layout.packed([rows.gather(x, rows.query_index) for rows in layout.rows]), x)
    for rows in layout.rows:
        if rows.mask is None:
            continue  # nothing is shared
        queries, keys = (
            rows.gather(x, index)[:, 0, :, 0].long() for index in (rows.query_index, rows.key_index)
        )
        for query_row, key_row, mask in zip(queries, keys, rows.mask[:, 0], strict=True):
            for query, visible in zip(query_row, mask, strict=True):
                seen = key_row[visible]
                assert seen[-1] == query and tuple(packed.input_ids[0, seen].tolist()) in beginnings
                assert packed.position_ids[0, seen].tolist() == list(range(len(seen)))


# 6 tokens are 4 chunks of 2, and the last one is padding: rank 0 has the positions 0 1 6 7, rank 1
# has 2 3 4 5.
@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (
            0,
            {
                "input_ids": [[10, 11, 0, 0]],
                "position_ids": [[0, 1, 6, 7]],
                "response_rows": [],
                "target_L": [],
                "cu_seqlens_q": [0, 8],
            },
        ),
        (
            1,
            {
                "input_ids": [[12, 13, 14, 15]],
                "position_ids": [[2, 3, 4, 5]],
                "response_rows": [0, 1, 2],
                "target_L": [13, 14, 15],
                "cu_seqlens_q": [0, 8],
            },
        ),
    ],
)
def test_zigzag_over_two_ranks(rank, expected):
    batch = batch_of([[10, 11, 12, 13, 14, 15]], [3], rank, 2)
    packed = pack(batch, RowSplit(context_rank=rank, context_size=2))
    assert values_of(packed) == expected


LENGTHS = (9, 1, 8, 2, 3)


def test_sequences_of_similar_length_are_rows_of_one_batch():
    batch = batch_of([[1] * length for length in LENGTHS], [1, 1, 1, 1, 1])
    layout = pack(batch, limits_padding=True).packed_seq_params
    lengths = []
    for rows in layout.rows:
        assert rows.query_index is not None
        lengths.append((rows.count, len(rows.query_index) // rows.count))
    assert lengths == [(2, 9), (2, 3), (1, 1)]


@pytest.mark.parametrize("context_size", [1, 2, 3])
def test_with_limited_padding_each_query_sees_its_sequence(context_size):
    tokens = [list(range(100 * n, 100 * n + length)) for n, length in enumerate(LENGTHS, 1)]
    ranks = []
    for rank in range(context_size):
        split = RowSplit(context_rank=rank, context_size=context_size)
        batch = batch_of(tokens, [1, 1, 1, 1, 1], rank, context_size)
        ranks.append(pack(batch, split, limits_padding=True))
    gathered = torch.cat([packed.input_ids[0] for packed in ranks])[:, None, None]
    checked: set[int] = set()
    for packed in ranks:
        local = packed.input_ids[0][:, None, None]
        position = packed.position_ids[0][:, None, None]
        for rows in packed.packed_seq_params.rows:
            queries = rows.gather(local, rows.query_index)[:, 0, :, 0]
            positions = rows.gather(position, rows.query_index)[:, 0, :, 0]
            keys = rows.gather(gathered, rows.key_index)[:, 0, :, 0]
            for number in range(rows.count):
                ends = positions[number].tolist()
                tokens_and_ends = zip(queries[number].tolist(), ends, strict=True)
                for index, (token, end) in enumerate(tokens_and_ends):
                    # 0 pads the chunks of context-parallel ranks; the last query pads a row.
                    if token == 0 or token in checked:
                        continue
                    checked.add(token)
                    seen = keys[number, : end + 1]
                    if rows.mask is not None:
                        seen = keys[number, rows.mask[number, 0, index]]
                    assert seen.tolist() == list(range(token - end, token + 1))
    assert len(checked) == sum(LENGTHS)


def test_limited_padding_returns_every_token_to_its_place():
    batch = batch_of([[1] * length for length in LENGTHS], [1, 1, 1, 1, 1])
    packed = pack(batch, limits_padding=True)
    layout = packed.packed_seq_params
    x = torch.arange(packed.input_ids.shape[1]).float()[:, None, None]
    padded = [rows.gather(x, rows.query_index) for rows in layout.rows]
    assert torch.equal(layout.packed(padded), x)


def test_the_gradient_of_a_rotation_matches_its_formula():
    torch.manual_seed(0)
    x, direction = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = RotaryAngles(torch.rand(1, 4), scaling=1.5)(torch.arange(5))
    leaf, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    (rotate(leaf, cos, sin) * direction).sum().backward()
    first, second = reference.chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    torch.testing.assert_close(rotate(x, cos, sin), expected.detach())
    (expected * direction).sum().backward()
    torch.testing.assert_close(leaf.grad, reference.grad)


def routed(length, first):
    """Identifiable rows [length - 1, 2 layers, 2]: first + 10 · position + layer.

    The second expert is 100 more.
    """
    position = torch.arange(length - 1)[:, None, None] * 10
    return (first + position + torch.arange(2)[:, None] + torch.tensor([0, 100])).to(torch.int16)


@pytest.fixture(scope="module")
def routed_row() -> MicroBatch:
    """Three sequences, of which the second has no record of its experts."""
    batch = batch_of([[5, 6, 7], [8, 9], [3, 4]], [2, 1, 1])
    experts = [routed(3, 0), None, routed(2, 1000)]
    weights = [torch.full((2, 2, 2), 0.25), None, torch.full((1, 2, 2), 0.75)]
    return pack(batch.with_routing(experts, weights), RowSplit(tensor_size=4))


def test_the_last_token_of_a_sequence_is_not_fed(routed_row):
    assert routed_row.is_fed_T.tolist() == [True, True, False, True, False, True, False, False]


def test_rows_of_experts_are_at_the_indices_of_their_tokens(routed_row):
    assert routed_row.routed_experts.dtype == torch.int16
    nothing = [-1, -1]
    assert routed_row.routed_experts[:, 0].tolist() == [
        [0, 100],
        [10, 110],
        nothing,  # the last token of a sequence was not fed to the rollout engine
        nothing,  # the second sequence has no record
        nothing,
        [1000, 1100],
        nothing,
        nothing,  # the filler
    ]
    assert routed_row.routed_experts[:, 1, 0].tolist() == [1, 11, -1, -1, -1, 1001, -1, -1]


def test_routing_weights_are_at_the_indices_of_their_tokens(routed_row):
    weights = routed_row.routing_weights[:, 1, 1]
    assert weights[[0, 1, 5]].tolist() == [0.25, 0.25, 0.75]
    assert weights[[2, 3, 4, 6, 7]].isnan().all()


@st.composite
def packed_ranks(draw):
    """Sequences of consecutive numbers, some with experts, packed for every context rank."""
    lengths = st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans())
    shapes = draw(st.lists(lengths, min_size=1, max_size=5))
    context_size = draw(st.integers(1, 4))
    tensor_size = draw(st.integers(1, 3))
    tokens = []
    responses = []
    experts = []
    for number, (prompt, response, is_recorded) in enumerate(shapes):
        total = prompt + response
        tokens.append(list(range(100 * number + 1, 100 * number + 1 + total)))
        responses.append(response)
        experts.append(routed(total, 1000 * number) if is_recorded else None)
    ranks = []
    for rank in range(context_size):
        batch = batch_of(tokens, responses, rank, context_size).with_routing(experts, None)
        split = RowSplit(context_rank=rank, context_size=context_size, tensor_size=tensor_size)
        ranks.append((batch, pack(batch, split)))
    return SimpleNamespace(
        tokens=tokens, responses=responses, experts=experts, tensor_size=tensor_size, ranks=ranks
    )


@settings(max_examples=60)
@given(packed_ranks())
def test_ranks_together_predict_every_response_token_once(drawn):
    predicted = []
    for batch, packed in drawn.ranks:
        assert len(packed.target_L) == len(batch.responses.loss_mask_L)
        predicted += packed.target_L.tolist()
    expected = []
    for ids, response in zip(drawn.tokens, drawn.responses, strict=True):
        expected += ids[len(ids) - response :]
    assert sorted(predicted) == sorted(expected)


@settings(max_examples=60)
@given(packed_ranks())
def test_the_token_before_a_target_predicts_it(drawn):
    for _, packed in drawn.ranks:
        previous = packed.input_ids[0, rows_of(packed)]
        assert torch.equal(packed.target_L, previous + 1)


@settings(max_examples=60)
@given(packed_ranks())
def test_rows_of_ranks_have_one_size_that_tensor_ranks_divide(drawn):
    (size,) = {packed.input_ids.shape[1] for _, packed in drawn.ranks}
    assert size % drawn.tensor_size == 0


@settings(max_examples=60)
@given(packed_ranks())
def test_ranks_together_have_every_row_of_experts_once(drawn):
    first_experts = []
    for _, packed in drawn.ranks:
        if packed.routed_experts is not None:
            experts = packed.routed_experts[:, 0, 0]
            first_experts += experts[experts >= 0].tolist()
    expected = []
    for experts in drawn.experts:
        if experts is not None:
            expected += experts[:, 0, 0].tolist()
    assert sorted(first_experts) == sorted(expected)


@settings(max_examples=60)
@given(packed_ranks())
def test_rows_of_experts_belong_to_fed_tokens(drawn):
    for _, packed in drawn.ranks:
        if packed.routed_experts is None:
            continue
        is_recorded = packed.routed_experts[:, 0, 0] >= 0
        assert bool((packed.is_fed_T | ~is_recorded).all())
        assert bool((packed.routed_experts[~is_recorded] == -1).all())
        index = packed.input_ids[0, is_recorded] - 1
        first = 1000 * (index // 100) + 10 * (index % 100)
        assert packed.routed_experts[is_recorded, 0, 0].tolist() == first.tolist()
        assert packed.routed_experts[is_recorded, 1, 1].tolist() == (first + 101).tolist()


def tree_of(samples):
    return PrefixTree.of(
        [[*prompt, *response] for prompt, response in samples], [len(r) for _, r in samples]
    )


def segments_of(samples):
    """The tokens of each segment, and the segment before it."""
    tokens = [[*prompt, *response] for prompt, response in samples]
    return [
        (tokens[one.sequence][one.start : one.start + one.length], one.parent)
        for one in tree_of(samples).segments
    ]


TEMPLATE = list(range(MIN_SHARED))
TURN = list(range(10, 10 + MIN_SHARED))
SEGMENTS = {
    "a shared prompt": (
        [([5, 6, 7], [9, 1]), ([5, 6, 7], [8]), ([4], [3])],
        [([4, 3], -1), ([5, 6, 7], -1), ([8], 1), ([9, 1], 1)],
        ((1, 3), (1, 2), (0,)),
    ),
    "all are beginnings of the second": (
        [([5, 6], [7]), ([5, 6], [7, 8]), ([5, 6], []), ([5, 6], [7, 8])],
        [([5, 6, 7, 8], -1)],
        ((0,), (0,), (0,), (0,)),
    ),
    "the second continues one of two siblings": (
        [([5, 6], [7]), ([5, 6], [7, 8]), ([5, 6], [9])],
        [([5, 6], -1), ([7, 8], 0), ([9], 0)],
        ((0, 1), (0, 1), (0, 2)),
    ),
    "a long beginning of prompts": (
        [([*TEMPLATE, 20], [1]), ([*TEMPLATE, 21], [1])],
        [(TEMPLATE, -1), ([20, 1], 0), ([21, 1], 0)],
        ((0, 1), (0, 2)),
    ),
    "a turn after the prompt": (
        [([1, 2], [*TURN, 5]), ([1, 2], [*TURN, 6]), ([1, 2], [9])],
        [([1, 2], -1), ([9], 0), (TURN, 0), ([5], 2), ([6], 2)],
        ((0, 2, 3), (0, 2, 4), (0, 1)),
    ),
}


@pytest.mark.parametrize(("samples", "segments", "paths"), SEGMENTS.values(), ids=list(SEGMENTS))
def test_segments_by_hand(samples, segments, paths):
    assert segments_of(samples) == segments
    assert tree_of(samples).paths == paths


def test_tokens_of_a_tree_count_once():
    tree = tree_of([([5, 6, 7], [9, 1]), ([5, 6, 7], [8]), ([4], [3])])
    assert (tree.tokens, tree.is_shared) == (8, True)


def test_a_short_beginning_of_prompts_is_not_shared():
    tree = tree_of([([*TEMPLATE[:-1], 20], [1]), ([*TEMPLATE[:-1], 21], [1])])
    assert not tree.is_shared
    assert tree.paths == ((0,), (1,))


def test_different_sequences_share_nothing():
    samples = [([9], [1]), ([8], [1, 2]), ([7, 7], [3])]
    assert tree_of(samples) == PrefixTree.apart([2, 3, 3], [1, 2, 1])
