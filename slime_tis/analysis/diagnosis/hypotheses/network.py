"""Faults of the network: precision, rotary positions, norms and experts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Input, NetworkEdit

LARGEST_FP8 = 448.0
"""Largest number of torch.float8_e4m3fn."""
LARGEST_INT8 = 127.0
"""Largest number of a symmetric int8 type."""
LARGEST_INT4 = 7.0
"""Largest number of a symmetric int4 type."""
FP8_BLOCK = 128
"""Rows and columns of a block of weights with one scale."""
INT4_GROUP = 128
"""Neighboring weights of a row with one scale."""


@contextmanager
def changed(
    model: Any, change: Callable[[str, Tensor], Tensor], dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Changes the parameters of a model, and restores them at the end.

    Args:
        model: Of transformers.
        change: (name, value) → the new value.
        dtype: Of the new values; None keeps each parameter's dtype.
    """
    kept = [(name, parameter, parameter.data) for name, parameter in model.named_parameters()]
    try:
        for name, parameter, value in kept:
            # Another hypothesis may have cast the model before.
            parameter.data = change(name, value).to(dtype or value.dtype)
        yield
    finally:
        for _, parameter, value in kept:
            parameter.data = value


@contextmanager
def _attribute(model: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Changes an attribute of all modules that have it, and restores it at the end."""
    kept = [(module, getattr(module, name)) for module in model.modules() if hasattr(module, name)]
    try:
        for module, value in kept:
            setattr(module, name, change(value))
        yield
    finally:
        for module, value in kept:
            setattr(module, name, value)


def _inner_linear(model: Any) -> dict[str, Any]:
    """Returns the linear layers that engines quantize, by name: all but the output layer."""
    output_layer = model.get_output_embeddings()
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not output_layer:
            layers[name] = module
    return layers


def _bf16_matrices(model: Any, _: float) -> Any:
    """Matrices in bf16; norms and biases stay."""

    def change(_: str, weight: Tensor) -> Tensor:
        if weight.dim() != 2:
            return weight
        return weight.bfloat16().float()

    return changed(model, change)


def _quantized(rounding: Callable[[Tensor], Tensor]) -> NetworkEdit:
    """Linear layers and experts in low precision.

    Embeddings and the output layer stay, as in SGLang and vLLM.
    """

    def edit(model: Any, _: float) -> Any:
        linear = _inner_linear(model)

        def change(name: str, weight: Tensor) -> Tensor:
            is_linear = name.removesuffix(".weight") in linear
            if weight.dim() == 2 and (is_linear or ".experts." in name):
                return rounding(weight)
            if weight.dim() > 2 and ".experts." in name:
                # transformers stacks the experts of a layer.
                return torch.stack([rounding(expert) for expert in weight])
            return weight

        return changed(model, change)

    return edit


def _rounded(
    values: Tensor, dims: tuple[int, ...], largest: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Rounds values to a dtype, or to integers, with one scale for all values along `dims`."""
    scale = values.abs().amax(dims, keepdim=True).clamp_min(1e-12) / largest
    scaled = values / scale
    if dtype is None:
        return scaled.round() * scale
    return scaled.to(dtype).float() * scale


def _fp8_rows(weight: Tensor) -> Tensor:
    """Rounds a matrix to fp8 with a scale per row."""
    return _rounded(weight, (1,), LARGEST_FP8, torch.float8_e4m3fn)


def _fp8_tensor(weight: Tensor) -> Tensor:
    """Rounds a matrix to fp8 with one scale."""
    return _rounded(weight, (0, 1), LARGEST_FP8, torch.float8_e4m3fn)


def _fp8_blocks(weight: Tensor) -> Tensor:
    """Rounds a matrix to fp8 with a scale per block of 128 × 128 values."""
    rows, columns = weight.shape
    # Zeros do not change the largest value of a block.
    padded = pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    # [blocks of rows, 128, blocks of columns, 128]
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    small = _rounded(blocks, (1, 3), LARGEST_FP8, torch.float8_e4m3fn)
    return small.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def _int8_rows(weight: Tensor) -> Tensor:
    """Rounds a matrix to int8 with a scale per row."""
    return _rounded(weight, (1,), LARGEST_INT8)


def _int4_groups(weight: Tensor) -> Tensor:
    """Rounds a matrix to int4 with a scale per group of a row."""
    # A group must not cross rows.
    if weight.shape[1] % INT4_GROUP:
        return _rounded(weight, (1,), LARGEST_INT4)
    groups = weight.reshape(-1, INT4_GROUP)
    return _rounded(groups, (1,), LARGEST_INT4).reshape(weight.shape)


@contextmanager
def _fp8_linear(model: Any, _: float) -> Iterator[None]:
    """Weights in fp8 with a scale per row, and inputs in fp8 with a scale per token.

    The output layer keeps its weights and inputs.
    """

    def round_input(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values, *others = args
        small = _fp8_rows(values.flatten(0, -2)).reshape(values.shape)
        return (small.to(values.dtype), *others)

    with ExitStack() as stack:
        stack.enter_context(_quantized(_fp8_rows)(model, 1.0))
        for module in _inner_linear(model).values():
            stack.callback(module.register_forward_pre_hook(round_input).remove)
        yield


def _attention_scale(model: Any, factor: float) -> Any:
    """The scores of attention times a factor."""
    return _attribute(model, "scaling", lambda scale: scale * factor)


def _cast(dtype: torch.dtype) -> NetworkEdit:
    """Weights and arithmetic in a dtype; buffers, such as rotary frequencies, stay in float32."""
    return lambda model, _: changed(model, lambda _, weight: weight, dtype)


def _theta(frequency: Tensor, factor: float) -> Tensor:
    """Returns the frequencies θ^(−2i/d) for a θ that is larger by a factor."""
    index = torch.arange(len(frequency), device=frequency.device)
    return frequency * factor ** -(index / len(frequency))


def _dynamic(frequency: Tensor, factor: float) -> Tensor:
    """Returns the frequencies of SGLang for dynamic rope scaling.

    Unlike those of transformers, they do not depend on the length.
    """
    size = 2 * len(frequency)
    return _theta(frequency, (factor**2 - factor + 1) ** (size / (size - 2)))


def _rope(kind: str) -> NetworkEdit:
    """Another type of rope scaling, with the model's context length as the original one."""

    @contextmanager
    def edit(model: Any, factor: float) -> Iterator[None]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = deepcopy(model.config)
        parameters = dict(config.rope_parameters)
        parameters["rope_type"] = kind
        parameters["factor"] = factor
        parameters["original_max_position_embeddings"] = config.max_position_embeddings
        if kind == "llama3":
            parameters["low_freq_factor"] = 1.0
            parameters["high_freq_factor"] = 4.0
        config.rope_parameters = parameters
        # The table of transformers lacks the default type, which is a method of the module.
        rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
        initialize = ROPE_INIT_FUNCTIONS.get(kind, rotary.compute_default_rope_parameters)
        frequency, scale = initialize(config)
        frequency = frequency.to(model.device)
        with (
            _attribute(model, "inv_freq", lambda _: frequency),
            _attribute(model, "attention_scaling", lambda _: scale),
        ):
            yield

    return edit


def _replay(sample: Input, _: float, __: Sequence[Input]) -> Input:
    """The experts of the dump, with the model's weights for them."""
    experts = sample.experts
    if experts is None:
        return sample
    rows = slice(len(sample.tokens) - sample.response - 1, len(sample.tokens) - 1)

    @contextmanager
    def replayed(model: Any, _: float) -> Iterator[None]:
        with ExitStack() as stack:
            for layer, router in enumerate(_routers(model)):
                chosen = experts[:, layer].long().to(model.device)
                stack.callback(router.register_forward_hook(_routes_to(chosen, rows)).remove)
            yield

    return replace(sample, network=replayed)


def _routers(model: Any) -> list[Any]:
    """Returns the softmax routers, in the order of the layers."""
    routers = []
    for module in model.modules():
        if hasattr(module, "norm_topk_prob") and hasattr(module, "top_k"):
            routers.append(module)
    return routers


def _routes_to(chosen: Tensor, rows: slice) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Returns a hook on a softmax router, whose output is (logits, weights, experts) of all tokens.

    Args:
        chosen: [T, k] experts of the response; −1 if unknown.
        rows: The tokens [T] that predict the response.
    """

    def hook(
        router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = (tensor.clone() for tensor in output)
        is_recorded = (chosen >= 0).all(1, keepdim=True)
        chosen_weights = logits[rows].float().softmax(-1).gather(1, chosen.clamp_min(0))
        if router.norm_topk_prob:
            chosen_weights = chosen_weights / chosen_weights.sum(1, keepdim=True)
        chosen_weights = chosen_weights.to(weights.dtype)
        weights[rows] = torch.where(is_recorded, chosen_weights, weights[rows])
        experts[rows] = torch.where(is_recorded, chosen, experts[rows])
        return logits, weights, experts

    return hook


def for_model(model: Any, layers: int) -> dict[str, Hypothesis]:
    """Returns the hypotheses on parts that only some models have.

    Args:
        model: Of transformers.
        layers: Number of layers whose experts the dump records.
    """
    table = {}
    rope_parameters = getattr(model.config, "rope_parameters", None) or {}
    if rope_parameters.get("rope_type", "default") != "default":
        table["rope scaling missing"] = Hypothesis(
            "has no rope scaling", "position_drift", network=_rope("default")
        )
    if layers and len(_routers(model)) == layers:
        claim = "routes tokens to the experts that the dump records, unlike fp32"
        table["recorded experts"] = Hypothesis(claim, "moe_routing", inputs=_replay)
    return table


def _precision(claim: str, network: NetworkEdit) -> Hypothesis:
    """Returns the hypothesis on a precision."""
    return Hypothesis(claim, "rounding", network=network)


TABLE: dict[str, Hypothesis] = {
    "bf16": _precision("computes in bf16", _cast(torch.bfloat16)),
    "fp16": _precision("computes in fp16", _cast(torch.float16)),
    "bf16 weights": _precision("has weights in bf16", _bf16_matrices),
    "fp8 weights": _precision("has weights in fp8, with a scale per row", _quantized(_fp8_rows)),
    "fp8 weights per tensor": _precision(
        "has weights in fp8, with a scale per tensor", _quantized(_fp8_tensor)
    ),
    "fp8 weights in blocks": _precision(
        "has weights in fp8, with a scale per 128 × 128 values", _quantized(_fp8_blocks)
    ),
    "fp8 weights and activations": _precision(
        "multiplies in fp8, with scales per row and per token", _fp8_linear
    ),
    "int8 weights": _precision("has weights in int8", _quantized(_int8_rows)),
    "int4 weights": _precision("has weights in int4, in groups of 128", _quantized(_int4_groups)),
    "norm epsilon": Hypothesis(
        "uses a norm epsilon of {value:.1g}",
        "network_setting",
        (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1),
        network=lambda model, value: _attribute(model, "variance_epsilon", lambda _: value),
    ),
    "attention scale": Hypothesis(
        "scales the scores of attention by {value:.3g}",
        "attention_scale",
        (0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.5, 2.0),
        network=_attention_scale,
    ),
    "rope_theta": Hypothesis(
        "uses a rope_theta that is {value:.3g} times as large",
        "position_drift",
        (0.01, 0.1, 0.3, 0.6, 0.85, 1.15, 1.5, 3.0, 10.0, 100.0),
        network=lambda model, value: _attribute(model, "inv_freq", lambda f: _theta(f, value)),
    ),
    "linear rope scaling": Hypothesis(
        "scales positions by 1/{value:.3g} (linear rope scaling)",
        "position_drift",
        (0.5, 1.25, 1.5, 2.0, 4.0, 8.0),
        network=lambda model, value: _attribute(model, "inv_freq", lambda f: f / value),
    ),
    "dynamic rope scaling": Hypothesis(
        "uses dynamic rope scaling by {value:.0f}",
        "position_drift",
        (2, 4, 8),
        network=lambda model, value: _attribute(model, "inv_freq", lambda f: _dynamic(f, value)),
    ),
    "YaRN rope scaling": Hypothesis(
        "uses YaRN rope scaling by {value:.3g}",
        "position_drift",
        (2.0, 4.0, 8.0, 16.0),
        network=_rope("yarn"),
    ),
    "llama3 rope scaling": Hypothesis(
        "uses llama3 rope scaling by {value:.3g}",
        "position_drift",
        (2.0, 8.0, 32.0),
        network=_rope("llama3"),
    ),
}
