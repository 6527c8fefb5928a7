"""Sends the policy's weights to the rollout engine, and checks their arrival.

With `--check-weight-sync`, four checks follow every update, from the most exact to the most
general:

    cache      no copy of the weights has kept keys and values of earlier weights
    tensors    each copy of the weights contains the sent values, if the engine can read its weights
    movement   the probe's log-probs moved as in training:  mean |Δr| is not far below mean |Δn|
    gap        the probe's log-probs are near the training engine's:  gap = mean |r − n|

n are the probe's log-probs of the training engine, r of the rollout engine, and Δ is the change
since the last update. An engine that misses an update has Δr = 0, also if rounding and kernels
cause a gap at every update.
"""

import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain

import torch
from torch import Tensor

from slime_tis.peft_directory import AdapterConfig
from slime_tis.progress import print_line
from slime_tis.trainer.adapter_check import AdapterCheck, trial
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.engines.rollout_engine import RolloutEngine, WeightSource
from slime_tis.trainer.engines.weight_rounding import COARSENESS, Precision, WeightRounder, coarser
from slime_tis.trainer.engines.weight_updates import WeightUpdates
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.lora_weights import adapted_layers, adapter_config
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.training_engine import TrainingEngine

MIN_CACHED = 16
"""Tokens of the cache's probe that a copy must have kept to be refused. The probe is random, so no
prompt has as long a prefix in common with it."""
PROBE_PROMPTS = 64
"""Largest number of prompts in the probe."""
PROBE_TOKENS = 512
"""Largest length of the probe, in tokens."""
MIN_TOKENS = 16
"""Shortest probe whose movement is checked, in tokens."""
MIN_RECEIVED = 0.5
"""The movement check needs this share of the weight update to survive rounding."""
MIN_MOVEMENT = 0.25
"""An update counts as missed if log-probs move less than this fraction of training's movement times
that share."""
MAX_GAP: dict[Precision, float] = {
    "fp32": 0.01,
    "fp16": 0.05,
    "bf16": 0.15,
    "int8": 0.2,
    "fp8": 0.5,
    "int4": 2.0,
}
"""Largest mean gap of long probes, by the coarser precision of the two engines. The bounds are
three to four times the mean log-prob difference of SmolLM2-135M: 0.04 in bf16, 0.05 in int8 and
0.13 in fp8."""
SHORT_PROBE_MARGIN = 4.0
"""The bound for n tokens grows by the factor 1 + SHORT_PROBE_MARGIN / √n."""
METRICS = {
    "gap": "rollout/weight_sync_gap",
    "gap_before": "rollout/weight_sync_gap_before",
    "movement": "rollout/probe_movement",
    "movement_received": "rollout/probe_movement_received",
    "received": "rollout/probe_received",
}
"""Metric names by the fields of `Comparison`."""


@dataclass(kw_only=True)
class SyncCheck:
    """A comparison of the two engines' weights and log-probs after every update."""

    probe: tuple[int, ...]
    cache_probe: tuple[int, ...] = ()
    """A random text that only this check sends, so that nothing of it is cached after an update."""
    bound: float | None
    """Largest mean |r − n|, in nats per token; None derives it from precision and probe length."""
    trains_in: Precision
    trained_L: Tensor | None = None
    """Log-probs [L] of the probe by the training engine at the previous check."""
    received_L: dict[str, Tensor] = field(default_factory=dict)
    """Log-probs [L] of the probe by each copy of the rollout engine's weights at the previous
    check."""


def max_gap(trains_in: Precision, samples_in: Precision | None, tokens: int) -> float:
    """Returns the largest mean |r − n| that the precisions of the two engines explain.

        MAX_GAP[the coarser precision] · (1 + SHORT_PROBE_MARGIN / √tokens)

    Args:
        trains_in: Precision of the training engine.
        samples_in: Precision of the rollout engine; None, if it is unknown, counts as fp8.
        tokens: Number of tokens in the mean.

    Returns:
        The bound in nats per token.
    """
    precision = coarser(trains_in, samples_in or "fp8")
    return MAX_GAP[precision] * (1 + SHORT_PROBE_MARGIN / math.sqrt(tokens))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The probe's log-probs from one copy of the rollout engine's weights, and from training."""

    gap: float
    """Mean |r − n|, in nats per token; infinite if a log-prob is not finite."""
    gap_before: float = math.nan
    """Mean |r − n'| to the training engine at the previous check."""
    movement: float = math.nan
    """Mean |Δn|, in nats per token; NaN at the first check, as the fields below."""
    movement_received: float = math.nan
    """Mean |Δr|, in nats per token."""
    received: float = math.nan
    """⟨Δr, Δn⟩ / ⟨Δn, Δn⟩; NaN also if nothing moved."""

    def is_missed(self, share: float = 1.0) -> bool:
        """Returns whether only training's log-probs moved.

        `share` of the update survived rounding, so that at least this share of the movement is due.
        """
        return self.movement_received < MIN_MOVEMENT * share * self.movement


