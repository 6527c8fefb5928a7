"""Signs of a wrong report in the log-probs of one batch, for alarms during training.

    log-probs of both engines → sums on the device → metrics → `slime_tis.live_health`

The sums cost about 60 operations on [B, T] tensors, no pass of the network and no sort of tokens.
Shapes: suffix _BT is [samples, tokens], _B is one value per sample.
"""

import math
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from slime_tis.correction import Ranks, is_log_prob, safe_exp

MAX_SIZE = 10.0
"""Bound of abs(Δ) in sums, nats: one broken token must not hide the others."""
MAX_RATIO = 7.389
"""Bound e² of the ratio whose mean is compared with 1: without it a few tokens determine it."""
PLACEHOLDER_SIZE = 0.02
"""Smallest abs(Δ) of a placeholder, nats. An engine may round the log-prob of a certain token to
exactly 0, and training is then close to 0 as well."""
MIN_POSITIVE = 1e-3
"""Smallest log-prob that counts as above 0, nats; rounding makes smaller ones."""
LARGE_SIZE = 1.5
"""abs(Δ) above this, nats, is more than truncation of a distribution makes for most tokens: it
keeps a mass of at least 0.22."""
MIN_LENGTH = 5
"""Smallest number of tokens of a sample that shows a shift: shorter ones agree by chance."""
MIN_SHIFTED_SIZE = 0.1
"""Smallest mean abs(Δ) of a shifted sample, nats."""
SHIFTED_RATIO = 0.2
"""Largest mean abs(Δ) after the shift, relative to the mean before."""


Value = TypeVar("Value")


class TokenSums(NamedTuple, Generic[Value]):
    """Sums over the valid tokens of a batch; sums of several ranks are added.

    The fields are tensors on the device, or numbers.
    """

    trained: Value
    """Tokens in the loss mask, with and without log-probs."""
    tokens: Value
    """Tokens with both log-probs."""
    size: Value
    """Σ abs(Δ)."""
    zeros: Value
    """Tokens whose rollout log-prob is exactly 0 although training differs."""
    zero_size: Value
    """Σ abs(Δ) of these tokens."""
    rest_positive: Value
    """Σ max(Δ, 0) without these tokens."""
    rest_large: Value
    """Σ abs(Δ) above LARGE_SIZE, without these tokens."""
    above_zero: Value
    """Tokens whose rollout log-prob is above 0."""
    bounded: Value
    """Tokens that share the smallest rollout log-prob of their part of the batch, and that training
    finds less likely; 0 in a part with one such token."""
    bounded_deviation: Value
    """Σ (log π_train − their mean in the part)² of these tokens."""
    train: Value
    rollout: Value
    train_squared: Value
    rollout_squared: Value
    product: Value
    """Σ log π_train · log π_rollout."""
    ratio: Value
    """Σ min(ρ, e²) − 1."""
    ratio_squared: Value
    samples: Value
    long_samples: Value
    """Samples of at least MIN_LENGTH tokens."""
    shifted_samples: Value
    """Of these, samples that agree after a shift by one token, or with a neighboring sample."""
    largest_samples: Value
    """Σ abs(Δ) of the eighth of the samples with the largest sums, rounded up in each part."""
    chosen_samples: Value
    """Number of these samples."""
    known_age: Value
    """Tokens whose weight version is known."""
    age: Value
    """Σ age, optimizer steps."""
    stale: Value
    """Tokens from older weights."""
    stale_k3: Value
    """Σ exp(Δ) − Δ − 1 of tokens from older weights."""
    fresh_k3: Value
    """The same of tokens from the current weights."""
    probed_weights: Value
    """Weights of the trained model that were compared with the previous step."""
    changed_weights: Value
    """Of these, the weights that changed."""


