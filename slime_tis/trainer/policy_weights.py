"""The policy's weights on their way from the training engine to the rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.engines.engine import RolloutEngine
from slime_tis.trainer.engines.weight_rounding import WeightRounder
from slime_tis.trainer.engines.weight_updates import WeightUpdates
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.options.megatron import MegatronConfig
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.weight_sync import PROBE_TOKENS, SyncCheck, check_weight_sync, make_probe


@dataclass(kw_only=True)
class PolicyWeights:
    """Sends the policy's weights to the rollout engine: rounded, measured and checked.

    The rollout engine asks for the weights of servers that return (`tensors`, `version`), and it tells in which
    precision it holds each tensor. The two objects therefore need each other; `connect` links them before first use.
    """

    learner: Learner
    config: RolloutConfig
    megatron: MegatronConfig
    timer: Callable[[str], AbstractContextManager[None]]
    sampler: RolloutEngine = field(init=False)
    updates: WeightUpdates = field(init=False)
    """Rounds and measures each update; part of a checkpoint."""
    check: SyncCheck | None = field(init=False, default=None)
    """For --check-weight-sync."""

    def connect(self, sampler: RolloutEngine, prompts: Sequence[Prompt], context_len: int | None) -> None:
        """Sets the receiver.

        Args:
            sampler: The rollout engine.
            prompts: The probe of --check-weight-sync is made from them.
            context_len: Longest text that the model takes, in tokens; None if unknown.
        """
        rounder = WeightRounder(self.config.weight_update_rounding, self.megatron.seed)
        checks = self.config.check_weight_sync
        self.sampler, self.updates = sampler, WeightUpdates(rounder, sampler.weight_precision, samples_all=checks)
        if checks:
            limits = [limit for limit in (PROBE_TOKENS, context_len, sampler.max_context_len) if limit is not None]
            self.check = SyncCheck(
                probe=make_probe(prompts, min(limits)),
                bound=self.config.weight_sync_bound,
                trains_in="bf16" if self.megatron.bf16 else "fp32",
            )

    def version(self) -> int:
        """Returns the optimizer steps made so far."""
        return self.learner.step

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields the current weights, rounded for the rollout engine, by Hugging Face name; a collective."""
        return self.updates.source(self.learner.engine.named_hf_tensors, self.version())()

    def send(self) -> dict[str, float]:
        """Sends the current weights to the rollout engine and returns metrics of the update; a collective.

        Raises:
            ValueError: --check-weight-sync finds a difference between the two engines.
        """
        with self.timer("update_weights"):
            self.sampler.update_weights(self.tensors, self.version())
            metrics = self.updates.metrics()
        if self.check is not None:
            metrics |= check_weight_sync(self.learner.engine, self.sampler, self.check, self.updates)
        return metrics

    @property
    def are_loaded_by_the_engine(self) -> bool:
        """Whether the rollout engine has loaded exactly the weights to train, so that no first update is needed.

        SGLang servers hold the weights that they were started with. A local engine that rounds receives the first
        weights, so that they are rounded as configured and later updates are measured against them.
        """
        config = self.config
        return config.rollout_engine == "local" and config.rollout_precision == "fp32" and not self.megatron.bf16
