"""Faults of the sampler and of the reported log-probs; logits and log-probs change, the network does not."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Input, OutputEdit

CANDIDATES = 48
"""Number of tokens for which a logit bias is tried."""
MAX_TOKENS = 8
"""Largest number of tokens that a logit bias changes."""
MIN_GAIN = 0.95
"""Largest ratio of the remaining mismatch with and without one more token."""
PENALTIES = (0.1, 0.3, 0.6, 1.0, 1.5)
BIASES = (-math.inf, -8.0, -4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0, 8.0)


def _counts(logits: Tensor, sample: Input, *, prompt: bool) -> Tensor:
    """[T, V] how often each token came before."""
    start = len(sample.tokens) - sample.response
    column, row = torch.arange(len(sample.tokens)), start + torch.arange(sample.response)[:, None]
    inside = (column < row) if prompt else (column < row) & (column >= start)
    counts = logits.new_zeros(len(logits), logits.shape[1] + 1)
    index = torch.where(inside, sample.tokens, logits.shape[1])
    return counts.scatter_add_(1, index, torch.ones_like(index, dtype=logits.dtype))[:, :-1]


def _repetition(logits: Tensor, sample: Input, value: float) -> Tensor:
    before = _counts(logits, sample, prompt=True) > 0
    return torch.where(before, torch.where(logits > 0, logits / value, logits * value), logits)


def _soft_cap(logits: Tensor, sample: Input, value: float) -> Tensor:
    cap = value / sample.temperature
    return cap * (logits / cap).tanh()


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


def _shifted(rows: list[Tensor], value: float) -> list[Tensor]:
    return [row[(torch.arange(len(row)) + round(value)).clamp(0, len(row) - 1)] for row in rows]


def _exchanged(rows: list[Tensor], value: float) -> list[Tensor]:
    """Each sample reports the log-probs of the one `value` places on, up to the shorter length."""
    result = []
    for i, row in enumerate(rows):
        other = rows[(i + round(value)) % len(rows)]
        n = min(len(row), len(other))
        result.append(torch.cat([other[:n], row[n:]]))
    return result


def _each(change: Callable[[Tensor, float], Tensor]) -> OutputEdit:
    return lambda rows, value: [change(row, value) for row in rows]


def logit_bias(logits: Tensor, target: Tensor, change: Tensor) -> Hypothesis | None:
    """Biases of single tokens, found greedily.

    Args:
        logits: [N, V] of the reference at response tokens.
        target: [N] response tokens.
        change: [N] log-probs of the wrong engine minus the reference's.

    Returns:
        The hypothesis, whose value scales the biases; None if no bias helps.
    """
    probability = logits.softmax(-1)
    indicator = torch.nn.functional.one_hot(target, logits.shape[1])
    gradient = (
        change.clamp(-10, 10) @ (indicator - probability)
    ).abs()  # of the fit to the change, by each bias
    count = min(CANDIDATES // 2, logits.shape[1])
    scores = (gradient, probability.mean(0))
    likely = list(
        dict.fromkeys(token for score in scores for token in score.topk(count).indices.tolist())
    )

    def remaining(biases: Mapping[int, float]) -> float:
        mass, own = torch.ones_like(change), torch.zeros_like(change)
        for token, bias in biases.items():
            mass = mass + probability[:, token] * math.expm1(bias)
            own = own + (target == token) * max(bias, -1e4)
        return float((change - own + mass.clamp_min(1e-6).log()).abs().clamp_max(10.0).sum())

    biases: dict[int, float] = {}
    rest = remaining(biases)
    for _ in range(MAX_TOKENS):
        tries = [
            {**biases, token: bias} for token in likely if token not in biases for bias in BIASES
        ]
        best = min(tries, key=remaining, default={})
        for token in best:  # each bias again, next to the others
            best = min(({**best, token: bias} for bias in BIASES), key=remaining)
        if not best or remaining(best) > MIN_GAIN * rest:
            break
        biases, rest = best, remaining(best)
    return _biased(biases) if biases else None


def _biased(biases: dict[int, float]) -> Hypothesis:
    def edit(logits: Tensor, sample: Input, value: float) -> Tensor:
        changed = logits.clone()
        for token, bias in biases.items():
            changed[:, token] += bias * value / sample.temperature
        return changed

    banned = [token for token, bias in biases.items() if bias == -math.inf]
    moved = [
        f"{token} by about {bias:+g} times {{value:.3g}}"
        for token, bias in biases.items()
        if token not in banned
    ]
    parts = [f"never samples token {', '.join(map(str, banned))}"] if banned else []
    parts += [f"moves the logit of token {', '.join(moved)}"] if moved else []
    values = (0.6, 0.8, 1.0, 1.25, 1.6) if moved else (1.0,)
    return Hypothesis(" and ".join(parts), "penalty", values, logits=edit)


def for_end(eos: int) -> dict[str, Hypothesis]:
    """The hypotheses on the token that ends a text."""

    def late_end(logits: Tensor, _: Input, value: float) -> Tensor:
        changed = logits.clone()
        changed[: round(value), eos] = -math.inf
        return changed

    values = (*(2**i for i in range(10)), 10**9)
    claim = "cannot end the text within {value:.0f} tokens"
    return {"minimum length": Hypothesis(claim, "penalty", values, logits=late_end)}


TABLE: dict[str, Hypothesis] = {
    "soft cap": Hypothesis(
        "caps logits at {value:.3g} by a tanh",
        "temperature",
        (5.0, 10.0, 15.0, 20.0, 30.0, 50.0),
        logits=_soft_cap,
    ),
    "repetition penalty": Hypothesis(
        "applies a repetition penalty of about {value:.3g}",
        "penalty",
        (0.9, 1.02, 1.05, 1.1, 1.2, 1.4),
        logits=_repetition,
    ),
    "presence penalty": Hypothesis(
        "applies a presence penalty of about {value:.3g}",
        "penalty",
        PENALTIES,
        logits=lambda x, s, value: x - value / s.temperature * (_counts(x, s, prompt=False) > 0),
    ),
    "frequency penalty": Hypothesis(
        "applies a frequency penalty of about {value:.3g}",
        "penalty",
        PENALTIES,
        logits=lambda x, s, value: x - value / s.temperature * _counts(x, s, prompt=False),
    ),
    "temperature": Hypothesis(
        "samples at {value:.3g} times the training temperature",
        "temperature",
        (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5),
        logits=lambda x, _, value: x / value,
    ),
    "top-k": Hypothesis(
        "reports log-probs after top-k {value:.0f}",
        "truncated_sampling",
        (2, 3, 5, 8, 10, 20, 50, 100),
        logits=_top_k,
    ),
    "top-p": Hypothesis(
        "reports log-probs after top-p {value:.3g}",
        "truncated_sampling",
        (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
        logits=_top_p,
    ),
    "min-p": Hypothesis(
        "reports log-probs after min-p {value:.3g}",
        "truncated_sampling",
        (0.01, 0.02, 0.05, 0.1, 0.2),
        logits=_min_p,
    ),
    "shift": Hypothesis(
        "reports log-probs shifted by {value:+.0f} tokens",
        "shifted_tokens",
        (-2, -1, 1, 2),
        outputs=_shifted,
    ),
    "log base": Hypothesis(
        "reports logarithms to base {value:.0f}",
        "broken_tokens",
        (2, 10),
        outputs=_each(lambda x, base: x / math.log(base)),
    ),
    "clamped": Hypothesis(
        "reports no log-prob below {value:.3g}",
        "broken_tokens",
        (-1.0,),  # the search takes the lowest log-prob
        outputs=_each(lambda x, low: x.clamp_min(low)),
    ),
    "reported in bf16": Hypothesis(
        "reports log-probs in bf16", "rounding", outputs=_each(lambda x, _: x.bfloat16().float())
    ),
    "exchanged": Hypothesis(
        "reports the log-probs of the sample {value:+.0f} places on",
        "shifted_tokens",
        (-3, -2, -1, 1, 2, 3),
        outputs=_exchanged,
    ),
}
"""In the order in which an engine applies them."""
