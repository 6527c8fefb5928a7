"""Faults of the network: weights, layers, attention and caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies.diagnosis.held_out.engines import Engine, Reading, Sample, plain
from studies.diagnosis.held_out.models import World

Build = Callable[[World, Engine], Engine]
Change = Callable[[Any], object]
"""Changes a model in place."""


def on_model(change: Change) -> Build:
    def build(world: World, engine: Engine) -> Engine:
        def model(step: int) -> Any:
            changed = engine.model(step)
            with torch.no_grad():
                change(changed)
            return changed

        return replace(engine, model=model)

    return build


def on_layers(change: Change) -> Build:
    """The same change in every layer."""

    def every(model: Any) -> None:
        for layer in model.model.layers:
            change(layer)

    return on_model(every)


def on_last_layer(change: Change) -> Build:
    return on_model(lambda model: change(model.model.layers[-1]))


# Weights of other steps


def weights_of(pick: Callable[[int], int]) -> Build:
    """The weights of step pick(step), within the run."""

    def build(world: World, engine: Engine) -> Engine:
        last = world.steps - 1
        return replace(engine, model=lambda step: world.at(min(max(pick(step), 0), last)))

    return build


def mixed_weights(mix: Callable[[World, int, str, Tensor], Tensor]) -> Build:
    """Every tensor is mix(world, step, name, present value)."""

    def build(world: World, engine: Engine) -> Engine:
        def model(step: int) -> Any:
            changed = world.at(step)
            state = {}
            for name, value in world.weights[step].items():
                state[name] = mix(world, step, name, value)
            changed.load_state_dict(state)
            return changed

        return replace(engine, model=model)

    return build


def first_if(chosen: Callable[[str], bool]) -> Build:
    """Tensors whose names are chosen keep their first values."""

    def mix(world: World, step: int, name: str, value: Tensor) -> Tensor:
        return world.weights[0][name] if chosen(name) else value

    return mixed_weights(mix)


def stale_rows(world: World, step: int, name: str, value: Tensor) -> Tensor:
    """Half of the rows of MLP projections: one of two tensor-parallel ranks."""
    if "gate_proj" not in name and "up_proj" not in name:
        return value
    mixed = value.clone()
    half = len(value) // 2
    mixed[half:] = world.weights[0][name][half:]
    return mixed


def scaled_difference(factor: float) -> Callable[[World, int, str, Tensor], Tensor]:
    def mix(world: World, step: int, name: str, value: Tensor) -> Tensor:
        first = world.weights[0][name]
        return first + factor * (value - first)

    return mix


def averaged(world: World, step: int, name: str, value: Tensor) -> Tensor:
    """Mean of all steps so far, as a moving average that is too slow."""
    total = torch.zeros_like(value)
    for weights in world.weights[: step + 1]:
        total += weights[name]
    return total / (step + 1)


def untied_head(world: World, engine: Engine) -> Engine:
    """The head of a tied model keeps the first embeddings."""

    def model(step: int) -> Any:
        changed = world.at(step)
        first = world.weights[0]["model.embed_tokens.weight"]
        head = nn.Linear(first.shape[1], first.shape[0], bias=False)
        head.weight = nn.Parameter(first.clone(), requires_grad=False)
        changed.lm_head = head
        return changed

    return replace(engine, model=model)


def stale_prompt_cache(world: World, engine: Engine) -> Engine:
    """Keys and values of the prompt are of the first weights: no flush after updates."""

    def read(sample: Sample) -> list[Reading]:
        readings = plain(sample)
        readings[0].stale_prefix = len(sample.task.prompt) - 1
        return readings

    first = world.at(0)
    return replace(engine, read=read, cache_model=lambda _: first)


# Layers


def exchange_layers(model: Any) -> None:
    layers = model.model.layers
    second = layers[1]
    layers[1] = layers[2]
    layers[2] = second


def with_activation(activation: Callable[[], nn.Module]) -> Change:
    def change(layer: Any) -> None:
        layer.mlp.act_fn = activation()

    return change


def exchange_gate(layer: Any) -> None:
    gate = layer.mlp.gate_proj
    layer.mlp.gate_proj = layer.mlp.up_proj
    layer.mlp.up_proj = gate


def interleave_kv_heads(layer: Any) -> None:
    """Query head h uses KV head h mod 2 instead of h // 2."""
    attention = layer.self_attn
    size = attention.head_dim
    order = torch.tensor([0, 2, 1, 3])
    attention.q_proj.weight.copy_(by_head(attention.q_proj.weight, size, order))
    if attention.q_proj.bias is not None:
        attention.q_proj.bias.copy_(by_head(attention.q_proj.bias, size, order))
    columns = by_head(attention.o_proj.weight.T, size, order)
    attention.o_proj.weight.copy_(columns.T)


def by_head(rows: Tensor, size: int, order: Tensor) -> Tensor:
    """Rows in another order of heads."""
    return rows.clone().unflatten(0, (-1, size))[order].flatten(0, 1)


