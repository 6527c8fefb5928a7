"""Samples on their way from the rollout engine to the learner.

    prompts → rollout engine → failed samples are marked → rewards → dynamic sampling → PIPELINE → learner

`SampleSource.next` runs this path once per rollout. `PIPELINE` lists in order everything that inspects or edits the
samples of a complete rollout.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.agents.custom_generate import mark_failed_samples
from slime_tis.trainer.agents.rollout_function import CustomRollout
from slime_tis.trainer.cli.run_options import Arguments
from slime_tis.trainer.data.dump import load_samples, save_samples
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.engines.engine import RolloutEngine
from slime_tis.trainer.reporting.progress import shown_progress
from slime_tis.trainer.reporting.timing import Timer
from slime_tis.trainer.rewards.rewards import assign_rewards
from slime_tis.trainer.rollout.dynamic_sampling import collect
from slime_tis.trainer.rollout.hooks import RolloutHooks
from slime_tis.trainer.rollout.metrics import rollout_metrics
from slime_tis.trainer.rollout.prefetch import Prefetcher
from slime_tis.trainer.rollout.unfinished import Unfinished

Groups = list[list[Sample]]
"""The samples of each prompt."""


@dataclass(kw_only=True)
class Rollout:
    """The samples of one rollout; each step of `PIPELINE` edits them in place."""

    rollout_id: int
    version: int
    """Version of the policy's weights before training on the rollout, in optimizer steps."""
    groups: Groups
    """Samples to train on."""
    sampled: Groups
    """All samples, including groups that dynamic sampling dropped."""
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Time to sample and score."""
    is_loaded: bool = False
    """Whether the samples come from --load-debug-rollout-data."""
    advantages: list[float] | None = None
    """One per sample, from --custom-reward-post-process-path; None lets the learner estimate them."""


@dataclass(kw_only=True)
class SampleSource:
    """Produces the rollouts of a run, identical on every rank."""

    arguments: Arguments
    is_main: bool
    timer: Timer
    sizes: ModelSizes
    sampler: RolloutEngine
    prefetcher: Prefetcher
    unfinished: Unfinished
    """Partially generated groups that later batches resume."""
    custom_rollout: CustomRollout | None
    """The function of --rollout-function-path, which replaces the prefetcher."""
    reward: Callable[[list[Sample]], list[float]]
    hooks: RolloutHooks
    data_source: object
    """The source of the prompts, as user functions see it."""
    num_rollout: int
    """Rollouts of the whole run."""

    def next(self, rollout_id: int, version: int) -> Rollout:
        """Returns the next rollout, ready for training; a collective.

        Args:
            rollout_id: Number of the rollout.
            version: Optimizer steps made so far.
        """
        start = time.monotonic()
        if self.arguments.loop.load_debug_rollout_data is not None:
            groups = self._load(rollout_id)
            rollout = Rollout(rollout_id=rollout_id, version=version, groups=groups, sampled=groups, is_loaded=True)
        else:
            groups, sampled, metrics = self._sample(rollout_id)
            rollout = Rollout(rollout_id=rollout_id, version=version, groups=groups, sampled=sampled, metrics=metrics)
        rollout.seconds = time.monotonic() - start
        for step in PIPELINE:
            step(self, rollout)
        rollout.metrics |= self.sampler.metrics() | self.unfinished.metrics()
        return rollout

    def state(self) -> dict[str, Any]:
        """State of the prompts before those in flight, which a resumed run samples again."""
        return self.prefetcher.state_dict()

    def _load(self, rollout_id: int) -> Groups:
        loop, rollout = self.arguments.loop, self.arguments.rollout
        assert loop.load_debug_rollout_data is not None
        path = loop.load_debug_rollout_data.format(rollout_id=rollout_id)
        groups = load_samples(path, rollout.rollout_batch_size, rollout.n_samples_per_prompt, self.sizes)
        if rollout.truncates_sampling and not rollout.allow_truncation_bias:
            require_sampling_masks(path, groups)
        return groups

    def _sample(self, rollout_id: int) -> tuple[Groups, Groups, dict[str, float]]:
        """Returns groups to train on, all sampled groups, and metrics."""
        rollout = self.arguments.rollout
        if self.custom_rollout is not None:
            with self.timer("generate"):
                groups, metrics = self.custom_rollout(rollout_id)
            with self.timer("reward"):
                assign_rewards(groups, self.reward)
            return groups, groups, metrics
        collected = collect(
            self._scored_batches(rollout_id),
            rollout.rollout_batch_size,
            self.hooks.judge,
            max_batches=rollout.dynamic_sampling_max_batches,
        )
        return collected.groups, collected.sampled, collected.metrics

    def _scored_batches(self, rollout_id: int) -> Iterator[Groups]:
        """Yields answered and scored batches of prompts, without end."""
        shown = self.is_main and self.arguments.reporting.progress
        while True:
            with self.timer("generate"), shown_progress(self.prefetcher.progress, "responses", shown=shown):
                groups = self.prefetcher.next(rollout_id, self.num_rollout - 1)
            if self.arguments.rollout.custom_generate_function_path is not None:
                failures = mark_failed_samples(groups)
                if failures is not None and self.is_main:
                    tqdm.write(f"warning: rollout {rollout_id}: {failures}", file=sys.stderr)
            with self.timer("reward"):
                assign_rewards(groups, self.reward)
            yield groups


def filter_samples(source: SampleSource, rollout: Rollout) -> None:
    """Calls --rollout-sample-filter-path, which sets `remove_sample`."""
    if not rollout.is_loaded:
        source.hooks.filter_samples(rollout.groups)


def process_all_samples(source: SampleSource, rollout: Rollout) -> None:
    """Calls --rollout-all-samples-process-path with every group, including dropped groups."""
    if not rollout.is_loaded:
        source.hooks.process_all(rollout.sampled, source.data_source)


def save_rollout(source: SampleSource, rollout: Rollout) -> None:
    """Writes --save-debug-rollout-data."""
    path = source.arguments.loop.save_debug_rollout_data
    if path is not None and source.is_main and not rollout.is_loaded:
        save_samples(path.format(rollout_id=rollout.rollout_id), rollout.groups)


def measure_rollout(source: SampleSource, rollout: Rollout) -> None:
    """Adds rollout/… metrics, unless --custom-rollout-log-function-path logs the rollout itself."""
    sampling_metrics = rollout.metrics
    are_episodes = source.arguments.rollout.custom_generate_function_path is not None
    rollout.metrics = sampling_metrics | rollout_metrics(rollout.groups, rollout.version, are_episodes=are_episodes)
    if not source.hooks.logs_rollout(rollout.rollout_id, rollout.groups, sampling_metrics, rollout.seconds):
        rollout.metrics = {}


def mask_removed(source: SampleSource, rollout: Rollout) -> None:
    """Excludes samples with `remove_sample` from the loss."""
    mask_removed_samples(rollout.groups)


def mask_stale(source: SampleSource, rollout: Rollout) -> None:
    """Excludes samples older than --max-weight-staleness from the loss."""
    limit = source.arguments.rollout.max_weight_staleness
    rollout.metrics["rollout/stale_samples"] = mask_stale_samples(rollout.groups, rollout.version, limit)


def check_masks(source: SampleSource, rollout: Rollout) -> None:
    """Checks and measures the sampling masks of truncated sampling."""
    truncates = source.arguments.rollout.truncates_sampling
    rollout.metrics |= check_sampling_masks(rollout.groups, truncates_sampling=truncates)


def shape_rewards(source: SampleSource, rollout: Rollout) -> None:
    """Calls --custom-reward-post-process-path, which returns the advantages."""
    shaped = source.hooks.shape_rewards(rollout.groups)
    if shaped is not None:
        rollout.advantages = shaped.advantages
        rollout.metrics["rollout/raw_reward"] = sum(shaped.raw) / len(shaped.raw)


PIPELINE: tuple[Callable[[SampleSource, Rollout], None], ...] = (
    filter_samples,
    process_all_samples,
    save_rollout,
    measure_rollout,
    mask_removed,
    mask_stale,
    check_masks,
    shape_rewards,
)
"""Steps between a scored rollout and the learner, in order. The first three skip loaded samples."""


def mask_removed_samples(groups: Sequence[Sequence[Sample]]) -> None:
    """Zeroes the loss mask of samples with `remove_sample`; their rewards still count in their group's baseline."""
    for sample in (sample for group in groups for sample in group):
        if sample.remove_sample:
            sample.loss_mask = [0] * len(sample.loss_mask)


