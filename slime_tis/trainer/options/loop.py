"""Options of the training loop."""

import dataclasses
import string
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from slime_tis.errors import quoted
from slime_tis.limits import Limits, check_fields, option

loop_option = partial(option, group="training loop")

debug_option = partial(option, group="debugging")


MOST_SAMPLES = 1_048_576
"""Largest number of samples in a rollout: 4,096 prompts with 256 samples each."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long the loop runs, how a rollout is cut into optimizer steps, and what is dumped or replayed."""

    num_rollout: Annotated[int | None, Limits(ge=1, le=10_000_000)] = loop_option(None)
    """Rollouts of the run; unset: num_epoch passes over the prompts."""
    num_epoch: Annotated[int | None, Limits(ge=1, le=1_000_000)] = loop_option(None)
    """Passes over the training prompts; replaces num_rollout."""
    global_batch_size: Annotated[int | None, Limits(ge=1, le=MOST_SAMPLES)] = loop_option(None)
    """Samples of one optimizer step over all ranks; unset: from num_steps_per_rollout."""
    num_steps_per_rollout: Annotated[int | None, Limits(ge=1, le=MOST_SAMPLES)] = loop_option(None)
    """Optimizer steps per rollout; unset: from global_batch_size, or 1."""
    debug_rollout_only: bool = debug_option(False)
    """Sample and score without training."""
    save_debug_rollout_data: str | None = debug_option(None, metavar="FILE")
    """File for samples; {rollout_id} becomes a number."""
    save_debug_train_data: str | None = debug_option(None, metavar="FILE")
    """File for the trained tokens, parquet or slime's .pt; {rollout_id} and {rank} become numbers."""
    dump_details: str | None = debug_option(None, metavar="DIR")
    """Directory for both kinds of files, if their flags are unset."""
    load_debug_rollout_data: str | None = debug_option(None, metavar="FILE")
    """File of samples to train on without sampling; {rollout_id} becomes a number."""

    def __post_init__(self) -> None:
        check_fields(self)
        saved, trained = self.save_debug_rollout_data, self.save_debug_train_data
        if self.num_rollout is None and self.num_epoch is None:
            raise ValueError("--num-rollout is unset and so is --num-epoch; add one of them to bound the run.")
        if self.num_rollout is not None and self.num_epoch is not None:
            raise ValueError("--num-rollout and --num-epoch are both given; remove one of the two.")
        for name, pattern, fields in (
            ("--save-debug-rollout-data", saved, ("rollout_id",)),
            ("--save-debug-train-data", trained, ("rollout_id", "rank")),
        ):
            _check_pattern(name, pattern, fields)
            first, second = ((pattern or "").format(rollout_id=number, rank=0) for number in (0, 1))
            if pattern is not None and self.num_rollout != 1 and first == second:
                raise ValueError(f"{name} is {quoted(pattern)}, one file for all rollouts; put {{rollout_id}} into it.")
        if trained is not None and trained == saved:
            raise ValueError(f"--save-debug-train-data and --save-debug-rollout-data are both {quoted(trained)}.")
        loaded = self.load_debug_rollout_data
        _check_pattern("--load-debug-rollout-data", loaded, ("rollout_id",))
        for name, pattern in (("--load-debug-rollout-data", loaded), ("--save-debug-train-data", trained)):
            if self.debug_rollout_only and pattern is not None:
                raise ValueError(f"{name} has no effect with --debug-rollout-only, which does not train; remove one.")

    def with_dump_patterns(self) -> "LoopConfig":
        """Returns the options with the files of dump_details."""
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
            raise ValueError("--dump-details has no effect: the files of all dumps are given; remove it.")
        return dataclasses.replace(self, **given)


def _check_pattern(flag: str, pattern: str | None, names: tuple[str, ...]) -> None:
    """Refuses a file name with fields other than {NAME}."""
    try:
        fields = [field[1:] for field in string.Formatter().parse(pattern or "") if field[1] is not None]
    except ValueError:
        fields = [("unbalanced braces", "", None)]
    if any(field not in [(name, "", None) for name in names] for field in fields):
        allowed = " and ".join(f"{{{name}}}" for name in names)
        raise ValueError(f"{flag} is {quoted(pattern)} but may have no field besides {allowed}; double other braces.")