def exchange_heads(layer: Any) -> None:
    """Columns of the output projection in another order of heads."""
    weight = layer.self_attn.o_proj.weight
    columns = by_head(weight.T, layer.self_attn.head_dim, torch.tensor([1, 0, 2, 3]))
    weight.copy_(columns.T)


def scale_attention(factor: float) -> Change:
    def change(layer: Any) -> None:
        layer.self_attn.scaling *= factor

    return change


def interleave_rope(layer: Any) -> None:
    """Pairs of neighboring dimensions are rotated, as GPT-J does, and not the two halves."""
    attention = layer.self_attn
    size = attention.head_dim
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    for projection in (attention.q_proj, attention.k_proj):
        rows = projection.weight.clone().unflatten(0, (-1, size))
        projection.weight.copy_(rows[:, order].flatten(0, 1))


def partial_rotary(model: Any) -> None:
    """Only the faster half of the frequencies rotates."""

    def hook(_: Any, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cosine = output[0].clone()
        sine = output[1].clone()
        quarter = cosine.shape[-1] // 4
        slow = torch.zeros(cosine.shape[-1], dtype=torch.bool)
        slow[quarter : 2 * quarter] = True
        slow[3 * quarter :] = True
        return cosine.masked_fill(slow, 1.0), sine.masked_fill(slow, 0.0)

    model.model.rotary_emb.register_forward_hook(hook)


def rope_theta(factor: float) -> Change:
    def change(model: Any) -> None:
        frequencies = model.model.rotary_emb.inv_freq
        exponents = torch.arange(len(frequencies)) / len(frequencies)
        frequencies.mul_(factor**-exponents)

    return change


def linear_rope(factor: float) -> Change:
    def change(model: Any) -> None:
        model.model.rotary_emb.inv_freq.div_(factor)

    return change


def norm_epsilon(epsilon: float) -> Change:
    def change(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = epsilon

    return change


def reset_norm(layer: Any) -> None:
    layer.post_attention_layernorm.weight.fill_(1.0)
    layer.input_layernorm.weight.fill_(1.0)


def drop_query_bias(layer: Any) -> None:
    layer.self_attn.q_proj.bias.zero_()
    layer.self_attn.k_proj.bias.zero_()
    layer.self_attn.v_proj.bias.zero_()


def drop_query_norm(layer: Any) -> None:
    layer.self_attn.q_norm.weight.fill_(1.0)
    layer.self_attn.k_norm.weight.fill_(1.0)


def hooked(pick: Callable[[Any], nn.Module], change: Callable[[Tensor], Tensor]) -> Build:
    """The output of a module is changed."""

    def hook(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    return on_model(lambda model: pick(model).register_forward_hook(hook))


def hooked_layers(pick: Callable[[Any], nn.Module], change: Callable[[Tensor], Tensor]) -> Build:
    def hook(_: Any, __: Any, output: Tensor) -> Tensor:
        return change(output)

    return on_layers(lambda layer: pick(layer).register_forward_hook(hook))


def skip(index: int) -> Build:
    """The layer returns its input."""

    def hook(_: Any, inputs: tuple[Tensor, ...], __: Any) -> Tensor:
        return inputs[0]

    return on_model(lambda model: model.model.layers[index].register_forward_hook(hook))


def norm_twice(model: Any) -> None:
    norm = copy.deepcopy(model.model.norm)

    def hook(_: Any, __: Any, output: Tensor) -> Tensor:
        return norm(output)

    model.model.norm.register_forward_hook(hook)


def dropout(share: float) -> Callable[[Tensor], Tensor]:
    return lambda x: F.dropout(x, share, training=True)


# Single weights


def exchange_embeddings(model: Any) -> None:
    weight = model.model.embed_tokens.weight
    order = torch.arange(len(weight))
    order[20:40] = order[20:40].roll(1)
    model.model.embed_tokens.weight = nn.Parameter(weight[order], requires_grad=False)


def coarse_embeddings(model: Any) -> None:
    """Input embeddings in int3; a tied head keeps its precision."""
    weight = model.model.embed_tokens.weight
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 3  # the row of PAD is 0
    rounded = (weight / scale).round() * scale
    model.model.embed_tokens.weight = nn.Parameter(rounded, requires_grad=False)


def scale_projection(layer: Any) -> None:
    """The scale of an fp8 matrix is of an older step."""
    layer.mlp.down_proj.weight.mul_(1.2)


def zero_block(layer: Any) -> None:
    weight = layer.mlp.down_proj.weight
    weight[: len(weight) // 4] = 0.0


def flip_bit(layer: Any) -> None:
    layer.self_attn.v_proj.weight[3, 5] = 6.0


def shake_weights(model: Any) -> None:
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.05 * parameter * noise)


def with_cache(change: Callable[[Tensor], Tensor]) -> Build:
    return lambda _, engine: replace(engine, rounded_cache=change)
