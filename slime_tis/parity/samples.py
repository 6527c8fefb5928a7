"""The token sequences that both executions compute.

Shapes: suffix _T one entry per token of all samples, packed in their order.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_tis.errors import first_line, quoted, quoted_path

MAX_PROMPTS_BYTES = 64 << 20
"""Largest file of prompts, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Prompts with responses."""

    tokens: tuple[tuple[int, ...], ...]
    """Token ids of prompt and response, per sample."""
    prompt_lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens of all samples."""
        return sum(map(len, self.tokens))

    @property
    def starts(self) -> list[int]:
        """Index of the first packed token, per sample."""
        starts = []
        start = 0
        for tokens in self.tokens:
            starts.append(start)
            start += len(tokens)
        return starts

    def position_of(self, token: int) -> tuple[int, int]:
        """Returns the sample of a packed token, and the token's position in it."""
        sample = 0
        for index, start in enumerate(self.starts):
            if start <= token:
                sample = index
        return sample, token - self.starts[sample]

    @property
    def predicted(self) -> Tensor:
        """bool [T]: whether another token of the same sample precedes the token."""
        is_predicted_T = torch.ones(self.total, dtype=torch.bool)
        is_predicted_T[self.starts] = False
        return is_predicted_T

    @property
    def packed(self) -> Tensor:
        """Token ids [T]."""
        return torch.tensor(list(chain.from_iterable(self.tokens)))


def random_prompts(count: int, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Returns prompts of random tokens, of different lengths up to `longest`."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for index in range(count):
        # Different lengths, so that a batch has padding.
        length = max(1, longest * (index + 1) // count)
        prompts.append(torch.randint(vocab_size, (length,), generator=generator).tolist())
    return prompts


def read_prompts(path: str, count: int, tokenizer_of: Any, vocab_size: int) -> list[list[int]]:
    """Reads the first prompts of a file.

    Args:
        path: A file with a prompt per line: text, or JSON objects with `prompt` (text or chat
            messages) or `tokens` (ids) if its name ends with `.jsonl`.
        count: Number of prompts.
        tokenizer_of: Returns the tokenizer, which only texts need.
        vocab_size: Number of token ids of the model.

    Raises:
        ValueError: The file is missing, a line is not as above, or a token is not in the
            vocabulary.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--prompts {quoted_path(path)} is not a file; give one prompt per line.")
    if file.stat().st_size > MAX_PROMPTS_BYTES:
        raise ValueError(
            f"--prompts {quoted_path(path)} has more than {MAX_PROMPTS_BYTES >> 20} MiB; only"
            " --samples lines are read, so give a shorter file."
        )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {quoted_path(path)} is not UTF-8 text.") from error
    prompts: list[list[int]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(prompts) == count:
            break
        where = f"--prompts {quoted_path(path)}, line {number}"
        prompts.append(_prompt(line, where, tokenizer_of, vocab_size, file.suffix == ".jsonl"))
    if not prompts:
        raise ValueError(f"--prompts {quoted_path(path)} has no prompt; give one per line.")
    return prompts


def _prompt(line: str, where: str, tokenizer_of: Any, vocab_size: int, is_json: bool) -> list[int]:
    """Returns the token ids of one line."""
    content: Any = line
    if is_json:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON: {first_line(error)}.") from error
        names = [name for name in ("tokens", "prompt") if isinstance(row, dict) and name in row]
        if not names:
            raise ValueError(
                f'{where} has neither "tokens" nor "prompt"; write {{"prompt": "text"}} or'
                ' {"tokens": [1, 2]}.'
            )
        content = row[names[0]]
    if isinstance(content, str):
        ids = tokenizer_of()(content)["input_ids"]
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        ids = _chat(content, where, tokenizer_of())
    else:
        ids = content
    check_tokens(ids, vocab_size, where)
    return list(ids)


def _chat(messages: list[Any], where: str, tokenizer: Any) -> list[int]:
    """Returns the token ids of messages in the model's chat template."""
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    # Templates raise errors of jinja2, or a TypeError for messages of another form.
    except Exception as error:
        raise ValueError(
            f"{where} does not fit the chat template: {first_line(error)}; write messages with"
            ' "role" and "content".'
        ) from error
    return ids


def check_tokens(ids: Any, vocab_size: int, where: str) -> None:
    """Raises ValueError unless `ids` is a list of token ids of the vocabulary."""
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{where} must have a text or a list of token ids, not {quoted(ids, 40)}.")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{where} has the token {quoted(token, 40)}, but the model's ids are 0 to"
                f" {vocab_size - 1}; use this model's tokenizer."
            )


def check_length(longest: int, context_len: Any) -> None:
    """Raises ValueError if a sample is longer than `max_position_embeddings` of config.json."""
    if context_len is None:
        return
    if type(context_len) is not int or context_len < 1:
        raise ValueError(
            f"CHECKPOINT: config.json has the max_position_embeddings {quoted(context_len, 40)}; it"
            " must be the number of positions."
        )
    if longest > context_len:
        raise ValueError(
            f"a prompt with its response has {longest} tokens, but the model has"
            f" {context_len} positions; reduce --tokens, or give shorter --prompts."
        )


def joined(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Samples:
    """Returns samples of prompts and responses."""
    tokens = []
    for prompt, response in zip(prompts, responses, strict=True):
        tokens.append((*prompt, *response))
    return Samples(tokens=tuple(tokens), prompt_lengths=tuple(map(len, prompts)))
