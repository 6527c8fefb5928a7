"""The samples of the page: columns of tokens in their bytes, text as JSON, worst sample first.

Nothing here is made into HTML: the page shows all of it through `textContent`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.dumps.table import TokenTable

MAX_TOKENS = 100_000
"""Response tokens in the page."""
MAX_SAMPLES = 5_000
"""Samples in the page."""
MAX_PROMPT = 4_000
"""Characters, or tokens where there is no text, of a prompt in the page: its end."""
MAX_TEXT = 20_000
"""Characters of a response's text in the page, beside its tokens: its start."""
MAX_CHARACTERS = 4_000_000
"""Characters of all prompts in the page, and of all texts: of many samples each has fewer."""
MAX_EXPERTS = 1_000_000
"""Numbers of experts in the page; of more, the first sparse layers."""

Decode = Callable[[Sequence[int]], list[str]]


def chosen_samples(table: TokenTable, max_tokens: int = MAX_TOKENS) -> TokenTable:
    """The samples to show, the one of largest mean abs(Δ) first.

    Of a larger table half of the tokens are those of the worst samples, with the groups that they are in, and half
    those of other samples at random.
    """
    order = np.argsort(-mean_size(table), kind="stable")
    if table.tokens <= max_tokens and len(table) <= MAX_SAMPLES:
        return table.select(order)
    if table.group is not None:
        order = _with_groups(table, order)
    lengths = table.response_length[order]
    worst = order[np.cumsum(lengths) <= max_tokens // 2][: MAX_SAMPLES // 2]
    others = np.setdiff1d(order, worst)
    others = np.random.default_rng(0).permutation(others)
    left = max_tokens - int(table.response_length[worst].sum())
    others = others[np.cumsum(table.response_length[others]) <= left][: MAX_SAMPLES - len(worst)]
    chosen = np.concatenate([worst, others])
    if not len(chosen):  # one response is longer than the page may be
        chosen = order[:1]
    return table.select(chosen[np.argsort(-mean_size(table)[chosen], kind="stable")])


def mean_size(table: TokenTable) -> NDArray[np.float64]:
    """[S] mean abs(Δ) of the valid tokens of each sample; 0 where it has none."""
    valid = table.valid
    sample = table.sample[valid]
    count = np.bincount(sample, minlength=len(table))
    return np.asarray(np.bincount(sample, np.abs(table.log_ratio[valid]), len(table)) / np.maximum(count, 1))


def payload(table: TokenTable, decode: Decode | None = None) -> dict[str, Any]:
    """What the page needs of the samples: plain values, and `columns` of arrays with one value per token.

    Args:
        table: The samples to show, in their order.
        decode: Texts of token ids, each on its own; None shows the ids.
    """
    size = np.abs(table.log_ratio[table.valid])
    ids, place = np.unique(table.token, return_inverse=True) if table.token is not None else (None, None)
    texts = None if decode is None or ids is None else decode([int(i) for i in ids])
    columns: dict[str, NDArray[Any]] = {
        "train": table.train_log_prob,
        "rollout": table.rollout_log_prob,
        "ratio": table.log_ratio,
        "valid": table.valid.astype(np.uint8),
        "mask": (table.loss_mask > 0).astype(np.uint8),
    }
    if table.metadata.get("old_policy") in ("recomputed", "interpolated"):
        columns["old"] = table.old_log_prob
    for name in ("weight", "bounded_weight", "advantage", "entropy", "weight_version", "turn", "rejected", "vetoed"):
        if (column := getattr(table, name)) is not None:
            columns[name] = column
    if place is not None:
        columns["token"] = place.astype(np.int32)
    experts = None
    if table.experts is not None and table.experts.size:
        of, k = table.experts.shape[1:]
        layers = int(np.clip(MAX_EXPERTS // (table.tokens * k), 1, of))
        experts = {"layers": layers, "of": of, "k": k}
        columns["experts"] = table.experts[:, :layers].astype(np.int16)
    return {
        "offsets": table.offsets.tolist(),
        "columns": columns,
        "experts": experts,
        "ids": None if ids is None else ids.tolist(),
        "texts": texts,
        "scale": float(np.quantile(size, 0.99)) if len(size) else 1.0,
        "criteria": [str(name) for name in table.metadata.get("criteria") or ()],
        "samples": _samples(table, decode),
    }


def packed(payload: dict[str, Any]) -> bytes:
    """The samples as bytes for samples.js: the length of a JSON text, that text, and little-endian columns.

    `columns` of the JSON has the JavaScript type of each column, its first byte after the JSON, and its length.
    """
    types = {"f4": "Float32Array", "i4": "Int32Array", "i2": "Int16Array", "u1": "Uint8Array"}
    places, parts, start = {}, [], 0
    for name, column in payload["columns"].items():
        places[name] = types[column.dtype.str[1:]], start, column.size
        parts.append(_aligned(column.astype(column.dtype.newbyteorder("<")).tobytes(), b"\0"))
        start += len(parts[-1])
    head = _aligned(json.dumps({**payload, "columns": places}, allow_nan=False).encode(), b" ")
    return b"".join([struct.pack("<I", len(head)), head, *parts])


def _aligned(part: bytes, filler: bytes) -> bytes:
    """The bytes, filled up to a multiple of four: JavaScript has no view of numbers at other places."""
    return part + filler * (-len(part) % 4)


def _samples(table: TokenTable, decode: Decode | None) -> list[dict[str, Any]]:
    valid, size = table.valid, np.abs(table.log_ratio)
    return [
        _sample(table, i, float(mean), valid, size, decode)  # columns of the table are computed once
        for i, mean in enumerate(mean_size(table))
    ]


def _sample(
    table: TokenTable,
    i: int,
    mean: float,
    valid_N: NDArray[np.bool_],
    size_N: NDArray[np.float32],
    decode: Decode | None,
) -> dict[str, Any]:
    rows = slice(int(table.offsets[i]), int(table.offsets[i + 1]))
    valid = valid_N[rows]
    values: dict[str, Any] = {"mean": mean, "worst": float(size_N[rows].max(initial=0.0)), "valid": int(valid.sum())}
    for name in ("step", "sample_index", "group", "reward", "truncated"):
        column = getattr(table, name)
        if column is not None and np.isfinite(column[i]):
            values[name] = column[i].item()
    advantages = np.zeros(0) if table.advantage is None else table.advantage[rows][valid]
    if np.isfinite(advantages).any():
        values["advantage"] = float(advantages[np.isfinite(advantages)].mean(dtype=np.float64))
    characters = MAX_CHARACTERS // len(table)
    values["prompt"] = _prompt(table, i, decode, min(characters, MAX_PROMPT))
    text, most = table.text[i] if table.text is not None else "", min(characters, MAX_TEXT)
    values["text"] = text if len(text) <= most else text[:most] + "…"
    return values


def _prompt(table: TokenTable, i: int, decode: Decode | None, most: int) -> str:
    if table.prompt_text is not None and table.prompt_text[i]:
        text = table.prompt_text[i]
    elif table.prompt is not None:
        ids = table.prompt[i][-most:].tolist()
        text = " ".join(map(str, ids)) if decode is None else "".join(decode(ids))
    else:
        return ""
    return text if len(text) <= most else "…" + text[-most:]


def _with_groups(table: TokenTable, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order with the samples of a group moved up to its first one."""
    assert table.group is not None
    steps = table.step if table.step is not None else np.zeros(len(table), np.int32)
    _, group = np.unique(np.stack([steps, table.group]), axis=1, return_inverse=True)
    group = group.reshape(-1)[order]
    _, first = np.unique(group, return_index=True)
    rank = first[np.searchsorted(np.unique(group), group)]
    return order[np.argsort(rank, kind="stable")]
