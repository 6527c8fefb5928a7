"""Faults of an engine as changes of a reference scorer: one table entry each, with a parameter to fit.

A hypothesis changes the scorer at one of four places: the network, its input, its logits, or the reported log-probs.

Shapes: T response tokens, V vocabulary entries, S tokens of prompt and response.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Input:
    """What the network reads for one sample; the response is at the end."""

    tokens: Tensor
    """[S] token ids."""
    response: int
    """Number of response tokens."""
    positions: Tensor
    """[S] position ids."""
    mask: Tensor | None = None
    """[S, S] bool, which keys a query attends to; None means all earlier ones."""
    cache: Any = None
    """A cache of keys and values, for the hypotheses that change it."""


NetworkEdit = Callable[[Any, float], AbstractContextManager[None]]
PromptEdit = Callable[[Tensor, int], Tensor]
"""(token ids of the prompt, value) → the prompt that the engine reads; an empty one leaves the prompt as it is."""
InputEdit = Callable[[Input, float, Input], Input]
"""(sample, value, the sample before it) → what the engine reads."""
LogitsEdit = Callable[[Tensor, Input, float], Tensor]
"""(logits [T, V] at the dump's temperature, sample, value) → the engine's logits."""
OutputEdit = Callable[[list[Tensor], float], list[Tensor]]
"""(log-probs [T] of every sample, value) → the reported ones."""


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One fault."""

    claim: str
    """What the engine does, a template with `value`."""
    cause: str
    """Its cause in `CAUSES`, which has the advice."""
    values: tuple[float, ...] = (0.0,)
    """Grid of the parameter; one value where there is none."""
    whole: bool = False
    """Whether the parameter is an integer."""
    network: NetworkEdit | None = None
    prompt: PromptEdit | None = None
    inputs: InputEdit | None = None
    logits: LogitsEdit | None = None
    outputs: OutputEdit | None = None

    @property
    def is_cheap(self) -> bool:
        """Whether it needs no forward pass of its own."""
        return self.network is None and self.inputs is None and self.prompt is None

    @property
    def needs_model(self) -> bool:
        """Whether it changes the network, or what a network reads besides tokens."""
        return self.network is not None or self.inputs is not None


# The network.


@contextmanager
def _changed(model: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """The model with changed parameters, which are restored."""
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    try:
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(change(name, kept[name]))
        yield
    finally:
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(kept[name])


def _rounded(rounding: Callable[[Tensor], Tensor]) -> NetworkEdit:
    """Matrices in low precision; norms and biases stay."""
    return lambda model, _: _changed(model, lambda name, w: rounding(w) if w.dim() == 2 else w)


def _scaled(dtype: torch.dtype | None, largest: float, group: int = 0) -> Callable[[Tensor], Tensor]:
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


def _cast(dtype: torch.dtype) -> NetworkEdit:
    """Weights and arithmetic in a dtype; buffers, such as rotary frequencies, stay in float32."""

    @contextmanager
    def edit(model: Any, _: float) -> Any:
        kept = [(parameter, parameter.data) for parameter in model.parameters()]
        try:
            for parameter, value in kept:
                parameter.data = value.to(dtype)
            yield
        finally:
            for parameter, value in kept:
                parameter.data = value

    return edit


@contextmanager
def _buffers(model: Any, name: str, change: Callable[[Tensor], Tensor]) -> Any:
    """The model with changed buffers of a name, which are restored."""
    kept = [
        (module, getattr(module, name)) for module in model.modules() if isinstance(getattr(module, name, None), Tensor)
    ]
    try:
        for module, value in kept:
            setattr(module, name, change(value))
        yield
    finally:
        for module, value in kept:
            setattr(module, name, value)


def _theta(frequency: Tensor, factor: float) -> Tensor:
    """θ^(−2i/d) for a θ that is larger by a factor."""
    return frequency * factor ** -(torch.arange(len(frequency)) / len(frequency))


@contextmanager
def _epsilon(model: Any, value: float) -> Any:
    kept = [(module, module.variance_epsilon) for module in model.modules() if hasattr(module, "variance_epsilon")]
    try:
        for module, _ in kept:
            module.variance_epsilon = value
        yield
    finally:
        for module, epsilon in kept:
            module.variance_epsilon = epsilon


def other_weights(weights: dict[str, Tensor]) -> NetworkEdit:
    """Some or all tensors of another checkpoint."""
    return lambda model, _: _changed(model, lambda name, weight: weights.get(name, weight))


# What the network reads.


def with_prompt(sample: Input, prompt: Tensor) -> Input:
    """The sample's response after another prompt."""
    if not len(prompt):
        return sample
    tokens = torch.cat([prompt, sample.tokens[len(sample.tokens) - sample.response :]])
    return replace(sample, tokens=tokens, positions=torch.arange(len(tokens)))


def _gap(sample: Input, value: float, _: Input) -> Input:
    positions = sample.positions.clone()
    positions[-sample.response :] += round(value)
    return replace(sample, positions=positions.clamp_min(0))


def _window(sample: Input, value: float, _: Input) -> Input:
    distance = torch.arange(len(sample.tokens))[:, None] - torch.arange(len(sample.tokens))
    return replace(sample, mask=(distance >= 0) & (distance < value))


def _neighbor(sample: Input, _: float, before: Input) -> Input:
    tokens = torch.cat([before.tokens, sample.tokens])
    positions = torch.cat([torch.arange(len(before.tokens)), sample.positions])
    return replace(sample, tokens=tokens, positions=positions)


def _fp8_cache(sample: Input, _: float, __: Input) -> Input:
    from transformers import DynamicCache

    class Fp8Cache(DynamicCache):  # type: ignore[misc]  # transformers has no types here
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            small = [x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key_states, value_states)]
            return super().update(*small, *args, **kwargs)

    return replace(sample, cache=Fp8Cache)


# The logits.


def _seen(sample: Input, *, prompt: bool) -> Tensor:
    """[T, S] the tokens before each response token, −1 elsewhere."""
    start = len(sample.tokens) - sample.response
    column, row = torch.arange(len(sample.tokens)), start + torch.arange(sample.response)[:, None]
    inside = (column < row) if prompt else (column < row) & (column >= start)
    return torch.where(inside, sample.tokens, -1)


def _counts(logits: Tensor, sample: Input, *, prompt: bool) -> Tensor:
    """[T, V] how often each token came before."""
    seen = _seen(sample, prompt=prompt)
    counts = logits.new_zeros(len(logits), logits.shape[1] + 1)
    index = torch.where(seen < 0, logits.shape[1], seen)
    return counts.scatter_add_(1, index, torch.ones_like(index, dtype=logits.dtype))[:, :-1]


def _repetition(logits: Tensor, sample: Input, value: float) -> Tensor:
    before = _counts(logits, sample, prompt=True) > 0
    return torch.where(before, torch.where(logits > 0, logits / value, logits * value), logits)


def _kept(logits: Tensor, keep: Tensor) -> Tensor:
    return logits.masked_fill(~keep, -math.inf)


def _top_p(logits: Tensor, _: Input, value: float) -> Tensor:
    ordered, index = logits.softmax(-1).sort(-1, descending=True)
    keep = ordered.cumsum(-1) - ordered < value
    return _kept(logits, torch.zeros_like(keep).scatter(1, index, keep))


def _top_k(logits: Tensor, _: Input, value: float) -> Tensor:
    k = max(1, min(round(value), logits.shape[1]))
    return _kept(logits, logits >= logits.topk(k, -1).values[:, -1:])


def _min_p(logits: Tensor, _: Input, value: float) -> Tensor:
    probability = logits.softmax(-1)
    return _kept(logits, probability >= value * probability.amax(-1, keepdim=True))


def _bans(token: int) -> LogitsEdit:
    def edit(logits: Tensor, _: Input, value: float) -> Tensor:
        banned = logits.clone()
        banned[:, token] = -math.inf
        return banned

    return edit


# The reported log-probs.


def _shifted(rows: list[Tensor], value: float) -> list[Tensor]:
    lag, result = round(value), []
    for row in rows:
        index = (torch.arange(len(row)) + lag).clamp(0, len(row) - 1)
        result.append(row[index])
    return result


def _exchanged(rows: list[Tensor], value: float) -> list[Tensor]:
    """Each sample reports the log-probs of the one `value` places on, as far as both go."""
    result = []
    for i, row in enumerate(rows):
        other = rows[(i + round(value)) % len(rows)]
        n = min(len(row), len(other))
        result.append(torch.cat([other[:n], row[n:]]))
    return result


def _each(change: Callable[[Tensor, float], Tensor]) -> OutputEdit:
    return lambda rows, value: [change(row, value) for row in rows]


SIZES = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)

