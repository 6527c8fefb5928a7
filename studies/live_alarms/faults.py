"""The planted faults and the healthy runs, with the alarms that count as right.

The lists and the expected alarms were written before the first run; see README.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LogProbs = list[list[float]]
"""Log-probs of the answers of a batch, one list per answer."""
ANSWERS_PER_PROMPT = 4
"""GRPO's group size in every run."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How the rollout engine of a run differs from the trainer."""

    dtype: torch.dtype = torch.float32
    """Precision of weights and arithmetic."""
    receives: Callable[[int, str], bool] = lambda step, name: True
    """(trainer's step, name of a tensor) → whether the engine gets the tensor at this step."""
    delay: int = 0
    """The engine samples from the weights of this many optimizer steps ago."""
    sampling: Callable[[Tensor], Tensor] = lambda logits: logits
    """Logits [B, V] that the engine samples from."""
    reported: Callable[[Tensor], Tensor] | None = None
    """Logits [B, V] whose log-softmax is reported; None reports those that were sampled from."""
    edit: Callable[[int, LogProbs], None] = lambda step, log_probs: None
    """Changes the reported log-probs in place; (trainer's step, log-probs)."""
    rope_factor: float = 1.0
    """Factor of the engine's rope_theta."""
    reports_versions: bool = False
    """Whether the `rollout_func` returns `weight_versions`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run, planted or healthy."""

    engine: Engine = field(default_factory=Engine)
    options: dict[str, Any] = field(default_factory=dict)
    """Options of GRPOConfig."""
    reward: str = "distinct"
    """Name of the reward function."""
    corrects: bool = False
    """Whether the run corrects with token TIS; otherwise it only measures."""
    first_step: int = 0
    """Optimizer steps made before the first faulty batch."""
    ours: frozenset[str] = frozenset()
    """Alarms of slime_tis that name the fault. Empty for healthy runs."""
    martingale: frozenset[str] = frozenset()
    """Alarms of martingale whose documented meaning includes the fault."""


GENERAL = {
    "slime_tis": frozenset({"mismatch", "effective_samples"}),
    "martingale": frozenset({"floor_jump", "floor_tail", "ess_collapse", "unmatched"}),
}
"""Alarms that say that something is wrong and name no cause: noticed, neither right nor wrong."""


def _shift(step: int, log_probs: LogProbs) -> None:
    for row in log_probs:
        row[:] = [*row[1:], row[-1]]


def _shift_some(step: int, log_probs: LogProbs) -> None:
    if step >= 4:
        _shift(step, log_probs[::8])


def _exchange(step: int, log_probs: LogProbs) -> None:
    """Gives each answer the log-probs of the next one, as far as both reach."""
    copies = [list(row) for row in log_probs]
    for i, row in enumerate(log_probs):
        other = copies[(i + 1) % len(copies)]
        length = min(len(row), len(other))
        row[:length] = other[:length]


def _last_is_zero(step: int, log_probs: LogProbs) -> None:
    for row in log_probs:
        row[-1] = 0.0


def _missing(step: int, log_probs: LogProbs) -> None:
    if step >= 4:
        log_probs[0][:] = [float("nan")] * len(log_probs[0])


def _scaled(step: int, log_probs: LogProbs) -> None:
    for row in log_probs:
        row[:] = [value / 0.7 for value in row]


def _clamped(step: int, log_probs: LogProbs) -> None:
    for row in log_probs:
        row[:] = [max(value, -1.5) for value in row]


def _top_p(logits: Tensor) -> Tensor:
    """Keeps the likeliest tokens that together reach a probability of 0.8."""
    ordered, order = logits.log_softmax(-1).sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before < 0.8)
    return logits.masked_fill(~kept, -torch.inf)


def _biased(logits: Tensor) -> Tensor:
    """Adds 1.5 nats to the logits of three tokens."""
    bias = torch.zeros_like(logits)
    bias[:, 5:8] = 1.5
    return logits + bias


