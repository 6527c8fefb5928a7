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
"""No tokenizer has a higher average over a text; texts far beyond the limit are not tokenized,
which takes minutes."""
MAX_LISTED_KEYS = 20
Row = tuple[str, dict[str, Any]]
"""File and line for messages, and the row."""


class PromptDataset:
    """The training prompts, in the file's order or in a new order every epoch; none without a file."""

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
        self._seed = config.rollout_seed if config.rollout_shuffle else None
        self._epoch = 0
        self._position = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def next_batch(self, size: int) -> list[Prompt]:
        """The next `size` prompts; a batch that reaches the end of an epoch continues into the next.

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
            order: Sequence[int] = range(len(self.prompts))
            if self._seed is not None:
                order = (
                    np.random.default_rng([self._seed % 2**64, self._epoch])
                    .permutation(len(self.prompts))
                    .tolist()
                )
            taken = order[self._position : self._position + size - len(batch)]
            batch.extend(self.prompts[index] for index in taken)
            self._position += len(taken)
            if self._position == len(self.prompts):
                self._epoch, self._position = self._epoch + 1, 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, and a digest of the prompts."""
        return {"epoch": self._epoch, "position": self._position, "prompts": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved position; raises ValueError if the prompts have changed or the position is invalid."""
        epoch, position, digest = (state.get(name) for name in ("epoch", "position", "prompts"))
        if digest != self._digest:
            raise ValueError(
                "the prompts of --prompt-data have changed since the start of the run; give the"
                " same file and options (--input-key, --tool-key, --apply-chat-template,"
                " --rollout-max-prompt-len), or another --save for a new run."
            )
        if not (
            isinstance(epoch, int)
            and isinstance(position, int)
            and 0 <= position < max(len(self.prompts), 1)
        ):
            raise ValueError(
                f"the checkpoint stopped at {state!r}, which is not a place in --prompt-data."
            )
        self._epoch, self._position = epoch, position


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes() + b"|")
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


def load_prompts(  # noqa: C901, PLR0913
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

    As in slime, a text is tokenized as it stands: the tokenizer adds no special tokens, before or
    after it.

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
        ValueError: A row cannot be read, with file and line.
    """
    file, wanted = split_row_slice(path)
    if not file.is_file():
        raise ValueError(f"the prompt file {str(file)!r} does not exist.")
    rows = _slice_of(rows_of(file), wanted)
    if not rows:
        raise ValueError(
            f"the prompt file {str(path)!r}"
            f" {'is empty' if wanted == slice(None) else 'has no such rows'}."
        )
    if apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            "--apply-chat-template is set, but the tokenizer has no chat template; remove it."
        )
    tools = [_tools(row, place, tool_key, is_needed=apply_chat_template) for place, row in rows]
    texts = []
    for (place, row), row_tools in zip(rows, tools, strict=True):
        value = _value(row, input_key, place)
        if apply_chat_template:
            texts.append(_rendered(value, place, tokenizer, row_tools, template_options))
        else:
            texts.append(_text(value, place))
    context_len = None if sizes is None else sizes.context_len
    longest = CHARACTERS_PER_TOKEN * (max_prompt_len or context_len or math.inf)
    places = [index for index, text in enumerate(texts) if len(text) <= longest]
    if max_prompt_len is None and len(places) < len(texts):
        index = next(index for index, kept in enumerate([*places, -1]) if index != kept)
        raise ValueError(
            _does_not_fit(rows[index][0], f"{len(texts[index])} characters", context_len)
        )
    prompts = []
    for index, ids in zip(
        places, token_ids_of([texts[index] for index in places], tokenizer), strict=True
    ):
        place, row = rows[index]
        metadata = _metadata(place, row, (input_key, label_key), metadata_key)
        if tools[index] is not None:
            metadata["tools"] = tools[index]
        label = _label(place, row, label_key)
        prompts.append(
            Prompt(index=index, text=texts[index], token_ids=ids, label=label, metadata=metadata)
        )
    if max_prompt_len is not None:
        prompts = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_len]
        if not prompts:
            raise ValueError(
                f"--rollout-max-prompt-len is {max_prompt_len}, but all prompts of {path} are"
                " longer; raise it."
            )
        if len(prompts) < len(rows):
            omitted = f"{len(rows) - len(prompts)} of {len(rows)} prompts of {path}"
            logger.warning(
                "%s are longer than --rollout-max-prompt-len %d and are omitted.",
                omitted,
                max_prompt_len,
            )
    if sizes is not None:
        for prompt in prompts:
            check_fits(prompt, rows[prompt.index][0], sizes)
    contents = [rows[prompt.index][1][input_key] for prompt in prompts]
    for warning in bos_warnings(
        prompts, contents, tokenizer, str(path), is_rendered=apply_chat_template
    ):
        logger.warning("%s", warning)
    return prompts


