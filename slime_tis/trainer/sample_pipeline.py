"""Samples on their way from the rollout engine to the learner.

    prompts → rollout engine → marks of failed samples → rewards → dynamic sampling → filters
    → masks → learner

`SampleSource.next` runs this path once per rollout.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from slime_tis.hf_directory import ModelSizes
from slime_tis.progress import print_line, watched
from slime_tis.trainer.agents.custom_generate import mark_failed_samples, retokenized_message
from slime_tis.trainer.agents.rollout_function import CustomRollout
from slime_tis.trainer.cli.train_options import Arguments
from slime_tis.trainer.data.sample import Sample, SamplingMask
from slime_tis.trainer.data.sample_file import load_samples, save_samples
from slime_tis.trainer.engines.rollout_engine import RolloutEngine
from slime_tis.trainer.megatron.routing_replay import drop_routing
from slime_tis.trainer.reporting.reporters import Timer
from slime_tis.trainer.rewards.rewards import assign_rewards
from slime_tis.trainer.rollout.filter_hub import collect
from slime_tis.trainer.rollout.hooks import ALL_SAMPLES, SAMPLE_FILTER, RolloutHooks
from slime_tis.trainer.rollout.prefetch import Prefetcher, Unfinished
from slime_tis.trainer.rollout.rollout_metrics import pass_rates, rollout_metrics

Groups = list[list[Sample]]


@dataclass(kw_only=True)
class Rollout:
    """The samples of one rollout, ready for training."""

    groups: Groups
    metrics: dict[str, float]
    advantages: list[float] | None
    """One per sample, from --custom-reward-post-process-path; None lets the learner estimate
    them."""


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
    num_rollout: int
    has_warned: bool = False
    """Whether the first retokenized sample of the run was shown."""

    def next(self, rollout_id: int, version: int) -> Rollout:
        """Returns the next rollout; a collective.

        Args:
            rollout_id: Number of the rollout.
            version: Optimizer steps made so far, from which the staleness of tokens is counted.
        """
        start = time.monotonic()
        hooks = self.hooks
        options = self.arguments.rollout
        is_loaded = self.arguments.loop.load_debug_rollout_data is not None
        if is_loaded:
            groups = self._load(rollout_id)
            metrics: dict[str, float] = {}
        else:
            groups, sampled, metrics = self._sample(rollout_id)
        seconds = time.monotonic() - start
        if not is_loaded:
            # Saved samples have passed the filters already.
            hooks.process(SAMPLE_FILTER, groups)
            hooks.process(ALL_SAMPLES, sampled, self.data_source)
            path = self.arguments.loop.save_debug_rollout_data
            if path is not None and self.is_main:
                save_samples(path.format(rollout_id=rollout_id), groups)
        are_episodes = options.custom_generate_function_path is not None
        measured = metrics | rollout_metrics(groups, version, are_episodes=are_episodes)
        if options.log_passrate:
            measured |= {f"passrate/{name}": rate for name, rate in pass_rates(groups).items()}
        if not hooks.logs_rollout(rollout_id, groups, metrics, seconds):
            # The user's function has logged them.
            measured = {}
        # Metrics above count all samples; from here on, samples and tokens lose their loss mask.
        measured |= self._mask(groups, version)
        advantages = None
        shaped = hooks.shape_rewards(groups)
        if shaped is not None:
            raw, advantages = shaped
            measured["rollout/raw_reward"] = sum(raw) / len(raw)
        if not self.is_main:
            # The learner sends every rank its share of the experts.
            drop_routing(groups)
        measured |= self.sampler.metrics() | self.unfinished.metrics()
        return Rollout(groups=groups, metrics=measured, advantages=advantages)

    def _mask(self, groups: Groups, version: int) -> dict[str, float]:
        """Masks tokens that must not be trained, and returns metrics about them."""
        options = self.arguments.rollout
        metrics: dict[str, float] = {}
        mask_removed_samples(groups)
        metrics["rollout/stale_samples"] = mask_stale_samples(
            groups, version, options.max_weight_staleness
        )
        if options.mask_offpolicy_in_partial_rollout:
            metrics["rollout/masked_offpolicy_tokens"] = mask_earlier_tokens(groups)
        return metrics | check_sampling_masks(groups, truncates_sampling=options.truncates_sampling)

    def _load(self, rollout_id: int) -> Groups:
        """Returns the groups of --load-debug-rollout-data."""
        rollout = self.arguments.rollout
        pattern = self.arguments.loop.load_debug_rollout_data
        assert pattern is not None
        path = pattern.format(rollout_id=rollout_id)
        groups = load_samples(
            path, rollout.rollout_batch_size, rollout.n_samples_per_prompt, self.sizes
        )
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
        """Yields batches with rewards, endlessly; dynamic sampling takes as many as it needs."""
        shown = self.is_main and self.arguments.reporting.progress
        while True:
            with (
                self.timer("generate"),
                watched("responses", self.prefetcher.progress, shown=shown),
            ):
                groups = self.prefetcher.next(rollout_id, self.num_rollout - 1)
            if self.arguments.rollout.custom_generate_function_path is not None:
                failures = mark_failed_samples(groups)
                if failures is not None and self.is_main:
                    print_line(f"warning: rollout {rollout_id}: {failures}", sys.stderr)
                self._warn_about_retokenized(rollout_id, groups)
            with self.timer("reward"):
                assign_rewards(groups, self.reward)
            yield groups

    def _warn_about_retokenized(self, rollout_id: int, groups: Groups) -> None:
        """Warns about the first retokenized sample of the run; later ones are only in metrics."""
        message = retokenized_message(groups)
        if message is not None and self.is_main and not self.has_warned:
            print_line(f"warning: rollout {rollout_id}: {message}", sys.stderr)
            self.has_warned = True


def mask_removed_samples(groups: Sequence[Sequence[Sample]]) -> None:
    """Zeroes the loss mask of samples with `remove_sample`.

    Their rewards still count in their group's baseline.
    """
    for sample in chain(*groups):
        if sample.remove_sample:
            sample.loss_mask = [0] * len(sample.loss_mask)


def mask_stale_samples(groups: Sequence[Sequence[Sample]], version: int, limit: int | None) -> int:
    """Zeroes the loss mask of samples with a token that is over `limit` versions old.

    Returns:
        The number of these samples.
    """
    if limit is None:
        return 0
    count = 0
    for sample in chain(*groups):
        # A sample without trained tokens is never stale.
        oldest = min(sample.trained_versions, default=version)
        if version - oldest > limit:
            sample.loss_mask = [0] * len(sample.loss_mask)
            count += 1
    return count


def mask_earlier_tokens(groups: Sequence[Sequence[Sample]]) -> float:
    """Zeroes the loss mask of tokens sampled by older weights than the sample's last token.

    Returns:
        The share of trained tokens that were masked.
    """
    trained = 0
    masked = 0
    for sample in chain(*groups):
        newest = max(sample.trained_versions, default=0)
        loss_mask = []
        for value, version in zip(sample.loss_mask, sample.weight_versions, strict=True):
            if value > 0:
                trained += 1
                if version < newest:
                    masked += 1
                    value = 0
            loss_mask.append(value)
        sample.loss_mask = loss_mask
    return masked / max(trained, 1)


def check_sampling_masks(
    groups: Sequence[Sequence[Sample]], *, truncates_sampling: bool
) -> dict[str, float]:
    """Removes sampling masks that exclude the sampled token.

    Under such a mask the sampled token would have probability 0. Its rollout log-prob becomes NaN,
    so that --nonfinite-policy handles the token.

    Returns:
        Metrics of all masks: the mean number of tokens in a set, the share of trained tokens
        without a set, and the number of removed sets. Empty if nothing was truncated or recorded.
    """
    samples = list(chain(*groups))
    if not truncates_sampling and all(sample.sampling_mask is None for sample in samples):
        return {}
    masks = []
    tokens: list[int] = []
    loss_mask: list[int] = []
    for sample in samples:
        mask = sample.sampling_mask
        if mask is None:
            mask = SamplingMask.unrecorded(sample.response_length)
        masks.append(mask)
        tokens += sample.response_ids
        loss_mask += sample.loss_mask
    all_masks = SamplingMask.cat(masks)
    violations = ~all_masks.contains(torch.tensor(tokens, dtype=torch.int32))
    is_trained = torch.tensor(loss_mask) > 0
    is_recorded = all_masks.lengths > 0
    if violations.any():
        per_sample = violations.split([len(mask) for mask in masks])
        for sample, mask, positions in zip(samples, masks, per_sample, strict=True):
            if positions.any():
                sample.sampling_mask = mask.without(positions)
                for position in positions.nonzero().squeeze(1).tolist():
                    sample.rollout_log_probs[position] = math.nan
    mask_tokens = float(all_masks.lengths.sum())
    missing = float((is_trained & ~is_recorded).sum())
    return {
        "rollout/sampling_mask_tokens": mask_tokens / max(int(is_recorded.sum()), 1),
        "rollout/sampling_mask_missing": missing / max(int(is_trained.sum()), 1),
        "rollout/sampling_mask_violations": float(violations.sum()),
    }


def require_sampling_masks(path: str, groups: Sequence[Sequence[Sample]]) -> None:
    """Raises ValueError if a trained sample has no mask, although sampling was truncated."""
    missing = 0
    for sample in chain(*groups):
        if sample.sampling_mask is None and any(sample.loss_mask):
            missing += 1
    if missing:
        raise ValueError(
            f"{missing} samples of the rollout data {str(path)!r} have no sampling mask; remove"
            " --rollout-top-p and --rollout-top-k if sampling was not truncated, or add"
            " --allow-truncation-bias."
        )