@dataclass(kw_only=True)
class PolicyWeights:
    """Sends the policy's weights to the rollout engine: rounded, measured and checked."""

    learner: Learner
    config: RolloutConfig
    megatron: MegatronConfig
    sampler: RolloutEngine = field(init=False)
    updates: WeightUpdates = field(init=False)
    """Rounds and measures each update; part of a checkpoint."""
    check: SyncCheck | None = field(init=False, default=None)
    adapter_check: AdapterCheck | None = field(init=False, default=None)
    """The check of LoRA adapters; None without adapters."""

    def connect(
        self, sampler: RolloutEngine, prompts: Sequence[Prompt], context_len: int | None
    ) -> None:
        """Sets the receiver.

        Args:
            sampler: The rollout engine.
            prompts: Training prompts, some of which form the probe.
            context_len: Context of the model in tokens, which limits the probe; None if unlimited.
        """
        rounding = self.config.weight_update_rounding
        rounder = WeightRounder(rounding, self.megatron.seed)
        checks = self.config.check_weight_sync
        self.sampler = sampler
        self.updates = WeightUpdates(rounder, sampler.weight_precision, samples_all=checks)
        engine = self.learner.engine
        if self.unmerged_adapter is not None:
            # That of the adapted layers, because the updates only have A and B.
            layer = adapted_layers(engine.model, engine.parallel)[0].name
            self.updates.precision = sampler.weight_precision(f"{layer}.weight")
        if not (checks or self.megatron.trains_adapters):
            return
        limits = (PROBE_TOKENS, context_len, sampler.max_context_len)
        probe_len = min(limit for limit in limits if limit is not None)
        probe = make_probe(prompts, probe_len)
        if self.megatron.trains_adapters:
            self.adapter_check = AdapterCheck(
                engine=engine,
                sampler=sampler,
                probe=probe,
                rounds_to_nearest=rounding == "nearest" and self.unmerged_adapter is None,
            )
        if checks:
            self.check = SyncCheck(
                probe=probe,
                cache_probe=make_cache_probe(probe, probe_len),
                bound=self.config.weight_sync_bound,
                trains_in=self.megatron.precision,
            )

    def version(self) -> int:
        """Returns the optimizer steps made so far."""
        return self.learner.step

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields the current weights by Hugging Face name, rounded for the rollout engine.

        A collective.
        """
        weights: WeightSource = self.learner.engine.named_hf_tensors
        if self.unmerged_adapter is not None:
            weights = self.learner.engine.named_adapter_tensors
        return self.updates.source(weights, self.version())()

    @property
    def unmerged_adapter(self) -> AdapterConfig | None:
        """Settings of the LoRA adapter that is sent unmerged; None if all weights are sent."""
        if not self.megatron.trains_adapters or self.megatron.rollout_lora == "merged":
            return None
        # From the model, because the directory of --lora-adapter-path may be gone by now.
        return adapter_config(self.learner.engine.model)

    def send(self) -> dict[str, float]:
        """Sends and checks the current weights and returns metrics of the update; a collective."""
        with self.learner.engine.timer("update_weights"):
            self.sampler.update_weights(self.tensors, self.version())
            metrics = self.updates.metrics()
        if self.check is not None:
            metrics |= check_weight_sync(
                self.learner.engine, self.sampler, self.check, self.updates
            )
        if self.adapter_check is not None:
            metrics |= self.adapter_check()
        return metrics

    def prove_adapter(self) -> list[str]:
        """Proves before the first step that the engine applies LoRA adapters; a collective.

        If the adapter's effect is too small for a proof (a new adapter has none), a random adapter
        takes its place for a trial.

        Returns:
            Lines to print; none without adapters.

        Raises:
            ValueError: The engine does not apply the adapter.
        """
        check = self.adapter_check
        if check is None:
            return []
        if self.sampler.weight_version != self.version():
            # The engine was resumed with older weights than training, so log-probs differ.
            return ["LoRA adapters are checked after the next weight update"]
        shares = check.checked_shares()
        if check.is_proof(shares):
            return [check.summary(shares, is_trial=False)]
        with trial(self.learner.engine):
            self.sampler.update_weights(self.tensors, self.version())
            line = check.summary(check.checked_shares(), is_trial=True)
        self.sampler.update_weights(self.tensors, self.version())
        return [line]

    @property
    def are_loaded_by_the_engine(self) -> bool:
        """Whether the rollout engine has loaded exactly the weights to train.

        Then no update is needed before the first rollout.
        """
        if self.megatron.lora_adapter_path is not None:
            return False
        precisions = {self.config.rollout_precision, self.megatron.precision}
        return self.config.rollout_engine == "local" and precisions == {"fp32"}


def make_probe(prompts: Sequence[Prompt], limit: int = PROBE_TOKENS) -> tuple[int, ...]:
    """Returns the token ids of the longest prompt and of other distinct prompts.

    These are two to `limit` tokens.
    """
    texts = [tuple(prompt.token_ids) for prompt in prompts[:PROBE_PROMPTS]]
    longest = max(texts, key=len)
    distinct = dict.fromkeys([longest, *texts])  # a set that keeps the order
    probe = tuple(chain(*distinct))[:limit]
    if len(probe) == 1:  # a log-prob needs a token before it
        return probe * 2
    return probe


def make_cache_probe(probe: Sequence[int], length: int) -> tuple[int, ...]:
    """Returns a random text of the probe's tokens, the same in every run.

    Servers cache complete blocks, of up to 128 tokens, so a short probe finds nothing.
    """
    return tuple(random.Random(0).choices(probe, k=length))


def check_weight_sync(
    engine: TrainingEngine, sampler: RolloutEngine, check: SyncCheck, updates: WeightUpdates
) -> dict[str, float]:
    """Compares the rollout engine with the sent tensors and with the training engine.

    A collective, after every update.

    Returns:
        Metrics of the copy of the weights with the largest gap.

    Raises:
        ValueError: A copy of the weights differs from the sent ones, its log-probs are too far
            from the training engine's, or did not follow their movement.
    """
    after = f"parameter-sync error: after the update to step {sampler.weight_version}"
    check_caches(sampler, check.cache_probe, after)
    check_tensors(engine.parallel, sampler, updates, after)
    precision, share = _expectation(engine, updates, check.trains_in)
    bound = check.bound
    if bound is None:
        bound = max_gap(check.trains_in, precision, len(check.probe) - 1)
    context_rank = engine.parallel.context_rank
    context_size = engine.parallel.context_size
    trained_L: Tensor | None = None
    received_L: dict[str, Tensor] = {}
    comparisons: list[Comparison] = []
    for copy, log_probs in sampler.prompt_log_probs(check.probe).items():
        count = len(log_probs)
        batch = make_batch(
            [check.probe], [[1] * count], [log_probs], [[0] * count], context_rank, context_size
        )
        # The same for every copy.
        if trained_L is None:
            # Engines report a prompt's log-probs at temperature 1.
            with engine.at_temperature(1.0):
                trained_L = engine.log_probs(batch, [[0]])
        received_L[copy] = batch.responses.rollout_log_probs_L.to(trained_L)
        comparison = compare(
            engine.parallel,
            received_L[copy],
            trained_L,
            check.received_L.get(copy),
            check.trained_L,
        )
        comparisons.append(comparison)
        # Negated, so that a gap of NaN is refused.
        if not comparison.gap <= bound:
            raise ValueError(
                f"{after} the log-probs of a probe prompt differ by {comparison.gap:.3g} on average"
                f" between training and {copy}, more than --weight-sync-bound {bound:.3g}; check"
                " that both run the same model, and raise the bound if this precision of the"
                " rollout engine is intended."
            )
        must_move = share >= MIN_RECEIVED and len(check.probe) > MIN_TOKENS
        if must_move and comparison.is_missed(share):
            raise ValueError(
                f"{after} the log-probs of a probe prompt moved by {comparison.movement:.3g} on"
                f" average in training and by {comparison.movement_received:.3g} in {copy}; check"
                " that it applies every update."
            )
    check.trained_L = trained_L
    check.received_L = received_L
    if not comparisons:
        if engine.parallel.is_main:
            print_line(
                f"warning: the update to step {sampler.weight_version} was not checked: no server"
                " answered the probe of --check-weight-sync.",
                sys.stderr,
            )
        return {}
    worst = asdict(max(comparisons, key=lambda comparison: comparison.gap))
    return {METRICS[name]: value for name, value in worst.items() if not math.isnan(value)}


def check_caches(sampler: RolloutEngine, probe: Sequence[int], after: str) -> None:
    """Raises ValueError if a copy of the weights has kept keys and values over an update."""
    for copy, count in sampler.cached_tokens(probe).items():
        if count >= MIN_CACHED:
            raise ValueError(
                f"{after} {copy} still has keys and values that the earlier weights computed: it"
                f" took {count} tokens of a text from its prefix cache; see that an update empties"
                " the cache."
            )


def check_tensors(
    parallel: Parallel, sampler: RolloutEngine, updates: WeightUpdates, after: str
) -> None:
    """Raises ValueError if a copy of the weights differs from the sent tensors; a collective."""
    for copy, names in sampler.wrong_weights(updates.sent_rows()).items():
        # A rank whose part of the tensors arrived must stop with the others.
        count = parallel.largest(len(names))
        if count:
            first = ""
            if names:
                first = f" (first: {names[0]!r})"
            raise ValueError(
                f"{after} {count} tensors of {copy} differ from the sent tensors{first}."
            )


def _expectation(
    engine: TrainingEngine, updates: WeightUpdates, trains_in: Precision
) -> tuple[Precision | None, float]:
    """Returns the rollout engine's precision, and the share of the update that survived rounding.

    A collective. The share is 0 if the probe need not move: no measured weight moved, the precision
    is unknown, or training is the coarser of the two. In the last case, training's noise moves the
    probe further than the update. Ranks that send nothing get both values from the others.
    """
    precision = updates.precision
    level = 0  # on a rank that sends nothing
    received = 0.0
    if precision is not None:
        level = 1 + COARSENESS.index(precision)
        if updates.moved and coarser(trains_in, precision) == precision:
            received = updates.metrics().get("rollout/update_received", 1.0)
    level = engine.parallel.largest(level)  # 0 if no rank knows the precision
    # `largest` compares integers; thousandths are fine enough.
    thousandths = round(1000 * min(max(received, 0.0), 1.0))
    share = engine.parallel.largest(thousandths) / 1000
    if level == 0:
        return None, share
    return COARSENESS[level - 1], share


def compare(
    parallel: Parallel,
    received_L: Tensor,
    trained_L: Tensor,
    earlier_L: Tensor | None,
    trained_earlier_L: Tensor | None,
) -> Comparison:
    """Compares the log-probs of a copy of the weights with the training engine's; a collective.

    Args:
        parallel: The ranks, which own slices of the probe.
        received_L: r, this rank's slice.
        trained_L: n, this rank's slice.
        earlier_L: r at the previous check; None if there was none.
        trained_earlier_L: n at the previous check; None if there was none.

    Returns:
        The comparison over all ranks' slices, equal on every rank.
    """
    values = {"gap": math.nan}
    if parallel.is_last_stage:

        def total(*terms: Tensor) -> list[float]:
            """Returns the terms summed over the probe, which every data-parallel rank has."""
            sums = torch.stack([term.double().sum() for term in terms])
            over_ranks: list[float] = parallel.ranks.all_reduce(sums).tolist()
            return [value / parallel.data_size for value in over_ranks]

        r = received_L.double()
        n = trained_L.double()
        tokens, distance = total(torch.ones_like(n), (r - n).abs())
        values["gap"] = distance / tokens
        # Infinite instead of NaN, so that comparisons with a bound see it as large.
        if math.isnan(distance):
            values["gap"] = math.inf
        if trained_earlier_L is not None:
            n_before = trained_earlier_L.double()
            dn = n - n_before
            before, moved, square = total((r - n_before).abs(), dn.abs(), dn.square())
            values |= {"gap_before": before / tokens, "movement": moved / tokens}
            if earlier_L is not None:
                dr = r - earlier_L.double()
                product, moved = total(dr * dn, dr.abs())
                values["movement_received"] = moved / tokens
                values["received"] = math.nan
                if square > 0:
                    values["received"] = product / square
    return parallel.broadcast_from_last_stage(Comparison(**values))
