"""Stops a run with --true-on-policy if the two log-probs of a trained token differ in any bit.

The comparison uses the forward pass of the optimizer step, before the weights change.
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_tis.errors import RunStopped, quoted
from slime_tis.policy.loss_inputs import LossInputs
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.megatron.micro_batches import in_sample_order
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.step_inputs import Step


@dataclass(frozen=True, kw_only=True)
class DifferingToken:
    """The first trained token of a rank whose log-probs differ."""

    sample: Sample
    position: int
    """Index of the token in the response."""
    log_prob: float
    """The token's log-prob in training, nats."""
    count: int
    """Number of the rank's tokens that differ."""


class OnPolicyGate:
    """Compares the log-probs of training and of the rollout engine, bit by bit.

    One object serves all steps of a run.
    """

    def __init__(
        self, locate: Callable[[Sample], str] = lambda sample: "", *, advice: str = ""
    ) -> None:
        """`locate` returns a sentence about the first operation that differs; a collective.

        `advice` is the last sentence of the message.
        """
        self._locate = locate
        self._advice = advice
        self._log_probs: list[Tensor] = []

    def watch(self, inputs: LossInputs) -> None:
        """Keeps the log-probs of a micro-batch."""
        self._log_probs.append(inputs.log_probs_L.detach())

    def check(self, step: Step, number: int, parallel: Parallel) -> None:
        """Compares all trained tokens of a step; a collective of all ranks.

        Args:
            step: The step's samples on this rank.
            number: The step's number, from 1.
            parallel: The ranks.

        Raises:
            RunStopped: A token differs; NaN differs from every number. All ranks raise it, with
                the same message about the first token of the lowest rank that has one.
        """
        by_rank = parallel.all_gather_data(self._first_difference(step))
        differences = [difference for difference in by_rank if difference is not None]
        if not differences:
            return
        first = differences[0]
        sample = first.sample
        sampled = _rollout_log_prob(sample, first.position)
        total = sum(difference.count for difference in differences)
        sentences = [
            f"error: --true-on-policy: stopped before step {number}, because the log-probs of"
            f" {total} trained tokens differ between training and the rollout engine.",
            f"The first is token {first.position + 1} of {sample.response_length} (id"
            f" {sample.response_ids[first.position]}) of sample {sample.index} in group"
            f" {sample.group_index}, response {quoted(sample.response, 40)}: rollout"
            f" {sampled:.9g}, training {first.log_prob:.9g}, Δ = {first.log_prob - sampled:.3g}"
            " nats.",
            self._locate(sample),
            self._advice,
        ]
        raise RunStopped(" ".join(sentences).rstrip(), 1)

    def _first_difference(self, step: Step) -> DifferingToken | None:
        """Returns this rank's first token that differs; None if all trained tokens are equal."""
        tokens = step.batch.responses
        log_probs = torch.cat(self._log_probs)
        self._log_probs = []
        log_probs_L = in_sample_order(log_probs, step.partition, tokens.lengths)
        # NaN differs from every number, NaN included.
        differs_L = (log_probs_L != tokens.rollout_log_probs_L) & (tokens.loss_mask_L > 0)
        if not differs_L.any():
            return None
        rows = differs_L.split(list(tokens.lengths))
        values = log_probs_L.split(list(tokens.lengths))
        for sample, row, value in zip(step.samples, rows, values, strict=True):
            if row.any():
                position = int(row.nonzero()[0])
                return DifferingToken(
                    sample=sample,
                    position=position,
                    log_prob=float(value[position]),
                    count=int(differs_L.sum()),
                )
        raise AssertionError("a token differs, but no sample has it")


def _rollout_log_prob(sample: Sample, position: int) -> float:
    """Returns a token's log-prob in the rollout engine; NaN without one."""
    if sample.rollout_log_probs is None:
        return math.nan
    return sample.rollout_log_probs[position]


def parity_advice(config: MegatronConfig) -> str:
    """Returns a sentence with the command that compares both engines, operation by operation."""
    words = ["slime-tis", "parity", config.hf_checkpoint, "--precision", config.precision]
    words += ["--reference", "local", "--other", "training", "--true-on-policy"]
    return (
        f"`{shlex.join(words)}` compares both engines on the start checkpoint, operation by"
        " operation."
    )
