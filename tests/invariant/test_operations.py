"""Rows of the invariant operations do not depend on the batch: bitwise equality as properties."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis.trainer.invariant.operations import (
    KEYS,
    Tiles,
    attention,
    linear,
    product,
    rms_norm,
    rotate,
    row_sums,
    silu,
    swiglu,
    token_log_probs,
    trained_linear,
)
from slime_tis.trainer.invariant.self_check import (
    ATTENTION_OUTPUT,
    DOWN,
    GATE_UP,
    QKV,
    ModelShapes,
    choose_kernels,
)

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
SHAPES = ModelShapes(hidden=96, heads=6, groups=2, head_features=16, inner=160, vocabulary=300)
FEATURES = {QKV: (96, 160), ATTENTION_OUTPUT: (96, 96), GATE_UP: (96, 320), DOWN: (160, 96)}
SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def kernels():
    """The chosen kernels by type and number of ranks."""
    chosen = {}
    for dtype in (torch.float32, torch.bfloat16):
        for ranks in (1, 2):
            shapes = replace(SHAPES, ranks=ranks)
            chosen[dtype, ranks] = choose_kernels(shapes, dtype)
    return chosen


def randoms(seed):
    """A function that draws normal tensors."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size, dtype=torch.float32):
        return torch.randn(*size, generator=generator).to(dtype)

    return draw


def splits(total):
    """Lengths of consecutive parts of `total` rows."""
    cuts = st.lists(st.integers(1, total - 1), max_size=4)
    return cuts.map(lambda places: torch.diff(torch.tensor([0, *sorted(set(places)), total])))


@DTYPES
@pytest.mark.parametrize("name", FEATURES)
@settings(max_examples=25)
@given(seed=SEEDS, parts=splits(200))
def test_linear_rows_are_equal_for_every_split(kernels, dtype, name, seed, parts):
    draw = randoms(seed)
    inputs, outputs = FEATURES[name]
    x = draw(200, inputs, dtype=dtype)
    weight = draw(outputs, inputs, dtype=dtype)
    bias = draw(outputs, dtype=dtype)
    tiles = kernels[dtype, 1].tiles[name]
    complete = linear(x, weight, bias, tiles)
    rows = [linear(part.clone(), weight, bias, tiles) for part in x.split(parts.tolist())]
    assert torch.equal(torch.cat(rows), complete)


@DTYPES
@settings(max_examples=25)
@given(seed=SEEDS, rows=st.integers(1, 70))
def test_halves_of_a_sum_equal_two_ranks(kernels, dtype, seed, rows):
    draw = randoms(seed)
    tiles = kernels[dtype, 2].tiles[DOWN]
    x = draw(1, rows, 160, dtype=dtype)
    weight = draw(96, 160, dtype=dtype)
    ranks = []
    for rank in range(2):
        features = slice(80 * rank, 80 * rank + 80)
        ranks.append(product(x[..., features].clone(), weight[:, features].clone(), tiles))
    assert torch.equal(linear(x, weight, None, tiles, parts=2), ranks[0] + ranks[1])


@DTYPES
@pytest.mark.parametrize("features", [1, 5, 11, 12, 16])
def test_few_output_features_equal_those_of_many(dtype, features):
    draw = randoms(9)
    x = draw(64, 96, dtype=dtype)
    weight = draw(64, 96, dtype=dtype)
    tiles = Tiles(64, 64)
    complete = product(x, weight, tiles)
    assert torch.equal(product(x, weight[:features], tiles), complete[:, :features])


@DTYPES
@settings(max_examples=40)
@given(seed=SEEDS, length=st.integers(1, 3 * KEYS), data=st.data())
def test_decoding_equals_a_complete_attention_pass(dtype, seed, length, data):
    draw = randoms(seed)
    spare = data.draw(st.integers(0, KEYS + 5), label="other tokens in the cache")
    position = data.draw(st.integers(0, length - 1), label="position")
    sequence = data.draw(st.integers(0, 2), label="sequence")
    query = draw(3, 6, length, 16, dtype=dtype)
    keys = draw(3, 2, length + spare, 16, dtype=dtype)
    values = draw(3, 2, length + spare, 16, dtype=dtype)
    complete = attention(query, keys[:, :, :length], values[:, :, :length], None, 0.25)
    rows = slice(sequence, sequence + 1)
    seen = torch.arange(length + spare) <= position
    decoded = attention(
        query[rows, :, position : position + 1], keys[rows], values[rows], seen[None, None], 0.25
    )
    assert torch.equal(decoded, complete[rows, :, position : position + 1])


