"""Prompt files: JSONL or parquet rows, tokenized once and visited epoch by epoch."""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from slime_tis.atomic_files import json_lines, split_row_slice
from slime_tis.errors import first_line, quoted
from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.data.user_values import json_object

logger = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 1000
"""More than any tokenizer averages over a text. Longer texts cannot fit and are not tokenized,
because that takes minutes."""
MAX_LISTED_KEYS = 20
"""Keys of a row that a message lists."""
Row = tuple[str, dict[str, Any]]
"""File and line for messages, and the row."""


class PromptDataset:
    """The training prompts, in the file's order or in a new order every epoch.

    Without a file it is empty.
    """

    def __init__(
        self,
        path: str | Path | None,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        sizes: ModelSizes | None = None,
    ) -> None:
        self.prompts: list[Prompt] = []
        if path is not None:
            self.prompts = load_prompts(path, tokenizer, sizes=sizes, **prompt_options(config))
        self._digest = _digest(self.prompts)
        self._seed = None  # which keeps the file's order
        if config.rollout_shuffle:
            self._seed = config.rollout_seed
        self._epoch = 0
        self._position = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def next_batch(self, size: int) -> list[Prompt]:
        """Returns the next `size` prompts; at the end of an epoch the next epoch follows.

        Raises:
            ValueError: There is no prompt file.
        """
        if not self.prompts:
            raise ValueError(
                "there are no prompts (--disable-rollout-global-dataset); make the samples"
                " yourself."
            )
        batch: list[Prompt] = []
        while len(batch) < size:
            order = self._order()
            missing = size - len(batch)
            indices = order[self._position : self._position + missing]
            for index in indices:
                batch.append(self.prompts[index])
            self._position += len(indices)
            if self._position == len(self.prompts):
                self._epoch += 1
                self._position = 0
        return batch

    def _order(self) -> Sequence[int]:
        """Returns the indices of the prompts in the order of this epoch."""
        if self._seed is None:
            return range(len(self.prompts))
        # numpy takes no negative seeds. The epoch is part of the seed, so that a resumed run
        # continues in the same order.
        generator = np.random.default_rng([self._seed % 2**64, self._epoch])
        order: list[int] = generator.permutation(len(self.prompts)).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch, and a digest of the prompts."""
        return {"epoch": self._epoch, "position": self._position, "prompts": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved position.

        Raises:
            ValueError: The prompts have changed, or the position is invalid.
        """
        if state.get("prompts") != self._digest:
            raise ValueError(
                "the prompts of --prompt-data have changed since the start of the run; give the"
                " same file and options (--input-key, --tool-key, --apply-chat-template,"
                " --rollout-max-prompt-len), or another --save for a new run."
            )
        epoch = state.get("epoch")
        position = state.get("position")
        end = max(len(self.prompts), 1)  # without prompts the position is 0
        if not (isinstance(epoch, int) and isinstance(position, int) and 0 <= position < end):
            raise ValueError(
                f"the checkpoint stopped at {state!r}, which is not a place in --prompt-data."
            )
        self._epoch = epoch
        self._position = position


