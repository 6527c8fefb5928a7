"""The choice of tiles, and the refusal of an operation whose rows depend on other rows."""

from dataclasses import replace

import pytest
import torch

from slime_tis.trainer.invariant import self_check
from slime_tis.trainer.invariant.operations import Tiles, has_whole_vectors, product
from slime_tis.trainer.invariant.self_check import (
    ATTENTION_OUTPUT,
    DOWN,
    GATE_UP,
    HEAD,
    QKV,
    ModelShapes,
    choose_kernels,
)

SHAPES = ModelShapes(hidden=64, heads=4, groups=2, head_features=16, inner=96, vocabulary=50)


def test_all_five_linear_layers_have_tiles():
    kernels = choose_kernels(SHAPES, torch.float32)
    assert [*kernels.tiles] == [QKV, ATTENTION_OUTPUT, GATE_UP, DOWN, HEAD]


def test_few_output_features_of_a_rank_are_accepted():
    # A rank of two has 5 of 9 tokens: fewer than MKL adds in the order of more.
    kernels = choose_kernels(replace(SHAPES, vocabulary=9, ranks=2), torch.float32)
    assert HEAD in kernels.tiles


def test_the_choice_is_the_same_in_a_resumed_run():
    assert choose_kernels(SHAPES, torch.bfloat16) == choose_kernels(SHAPES, torch.bfloat16, seed=9)


def test_ranks_divide_the_vocabulary_as_megatron_pads_it():
    shapes = replace(SHAPES, vocabulary=51, ranks=2)
    assert choose_kernels(shapes, torch.float32).vocabulary_part == 26


def test_tiles_that_change_rows_are_not_chosen(monkeypatch):
    monkeypatch.setitem(self_check.CANDIDATES, torch.float32, (Tiles(1, 64), Tiles(16, 64)))

    def depends_on_the_number_of_rows(x, weight, tiles):
        return product(x, weight, tiles) + float(tiles.base == 1 and len(x) % 2)

    monkeypatch.setattr(self_check, "product", depends_on_the_number_of_rows)
    assert choose_kernels(SHAPES, torch.float32).tiles[GATE_UP] == Tiles(16, 64)


def test_a_linear_layer_without_tiles_is_refused_by_name(monkeypatch):
    def depends_on_the_number_of_rows(x, weight, tiles):
        return product(x, weight, tiles) * (1 + len(x) % 3)

    monkeypatch.setattr(self_check, "product", depends_on_the_number_of_rows)
    with pytest.raises(ValueError, match=f"linear layer: {QKV}"):
        choose_kernels(SHAPES, torch.float32)


@pytest.mark.parametrize(
    ("function", "name"),
    [("rms_norm", "norm"), ("attention", "attention"), ("rotate", "rotary embedding")],
)
def test_an_operation_that_sees_the_batch_is_refused(monkeypatch, function, name):
    honest = getattr(self_check, function)

    def sees_the_batch(x, *others):
        return honest(x, *others) + x.shape[0] * x.shape[-2] * 1e-3

    monkeypatch.setattr(self_check, function, sees_the_batch)
    with pytest.raises(ValueError, match=f"'{name}' in float32 gives other bits"):
        choose_kernels(SHAPES, torch.float32)


@pytest.mark.parametrize("width", [63, 65, 96])
def test_rows_that_end_within_a_vector_compose_silu(width):
    assert not has_whole_vectors(width)
