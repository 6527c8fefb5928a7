"""Prompt files: JSONL or parquet rows, tokenized once and visited epoch by epoch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_tis.errors import quoted
from slime_tis.rollout.json_values import json_object
from slime_tis.rollout.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_tis.rollout.config import RolloutConfig

logger = logging.getLogger(__name__)


class PromptDataset:
    """The training prompts, in the file's order or shuffled anew every epoch.

    The order of an epoch depends on the seed and the epoch's number alone, so that two integers are all there
    is to save.
    """

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig) -> None:
        """Reads the file; see `load_prompts`."""
        self.prompts = load_prompts(
            path,
            tokenizer,
            input_key=config.input_key,
            label_key=config.label_key,
            metadata_key=config.metadata_key,
            apply_chat_template=config.apply_chat_template,
            max_prompt_len=config.rollout_max_prompt_len,
            max_context_len=config.rollout_max_context_len,
        )
        self._digest = _digest(self.prompts)
        self._seed = config.rollout_seed if config.rollout_shuffle else None
        self._epoch = 0
        self._position = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def next_batch(self, size: int) -> list[Prompt]:
        """The next `size` prompts; a batch that reaches the end of an epoch goes on into the next."""
        batch: list[Prompt] = []
        while len(batch) < size:
            order = epoch_order(len(self.prompts), self._seed, self._epoch)
            taken = order[self._position : self._position + size - len(batch)]
            batch.extend(self.prompts[place] for place in taken)
            self._position += len(taken)
            if self._position == len(self.prompts):
                self._epoch, self._position = self._epoch + 1, 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, and which prompts these are."""
        return {"epoch": self._epoch, "position": self._position, "prompts": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved place.

        Raises:
          ValueError: the place is of other prompts than these, or is none.
        """
        epoch, position, digest = (state.get(name) for name in ("epoch", "position", "prompts"))
        if digest != self._digest:
            raise ValueError(
                "the prompts of --prompt-data are not those that the run was started with, so that it cannot go on "
                "where it stopped; give the same file and the same options of reading it (--input-key, "
                "--apply-chat-template, --rollout-max-prompt-len), or start afresh with another --save."
            )
        if not (isinstance(epoch, int) and isinstance(position, int) and 0 <= position < len(self.prompts)):
            raise ValueError(f"the checkpoint stopped at {state!r}, which is no place in --prompt-data.")
        self._epoch, self._position = epoch, position


def _digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the prompts' tokens in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes() + b"|")
    return digest.hexdigest()


def epoch_order(size: int, seed: int | None, epoch: int) -> Sequence[int]:
    """The places 0 .. size − 1 in the order of an epoch: shuffled by (seed, epoch), or as they are."""
    if seed is None:
        return range(size)
    return np.random.default_rng([seed % 2**64, epoch]).permutation(size).tolist()


def load_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    label_key: str | None = None,
    metadata_key: str = "metadata",
    apply_chat_template: bool = False,
    max_prompt_len: int | None = None,
    max_context_len: int | None = None,
) -> list[Prompt]:
    """Reads and tokenizes a prompt file.

    Plain text is tokenized as the tokenizer does by default, with its beginning-of-sequence token if it has
    one; a chat template writes its own special tokens, and none are added.

    Args:
      path: JSONL, or parquet where the name ends in .parquet.
      tokenizer: of the policy.
      input_key: of the prompt, a string; with a chat template also a list of messages.
      label_key: of the label, or None. Labels that are not strings become their JSON.
      metadata_key: of a mapping for rewards; a row may lack it. The row's other columns are metadata too, under
        their names; where both have a name, the mapping's value counts.
      apply_chat_template: render the prompt with the tokenizer's chat template.
      max_prompt_len: longest prompt, in tokens; longer ones are left out and their number is logged.
      max_context_len: longest prompt and response together, in tokens.

    Raises:
      ValueError: no file, nothing in it, or a row that is not as it should be, with its line number.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"the prompt file {str(path)!r} does not exist.")
    rows = list(_parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path))
    if not rows:
        raise ValueError(f"the prompt file {str(path)!r} is empty.")
    if apply_chat_template and not tokenizer.chat_template:
        raise ValueError("--apply-chat-template is set, but the tokenizer has no chat template; leave it out.")
    texts = [_text(_value(row, input_key, place), place, tokenizer, apply_chat_template) for place, row in rows]
    token_ids = tokenizer(texts, add_special_tokens=not apply_chat_template)["input_ids"]
    prompts = [
        Prompt(
            index=index,
            text=text,
            token_ids=tuple(ids),
            label=None if label_key is None else _label(_value(row, label_key, place)),
            metadata=_other_columns(row, (input_key, label_key, metadata_key), place)
            | _metadata(row.get(metadata_key), metadata_key, place),
        )
        for index, ((place, row), text, ids) in enumerate(zip(rows, texts, token_ids, strict=True))
    ]
    kept = _drop_long(prompts, max_prompt_len, path)
    longest = max(len(prompt.token_ids) for prompt in kept)
    if max_context_len is not None and longest >= max_context_len:
        raise ValueError(
            f"--rollout-max-context-len is {max_context_len}, but a prompt of {quoted(str(path))} has {longest} "
            "tokens, which leaves no room for a response; raise it, or set --rollout-max-prompt-len to leave such "
            "prompts out."
        )
    return kept


def _drop_long(prompts: list[Prompt], max_prompt_len: int | None, path: Path) -> list[Prompt]:
    if max_prompt_len is None:
        return prompts
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_len]
    if not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise ValueError(
            f"--rollout-max-prompt-len is {max_prompt_len}, but the shortest prompt of {str(path)!r} has "
            f"{shortest} tokens; raise it."
        )
    if len(kept) < len(prompts):
        logger.warning(
            "%d of %d prompts of %s are longer than --rollout-max-prompt-len %d and are left out.",
            len(prompts) - len(kept),
            len(prompts),
            path,
            max_prompt_len,
        )
    return kept


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its place, for messages; blank lines are skipped."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place} is not JSON: {error.msg} at column {error.colno}.") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place} is JSON of type {type(row).__name__}, but each line must be an object.")
            yield place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{str(path)!r} is parquet, which needs pyarrow; install it with: pip install 'slime_tis[parquet]'."
        ) from error
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


def _value(row: dict[str, Any], key: str, place: str) -> Any:
    if key not in row:
        raise ValueError(f"{place} has no key {key!r}; its keys are {', '.join(map(repr, row)) or 'none'}.")
    return row[key]


def _text(value: Any, place: str, tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool) -> str:
    if apply_chat_template:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise whatever their author chose
            raise ValueError(f"{place} does not fit the chat template: {error}.") from error
    if not isinstance(value, str):
        raise ValueError(
            f"{place} has a prompt of type {type(value).__name__} where a string is needed; a list of "
            "messages needs --apply-chat-template."
        )
    if not value:
        raise ValueError(f"{place} has an empty prompt.")
    return value


def _label(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _metadata(value: Any, key: str, place: str) -> dict[str, Any]:
    """The row's mapping; a string is read as JSON, for files that can hold no mapping."""
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = None
    if not isinstance(value, dict):
        raise ValueError(f"{place} has {key!r} that is no mapping.")
    return json_object(value, f"{place}, {key!r}")


def _other_columns(row: dict[str, Any], used: Sequence[str | None], place: str) -> dict[str, Any]:
    """What the row has besides prompt, label and metadata."""
    return json_object({key: value for key, value in row.items() if key not in used}, place)
