"""Faults of the network: precision, rotary positions, norms and experts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Input, NetworkEdit

LARGEST_FP8, BLOCK = 448.0, 128


@contextmanager
def changed(
    model: Any, change: Callable[[str, Tensor], Tensor], dtype: torch.dtype | None = None
) -> Iterator[None]:
    """The model with changed parameters, which are restored; their dtype stays unless another is given."""
    kept = [(name, parameter, parameter.data) for name, parameter in model.named_parameters()]
    try:
        for name, parameter, value in kept:
            parameter.data = change(name, value).to(
                dtype or value.dtype
            )  # another change may have cast the model
        yield
    finally:
        for _, parameter, value in kept:
            parameter.data = value


@contextmanager
def _attribute(model: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """The model with another value of an attribute of its modules, which is restored."""
    kept = [(module, getattr(module, name)) for module in model.modules() if hasattr(module, name)]
    try:
        for module, value in kept:
            setattr(module, name, change(value))
        yield
    finally:
        for module, value in kept:
            setattr(module, name, value)


def _inner_linear(model: Any) -> list[Any]:
    """The linear layers that engines quantize: all but the output layer."""
    output_layer = model.get_output_embeddings()
    return [
        each
        for each in model.modules()
        if isinstance(each, torch.nn.Linear) and each is not output_layer
    ]


def _bf16_matrices(model: Any, _: float) -> Any:
    """Norms and biases stay."""
    return changed(
        model, lambda _, weight: weight.bfloat16().float() if weight.dim() == 2 else weight
    )


def _quantized(rounding: Callable[[Tensor], Tensor]) -> NetworkEdit:
    """Linear layers and experts in low precision; embeddings and the output layer stay, as in SGLang and vLLM."""

    def edit(model: Any, _: float) -> Any:
        linear = {id(module.weight) for module in _inner_linear(model)}
        inner = {
            name
            for name, weight in model.named_parameters()
            if id(weight) in linear or ".experts." in name
        }

        def change(name: str, weight: Tensor) -> Tensor:
            if name not in inner or weight.dim() < 2:
                return weight
            return (
                rounding(weight)
                if weight.dim() == 2
                else torch.stack([rounding(each) for each in weight])
            )

        return changed(model, change)

    return edit


def _scaled(
    dtype: torch.dtype | None, largest: float, group: int = 0
) -> Callable[[Tensor], Tensor]:
    """Rounding with one scale per row, per group of a row, or per tensor (-1); to integers if `dtype` is None."""

    def rounding(weight: Tensor) -> Tensor:
        rows = weight.reshape(1, -1) if group < 0 else weight
        if group > 0 and weight.shape[1] % group == 0:
            rows = weight.reshape(-1, group)
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / largest
        scaled = rows / scale
        small = scaled.round() if dtype is None else scaled.to(dtype).float()
        return (small * scale).reshape(weight.shape)

    return rounding


_fp8_rows = _scaled(torch.float8_e4m3fn, LARGEST_FP8)


def _fp8_blocks(weight: Tensor) -> Tensor:
    """Rounding to fp8 with one scale per 128 × 128 values."""
    rows, columns = weight.shape
    padded = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / LARGEST_FP8
    small: Tensor = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return small.flatten(2, 3).flatten(0, 1)[:rows, :columns]


@contextmanager
def _fp8_linear(model: Any, _: float) -> Iterator[None]:
    """Weights in fp8 with a scale per row, and the inputs of all layers but the output layer with a scale per token."""

    def round_input(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (
            _fp8_rows(args[0].flatten(0, -2)).reshape(args[0].shape).to(args[0].dtype),
            *args[1:],
        )

    with ExitStack() as stack:
        stack.enter_context(_quantized(_fp8_rows)(model, 1.0))
        for module in _inner_linear(model):
            stack.callback(module.register_forward_pre_hook(round_input).remove)
        yield


def _cast(dtype: torch.dtype) -> NetworkEdit:
    """Weights and arithmetic in a dtype; buffers, such as rotary frequencies, stay in float32."""
    return lambda model, _: changed(model, lambda _, weight: weight, dtype)


def _theta(frequency: Tensor, factor: float) -> Tensor:
    """θ^(−2i/d) for a θ that is larger by a factor."""
    return frequency * factor ** -(
        torch.arange(len(frequency), device=frequency.device) / len(frequency)
    )


def _dynamic(frequency: Tensor, factor: float) -> Tensor:
    """The frequencies of SGLang and vLLM for dynamic rope scaling, which do not depend on the length."""
    size = 2 * len(frequency)
    return _theta(frequency, (factor**2 - factor + 1) ** (size / (size - 2)))


def _rope(kind: str) -> NetworkEdit:
    """Another type of rope scaling, with the model's context length as the original one."""

    @contextmanager
    def edit(model: Any, factor: float) -> Iterator[None]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = deepcopy(model.config)
        further = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
        length = {"original_max_position_embeddings": config.max_position_embeddings}
        config.rope_parameters = {
            **config.rope_parameters,
            "rope_type": kind,
            "factor": factor,
            **length,
            **further,
        }
        default = next(
            x.compute_default_rope_parameters for x in model.modules() if hasattr(x, "inv_freq")
        )
        frequency, scale = ROPE_INIT_FUNCTIONS.get(kind, default)(config)
        frequency = frequency.to(model.device)
        with (
            _attribute(model, "inv_freq", lambda _: frequency),
            _attribute(model, "attention_scaling", lambda _: scale),
        ):
            yield

    return edit


