"""Records the experts that the routers of a Hugging Face model choose during sampling."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime_tis.hf_directory import MoeSizes
from slime_tis.trainer.data.sample import Sample

Routing = tuple[Tensor, Tensor]
"""Experts of every fed token and sparse layer, uint8 or int16 [..., tokens, layers, k], and their
combine weights."""


class RoutingRecorder:
    """A context manager that records which experts a model's routers choose.

    transformers calls `experts(hidden_states, indices, weights)` in every sparse layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._experts = [
            module for name, module in model.named_modules() if name.endswith(".mlp.experts")
        ]
        self._calls: list[tuple[Tensor, Tensor]] = []
        self._hooks: list[Any] = []
        self._dtype = expert_dtype(int(self._experts[0].num_experts))

    def __enter__(self) -> Self:
        self._hooks = [module.register_forward_pre_hook(self._record) for module in self._experts]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self, batch: int) -> Routing:
        """Returns [batch, tokens, layers, k] of the forward pass since the last call."""
        assert len(self._calls) == len(self._experts)
        experts_of_layers, weights_of_layers = zip(*self._calls, strict=True)
        self._calls = []
        experts = torch.stack(experts_of_layers, -2).to(self._dtype)
        weights = torch.stack(weights_of_layers, -2).float()
        return experts.unflatten(0, (batch, -1)), weights.unflatten(0, (batch, -1))

    def _record(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        _, indices, weights = args
        self._calls.append((indices, weights))


def expert_dtype(experts: int) -> torch.dtype:
    """The smallest integer type for this number of experts."""
    if experts <= 256:
        return torch.uint8
    return torch.int16


def has_usable_experts(sample: Sample, sizes: MoeSizes) -> bool:
    """Whether a sample's experts can be replayed: possible ones for every token but the last."""
    experts = sample.rollout_routed_experts
    shape = (len(sample.tokens) - 1, len(sizes.layers), sizes.top_k)
    if experts is None or experts.is_floating_point() or tuple(experts.shape) != shape:
        return False
    if experts.numel() == 0 or int(experts.min()) < 0 or int(experts.max()) >= sizes.num_experts:
        return False
    # A router chooses distinct experts. Sorted, a repeated expert is next to itself.
    ordered = experts.sort(-1).values
    return bool((ordered[..., 1:] != ordered[..., :-1]).all())


def has_usable_weights(sample: Sample) -> bool:
    """Whether every expert of a sample has a finite, non-negative combine weight."""
    experts = sample.rollout_routed_experts
    weights = sample.rollout_routing_weights
    if experts is None or weights is None or weights.shape != experts.shape:
        return False
    return bool((weights.isfinite() & (weights >= 0)).all())
