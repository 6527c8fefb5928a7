"""Options of the training loop and of user code."""

import dataclasses
import string
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from slime_tis.errors import quoted
from slime_tis.limits import Limits, check_fields, flag, option

loop_option = partial(option, group="training loop")

correction_option = partial(option, group="rollout correction")

debug_option = partial(option, group="debugging")


MOST_SAMPLES = 1_048_576
"""Largest number of samples in a rollout: 4,096 prompts with 256 samples each."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long the loop runs, how a rollout is cut into optimizer steps, and what is dumped or replayed."""

    num_rollout: Annotated[int | None, Limits(ge=1, le=10_000_000)] = loop_option(None)
    """Rollouts of the whole run; unset means num_epoch passes over the prompts."""

    num_epoch: Annotated[int | None, Limits(ge=1, le=1_000_000)] = loop_option(None)
    """Passes over the training prompts; replaces num_rollout."""

    global_batch_size: Annotated[int | None, Limits(ge=1, le=MOST_SAMPLES)] = loop_option(None)
    """Samples of one optimizer step over all ranks; unset means the rollout's samples divided by
    num_steps_per_rollout."""

    num_steps_per_rollout: Annotated[int | None, Limits(ge=1, le=MOST_SAMPLES)] = loop_option(None)
    """Optimizer steps per rollout; unset means the rollout's samples divided by global_batch_size,
    or 1."""

    debug_rollout_only: bool = debug_option(False)
    """Sample and score without training."""

    save_debug_rollout_data: str | None = debug_option(None, metavar="FILE")
    """File that samples are saved to; {rollout_id} in it becomes the rollout's number, and has to be in it where
    there are several rollouts."""

    save_debug_train_data: str | None = debug_option(None, metavar="FILE")
    """File that what training made of every token is saved to: log-probs, weights, masks, advantages (docs/dumps.md).
    {rollout_id} and {rank} in it become numbers; parquet, or slime's layout where it ends in .pt."""

    dump_details: str | None = debug_option(None, metavar="DIR")
    """Directory for save_debug_rollout_data (rollout_data/{rollout_id}.jsonl) and save_debug_train_data
    (train_data/{rollout_id}_{rank}.parquet), where these are not given."""

    load_debug_rollout_data: str | None = debug_option(None, metavar="FILE")
    """File that samples are read from, not generated; {rollout_id} in it becomes the rollout's number."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_rollout is None and self.num_epoch is None:
            raise ValueError("--num-rollout is unset and so is --num-epoch; add one of them to bound the run.")
        if self.num_rollout is not None and self.num_epoch is not None:
            raise ValueError(
                f"--num-rollout is {self.num_rollout} and --num-epoch is {self.num_epoch}, but a run has one length; "
                "remove one of the two."
            )
        if self.debug_rollout_only and self.load_debug_rollout_data is not None:
            raise ValueError(
                f"--load-debug-rollout-data is {quoted(self.load_debug_rollout_data)} but --debug-rollout-only "
                "does not train; remove one of the two."
            )
        for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
            _check_pattern(flag(name), getattr(self, name), ("rollout_id",))
        _check_pattern("--save-debug-train-data", self.save_debug_train_data, ("rollout_id", "rank"))
        for name in ("save_debug_rollout_data", "save_debug_train_data"):
            pattern = getattr(self, name)
            if pattern is None or self.num_rollout == 1:
                continue
            if pattern.format(rollout_id=0, rank=0) == pattern.format(rollout_id=1, rank=0):
                raise ValueError(
                    f"{flag(name)} is {quoted(pattern)}, one file for all rollouts; put {{rollout_id}} into it, or "
                    "each would overwrite the last."
                )
        if self.save_debug_train_data is not None and self.save_debug_train_data == self.save_debug_rollout_data:
            raise ValueError(
                f"--save-debug-train-data and --save-debug-rollout-data are both {quoted(self.save_debug_train_data)}; "
                "give each a separate file."
            )
        if self.debug_rollout_only and self.save_debug_train_data is not None:
            raise ValueError(
                f"--save-debug-train-data is {quoted(self.save_debug_train_data)} but --debug-rollout-only does not "
                "train; remove one of the two."
            )

    def with_dump_patterns(self) -> "LoopConfig":
        """The same options with the files that dump_details means, where none are given.

        Raises:
            ValueError: both kinds of files are given elsewhere, so that dump_details has no effect.
        """
        if self.dump_details is None:
            return self
        directory = self.dump_details.replace("{", "{{").replace("}", "}}")
        patterns: dict[str, str] = {}
        if self.load_debug_rollout_data is None:  # samples that are loaded are not saved again
            patterns["save_debug_rollout_data"] = f"{directory}/rollout_data/{{rollout_id}}.jsonl"
        if not self.debug_rollout_only:
            patterns["save_debug_train_data"] = f"{directory}/train_data/{{rollout_id}}_{{rank}}.parquet"
        given: dict[str, Any] = {name: getattr(self, name) or pattern for name, pattern in patterns.items()}
        if not given.items() & patterns.items():
            raise ValueError(
                f"--dump-details is {quoted(self.dump_details)} but {' and '.join(map(flag, given))} say where dumps "
                "go; remove it."
            )
        return dataclasses.replace(self, **given)


def _check_pattern(flag: str, pattern: str | None, names: tuple[str, ...]) -> None:
    """Returns whether a file's name has only these fields, written as {rollout_id}."""
    try:
        fields = [field[1:] for field in string.Formatter().parse(pattern or "") if field[1] is not None]
    except ValueError:
        fields = [("unbalanced braces", "", None)]
    if any(field not in [(name, "", None) for name in names] for field in fields):
        allowed = " and ".join(f"{{{name}}}" for name in names)
        raise ValueError(
            f"{flag} is {quoted(pattern)} but may have no field besides {allowed}; write other braces twice."
        )


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """User code."""

    custom_tis_function_path: str | None = correction_option(None, metavar="FUNCTION")
    """User function for the correction, as pkg.module.function or path/file.py:function."""
