"""The samples of the page, worst first: token columns as bytes, text as JSON. The page shows text by `textContent`."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.errors import first_line, quoted_path

MAX_TOKENS = 100_000
"""Response tokens in the page."""
MAX_SAMPLES = 5_000
"""Samples in the page."""
MAX_PROMPT = 4_000
"""Characters of a prompt in the page, or tokens if it has no text; its end is kept."""
MAX_TEXT = 20_000
"""Characters of a response's text in the page; its start is kept."""
MAX_CHARACTERS = 4_000_000
"""Characters of all prompts in the page, and of all texts, divided equally among samples."""
MAX_EXPERTS = 1_000_000
"""Expert numbers in the page; of more, only the first sparse layers."""

Decode = Callable[[Sequence[int]], list[str]]


def decoder(table: TokenTable | None, hf_checkpoint: str = "") -> Decode | None:
    """A function from token ids to their texts, decoded one by one; None without a tokenizer."""
    directory = hf_checkpoint or (table.metadata.get("tokenizer") if table is not None else None)
    if not directory:
        return None
    from tokenizers import Tokenizer

    try:  # transformers would read more files of the directory, and could run code in it
        tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    except Exception as error:  # tokenizers raises Exception itself
        if not hf_checkpoint:
            return None
        problem = first_line(error)
        raise ValueError(
            f"--hf-checkpoint {quoted_path(directory)} has no tokenizer.json that can be read:"
            f" {problem}."
        ) from error
    size = tokenizer.get_vocab_size()

    def decode(ids: Sequence[int]) -> list[str]:
        return [
            tokenizer.decode([i], skip_special_tokens=False) if 0 <= i < size else f"⟨{i}⟩"
            for i in ids
        ]

    return decode


def chosen_samples(table: TokenTable, max_tokens: int = MAX_TOKENS) -> TokenTable:
    """The samples to show, sorted by mean abs(Δ).

    For a larger table, half of the tokens belong to the worst samples and their groups, half to
    random other samples.
    """
    order = np.argsort(-mean_size(table), kind="stable")
    if table.tokens <= max_tokens and len(table) <= MAX_SAMPLES:
        return table.select(order)
    if table.group is not None:  # all samples of a group follow its first one
        steps = table.step if table.step is not None else np.zeros(len(table), np.int32)
        _, group = np.unique(np.stack([steps, table.group]), axis=1, return_inverse=True)
        group = group.reshape(-1)[order]
        known, first = np.unique(group, return_index=True)
        order = order[np.argsort(first[np.searchsorted(known, group)], kind="stable")]
    lengths = table.response_length
    worst = order[np.cumsum(lengths[order]) <= max_tokens // 2][: MAX_SAMPLES // 2]
    others = np.random.default_rng(0).permutation(np.setdiff1d(order, worst))
    budget = max_tokens - int(lengths[worst].sum())
    others = others[np.cumsum(lengths[others]) <= budget][: MAX_SAMPLES - len(worst)]
    chosen = np.concatenate([worst, others])
    chosen = chosen if len(chosen) else order[:1]  # one response exceeds the limit
    return table.select(chosen[np.argsort(-mean_size(table)[chosen], kind="stable")])


def mean_size(table: TokenTable) -> NDArray[np.float64]:
    """[S] mean abs(Δ) of the valid tokens of each sample; 0 without valid tokens."""
    valid = table.valid
    sample = table.sample[valid]
    count = np.bincount(sample, minlength=len(table))
    return np.asarray(
        np.bincount(sample, np.abs(table.log_ratio[valid]), len(table)) / np.maximum(count, 1)
    )


def payload(table: TokenTable, decode: Decode | None = None) -> dict[str, Any]:
    """Data of the samples for the page: plain values, and `columns` of arrays with one value per token."""
    size = np.abs(table.log_ratio[table.valid])
    ids, index = (
        np.unique(table.token, return_inverse=True) if table.token is not None else (None, None)
    )
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
    for name in (
        "weight",
        "bounded_weight",
        "advantage",
        "entropy",
        "weight_version",
        "turn",
        "rejected",
        "vetoed",
    ):
        if (column := getattr(table, name)) is not None:
            columns[name] = column
    if index is not None:
        columns["token"] = index.astype(np.int32)
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

    `columns` of the JSON has the JavaScript type of each column, its first byte after the JSON, and
    its length.
    """
    types = {"f4": "Float32Array", "i4": "Int32Array", "i2": "Int16Array", "u1": "Uint8Array"}
    layout, parts, start = {}, [], 0
    for name, column in payload["columns"].items():
        layout[name] = types[column.dtype.str[1:]], start, column.size
        parts.append(_aligned(column.astype(column.dtype.newbyteorder("<")).tobytes(), b"\0"))
        start += len(parts[-1])
    head = _aligned(json.dumps({**payload, "columns": layout}, allow_nan=False).encode(), b" ")
    return b"".join([struct.pack("<I", len(head)), head, *parts])


def _aligned(part: bytes, filler: bytes) -> bytes:
    """The bytes, padded to a multiple of four, which JavaScript's typed arrays require."""
    return part + filler * (-len(part) % 4)


def _samples(table: TokenTable, decode: Decode | None) -> list[dict[str, Any]]:
    valid_N, size_N, mean_S = table.valid, np.abs(table.log_ratio), mean_size(table)
    characters = MAX_CHARACTERS // max(len(table), 1)
    text_limit, prompt_limit = min(characters, MAX_TEXT), min(characters, MAX_PROMPT)
    samples = []
    for i in range(len(table)):
        rows = slice(int(table.offsets[i]), int(table.offsets[i + 1]))
        valid = valid_N[rows]
        sample: dict[str, Any] = {
            "mean": float(mean_S[i]),
            "worst": float(size_N[rows].max(initial=0.0)),
        }
        sample["valid"] = int(valid.sum())
        for name in ("step", "sample_index", "group", "reward", "truncated"):
            if (column := getattr(table, name)) is not None and np.isfinite(column[i]):
                sample[name] = column[i].item()
        advantages = np.zeros(0) if table.advantage is None else table.advantage[rows][valid]
        if np.isfinite(advantages).any():
            sample["advantage"] = float(advantages[np.isfinite(advantages)].mean(dtype=np.float64))
        text = table.text[i] if table.text is not None else ""
        sample["text"] = text if len(text) <= text_limit else text[:text_limit] + "…"
        sample["prompt"] = _prompt(table, i, decode, prompt_limit)
        samples.append(sample)
    return samples


def _prompt(table: TokenTable, i: int, decode: Decode | None, limit: int) -> str:
    if table.prompt_text is not None and table.prompt_text[i]:
        text = table.prompt_text[i]
    elif table.prompt is not None:
        ids = table.prompt[i][-limit:].tolist()
        text = " ".join(map(str, ids)) if decode is None else "".join(decode(ids))
    else:
        return ""
    return text if len(text) <= limit else "…" + text[-limit:]
