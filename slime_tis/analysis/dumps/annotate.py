"""Which criterion rejected which token, and weights before their bounds: what a correction says of a table's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slime_tis.analysis.dumps.table import Bool, Column, TokenTable
from slime_tis.correction import LOG_RATIO_BOUND, Criterion, GlobalBatch, Ranks, RolloutCorrectionConfig, correct
from slime_tis.correction.criteria import LEVEL_AGGREGATION
from slime_tis.policy.policy_loss import without_correction

UNBOUNDED = 2 * float(np.exp(LOG_RATIO_BOUND))
"""An upper bound that no weight reaches: weights end at e^20."""
REMAINING = "other"
"""Criterion of the tokens that the loss leaves out and no criterion of the correction rejects: off-policy sequence
masking, or a user's own function."""


def annotated(
    table: TokenTable,
    config: RolloutCorrectionConfig,
    *,
    accepted: Bool | None = None,
    global_batch: GlobalBatch | None = None,
) -> TokenTable:
    """The table with weights before bounds, the criteria that reject each token, and vetoes.

    Args:
        table: of one step's samples, whole.
        config: of the step.
        accepted: [N] the tokens that counted in the loss, where that is known.
        global_batch: what was known of the step's batch of all ranks; that of the table when None.
    """
    known = replace(global_batch or GlobalBatch(), ranks=Ranks())
    masked_in = table.loss_mask > 0
    rejected: dict[str, Bool] = {}
    for name, criterion in single_criteria(config).items():
        rejected[name] = masked_in & ~_accepted(table, criterion, known)
    if config.touches_loss and config.nonfinite_policy == "reject":
        rejected["nonfinite"] = masked_in & ~table.valid
        for name in rejected.keys() - {"nonfinite"}:  # a token without log-probs is under no other criterion
            rejected[name] &= table.valid
    if accepted is not None:
        explained = np.any([*rejected.values(), np.zeros(table.tokens, np.bool_)], axis=0)
        rejected[REMAINING] = masked_in & ~accepted & ~explained
    bits = np.zeros(table.tokens, np.int32)
    for bit, found in enumerate(rejected.values()):
        bits |= found.astype(np.int32) << bit
    return replace(
        table,
        weight=raw_weights(table, config),
        rejected=bits,
        vetoed=rejected["veto"].astype(np.uint8) if "veto" in rejected else np.zeros(table.tokens, np.uint8),
        metadata={**table.metadata, "criteria": list(rejected)},
    )


def raw_weights(table: TokenTable, config: RolloutCorrectionConfig) -> Column:
    """Importance weights [N] before their bounds, exp(clamp(L, −20, 20)) at `tis_level`; 0 at invalid tokens."""
    unbounded = replace(
        _without_correction(config),
        use_tis=True,
        tis_mode="truncate",
        tis_lower_bound=None,
        tis_upper_bound=UNBOUNDED,
        tis_batch_normalize=False,
    )
    weights: Column = _corrected(table, unbounded, GlobalBatch()).weights.numpy()
    return weights


def single_criteria(config: RolloutCorrectionConfig) -> dict[str, RolloutCorrectionConfig]:
    """A configuration with each criterion of rejection alone, by the name of the criterion.

    The names are those of the metrics (the level, or verl's names), "tis_mask" for weights in mode mask,
    "second_moment" and "veto".
    """
    alone = _without_correction(config)
    found: dict[str, RolloutCorrectionConfig] = {}
    for criterion in config.rejections:
        found[criterion.name] = replace(alone, **_options(criterion, config))
    if config.use_tis and config.tis_mode == "mask":
        found["tis_mask"] = replace(alone, use_tis=True, tis_batch_normalize=False)
    if config.rs_second_moment_bound is not None:
        found["second_moment"] = replace(alone, rs_second_moment_bound=config.rs_second_moment_bound)
    if config.vetoes:
        found["veto"] = replace(
            alone,
            rs_veto_threshold=config.rs_veto_threshold,
            rs_veto_upper_threshold=config.rs_veto_upper_threshold,
        )
    return found


def _without_correction(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The same bounds and levels with everything off; whose log-probs the weights are of is decided by the table."""
    return replace(without_correction(config), use_rollout_logprobs=False, old_logprobs="recompute")


def _options(criterion: Criterion, config: RolloutCorrectionConfig) -> Mapping[str, Any]:
    if criterion.name not in LEVEL_AGGREGATION:
        low, high = criterion.lower, criterion.upper
        threshold = f"{high!r}" if low is None else f"{low!r}_{high!r}"
        return {"rollout_rs": criterion.name, "rollout_rs_threshold": threshold}
    return {"use_rs": True, "rs_z_score": config.rs_z_score, "rs_target_fraction": config.rs_target_fraction}


def _accepted(table: TokenTable, config: RolloutCorrectionConfig, known: GlobalBatch) -> Bool:
    mask: Bool = _corrected(table, config, known).mask.numpy()
    return mask


def _corrected(table: TokenTable, config: RolloutCorrectionConfig, known: GlobalBatch) -> Any:
    columns = (table.policy_log_prob, table.rollout_log_prob, table.loss_mask)
    tensors = [torch.from_numpy(np.array(column)) for column in columns]
    return correct(config, *tensors, lengths=table.response_length.tolist(), global_batch=known)
