"""Requests in progress, and a cache of keys, values and states with one slot per sequence.

The cache has the interface of transformers' caches.

Shapes: suffix _T one value per token of a forward pass, packed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from slime_tis.families import FAMILIES
from slime_tis.trainer.engines.function_requests import Generation, Request, StopStrings
from slime_tis.trainer.engines.local.routing import Routing

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest sequence of the batch."""


@dataclass(eq=False, kw_only=True)
class Work:
    """A request in progress."""

    request: Request
    order: int
    limit: int
    stop_token_ids: frozenset[int]
    stop: StopStrings
    uniforms: Iterator[float]
    distribution: tuple[float, float, int]
    future: asyncio.Future[None] | None = None
    """Done once `generation` is set, or cancelled."""
    generation: Generation | None = None
    pending: list[int] = field(default_factory=list)
    """Tokens that are not in the cache; at least one while the request has a slot."""
    waited: int = 0
    """Decode steps since the request was ready for prefill."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sets: list[Tensor] = field(default_factory=list)
    """Candidate tokens per sampled token, if recorded; empty for the complete vocabulary."""

    @property
    def known(self) -> list[int]:
        """The input and the sampled tokens."""
        return self.request.token_ids + self.token_ids

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer."""
        return self.future is not None and self.future.done()


@dataclass(eq=False, kw_only=True)
class Slot:
    """A sequence in the cache."""

    index: int
    row: int
    """Row of the cache that contains the tokens; `index` after the next forward pass."""
    tokens: list[int] = field(default_factory=list)
    session: tuple[int, str | None] | None = None
    """The conversation that may continue; None once its sample is complete."""
    used: int = 0
    logits: Tensor | None = None
    """Logits after the tokens, until the request samples from them."""
    work: Work | None = None

    @property
    def pending(self) -> list[int]:
        """The tokens of the request that are not in the cache."""
        if self.work is None:
            return []
        return self.work.pending

    def may_share(self, tokens: Sequence[int], count: int) -> bool:
        """Whether the slot may share the first `count` tokens: the last of them is equal."""
        last = count - 1
        cached = len(self.tokens)
        if last < cached:
            return self.tokens[last] == tokens[last]
        if last < cached + len(self.pending):
            return self.pending[last - cached] == tokens[last]
        return False


@dataclass(kw_only=True)
class Window:
    """The slots of a forward pass, and token positions within it."""

    all_slots: int
    """Number of slots in the cache."""
    capacity: int
    """Size of a slot, in tokens."""
    first: int
    slots: int
    """Number of contiguous slots, the rows of the pass."""
    row_T: Tensor | None = None
    """Row of each token; None if all sequences have the same length and there is no padding."""
    length: int
    """Tokens of the longest sequence, including this pass."""
    keys: int
    """Entries of a slot that attention reads, at least `length`; the mask hides the others."""
    columns: int
    column_T: Tensor | None = None
    position_T: Tensor | None = None


