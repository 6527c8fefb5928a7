"""Whether the rollout engine has the weights that are trained (`--check-weight-sync`).

After every update three questions, from the most exact one to the most general:

    tensors    does each copy of the weights contain what was sent, as far as the engine can look into it?
    movement   did the log-probs of a probe move as in training?           mean |Δr| is not far below mean |Δn|
    gap        are they near those of training?                            gap = mean |r − n|

with the probe's log-probs n of the training engine and r of the rollout engine, Δ against the update before. An engine
that misses an update has Δr = 0, whatever the gap that rounding and kernels leave at every update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.engines.engine import RolloutEngine
from slime_tis.trainer.engines.weight_rounding import COARSENESS, Precision, coarser
from slime_tis.trainer.engines.weight_updates import WeightUpdates
from slime_tis.trainer.megatron.batch import TrainingBatch, make_batch
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.megatron.parallel import Parallel

PROBE_PROMPTS, PROBE_TOKENS = 64, 512
"""The probe is made of so many prompts, cut to so many tokens."""
MIN_TOKENS = 16
"""Tokens of a probe from which on its movement is judged."""
MIN_RECEIVED = 0.5
"""Share of an update of the weights that rounding has to leave for the probe's movement to be judged."""
MIN_MOVEMENT = 0.25
"""Movement of the rollout engine's log-probs, as a part of training's and of that share, below which it is missed."""
GAPS: dict[Precision, float] = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.15, "int8": 0.2, "fp8": 0.5}
"""Largest mean gap of long probes by the coarser precision of the two engines: three to four times the mean difference
of log-probs of SmolLM2-135M, 0.04 in bf16, 0.05 in int8 and 0.13 in fp8."""
SPREAD = 4.0
"""A mean over n tokens may exceed it by so many parts in √n."""


@dataclass(kw_only=True)
class SyncCheck:
    """A comparison of the two engines' weights and log-probs after every update."""

    probe: tuple[int, ...]
    """Token ids of the text that both engines score."""
    bound: float | None
    """Largest mean absolute difference, in nats per token; None chooses it by precision and length of the probe."""
    trains_in: Precision
    """Precision of training."""
    trained_L: Tensor | None = None
    """Log-probs [L] of the probe by the training engine at the check before."""
    received_L: dict[str, Tensor] = field(default_factory=dict)
    """Those by each copy of the rollout engine's weights."""

    def bound_in(self, precision: Precision | None) -> float:
        """The bound for a rollout engine of this precision; None is taken for the coarsest."""
        if self.bound is not None:
            return self.bound
        coarsest = coarser(self.trains_in, precision or COARSENESS[-1])
        return GAPS[coarsest] * (1 + SPREAD / math.sqrt(len(self.probe) - 1))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Log-probs of the probe by one copy of the rollout engine's weights beside those of training."""

    gap: float
    """Mean |r − n|, in nats per token; infinite where a log-prob is not finite."""
    gap_before: float
    """Mean |r − n'| to the training engine at the check before; NaN where there was none."""
    movement: float
    """Mean |Δn| against the check before; NaN likewise."""
    movement_received: float
    """Mean |Δr|; NaN where there was no check of this copy before."""
    received: float
    """⟨Δr, Δn⟩ / ⟨Δn, Δn⟩; NaN likewise, and where nothing moved."""

    def is_missed(self, share: float = 1.0) -> bool:
        """Whether the rollout engine's log-probs stayed where they were while training's moved.

        Args:
            share: Of the update of the weights, what rounding left.
        """
        return self.movement_received < MIN_MOVEMENT * share * self.movement


def make_probe(prompts: Sequence[Prompt], limit: int = PROBE_TOKENS) -> tuple[int, ...]:
    """Token ids of the longest prompt and of others after it, each once, cut to `limit` tokens.

    A single token is taken twice, since the first token of a text has no log-prob.
    """
    texts = dict.fromkeys(tuple(prompt.token_ids) for prompt in prompts[:PROBE_PROMPTS])
    ordered = [max(texts, key=len), *texts]
    probe: list[int] = []
    for text in dict.fromkeys(ordered):
        if len(probe) >= limit:
            break
        probe += text
    probe = probe[:limit]
    return tuple(probe if len(probe) > 1 else probe * 2)


