"""Chooses the samples of a dump that are scored again, and those that parameters are fitted on.

Shapes: T response tokens of a sample, B samples.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses import Input
from slime_tis.analysis.diagnosis.hypothesis_scorer import BLOCK
from slime_tis.analysis.diagnosis.rescore import MIN_RESPONSE
from slime_tis.analysis.diagnosis.trained_tokens import MAX_SIZE
from slime_tis.analysis.dumps.table import TokenTable

MAX_SAMPLES = 64
"""Largest number of samples that are scored."""
FULL_SAMPLES = 16
"""A long sample is cut to the tokens of the pass, divided by this number."""
MIN_FITTED_SAMPLES = 4
"""Smallest number of samples that parameters are fitted on."""


def scored_samples(
    table: TokenTable, step: int | None, limit: int
) -> tuple[list[Input], list[Tensor], list[Tensor]]:
    """Chooses samples, in blocks of neighbors.

    Args:
        table: The dump.
        step: The step whose samples are chosen; None for all steps.
        limit: Largest number of tokens. Long responses are cut, so that at least 16 samples fit.

    Returns:
        Inputs.
        Δ [T] of the response, NaN if the token does not count.
        Difference [T] of training's two scorings; 0 if there is only one.
    """
    assert table.token is not None and table.prompt is not None
    prompt_lengths = np.array([len(prompt) for prompt in table.prompt])
    fits = (table.response_length > 1) & (prompt_lengths > 0) & (prompt_lengths <= limit // 2)
    if step is not None and table.step is not None:
        fits &= table.step == step
    chosen = np.flatnonzero(fits)
    if len(chosen) > MAX_SAMPLES:
        chosen = _chosen_blocks(table, chosen)
    second = _second_scoring(table)
    longest = limit // FULL_SAMPLES
    inputs: list[Input] = []
    deltas: list[Tensor] = []
    differences: list[Tensor] = []
    for i in chosen.tolist():
        longest_response = max(longest - len(table.prompt[i]), MIN_RESPONSE)
        response = min(int(table.response_length[i]), longest_response)
        start = int(table.offsets[i])
        rows = slice(start, start + response)
        sample = _input(table, i, rows)
        limit -= len(sample.tokens)
        if limit < 0:
            break
        delta = np.where(table.valid[rows], table.log_ratio[rows], np.nan)
        difference = second[rows] - table.policy_log_prob[rows]
        inputs.append(sample)
        deltas.append(torch.from_numpy(delta).float())
        differences.append(torch.from_numpy(difference).float())
    return inputs, deltas, differences


def _second_scoring(table: TokenTable) -> NDArray[Any]:
    """Returns training's second scoring with the same weights [N]; without one, the first."""
    if table.metadata.get("old_policy") in ("rollout", "interpolated"):
        # This log π_old is no scoring by training.
        return table.policy_log_prob
    if table.policy_log_prob is table.old_log_prob:
        return table.train_log_prob
    return table.old_log_prob


def _input(table: TokenTable, i: int, rows: slice) -> Input:
    """Returns sample i with the response tokens in `rows`."""
    assert table.token is not None and table.prompt is not None
    ids = np.concatenate([table.prompt[i], table.token[rows]]).astype(np.int64)
    experts = None
    if table.experts is not None:
        experts = torch.from_numpy(table.experts[rows])
    return Input(
        tokens=torch.from_numpy(ids),
        response=rows.stop - rows.start,
        positions=torch.arange(len(ids)),
        temperature=float(table.metadata.get("temperature") or 1.0),
        trained=torch.from_numpy(table.loss_mask[rows] > 0),
        experts=experts,
    )


def _chosen_blocks(table: TokenTable, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns MAX_SAMPLES of the samples, in blocks of neighbors.

    Half of the blocks have the largest mismatch, so that a fault of few samples is among them. The
    others are spread over the dump.
    """
    size = np.bincount(table.sample, np.abs(table.log_ratio), len(table))[samples]
    starts = np.arange(0, len(samples) - BLOCK + 1, BLOCK)
    block_size = np.add.reduceat(size[: len(starts) * BLOCK], starts)
    count = MAX_SAMPLES // BLOCK
    largest = np.argsort(-block_size, kind="stable")[: count // 2]
    others = np.setdiff1d(np.arange(len(starts)), largest)
    places = np.linspace(0, len(others) - 1, count - len(largest)).astype(int)
    spread = others[places]
    blocks = np.sort(np.concatenate([largest, spread]))
    # [blocks, BLOCK] indices of samples, block by block.
    index = starts[blocks][:, None] + np.arange(BLOCK)
    chosen: NDArray[np.int64] = samples[index.ravel()]
    return chosen


def fitted_samples(budget: float, inputs: Sequence[Input], sizes: Tensor) -> list[int]:
    """Chooses even samples within a number of tokens: the largest mismatches and all, in turns."""
    even = list(range(0, len(inputs), 2))
    largest = sorted(even, key=lambda i: -float(sizes[i]))
    turns: list[int] = []
    for pair in zip(largest, even, strict=True):
        turns += pair
    chosen: list[int] = []
    for i in dict.fromkeys(turns):
        budget -= len(inputs[i].tokens)
        if budget < 0 and len(chosen) >= MIN_FITTED_SAMPLES:
            break
        chosen.append(i)
    return sorted(chosen)


def sizes_of(rows: Sequence[Tensor]) -> Tensor:
    """Returns Σ min(|Δ|, 10) [B] over the tokens that count, nats."""
    if not rows:
        return torch.zeros(0)
    sizes = []
    for row in rows:
        size = row.nan_to_num(0.0, MAX_SIZE, -MAX_SIZE).abs().clamp(max=MAX_SIZE)
        sizes.append(size.sum())
    return torch.stack(sizes)