class SlotTensor:
    """A tensor with a row per slot and an entry per token, written in place."""

    def __init__(self, token_dim: int, dtype: torch.dtype | None = None) -> None:
        """`dtype` of the stored values; None for that of the first written states."""
        self._token_dim = token_dim
        self._dtype = dtype
        self._data: Tensor | None = None

    def write(self, window: Window, states: Tensor) -> None:
        """Writes a pass's states [rows, …, columns, …]."""
        if self._data is None:
            shape = list(states.shape)
            shape[0] = window.all_slots
            shape[self._token_dim] = window.capacity
            # Attention multiplies masked values by 0, and uninitialized memory may contain NaN.
            self._data = states.new_zeros(shape, dtype=self._dtype)
        if window.row_T is None:
            slots_of_pass = self._data.narrow(0, window.first, window.slots)
            start = window.length - window.columns
            slots_of_pass.narrow(self._token_dim, start, window.columns).copy_(states)
        else:
            states = states.movedim(self._token_dim, 1)
            data = self._data.movedim(self._token_dim, 1)
            slot_T = window.first + window.row_T
            data[slot_T, window.position_T] = states[window.row_T, window.column_T].to(data.dtype)

    def read(self, first: int, slots: int, length: int) -> Tensor:
        """A view of the first tokens of some slots."""
        assert self._data is not None
        return self._data.narrow(0, first, slots).narrow(self._token_dim, 0, length)

    def resize(self, slots: int, capacity: int) -> None:
        """Changes the number and size of slots, and keeps the tokens that fit."""
        if self._data is None:
            return
        shape = list(self._data.shape)
        kept_slots = min(shape[0], slots)
        kept_tokens = min(shape[self._token_dim], capacity)
        old = self.read(0, kept_slots, kept_tokens)
        shape[0] = slots
        shape[self._token_dim] = capacity
        self._data = self._data.new_zeros(shape)
        self.read(0, kept_slots, kept_tokens).copy_(old)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first tokens of some rows to other rows, all at once."""
        if self._data is not None and length:
            tokens = self._data.narrow(self._token_dim, 0, length)
            tokens[targets] = tokens[sources]


class SlotState:
    """A tensor with a row per slot for what a recurrence remembers of all tokens so far."""

    def __init__(self) -> None:
        self._data: Tensor | None = None

    def write(self, window: Window, states: Tensor) -> None:
        """Replaces the states [rows, …] of the slots of a pass."""
        if self._data is None:
            self._data = states.new_zeros(window.all_slots, *states.shape[1:])
        self._data.narrow(0, window.first, window.slots).copy_(states)

    def read(self, window: Window) -> Tensor | None:
        """A view of the states of the slots of a pass; None before the first pass."""
        if self._data is None:
            return None
        return self._data.narrow(0, window.first, window.slots)

    def resize(self, slots: int, capacity: int) -> None:
        """Changes the number of slots."""
        if self._data is None:
            return
        old = self._data
        kept_slots = min(len(old), slots)
        self._data = old.new_zeros(slots, *old.shape[1:])
        self._data[:kept_slots] = old[:kept_slots]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies rows to other rows, all at once."""
        if self._data is not None:
            self._data[targets] = self._data[sources]

    def clear(self, rows: list[int]) -> None:
        """Sets rows to the state before the first token."""
        if self._data is not None:
            self._data[rows] = 0


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers has no types
    """The states of one gated delta net in slots: its last tokens, and its recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_convolution = SlotState()
        self.slot_recurrence = SlotState()
        self._window: Window

    @property
    def window(self) -> Window:
        """The slots of the pass."""
        return self._window

    @window.setter
    def window(self, window: Window) -> None:
        self._window = window
        # transformers' cache reads these two, if there is a previous state.
        self.conv_states[0] = self.slot_convolution.read(window)
        self.recurrent_states[0] = self.slot_recurrence.read(window)
        self.has_previous_state[0] = self.recurrent_states[0] is not None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keeps the last columns of states [rows, channels, columns].

        Returns:
            The columns kept by the previous pass, and these.
        """
        assert conv_kernel_size is not None  # Qwen3-Next and Qwen3.5 give it
        before = self.conv_states[0]
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
        joined = torch.cat([before, conv_states], -1)
        self.slot_convolution.write(self.window, joined[..., -conv_kernel_size:])
        return joined

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keeps states [rows, heads, d_k, d_v]."""
        self.slot_recurrence.write(self.window, recurrent_states)
        return recurrent_states


class SlotLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values of one layer in slots."""

    window: Window

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.slot_keys = SlotTensor(token_dim=2, dtype=dtype)
        self.slot_values = SlotTensor(token_dim=2, dtype=dtype)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes states [rows, heads, tokens, head_dim] into slots, and returns these slots."""
        window = self.window
        self.slot_keys.write(window, key_states)
        self.slot_values.write(window, value_states)
        keys = self.slot_keys.read(window.first, window.slots, window.keys)
        values = self.slot_values.read(window.first, window.slots, window.keys)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.window.length


class SlotCache:
    """Keys and values or states of every layer, and recorded routing, in slots of equal size."""

    window: Window

    def __init__(
        self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype` of keys and values; None for the model's."""
        self.slots = 0
        self.capacity = 0
        """Size of a slot, in tokens."""
        self._device = device
        self._layers: list[SlotLayer | StateLayer] = []
        for layer in DynamicCache(config=config).layers:
            self._layers.append(_slot_layer(layer, dtype))
        self._experts = SlotTensor(token_dim=1)
        self._weights = SlotTensor(token_dim=1)
        self.states = DynamicCache(config=config)
        self.states.layers = self._layers

    @property
    def has_states(self) -> bool:
        """Whether a layer has states, which are those after the last token only."""
        return any(isinstance(layer, StateLayer) for layer in self._layers)

    def clear_states(self, rows: list[int]) -> None:
        """Sets the states of rows to those before the first token."""
        for tensor in self._tensors():
            if isinstance(tensor, SlotState):
                tensor.clear(rows)

    def begin(self, window: Window) -> None:
        """Sets the slots of the next forward pass."""
        self.window = window
        # Every layer has the window instead of a reference to the cache. Such a cycle would keep
        # all keys and values in memory until Python's garbage collector runs, many rollouts later.
        for layer in self._layers:
            layer.window = window

    def resize(self, slots: int, capacity: int) -> None:
        """Changes the number of slots and their size in tokens, and keeps the tokens that fit."""
        for tensor in self._tensors():
            tensor.resize(slots, capacity)
        self.slots = slots
        self.capacity = capacity

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the first tokens of some rows to other rows, all at once."""
        source_B = torch.tensor(sources, device=self._device)
        target_B = torch.tensor(targets, device=self._device)
        for tensor in self._tensors():
            tensor.move(source_B, target_B, length)

    def write_routing(self, routing: Routing) -> None:
        """Stores the routing [rows, columns, layers, k] of the window's pass."""
        experts, weights = routing
        self._experts.write(self.window, experts)
        self._weights.write(self.window, weights)

    def routing(self, slot: int, length: int) -> Routing:
        """Copies the routing [length, layers, k] of the first tokens of a slot."""
        experts = self._experts.read(slot, 1, length)[0].clone()
        weights = self._weights.read(slot, 1, length)[0].clone()
        return experts, weights

    def _tensors(self) -> Iterator[SlotTensor | SlotState]:
        for layer in self._layers:
            if isinstance(layer, StateLayer):
                yield layer.slot_convolution
                yield layer.slot_recurrence
            else:
                yield layer.slot_keys
                yield layer.slot_values
        yield self._experts
        yield self._weights


