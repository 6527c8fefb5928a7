"""Faults whose cause is another checkpoint.

These are older or newer weights, adapters, draft models and caches of old weights.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, NetworkEdit
from slime_tis.analysis.diagnosis.hypotheses.network import changed
from slime_tis.errors import first_line, quoted_path

Weights = Mapping[str, Tensor]
"""Tensors by name."""
PARTS = {
    "output layer": ("lm_head", "embed_tokens"),
    "attention": ("attn",),
    "MLP": ("mlp",),
    "norms": ("norm",),
}
"""Words in the names of a part's tensors, by part."""
FRACTIONS = (-3.0, -1.0, -0.5, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Grid of the fraction of the way to the other weights."""
CAUSE = "weights_not_updated"
"""Cause of the hypotheses on older or newer weights."""
SUSPECTS = 6
"""Number of single tensors that are tried."""


def read_adapter(directory: str, own: Weights) -> dict[str, Tensor]:
    """Returns the tensors that a LoRA adapter of peft changes, with the adapter added once.

    Raises:
        ValueError: The directory has no LoRA adapter of the model, or one with tensors that plain
            LoRA does not have (DoRA, biases, trained embeddings), or with NaN or infinity.
    """
    from safetensors.torch import load_file

    merged = {}
    try:
        config = json.loads((Path(directory) / "adapter_config.json").read_text())
        divisor = config["r"]
        if config.get("use_rslora"):
            divisor = math.sqrt(divisor)
        scale = config["lora_alpha"] / divisor
        tensors = load_file(Path(directory) / "adapter_model.safetensors")
        for name, down in tensors.items():
            if name.endswith(".lora_A.weight"):
                target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
                up = tensors[name.replace(".lora_A.", ".lora_B.")]
                merged[target] = own[target] + scale * (up.float() @ down.float())
    except Exception as error:
        # Broken files raise many types of errors, also one that only safetensors has.
        message = f"{quoted_path(directory)} is no LoRA adapter of this model"
        raise ValueError(f"{message}: {type(error).__name__}, {first_line(error)}.") from error
    if not merged:
        raise ValueError(f"{quoted_path(directory)} has no tensors lora_A and lora_B.")
    for name, tensor in tensors.items():
        if not name.endswith((".lora_A.weight", ".lora_B.weight")):
            raise ValueError(
                f"{quoted_path(directory)} has the tensor {name}, which plain LoRA does not have."
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{quoted_path(directory)} holds NaN or infinity in {name}.")
    return merged


def for_model(path: str, other: Any) -> dict[str, Hypothesis]:
    """Returns the hypothesis on a different model with the same vocabulary."""

    @contextmanager
    def swapped(model: Any, _: float) -> Iterator[None]:
        model.forward = other.forward
        try:
            yield
        finally:
            del model.forward

    claim = f"reports the log-probs of the model {_escaped(path)} (a draft model?)"
    return {f"model {path}": Hypothesis(claim, "other_model", network=swapped)}


def for_weights(
    path: str, own: Weights, weights: Weights, *, is_adapter: bool = False
) -> dict[str, Hypothesis]:
    """Returns the hypotheses on older or newer weights, or on an adapter.

    Args:
        path: Of the weights, for the claims.
        own: Weights of the reference.
        weights: The other weights.
        is_adapter: Whether they come from an adapter.
    """
    different = {}
    for name, weight in weights.items():
        if name in own and not torch.equal(own[name], weight):
            different[name] = weight
    if not different:
        return {}
    claim = f"has the weights of {_escaped(path)}, {{value:.3g}} of the way"
    if is_adapter:
        claim = f"applies the adapter {_escaped(path)} {{value:+.3g}} times more"
    network = _towards(different)
    table = {f"weights of {path}": Hypothesis(claim, CAUSE, FRACTIONS, network=network)}
    if is_adapter:
        return table
    table |= _for_parts(path, different)
    table |= _for_layers(path, different)
    claim = f"reads the prompt from a cache that has the weights of {_escaped(path)}"
    table[f"prompt cache of {path}"] = Hypothesis(
        claim, "stale_cache", inputs=lambda sample, *_: replace(sample, prompt_network=network)
    )
    return table


def _for_parts(path: str, different: Weights) -> dict[str, Hypothesis]:
    """Returns the hypotheses on the parts of a model that have a different tensor."""
    table: dict[str, Hypothesis] = {}
    for part, words in PARTS.items():
        tensors = {}
        for name, weight in different.items():
            if any(word in name for word in words):
                tensors[name] = weight
        if 0 < len(tensors) < len(different):
            table |= _part(part, path, tensors)
    return table


def _for_layers(path: str, different: Weights) -> dict[str, Hypothesis]:
    """Returns the hypothesis on a single layer; none if at most one layer is different."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, weight in different.items():
        index = _layer(name)
        if index:
            layers.setdefault(int(index), {})[name] = weight
    if len(layers) < 2:
        return {}

    def one_layer(model: Any, value: float) -> Any:
        return _towards(layers[round(value)])(model, 1.0)

    claim = f"has layer {{value:.0f}} of {_escaped(path)}"
    indices = tuple(sorted(layers))
    return {f"layer of {path}": Hypothesis(claim, CAUSE, indices, network=one_layer)}


def for_tensors(
    path: str, own: Weights, weights: Weights, gradient: Weights
) -> dict[str, Hypothesis]:
    """Returns the hypotheses on the single tensors whose first-order effect fits the mismatch best.

    Args:
        path: Of the weights, for the claims.
        own: Weights of the reference.
        weights: Older or newer weights.
        gradient: Of Σ_t change_t · log π_t. Its product with the difference of a tensor is the
            inner product of the mismatch and the tensor's first-order effect.
    """
    effects = {}
    for name in gradient.keys() & weights.keys():
        difference = weights[name].to(own[name]) - own[name]
        effect = float((gradient[name] * difference).sum())
        if effect > 0:
            effects[name] = effect
    table: dict[str, Hypothesis] = {}
    for name in sorted(effects, key=lambda name: -effects[name])[:SUSPECTS]:
        table |= _part(name, path, {name: weights[name]})
    return table


def _part(part: str, path: str, weights: Weights) -> dict[str, Hypothesis]:
    """Returns the hypothesis on some tensors of other weights."""
    claim = f"has the {part} of {_escaped(path)}"
    return {f"{part} of {path}": Hypothesis(claim, CAUSE, (1.0,), network=_towards(weights))}


def _towards(weights: Weights) -> NetworkEdit:
    """Each tensor moved by a fraction of the way to other weights."""

    def edit(model: Any, value: float) -> Any:
        def change(name: str, own: Tensor) -> Tensor:
            if name not in weights:
                return own
            return own.lerp(weights[name].to(own), value)

        return changed(model, change)

    return edit


def _layer(name: str) -> str:
    """Returns the index of a tensor's layer; empty outside the layers."""
    _, _, after = f".{name}".partition(".layers.")
    return after.partition(".")[0]


def _escaped(path: str) -> str:
    """Returns a path as text of a template."""
    return path.replace("{", "{{").replace("}", "}}")
