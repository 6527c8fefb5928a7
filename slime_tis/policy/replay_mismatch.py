"""Mismatch of the present policy with and without routing replay, token by token."""

from torch import Tensor

from slime_tis.correction import GlobalBatch, Ranks, RolloutCorrectionConfig, Statistics, correct
from slime_tis.policy.tokens import ResponseTokens

CONFIG = RolloutCorrectionConfig(use_tis=True, tis_level="token")
"""The configuration of the statistics: ratios of single tokens, for every correction of the run."""

REPORTED = {
    "mismatch_k3_kl": "mismatch_k3_kl",
    "train_rollout_logprob_abs_diff": "train_rollout_logprob_abs_diff",
    "mis_weight_max_before_clip": "ratio_max",
    "mis_weight_min_before_clip": "ratio_min",
}
"""Metrics of the correction, and their names here."""


def mismatch(tokens: ResponseTokens, log_probs_L: Tensor, ranks: Ranks) -> Statistics:
    """Statistics of the training engine's log-probs against the rollout engine's, over the context-parallel ranks."""
    known = GlobalBatch(ranks=Ranks(context=ranks.context).with_slices(tokens.slices))
    inputs = log_probs_L, tokens.rollout_log_probs_L, tokens.loss_mask_L
    return correct(CONFIG, *inputs, lengths=tokens.lengths, global_batch=known).statistics


def mismatch_metrics(statistics: Statistics) -> dict[str, float]:
    """mismatch_k3_kl, train_rollout_logprob_abs_diff, ratio_max and ratio_min of merged statistics."""
    metrics = statistics.metrics()
    return {name: metrics[metric] for metric, name in REPORTED.items() if metric in metrics}
