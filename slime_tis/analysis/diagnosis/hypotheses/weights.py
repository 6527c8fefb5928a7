"""Faults whose cause is another checkpoint: weights or tensors of another step, adapters, draft models, old caches."""

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
PARTS = {
    "output layer": ("lm_head", "embed_tokens"),
    "attention": ("attn",),
    "MLP": ("mlp",),
    "norms": ("norm",),
}
"""Parts of a model, and words in the names of their tensors."""
FRACTIONS = (-3.0, -1.0, -0.5, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SUSPECTS = 6
"""Single tensors that are tried."""


def read_adapter(directory: str, own: Weights) -> dict[str, Tensor]:
    """The tensors that a LoRA adapter of peft changes, with the adapter added once.

    Raises:
        ValueError: The directory has no LoRA adapter of the model, or one with tensors that plain
            LoRA does not have (DoRA, biases, trained embeddings), or with NaN or infinity.
    """
    from safetensors.torch import load_file

    merged = {}
    try:
        config = json.loads((Path(directory) / "adapter_config.json").read_text())
        rank = config["r"]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        tensors = load_file(Path(directory) / "adapter_model.safetensors")
        for name in (name for name in tensors if name.endswith(".lora_A.weight")):
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            up, down = tensors[name.replace(".lora_A.", ".lora_B.")], tensors[name]
            merged[target] = own[target] + scale * (up.float() @ down.float())
    except Exception as error:  # safetensors raises its own exception class
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
    """The hypothesis on a model of another architecture with the same vocabulary."""

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
    """The hypotheses on the weights of another step, or on an adapter."""
    different = {
        name: w for name, w in weights.items() if name in own and not torch.equal(own[name], w)
    }
    if not different:
        return {}
    claim = f"has the weights of {_escaped(path)}, {{value:.3g}} of the way"
    if is_adapter:
        claim = f"applies the adapter {_escaped(path)} {{value:+.3g}} times more"
    cause, network = "weights_not_updated", _towards(different)
    table = {f"weights of {path}": Hypothesis(claim, cause, FRACTIONS, network=network)}
    if is_adapter:
        return table
    for part, words in PARTS.items():
        some = {name: w for name, w in different.items() if any(word in name for word in words)}
        if some and len(some) < len(different):
            table |= _part(part, path, some)
    layers = sorted({int(found) for name in different if (found := _layer(name))})
    if len(layers) > 1:

        def one_layer(model: Any, value: float) -> Any:
            return _towards(
                {name: w for name, w in different.items() if _layer(name) == f"{value:.0f}"}
            )(model, 1.0)

        claim = f"has layer {{value:.0f}} of {_escaped(path)}"
        table[f"layer of {path}"] = Hypothesis(claim, cause, tuple(layers), network=one_layer)
    claim = f"reads the prompt from a cache that has the weights of {_escaped(path)}"
    table[f"prompt cache of {path}"] = Hypothesis(
        claim, "stale_cache", inputs=lambda sample, *_: replace(sample, prompt_network=network)
    )
    return table


def for_tensors(
    path: str, own: Weights, weights: Weights, gradient: Weights
) -> dict[str, Hypothesis]:
    """The hypotheses on single tensors of another step: those whose first-order effect fits the mismatch best.

    `gradient` is of Σ_t change_t · log π_t, whose product with the difference of a tensor is the
    inner product of the mismatch and the tensor's first-order effect.
    """
    effect = {
        name: float((gradient[name] * (weights[name].to(own[name]) - own[name])).sum())
        for name in gradient.keys() & weights.keys()
    }
    best = sorted((name for name in effect if effect[name] > 0), key=lambda name: -effect[name])[
        :SUSPECTS
    ]
    return {
        key: each for name in best for key, each in _part(name, path, {name: weights[name]}).items()
    }


def _part(part: str, path: str, weights: Weights) -> dict[str, Hypothesis]:
    claim = f"has the {part} of {_escaped(path)}"
    return {
        f"{part} of {path}": Hypothesis(
            claim, "weights_not_updated", (1.0,), network=_towards(weights)
        )
    }


def _towards(weights: Weights) -> NetworkEdit:
    """Each tensor moved by a fraction of the way to other weights."""

    def edit(model: Any, value: float) -> Any:
        def change(name: str, own: Tensor) -> Tensor:
            return own if name not in weights else own.lerp(weights[name].to(own), value)

        return changed(model, change)

    return edit


def _layer(name: str) -> str:
    """The index of the layer of a tensor; empty outside the layers."""
    words = name.split(".")
    return next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "layers"), "")


def _escaped(path: str) -> str:
    return path.replace("{", "{{").replace("}", "}}")
