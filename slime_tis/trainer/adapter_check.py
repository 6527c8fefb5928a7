"""Proves that the rollout engine samples with the LoRA adapter.

An engine that lost the adapter samples from the model without it, and nothing fails. So after every
weight update, a probe is scored three times: n by training, n₀ by training without the adapter, and
r by the rollout engine. The share of the adapter in r is the slope of a regression through 0:

    share = ⟨r − n₀, n − n₀⟩ / ⟨n − n₀, n − n₀⟩
    error = √(Σ e² / ((T − 1) · ⟨n − n₀, n − n₀⟩)),   e = r − n₀ − share · (n − n₀)

It is 1 if the adapter is in force, 0 if it is absent, and, to first order, c if it is scaled by c.
Noise of the rollout engine is in the error, its standard error for T tokens. Noise of training is
also in n − n₀, and makes the share too small: it is judged only if n − n₀ is well above that noise.

A new adapter has no effect, because B is 0. So before the first step, the engine gets random B for
one trial, and then the adapter itself.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis.trainer.engines.rollout_engine import RolloutEngine
from slime_tis.trainer.engines.weight_rounding import Precision, round_nearest
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.hf_weights import named_weights
from slime_tis.trainer.megatron.lora import (
    adapters_of,
    assign_adapters,
    copied_adapters,
    trial_adapters,
    without_adapters,
)
from slime_tis.trainer.megatron.lora_weights import adapted_layers
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.rank_collectives import on_rank_zero

LEAST_SHARE = 0.75
"""Smallest accepted share, relative to the share that survives merging. An adapter with half its
scale has 0.5."""
LARGEST_SHARE = 4 / 3
"""Largest accepted share. An adapter that is applied twice, or with twice its scale, has 2."""
DEVIATIONS = 4.0
"""A share counts as outside the bounds if it is this many standard errors beyond one."""
LARGEST_ERROR = 0.05
"""Largest standard error of a share that proves that the adapter is in force."""
LARGEST_JUDGED_ERROR = 1 / DEVIATIONS
"""With a larger standard error, a share cannot tell an adapter in force from an absent one, and is
not judged."""
LEAST_EFFECT = 3.0
"""Training in bf16 or fp16 must move the probe by this many times the noise of the engines. At 3,
noise makes the share at most 6 % smaller: (T + v) / (T + 2v) with T + 2v ≥ 9 · 2v, for equal noise
variances v of both engines."""
TRAINING_NOISE: dict[Precision, float] = {"fp16": 0.0125, "bf16": 0.04}
"""Mean |r − n| of SmolLM2-135M in nats, if the run has not measured its own."""
LEAST_SURVIVAL = 0.2
"""If a smaller share survives merging, the adapter is not judged: most merged weights are then
rounded to the model's own weights."""
NOISE_GROWTH = 5.0
"""Factor by which the gap of the engines may exceed their gap without an adapter."""
MISSING_EFFECT = 0.02
"""Share of the adapter's effect that may be missing in addition: rounding differs from token to
token."""
MOST_ROWS = 64
"""Number of rows per matrix that measure which share of the adapter survives merging."""


@dataclass(frozen=True, kw_only=True)
class AdapterShare:
    """The adapter's share in the log-probs of one copy of the rollout engine's weights."""

    share: float
    error: float
    """Standard error; infinite if the adapter has no effect, or one within the noise of
    training."""
    effect: float
    """Mean |n − n₀|, in nats per token."""
    gap: float
    """Mean |r − n|, in nats per token."""

    @property
    def is_measured(self) -> bool:
        """Whether the noise of the engines is small enough for a proof."""
        return self.error <= LARGEST_ERROR

    def problem(self, survival: float, noise: float | None) -> str:
        """Returns the engine's fault, such as "does not apply the LoRA adapter", or an empty text.

        Args:
            survival: Share of the adapter that survives merging in the engine's precision.
            noise: `gap` without an adapter; None if unknown.
        """
        if not math.isfinite(self.error) or survival < LEAST_SURVIVAL:
            return ""
        margin = DEVIATIONS * self.error
        # Noise of neighboring tokens is not independent, so a share within it can seem far from 1.
        is_judged = self.error <= LARGEST_JUDGED_ERROR
        if is_judged and self.share + margin < LEAST_SHARE * min(survival, 1.0):
            if abs(self.share) <= max(margin, 0.1):
                return "does not apply the LoRA adapter"
            return "applies the LoRA adapter with too small a scale"
        if is_judged and self.share - margin > LARGEST_SHARE * max(survival, 1.0):
            return "applies the LoRA adapter with too large a scale, or twice"
        missing = MISSING_EFFECT + max(1.0 - survival, 0.0)
        if noise is not None and self.gap > NOISE_GROWTH * noise + missing * self.effect:
            return "applies only a part of the LoRA adapter, or an older one"
        return ""