def _digest(prompts: Sequence[Prompt]) -> str:
    """Returns a hash of the token ids of all prompts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        ids = np.asarray(prompt.token_ids, dtype=np.int64)
        # The separator makes prompts [1, 2], [3] differ from prompts [1], [2, 3].
        digest.update(ids.tobytes() + b"|")
    return digest.hexdigest()


def prompt_options(config: RolloutConfig) -> dict[str, Any]:
    """Returns the options of `load_prompts` for training prompts."""
    return {
        "input_key": config.input_key,
        "label_key": config.label_key,
        "metadata_key": config.metadata_key,
        "tool_key": config.tool_key,
        "apply_chat_template": config.apply_chat_template,
        "template_options": config.chat_template_options,
        "max_prompt_len": config.rollout_max_prompt_len,
    }


def load_prompts(  # noqa: PLR0913 - one keyword for each option of a prompt file
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_key: str,
    label_key: str | None = None,
    metadata_key: str = "metadata",
    tool_key: str | None = "tools",
    apply_chat_template: bool = False,
    template_options: Mapping[str, Any] | None = None,
    max_prompt_len: int | None = None,
    sizes: ModelSizes | None = None,
) -> list[Prompt]:
    """Reads and tokenizes a prompt file, or the rows of `FILE@[START:STOP]`.

    As in slime, the tokenizer adds no special tokens before or after a text.

    Args:
        path: JSONL or parquet file, with or without a slice of rows.
        tokenizer: Tokenizer of the model.
        input_key: Column of the prompt.
        label_key: Column of the label; None for prompts without labels.
        metadata_key: Column of a mapping, which becomes the prompt's metadata together with the
            remaining columns.
        tool_key: Column of the tools that the chat template describes: a list, or JSON text of a
            list.
        apply_chat_template: Whether the chat template renders the prompts.
        template_options: Further variables of the chat template.
        max_prompt_len: Longest prompt, in tokens; longer prompts are omitted.
        sizes: Sizes of the model that the prompts must fit.

    Raises:
        ValueError: A row is malformed or its prompt does not fit; the message names file and line.
    """
    rows = _read_rows(path)
    if apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            "--apply-chat-template is set, but the tokenizer has no chat template; remove it."
        )
    tools = []
    texts = []
    for location, row in rows:
        row_tools = _tools(row, location, tool_key, is_needed=apply_chat_template)
        value = _value(row, input_key, location)
        if apply_chat_template:
            text = _rendered(value, location, tokenizer, row_tools, template_options)
        else:
            text = _text(value, location)
        tools.append(row_tools)
        texts.append(text)

    indices = _indices_to_tokenize(rows, texts, max_prompt_len, sizes)
    # One call for all texts: fast tokenizers then use all cores.
    tokens = token_ids_of([texts[index] for index in indices], tokenizer)
    prompts = []
    for index, token_ids in zip(indices, tokens, strict=True):
        location, row = rows[index]
        metadata = _metadata(location, row, (input_key, label_key), metadata_key, tools[index])
        prompt = Prompt(
            index=index,
            text=texts[index],
            token_ids=token_ids,
            label=_label(location, row, label_key),
            metadata=metadata,
        )
        prompts.append(prompt)

    if max_prompt_len is not None:
        prompts = _short_prompts(prompts, max_prompt_len, path, num_rows=len(rows))
    if sizes is not None:
        for prompt in prompts:
            location, _ = rows[prompt.index]
            check_fits(prompt, location, sizes)
    contents = [rows[prompt.index][1][input_key] for prompt in prompts]
    warnings = bos_warnings(
        prompts, contents, tokenizer, str(path), is_rendered=apply_chat_template
    )
    for warning in warnings:
        logger.warning("%s", warning)
    return prompts


def _read_rows(path: str | Path) -> list[Row]:
    """Returns the rows of `FILE` or `FILE@[START:STOP]`, at least one.

    Raises:
        ValueError: The file is missing, empty or malformed, or has none of these rows.
    """
    file, row_slice = split_row_slice(path)
    if not file.is_file():
        raise ValueError(f"the prompt file {str(file)!r} does not exist.")
    rows = _slice_of(rows_of(file), row_slice)
    if rows:
        return rows
    if row_slice == slice(None):
        raise ValueError(f"the prompt file {str(path)!r} is empty.")
    raise ValueError(f"the prompt file {str(path)!r} has no such rows.")


def _indices_to_tokenize(
    rows: Sequence[Row],
    texts: Sequence[str],
    max_prompt_len: int | None,
    sizes: ModelSizes | None,
) -> list[int]:
    """Returns the indices of texts that may fit; the others have too many characters.

    Raises:
        ValueError: A text is too long, and --rollout-max-prompt-len is unset.
    """
    context_len = None
    if sizes is not None:
        context_len = sizes.context_len
    longest = CHARACTERS_PER_TOKEN * (max_prompt_len or context_len or math.inf)
    indices = []
    for index, text in enumerate(texts):
        if len(text) <= longest:
            indices.append(index)
        elif max_prompt_len is None:
            location = rows[index][0]
            raise ValueError(_does_not_fit(location, f"{len(text)} characters", context_len))
    return indices


def _short_prompts(
    prompts: Sequence[Prompt], limit: int, path: str | Path, *, num_rows: int
) -> list[Prompt]:
    """Returns the prompts of at most `limit` tokens, and logs how many rows are omitted.

    Args:
        prompts: Tokenized prompts.
        limit: Longest prompt, in tokens.
        path: The prompt file, for messages.
        num_rows: Rows of the file, with those that were too long to tokenize.

    Raises:
        ValueError: All prompts are longer.
    """
    short = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    if not short:
        raise ValueError(
            f"--rollout-max-prompt-len is {limit}, but all prompts of {path} are longer; raise it."
        )
    if len(short) < num_rows:
        omitted = f"{num_rows - len(short)} of {num_rows} prompts of {path}"
        logger.warning(
            "%s are longer than --rollout-max-prompt-len %d and are omitted.", omitted, limit
        )
    return short


def token_ids_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Returns the tokens of texts, without the special tokens that a tokenizer adds by default."""
    if not texts:
        return []
    tokens = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [tuple(token_ids) for token_ids in tokens]


