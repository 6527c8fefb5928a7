"""A key/value cache of sequences of uneven length, each in a slot of its own, in transformers' cache interface.

Shapes: suffix _T one value per token that a forward pass feeds, packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from slime_tis.trainer.engines.local.routing import Routing

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow from the longest sequence of the batch."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The slots of one forward pass, and where in them its tokens go."""

    first: int
    """First of the slots, which lie next to each other."""
    slots: int
    """Number of slots, the rows of the pass."""
    length: int
    """Tokens of the longest sequence, those of this pass included."""
    row_T: Tensor
    """Row of each token in the pass."""
    column_T: Tensor
    """Its column in the pass."""
    slot_T: Tensor
    """Its slot."""
    position_T: Tensor
    """Its position in the sequence."""


class SlotTensor:
    """A tensor with a row for every slot and an entry for every token of it, written in place."""

    def __init__(self, token_dim: int) -> None:
        """Holds nothing until the first `write`.

        Args:
            token_dim: Dimension of the tokens in what is written.
        """
        self._token_dim = token_dim
        self._data: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return 0 if self._data is None else self._data.numel() * self._data.element_size()

    def write(self, window: Window, states: Tensor, slots: int, capacity: int) -> None:
        """Puts the states of a pass, [rows, …, columns, …], into the slots, of which there are so many of this size."""
        if self._data is None:
            shape = list(states.shape)
            shape[0], shape[self._token_dim] = slots, capacity
            # Zeros, for attention multiplies what is masked by 0, and memory as it comes may hold NaN.
            self._data = states.new_zeros(shape)
        states, data = states.movedim(self._token_dim, 1), self._data.movedim(self._token_dim, 1)
        data[window.slot_T, window.position_T] = states[window.row_T, window.column_T]

    def read(self, first: int, slots: int, length: int) -> Tensor:
        """A view of the first tokens of some slots."""
        assert self._data is not None
        return self._data.narrow(0, first, slots).narrow(self._token_dim, 0, length)

    def resize(self, slots: int, capacity: int) -> None:
        """Changes the number of slots and their size, and keeps what fits."""
        if self._data is None:
            return
        shape = list(self._data.shape)
        kept_slots, kept = min(shape[0], slots), min(shape[self._token_dim], capacity)
        shape[0], shape[self._token_dim] = slots, capacity
        old, self._data = self.read(0, kept_slots, kept), self._data.new_zeros(shape)
        self.read(0, kept_slots, kept).copy_(old)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first tokens of a slot into another."""
        if self._data is not None and length:
            self.read(target, 1, length).copy_(self.read(source, 1, length))

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchanges the first tokens of two slots."""
        if self._data is not None and length:
            first, second = self.read(one, 1, length), self.read(other, 1, length)
            held = first.clone()
            first.copy_(second)
            second.copy_(held)


class SlotLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values of one layer in slots."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache
        self.slot_keys, self.slot_values = SlotTensor(2), SlotTensor(2)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes [rows, heads, tokens, head_dim] states into their slots and returns all of these slots."""
        cache, window = self._cache, self._cache.window
        self.slot_keys.write(window, key_states, cache.slots, cache.capacity)
        self.slot_values.write(window, value_states, cache.slots, cache.capacity)
        part = (window.first, window.slots, window.length)
        return self.slot_keys.read(*part), self.slot_values.read(*part)

    def get_seq_length(self) -> int:
        """Tokens of the longest sequence."""
        return self._cache.window.length


class SlotCache:
    """Keys and values of every layer, and the routing of every token where it is recorded, in slots of one size."""

    window: Window
    """Of the forward pass that comes next."""

    def __init__(self, config: PreTrainedConfig) -> None:
        """Has no slots yet.

        Args:
            config: Of the model.

        Raises:
            ValueError: The model's attention cannot have sequences of uneven length in slots.
        """
        check_config(config)
        self.slots, self.capacity = 0, 0
        self._layers = [SlotLayer(self) for _ in DynamicCache(config=config).layers]
        self._experts, self._weights = SlotTensor(1), SlotTensor(1)
        self.states = DynamicCache(config=config)
        """What the model takes as `past_key_values`."""
        self.states.layers = self._layers

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return sum(tensor.num_bytes for tensor in self._tensors())

    def resize(self, slots: int, capacity: int) -> None:
        """Changes the number of slots and their size in tokens, and keeps what fits."""
        for tensor in self._tensors():
            tensor.resize(slots, capacity)
        self.slots, self.capacity = slots, capacity

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first tokens of a slot into another."""
        for tensor in self._tensors():
            tensor.copy(source, target, length)

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchanges the first tokens of two slots."""
        for tensor in self._tensors():
            tensor.swap(one, other, length)

    def write_routing(self, routing: Routing) -> None:
        """Stores the routing [rows, columns, layers, k] of the pass that the window is of."""
        self._experts.write(self.window, routing.experts, self.slots, self.capacity)
        self._weights.write(self.window, routing.weights, self.slots, self.capacity)

    def routing(self, slot: int, length: int) -> Routing:
        """The routing [length, layers, k] of the first tokens of a slot, in memory of its own."""
        return Routing(
            experts=self._experts.read(slot, 1, length)[0].clone(),
            weights=self._weights.read(slot, 1, length)[0].clone(),
        )

    def _tensors(self) -> Iterator[SlotTensor]:
        for layer in self._layers:
            yield layer.slot_keys
            yield layer.slot_values
        yield self._experts
        yield self._weights


def check_config(config: PreTrainedConfig) -> None:
    """Refuses models whose attention cannot have sequences of uneven length in slots.

    Raises:
        ValueError: A layer has another cache than all keys and values, or rotary embeddings follow from the batch.
    """
    others = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__})
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if not others and rope not in LENGTH_DEPENDENT_ROPE:
        return
    problem = f"a cache of {', '.join(others)}" if others else f"{rope} rotary embeddings"
    raise ValueError(
        f"the model ({config.model_type}) has {problem}, which the local engine cannot batch for functions that ask it "
        "for single sequences; use --rollout-engine sglang."
    )
