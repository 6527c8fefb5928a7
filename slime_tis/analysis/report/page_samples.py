"""The samples in the page, the worst first: token columns as bytes, texts as JSON.

Texts may be hostile. samples.js shows them with `textContent`, never as HTML.
"""

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
"""Characters of a prompt in the page, or tokens of a prompt without text. The end is kept."""
MAX_TEXT = 20_000
"""Characters of a response in the page. The start is kept."""
MAX_CHARACTERS = 4_000_000
"""Characters of all prompts, and of all responses, divided equally among the samples."""
MAX_EXPERTS = 1_000_000
"""Expert numbers in the page. If there are more, only the first sparse layers are shown."""

OPTIONAL_COLUMNS = (
    "weight",
    "bounded_weight",
    "advantage",
    "entropy",
    "weight_version",
    "turn",
    "rejected",
    "vetoed",
)
"""Token columns that the page shows if the dump has them."""

Decode = Callable[[Sequence[int]], list[str]]
"""A function from token ids to their texts."""


def decoder(table: TokenTable | None, hf_checkpoint: str = "") -> Decode | None:
    """Returns a function that decodes token ids one by one; None without a tokenizer.

    Args:
        table: Dump whose metadata may name the tokenizer.
        hf_checkpoint: Directory of the tokenizer, instead of the dump's.

    Raises:
        ValueError: `hf_checkpoint` has no readable tokenizer.
    """
    directory = hf_checkpoint
    if not directory and table is not None:
        directory = table.metadata.get("tokenizer") or ""
    if not directory:
        return None
    from tokenizers import Tokenizer

    try:
        # transformers would read more files of the directory, and could run code in it.
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
        texts = []
        for i in ids:
            text = f"⟨{i}⟩"  # models may have more embeddings than the tokenizer has tokens
            if 0 <= i < size:
                text = tokenizer.decode([i], skip_special_tokens=False)
            texts.append(text)
        return texts

    return decode


