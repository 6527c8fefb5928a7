"""Faults of the sampler and of the reported log-probs.

Logits and log-probs change, the network does not.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Input, OutputEdit

CANDIDATES = 48
"""Largest number of tokens for which a logit bias is tried."""
MAX_BIASED = 8
"""Largest number of tokens that a logit bias changes, in a large vocabulary."""
VOCABULARY_PER_BIAS = 64
"""Vocabulary entries for each biased token: biases of many tokens of a small vocabulary fit any
mismatch."""
MAX_RATIO = 0.95
"""Largest ratio of the remaining mismatch with and without one more token."""
PENALTIES = (0.1, 0.3, 0.6, 1.0, 1.5)
"""Grid of presence and frequency penalties."""
BIASES = (-math.inf, -8.0, -4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Grid of a token's bias, nats; −inf bans the token."""
LARGEST_CHANGE = 10.0
"""Largest weight of a single token, nats."""


def _counts(logits: Tensor, sample: Input, *, prompt: bool) -> Tensor:
    """Counts the earlier occurrences [T, V] of every token id.

    Args:
        logits: [T, V].
        sample: The sample.
        prompt: Whether occurrences in the prompt count.
    """
    vocabulary = logits.shape[1]
    start = len(sample.tokens) - sample.response
    column = torch.arange(len(sample.tokens))
    row = start + torch.arange(sample.response)[:, None]
    counted = column < row
    if not prompt:
        counted &= column >= start
    # Tokens that do not count go to an additional column, which is cut off.
    index = torch.where(counted, sample.tokens, vocabulary)
    counts = logits.new_zeros(len(logits), vocabulary + 1)
    return counts.scatter_add_(1, index, torch.ones_like(index, dtype=logits.dtype))[:, :-1]


def _repetition(logits: Tensor, sample: Input, value: float) -> Tensor:
    """Lowers the logits of earlier tokens by a factor, as transformers and vLLM do."""
    came_before = _counts(logits, sample, prompt=True) > 0
    # A negative logit is multiplied, so that the factor lowers it as well.
    penalized = torch.where(logits > 0, logits / value, logits * value)
    return torch.where(came_before, penalized, logits)


def _presence(logits: Tensor, sample: Input, value: float) -> Tensor:
    """Lowers the logits of tokens that came before in the response by one amount."""
    came_before = _counts(logits, sample, prompt=False) > 0
    # Engines subtract before the temperature, which these logits are divided by already.
    return logits - value / sample.temperature * came_before


def _frequency(logits: Tensor, sample: Input, value: float) -> Tensor:
    """Lowers the logits of tokens in proportion to their number in the response."""
    return logits - value / sample.temperature * _counts(logits, sample, prompt=False)


def _soft_cap(logits: Tensor, sample: Input, value: float) -> Tensor:
    """Bounds the logits before the temperature by `value`, smoothly."""
    cap = value / sample.temperature
    return cap * (logits / cap).tanh()


def _kept(logits: Tensor, keep: Tensor) -> Tensor:
    """Removes all tokens but the marked ones [T, V] from the distribution."""
    return logits.masked_fill(~keep, -math.inf)


def _top_p(logits: Tensor, _: Input, value: float) -> Tensor:
    ordered, index = logits.softmax(-1).sort(-1, descending=True)
    # The mass before a token decides, so the token that reaches the bound is kept.
    keep = ordered.cumsum(-1) - ordered < value
    return _kept(logits, torch.zeros_like(keep).scatter(1, index, keep))


def _top_k(logits: Tensor, _: Input, value: float) -> Tensor:
    k = max(1, min(round(value), logits.shape[1]))
    smallest_kept = logits.topk(k, -1).values[:, -1:]
    return _kept(logits, logits >= smallest_kept)


def _min_p(logits: Tensor, _: Input, value: float) -> Tensor:
    probability = logits.softmax(-1)
    return _kept(logits, probability >= value * probability.amax(-1, keepdim=True))


def _shifted(rows: list[Tensor], value: float) -> list[Tensor]:
    """Each token reports the log-prob of the token `value` places on; the ends repeat."""
    result = []
    for row in rows:
        index = torch.arange(len(row)) + round(value)
        result.append(row[index.clamp(0, len(row) - 1)])
    return result


def _exchanged(rows: list[Tensor], value: float) -> list[Tensor]:
    """Each sample reports the log-probs of the sample `value` places on."""
    result = []
    for i, row in enumerate(rows):
        other = rows[(i + round(value)) % len(rows)]
        # The end of a longer response keeps its log-probs.
        result.append(torch.cat([other[: len(row)], row[len(other) :]]))
    return result


def _argmax(log_probs: Tensor, _: Tensor, __: float) -> Tensor:
    """Every token reports the log-prob of the likeliest one."""
    return log_probs.amax(-1)


def _padded(logits: Tensor, sample: Input, value: float) -> Tensor:
    """More rows of the output layer that are 0, so that their logits are 0."""
    # One column with the logarithm of their number has the same sum of exponentials.
    rows = logits.new_full((len(logits), 1), math.log(max(value, 1.0)))
    return torch.cat([logits, rows], 1)


def _each(change: Callable[[Tensor, float], Tensor]) -> OutputEdit:
    """Returns a change of the reported log-probs that treats every sample alike."""
    return lambda rows, value: [change(row, value) for row in rows]


