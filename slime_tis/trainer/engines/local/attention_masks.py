"""Attention masks for a pass over slots, in the form that a model of transformers takes."""

from typing import Any

import torch
from torch import Tensor

from slime_tis.families import attention_windows


def attention_masks(
    config: Any, positions_BT: Tensor, keys: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Returns masks [B, 1, T, keys]: 0 if a token sees a key, otherwise -inf.

    A model with layers of two types takes one mask for each type.

    Args:
        config: The model's configuration.
        positions_BT: Positions of the tokens; a key's position is its index.
        keys: Number of keys.
        dtype: The model's data type.
    """
    masks = {}
    for window in set(attention_windows(config)):
        kind = "full_attention" if window is None else "sliding_attention"
        masks[kind] = _mask(positions_BT, keys, window, dtype)
    if len(masks) == 1:
        (mask,) = masks.values()
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