def _slot_layer(layer: CacheLayerMixin, dtype: torch.dtype | None) -> SlotLayer | StateLayer:
    """Returns the layer that has slots in the place of a layer of transformers' cache."""
    if isinstance(layer, LinearAttentionLayer):
        return StateLayer()
    return SlotLayer(dtype)


def check_config(config: PreTrainedConfig) -> None:
    """Checks that the cache can replace transformers' and that a row does not depend on the batch.

    Raises:
        ValueError: The cache of a layer is not known, or rotary embeddings depend on the batch.
    """
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    supported = {DynamicLayer.__name__}
    family = FAMILIES.get((config.architectures or [""])[0])
    if family is not None and family.attention.window is not None:
        # Slots keep all keys, and the masks hide those outside of the window.
        supported.add(DynamicSlidingWindowLayer.__name__)
    if family is not None and family.attention.has_delta_nets:
        supported.add(LinearAttentionLayer.__name__)
    others = sorted(kinds - supported)
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    rope = rope_parameters.get("rope_type")
    if others:
        problem = f"a cache of {', '.join(others)}"
    elif rope in LENGTH_DEPENDENT_ROPE:
        problem = f"{rope} rotary embeddings"
    else:
        return
    raise ValueError(
        f"the model ({config.model_type}) has {problem}, which the local engine does not support;"
        " use --rollout-engine sglang."
    )
