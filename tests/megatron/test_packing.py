"""Packed rows: tokens, positions, targets and response rows by hand, and layouts against a loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis.megatron.attention import rotate
from slime_tis.megatron.batch import TrainingBatch, make_batch
from slime_tis.megatron.packing import RotaryAngles, pack


def batch_of(tokens: list[list[int]], responses: list[int], rank: int = 0, size: int = 1) -> TrainingBatch:
    values = [[1] * response for response in responses]
    return make_batch(tokens, values, values, values, rank, size)


def test_two_sequences_on_one_rank() -> None:
    packed = pack(batch_of([[5, 6, 7], [8, 9]], [2, 1]))
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.target_T.tolist() == [6, 7, 0, 9, 0]
    assert packed.response_rows.tolist() == [0, 1, 3]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == [0, 3, 5]
    assert packed.packed_seq_params.max_seqlen_q == 3


def test_zigzag_over_two_ranks() -> None:
    # 6 tokens are 4 chunks of 2 (the last one padding): rank 0 has positions 0 1 6 7, rank 1 has 2 3 4 5.
    sequences, responses = [[10, 11, 12, 13, 14, 15]], [3]
    first = pack(batch_of(sequences, responses, 0, 2), context_rank=0, context_size=2)
    second = pack(batch_of(sequences, responses, 1, 2), context_rank=1, context_size=2)
    assert first.position_ids.tolist() == [[0, 1, 6, 7]]
    assert first.input_ids.tolist() == [[10, 11, 0, 0]]
    assert second.input_ids.tolist() == [[12, 13, 14, 15]]
    assert second.target_T.tolist() == [13, 14, 15, 0]
    assert first.response_rows.tolist() == []
    assert second.response_rows.tolist() == [0, 1, 2]
    assert second.packed_seq_params.cu_seqlens_q.tolist() == [0, 8]


def test_filler_makes_the_row_divisible_and_is_not_trained_on() -> None:
    packed = pack(batch_of([[5, 6, 7]], [2]), tensor_size=2)
    assert packed.input_ids.tolist() == [[5, 6, 7, 0]]
    assert packed.response_rows.tolist() == [0, 1]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == [0, 3, 4]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_ranks_together_hold_every_prediction_once(
    shapes: list[tuple[int, int]], context_size: int, tensor_size: int
) -> None:
    tokens = [[100 * i + j + 1 for j in range(prompt + response)] for i, (prompt, response) in enumerate(shapes)]
    responses = [response for _, response in shapes]
    predicted, sizes = [], set()
    for rank in range(context_size):
        batch = batch_of(tokens, responses, rank, context_size)
        packed = pack(batch, context_rank=rank, context_size=context_size, tensor_size=tensor_size)
        rows = packed.response_rows
        assert len(rows) == len(batch.responses.loss_mask_L)
        predicted += packed.target_T[rows].tolist()
        previous = packed.input_ids[0, rows]
        assert torch.equal(packed.target_T[rows], previous + 1)  # tokens of a sequence are consecutive numbers
        sizes.add(packed.input_ids.shape[1])
        assert packed.input_ids.shape[1] % tensor_size == 0
    assert len(sizes) == 1
    expected = [t for ids, response in zip(tokens, responses, strict=True) for t in ids[len(ids) - response :]]
    assert sorted(predicted) == sorted(expected)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [2, 5, 3]])
def test_padded_rows_and_back(lengths: list[int]) -> None:
    packed = pack(batch_of([list(range(1, n + 1)) for n in lengths], [1] * len(lengths)))
    x = torch.randn(sum(lengths), 2, 3)
    rows = packed.packed_seq_params.query_rows(x)
    assert rows.shape == (len(lengths), 2, max(lengths), 3)
    for sequence, part in zip(rows, x.split(lengths), strict=True):
        assert torch.equal(sequence[:, : len(part)].transpose(0, 1), part)
    assert torch.equal(packed.packed_seq_params.tokens(rows), x)


def test_rotary_angles_turn_pairs_by_position_times_frequency() -> None:
    cos, sin = RotaryAngles(torch.tensor([torch.pi / 2]))(torch.tensor([0, 1, 2]))
    turned = rotate(torch.tensor([[[1.0, 0.0]]]).expand(3, 1, 2), cos, sin)
    expected = [[[1.0, 0.0]], [[0.0, 1.0]], [[-1.0, 0.0]]]
    torch.testing.assert_close(turned, torch.tensor(expected), atol=1e-6, rtol=0)


def test_the_gradient_of_a_rotation_is_that_of_its_formula() -> None:
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
