"""Weights cut into buckets, so that no second full copy of a model is held to move it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.rollout.engine import WeightSource


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Some weights that travel together."""

    names: list[str]
    """Hugging Face names."""

    tensors: list[Tensor]
    """Whole tensors, contiguous, as many as names."""

    last: bool
    """Whether no bucket follows."""


def buckets(source: WeightSource, limit: int, place: Callable[[Tensor], Tensor]) -> Iterator[Bucket]:
    """Cuts weights into buckets of at most `limit` bytes; a larger tensor has one of its own.

    The source is called at the first bucket, and consumed as far as the tensor after each and no further. Of what
    was handed out before nothing is held.

    Args:
      source: of the weights.
      limit: in bytes.
      place: moves a tensor to where it is needed, contiguous.

    Raises:
      ValueError: there are no weights.
    """
    names: list[str] = []
    tensors: list[Tensor] = []
    size = 0
    for name, whole in source():
        tensor = place(whole)
        if names and size + tensor.nbytes > limit:
            yield Bucket(names=names, tensors=tensors, last=False)
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
        del whole, tensor
    if not names:
        raise ValueError("there are no weights to send: the model has no parameters.")
    yield Bucket(names=names, tensors=tensors, last=True)


def source_thread(device: torch.device) -> ThreadPoolExecutor:
    """The one thread that weights are iterated on, with the device of this process as its own."""

    def use_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights", initializer=use_device)
