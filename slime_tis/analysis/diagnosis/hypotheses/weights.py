"""Faults whose cause is another checkpoint.

These are older or newer weights, adapters, draft models and caches of old weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, NetworkEdit
from slime_tis.analysis.diagnosis.hypotheses.network import changed
from slime_tis.errors import quoted_path
from slime_tis.peft_directory import read_adapter_config, read_adapter_tensors, tensor_name

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
    """Returns the weights that a LoRA adapter of PEFT changes, with the adapter added once.

    Args:
        directory: Of the adapter.
        own: Weights of the model without the adapter.

    Raises:
        ValueError: The directory has no plain LoRA adapter, or its adapter is of another model.
    """
    subject = f"the adapter is {quoted_path(directory)}"
    scale = read_adapter_config(directory, subject).scale
    tensors = read_adapter_tensors(directory, subject)
    layers = {name.rpartition(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    merged = {}
    for layer in sorted(layers):
        down = tensors[tensor_name(layer, "A")]
        up = tensors[tensor_name(layer, "B")]
        weight = own.get(f"{layer}.weight")
        if weight is None or list(weight.shape) != [len(up), down.shape[1]]:
            raise ValueError(
                f"{subject} but the model has no layer {layer} with {down.shape[1]} inputs and"
                f" {len(up)} outputs; it belongs to another model."
            )
        change = scale * (up.float() @ down.float())
        merged[f"{layer}.weight"] = weight + change.to(weight.device)
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
        # Equal tensors would only cost time in every hypothesis below.
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
        return table | _for_adapter_parts(path, different)
    table |= _for_parts(path, different)
    table |= _for_layers(path, different)
    table |= _for_unfinished_updates(path, different)
    table |= _for_shards(path, different)
    table |= _for_tied_output(path, own, different)
    claim = f"reads the prompt from a cache that has the weights of {_escaped(path)}"
    table[f"prompt cache of {path}"] = Hypothesis(
        claim, "stale_cache", inputs=lambda sample, *_: replace(sample, prompt_network=network)
    )
    return table


def _for_parts(path: str, different: Weights) -> dict[str, Hypothesis]:
    """Returns the hypotheses on the parts of a model that have a different tensor."""
    table: dict[str, Hypothesis] = {}
    for part, tensors in _tensors_by_part(different):
        table |= _part(part, path, tensors)
    return table


def _for_adapter_parts(path: str, different: Weights) -> dict[str, Hypothesis]:
    """Returns the hypotheses that a part of an adapter is missing, or is applied twice."""
    table: dict[str, Hypothesis] = {}
    parts = [*_tensors_by_part(different), *_projections(different), *_layer_ranges(different)]
    for part, tensors in parts:
        claim = f"applies the {part} of the adapter {_escaped(path)} {{value:+.3g}} times more"
        network = _towards(tensors)
        name = f"{part} of the adapter {path}"
        table[name] = Hypothesis(claim, CAUSE, (-1.0, 1.0), network=network)
    return table


def _tensors_by_part(different: Weights) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields the parts of a model with their tensors, if some tensors belong to other parts."""
    for part, words in PARTS.items():
        tensors = {}
        for name, weight in different.items():
            if any(word in name for word in words):
                tensors[name] = weight
        if 0 < len(tensors) < len(different):
            yield part, tensors


def _projections(different: Weights) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields the tensors of each projection, such as q_proj, unless there is only one."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, weight in different.items():
        projection = name.removesuffix(".weight").rpartition(".")[2]
        tensors.setdefault(projection, {})[name] = weight
    if len(tensors) > 1:
        yield from tensors.items()


def _layer_ranges(different: Weights) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields the tensors of halves and quarters of the layers, in their order."""
    layers = sorted({int(index) for index in map(_layer, different) if index})
    for count in (2, 4):
        if len(layers) < count:
            continue
        for number in range(count):
            start = number * len(layers) // count
            end = (number + 1) * len(layers) // count
            chosen = layers[start:end]
            tensors = {}
            for name, weight in different.items():
                if _layer(name) and int(_layer(name)) in chosen:
                    tensors[name] = weight
            yield _layer_title(chosen), tensors


def _layer_title(layers: Sequence[int]) -> str:
    """Returns "layer 3", or "layers 2 to 3"."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {layers[0]} to {layers[-1]}"


