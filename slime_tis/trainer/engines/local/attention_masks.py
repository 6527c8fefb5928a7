"""Attention masks for a pass over slots, in the form that a model of transformers takes."""

from typing import Any

import torch
from torch import Tensor

from slime_tis.families import attention_windows, delta_net_layers


def attention_masks(
    config: Any,
    positions_BT: Tensor,
    keys: int,
    dtype: torch.dtype,
    is_fed_BT: Tensor | None = None,
) -> Tensor | dict[str, Tensor | None]:
    """Returns masks [B, 1, T, keys]: 0 if a token sees a key, otherwise -inf.

    A model with layers of two types takes one mask for each type. Gated delta nets take which
    tokens are no padding.

    Args:
        config: The model's configuration.
        positions_BT: Positions of the tokens; a key's position is its index.
        keys: Number of keys.
        dtype: The model's data type.
        is_fed_BT: False for padding; None without any.
    """
    masks: dict[str, Tensor | None] = {}
    for window in set(attention_windows(config)):
        kind = "full_attention" if window is None else "sliding_attention"
        masks[kind] = _mask(positions_BT, keys, window, dtype)
    if delta_net_layers(config):
        masks["linear_attention"] = is_fed_BT
    elif len(masks) == 1:
        (mask,) = masks.values()
        assert mask is not None
        return mask
    return masks


def _mask(positions_BT: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    key_positions = torch.arange(keys, device=positions_BT.device)
    own_BT1 = positions_BT[:, :, None]
    allowed = key_positions <= own_BT1
    if window is not None:
        allowed &= key_positions > own_BT1 - window
    mask = torch.zeros(allowed.shape, dtype=dtype, device=positions_BT.device)
    mask.masked_fill_(~allowed, -torch.inf)
    return mask[:, None]
