"""Names the wrong engine: rescores a few samples in fp32 with a Hugging Face model and compares both engines to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.errors import quoted_path
from slime_tis.hf_directory import read_model_config
from slime_tis.hf_model import load_causal_lm

SAMPLES_PER_STEP = 6
"""Rescored samples of the first and of the last step."""
MAX_TOKENS = 4096
"""Largest number of tokens of a prompt and its response; longer samples are skipped."""
WRONG_ENGINE_RATIO = 3.0
"""Smallest ratio of the wrong engine's error to the other engine's error."""
NEGLIGIBLE_ERROR = 5e-5
"""Error of two fp32 engines with different kernels, nats."""
MAX_AGREEING_ERROR = 2e-3
"""Largest error of an engine that agrees with the reference, nats."""


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """Errors of both engines relative to fp32."""

    samples: int
    tokens: int
    step: int | None
    """Step whose samples fit the model's weights best; None without a step column."""
    train_error: float
    """Mean abs(log π_train − log π_fp32), nats."""
    rollout_error: float
    """Mean abs(log π_rollout − log π_fp32), nats."""

    @property
    def engine(self) -> str:
        """The engine that differs more from fp32, rollout or training; empty if neither differs."""
        if max(self.train_error, self.rollout_error) < NEGLIGIBLE_ERROR:
            return ""
        return "rollout" if self.rollout_error >= self.train_error else "training"

    @property
    def verdict(self) -> str:
        """Which engine is wrong, in words."""
        train, rollout = self.train_error, self.rollout_error
        if max(train, rollout) < MAX_AGREEING_ERROR:
            return "both engines are close to fp32"
        if rollout > WRONG_ENGINE_RATIO * train:
            return "the rollout engine is wrong: training agrees with fp32"
        if train > WRONG_ENGINE_RATIO * rollout:
            return "training is wrong: the rollout engine agrees with fp32"
        return (
            "both differ from fp32: the model has other weights, or both engines get a wrong input"
        )

    def __str__(self) -> str:
        """The verdict with its numbers."""
        step = "" if self.step is None else f" of step {self.step}"
        return (
            f"{self.verdict} ({self.tokens} tokens of {self.samples} samples{step}: mean abs(log π"
            f" − log π_fp32) is {self.train_error:.2g} of training and {self.rollout_error:.2g} of"
            " the rollout engine, nats)"
        )


Scorer = Callable[[Tensor, int], Tensor]
"""(token ids [S] of prompt and response, response length T) → logits [T, V] of the response, before
the temperature."""


@dataclass(frozen=True)
class HfScorer:
    """Scores with a causal language model of transformers, one sample at a time."""

    model: Any

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, response: int, **inputs: Any) -> Tensor:
        """Logits; `inputs` are further arguments of the model."""
        logits: Tensor = self.model(
            tokens[None].to(self.model.device), logits_to_keep=response + 1, **inputs
        ).logits
        return logits[0, :-1].float().cpu()


def rescore(table: TokenTable, scorer: Scorer) -> Rescored:
    """Scores a few samples again with the weights that sampled them.

    The initial checkpoint of a training run fits its first step, and an exported checkpoint fits
    the last step.
    """
    if table.token is None or table.prompt is None:
        raise ValueError("scoring again needs token ids and prompts, which this dump lacks.")
    if isinstance(scorer, HfScorer):
        vocabulary = scorer.model.config.vocab_size
        ids = np.concatenate([table.token, *table.prompt])
        outside = ids[(ids < 0) | (ids >= vocabulary)]
        if len(outside):
            raise ValueError(
                f"the dump has token id {outside[0]} but the model"
                f" {quoted_path(scorer.model.name_or_path)} has {vocabulary}; give the model that"
                " sampled."
            )
    scored = [
        each
        for step, chosen in _chosen(table)
        if (each := _compare(table, scorer, step, chosen)) is not None
    ]
    if not scored:
        raise ValueError(f"no sample of the dump has log-probs and at most {MAX_TOKENS} tokens.")
    return min(scored, key=lambda each: min(each.train_error, each.rollout_error))


def load_model(directory: str) -> Any:
    """The model of a directory, in fp32 on the CPU.

    Raises:
        ValueError: The directory has no model that loads completely.
    """
    config = read_model_config(directory)
    try:
        return load_causal_lm(directory, torch.float32, architecture=config["architectures"][0])
    except ValueError as error:
        raise ValueError(f"{quoted_path(directory)} {error}.") from error


def _chosen(table: TokenTable) -> list[tuple[int | None, Sequence[int]]]:
    """Indices of the rescored samples, by step."""
    prompts = np.array([len(prompt) for prompt in table.prompt or ()])
    fits = (
        (prompts + table.response_length <= MAX_TOKENS)
        & (prompts > 0)
        & (table.response_length > 0)
    )
    if table.step is None:
        return [(None, np.flatnonzero(fits)[:SAMPLES_PER_STEP].tolist())]
    steps = sorted({int(table.step.min()), int(table.step.max())}) if len(table) else []
    return [
        (step, np.flatnonzero(fits & (table.step == step))[:SAMPLES_PER_STEP].tolist())
        for step in steps
    ]


@torch.inference_mode()
def _compare(
    table: TokenTable, scorer: Scorer, step: int | None, chosen: Sequence[int]
) -> Rescored | None:
    assert table.token is not None and table.prompt is not None
    temperature = float(table.metadata.get("temperature") or 1.0)
    train, rollout = [np.zeros(0)], [np.zeros(0)]
    for i in chosen:
        rows = slice(int(table.offsets[i]), int(table.offsets[i + 1]))
        prompt, valid = table.prompt[i], table.valid[rows]
        ids = torch.from_numpy(np.concatenate([prompt, table.token[rows]]).astype(np.int64))
        logits = scorer(ids, rows.stop - rows.start) / temperature
        reference = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()[valid]
        train.append(np.abs(table.policy_log_prob[rows][valid] - reference))
        rollout.append(np.abs(table.rollout_log_prob[rows][valid] - reference))
    tokens = sum(map(len, train))
    if not tokens:
        return None
    train_error, rollout_error = (
        float(np.concatenate(errors).sum() / tokens) for errors in (train, rollout)
    )
    return Rescored(
        samples=len(chosen),
        tokens=tokens,
        step=step,
        train_error=train_error,
        rollout_error=rollout_error,
    )