TABLE: dict[str, Hypothesis] = {
    "temperature": Hypothesis(
        claim="samples at {value:.3g} times the training temperature",
        cause="temperature",
        values=(0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5),
        logits=lambda x, _, value: x / value,
    ),
    "top-p": Hypothesis(
        claim="reports log-probs after top-p {value:.3g}",
        cause="truncated_sampling",
        values=(0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
        logits=_top_p,
    ),
    "top-k": Hypothesis(
        claim="reports log-probs after top-k {value:.0f}",
        cause="truncated_sampling",
        whole=True,
        values=(2.0, 3.0, 5.0, 8.0, 10.0, 20.0, 50.0, 100.0),
        logits=_top_k,
    ),
    "min-p": Hypothesis(
        claim="reports log-probs after min-p {value:.3g}",
        cause="truncated_sampling",
        values=(0.01, 0.02, 0.05, 0.1, 0.2),
        logits=_min_p,
    ),
    "repetition penalty": Hypothesis(
        claim="applies a repetition penalty of about {value:.3g}",
        cause="penalty",
        values=(0.9, 1.02, 1.05, 1.1, 1.2, 1.4),
        logits=_repetition,
    ),
    "presence penalty": Hypothesis(
        claim="applies a presence penalty of about {value:.3g}",
        cause="penalty",
        values=(0.1, 0.3, 0.6, 1.0, 1.5),
        logits=lambda x, s, value: x - value * (_counts(x, s, prompt=False) > 0),
    ),
    "frequency penalty": Hypothesis(
        claim="applies a frequency penalty of about {value:.3g}",
        cause="penalty",
        values=(0.1, 0.3, 0.6, 1.0, 1.5),
        logits=lambda x, s, value: x - value * _counts(x, s, prompt=False),
    ),
    "soft cap": Hypothesis(
        claim="caps logits at {value:.3g} by a tanh",
        cause="temperature",
        values=(5.0, 10.0, 15.0, 20.0, 30.0, 50.0),
        logits=lambda x, _, value: value * (x / value).tanh(),
    ),
    "first prompt tokens missing": Hypothesis(
        claim="does not read the first {value:.0f} tokens of the prompt (BOS?)",
        cause="other_prompt",
        values=(1.0, 2.0, 3.0, 4.0),
        whole=True,
        prompt=lambda p, k: p[k:],
    ),
    "last prompt tokens missing": Hypothesis(
        claim="does not read the last {value:.0f} tokens of the prompt",
        cause="other_prompt",
        values=(1.0, 2.0, 3.0, 4.0),
        whole=True,
        prompt=lambda p, k: p[:-k],
    ),
    "first token doubled": Hypothesis(
        claim="reads the first token of the prompt {value:.0f} times",
        cause="other_prompt",
        values=(2.0, 3.0),
        whole=True,
        prompt=lambda p, k: torch.cat([p[:1].expand(k - 1), p]),
    ),
    "last token doubled": Hypothesis(
        claim="reads the last token of the prompt {value:.0f} times",
        cause="other_prompt",
        values=(2.0, 3.0),
        whole=True,
        prompt=lambda p, k: torch.cat([p, p[-1:].expand(k - 1)]),
    ),
    "prompt cut": Hypothesis(
        claim="reads only the last {value:.0f} tokens of the prompt",
        cause="other_prompt",
        values=SIZES,
        whole=True,
        prompt=lambda p, n: p[-n:],
    ),
    "position gap": Hypothesis(
        claim="numbers the positions of the response {value:+.0f} higher",
        cause="position_drift",
        values=(-4.0, -2.0, -1.0, 1.0, 2.0, 4.0, 16.0),
        whole=True,
        inputs=_gap,
    ),
    "attention window": Hypothesis(
        claim="attends to the last {value:.0f} tokens only",
        cause="position_drift",
        values=SIZES,
        whole=True,
        inputs=_window,
    ),
    "packed neighbor": Hypothesis(
        claim="attends to the sample packed before it", cause="other_prompt", inputs=_neighbor
    ),
    "fp8 KV cache": Hypothesis(claim="stores keys and values in fp8", cause="rounding", inputs=_fp8_cache),
    "rope_theta": Hypothesis(
        claim="uses a rope_theta that is {value:.3g} times as large",
        cause="position_drift",
        values=(0.01, 0.1, 0.3, 0.6, 0.85, 1.15, 1.5, 3.0, 10.0, 100.0),
        network=lambda m, value: _buffers(m, "inv_freq", lambda f: _theta(f, value)),
    ),
    "rope scaling": Hypothesis(
        claim="scales positions by 1/{value:.3g} (linear rope scaling)",
        cause="position_drift",
        values=(0.5, 1.25, 1.5, 2.0, 4.0, 8.0),
        network=lambda m, value: _buffers(m, "inv_freq", lambda f: f / value),
    ),
    "norm epsilon": Hypothesis(
        claim="uses a norm epsilon of {value:.1g}",
        cause="rounding",
        values=(1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
        whole=True,
        network=_epsilon,
    ),
    "bf16": Hypothesis(claim="computes in bf16", cause="rounding", network=_cast(torch.bfloat16)),
    "fp16": Hypothesis(claim="computes in fp16", cause="rounding", network=_cast(torch.float16)),
    "bf16 weights": Hypothesis(
        claim="has weights in bf16", cause="rounding", network=_rounded(lambda w: w.bfloat16().float())
    ),
    "fp8 weights": Hypothesis(
        claim="has weights in fp8, with a scale per row",
        cause="rounding",
        network=_rounded(_scaled(torch.float8_e4m3fn, 448.0)),
    ),
    "fp8 weights per tensor": Hypothesis(
        claim="has weights in fp8, with a scale per tensor",
        cause="rounding",
        network=_rounded(_scaled(torch.float8_e4m3fn, 448.0, -1)),
    ),
    "int8 weights": Hypothesis(claim="has weights in int8", cause="rounding", network=_rounded(_scaled(None, 127.0))),
    "int4 weights": Hypothesis(
        claim="has weights in int4, in groups of 128", cause="rounding", network=_rounded(_scaled(None, 7.0, 128))
    ),
    "shift": Hypothesis(
        claim="reports log-probs shifted by {value:+.0f} tokens",
        cause="shifted_tokens",
        values=(-2.0, -1.0, 1.0, 2.0),
        whole=True,
        outputs=_shifted,
    ),
    "log base": Hypothesis(
        claim="reports logarithms to base {value:.0f}",
        cause="broken_tokens",
        values=(2.0, 10.0),
        whole=True,
        outputs=_each(lambda x, base: x / math.log(base)),
    ),
    "clamped": Hypothesis(
        claim="reports no log-prob below {value:.3g}",
        cause="broken_tokens",
        values=(-0.1, -0.5, -1.0, -2.0, -5.0, -10.0),
        outputs=_each(lambda x, low: x.clamp_min(low)),
    ),
    "reported in bf16": Hypothesis(
        claim="reports log-probs in bf16", cause="rounding", outputs=_each(lambda x, _: x.bfloat16().float())
    ),
    "exchanged": Hypothesis(
        claim="reports the log-probs of the sample {value:+.0f} places on",
        cause="shifted_tokens",
        values=(-1.0, 1.0),
        whole=True,
        outputs=_exchanged,
    ),
}
"""Hypotheses of every model, by name."""


def hypotheses(config: Any) -> dict[str, Hypothesis]:
    """The table, with the hypotheses on special tokens of a model's configuration."""
    pad, eos, bos = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos", "bos"))
    eos = eos[0] if isinstance(eos, list) else eos
    pad = pad if isinstance(pad, int) else 0
    table = {
        **TABLE,
        "pads attended": Hypothesis(
            claim="attends to {value:.0f} padding tokens before the prompt",
            cause="other_prompt",
            values=(*map(float, range(1, 9)), 16.0),
            whole=True,
            prompt=lambda p, k: torch.cat([p.new_full((k,), pad), p]),
        ),
    }
    if isinstance(eos, int):
        table["banned EOS"] = Hypothesis(
            claim="never samples the end of the text", cause="truncated_sampling", logits=_bans(eos)
        )
    if isinstance(bos, int):
        table["BOS added"] = Hypothesis(
            claim="reads a BOS token before the prompt",
            cause="other_prompt",
            prompt=lambda p, _: torch.cat([p.new_tensor([bos]), p]),
        )
    return table