def _for_layers(path: str, different: Weights) -> dict[str, Hypothesis]:
    """Returns the hypothesis on a single layer; none if at most one layer is different."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, weight in different.items():
        index = _layer(name)
        if index:
            layers.setdefault(int(index), {})[name] = weight
    # With one changed layer this is the hypothesis on all changed weights.
    if len(layers) < 2:
        return {}

    def one_layer(model: Any, value: float) -> Any:
        return _towards(layers[round(value)])(model, 1.0)

    claim = f"has layer {{value:.0f}} of {_escaped(path)}"
    indices = tuple(sorted(layers))
    return {f"layer of {path}": Hypothesis(claim, CAUSE, indices, network=one_layer)}


def _for_unfinished_updates(path: str, different: Weights) -> dict[str, Hypothesis]:
    """Returns the hypotheses on half an update: it ended early, or its beginning is missing.

    Engines receive tensors in the order of the model, or read files that sort them by name.
    """
    table: dict[str, Hypothesis] = {}
    orders = {"": list(different), " by name": sorted(different)}
    count = len(different)
    grid = tuple(sorted({count * eighths // 8 for eighths in range(1, 8)} - {0}))
    if len(grid) < 2:
        return {}
    for order, names in orders.items():
        if order and names == orders[""]:
            continue
        claim = f"has only the first {{value:.0f}} of {count} tensors{order} of {_escaped(path)}"
        edit = partial(_exchange_part, different, names, is_first=True)
        table[f"first tensors{order} of {path}"] = Hypothesis(claim, CAUSE, grid, network=edit)
        claim = f"has {_escaped(path)} without the first {{value:.0f}} of {count} tensors{order}"
        edit = partial(_exchange_part, different, names, is_first=False)
        table[f"last tensors{order} of {path}"] = Hypothesis(claim, CAUSE, grid, network=edit)
    return table


def _exchange_part(
    different: Weights, names: Sequence[str], model: Any, value: float, *, is_first: bool
) -> Any:
    """The network with other weights in its first tensors, or in the others, of an order."""
    chosen = names[round(value) :]
    if is_first:
        chosen = names[: round(value)]
    return _towards({name: different[name] for name in chosen})(model, 1.0)


SHARDS = ((0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4))
"""Rank and size of tensor parallelism, by the value of the hypothesis."""
COLUMNS_SPLIT = ("o_proj", "down_proj")
"""Tensors whose columns tensor parallelism splits; of all other matrices it splits the rows."""


def _for_shards(path: str, different: Weights) -> dict[str, Hypothesis]:
    """Returns the hypothesis that one rank of tensor parallelism has the other weights."""

    def one_rank(model: Any, value: float) -> Any:
        rank, size = SHARDS[round(value)]

        def change(name: str, own: Tensor) -> Tensor:
            if name not in different or own.dim() != 2:
                return own
            dim = int(any(word in name for word in COLUMNS_SPLIT))
            return _with_shard(own, different[name].to(own), dim=dim, rank=rank, size=size)

        return changed(model, change)

    claim = f"has weights of {_escaped(path)} on one rank of tensor parallelism"
    indices = tuple(range(len(SHARDS)))
    return {f"shard of {path}": Hypothesis(claim, CAUSE, indices, network=one_rank)}


def _with_shard(own: Tensor, other: Tensor, *, dim: int, rank: int, size: int) -> Tensor:
    """Returns a matrix of which one rank's part has other values."""
    length = own.shape[dim]
    start = rank * length // size
    end = (rank + 1) * length // size
    changed_matrix = own.clone()
    changed_matrix.narrow(dim, start, end - start).copy_(other.narrow(dim, start, end - start))
    return changed_matrix


def _for_tied_output(path: str, own: Weights, different: Weights) -> dict[str, Hypothesis]:
    """Returns the hypothesis that a tied output layer keeps other weights than the embedding."""
    embedding = next((name for name in different if "embed_tokens" in name), "")
    tied = own.get("lm_head.weight")
    # transformers ties by sharing memory, so both names lead to the same data.
    if not embedding or tied is None or tied.data_ptr() != own[embedding].data_ptr():
        return {}

    @contextmanager
    def untied(model: Any, _: float) -> Iterator[None]:
        output_layer = model.get_output_embeddings()
        weight = output_layer.weight
        output_layer.weight = torch.nn.Parameter(
            different[embedding].to(weight), requires_grad=False
        )
        try:
            yield
        finally:
            output_layer.weight = weight

    claim = f"has the output layer of {_escaped(path)}, although it is tied to the embedding"
    return {f"tied output of {path}": Hypothesis(claim, CAUSE, network=untied)}


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
        # A negative inner product means that these values would increase the mismatch.
        if effect > 0:
            effects[name] = effect
    table: dict[str, Hypothesis] = {}
    for name in sorted(effects, key=lambda name: -effects[name])[:SUSPECTS]:
        table |= _part(name, path, {name: weights[name]})
        if weights[name].dim() == 2:
            table |= _half(name, path, weights[name])
    return table


def _half(name: str, path: str, weight: Tensor) -> dict[str, Hypothesis]:
    """Returns the hypothesis that half of the rows of a tensor have other values."""

    def one_half(model: Any, value: float) -> Any:
        def change(other_name: str, own: Tensor) -> Tensor:
            if other_name != name:
                return own
            return _with_shard(own, weight.to(own), dim=0, rank=round(value), size=2)

        return changed(model, change)

    claim = f"has half of the rows of {name} of {_escaped(path)}"
    return {f"half of {name} of {path}": Hypothesis(claim, CAUSE, (0, 1), network=one_half)}


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
