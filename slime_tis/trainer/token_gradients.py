"""Finds the token at which a gradient stops being finite, for the error message of the step."""

import torch
from torch import Tensor

from slime_tis.errors import one_line
from slime_tis.policy.loss_inputs import LossInputs
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.megatron.micro_batches import in_sample_order
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.step_inputs import Step

NO_TOKEN = (
    "No trained token has a log-prob, or a gradient of its log-prob, that is not finite: "
    "the overflow is in the model's backward pass."
)
"""The sentence if all tokens have finite gradients and log-probs."""


class TokenGradients:
    """Whether the token gradients of an optimizer step are finite, on this rank.

    Hooks read the gradients during the backward pass. Nothing synchronizes with the host before
    `first_nonfinite`.
    """

    def __init__(self) -> None:
        self._log_probs: list[Tensor] = []
        self._are_finite: list[Tensor] = []

    def watch(self, inputs: LossInputs) -> None:
        """Watches the gradients of one micro-batch, before its backward pass."""
        is_finite_L = torch.ones_like(inputs.log_probs_L, dtype=torch.bool)
        self._log_probs.append(inputs.log_probs_L.detach())
        self._are_finite.append(is_finite_L)

        def look(gradient_L: Tensor) -> None:
            is_finite_L.logical_and_(gradient_L.isfinite())

        def look_at_logits(gradient: Tensor) -> None:
            is_finite_L.logical_and_(gradient.isfinite().all(-1).view_as(is_finite_L))

        for values_L in (inputs.log_probs_L, inputs.entropy_L):
            if values_L.requires_grad:
                values_L.register_hook(look)
        # The gradient of a user's loss flows through the logits and bypasses the log-probs.
        if inputs.logits is not None and inputs.logits.requires_grad:
            inputs.logits.register_hook(look_at_logits)

    def first_nonfinite(self, step: Step, parallel: Parallel) -> str:
        """Returns a sentence about the first trained token with a non-finite gradient or log-prob.

        A collective of all ranks.
        """
        sentence = None
        if parallel.is_last_stage:
            sentence = self._on_this_rank(step, parallel)
        sentences = filter(None, parallel.all_gather_data(sentence))
        first_sentence = next(sentences, NO_TOKEN)
        return parallel.broadcast_from_last_stage(first_sentence)

    def _on_this_rank(self, step: Step, parallel: Parallel) -> str | None:
        """Returns the sentence for the samples of this data-parallel rank, or None."""
        tokens = step.batch.responses
        log_probs = torch.cat(self._log_probs).float()
        are_finite = torch.cat(self._are_finite).float()
        columns = torch.stack([log_probs, are_finite], 1)
        columns_L = in_sample_order(columns, step.partition, tokens.lengths)
        # NaN and infinity are preserved: context-parallel ranks add 0 for tokens of other ranks.
        columns_N = parallel.ranks.over_context(tokens.slices.scatter(columns_L)).cpu()
        rows = columns_N.split(tokens.response_lengths)
        for is_at_fault in (_has_nonfinite_gradient, _has_nonfinite_log_prob):
            for sample, row in zip(step.samples, rows, strict=True):
                trained_T = torch.tensor(sample.loss_mask) > 0
                positions = (is_at_fault(row) & trained_T).nonzero()
                if len(positions):
                    position = int(positions[0])
                    return _sentence(sample, position, row[position, 0].item())
        return None


def _has_nonfinite_gradient(row: Tensor) -> Tensor:
    return row[:, 1] == 0


def _has_nonfinite_log_prob(row: Tensor) -> Tensor:
    return ~row[:, 0].isfinite()


def _sentence(sample: Sample, position: int, log_prob: float) -> str:
    token = sample.tokens[len(sample.tokens) - sample.response_length + position]
    prompt = sample.prompt
    if not prompt and sample.prompt_row is not None:
        prompt = sample.prompt_row.text
    return (
        f"The first token at fault is token {position} (id {token}) of the response of sample"
        f" {sample.index} to the prompt {one_line(str(prompt), 60)!r}: its log-prob is"
        f" {log_prob:.6g} in training and {sample.rollout_log_probs[position]:.6g} in the rollout"
        " engine."
    )
