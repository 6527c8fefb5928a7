"""A key/value cache that is written in place, in transformers' cache interface."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

MIN_FREE = 32  # tokens; growing by half alone would copy short sequences at almost every step


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values of one layer in a buffer with free space.

    transformers' layer concatenates, which copies the whole cache for every token: 30% of the time of decoding 256
    tokens with a small model. Here `keys` and `values` are views of a buffer that grows by half when it is full.
    """

    def __init__(self) -> None:
        super().__init__()
        self._key_buffer = torch.empty(0)
        self._value_buffer = torch.empty(0)
        self._free = 0  # free tokens behind the views

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [batch, heads, tokens, head_dim] states and returns all of them."""
        if self.get_seq_length() == 0:
            first: tuple[Tensor, Tensor] = super().update(key_states, value_states)
            return first
        start, tokens = self.get_seq_length(), key_states.shape[-2]
        if tokens > self._free:
            self._grow(start + tokens)
        self._free -= tokens
        self._key_buffer[:, :, start : start + tokens] = key_states
        self._value_buffer[:, :, start : start + tokens] = value_states
        self.keys = self._key_buffer[:, :, : start + tokens]
        self.values = self._value_buffer[:, :, : start + tokens]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row, into buffers with free space."""
        rows = torch.arange(len(self.keys), device=self.keys.device).repeat_interleave(repeats)
        self.batch_select_indices(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows at these indices, in buffers with at least the same free space."""
        length = self.get_seq_length()
        self._move(indices, length + max(self._free, MIN_FREE))

    def _grow(self, length: int) -> None:
        self._move(None, length + max(length // 2, MIN_FREE))

    def _move(self, rows: Tensor | None, capacity: int) -> None:
        """Copies rows (None for all) into buffers of this capacity."""
        length = self.get_seq_length()
        self._key_buffer, self._value_buffer = (_copied(states, rows, capacity) for states in (self.keys, self.values))
        self.keys, self.values = self._key_buffer[:, :, :length], self._value_buffer[:, :, :length]
        self._free = capacity - length


def growing_cache(config: PretrainedConfig) -> DynamicCache:
    """The cache that transformers would use, its full-attention layers written in place."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _copied(states: Tensor, rows: Tensor | None, capacity: int) -> Tensor:
    batch, heads, length, head_dim = states.shape
    count = batch if rows is None else len(rows)
    buffer = torch.empty(count, heads, capacity, head_dim, dtype=states.dtype, device=states.device)
    buffer[:, :, :length] = states if rows is None else states.index_select(0, rows)
    return buffer