def token_ids_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Returns the tokens of texts, without the special tokens that a tokenizer adds to a text on its own."""
    if not texts:
        return []
    return [tuple(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def bos_warnings(
    prompts: Sequence[Prompt],
    contents: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    *,
    is_rendered: bool,
) -> Iterator[str]:
    """Yields a warning if prompts contain BOS twice, and one if texts lack the BOS that the tokenizer would add.

    Args:
        prompts: Tokenized prompts.
        contents: What the chat template rendered, a text or messages; for texts without a template
            the text.
        tokenizer: Their tokenizer.
        source: Name of the prompts in messages.
        is_rendered: Whether the chat template rendered the prompts.
    """
    bos_id, bos = tokenizer.bos_token_id, str(tokenizer.bos_token)
    if bos_id is not None:
        doubled = []
        for prompt, content in zip(prompts, contents, strict=True):
            begins_with_two = prompt.token_ids[:2] == (bos_id, bos_id)
            # templates of several turns may render BOS once per turn, so only one from the file
            # counts as doubled
            is_in_content = (
                is_rendered and _contains(content, bos) and prompt.token_ids.count(bos_id) > 1
            )
            if begins_with_two or is_in_content:
                doubled.append(prompt.index)
        if doubled:
            origin = (
                "the chat template renders it, and so does the file"
                if is_rendered
                else "the file has it twice"
            )
            yield (
                f"{len(doubled)} of {len(prompts)} prompts of {source} contain the start token"
                f" {bos!r} twice, the first is prompt {doubled[0]}: {origin}; remove one of the"
                " two."
            )
    prefix = () if is_rendered else added_prefix(tokenizer)
    missing = [prompt for prompt in prompts if prompt.token_ids[: len(prefix)] != prefix]
    if missing:
        shown = tokenizer.decode(list(prefix))
        yield (
            f"{len(missing)} of {len(prompts)} prompts of {source} do not begin with {shown!r},"
            " which the tokenizer adds to texts by default. As in slime, prompts are tokenized"
            f" without it; if the model was trained with it, write {shown} at the start of each"
            " prompt."
        )


def added_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that the tokenizer puts before a text by default."""
    ids = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = [index for index in range(len(ids)) if ids[index : index + len(bare)] == bare]
    return tuple(ids[: starts[0]]) if starts else ()


def _contains(content: Any, text: str) -> bool:
    messages = content if isinstance(content, list) else [{"content": content}]
    return any(
        isinstance(message, Mapping) and text in str(message.get("content", ""))
        for message in messages
    )


def _slice_of(rows: Iterable[Row], wanted: slice) -> list[Row]:
    """Returns rows by Python's slices; later rows are not read if the numbers are not negative."""
    if (wanted.start or 0) < 0 or (wanted.stop or 0) < 0:
        return list(rows)[wanted]
    return list(islice(rows, wanted.start, wanted.stop))


def check_fits(prompt: Prompt, place: str, sizes: ModelSizes) -> None:
    """Raises ValueError if a prompt fills the context or has tokens outside the vocabulary."""
    length = len(prompt.token_ids)
    if sizes.context_len is not None and length >= sizes.context_len:
        raise ValueError(_does_not_fit(place, f"{length} tokens", sizes.context_len))
    low, high = min(prompt.token_ids, default=0), max(prompt.token_ids, default=0)
    last_id = (sizes.vocab_size or math.inf) - 1
    if low < 0 or high > last_id:
        raise ValueError(
            f"{place} has a prompt with token {low if low < 0 else high}, but the model's"
            f" vocabulary ends at {last_id}; the tokenizer of --hf-checkpoint is of another model."
        )


