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
from tqdm import tqdm

from slime_tis.analysis.dumps.files import check_replaceable, write
from slime_tis.analysis.dumps.table import Column, SampleParts, TokenTable
from slime_tis.analysis.dumps.what_if import annotated
from slime_tis.correction import GlobalBatch, RolloutCorrectionConfig
from slime_tis.errors import first_line
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.response_tokens import turns_of
from slime_tis.policy.token_record import TokenRecord
from slime_tis.trainer.data.sample import Sample, SampleStatus

MAX_QUEUED_ROLLOUTS = 2
"""Rollouts in the queue; training waits if it is full, which bounds the memory."""


def in_order(
    records: Sequence[TokenRecord], partition: Sequence[Sequence[int]], lengths: Sequence[int]
) -> Tensor:
    """Returns the records of all micro-batches in the order of the batch, float32 [L, 6]."""
    order = [sample for samples in partition for sample in samples]
    stacked = torch.cat([record.stack() for record in records])
    parts = stacked.split([lengths[sample] for sample in order])
    sample_records = dict(zip(order, parts, strict=True))
    return torch.cat([sample_records[sample] for sample in range(len(order))])


@dataclass(frozen=True, kw_only=True)
class StepDump:
    """The samples of an optimizer step on a data-parallel rank, with values of their tokens."""

    samples: Sequence[Sample]
    advantages: Sequence[float]
    record_N: Tensor
    """float32 [N, 6] on the CPU, `TokenRecord.stack` of the whole responses."""
    step: int
    global_batch: GlobalBatch


@dataclass(frozen=True, kw_only=True)
class DumpSettings:
    """Settings of all dumps of a run."""

    pattern: str
    """Name of the files, with {rollout_id} and {rank}."""
    correction: RolloutCorrectionConfig
    has_custom_function: bool
    """Whether a user function corrects."""
    metadata: Mapping[str, Any]
    """As in `TokenTable.metadata`; `old_policy` is that of the loss."""
    recomputes_old_policy: bool = False
    """Whether a forward pass before the first step computes π_old of the training engine."""

    def path(self, rollout_id: int, rank: int) -> Path:
        """Returns the file of a rollout and a rank."""
        return Path(self.pattern.format(rollout_id=rollout_id, rank=rank))


class TrainDump:
    """Writes the steps of each rollout to one file, in a thread. Failed writes are reported on stderr."""

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
            self._writes = [
                *self._writes[-MAX_QUEUED_ROLLOUTS:],
                self._thread.submit(self._write, rollout_id, self._steps),
            ]
            self._steps = []

    def flush(self) -> None:
        """Waits until all rollouts are written or reported."""
        wait(self._writes)

    def close(self) -> None:
        """Waits until all rollouts are written, then ends the thread."""
        self._thread.shutdown()

    def _write(self, rollout_id: int, steps: list[StepDump]) -> None:
        path = self._settings.path(rollout_id, self._rank)
        try:
            check_replaceable(path)
            table = TokenTable.concatenate([table_of(step, self._settings) for step in steps])
            metadata = {**table.metadata, "rollout_id": rollout_id, "rank": self._rank}
            write(path, replace(table, metadata=metadata))
        except Exception as error:  # training continues after any error
            message = (
                f"warning: --save-debug-train-data: {path} was not written: {first_line(error)}."
            )
            tqdm.write(message, file=sys.stderr)


def table_of(step: StepDump, settings: DumpSettings) -> TokenTable:
    """Returns the table of a step's tokens with the correction's values."""
    lengths = [sample.response_length for sample in step.samples]
    record = TokenRecord.unstack(step.record_N)
    records = map(TokenRecord.unstack, step.record_N.split(lengths))
    parts = [
        _parts(*values, step.step)
        for values in zip(step.samples, records, step.advantages, strict=True)
    ]
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
    """Returns the table with the training engine's π_old, which the mismatch metrics are of, as old policy.

    The loss of bypass mode has the rollout's π_old, which is a column anyway, and an interpolated
    one follows from other columns. The weights and criteria of these losses are annotated before.
    """
    old_policy = "recomputed" if settings.recomputes_old_policy else "current"
    return replace(
        table,
        old_log_prob=record.measured_log_probs_L.numpy(),
        metadata={**table.metadata, "old_policy": old_policy},
    )


def sample_parts(sample: Sample, train_log_prob: Any, **columns: Any) -> SampleParts:
    """Returns training's log-probs of a sample with what the rollout engine returned, and further columns."""
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
    """Returns the experts that predicted each response token: the rows of the preceding tokens."""
    experts = sample.rollout_routed_experts
    if experts is None:
        return None
    first = len(sample.tokens) - sample.response_length - 1
    rows: Column = experts[first : first + sample.response_length].numpy()
    return rows if len(rows) == sample.response_length else None


def changed_fields(config: RolloutCorrectionConfig | PolicyConfig) -> dict[str, Any]:
    """Returns the options with other values than the defaults."""
    values = {field.name: (getattr(config, field.name), field.default) for field in fields(config)}
    return {name: value for name, (value, default) in values.items() if value != default}
