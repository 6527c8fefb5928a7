"""Finds the wrong engine: scores a few samples again in fp32 and compares both engines to it.

The reference is a Hugging Face model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.errors import first_line, quoted, quoted_path
from slime_tis.hf_directory import read_model_config
from slime_tis.hf_model import load_causal_lm
from slime_tis.progress import Progress

SAMPLES_PER_STEP = 6
"""Number of samples of a step that are scored again."""
MAX_STEPS = 256
"""Largest number of steps of which one sample is scored, to find the step that fits a checkpoint.
"""
MAX_TOKENS = 4096
"""Largest number of scored tokens of prompt and response; the end of a longer response is cut."""
MIN_RESPONSE = 64
"""Smallest number of scored tokens of a long response."""
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
        if self.rollout_error >= self.train_error:
            return "rollout"
        return "training"

    @property
    def verdict(self) -> str:
        """The wrong engine, in words."""
        if max(self.train_error, self.rollout_error) < MAX_AGREEING_ERROR:
            return "both engines are close to fp32"
        if self.rollout_error > WRONG_ENGINE_RATIO * self.train_error:
            return "the rollout engine differs from fp32, and training agrees with it"
        if self.train_error > WRONG_ENGINE_RATIO * self.rollout_error:
            return "training differs from fp32, and the rollout engine agrees with it"
        return (
            "both differ from fp32: the model has other weights, or both engines get a wrong input"
        )

    def __str__(self) -> str:
        """The verdict with its numbers."""
        step = ""
        if self.step is not None:
            step = f" of step {self.step}"
        return (
            f"{self.verdict} ({self.tokens} tokens of the {self.samples} samples with the largest"
            f" mismatch{step}: mean abs(log π − log π_fp32) is {self.train_error:.2g} of training"
            f" and {self.rollout_error:.2g} of the rollout engine, nats)"
        )


GIB = 2**30
"""Bytes in a GiB."""
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


def rescore(table: TokenTable, scorer: Scorer, *, with_progress: bool = False) -> Rescored:
    """Scores a few samples again with the weights that sampled them.

    The initial checkpoint of a training run fits its first step, and an exported checkpoint fits
    the step after the export. To find the step that fits, one sample per step is scored.

    Args:
        table: The dump.
        scorer: The reference.
        with_progress: Whether to show the progress on stderr.

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
    steps = _steps(table)
    with Progress("comparing samples", None, shown=with_progress) as progress:
        first_samples = _chosen(table, steps, samples=1)
        fit = min(_compared(table, scorer, first_samples, progress), key=fit_error, default=None)
        candidates = {*steps[:1], *steps[-1:]}
        if fit is not None and fit.step is not None:
            candidates.add(fit.step)
        chosen = _chosen(table, sorted(candidates), samples=SAMPLES_PER_STEP)
        scored = _compared(table, scorer, chosen, progress)
    if not scored:
        raise ValueError(
            "no sample of the dump has log-probs of both engines and a prompt of at most"
            f" {MAX_TOKENS - MIN_RESPONSE} tokens."
        )
    return min(scored, key=fit_error)


def fit_error(rescored: Rescored) -> float:
    """The error of the engine that fits the reference better, in nats."""
    return min(rescored.train_error, rescored.rollout_error)


def load_model(directory: str, device: str = "cpu") -> Any:
    """Returns the model of a directory in fp32.

    Args:
        directory: Hugging Face checkpoint.
        device: Device of torch.

    Raises:
        ValueError: The directory has no model that loads completely.
    """
    config = read_model_config(directory)
    try:
        model = load_causal_lm(directory, torch.float32, architecture=config["architectures"][0])
    except ValueError as error:
        raise ValueError(f"{quoted_path(directory)} {error}.") from error
    return model.to(device)


COPIES = 2.0
"""Copies of the parameters in memory: hypotheses on precision add a second one."""


def check_device(device: str) -> int:
    """Returns the free memory of a device, bytes.

    Raises:
        ValueError: There is no such device.
    """
    try:
        kind = torch.device(device).type
        if kind == "cpu":
            return int(psutil.virtual_memory().available)
        if kind == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return int(free)
        reason = f"{kind} is not supported"
    # torch without CUDA raises an AssertionError.
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = first_line(error)
    raise ValueError(
        f"--device is {quoted(device, 40)} but must be cpu or a visible GPU such as cuda:0:"
        f" {reason}."
    )


