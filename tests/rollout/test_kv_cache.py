"""The cache written in place holds what transformers' own does."""

import torch
from transformers import DynamicCache, Gemma2Config

from slime_tis.trainer.engines.local.kv_cache import growing_cache

CONFIG = Gemma2Config(num_hidden_layers=2, sliding_window=4)
FULL = CONFIG.layer_types.index("full_attention")  # the other layer is sliding


def test_states_are_those_of_the_dynamic_cache():
    """Through prefill, sharing among samples, many tokens (the buffer grows), and dropping of samples."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = growing_cache(CONFIG), DynamicCache(config=CONFIG)

    def extend(batch, tokens):
        for layer in range(2):
            keys, values = torch.randn(2, batch, 3, tokens, 5, generator=generator)
            for mine, other in zip(ours.update(keys, values, layer), theirs.update(keys, values, layer), strict=True):
                assert torch.equal(mine, other)
        assert ours.get_seq_length() == theirs.get_seq_length()

    extend(2, 7)
    for cache in (ours, theirs):
        cache.batch_repeat_interleave(3)
    for _ in range(100):
        extend(6, 1)
    kept = torch.tensor([0, 4, 5])
    for cache in (ours, theirs):
        cache.batch_select_indices(kept)
    for _ in range(70):
        extend(3, 1)
    extend(3, 90)


def test_tokens_are_written_without_copying_the_past():
    cache = growing_cache(CONFIG)
    states = torch.zeros(2, 3, 1, 5)
    addresses = [cache.update(states, states, FULL)[0].data_ptr() for _ in range(200)]
    assert len(set(addresses[1:])) <= 5  # the buffer grows by half


def test_rows_are_shared_and_dropped_with_one_copy():
    """The token after is written into the buffer that the rows were copied into."""
    cache = growing_cache(CONFIG)
    cache.update(torch.zeros(2, 3, 7, 5), torch.zeros(2, 3, 7, 5), FULL)
    for rows, select in (
        (6, lambda: cache.layers[FULL].batch_repeat_interleave(3)),
        (2, lambda: cache.layers[FULL].batch_select_indices(torch.tensor([0, 4]))),
    ):
        select()
        before = cache.layers[FULL].keys.data_ptr()
        states = torch.zeros(rows, 3, 1, 5)
        assert cache.update(states, states, FULL)[0].data_ptr() == before
