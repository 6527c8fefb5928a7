"""Mismatch of the present policy with and without routing replay, token by token."""

from functools import reduce

from torch import Tensor

from slime_tis.correction import GlobalBatch, Ranks, RolloutCorrectionConfig, Statistics, correct
from slime_tis.policy.policy_loss import LossInputs, LossOutputs, LossStep, policy_loss
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


class MeasuredLoss:
    """The policy loss, which also measures the mismatch of the policy that is trained in each micro-batch."""

    def __init__(self, step: LossStep) -> None:
        self._step = step
        self._statistics: list[Statistics] = []

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The loss of one micro-batch."""
        ranks = self._step.global_batch.ranks
        self._statistics.append(mismatch(inputs.tokens, inputs.log_probs_L.detach(), ranks))
        return policy_loss(inputs, self._step)

    @property
    def statistics(self) -> Statistics:
        """Of all micro-batches of this rank."""
        return reduce(Statistics.merge, self._statistics)
