"""What callers pass: lists, padded batches or packed tokens of log-probs and masks, refused where they do not fit."""

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

LogProbs = Tensor | Sequence[Tensor | None]

NAMES = ("train_log_probs", "rollout_log_probs", "loss_mask")


def checked_tensors(train: Tensor, rollout: object, mask: object) -> tuple[Tensor, Tensor, Tensor]:
    """Train and rollout log-probs and the mask, as they are.

    Raises:
        ValueError: if they are not three dense tensors of one shape on one device, log-probs of floating point.
    """
    if not isinstance(rollout, Tensor) or not isinstance(mask, Tensor):
        raise ValueError(
            f"train_log_probs is a tensor but rollout_log_probs is {type(rollout).__name__} and "
            f"loss_mask is {type(mask).__name__}; pass three tensors of one shape, or three lists."
        )
    tensors = (train, rollout, mask)
    for name, x in zip(NAMES, tensors, strict=True):
        check_tensor(name, x, train.device)
    shapes = [tuple(x.shape) for x in tensors]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"train_log_probs has shape {shapes[0]}, rollout_log_probs {shapes[1]}, loss_mask {shapes[2]}; "
            f"pass three tensors of one shape."
        )
    return tensors


def checked_lists(
    train_log_probs: LogProbs, rollout_log_probs: LogProbs, loss_mask: LogProbs
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Train and rollout log-probs and the mask as lists of [T_i], None in the rollout list replaced by NaN.

    Raises:
        ValueError: if they are not three lists of dense one-dimensional tensors on one device, log-probs of floating
            point, with one length per sequence.
    """
    given = (train_log_probs, rollout_log_probs, loss_mask)
    lists = [list(x) for x in given if isinstance(x, Sequence) and not isinstance(x, str)]
    if len(lists) < len(given):
        kinds = ", ".join(f"{name} is {type(x).__name__}" for name, x in zip(NAMES, given, strict=True))
        raise ValueError(f"{kinds}; pass three tensors of one shape, or three lists of tensors.")
    counts = [len(x) for x in lists]
    if len(set(counts)) > 1:
        raise ValueError(
            f"train_log_probs has {counts[0]} sequences, rollout_log_probs {counts[1]}, loss_mask {counts[2]}; "
            f"pass one of each per sequence."
        )
    device = lists[0][0].device if lists[0] and isinstance(lists[0][0], Tensor) else torch.device("cpu")
    train = [check_tensor(f"{NAMES[0]}[{i}]", x, device, dimensions=1) for i, x in enumerate(lists[0])]
    rollout = [
        None if x is None else check_tensor(f"{NAMES[1]}[{i}]", x, device, dimensions=1) for i, x in enumerate(lists[1])
    ]
    mask = [check_tensor(f"{NAMES[2]}[{i}]", x, device, dimensions=1) for i, x in enumerate(lists[2])]
    filled = _filled(train, rollout, device)
    for i, sizes in enumerate(zip(*([x.numel() for x in xs] for xs in (train, filled, mask)), strict=True)):
        if len(set(sizes)) > 1:
            raise ValueError(
                f"sequence {i}: train_log_probs has {sizes[0]} tokens, rollout_log_probs {sizes[1]}, "
                f"loss_mask {sizes[2]}; pass tensors of one length per sequence."
            )
    return train, filled, mask


def _filled(train: Sequence[Tensor], rollout: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
    """Returns rollout log-probs, with NaN for samples without any, in one allocation."""
    sizes = [t.numel() for t, r in zip(train, rollout, strict=True) if r is None]
    absent = iter(torch.full((sum(sizes),), torch.nan, device=device).split(sizes) if sizes else ())
    return [next(absent) if x is None else x for x in rollout]


def checked_lengths(lengths: Iterable[SupportsIndex], shape: tuple[int, ...]) -> list[int]:
    """The lengths of packed sequences as whole numbers.

    Raises:
        ValueError: if they are none, or do not sum to the tokens there are.
    """
    try:
        numbers = [operator.index(length) for length in lengths]
    except TypeError as error:
        raise ValueError(f"lengths is {repr(lengths)[:80]}; pass one whole number per sequence.") from error
    if len(shape) != 1 or any(number < 0 for number in numbers) or sum(numbers) != shape[0]:
        raise ValueError(
            f"lengths sum to {sum(numbers)} but the tensors have shape {shape}; "
            f"pass packed [N] tensors with lengths that sum to N, none below 0."
        )
    return numbers


def check_tensor(name: str, x: object, device: torch.device, dimensions: int | None = None) -> Tensor:
    """The tensor itself.

    Args:
        name: What a message calls it; a mask's begins with loss_mask.
        x: What was passed.
        device: That it has to be on.
        dimensions: That it has to have; any number when None.

    Raises:
        ValueError: if it is not a dense tensor of this kind, or log-probs are not of floating point.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {type(x).__name__}; pass a tensor.")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has layout {x.layout}; pass a dense tensor.")
    if dimensions is not None and x.dim() != dimensions:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; pass one dimension per sequence, [T].")
    if x.dtype.is_complex if name.startswith("loss_mask") else not x.dtype.is_floating_point:
        wanted = "bool, integers or floats" if name.startswith("loss_mask") else "floating-point log-probs"
        raise ValueError(f"{name} has dtype {x.dtype}; pass {wanted}.")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} but train_log_probs on {device}; pass all of them on one device.")
    return x
