"""Packed rows (tokens, positions, targets and response rows by hand, layouts against a loop), and prefix trees."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.layers import rotate
from slime_tis.trainer.megatron.micro_batches import MIN_SHARED, PrefixTree
from slime_tis.trainer.megatron.packing import RotaryAngles, RowSplit, pack

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


def test_rows_by_hand():
    packed = pack(batch_of([[5, 6, 7], [8, 9]], [2, 1]))
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert rows_of(packed) == [0, 1, 3]
    assert packed.target_L.tolist() == [6, 7, 9]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == [0, 3, 5]
    assert packed.packed_seq_params.max_seqlen_q == 3
    tokens, responses = [[5, 6, 7], [5, 6, 8, 9], [1, 2], [5, 6]], [1, 2, 1, 0]
    packed = pack(batch_of(tokens, responses), RowSplit(tensor_size=4), share_prompts=True)
    assert packed.input_ids.tolist() == [[1, 2, 5, 6, 7, 8, 9, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2, 2, 3, 0]]
    assert rows_of(packed) == [3, 3, 5, 0]  # the prompt's last token is before both responses
    assert packed.target_L.tolist() == [7, 8, 9, 2]
    assert packed.is_fed_T.tolist() == [True, False, True, True, False, True, False, False]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == [0, 2, 4, 5, 7, 8]


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


def test_zigzag_over_two_ranks():
    # 6 tokens are 4 chunks of 2 (the last one padding): rank 0 has positions 0 1 6 7, rank 1 has 2
    # 3 4 5.
    sequences, responses = [[10, 11, 12, 13, 14, 15]], [3]
    first = pack(batch_of(sequences, responses, 0, 2), RowSplit(context_rank=0, context_size=2))
    second = pack(batch_of(sequences, responses, 1, 2), RowSplit(context_rank=1, context_size=2))
    assert first.position_ids.tolist() == [[0, 1, 6, 7]]
    assert first.input_ids.tolist() == [[10, 11, 0, 0]]
    assert second.input_ids.tolist() == [[12, 13, 14, 15]]
    assert rows_of(first) == []
    assert rows_of(second) == [0, 1, 2]
    assert first.target_L.tolist() == []
    assert second.target_L.tolist() == [13, 14, 15]
    assert second.packed_seq_params.cu_seqlens_q.tolist() == [0, 8]


def test_the_gradient_of_a_rotation_matches_its_formula():
    torch.manual_seed(0)
    x, direction = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = RotaryAngles(torch.rand(4), scaling=1.5)(torch.arange(5))
    leaf, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    (rotate(leaf, cos, sin) * direction).sum().backward()
    first, second = reference.chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    torch.testing.assert_close(rotate(x, cos, sin), expected.detach())
    (expected * direction).sum().backward()
    torch.testing.assert_close(leaf.grad, reference.grad)


def routed(length, first):
    """Identifiable rows [length - 1, 2 layers, 2]: first + 10 · position + layer, and + 100 for the second expert."""
    position = torch.arange(length - 1)[:, None, None] * 10
    return (first + position + torch.arange(2)[:, None] + torch.tensor([0, 100])).to(torch.int16)


def test_rows_of_experts_are_at_the_indices_of_their_tokens():
    batch = batch_of([[5, 6, 7], [8, 9], [3, 4]], [2, 1, 1])
    weights = [torch.full((2, 2, 2), 0.25), None, torch.full((1, 2, 2), 0.75)]
    packed = pack(
        batch.with_routing([routed(3, 0), None, routed(2, 1000)], weights), RowSplit(tensor_size=4)
    )
    assert packed.is_fed_T.tolist() == [True, True, False, True, False, True, False, False]
    assert packed.routed_experts is not None and packed.routed_experts.dtype == torch.int16
    nothing = [-1, -1]
    assert packed.routed_experts[:, 0].tolist() == [
        *(
            [0, 100],
            [10, 110],
            nothing,
        ),  # the last token of a sequence was not fed to the rollout engine
        *(nothing, nothing),  # nothing was recorded of the second sequence
        *([1000, 1100], nothing),
        nothing,  # the filler
    ]
    assert packed.routed_experts[:, 1, 0].tolist() == [1, 11, -1, -1, -1, 1001, -1, -1]
    assert packed.routing_weights is not None
    found = packed.routing_weights[:, 1, 1]
    assert found[[0, 1, 5]].tolist() == [0.25, 0.25, 0.75] and found[[2, 3, 4, 6, 7]].isnan().all()


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=5
    ),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_ranks_together_hold_every_prediction_and_every_row_of_experts_once(
    shapes, context_size, tensor_size
):
    tokens = [
        [100 * i + j + 1 for j in range(prompt + response)]
        for i, (prompt, response, _) in enumerate(shapes)
    ]
    rows = [
        routed(len(ids), 1000 * i) if there else None
        for i, (ids, (*_, there)) in enumerate(zip(tokens, shapes, strict=True))
    ]
    responses = [response for _, response, _ in shapes]
    found, predicted, sizes = [], [], set()
    for rank in range(context_size):
        batch = batch_of(tokens, responses, rank, context_size).with_routing(rows, None)
        packed = pack(
            batch, RowSplit(context_rank=rank, context_size=context_size, tensor_size=tensor_size)
        )
        assert len(packed.target_L) == len(batch.responses.loss_mask_L)
        predicted += packed.target_L.tolist()
        previous = packed.input_ids[0, rows_of(packed)]
        assert torch.equal(
            packed.target_L, previous + 1
        )  # tokens of a sequence are consecutive numbers
        sizes.add(packed.input_ids.shape[1])
        assert packed.input_ids.shape[1] % tensor_size == 0
        if packed.routed_experts is None:
            assert all(experts is None for experts in rows)
            continue
        recorded = packed.routed_experts[:, 0, 0] >= 0
        assert bool((packed.is_fed_T | ~recorded).all())
        first = packed.routed_experts[recorded, 0, 0].tolist()
        ids = packed.input_ids[0, recorded].tolist()
        assert first == [1000 * ((token - 1) // 100) + 10 * ((token - 1) % 100) for token in ids]
        assert packed.routed_experts[recorded, 1, 1].tolist() == [number + 101 for number in first]
        assert bool((packed.routed_experts[~recorded] == -1).all())
        found += first
    assert len(sizes) == 1
    expected = [
        t
        for ids, response in zip(tokens, responses, strict=True)
        for t in ids[len(ids) - response :]
    ]
    assert sorted(predicted) == sorted(expected)
    assert sorted(found) == sorted(
        number for one in rows if one is not None for number in one[:, 0, 0].tolist()
    )


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


def test_segments_by_hand():
    samples = [([5, 6, 7], [9, 1]), ([5, 6, 7], [8]), ([4], [3])]
    assert segments_of(samples) == [([4, 3], -1), ([5, 6, 7], -1), ([8], 1), ([9, 1], 1)]
    tree = tree_of(samples)
    assert tree.paths == ((1, 3), (1, 2), (0,))
    assert (tree.tokens, tree.is_shared) == (8, True)
    samples = [
        ([5, 6], [7]),
        ([5, 6], [7, 8]),
        ([5, 6], []),
        ([5, 6], [7, 8]),
    ]  # beginnings of the second
    assert segments_of(samples) == [([5, 6, 7, 8], -1)]
    assert tree_of(samples).paths == ((0,), (0,), (0,), (0,))
    samples = [
        ([5, 6], [7]),
        ([5, 6], [7, 8]),
        ([5, 6], [9]),
    ]  # the second continues one of two siblings
    assert segments_of(samples) == [([5, 6], -1), ([7, 8], 0), ([9], 0)]
    assert tree_of(samples).paths == ((0, 1), (0, 1), (0, 2))
    template = list(range(MIN_SHARED))  # long beginnings within prompts are shared
    assert segments_of([([*template, 20], [1]), ([*template, 21], [1])]) == [
        (template, -1),
        ([20, 1], 0),
        ([21, 1], 0),
    ]
    short = tree_of([([*template[:-1], 20], [1]), ([*template[:-1], 21], [1])])
    assert not short.is_shared and short.paths == ((0,), (1,))
    turn = list(range(10, 10 + MIN_SHARED))  # turns are shared after the prompt
    samples = [([1, 2], [*turn, 5]), ([1, 2], [*turn, 6]), ([1, 2], [9])]
    assert segments_of(samples) == [([1, 2], -1), ([9], 0), (turn, 0), ([5], 2), ([6], 2)]
    samples = [([9], [1]), ([8], [1, 2]), ([7, 7], [3])]  # nothing is shared
    assert tree_of(samples) == PrefixTree.apart([2, 3, 3], [1, 2, 1])