def adapter_share(parallel: Parallel, r_L: Tensor, n_L: Tensor, n0_L: Tensor) -> AdapterShare:
    """Measures the adapter's share in the rollout engine's log-probs; a collective.

    Args:
        parallel: The ranks, which own slices of the probe.
        r_L: Log-probs by the rollout engine, this rank's slice.
        n_L: Log-probs by training.
        n0_L: Log-probs by training without the adapter.

    Returns:
        The share over all slices, equal on every rank.
    """
    result = AdapterShare(share=math.nan, error=math.inf, effect=0.0, gap=math.nan)
    if parallel.is_last_stage:
        change = (n_L - n0_L).double()
        received = (r_L - n0_L).double()
        moments = [
            torch.ones_like(change),
            change.square(),
            change * received,
            received.square(),
            change.abs(),
            (received - change).abs(),
        ]
        sums = torch.stack([moment.sum() for moment in moments])
        sums = parallel.ranks.all_reduce(sums) / parallel.data_size
        tokens, square, product, received_square, effect, gap = sums.tolist()
        share = math.nan
        error = math.inf
        if square > 0 and tokens > 1:
            share = product / square
            residual = max(received_square - share * product, 0.0)
            error = math.sqrt(residual / ((tokens - 1) * square))
        result = AdapterShare(share=share, error=error, effect=effect / tokens, gap=gap / tokens)
    return parallel.broadcast_from_last_stage(result)