def logit_bias(logits: Tensor, target: Tensor, change: Tensor) -> Hypothesis | None:
    """Finds biases of single tokens, greedily.

    Args:
        logits: [N, V] of the reference at response tokens.
        target: [N] response tokens.
        change: [N] log-probs of the wrong engine minus the reference's.

    Returns:
        The hypothesis, whose value scales the biases; None if no bias helps.
    """
    probability = logits.softmax(-1)

    def remaining(biases: Mapping[int, float]) -> float:
        """Returns Σ|Δ| that remains under biases, nats."""
        # With biases b, the softmax divides by Σ_v p_v · exp(b_v) = 1 + Σ p_v · (exp(b_v) − 1).
        mass = torch.ones_like(change)
        own = torch.zeros_like(change)
        for token, bias in biases.items():
            mass = mass + probability[:, token] * math.expm1(bias)
            # A finite number for −inf, as 0 · inf is NaN.
            own = own + (target == token) * max(bias, -1e4)
        left = change - own + mass.clamp_min(1e-6).log()
        return float(left.abs().clamp_max(LARGEST_CHANGE).sum())

    candidates = _bias_candidates(probability, target, change)
    biases: dict[int, float] = {}
    largest_number = min(MAX_BIASED, max(2, logits.shape[1] // VOCABULARY_PER_BIAS))
    for _ in range(largest_number):
        best = min(_one_more_bias(biases, candidates), key=remaining, default={})
        # The best bias of a token depends on the others.
        for token in best:
            best = min(({**best, token: bias} for bias in BIASES), key=remaining)
        if not best or remaining(best) > MAX_RATIO * remaining(biases):
            break
        biases = best
    if not biases:
        return None
    return _biased(biases)


def _bias_candidates(probability: Tensor, target: Tensor, change: Tensor) -> list[int]:
    """Returns the tokens whose bias may explain the change.

    They have the largest gradients of the fit to the change, or are the likeliest ones.
    """
    vocabulary = probability.shape[1]
    indicator = torch.nn.functional.one_hot(target, vocabulary)
    weight = change.clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
    gradient = (weight @ (indicator - probability)).abs()
    count = min(CANDIDATES // 2, vocabulary)
    steepest = gradient.topk(count).indices.tolist()
    likeliest = probability.mean(0).topk(count).indices.tolist()
    return list(dict.fromkeys(steepest + likeliest))


def _one_more_bias(biases: dict[int, float], candidates: list[int]) -> Iterator[dict[int, float]]:
    """Yields the biases with one more candidate, for every value of the grid."""
    for token in candidates:
        if token not in biases:
            for bias in BIASES:
                yield {**biases, token: bias}


def _biased(biases: dict[int, float]) -> Hypothesis:
    """Returns the hypothesis on biases by token id."""

    def edit(logits: Tensor, sample: Input, value: float) -> Tensor:
        changed = logits.clone()
        for token, bias in biases.items():
            changed[:, token] += bias * value / sample.temperature
        return changed

    banned = []
    moved = []
    for token, bias in biases.items():
        if bias == -math.inf:
            banned.append(str(token))
        else:
            moved.append(f"{token} by about {bias:+g} times {{value:.3g}}")
    claims = []
    values: tuple[float, ...] = (1.0,)
    if banned:
        claims.append(f"never samples token {', '.join(banned)}")
    if moved:
        claims.append(f"moves the logit of token {', '.join(moved)}")
        values = (0.6, 0.8, 1.0, 1.25, 1.6)
    return Hypothesis(" and ".join(claims), "penalty", values, logits=edit)


def for_end(eos: int) -> dict[str, Hypothesis]:
    """Returns the hypothesis on the token that ends a text."""

    def late_end(logits: Tensor, _: Input, value: float) -> Tensor:
        changed = logits.clone()
        changed[: round(value), eos] = -math.inf
        return changed

    def placeholder(log_probs: Tensor, response: Tensor, value: float) -> Tensor:
        own = log_probs.gather(1, response[:, None])[:, 0]
        return own.masked_fill(response == eos, value)

    # The last value forbids the token everywhere.
    values = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 10**9)
    claim = "cannot end the text within {value:.0f} tokens"
    return {
        "minimum length": Hypothesis(claim, "penalty", values, logits=late_end),
        "end placeholder": Hypothesis(
            "reports 0 for the token that ends the text",
            "placeholder_log_prob",
            reported=placeholder,
        ),
    }


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
        logits=_presence,
    ),
    "frequency penalty": Hypothesis(
        "applies a frequency penalty of about {value:.3g}",
        "penalty",
        PENALTIES,
        logits=_frequency,
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
    "padded vocabulary": Hypothesis(
        "has {value:.0f} more rows of zeros in the softmax (a padded vocabulary)",
        "padded_vocabulary",
        (4, 16, 64, 128, 256, 512, 1024),
        logits=_padded,
    ),
    "argmax": Hypothesis(
        "reports the log-prob of the likeliest token instead of the sampled one",
        "argmax_log_prob",
        reported=_argmax,
    ),
    "factor": Hypothesis(
        "reports log-probs times {value:.4g}",
        "broken_tokens",
        (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.43, 1.67, 2.0),
        outputs=_each(lambda x, value: x * value),
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
        # The search replaces the value by the lowest log-prob.
        (-1.0,),
        outputs=_each(lambda x, low: x.clamp_min(low)),
    ),
    "logits in bf16": Hypothesis(
        "rounds logits to bf16", "rounding", logits=lambda x, *_: x.bfloat16().float()
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
"""The hypotheses, in the order in which an engine applies them."""