@DTYPES
@settings(max_examples=25)
@given(seed=SEEDS, length=st.integers(2, 3 * KEYS), data=st.data())
def test_chunks_of_a_prompt_equal_a_complete_pass(dtype, seed, length, data):
    draw = randoms(seed)
    start = data.draw(st.integers(1, length - 1), label="start of the second chunk")
    query = draw(2, 6, length, 16, dtype=dtype)
    keys = draw(2, 2, length, 16, dtype=dtype)
    values = draw(2, 2, length, 16, dtype=dtype)
    complete = attention(query, keys, values, None, 0.25)
    first = attention(query[:, :, :start], keys[:, :, :start], values[:, :, :start], None, 0.25)
    second = attention(query[:, :, start:], keys, values, None, 0.25)
    assert torch.equal(torch.cat([first, second], 2), complete)


@DTYPES
@settings(max_examples=25)
@given(seed=SEEDS, width=st.integers(1, 200), parts=splits(40))
def test_norm_rows_are_equal_for_every_split(dtype, seed, width, parts):
    draw = randoms(seed)
    x = draw(40, width, dtype=dtype)
    weight = draw(width, dtype=dtype)
    rows = [rms_norm(part.clone(), weight, 1e-6) for part in x.split(parts.tolist())]
    assert torch.equal(torch.cat(rows), rms_norm(x, weight, 1e-6))


@DTYPES
@settings(max_examples=25)
@given(seed=SEEDS, half=st.integers(1, 40), position=st.integers(0, 39))
def test_rotary_embedding_of_one_token_equals_all(dtype, seed, half, position):
    draw = randoms(seed)
    x = draw(40, 3, 2 * half, dtype=dtype)
    frequencies = draw(half).abs()

    def rotated(rows):
        angles = torch.arange(40.0)[rows, None, None] * frequencies
        return rotate(x[rows].clone(), angles.cos(), angles.sin())

    row = slice(position, position + 1)
    assert torch.equal(rotated(row), rotated(slice(None))[row])


@DTYPES
@settings(max_examples=50)
@given(seed=SEEDS, width=st.integers(1, 200), parts=splits(40))
def test_composed_silu_is_equal_for_every_split(dtype, seed, width, parts):
    x = randoms(seed)(40, width, dtype=dtype) * 4
    rows = [silu(part.clone(), vectorized=False) for part in x.split(parts.tolist())]
    assert torch.equal(torch.cat(rows), silu(x, vectorized=False))


@DTYPES
@settings(max_examples=50)
@given(seed=SEEDS, vectors=st.integers(1, 6), parts=splits(40))
def test_vectorized_silu_is_equal_for_whole_vectors(dtype, seed, vectors, parts):
    x = randoms(seed)(40, 128 * vectors, dtype=dtype) * 4
    gates = x[:, : 64 * vectors]  # a view, as in training
    rows = [silu(part.clone(), vectorized=True) for part in gates.split(parts.tolist())]
    assert torch.equal(torch.cat(rows), silu(gates, vectorized=True))