def check_weight_sync(
    engine: TrainingEngine, sampler: RolloutEngine, check: SyncCheck, updates: WeightUpdates
) -> dict[str, float]:
    """Compares the rollout engine with what it was sent and with the training engine after an update; a collective.

    Returns:
        rollout/weight_sync_gap, and from the second time on rollout/weight_sync_gap_before, rollout/probe_movement,
        rollout/probe_movement_received and rollout/probe_received; of several copies of the weights those of the one
        with the largest gap.

    Raises:
        ValueError: They differ; the message names the copy of the weights that does.
    """
    after = f"parameter-sync error: after the update to step {sampler.weight_version}"
    _check_tensors(engine, sampler, updates, after)
    precision, share = _expectation(engine, updates, check.trains_in)
    bound = check.bound_in(precision)
    trained_L: Tensor | None = None
    received_L: dict[str, Tensor] = {}
    found: list[Comparison] = []
    for name, log_probs in sampler.prompt_log_probs(check.probe).items():
        batch = _probe_batch(engine, check.probe, log_probs)
        if trained_L is None:
            with engine.at_temperature(1.0):
                trained_L = engine.log_probs(batch, [[0]])
        received_L[name] = batch.responses.rollout_log_probs_L.to(trained_L)
        one = compare(engine.parallel, received_L[name], trained_L, check.received_L.get(name), check.trained_L)
        found.append(one)
        if not one.gap <= bound:
            raise ValueError(
                f"{after} the log-probs of a probe prompt differ by {one.gap:.3g} on average between training and "
                f"{name}, more than --weight-sync-bound {bound:.3g}; see that both run the same model, and raise the "
                "bound if the rollout engine is meant to be that coarse."
            )
        if share >= MIN_RECEIVED and len(check.probe) > MIN_TOKENS and one.is_missed(share):
            raise ValueError(
                f"{after} the log-probs of a probe prompt moved by {one.movement:.3g} on average in training and by "
                f"{one.movement_received:.3g} in {name}; see that it takes every update."
            )
    check.trained_L, check.received_L = trained_L, received_L
    if not found:
        return {}
    worst = max(found, key=lambda one: one.gap)
    metrics = {
        "rollout/weight_sync_gap": worst.gap,
        "rollout/weight_sync_gap_before": worst.gap_before,
        "rollout/probe_movement": worst.movement,
        "rollout/probe_movement_received": worst.movement_received,
        "rollout/probe_received": worst.received,
    }
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _check_tensors(engine: TrainingEngine, sampler: RolloutEngine, updates: WeightUpdates, after: str) -> None:
    """Checks that the engine holds what it was sent, as far as it can look into its weights; a collective.

    Raises:
        ValueError: Some tensors differ.
    """
    for copy, names in sampler.wrong_weights(updates.sent_rows()).items():
        count = engine.parallel.largest(len(names))
        if count:
            first = f", the first of them {names[0]!r}" if names else ""
            raise ValueError(
                f"{after} {count} tensors of {copy} are other than those that were sent{first}; see that it "
                "takes every tensor of every update."
            )


def _expectation(
    engine: TrainingEngine, updates: WeightUpdates, trains_in: Precision
) -> tuple[Precision | None, float]:
    """The rollout engine's precision, and the share of the update that rounding left.

    That is 0 where the probe need not move: no weight that is looked at did, the precision is not known, or training
    is the coarser of the two, so that its own noise moves the probe further than the update does.

    A collective: of a job's ranks some may send nothing and know neither.
    """
    precision, received = updates.precision, 0.0
    level = 0 if precision is None else 1 + COARSENESS.index(precision)
    if precision is not None and updates.moved and coarser(trains_in, precision) == precision:
        received = updates.metrics().get("rollout/update_received", 1.0)
    level = engine.parallel.largest(level)
    share = engine.parallel.largest(round(1000 * min(max(received, 0.0), 1.0))) / 1000
    return (COARSENESS[level - 1] if level else None), share


def _probe_batch(engine: TrainingEngine, token_ids: Sequence[int], log_probs: Sequence[float]) -> TrainingBatch:
    """A text of which all tokens but the first are a response with these log-probs, as far as this rank has it."""
    count, parallel = len(token_ids) - 1, engine.parallel
    place = parallel.context_rank, parallel.context_size
    return make_batch([token_ids], [[1] * count], [log_probs], [[0] * count], *place)


def compare(
    parallel: Parallel,
    received_L: Tensor,
    trained_L: Tensor,
    earlier_L: Tensor | None,
    trained_earlier_L: Tensor | None,
) -> Comparison:
    """Compares the log-probs r of a copy of the weights with those of training, n; a collective.

    Args:
        parallel: The ranks that share the probe.
        received_L: r of this rank's tokens.
        trained_L: n.
        earlier_L: r at the check before, of the same copy; None where it was not there.
        trained_earlier_L: n at the check before; None at the first.

    Returns:
        The comparison over all tokens, the same on every rank.
    """
    gap = gap_before = movement = movement_received = received = math.nan
    if parallel.is_last_stage:

        def total(*terms: Tensor) -> list[float]:
            sums = torch.stack([term.double().sum() for term in terms])
            return [value / parallel.data_size for value in parallel.ranks.all_reduce(sums).tolist()]

        r, n = received_L.double(), trained_L.double()
        tokens, distance = total(torch.ones_like(n), (r - n).abs())
        gap = math.inf if math.isnan(distance) else distance / tokens
        if trained_earlier_L is not None:
            dn = n - trained_earlier_L.double()
            before, moved, square = total((r - trained_earlier_L.double()).abs(), dn.abs(), dn.square())
            gap_before, movement = before / tokens, moved / tokens
            if earlier_L is not None:
                dr = r - earlier_L.double()
                product, moved = total(dr * dn, dr.abs())
                movement_received = moved / tokens
                received = product / square if square > 0 else math.nan
    found = Comparison(
        gap=gap,
        gap_before=gap_before,
        movement=movement,
        movement_received=movement_received,
        received=received,
    )
    return parallel.broadcast_from_last_stage(found)