def _replay(sample: Input, _: float, __: Input) -> Input:
    """The experts of the dump, with the model's own weights of these experts."""
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
    return [
        module
        for module in model.modules()
        if hasattr(module, "norm_topk_prob") and hasattr(module, "top_k")
    ]


def _routes_to(chosen: Tensor, rows: slice) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A hook on a softmax router, which returns (logits, weights, experts) of all tokens."""

    def hook(
        router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = (x.clone() for x in output)
        known = (chosen >= 0).all(1, keepdim=True)
        own = logits[rows].float().softmax(-1).gather(1, chosen.clamp_min(0))
        own = own / own.sum(1, keepdim=True) if router.norm_topk_prob else own
        weights[rows] = torch.where(known, own.to(weights.dtype), weights[rows])
        experts[rows] = torch.where(known, chosen, experts[rows])
        return logits, weights, experts

    return hook


def for_model(model: Any, layers: int) -> dict[str, Hypothesis]:
    """The hypotheses on parts that only some models have; `layers` is the number of layers whose experts are known."""
    table = {}
    if (getattr(model.config, "rope_parameters", None) or {}).get(
        "rope_type", "default"
    ) != "default":
        table["rope scaling missing"] = Hypothesis(
            "has no rope scaling", "position_drift", network=_rope("default")
        )
    if layers and len(_routers(model)) == layers:
        claim = "routes tokens to the experts that the dump records, unlike fp32"
        table["recorded experts"] = Hypothesis(claim, "moe_routing", inputs=_replay)
    return table


_PRECISIONS: dict[str, tuple[str, NetworkEdit]] = {
    "bf16": ("computes in bf16", _cast(torch.bfloat16)),
    "fp16": ("computes in fp16", _cast(torch.float16)),
    "bf16 weights": ("has weights in bf16", _bf16_matrices),
    "fp8 weights": ("has weights in fp8, with a scale per row", _quantized(_fp8_rows)),
    "fp8 weights per tensor": (
        "has weights in fp8, with a scale per tensor",
        _quantized(_scaled(torch.float8_e4m3fn, LARGEST_FP8, -1)),
    ),
    "fp8 weights in blocks": (
        "has weights in fp8, with a scale per 128 × 128 values",
        _quantized(_fp8_blocks),
    ),
    "fp8 weights and activations": (
        "multiplies in fp8, with scales per row and per token",
        _fp8_linear,
    ),
    "int8 weights": ("has weights in int8", _quantized(_scaled(None, 127.0))),
    "int4 weights": (
        "has weights in int4, in groups of 128",
        _quantized(_scaled(None, 7.0, BLOCK)),
    ),
}
TABLE: dict[str, Hypothesis] = {
    **{
        name: Hypothesis(claim, "rounding", network=edit)
        for name, (claim, edit) in _PRECISIONS.items()
    },
    "norm epsilon": Hypothesis(
        "uses a norm epsilon of {value:.1g}",
        "rounding",
        (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1),
        network=lambda m, value: _attribute(m, "variance_epsilon", lambda _: value),
    ),
    "rope_theta": Hypothesis(
        "uses a rope_theta that is {value:.3g} times as large",
        "position_drift",
        (0.01, 0.1, 0.3, 0.6, 0.85, 1.15, 1.5, 3.0, 10.0, 100.0),
        network=lambda m, value: _attribute(m, "inv_freq", lambda f: _theta(f, value)),
    ),
    "linear rope scaling": Hypothesis(
        "scales positions by 1/{value:.3g} (linear rope scaling)",
        "position_drift",
        (0.5, 1.25, 1.5, 2.0, 4.0, 8.0),
        network=lambda m, value: _attribute(m, "inv_freq", lambda f: f / value),
    ),
    "dynamic rope scaling": Hypothesis(
        "uses dynamic rope scaling by {value:.0f}",
        "position_drift",
        (2, 4, 8),
        network=lambda m, value: _attribute(m, "inv_freq", lambda f: _dynamic(f, value)),
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
