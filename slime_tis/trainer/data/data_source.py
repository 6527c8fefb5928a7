"""Prompts from a user class (--data-source-path), in slime's contract, called on rank 0."""

from __future__ import annotations

import abc
import dataclasses
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.collectives import on_rank_zero
from slime_tis.trainer.data.json_values import json_object
from slime_tis.trainer.data.prompts import check_fits, rendered
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.data.written import reading
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.user_functions import calling, check_signature, describe, load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")
METHODS = {
    "get_samples": ("num_samples",),
    "add_samples": ("samples",),
    "save": ("rollout_id",),
    "load": ("rollout_id",),
    "__len__": (),
}
"""Methods of a data source, and what each is called with."""
TAKEN, PENDING, SAVED = "taken", "pending", "saved"
"""Keys of a state: prompts handed out before, those handed out since, and the rollout that the source saved."""


class DataSource(abc.ABC):
    """What a user's class may derive from, and has the methods of; it is made with the program's options."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Returns `num_samples` groups of --n-samples-per-prompt samples with a prompt and without a response."""

    @abc.abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Takes groups back; called by the user's other functions alone."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Saves its position with the checkpoint after this rollout."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restores the position after this rollout."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Prompts of an epoch, which --num-epoch counts."""


class CustomDataSource:
    """The prompts of a user's class, the same on every rank.

    A state is the number of prompts handed out before it. Prompts handed out later go into a
    checkpoint, and come first when it is taken up: nothing is lost where the source itself is already further.
    """

    prompts: tuple[Prompt, ...] = ()
    """Known beforehand: none."""

    def __init__(
        self,
        path: str,
        args: Namespace,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        sizes: ModelSizes | None = None,
    ) -> None:
        """Makes the source; a collective.

        Args:
            path: of the class, `package.module.Class` or `path/file.py:Class`.
            args: given to it.
            tokenizer: of the policy.
            config: samples per prompt, and how prompts are rendered.
            sizes: of the model.

        Raises:
            CustomFunctionError: it cannot be loaded or made, or lacks a method.
        """
        self._config, self._tokenizer, self._sizes = config, tokenizer, sizes
        self._class = load_data_source(path)
        self.source: Any = None
        """The user's object, on rank 0."""
        self._taken, self._handed_out, self._again = 0, list[Prompt](), list[Prompt]()

        def make() -> None:
            with calling(self._class):
                self.source = self._class(args)

        on_rank_zero(make)

    def __len__(self) -> int:
        def length() -> int:
            found = self._call("__len__")
            if isinstance(found, bool) or not isinstance(found, int) or found < 1:
                raise CustomFunctionError(f"{self._name('__len__')} returned {_shown(found)}; return a number above 0.")
            return found

        return on_rank_zero(length)

    def next_batch(self, size: int) -> list[Prompt]:
        """The next `size` prompts; a collective.

        Raises:
            CustomFunctionError: the source returned another number of groups, or no new samples.
        """
        batch, self._again = self._again[:size], self._again[size:]
        missing = size - len(batch)
        if missing:
            first = self._taken + len(batch)
            batch += on_rank_zero(lambda: self._read(self._call("get_samples", missing), missing, first))
        self._taken += len(batch)
        self._handed_out += batch
        return batch

    def state_dict(self) -> dict[str, Any]:
        """How many prompts were handed out."""
        return {TAKEN: self._taken}

    def forget_before(self, state: Mapping[str, Any]) -> None:
        """Lets go of the prompts before a state, from which on a resumed run will want them."""
        self._handed_out = self._since(state)

    def checkpoint(self, state: Mapping[str, Any], rollout_id: int) -> dict[str, Any]:
        """Saves the source; a state from which `load_state_dict` continues. A collective.

        Args:
            state: of the position that is saved.
            rollout_id: the last rollout that was trained on.
        """
        on_rank_zero(lambda: self._call("save", rollout_id))
        pending = [dataclasses.asdict(prompt) for prompt in [*self._since(state), *self._again]]
        return {**state, PENDING: pending, SAVED: rollout_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a checkpoint; a collective.

        Raises:
            ValueError: the checkpoint is of a run whose prompts came from a file.
        """
        if PENDING not in state:
            raise ValueError(
                "the checkpoint is of a run without --data-source-path, so that it cannot continue where it stopped; "
                "remove --data-source-path, or start afresh with another --save."
            )
        self._taken = int(state[TAKEN])
        self._again = [Prompt(**{**row, "token_ids": tuple(row["token_ids"])}) for row in state[PENDING]]
        on_rank_zero(lambda: self._call("load", state[SAVED]))

    def _since(self, state: Mapping[str, Any]) -> list[Prompt]:
        count = self._taken - int(state[TAKEN])
        return self._handed_out[len(self._handed_out) - count :]

    def _call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self.source, method)
        with calling(function):
            return function(*arguments)

    def _name(self, method: str) -> str:
        return describe(getattr(self.source, method))

    def _read(self, groups: Any, size: int, first: int) -> list[Prompt]:
        """The prompts of the groups that a source gave."""
        name = self._name("get_samples")
        if not isinstance(groups, list | tuple) or len(groups) != size:
            shown = f"{len(groups)} groups" if isinstance(groups, list | tuple) else _shown(groups)
            raise CustomFunctionError(f"{name} returned {shown} for num_samples={size}; return as many groups.")
        prompts = []
        for place, group in enumerate(groups):
            with reading(self.source.get_samples, f"group {place} samples"):
                prompts.append(self._prompt(group, first + place, f"{name} returned group {place}"))
        return prompts

    def _prompt(self, group: Any, index: int, place: str) -> Prompt:
        count = self._config.n_samples_per_prompt
        if not isinstance(group, list | tuple) or len(group) != count:
            shown = f"{len(group)} samples" if isinstance(group, list | tuple) else _shown(group)
            raise CustomFunctionError(f"{place} with {shown}; a group is {count} samples (--n-samples-per-prompt).")
        if not all(isinstance(sample, Sample) for sample in group):
            raise CustomFunctionError(f"{place} with {_shown(group[0])}; use Sample of slime.utils.types.")
        sample: Sample = group[0]
        if any(one.prompt != sample.prompt for one in group):
            raise CustomFunctionError(f"{place} whose samples have different prompts; a group answers one.")
        if any(one.response_length for one in group):
            raise CustomFunctionError(f"{place} with a sample that has a response; a data source gives prompts.")
        try:
            text, special = rendered(sample.prompt, place, self._tokenizer)
            ids = sample.tokens or self._tokenizer(text, add_special_tokens=special)["input_ids"]
            prompt = Prompt(
                index=index,
                text=text,
                token_ids=tuple(int(token) for token in ids),
                label=sample.label,
                metadata=json_object(sample.metadata or {}, "its metadata"),
            )
            longest = self._config.rollout_max_prompt_len
            if longest is not None and len(prompt.token_ids) > longest:
                raise ValueError(f"{place} of {len(prompt.token_ids)} tokens; --rollout-max-prompt-len is {longest}.")
            if self._sizes is not None:
                check_fits(prompt, place, self._sizes)
        except ValueError as error:
            raise CustomFunctionError(str(error)) from None
        return prompt


def load_data_source(path: str) -> Callable[..., Any]:
    """The class of a data source.

    Raises:
        CustomFunctionError: it cannot be loaded, cannot be made with `args`, or lacks a method.
    """
    found = load_function(path)
    check_signature(found, ("args",), ())
    for method, arguments in METHODS.items():
        function = getattr(found, method, None)
        if not callable(function):
            raise CustomFunctionError(
                f"{one_line(path)} has no method {method}; a data source has {', '.join(METHODS)}."
            )
        check_signature(function, ("self", *arguments), ())
    return found


def _shown(value: Any) -> str:
    return one_line(repr(value))