def mask_stale_samples(groups: Sequence[Sequence[Sample]], version: int, limit: int | None) -> int:
    """Zeroes the loss mask of samples whose oldest token was sampled more than `limit` versions ago.

    Masked samples stay in their groups, so that batches keep their shape. They do not count in the loss or in their
    group's baseline.

    Args:
        groups: Samples of each prompt, changed in place.
        version: Version of the policy's weights, in optimizer steps.
        limit: Largest staleness to train on, in optimizer steps; None allows any.

    Returns:
        The number of masked samples.
    """
    if limit is None:
        return 0
    samples = [sample for group in groups for sample in group]
    stale = [sample for sample in samples if version - min(sample.trained_versions, default=version) > limit]
    for sample in stale:
        sample.loss_mask = [0] * len(sample.loss_mask)
    return len(stale)


def check_sampling_masks(groups: Sequence[Sequence[Sample]], *, truncates_sampling: bool) -> dict[str, float]:
    """Removes sampling masks that exclude the sampled token, and measures the masks of a rollout.

    Under such a mask the sampled token would have probability 0. The check removes the mask and sets the token's
    rollout log-prob to NaN, so that --nonfinite-policy handles the token.

    Args:
        groups: Samples of each prompt, changed in place.
        truncates_sampling: Whether top-p or top-k exclude tokens.

    Returns:
        rollout/sampling_mask_… metrics; empty without truncation and without masks.
    """
    samples = [sample for group in groups for sample in group]
    if not truncates_sampling and all(sample.sampling_mask is None for sample in samples):
        return {}
    masks = [sample.sampling_mask or SamplingMask.unrecorded(sample.response_length) for sample in samples]
    all_masks = SamplingMask.cat(masks)
    token_ids = torch.tensor([token for sample in samples for token in sample.response_ids], dtype=torch.int32)
    violations = ~all_masks.contains(token_ids)
    trained = torch.tensor([value for sample in samples for value in sample.loss_mask]) > 0
    recorded = all_masks.lengths > 0
    if violations.any():
        per_sample = violations.split([len(mask) for mask in masks])
        for sample, mask, positions in zip(samples, masks, per_sample, strict=True):
            if positions.any():
                sample.sampling_mask = mask.without(positions)
                for position in positions.nonzero().squeeze(1).tolist():
                    sample.rollout_log_probs[position] = math.nan
    return {
        "rollout/sampling_mask_tokens": float(all_masks.lengths.sum()) / max(int(recorded.sum()), 1),
        "rollout/sampling_mask_missing": float((trained & ~recorded).sum()) / max(int(trained.sum()), 1),
        "rollout/sampling_mask_violations": float(violations.sum()),
    }


def require_sampling_masks(path: str, groups: Sequence[Sequence[Sample]]) -> None:
    """Checks that loaded samples have sampling masks.

    Raises:
        ValueError: A trained sample has no mask, although sampling was truncated.
    """
    missing = sum(sample.sampling_mask is None and any(sample.loss_mask) for group in groups for sample in group)
    if missing:
        raise ValueError(
            f"{missing} samples of the rollout data {str(path)!r} have no sampling mask, but --rollout-top-p or "
            "--rollout-top-k truncates sampling; remove these two flags if sampling was not truncated, or add "
            "--allow-truncation-bias."
        )