def token_sums(
    train_BT: Tensor,
    rollout_BT: Tensor,
    mask_BT: Tensor,
    *,
    age_BT: Tensor | None = None,
    weights: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The sums of a batch as a float64 vector on its device, without a synchronisation.

    Args:
        train_BT: log π_train of the sampled tokens, nats.
        rollout_BT: log π_rollout of the sampled tokens, nats.
        mask_BT: Nonzero at trained tokens.
        age_BT: Optimizer steps since the weights that sampled the token; −1 if unknown. None if
            nothing is known.
        weights: Counts of compared and of changed weights, of `WeightProbe`.
    """
    # float64 costs little for log-probs alone, and squares of equal numbers must cancel.
    valid_BT = mask_BT.bool() & is_log_prob(train_BT) & is_log_prob(rollout_BT)
    train_BT = torch.where(valid_BT, train_BT, 0.0).double()
    rollout_BT = torch.where(valid_BT, rollout_BT, 0.0).double()
    delta_BT = train_BT - rollout_BT
    size_BT = delta_BT.abs().clamp(max=MAX_SIZE)
    is_zero_BT = valid_BT & (rollout_BT == 0) & (size_BT > PLACEHOLDER_SIZE)
    is_large_BT = ~is_zero_BT & (size_BT > LARGE_SIZE)
    # The added infinity is the minimum of no sample.
    candidates_BT = torch.where(valid_BT, rollout_BT, torch.inf)
    lowest = torch.nn.functional.pad(candidates_BT.flatten(), (0, 1), value=torch.inf).min()
    below_BT = train_BT < rollout_BT - PLACEHOLDER_SIZE
    is_bounded_BT = valid_BT & (rollout_BT == lowest) & below_BT
    # Every part has a smallest log-prob. Without this, many ranks would look like a bound.
    is_bounded_BT = is_bounded_BT & (is_bounded_BT.sum() > 1)
    bounded = is_bounded_BT.sum()
    bounded_mean = torch.where(is_bounded_BT, train_BT, 0.0).sum() / bounded.clamp_min(1)
    # From the part's mean: each part has its own smallest log-prob.
    deviation_BT = torch.where(is_bounded_BT, train_BT - bounded_mean, 0.0)
    ratio_BT = torch.where(valid_BT, safe_exp(delta_BT).clamp(max=MAX_RATIO) - 1, 0.0)
    k3_BT = torch.where(valid_BT, safe_exp(delta_BT) - 1 - delta_BT, 0.0)
    if age_BT is None:
        age_BT = torch.full_like(valid_BT, -1, dtype=torch.int64)
    is_known_BT = valid_BT & (age_BT >= 0)
    is_stale_BT = valid_BT & (age_BT > 0)
    zero = train_BT.new_zeros(())
    probed, changed = weights or (zero, zero)
    # Per sample, because wrong log-probs often belong to a few samples.
    size_B = size_BT.sum(1)
    # Rounded up, so that a batch of fewer than eight samples has one.
    eighth = (len(size_B) + 7) // 8
    samples = valid_BT.any(1).sum()
    long_B = valid_BT.sum(1) >= MIN_LENGTH
    sums: TokenSums[Tensor] = TokenSums(
        trained=mask_BT.bool().sum(),
        tokens=valid_BT.sum(),
        size=size_BT.sum(),
        zeros=is_zero_BT.sum(),
        zero_size=torch.where(is_zero_BT, size_BT, 0.0).sum(),
        rest_positive=torch.where(is_zero_BT, 0.0, delta_BT.clamp(0, MAX_SIZE)).sum(),
        rest_large=torch.where(is_large_BT, size_BT, 0.0).sum(),
        above_zero=(rollout_BT > MIN_POSITIVE).sum(),
        bounded=bounded,
        bounded_deviation=deviation_BT.square().sum(),
        train=train_BT.sum(),
        rollout=rollout_BT.sum(),
        train_squared=train_BT.square().sum(),
        rollout_squared=rollout_BT.square().sum(),
        product=(train_BT * rollout_BT).sum(),
        ratio=ratio_BT.sum(),
        ratio_squared=ratio_BT.square().sum(),
        samples=samples,
        long_samples=long_B.sum(),
        shifted_samples=(long_B & _is_shifted(train_BT, rollout_BT, valid_BT)).sum(),
        largest_samples=size_B.topk(eighth).values.sum(),
        chosen_samples=samples.clamp(max=eighth),
        known_age=is_known_BT.sum(),
        age=torch.where(is_known_BT, age_BT, 0).sum(),
        stale=is_stale_BT.sum(),
        stale_k3=torch.where(is_stale_BT, k3_BT, 0.0).sum(),
        fresh_k3=torch.where(is_known_BT & ~is_stale_BT, k3_BT, 0.0).sum(),
        probed_weights=probed,
        changed_weights=changed,
    )
    return torch.stack([value.double().to(train_BT.device) for value in sums])


def _is_shifted(train_BT: Tensor, rollout_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Whether a sample agrees with log-probs of a neighboring token or sample, bool [B]."""
    shifted_B = torch.zeros_like(valid_BT[:, :1]).any(1)
    for dimension in (0, 1):
        for distance in (-1, 1):
            other_BT = rollout_BT.roll(distance, dimension)
            both_BT = valid_BT & valid_BT.roll(distance, dimension)
            if dimension == 1 and both_BT.shape[1]:
                # roll moves the token from one end of a sample to the other end
                both_BT = both_BT.clone()
                edge = -1
                if distance == 1:
                    edge = 0
                both_BT[:, edge] = False
            own_B = _mean_size(train_BT - rollout_BT, both_BT)
            other_B = _mean_size(train_BT - other_BT, both_BT)
            enough_B = both_BT.sum(1) >= MIN_LENGTH - 1
            is_large_B = own_B > MIN_SHIFTED_SIZE
            shifted_B = shifted_B | (enough_B & is_large_B & (other_B < SHIFTED_RATIO * own_B))
    return shifted_B


def _mean_size(delta_BT: Tensor, chosen_BT: Tensor) -> Tensor:
    size_BT = torch.where(chosen_BT, delta_BT.abs(), 0.0)
    return size_BT.sum(1) / chosen_BT.sum(1).clamp_min(1)


def over_ranks(sums: Tensor, ranks: Ranks) -> Tensor:
    """The sums of all data-parallel ranks, on the host as soon as the device has made them.

    The copy does not wait: any later synchronisation, such as that of `Statistics.metrics`, also
    ends it, so a step has no synchronisation more.
    """
    return ranks.over_data(sums).to("cpu", non_blocking=True)


def sign_metrics(sums: Tensor) -> dict[str, float]:
    """Metrics of the sums, by name without prefix; a metric without a measurement is missing."""
    total: TokenSums[float] = TokenSums(*sums.tolist())
    metrics: dict[str, float] = {}
    if total.probed_weights:
        metrics["changed_weight_fraction"] = total.changed_weights / total.probed_weights
    if total.trained:
        metrics["nonfinite_token_fraction"] = 1 - total.tokens / total.trained
    if not total.tokens:
        return metrics
    rest = max(total.size - total.zero_size, 1e-12)
    metrics |= {
        "abs_diff": total.size / total.tokens,
        "placeholder_fraction": total.zeros / total.tokens,
        "placeholder_size": total.zero_size / max(total.zeros, 1),
        "rest_abs_diff": rest / max(total.tokens - total.zeros, 1),
        "rest_positive_share": total.rest_positive / rest,
        "rest_large_share": total.rest_large / rest,
        "above_zero_fraction": total.above_zero / total.tokens,
        "bounded_tokens": total.bounded,
        "bounded_spread": math.sqrt(total.bounded_deviation / max(total.bounded, 1)),
        "log_prob_dependence": _dependence(total),
        "sampled_ratio_errors": _standard_errors(total),
        "largest_samples_share": total.largest_samples / max(total.size, 1e-12),
        "largest_samples_fraction": total.chosen_samples / total.samples,
    }
    if total.long_samples:
        metrics["shifted_sample_fraction"] = total.shifted_samples / total.long_samples
    if total.known_age:
        metrics["weight_staleness"] = total.age / total.known_age
        fresh = total.known_age - total.stale
        if total.stale:
            metrics["mismatch_k3_kl_stale"] = total.stale_k3 / total.stale
            metrics["stale_age"] = total.age / total.stale
        if fresh:
            metrics["mismatch_k3_kl_fresh"] = total.fresh_k3 / fresh
    return metrics


def _deviation(total: float, total_squared: float, count: float) -> float:
    mean = total / max(count, 1)
    return math.sqrt(max(total_squared / max(count, 1) - mean * mean, 0.0))


def _dependence(total: TokenSums[float]) -> float:
    """The smaller one of Δ's correlations with log π_train and with log π_rollout; from −1 to 1.

    It is 0 if their signs differ. Only a function of the log-prob, such as a temperature, has a
    large correlation of one sign with both. Noise of one engine correlates with that engine.
    """
    n = total.tokens
    train = total.train / n
    rollout = total.rollout / n
    # Correlations of Δ, from the covariances of both log-probs.
    train_variance = total.train_squared / n - train * train
    rollout_variance = total.rollout_squared / n - rollout * rollout
    covariance = total.product / n - train * rollout
    delta_variance = train_variance + rollout_variance - 2 * covariance
    smallest = min(train_variance, rollout_variance, delta_variance)
    # Rounding makes tiny differences of squares, which have no meaning.
    if smallest < 1e-9 * max(train_variance, rollout_variance, 1e-9):
        return 0.0
    with_train = (train_variance - covariance) / math.sqrt(train_variance * delta_variance)
    with_rollout = (covariance - rollout_variance) / math.sqrt(rollout_variance * delta_variance)
    if with_train * with_rollout <= 0:
        return 0.0
    return min(with_train, with_rollout, key=abs)


def _standard_errors(total: TokenSums[float]) -> float:
    """The mean of min(ρ, e²) − 1 in standard errors.

    The mean is at most 0 if the tokens are samples of the distribution that the engine reports.
    """
    deviation = _deviation(total.ratio, total.ratio_squared, total.tokens)
    if deviation < 1e-6:
        return 0.0
    return total.ratio / math.sqrt(total.tokens) / deviation


class WeightProbe:
    """Compares some weights of the trained model with those of the last call.

    It keeps at most `per_tensor` weights per trained matrix, evenly spaced. Vectors are left
    out: a bias that starts at 0 takes updates that all other weights lose in bf16.
    """

    def __init__(self, per_tensor: int = 256) -> None:
        self._per_tensor = per_tensor
        self._before: Tensor | None = None

    def compare(self, model: torch.nn.Module) -> tuple[Tensor, Tensor] | None:
        """Counts of compared and of changed weights, on the device; None at the first call.

        None also if this rank holds no weights, as with ZeRO-3 between two passes.
        """
        parts = []
        for parameter in model.parameters():
            # FSDP's parameters are DTensors; a rank compares the part that it holds.
            local = getattr(parameter, "_local_tensor", parameter).detach().flatten()
            if parameter.requires_grad and parameter.ndim > 1 and len(local):
                step = len(local) // self._per_tensor + 1
                parts.append(local[::step].float())
        if not parts:
            return None
        now = torch.cat([part.to(parts[0].device) for part in parts])
        before = self._before
        self._before = now
        if before is None or len(before) != len(now):
            return None
        changed = (now != before).sum()
        return torch.full_like(changed, len(now)), changed
