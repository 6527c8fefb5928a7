"""Finds the wrong engine: scores a few samples again in fp32 and compares both engines to it.

The reference is a Hugging Face model.
"""

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
"""Number of samples of the first step, and of the last step, that are scored again."""
MAX_TOKENS = 4096
"""Largest number of tokens of prompt and response; longer samples are skipped."""
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
    """Number of samples that were scored."""
    tokens: int
    """Number of the samples' tokens that have log-probs by both engines."""
    step: int | None
    """The step whose samples fit the model's weights best; None if the dump has no steps."""
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
        """The wrong engine, in words."""
        if max(self.train_error, self.rollout_error) < MAX_AGREEING_ERROR:
            return "both engines are close to fp32"
        if self.rollout_error > WRONG_ENGINE_RATIO * self.train_error:
            return "the rollout engine is wrong: training agrees with fp32"
        if self.train_error > WRONG_ENGINE_RATIO * self.rollout_error:
            return "training is wrong: the rollout engine agrees with fp32"
        return (
            "both differ from fp32: the model has other weights, or both engines get a wrong input"
        )

    def __str__(self) -> str:
        """The verdict with its numbers."""
        step = ""
        if self.step is not None:
            step = f" of step {self.step}"
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
        """Returns the logits [T, V]; `inputs` are further arguments of the model."""
        tokens = tokens[None].to(self.model.device)
        # The logits of a token predict the next one, so the last logits are not used.
        output = self.model(tokens, logits_to_keep=response + 1, **inputs)
        logits: Tensor = output.logits[0, :-1].float().cpu()
        return logits


def rescore(table: TokenTable, scorer: Scorer) -> Rescored:
    """Scores a few samples again with the weights that sampled them.

    The initial checkpoint of a training run fits its first step, and an exported checkpoint fits
    the last step.

    Raises:
        ValueError: The dump lacks tokens or prompts, fits another model, or has only long samples.
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
    scored = []
    for step, chosen in _chosen(table):
        rescored = _compare(table, scorer, step, chosen)
        if rescored is not None:
            scored.append(rescored)
    if not scored:
        raise ValueError(f"no sample of the dump has log-probs and at most {MAX_TOKENS} tokens.")
    return min(scored, key=lambda rescored: min(rescored.train_error, rescored.rollout_error))


def load_model(directory: str) -> Any:
    """Returns the model of a directory, in fp32 on the CPU.

    Raises:
        ValueError: The directory has no model that loads completely.
    """
    config = read_model_config(directory)
    try:
        return load_causal_lm(directory, torch.float32, architecture=config["architectures"][0])
    except ValueError as error:
        raise ValueError(f"{quoted_path(directory)} {error}.") from error


def _chosen(table: TokenTable) -> list[tuple[int | None, list[int]]]:
    """Returns the indices of the samples that are scored again, by step."""
    prompts = np.array([len(prompt) for prompt in table.prompt or ()])
    responses = table.response_length
    fits = (prompts + responses <= MAX_TOKENS) & (prompts > 0) & (responses > 0)
    if table.step is None:
        return [(None, np.flatnonzero(fits)[:SAMPLES_PER_STEP].tolist())]
    if not len(table):
        return []
    chosen: list[tuple[int | None, list[int]]] = []
    for step in sorted({int(table.step.min()), int(table.step.max())}):
        samples = np.flatnonzero(fits & (table.step == step))
        chosen.append((step, samples[:SAMPLES_PER_STEP].tolist()))
    return chosen


@torch.inference_mode()
def _compare(
    table: TokenTable, scorer: Scorer, step: int | None, chosen: Sequence[int]
) -> Rescored | None:
    """Returns the errors on the chosen samples; None if they have no valid tokens."""
    assert table.token is not None and table.prompt is not None
    temperature = float(table.metadata.get("temperature") or 1.0)
    train = [np.zeros(0)]
    rollout = [np.zeros(0)]
    for i in chosen:
        rows = slice(int(table.offsets[i]), int(table.offsets[i + 1]))
        prompt = table.prompt[i]
        valid = table.valid[rows]
        ids = torch.from_numpy(np.concatenate([prompt, table.token[rows]]).astype(np.int64))
        log_probs = (scorer(ids, rows.stop - rows.start) / temperature).log_softmax(-1)
        reference = log_probs.gather(1, ids[len(prompt) :, None])[:, 0].numpy()[valid]
        train.append(np.abs(table.policy_log_prob[rows][valid] - reference))
        rollout.append(np.abs(table.rollout_log_prob[rows][valid] - reference))
    tokens = sum(len(errors) for errors in train)
    if not tokens:
        return None
    return Rescored(
        samples=len(chosen),
        tokens=tokens,
        step=step,
        train_error=float(np.concatenate(train).sum() / tokens),
        rollout_error=float(np.concatenate(rollout).sum() / tokens),
    )
