"""Attention over prefix trees: outputs and gradients of merged parts match a dense mask."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_tis.trainer.megatron.prefix_tree import PrefixTree
from slime_tis.trainer.megatron.shared_attention import attention_parts, shared_attention
from tests.megatron.test_prefix_tree import groups, tree_of

HEADS, GROUPS, WIDTH = 4, 2, 8


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(tokens)
    heads = (HEADS, GROUPS, GROUPS)
    query, key, value = (torch.randn(tokens, one, WIDTH, generator=chance).to(dtype).requires_grad_() for one in heads)
    return query, key, value


def dense(tree: PrefixTree, filler: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The reference: attention with a dense mask from the paths."""
    segments = [index for index, one in enumerate(tree.segments) for _ in range(one.length)] + [-2] * filler
    chain = {-1: {-1}, -2: {-2}}
    for index, one in enumerate(tree.segments):
        chain[index] = {index, *chain[one.parent]}
    sees = [[k <= q and segments[k] in chain[segments[q]] for k in range(len(segments))] for q in range(len(segments))]
    rows = [x.transpose(0, 1)[None].repeat_interleave(HEADS // x.shape[1], 1) for x in (query, key, value)]
    return F.scaled_dot_product_attention(*rows, attn_mask=torch.tensor(sees), scale=0.3)[0].transpose(0, 1)


@settings(max_examples=30)
@given(groups, st.integers(0, 3))
def test_merged_parts_are_a_dense_mask(drawn: list[tuple[list[int], list[list[int]]]], filler: int) -> None:
    tree = tree_of([(prompt, response) for prompt, responses in drawn for response in responses])
    parts, taken = attention_parts(tree, filler), inputs(tree.tokens + filler)
    expected, found = dense(tree, filler, *taken), shared_attention(*taken, parts, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    grads = [torch.autograd.grad((output * weights).sum(), taken) for output in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 1e4], ids=["scores near 0", "scores beyond float32's exponentials"])
def test_parts_of_any_weight_are_merged(size: float) -> None:
    tree = tree_of([([1, 2, 3], [4, 5]), ([1, 2, 3], [6])])
    query, key, value = inputs(tree.tokens)
    found = shared_attention(query * size, key, value, attention_parts(tree, 0), 0.3)
    torch.testing.assert_close(found, dense(tree, 0, query * size, key, value), rtol=1e-4, atol=1e-4)


def test_bfloat16_is_as_accurate_as_dense_attention() -> None:
    tree = tree_of([([1, 2, 3], [4, 5]), ([1, 2, 3], [6])])
    taken = inputs(tree.tokens, torch.bfloat16)
    exact = dense(tree, 0, *(x.float() for x in taken))
    merged = shared_attention(*taken, attention_parts(tree, 0), 0.3)
    for output in (merged, dense(tree, 0, *taken)):
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output.float(), exact, rtol=0.02, atol=0.02)
    merged.float().sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in taken)