def bos_warnings(
    prompts: Sequence[Prompt],
    contents: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    *,
    is_rendered: bool,
) -> Iterator[str]:
    """Yields a warning about prompts with two BOS, and one about texts without BOS.

    Only a BOS that the tokenizer adds by default counts as missing.

    Args:
        prompts: Tokenized prompts.
        contents: For each prompt its text, or the messages that the chat template rendered.
        tokenizer: Tokenizer of the prompts.
        source: Name of the prompts in messages.
        is_rendered: Whether the chat template rendered the prompts.
    """
    bos = str(tokenizer.bos_token)
    doubled = []
    for prompt, content in zip(prompts, contents, strict=True):
        if _has_two_bos(prompt, content, tokenizer, is_rendered=is_rendered):
            doubled.append(prompt.index)
    if doubled:
        if is_rendered:
            origin = "the chat template renders it, and so does the file"
        else:
            origin = "the file has it twice"
        yield (
            f"{len(doubled)} of {len(prompts)} prompts of {source} contain the start token"
            f" {bos!r} twice, the first is prompt {doubled[0]}: {origin}; remove one of the two."
        )
    if is_rendered:
        return  # the template decides which special tokens a prompt begins with
    prefix = added_prefix(tokenizer)
    missing = [prompt for prompt in prompts if prompt.token_ids[: len(prefix)] != prefix]
    if missing:
        prefix_text = tokenizer.decode(list(prefix))
        yield (
            f"{len(missing)} of {len(prompts)} prompts of {source} do not begin with"
            f" {prefix_text!r}, which the tokenizer adds to texts by default. As in slime, prompts"
            " are tokenized without it; if the model was trained with it, write"
            f" {prefix_text} at the start of each prompt."
        )


def _has_two_bos(
    prompt: Prompt, content: Any, tokenizer: PreTrainedTokenizerBase, *, is_rendered: bool
) -> bool:
    """Whether a prompt begins with two BOS, or has one from the template and one from the file."""
    bos_id = tokenizer.bos_token_id
    if bos_id is None:
        return False
    if prompt.token_ids[:2] == (bos_id, bos_id):
        return True
    # A template may render BOS once per turn, so several do not count if none is from the file.
    return (
        is_rendered
        and _contains(content, str(tokenizer.bos_token))
        and prompt.token_ids.count(bos_id) > 1
    )


def added_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that the tokenizer puts before a text by default."""
    ids = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(ids)):
        if ids[start : start + len(bare)] == bare:
            return tuple(ids[:start])
    return ()  # the tokenizer splits the text in another way after its special tokens


def _contains(content: Any, text: str) -> bool:
    """Whether a text or one of several messages contains `text`."""
    if not isinstance(content, list):
        return text in str(content)
    return any(
        isinstance(message, Mapping) and text in str(message.get("content", ""))
        for message in content
    )


def _slice_of(rows: Iterable[Row], row_slice: slice) -> list[Row]:
    """Returns the rows of a slice; reads no later rows, unless a bound is negative."""
    if (row_slice.start or 0) < 0 or (row_slice.stop or 0) < 0:
        return list(rows)[row_slice]  # a bound counted from the end needs the number of rows
    return list(islice(rows, row_slice.start, row_slice.stop))


def check_fits(prompt: Prompt, location: str, sizes: ModelSizes) -> None:
    """Raises ValueError if a prompt fills the context or has tokens outside the vocabulary."""
    length = len(prompt.token_ids)
    if sizes.context_len is not None and length >= sizes.context_len:
        raise ValueError(_does_not_fit(location, f"{length} tokens", sizes.context_len))
    # Token ids of a user's data source may be negative.
    smallest = min(prompt.token_ids, default=0)
    largest = max(prompt.token_ids, default=0)
    last_id = (sizes.vocab_size or math.inf) - 1
    if smallest < 0 or largest > last_id:
        wrong_id = largest
        if smallest < 0:
            wrong_id = smallest
        raise ValueError(
            f"{location} has a prompt with token {wrong_id}, but the model's"
            f" vocabulary ends at {last_id}; the tokenizer of --hf-checkpoint is of another model."
        )


def _does_not_fit(location: str, length: str, context_len: int | None) -> str:
    return (
        f"{location} has a prompt of {length}, which leaves no tokens for a response in a context"
        f" of {context_len}; set --rollout-max-prompt-len to skip such prompts."
    )


def _value(row: dict[str, Any], key: str, location: str) -> Any:
    """Returns a column of a row; the message about a missing one lists the row's keys."""
    if key in row:
        return row[key]
    listed = [quoted(name) for name in list(row)[:MAX_LISTED_KEYS]]
    keys = ", ".join(listed) or "none"
    if len(row) > MAX_LISTED_KEYS:
        keys += ", …"
    raise ValueError(f"{location} has no key {key!r}; its keys are {keys}.")