NOT_UPDATED = frozenset({"weights_not_updated", "stale_weights"})
WRONG_WEIGHTS = frozenset({"stale_server"})
FAULTS: dict[str, Case] = {
    "engine never updated": Case(
        engine=Engine(receives=lambda step, name: step == 0),
        first_step=1,
        ours=NOT_UPDATED,
        martingale=WRONG_WEIGHTS,
    ),
    "engine one step late": Case(
        engine=Engine(delay=1), first_step=1, ours=NOT_UPDATED, martingale=WRONG_WEIGHTS
    ),
    "updates stop at step 5": Case(
        engine=Engine(receives=lambda step, name: step < 5),
        first_step=5,
        ours=NOT_UPDATED,
        martingale=WRONG_WEIGHTS,
    ),
    "output layer never updated": Case(
        engine=Engine(receives=lambda step, name: step == 0 or "lm_head" not in name),
        first_step=1,
        ours=NOT_UPDATED,
        martingale=WRONG_WEIGHTS,
    ),
    "3 steps old, versions reported": Case(
        engine=Engine(delay=3, reports_versions=True),
        options={"learning_rate": 6e-3},
        first_step=1,
        ours=frozenset({"staleness", "stale_weights"}),
        martingale=WRONG_WEIGHTS,
    ),
    "raw log-probs at temperature 0.6": Case(
        engine=Engine(sampling=lambda logits: logits / 0.6, reported=lambda logits: logits),
        options={"temperature": 0.6},
        ours=frozenset({"temperature"}),
        martingale=frozenset({"floor_withheld"}),
    ),
    "log-probs shifted by one token": Case(
        engine=Engine(edit=_shift), ours=frozenset({"shifted_tokens"})
    ),
    "one sample in 8 shifted, from step 4": Case(
        engine=Engine(edit=_shift_some), first_step=4, ours=frozenset({"shifted_tokens"})
    ),
    "log-probs of the next sample": Case(
        engine=Engine(edit=_exchange), ours=frozenset({"shifted_tokens"})
    ),
    "last token has log-prob 0": Case(
        engine=Engine(edit=_last_is_zero), ours=frozenset({"placeholder_log_probs"})
    ),
    "log-probs NaN in a sample, from step 4": Case(
        engine=Engine(edit=_missing),
        first_step=4,
        ours=frozenset({"nonfinite_log_probs"}),
        martingale=frozenset({"unmatched"}),
    ),
    "top-p 0.8": Case(engine=Engine(sampling=_top_p), ours=frozenset({"truncated_sampling"})),
    "log-probs divided by 0.7": Case(
        engine=Engine(edit=_scaled), ours=frozenset({"temperature", "broken_tokens"})
    ),
    "log-probs clamped at -1.5": Case(
        engine=Engine(edit=_clamped), ours=frozenset({"broken_tokens"})
    ),
    "logit bias on three tokens": Case(
        engine=Engine(sampling=_biased),
        ours=frozenset({"penalty", "other_network"}),
        martingale=WRONG_WEIGHTS,
    ),
    "engine with rope_theta x 0.01": Case(
        engine=Engine(rope_factor=0.01),
        ours=frozenset({"other_network"}),
        martingale=WRONG_WEIGHTS,
    ),
    "learning rate 0": Case(
        options={"learning_rate": 0.0},
        first_step=1,
        ours=frozenset({"unchanged_policy"}),
        martingale=frozenset({"weights_unchanged"}),
    ),
    "bf16 weights lose the updates": Case(
        engine=Engine(dtype=torch.bfloat16),
        options={"learning_rate": 1e-7, "dtype": "bfloat16"},
        first_step=1,
        ours=frozenset({"unchanged_policy"}),
        martingale=frozenset({"weights_unchanged"}),
    ),
    "every reward is equal": Case(
        reward="constant",
        ours=frozenset({"no_variance", "constant_reward", "zero_gradient"}),
        martingale=frozenset({"weights_unchanged"}),
    ),
    "learning rate x 100, 4 steps per batch": Case(
        options={"learning_rate": 0.1, "steps_per_generation": 4},
        first_step=1,
        ours=frozenset({"long_steps"}),
        martingale=frozenset({"ess_collapse"}),
    ),
}
"""Twenty faults; a healthy engine in fp32 unless it says otherwise."""

HEALTHY: dict[str, Case] = {
    "fp32 engine": Case(),
    "bf16 engine": Case(engine=Engine(dtype=torch.bfloat16)),
    "fp16 engine": Case(engine=Engine(dtype=torch.float16)),
    "bf16 engine, corrected": Case(engine=Engine(dtype=torch.bfloat16), corrects=True),
    "temperature 0.7 on both sides": Case(
        engine=Engine(sampling=lambda logits: logits / 0.7), options={"temperature": 0.7}
    ),
    "temperature 1.3 on both sides": Case(
        engine=Engine(sampling=lambda logits: logits / 1.3), options={"temperature": 1.3}
    ),
    "two iterations per batch": Case(options={"num_iterations": 2}),
    "four steps per batch, bf16 engine": Case(
        engine=Engine(dtype=torch.bfloat16), options={"steps_per_generation": 4}
    ),
    "answers of 4 tokens": Case(options={"max_completion_length": 4}),
    "sparse reward": Case(reward="sparse"),
    "one step old, versions reported, corrected": Case(
        engine=Engine(delay=1, reports_versions=True),
        options={"learning_rate": 2e-4},
        corrects=True,
    ),
    "KL term": Case(options={"beta": 0.05}),
    "warm-up from learning rate 0": Case(options={"warmup_steps": 4}),
    "bf16 weights, bf16 engine": Case(
        engine=Engine(dtype=torch.bfloat16), options={"dtype": "bfloat16"}
    ),
}
"""Fourteen runs without a fault."""