def check_memory(directories: Sequence[str], device: str) -> None:
    """Refuses models that do not fit into memory, before the first one is loaded.

    Args:
        directories: Checkpoints that are loaded together; hypotheses copy the first one.
        device: Device of torch.

    Raises:
        ValueError: There is no such device, or its free memory is too small.
    """
    free = check_device(device)
    sizes = [parameter_count(directory) for directory in directories]
    needed = 4 * (COPIES * sizes[0] + sum(sizes[1:]))
    if needed > free:
        raise ValueError(
            f"scoring again in fp32 needs about {needed / GIB:.1f} GiB for the models, and"
            f" {device} has {free / GIB:.1f} GiB free; use a larger machine, --device cuda, or"
            " fewer --other-checkpoint."
        )


def parameter_count(directory: str) -> int:
    """Returns the number of values in a directory's tensors, from their headers or file sizes."""
    count = 0
    for path in Path(directory).glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    count += math.prod(file.get_slice(name).get_shape())
        except Exception:
            # A broken file: loading it has the message.
            continue
    if not count:
        # pytorch_model.bin has no header to read; its values have two bytes at least.
        size = sum(path.stat().st_size for path in Path(directory).glob("pytorch_model*.bin"))
        count = size // 2
    return count


def _steps(table: TokenTable) -> list[int]:
    """The steps of a dump, at most MAX_STEPS; none if it does not name them."""
    if table.step is None or not len(table):
        return []
    steps = np.unique(table.step)
    if len(steps) > MAX_STEPS:
        steps = steps[np.linspace(0, len(steps) - 1, MAX_STEPS).astype(int)]
    return [int(step) for step in steps]


def _compared(
    table: TokenTable,
    scorer: Scorer,
    chosen: Sequence[tuple[int | None, list[int]]],
    progress: Progress,
) -> list[Rescored]:
    """Returns the errors on the chosen samples, for every step that has valid tokens."""
    scored = []
    for step, samples in chosen:
        rescored = _compare(table, scorer, step, samples, progress)
        if rescored is not None:
            scored.append(rescored)
    return scored


def _chosen(
    table: TokenTable, steps: Sequence[int], *, samples: int
) -> list[tuple[int | None, list[int]]]:
    """Returns the indices of the samples of some steps that are scored again, by step.

    They are those with the largest mismatch, from different prompts and servers as far as possible:
    a fault of a few samples must not be missed.
    """
    if not len(table):
        return []
    prompts = np.array([len(prompt) for prompt in table.prompt or ()])
    fits = (prompts <= MAX_TOKENS - MIN_RESPONSE) & (prompts > 0) & (table.response_length > 0)
    size = np.bincount(table.sample, np.abs(table.log_ratio), len(table))
    count = np.bincount(table.sample, table.valid, len(table))
    mean = size / np.maximum(count, 1)
    if table.step is None:
        return [(None, _largest(table, np.flatnonzero(fits), mean, samples))]
    chosen: list[tuple[int | None, list[int]]] = []
    for step in steps:
        of_step = np.flatnonzero(fits & (table.step == step))
        chosen.append((step, _largest(table, of_step, mean, samples)))
    return chosen


def _largest(
    table: TokenTable, samples: NDArray[np.int64], mean: NDArray[np.float64], count: int
) -> list[int]:
    """Returns `count` samples with the largest mean abs(Δ), of different origins first."""
    assert table.prompt is not None
    seen: set[tuple[bytes, int]] = set()
    first: list[int] = []
    others: list[int] = []
    order = np.argsort(-mean[samples], kind="stable")
    for i in samples[order].tolist():
        worker = -1
        if table.rollout_worker is not None:
            worker = int(table.rollout_worker[table.offsets[i]])
        origin = (table.prompt[i].tobytes(), worker)
        if origin in seen:
            others.append(i)
        else:
            seen.add(origin)
            first.append(i)
    return [*first, *others][:count]


@torch.inference_mode()
def _compare(
    table: TokenTable,
    scorer: Scorer,
    step: int | None,
    chosen: Sequence[int],
    progress: Progress,
) -> Rescored | None:
    """Returns the errors on the chosen samples; None if they have no valid tokens."""
    assert table.token is not None and table.prompt is not None
    temperature = float(table.metadata.get("temperature") or 1.0)
    # concatenate takes no empty list, so each begins with an empty array.
    train = [np.zeros(0)]
    rollout = [np.zeros(0)]
    for i in chosen:
        prompt = table.prompt[i]
        start = int(table.offsets[i])
        end = min(int(table.offsets[i + 1]), start + MAX_TOKENS - len(prompt))
        rows = slice(start, end)
        valid = table.valid[rows]
        ids = torch.from_numpy(np.concatenate([prompt, table.token[rows]]).astype(np.int64))
        logits = scorer(ids, rows.stop - rows.start) / temperature
        of_tokens = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        reference = of_tokens.numpy()[valid]
        train.append(np.abs(table.policy_log_prob[rows][valid] - reference))
        rollout.append(np.abs(table.rollout_log_prob[rows][valid] - reference))
        progress.update()
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
