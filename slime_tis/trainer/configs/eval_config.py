"""The file of --eval-config: held-out prompt sets, each with separate keys and sampling.

    eval:
      defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: deepscaler}
        - {name: gpqa, path: gpqa.jsonl, rm_type: gpqa, n_samples_per_eval_prompt: 1}

A value of a set replaces a default of the file, which replaces an option of the run.

Source: slime, utils/eval_config.py and utils/arguments.py, _resolve_eval_datasets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from slime_tis.errors import quoted
from slime_tis.options.fields import Limits, check_fields, option
from slime_tis.options.values import Option, Source, declare_options, nearest, read_given

set_option = partial(option, None, group="evaluation")

FLAG = "--eval-config"
KEYS = ("defaults", "datasets")
"""Keys of the file, or of its block `eval`."""
UNSUPPORTED = {
    "custom_rm_path": "one reward function scores all sets; let it read args and metadata",
    "custom_generate_function_path": "one generate function serves all sets",
    "multimodal_keys": "prompts are text",
    "min_new_tokens": "a minimum length would be another policy",
    "repetition_penalty": "a penalty would be another policy",
}
"""Keys of slime that no set can have, and the reason."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A held-out prompt set; None takes the option of the run."""

    name: str = option(group="evaluation")
    """Name in the metrics."""
    path: str = option(group="evaluation")
    """JSONL or parquet file, also with a slice of rows."""
    input_key: str | None = set_option()
    """Key of the prompt in a row."""
    label_key: str | None = set_option()
    """Key of the label."""
    metadata_key: str | None = set_option()
    """Key of the metadata."""
    tool_key: str | None = set_option()
    """Key of the tools."""
    rm_type: str | None = set_option()
    """Built-in reward of the set's answers."""
    n_samples_per_eval_prompt: Annotated[int | None, Limits(ge=1, le=4_096)] = set_option()
    """Answers per prompt."""
    temperature: Annotated[float | None, Limits(ge=0.01, le=100, also=(0,))] = set_option()
    """Temperature; 0 is greedy."""
    top_p: Annotated[float | None, Limits(gt=0, le=1)] = set_option()
    """Nucleus probability."""
    top_k: Annotated[int | None, Limits(ge=1, le=10_000_000, also=(-1,))] = set_option()
    """Number of likeliest tokens; -1 keeps all."""
    max_response_len: Annotated[int | None, Limits(ge=1, le=10_000_000)] = set_option()
    """Longest answer, tokens."""
    stop: tuple[str, ...] | None = set_option(verbatim=True)
    """Texts that end an answer."""
    stop_token_ids: Annotated[tuple[int, ...] | None, Limits(ge=0, le=2**31 - 1)] = set_option()
    """Token ids that end an answer."""

    def __post_init__(self) -> None:
        check_fields(self)


def read_eval_config(path: str) -> tuple[EvalSet, ...]:
    """Returns the held-out sets of a file.

    Raises:
        ValueError: The file cannot be read, has no sets, or a key or value is wrong.
    """
    where = f"{FLAG} {quoted(path)}"
    # PyYAML is not in a base install, whose `train --help` imports this module.
    from slime_tis.options.yaml_file import read_document

    document = read_document(Path(path), FLAG)
    if "eval" in document:
        # Beside the block, `defaults` would have no effect.
        _check_keys(document, ("eval",), where)
        document = document["eval"]
    if not isinstance(document, dict):
        raise ValueError(f"{where}: eval is no mapping; write defaults: and datasets: below it.")
    _check_keys(document, KEYS, where)
    defaults = document.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise ValueError(f"{where}: defaults is no mapping; write one `key: value` per line.")
    options = declare_options([EvalSet])
    sets = []
    for entry in _entries(document.get("datasets"), where):
        name = quoted(entry.get("name", "unnamed"))
        sets.append(_read_set({**defaults, **entry}, options, f"{where}, dataset {name}"))
    names = [held_out.name for held_out in sets]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{where} names {names}; give one set or more, each name once.")
    return tuple(sets)


def _check_keys(mapping: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Refuses a key that nothing reads."""
    for key in mapping:
        if key not in keys:
            raise ValueError(f"{where}: {quoted(key)} is no key here; {nearest(key, keys)}")


def _entries(datasets: Any, where: str) -> list[dict[str, Any]]:
    """Returns the entries of `datasets`, a list or a mapping by name."""
    if isinstance(datasets, dict):
        by_name = []
        for name, entry in datasets.items():
            if not isinstance(entry, dict):
                raise ValueError(f"{where}, dataset {quoted(name)} is no mapping; write its path.")
            by_name.append({"name": name, **entry})
        datasets = by_name
    if not isinstance(datasets, list):
        raise ValueError(f"{where} has no datasets; list them with name and path.")
    for entry in datasets:
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: {quoted(entry)} is no dataset; write its name and path.")
    return datasets


def _read_set(values: Mapping[str, Any], options: Mapping[str, Option], where: str) -> EvalSet:
    """Returns a set from texts by key; `where` begins messages."""
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key in UNSUPPORTED:
            raise ValueError(f"{where}: {key} is not supported: {UNSUPPORTED[key]}.")
        if key not in options:
            raise ValueError(f"{where}: {quoted(key)} is no key; {nearest(key, options)}")
        given[key] = read_given(f"{where}: {key}", options[key], value, Source.YAML).value
    for key in ("name", "path"):
        if key not in given:
            raise ValueError(f"{where}: {key} is missing; add it.")
    try:
        return EvalSet(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