def chosen_samples(table: TokenTable, max_tokens: int = MAX_TOKENS) -> TokenTable:
    """Returns the samples to show, sorted by mean abs(Δ), the largest first.

    From a larger table, the worst samples and their groups fill half of the tokens, and random
    other samples fill the rest.
    """
    mean_S = mean_size(table)
    order = np.argsort(-mean_S, kind="stable")
    if table.tokens <= max_tokens and len(table) <= MAX_SAMPLES:
        return table.select(order)
    if table.group is not None:
        order = _grouped(table, order)
    lengths = table.response_length
    fits = np.cumsum(lengths[order]) <= max_tokens // 2
    worst = order[fits][: MAX_SAMPLES // 2]
    others = np.random.default_rng(0).permutation(np.setdiff1d(order, worst))
    budget = max_tokens - int(lengths[worst].sum())
    fits = np.cumsum(lengths[others]) <= budget
    others = others[fits][: MAX_SAMPLES - len(worst)]
    chosen = np.concatenate([worst, others])
    if not len(chosen):  # a single response exceeds the limit
        chosen = order[:1]
    return table.select(chosen[np.argsort(-mean_S[chosen], kind="stable")])


def _grouped(table: TokenTable, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns an order of samples in which all samples of a group follow its first one."""
    steps = table.step
    if steps is None:
        steps = np.zeros(len(table), np.int32)
    # Group numbers begin anew in each step.
    assert table.group is not None
    step_and_group = np.stack([steps, table.group])
    _, group = np.unique(step_and_group, axis=1, return_inverse=True)
    group = group.reshape(-1)[order]
    _, first, index = np.unique(group, return_index=True, return_inverse=True)
    return order[np.argsort(first[index], kind="stable")]


def mean_size(table: TokenTable) -> NDArray[np.float64]:
    """Returns [S] mean abs(Δ) of the valid tokens in each sample; 0 without valid tokens."""
    valid = table.valid
    sample = table.sample[valid]
    count = np.bincount(sample, minlength=len(table))
    total = np.bincount(sample, np.abs(table.log_ratio[valid]), len(table))
    return np.asarray(total / np.maximum(count, 1))


def payload(table: TokenTable, decode: Decode | None = None) -> dict[str, Any]:
    """Returns the data of the samples: JSON values, and `columns` of arrays [N]."""
    size = np.abs(table.log_ratio[table.valid])
    columns: dict[str, NDArray[Any]] = {
        "train": table.train_log_prob,
        "rollout": table.rollout_log_prob,
        "ratio": table.log_ratio,
        "valid": table.valid.astype(np.uint8),
        "mask": (table.loss_mask > 0).astype(np.uint8),
    }
    if table.metadata.get("old_policy") in ("recomputed", "interpolated"):
        columns["old"] = table.old_log_prob
    for name in OPTIONAL_COLUMNS:
        column = getattr(table, name)
        if column is not None:
            columns[name] = column
    ids = None
    texts = None
    if table.token is not None:
        # The page stores each text once: the column holds indices of `ids` and `texts`.
        unique_ids, index = np.unique(table.token, return_inverse=True)
        columns["token"] = index.astype(np.int32)
        ids = unique_ids.tolist()
        if decode is not None:
            texts = decode(ids)
    experts = None
    if table.experts is not None and table.experts.size:
        all_layers, k = table.experts.shape[1:]
        layers = int(np.clip(MAX_EXPERTS // (table.tokens * k), 1, all_layers))
        experts = {"layers": layers, "of": all_layers, "k": k}
        columns["experts"] = table.experts[:, :layers].astype(np.int16)
    # The 99 % quantile, so that a few broken tokens do not make all others pale.
    scale = 1.0
    if len(size):
        scale = float(np.quantile(size, 0.99))
    return {
        "offsets": table.offsets.tolist(),
        "columns": columns,
        "experts": experts,
        "ids": ids,
        "texts": texts,
        "scale": scale,
        "criteria": [str(name) for name in table.metadata.get("criteria") or ()],
        "samples": _samples(table, decode),
    }


def packed(payload: dict[str, Any]) -> bytes:
    """Returns the samples as bytes for samples.js.

    Format: the length of a JSON text in four bytes, the JSON text, and the columns in little-endian
    order. In the JSON, `columns` has for each column the JavaScript type, the offset of the first
    byte after the JSON, and the number of values.
    """
    types = {"f4": "Float32Array", "i4": "Int32Array", "i2": "Int16Array", "u1": "Uint8Array"}
    layout = {}
    parts = []
    start = 0
    for name, column in payload["columns"].items():
        layout[name] = (types[column.dtype.str[1:]], start, column.size)
        content = column.astype(column.dtype.newbyteorder("<")).tobytes()
        part = _aligned(content, b"\0")
        parts.append(part)
        start += len(part)
    text = json.dumps({**payload, "columns": layout}, allow_nan=False)
    # With spaces, which JSON allows at its end.
    head = _aligned(text.encode(), b" ")
    return b"".join([struct.pack("<I", len(head)), head, *parts])


def _aligned(part: bytes, filler: bytes) -> bytes:
    """The bytes, padded to a multiple of four, which JavaScript's typed arrays require."""
    return part + filler * (-len(part) % 4)


def _samples(table: TokenTable, decode: Decode | None) -> list[dict[str, Any]]:
    """Numbers and texts by sample."""
    valid_N = table.valid
    size_N = np.abs(table.log_ratio)
    mean_S = mean_size(table)
    characters = MAX_CHARACTERS // max(len(table), 1)
    text_limit = min(characters, MAX_TEXT)
    prompt_limit = min(characters, MAX_PROMPT)
    samples = []
    for i in range(len(table)):
        rows = slice(int(table.offsets[i]), int(table.offsets[i + 1]))
        valid = valid_N[rows]
        sample: dict[str, Any] = {
            "mean": float(mean_S[i]),
            "worst": float(size_N[rows].max(initial=0.0)),
            "valid": int(valid.sum()),
        }
        for name in ("step", "sample_index", "group", "reward", "truncated"):
            column = getattr(table, name)
            if column is not None and np.isfinite(column[i]):
                sample[name] = column[i].item()
        if table.advantage is not None:
            advantages = table.advantage[rows][valid]
            finite = advantages[np.isfinite(advantages)]
            if len(finite):
                sample["advantage"] = float(finite.mean(dtype=np.float64))
        text = ""
        if table.text is not None:
            text = table.text[i]
        if len(text) > text_limit:
            text = text[:text_limit] + "…"
        sample["text"] = text
        sample["prompt"] = _prompt(table, i, decode, prompt_limit)
        samples.append(sample)
    return samples


def _prompt(table: TokenTable, i: int, decode: Decode | None, limit: int) -> str:
    """The end of a sample's prompt: its text, else its decoded tokens or its token ids."""
    text = ""
    if table.prompt_text is not None and table.prompt_text[i]:
        text = table.prompt_text[i]
    elif table.prompt is not None:
        ids = table.prompt[i][-limit:].tolist()
        if decode is None:
            text = " ".join(map(str, ids))
        else:
            text = "".join(decode(ids))
    if len(text) > limit:
        return "…" + text[-limit:]
    return text