@settings(max_examples=50)
@given(seed=SEEDS, width=st.integers(2, 700), ranks=st.integers(1, 2), parts=splits(30))
def test_log_probs_are_equal_for_every_split(seed, width, ranks, parts):
    draw = randoms(seed)
    logits = draw(30, width) * 5
    tokens = torch.arange(30) % width
    part_size = -(-width // ranks)
    rows = []
    for z, token in zip(logits.split(parts.tolist()), tokens.split(parts.tolist()), strict=True):
        rows.append(token_log_probs(z.clone(), token, part_size))
    assert torch.equal(torch.cat(rows), token_log_probs(logits, tokens, part_size))


# Values and gradients


@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probs_equal_log_softmax(ranks):
    logits = randoms(0)(20, 50) * 5
    tokens = torch.arange(20)
    expected = logits.double().log_softmax(-1)[torch.arange(20), tokens]
    torch.testing.assert_close(
        token_log_probs(logits, tokens, -(-50 // ranks)).double(), expected, atol=2e-6, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.0, -torch.inf, -torch.inf, -torch.inf], 0.0),
        ([-100.0, 0.0, -torch.inf, -torch.inf], -100.0),
        ([1e30, 1e30, -torch.inf, -1e30], -0.6931472),
        ([-1e6, -9999.0, 0.0, -torch.inf], -1e6),
    ],
    ids=["one token", "100 nats", "huge logits", "sentinels"],
)
def test_log_probs_of_extreme_logits(logits, expected):
    for part_size in (4, 2):
        log_probs = token_log_probs(torch.tensor([logits]), torch.tensor([0]), part_size)
        assert float(log_probs) == pytest.approx(expected)


def test_the_sum_of_a_single_row_equals_one_of_many():
    x = randoms(3)(2, 50_000)
    assert torch.equal(row_sums(x[:1]), row_sums(x)[:1])


@DTYPES
def test_attention_equals_torch_with_other_heads_and_keys(dtype):
    draw = randoms(1)
    query = draw(2, 6, 150, 16, dtype=dtype)
    keys = draw(2, 2, 150, 16, dtype=dtype)
    values = draw(2, 2, 150, 16, dtype=dtype)
    expected = plain_attention(query.double(), keys.double(), values.double())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    output = attention(query, keys, values, None, 0.25)
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


def plain_attention(query, keys, values):
    repeats = query.shape[1] // keys.shape[1]
    return F.scaled_dot_product_attention(
        query,
        keys.repeat_interleave(repeats, 1),
        values.repeat_interleave(repeats, 1),
        is_causal=True,
        scale=0.25,
    )


def test_attention_with_scores_of_ten_thousand_is_finite():
    draw = randoms(2)
    inputs = [draw(1, 2, 70, 16).mul_(100).requires_grad_() for _ in range(3)]
    output = attention(*inputs, None, 0.25)
    output.sum().backward()
    assert output.isfinite().all()
    assert all(x.grad.isfinite().all() for x in inputs)


def gradients(function, inputs, grad):
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad.to(leaves[0].dtype))


def assert_close_to_float64(function, plain, inputs, grad, dtype):
    """Compares gradients with those of the plain function in float64."""
    wide = [x.double() for x in inputs]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for own, expected in zip(
        gradients(function, inputs, grad), gradients(plain, wide, grad), strict=True
    ):
        error = (own.double() - expected).norm() / expected.norm()
        assert error < tolerance


@DTYPES
def test_gradients_of_attention(dtype):
    draw = randoms(4)
    inputs = [
        draw(2, 6, 150, 16, dtype=dtype),
        draw(2, 2, 150, 16, dtype=dtype),
        draw(2, 2, 150, 16, dtype=dtype),
    ]
    assert_close_to_float64(
        lambda *x: attention(*x, None, 0.25), plain_attention, inputs, draw(2, 6, 150, 16), dtype
    )


@DTYPES
def test_gradients_of_a_linear_layer(kernels, dtype):
    draw = randoms(5)
    tiles = kernels[dtype, 1].tiles[QKV]
    inputs = [draw(70, 1, 96, dtype=dtype), draw(160, 96, dtype=dtype)]
    grad = draw(70, 1, 160)

    def own(x, weight):
        return trained_linear(x, weight, tiles)

    assert_close_to_float64(own, F.linear, inputs, grad, dtype)


@DTYPES
def test_gradients_of_the_norm(dtype):
    draw = randoms(6)
    inputs = [draw(30, 96, dtype=dtype), draw(96, dtype=dtype)]
    assert_close_to_float64(
        lambda x, weight: rms_norm(x, weight, 1e-6),
        lambda x, weight: F.rms_norm(x, (96,), weight, 1e-6),
        inputs,
        draw(30, 96),
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("vectorized", [False, True], ids=["composed", "vectorized"])
def test_gradients_of_swiglu(dtype, vectorized):
    draw = randoms(7)

    def plain(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    assert_close_to_float64(
        lambda x: swiglu(x, vectorized=vectorized),
        plain,
        [draw(30, 128, dtype=dtype)],
        draw(30, 64),
        dtype,
    )


@DTYPES
def test_gradient_of_the_rotary_embedding(dtype):
    draw = randoms(8)
    angles = draw(30, 1, 8)

    def plain(x):
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    assert_close_to_float64(
        lambda x: rotate(x, angles.cos(), angles.sin()),
        plain,
        [draw(30, 3, 16, dtype=dtype)],
        draw(30, 3, 16),
        dtype,
    )
