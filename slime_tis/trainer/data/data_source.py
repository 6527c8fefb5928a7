"""Prompts from a user class (--data-source-path), in slime's contract, called on rank 0."""

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from slime_tis.errors import CustomFunctionError, quoted
from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.prompts import bos_warnings, check_fits, rendered, token_ids_of
from slime_tis.trainer.data.sample import Prompt, Sample
from slime_tis.trainer.data.user_values import json_object, typed_value
from slime_tis.trainer.rank_collectives import on_rank_zero
from slime_tis.user_functions import call, calling, describe, load_user_function

logger = logging.getLogger(__name__)

OPTION = "data_source_path"
TAKEN = "taken"
"""Key of a state: number of prompts before it."""
PENDING = "pending"
"""Key of a state: prompts after it that the source has handed out."""
SAVED = "saved"
"""Key of a state: the rollout after which the source saved."""


class DataSource:
    """Base class of users' data sources, whose methods are in `USER_FUNCTIONS`."""


class CustomDataSource:
    """The prompts of a user's class, identical on every rank.

    The user's object may be ahead of training. Therefore a checkpoint stores prompts that were
    handed out after its state; a resumed run begins with them.
    """

    prompts: tuple[Prompt, ...] = ()
    """Empty: prompts are not known in advance."""

    def __init__(
        self,
        path: str,
        args: Namespace,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        sizes: ModelSizes,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._sizes = sizes
        self._class = load_user_function(OPTION, path)
        # None on all ranks but 0, which calls the user's object for all.
        self.source: Any = None
        self._taken = 0
        # prompts since the last state, and prompts of a checkpoint that a resumed run repeats
        self._handed_out: list[Prompt] = []
        self._again: list[Prompt] = []

        def make() -> None:
            self.source = call(self._class, args)

        on_rank_zero(make)

    def __len__(self) -> int:
        def length() -> int:
            with calling(self.source.__len__):
                if len(self.source) > 0:
                    return len(self.source)
            raise CustomFunctionError(
                f"{describe(self.source.__len__)} returned 0; return the number of prompts."
            )

        return on_rank_zero(length)

    def next_batch(self, size: int) -> list[Prompt]:
        """Returns the next `size` prompts; a collective."""
        batch = self._again[:size]
        self._again = self._again[size:]
        missing = size - len(batch)
        if missing:
            first = self._taken + len(batch)
            batch += on_rank_zero(lambda: self._get(missing, first))
        self._taken += len(batch)
        self._handed_out += batch
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of prompts so far."""
        return {TAKEN: self._taken}

    def forget_before(self, state: Mapping[str, Any]) -> None:
        """Drops prompts that checkpoints from this state on do not need."""
        self._handed_out = self._since(state)

    def checkpoint(self, state: Mapping[str, Any], rollout_id: int) -> dict[str, Any]:
        """Saves the source after a rollout was trained; a collective.

        Args:
            state: A `state_dict` from before the rollouts that were not trained yet.
            rollout_id: The last trained rollout.

        Returns:
            A state for `load_state_dict`.
        """
        on_rank_zero(lambda: call(self.source.save, rollout_id))
        prompts = [*self._since(state), *self._again]
        pending = [dataclasses.asdict(prompt) for prompt in prompts]
        return {**state, PENDING: pending, SAVED: rollout_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint; a collective.

        Raises:
            ValueError: The checkpoint's run read its prompts from a file.
        """
        if PENDING not in state:
            raise ValueError(
                "the checkpoint is of a run without --data-source-path; remove --data-source-path,"
                " or start a new run with another --save."
            )
        self._taken = int(state[TAKEN])
        self._again = []
        for row in state[PENDING]:
            token_ids = tuple(row["token_ids"])  # JSON has made it a list
            self._again.append(Prompt(**{**row, "token_ids": token_ids}))
        on_rank_zero(lambda: call(self.source.load, state[SAVED]))

    def _since(self, state: Mapping[str, Any]) -> list[Prompt]:
        count = self._taken - int(state[TAKEN])
        # Not [-count:], which is the complete list if count is 0.
        return self._handed_out[len(self._handed_out) - count :]

    def _get(self, size: int, first: int) -> list[Prompt]:
        function = self.source.get_samples
        with calling(function):
            groups = typed_value(OPTION, function, function(size))
            if len(groups) != size:
                raise CustomFunctionError(
                    f"{describe(function)} returned {len(groups)} groups for num_samples={size};"
                    f" return {size}."
                )
            prompts = []
            for index, group in enumerate(groups):
                place = f"{describe(function)} returned group {index}"
                prompts.append(self._prompt(group, first + index, place))
            if first == 0:  # once is enough: a source makes all prompts in the same way
                self._warn_about_bos(groups, prompts)
            return prompts

    def _warn_about_bos(self, groups: list[list[Any]], prompts: list[Prompt]) -> None:
        contents = [group[0].prompt for group in groups]
        # A source may mix texts with messages, and only messages go through the chat template.
        for is_rendered in (False, True):
            chosen_prompts = []
            chosen_contents = []
            for prompt, content in zip(prompts, contents, strict=True):
                if isinstance(content, list) == is_rendered:
                    chosen_prompts.append(prompt)
                    chosen_contents.append(content)
            warnings = bos_warnings(
                chosen_prompts,
                chosen_contents,
                self._tokenizer,
                describe(self._class),
                is_rendered=is_rendered,
            )
            for warning in warnings:
                logger.warning("%s", warning)

    def _prompt(self, group: list[Any], index: int, place: str) -> Prompt:
        count = self._config.n_samples_per_prompt
        if not _is_group(group, count):
            raise CustomFunctionError(
                f"{place}, {quoted(group)}; a group has {count} samples (--n-samples-per-prompt) of"
                " slime.utils.types, with one prompt and without responses."
            )
        sample = group[0]
        try:
            tools = (sample.metadata or {}).get("tools")  # where slime's data sources put them
            text = rendered(
                sample.prompt, place, self._tokenizer, tools, self._config.chat_template_options
            )
            ids = sample.tokens or token_ids_of([text], self._tokenizer)[0]
            prompt = Prompt(
                index=index,
                text=text,
                token_ids=tuple(int(token) for token in ids),
                label=sample.label,
                metadata=json_object(sample.metadata or {}, "its metadata"),
            )
            longest = self._config.rollout_max_prompt_len
            if longest is not None and len(prompt.token_ids) > longest:
                raise ValueError(
                    f"{place} of {len(prompt.token_ids)} tokens; --rollout-max-prompt-len is"
                    f" {longest}."
                )
            check_fits(prompt, place, self._sizes)
        except ValueError as error:
            raise CustomFunctionError(str(error)) from None
        return prompt


def _is_group(group: list[Any], count: int) -> bool:
    """Returns whether a list has `count` samples with one prompt and without responses."""
    if len(group) != count:
        return False
    for sample in group:
        if not isinstance(sample, Sample) or sample.response_length:
            return False
    return all(sample.prompt == group[0].prompt for sample in group)