def _does_not_fit(place: str, length: str, context_len: int | None) -> str:
    return (
        f"{place} has a prompt of {length}, which leaves no tokens for a response in a context of"
        f" {context_len}; set --rollout-max-prompt-len to skip such prompts."
    )


def _value(row: dict[str, Any], key: str, place: str) -> Any:
    if key not in row:
        keys = ", ".join(map(quoted, list(row)[:MAX_LISTED_KEYS])) or "none"
        raise ValueError(
            f"{place} has no key {key!r}; its keys are"
            f" {keys}{', …' * (len(row) > MAX_LISTED_KEYS)}."
        )
    return row[key]


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{place} has a prompt of type {type(value).__name__} where a string is needed; a list"
            " of messages needs --apply-chat-template."
        )
    if not value:
        raise ValueError(f"{place} has an empty prompt.")
    return _encodable(value, f"{place} has a prompt")


def _rendered(
    value: Any,
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[Any] | None,
    options: Mapping[str, Any] | None,
) -> str:
    """Returns a prompt in the chat template; a text becomes a message of the user."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **(options or {})
        )
    except Exception as error:  # templates may raise any exception
        raise ValueError(f"{place} does not fit the chat template: {first_line(error)}.") from error
    return _encodable(text, f"{place} has a prompt")


def rendered(
    prompt: object,
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text of a prompt; the chat template renders messages."""
    if not isinstance(prompt, list):
        return _text(prompt, place)
    if not tokenizer.chat_template:
        raise ValueError(
            f"{place} has a prompt of messages, but the tokenizer has no chat template; give a"
            " text."
        )
    return _rendered(prompt, place, tokenizer, tools, options)


def _tools(
    row: Mapping[str, Any], place: str, key: str | None, *, is_needed: bool
) -> list[Any] | None:
    """Returns the tools of a row, None without any; a malformed column is refused if the chat template needs it."""
    if key is None:
        return None
    value = row.get(key)
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # refused below
            value = json.loads(value)
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(tool, dict) for tool in value):
        return value
    if not is_needed:
        return None  # the column stays in the metadata as it is
    raise ValueError(
        f"{place} has {key!r} that is not a list of tools, {quoted(row[key])}; give a list of"
        " objects or its JSON text, or name another column with --tool-key."
    )


def _encodable(text: str, what: str) -> str:
    """Returns the text; raises ValueError for half of a surrogate pair, which JSON may contain."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(
            f"{what} with half of a surrogate pair, {half}, at character {error.start + 1}."
        ) from None
    return text


def _label(place: str, row: dict[str, Any], label_key: str | None) -> Any:
    """Returns a label of any JSON type; a decimal of parquet becomes text."""
    if label_key is None:
        return None
    value = _value(row, label_key, place)
    if isinstance(value, Decimal):
        return str(value)
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # bytes and dates of parquet
        raise ValueError(
            f"{place} has a label of type {type(value).__name__}, which JSON does not have; write"
            " it as a string."
        ) from None
    _encodable(text, f"{place} has a label")
    return value


def _metadata(
    place: str, row: dict[str, Any], used_keys: Sequence[str | None], metadata_key: str
) -> dict[str, Any]:
    """The row's other columns, and its mapping; a string is read as JSON, for formats without mappings."""
    mapping = row.get(metadata_key)
    if isinstance(mapping, str):
        try:
            mapping = json.loads(mapping)
        except (ValueError, RecursionError):
            mapping = metadata_key  # which is not a mapping
    if mapping is not None and not isinstance(mapping, dict):
        raise ValueError(f"{place} has {metadata_key!r} that is not a mapping.")
    others = {key: value for key, value in row.items() if key not in (*used_keys, metadata_key)}
    return json_object(others, place) | json_object(mapping or {}, f"{place}, {metadata_key!r}")


def rows_of(path: Path) -> Iterator[Row]:
    """Yields the rows of a file without blank lines; raises ValueError with the line of an invalid row."""
    return _parquet_rows(path) if path.suffix == ".parquet" else json_lines(path)


def _parquet_rows(path: Path) -> Iterator[Row]:
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
