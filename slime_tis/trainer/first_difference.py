"""Finds the first operation of training whose result differs, for messages of a run.

The gate of --true-on-policy compares training with the rollout engine's model. --check-engines
compares it with the checkpoint in transformers. Both use the functions of `slime-tis parity`, on
one sample and on the current weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.rescore import load_model
from slime_tis.parity.comparison import compare
from slime_tis.parity.executions import Side
from slime_tis.parity.parity_text import sentence
from slime_tis.parity.recording import HEAD, Operation, Recorder, Recording, Rows
from slime_tis.parity.samples import Samples, joined
from slime_tis.parity.training_sites import recorded
from slime_tis.parity.transformers_executions import execution
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.local.token_sampling import log_softmax
from slime_tis.trainer.invariant.operations import token_log_probs
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron.log_probs import TokenDistribution
from slime_tis.trainer.rank_collectives import on_rank_zero

MAX_TOKENS = 512
"""Tokens that are compared with the checkpoint, because all results of three passes are kept: 3 GB
for 512 tokens of a model with 500 million parameters."""


def difference_from_rollout(learner: Learner, engine: LocalEngine, sample: Sample) -> str:
    """Returns a sentence about the first operation that differs from the rollout engine's.

    A collective. Both engines compute the complete sample in one pass.
    """
    precision = learner.engine.config.precision
    reference = _model_recording(learner, engine.model, sample, "rollout", precision)
    comparison = compare(reference, _training_recording(learner, sample), None, _samples(sample))
    text = f"In one pass over this sample, {sentence(comparison)}"
    if comparison.is_equal:
        text += (
            " The difference comes from another batch, from the key/value cache, or from weights"
            " that changed after the sample."
        )
    return text


def difference_from_checkpoint(learner: Learner, tokens: Sequence[int]) -> str:
    """Returns a sentence about the first operation that differs from transformers'.

    A collective for ranks that have all layers and complete sequences. The reference has the start
    checkpoint, so the comparison is only meaningful before the first step.

    Args:
        learner: Has the training engine.
        tokens: Token ids of prompt and response; only the first `MAX_TOKENS` are compared.

    Raises:
        ValueError: The checkpoint does not load completely.
    """
    compared_tokens = list(tokens[:MAX_TOKENS])
    # Every token but the first gets a log-prob. Its log-prob and version in the rollout are unused.
    length = len(compared_tokens) - 1
    sample = Sample(
        tokens=compared_tokens,
        response_length=length,
        loss_mask=[1] * length,
        rollout_log_probs=[0.0] * length,
        weight_versions=[0] * length,
    )

    def compute() -> Recording:
        model = load_model(learner.engine.config.hf_checkpoint)
        return _model_recording(learner, model, sample, "transformers", "fp32")

    reference = on_rank_zero(compute)
    recording = _training_recording(learner, sample)
    isolated = _training_recording(learner, sample, reference)
    comparison = compare(reference, recording, isolated, _samples(sample))
    return f"In one pass over an answer, {sentence(comparison)}"


def _samples(sample: Sample) -> Samples:
    prompt_length = len(sample.tokens) - sample.response_length
    return joined([sample.tokens[:prompt_length]], [sample.tokens[prompt_length:]])


def _model_recording(
    learner: Learner, model: Any, sample: Sample, name: str, precision: str
) -> Recording:
    """Computes a sample with a model of transformers, with log-probs of the sampled distribution.

    Args:
        learner: Has the temperature and the sums of log-probs.
        model: The model.
        sample: The sample.
        name: Name of the execution in sentences.
        precision: The model's precision.
    """
    side = Side(execution="full", checkpoint="", precision=precision)
    recording = execution(model, side)(_samples(sample))
    logits_TV = recording.results[Operation(HEAD)].values_TF
    log_probs_L = _log_probs(learner, logits_TV, sample)
    return _with_log_probs(replace(recording, name=name), log_probs_L)


def _training_recording(
    learner: Learner, sample: Sample, substitutes: Recording | None = None
) -> Recording:
    """Computes a sample with the training engine; a collective."""
    total = len(sample.tokens)
    recorder = Recorder(total, substitutes)
    token_T = torch.arange(total)
    recorder.begin(Rows((1, total), token_T, token_T))
    with recorded(learner.engine, recorder):
        _, log_probs_L = learner.score([sample])
    recording = Recording(
        name="training",
        precision=learner.engine.config.precision,
        results=recorder.results,
        log_probs_T=torch.full([total], torch.nan),
        is_scored_T=torch.zeros(total, dtype=torch.bool),
        shapes=recorder.shapes,
    )
    return _with_log_probs(recording, log_probs_L)


def _with_log_probs(recording: Recording, log_probs_L: Tensor) -> Recording:
    """Returns a recording with log-probs of the response only."""
    log_probs_T = torch.full_like(recording.log_probs_T, torch.nan)
    log_probs_T[-len(log_probs_L) :] = log_probs_L.float().cpu()
    is_scored_T = torch.zeros_like(recording.is_scored_T)
    is_scored_T[-len(log_probs_L) :] = True
    return replace(recording, log_probs_T=log_probs_T, is_scored_T=is_scored_T)


def _log_probs(learner: Learner, logits_TV: Tensor, sample: Sample) -> Tensor:
    """Returns the log-probs [L] of a response as its sampler computes them.

    Tokens that top-p or top-k left out have probability 0.
    """
    distribution = TokenDistribution(
        temperature=learner.engine.temperature, sampling_mask=sample.sampling_mask
    )
    # Logits after a token predict the next one.
    before_response = slice(-sample.response_length - 1, -1)
    z_LV = distribution.scale_(logits_TV[before_response].float().clone(), 0)
    token_L = torch.tensor(sample.tokens[-sample.response_length :])
    kernels = learner.engine.kernels
    if kernels is not None:
        return token_log_probs(z_LV, token_L, kernels.vocabulary_part)
    return log_softmax(z_LV).gather(-1, token_L[:, None]).squeeze(-1)
