"""Adds to a table which criterion rejected each token, vetoes, and weights before their bounds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slime_tis.analysis.dumps.table import Bool, TokenTable
from slime_tis.correction import (
    LEVELS,
    LOG_RATIO_BOUND,
    Criterion,
    GlobalBatch,
    Ranks,
    RolloutCorrectionConfig,
    correct,
)
from slime_tis.policy.policy_loss import without_correction

UNBOUNDED = 2 * float(np.exp(LOG_RATIO_BOUND))
"""An upper bound that no weight reaches: weights are at most e^20."""
UNEXPLAINED_CRITERION = "other"
"""Criterion of masked tokens that the correction accepts: off-policy sequence masking, or a user-defined function."""


def annotated(
    table: TokenTable, config: RolloutCorrectionConfig, accepted: Bool, global_batch: GlobalBatch
) -> TokenTable:
    """The table with weights before bounds, the criteria that reject each token, and vetoes.

    Args:
        table: Complete samples of one step.
        config: Correction of the step.
        accepted: [N] tokens that counted in the loss.
        global_batch: Statistics of the batch over all ranks.
    """
    global_batch = replace(global_batch, ranks=Ranks())
    trained = table.loss_mask > 0
    rejected: dict[str, Bool] = {}
    for name, criterion in single_criteria(config).items():
        if not criterion.needs_advantages or table.advantage is not None:
            rejected[name] = trained & ~_corrected(table, criterion, global_batch).mask.numpy()
    if config.touches_loss and config.nonfinite_policy == "reject":
        rejected = {name: mask & table.valid for name, mask in rejected.items()}  # they ignore tokens without log-probs
        rejected["nonfinite"] = trained & ~table.valid
    explained = np.any([*rejected.values(), np.zeros(table.tokens, np.bool_)], axis=0)
    rejected[UNEXPLAINED_CRITERION] = trained & ~accepted & ~explained
    bits = np.zeros(table.tokens, np.int32)
    for bit, mask in enumerate(rejected.values()):
        bits |= mask.astype(np.int32) << bit
    level, nonfinite = config.tis_level, config.nonfinite_policy
    unbounded = RolloutCorrectionConfig(
        use_tis=True, tis_level=level, tis_upper_bound=UNBOUNDED, nonfinite_policy=nonfinite
    )
    return replace(
        table,
        weight=_corrected(table, unbounded, GlobalBatch()).weights.numpy(),
        rejected=bits,
        vetoed=rejected.get("veto", np.zeros(table.tokens)).astype(np.uint8),
        metadata={**table.metadata, "criteria": list(rejected)},
    )


def single_criteria(config: RolloutCorrectionConfig) -> dict[str, RolloutCorrectionConfig]:
    """One configuration per rejection criterion, which has only this criterion, by the criterion's name.

    Names are the names of the metrics (the level, or verl's names), "divergence_mask", "tis_mask" for weights
    in mode mask, "second_moment" and "veto".
    """
    base = replace(without_correction(config), use_rollout_logprobs=False, old_logprobs="recompute")
    single = {criterion.name: replace(base, **_options(criterion, config)) for criterion in config.rejections}
    if config.rejects_weights:
        single["tis_mask"] = replace(base, use_tis=True, tis_batch_normalize=False)
    if config.rs_second_moment_bound is not None:
        single["second_moment"] = replace(base, rs_second_moment_bound=config.rs_second_moment_bound)
    if config.vetoes:
        lower, upper = config.rs_veto_threshold, config.rs_veto_upper_threshold
        single["veto"] = replace(base, rs_veto_threshold=lower, rs_veto_upper_threshold=upper)
    return single


def _options(criterion: Criterion, config: RolloutCorrectionConfig) -> Mapping[str, Any]:
    if criterion.anchor is not None:
        return {"divergence_mask": config.divergence_mask}
    if criterion.name not in LEVELS:
        low, high = criterion.lower, criterion.upper
        threshold = f"{high!r}" if low is None else f"{low!r}_{high!r}"
        return {"rollout_rs": criterion.name, "rollout_rs_threshold": threshold}
    return {"use_rs": True, "rs_z_score": config.rs_z_score, "rs_target_fraction": config.rs_target_fraction}


def _corrected(table: TokenTable, config: RolloutCorrectionConfig, global_batch: GlobalBatch) -> Any:
    columns = (table.policy_log_prob, table.rollout_log_prob, table.loss_mask)
    tensors = [torch.from_numpy(np.array(column)) for column in columns]
    return correct(
        config,
        *tensors,
        lengths=table.response_length.tolist(),
        current_log_probs=torch.from_numpy(np.array(table.train_log_prob)),
        advantages=None if table.advantage is None else torch.from_numpy(np.array(table.advantage)),
        global_batch=global_batch,
    )