def _text(value: Any, location: str) -> str:
    """Returns a prompt without a chat template, which must be a text."""
    if not isinstance(value, str):
        raise ValueError(
            f"{location} has a prompt of type {type(value).__name__} where a string is needed; a"
            " list of messages needs --apply-chat-template."
        )
    if not value:
        raise ValueError(f"{location} has an empty prompt.")
    return _encodable(value, f"{location} has a prompt")


def _rendered(
    value: Any,
    location: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[Any] | None,
    options: Mapping[str, Any] | None,
) -> str:
    """Returns a prompt in the chat template; a text becomes a message of the user."""
    messages = value
    if isinstance(value, str):
        messages = [{"role": "user", "content": value}]
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **(options or {})
        )
    except Exception as error:  # templates may raise any exception
        raise ValueError(
            f"{location} does not fit the chat template: {first_line(error)}."
        ) from error
    return _encodable(text, f"{location} has a prompt")


def rendered(
    prompt: object,
    location: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text of a prompt; the chat template renders messages."""
    if not isinstance(prompt, list):
        return _text(prompt, location)
    if not tokenizer.chat_template:
        raise ValueError(
            f"{location} has a prompt of messages, but the tokenizer has no chat template; give a"
            " text."
        )
    return _rendered(prompt, location, tokenizer, tools, options)


def _tools(
    row: Mapping[str, Any], location: str, key: str | None, *, is_needed: bool
) -> list[Any] | None:
    """Returns the tools of a row; None if it has none.

    Raises:
        ValueError: The column is malformed, and the chat template needs it.
    """
    if key is None:
        return None
    value = row.get(key)
    if isinstance(value, str):
        # The JSON parser raises RecursionError for deeply nested text.
        with suppress(ValueError, RecursionError):  # refused below
            value = json.loads(value)
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(tool, dict) for tool in value):
        return value
    if not is_needed:
        return None  # the column stays in the metadata as it is
    raise ValueError(
        f"{location} has {key!r} that is not a list of tools, {quoted(row[key])}; give a list of"
        " objects or its JSON text, or name another column with --tool-key."
    )


def _encodable(text: str, what: str) -> str:
    """Returns the text; raises ValueError for half of a surrogate pair, which JSON permits."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"{what} with half of a surrogate pair, {half}, at character {error.start + 1}."
        ) from None
    return text


def _label(location: str, row: dict[str, Any], label_key: str | None) -> Any:
    """Returns a label of any JSON type; a decimal of parquet becomes text."""
    if label_key is None:
        return None
    value = _value(row, label_key, location)
    if isinstance(value, Decimal):
        return str(value)
    try:
        text = value
        if not isinstance(value, str):
            # Escaped text would hide half of a surrogate pair from the check below.
            text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # bytes and dates of parquet
        raise ValueError(
            f"{location} has a label of type {type(value).__name__}, which JSON does not have;"
            " write it as a string."
        ) from None
    _encodable(text, f"{location} has a label")
    return value


def _metadata(
    location: str,
    row: dict[str, Any],
    used_keys: Sequence[str | None],
    metadata_key: str,
    tools: list[Any] | None,
) -> dict[str, Any]:
    """Returns the row's other columns, the mapping in its column `metadata_key`, and its tools.

    The mapping may be JSON text, because not every format has mappings.
    """
    mapping = row.get(metadata_key)
    if isinstance(mapping, str):
        try:
            mapping = json.loads(mapping)
        except (ValueError, RecursionError):
            mapping = metadata_key  # which is not a mapping
    if mapping is not None and not isinstance(mapping, dict):
        raise ValueError(f"{location} has {metadata_key!r} that is not a mapping.")
    omitted_keys = (*used_keys, metadata_key)
    others = {key: value for key, value in row.items() if key not in omitted_keys}
    metadata = json_object(others, location)
    # The mapping is more specific than the columns, so its values replace theirs.
    metadata |= json_object(mapping or {}, f"{location}, {metadata_key!r}")
    if tools is not None:
        metadata["tools"] = tools
    return metadata


def rows_of(path: Path) -> Iterator[Row]:
    """Yields the rows of a file, without blank lines.

    Raises:
        ValueError: A row is invalid; the message names its line.
    """
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return json_lines(path)


def _parquet_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of a parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{str(path)!r} is parquet, which needs pyarrow; install it with: pip install"
            " 'slime_tis[parquet]'."
        ) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read as parquet after row {number}: {first_line(error)}; JSONL files"
            " end in .jsonl."
        ) from None