@dataclass(kw_only=True)
class AdapterCheck:
    """The check of the adapter after every weight update."""

    engine: TrainingEngine
    sampler: RolloutEngine
    probe: Sequence[int]
    rounds_to_nearest: bool
    """Whether merged weights are rounded to the nearest numbers of the engine's precision."""
    survival: float = field(default=1.0, init=False)
    """Share of the adapter that survived merging at the last update."""
    noise: float | None = field(default=None, init=False)
    """Mean gap of the engines before the adapter had an effect, in nats; None if unknown."""
    _precision: Precision | None = field(default=None, init=False)

    def __call__(self) -> dict[str, float]:
        """Measures the adapter's share in every copy of the engine's weights; a collective.

        Returns:
            Metrics of the copy whose share is furthest from 1.

        Raises:
            ValueError: As in `checked_shares`.
        """
        shares = self.checked_shares()
        metrics = {"rollout/adapter_survival": self.survival}
        measured = [share for share in shares.values() if math.isfinite(share.error)]
        if measured:
            worst = max(measured, key=lambda share: abs(share.share - 1))
            metrics["rollout/adapter_share"] = worst.share
            metrics["rollout/adapter_share_error"] = worst.error
            metrics["rollout/adapter_effect"] = worst.effect
        return metrics

    def checked_shares(self) -> dict[str, AdapterShare]:
        """Returns the adapter's share by the name of the copy of the weights; a collective.

        Raises:
            ValueError: A copy lacks the adapter, has only a part of it, or uses another scale; or
                log-probs are not finite.
        """
        shares = self._shares()
        self.survival = self._measured_survival()
        gaps = [share.gap for share in shares.values() if share.effect == 0.0]
        if gaps:
            self.noise = max(gaps)
        for copy, share in shares.items():
            if share.effect < self._least_effect():
                shares[copy] = replace(share, error=math.inf)
        after = f"adapter error: after the update to step {self.sampler.weight_version}"
        for copy, share in shares.items():
            if not math.isfinite(share.gap):
                raise ValueError(
                    f"{after} the log-probs of a probe are not finite in training or in {copy};"
                    " check the values of the adapter and --lora-alpha, or lower --lr."
                )
            problem = share.problem(self.survival, self.noise)
            if problem:
                raise ValueError(
                    f"{after} {copy} {problem}: its share in the log-probs of a probe is"
                    f" {share.share:.3g} ± {share.error:.1g}, which should be 1, and mean abs(Δ) is"
                    f" {share.gap:.2g} nats. Check that it loads the weights that it is sent, and"
                    " that nothing else gives it an adapter."
                )
        return shares

    def is_proof(self, shares: dict[str, AdapterShare]) -> bool:
        """Whether the last shares were judged, and prove that every copy has the adapter."""
        if not shares or self.survival < LEAST_SURVIVAL:
            return False
        return all(share.is_measured for share in shares.values())

    def summary(self, shares: dict[str, AdapterShare], *, is_trial: bool) -> str:
        """Returns a line about the check before the first step, of which `shares` are the last."""
        kind = "the adapter"
        if is_trial:
            kind = "a trial adapter"
        if self.is_proof(shares):
            worst = max(shares.values(), key=lambda share: abs(share.share - 1))
            return (
                f"the rollout engine applies the LoRA adapter: share {worst.share:.3f} ±"
                f" {worst.error:.1g} of {kind} that moves a probe by {worst.effect:.2g} nats per"
                " token"
            )
        reason = (
            f"{kind} has too small an effect on a probe, compared with the noise of the engines"
        )
        if self.survival < LEAST_SURVIVAL:
            reason = f"merging in the engine's precision leaves only {self.survival:.0%} of {kind}"
        return f"warning: not proven that the rollout engine applies the LoRA adapter: {reason}."

    def _least_effect(self) -> float:
        """Returns the smallest effect that training's noise does not falsify, in nats."""
        precision = self.engine.config.precision
        if precision == "fp32":
            return 0.0
        noise = self.noise
        if noise is None:
            noise = TRAINING_NOISE[precision]
        return LEAST_EFFECT * noise

    def _shares(self) -> dict[str, AdapterShare]:
        engine = self.engine
        parallel = engine.parallel
        shares = {}
        with_adapter: Tensor | None = None
        without: Tensor | None = None
        for copy, log_probs in self.sampler.prompt_log_probs(self.probe).items():
            count = len(log_probs)
            batch = make_batch(
                [list(self.probe)],
                [[1] * count],
                [log_probs],
                [[0] * count],
                parallel.context_rank,
                parallel.context_size,
            )
            if with_adapter is None or without is None:  # the same for every copy
                with engine.at_temperature(1.0):
                    with_adapter = engine.log_probs(batch, [[0]])
                    with without_adapters(engine.model.module):
                        without = engine.log_probs(batch, [[0]])
            received = batch.responses.rollout_log_probs_L.to(with_adapter)
            shares[copy] = adapter_share(parallel, received, with_adapter, without)
        return shares

    @torch.no_grad()
    def _measured_survival(self) -> float:
        """Returns the share of the adapter that survives merging; a collective.

            ⟨round(W + Δ) − round(W), Δ⟩ / ⟨Δ, Δ⟩,   Δ = s · B A

        It is measured in rows of this model's weights with the engine's rounding. 1 for an engine
        that rounds at random, on average, or does not round, or whose precision is unknown.
        """
        if self._precision is None:
            name = f"{adapted_layers(self.engine.model, self.engine.parallel)[0].name}.weight"
            precision = on_rank_zero(lambda: self.sampler.weight_precision(name))
            self._precision = precision or "fp32"
        if self._precision == "fp32" or not self.rounds_to_nearest:
            return 1.0
        module = self.engine.model.module
        weights = named_weights(module)
        sums = torch.zeros(2, dtype=torch.float64, device=self.engine.parallel.device)
        for name, adapter in adapters_of(module).items():
            stride = max(len(weights[name]) // MOST_ROWS, 1) | 1
            change = adapter.weight_change()[::stride]
            before = weights[name][::stride].float()
            after = round_nearest(before + change, self._precision)
            received = after - round_nearest(before, self._precision)
            sums[0] += (received * change).sum(dtype=torch.float64)
            sums[1] += change.square().sum(dtype=torch.float64)
        if self.engine.parallel.size > 1:
            dist.all_reduce(sums)
        survived, total = sums.tolist()
        if total == 0:
            return 1.0
        return float(survived / total)


@contextmanager
def trial(engine: TrainingEngine) -> Iterator[None]:
    """Inside the block, every B has random numbers; afterwards the adapters are as before."""
    module = engine.model.module
    before = copied_adapters(module)
    assign_adapters(module, trial_adapters(module, engine.config.seed))
    try:
        yield
    finally:
        assign_adapters(module, before)
