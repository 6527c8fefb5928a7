"""Per-token dumps of training (`--save-debug-train-data`), written by a separate thread.

policy loss → TokenRecord → StepDump → queue → table → file
"""

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_tis.analysis.dumps.table import Column, SampleParts, TokenTable
from slime_tis.analysis.dumps.what_if import annotated
from slime_tis.correction import GlobalBatch, RolloutCorrectionConfig
from slime_tis.errors import first_line
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.response_tokens import turns_of
from slime_tis.policy.token_record import TokenRecord
from slime_tis.progress import print_line
from slime_tis.trainer.data.sample import Sample, SampleStatus

MAX_QUEUED_ROLLOUTS = 2
"""Rollouts in the queue; training waits if it is full, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class StepDump:
    """The samples of an optimizer step on a data-parallel rank, with token values."""

    samples: Sequence[Sample]
    advantages: Sequence[float]
    record_N: Tensor
    """float32 [N, 6] on the CPU, `TokenRecord.stack` of complete responses."""
    step: int
    global_batch: GlobalBatch


@dataclass(frozen=True, kw_only=True)
class DumpSettings:
    """Settings of all dumps of a run."""

    pattern: str
    """Name of the files, with {rollout_id} and {rank}."""
    correction: RolloutCorrectionConfig
    has_custom_function: bool
    """Whether a user function computes the correction."""
    metadata: Mapping[str, Any]
    """Metadata of the table; `old_policy` describes the π_old that the loss uses."""
    recomputes_old_policy: bool = False
    """Whether the training engine computes π_old before the first step."""

    def path(self, rollout_id: int, rank: int) -> Path:
        """Returns the file of a rollout and a rank."""
        return Path(self.pattern.format(rollout_id=rollout_id, rank=rank))


class TrainDump:
    """Writes one file per rollout, in a thread; reports failed writes on stderr."""

    def __init__(self, settings: DumpSettings, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._steps: list[StepDump] = []
        self._thread = ThreadPoolExecutor(1, "train dump")
        self._writes: list[Future[None]] = []

    def add(self, step: StepDump) -> None:
        """Adds a step of the current rollout."""
        self._steps.append(step)

    def end_rollout(self, rollout_id: int) -> None:
        """Passes the steps of a rollout to the thread; waits while too many rollouts are queued."""
        if self._steps:
            wait(self._writes[:-MAX_QUEUED_ROLLOUTS])
            self._writes = self._writes[-MAX_QUEUED_ROLLOUTS:]
            self._writes.append(self._thread.submit(self._write, rollout_id, self._steps))
            self._steps = []

    def flush(self) -> None:
        """Waits until all rollouts are written or reported."""
        wait(self._writes)

    def close(self) -> None:
        """Waits until all rollouts are written, then ends the thread."""
        self._thread.shutdown()

    def _write(self, rollout_id: int, steps: list[StepDump]) -> None:
        """Writes the file of a rollout, or a warning."""
        # Here, because pyarrow takes 25 MiB and a run without a dump does not need it.
        from slime_tis.analysis.dumps.files import check_replaceable, write

        path = self._settings.path(rollout_id, self._rank)
        try:
            check_replaceable(path)
            tables = [table_of(step, self._settings) for step in steps]
            table = TokenTable.concatenate(tables)
            metadata = {**table.metadata, "rollout_id": rollout_id, "rank": self._rank}
            write(path, replace(table, metadata=metadata))
        except Exception as error:  # training continues after any error
            message = (
                f"warning: --save-debug-train-data: {path} was not written: {first_line(error)}."
            )
            print_line(message, sys.stderr)


def table_of(step: StepDump, settings: DumpSettings) -> TokenTable:
    """Returns the table of a step's tokens with the correction's values."""
    lengths = [sample.response_length for sample in step.samples]
    record = TokenRecord.unstack(step.record_N)
    records = map(TokenRecord.unstack, step.record_N.split(lengths))
    parts = []
    for sample, sample_record, advantage in zip(
        step.samples, records, step.advantages, strict=True
    ):
        parts.append(_parts(sample, sample_record, advantage, step.step))
    table = TokenTable.from_parts(parts, dict(settings.metadata))
    turns = turns_of(torch.from_numpy(table.loss_mask), lengths) - 1
    table = replace(table, turn=turns.numpy().astype(np.int32))
    accepted = record.accepted_L.numpy() > 0
    if settings.has_custom_function:
        rejected = ((table.loss_mask > 0) & ~accepted).astype(np.int32)
        metadata = {**table.metadata, "criteria": ["custom"]}
        table = replace(table, rejected=rejected, bounded_weight=None, metadata=metadata)
    else:
        table = annotated(
            table, settings.correction, accepted=accepted, global_batch=step.global_batch
        )
    if settings.correction.get_mismatch_metrics:
        table = _with_measured_policy(table, record, settings)
    return table


def _with_measured_policy(
    table: TokenTable, record: TokenRecord, settings: DumpSettings
) -> TokenTable:
    """Returns the table with the training engine's π_old as old policy.

    The mismatch metrics compare with this π_old. The loss may use another one: in bypass mode the
    rollout's log-probs, which the table has in another column, or an interpolation, which follows
    from other columns. Weights and criteria must be computed before, with the loss's π_old.
    """
    old_policy = "current"
    if settings.recomputes_old_policy:
        old_policy = "recomputed"
    return replace(
        table,
        old_log_prob=record.measured_log_probs_L.numpy(),
        metadata={**table.metadata, "old_policy": old_policy},
    )


def sample_parts(sample: Sample, train_log_prob: Any, **columns: Any) -> SampleParts:
    """Returns a sample's columns: training's log-probs, the rollout engine's values, and others."""
    return SampleParts(
        train_log_prob=train_log_prob,
        rollout_log_prob=sample.rollout_log_probs,
        token=sample.response_ids,
        prompt=sample.prompt_ids,
        weight_version=sample.weight_versions,
        rollout_worker=sample.worker_of_each,
        group=sample.group_index,
        **columns,
    )


def _parts(sample: Sample, record: TokenRecord, advantage: float, step: int) -> SampleParts:
    """Returns a sample's columns with the values of its loss."""
    return sample_parts(
        sample,
        record.log_probs_L.numpy(),
        old_log_prob=record.old_log_probs_L.numpy(),
        loss_mask=sample.loss_mask,
        bounded_weight=record.weights_L.numpy(),
        advantage=np.full(sample.response_length, advantage, np.float32),
        entropy=record.entropy_L.numpy(),
        experts=_experts(sample),
        step=step,
        sample_index=sample.index,
        reward=sample.reward,
        truncated=sample.status is SampleStatus.TRUNCATED,
        text=sample.response,
        prompt_text=sample.prompt_text,
    )


def _experts(sample: Sample) -> Column | None:
    """Returns the experts that predicted each response token."""
    experts = sample.rollout_routed_experts
    if experts is None:
        return None
    # The token before each response token predicts it.
    first = len(sample.tokens) - sample.response_length - 1
    rows: Column = experts[first : first + sample.response_length].numpy()
    if len(rows) != sample.response_length:  # the rollout engine recorded too few tokens
        return None
    return rows


def changed_fields(config: RolloutCorrectionConfig | PolicyConfig) -> dict[str, Any]:
    """Returns the options whose values differ from the defaults."""
    changed = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            changed[field.name] = value
    return changed
