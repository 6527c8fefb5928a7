"""What a resumed run takes from its checkpoint besides the engine's state, and which options may differ from then."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from slime_tis.limits import flag
from slime_tis.trainer.storage.checkpoints import TRAINER_STATE, Damaged, read_state

FIXED = {
    "seed": "the random state is the checkpoint's",
    "bf16": "the optimizer's state has another form",
    "use_distributed_optimizer": "the optimizer's state has another form",
    "expert_model_parallel_size": "the optimizer's state of the experts has another form",
    "rollout_shuffle": "prompts of the present epoch would come twice or never",
}
"""Options that a resumed run has to keep, and why."""

NOT_SAID = {
    *("load", "save", "save_hf", "save_interval", "output_dir", "summary_plot", "progress", "num_threads"),
    "custom_config_path",
}
"""Options whose change needs no mention."""

SHOWN = 80
"""Longest value in a message, in characters."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What `trainer_state.json` of a checkpoint holds."""

    run: str
    """Identity of the run, the same in all its checkpoints and run directories."""

    step: int
    """Optimizer steps made."""

    rollout_id: int
    """Rollouts trained on."""

    dataset: dict[str, Any]
    """Where the data goes on."""

    unfinished: list[list[dict[str, Any]]]
    """Groups of samples of a partial rollout."""

    evaluation_due: bool
    """Whether a signal ended an evaluation, which a resumed run makes."""

    sampler_weight_version: int
    """Optimizer steps behind the weights that the rollout engine has."""

    first_accuracy: float | None
    """Held-out accuracy before training."""

    token_budget: int | None
    """Tokens of a micro-batch, where free memory decided: the same ones make the same sums in the same order."""

    options: dict[str, Any]
    """The configuration in force."""

    model: str
    """SHA-256 of the model's config.json."""


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Reads `trainer_state.json` of a checkpoint.

    Raises:
        ValueError: it is damaged or lacks something; the message names the file.
    """
    try:
        found = read_state(checkpoint)
    except Damaged as error:
        raise ValueError(f"{checkpoint}: {error}.") from None
    hints = get_type_hints(TrainerState)
    values = {}
    for field in dataclasses.fields(TrainerState):
        if field.name not in found:
            raise ValueError(
                f"{checkpoint / TRAINER_STATE} has no {field.name!r}; was another version's run saved there?"
            )
        value = found[field.name]
        if not _is_of(value, hints[field.name]):
            raise ValueError(
                f"{checkpoint / TRAINER_STATE} has {field.name!r}: {shown(value)}, which is not a valid value."
            )
        values[field.name] = value
    return TrainerState(**values)


def check_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares the options that a resumed run has to keep.

    Raises:
        ValueError: one has changed; the message names its old and new value.
    """
    fixed = dict(FIXED)
    if saved.get("rollout_shuffle"):
        fixed["rollout_seed"] = FIXED["rollout_shuffle"]
    if saved.get("partial_rollout"):
        fixed["n_samples_per_prompt"] = "groups that are not finished have that many samples"
    for name in changed(saved, now, fixed):
        raise ValueError(
            f"{flag(name)} is {shown(now[name])} but the run that --load resumes has {shown(saved[name])}, "
            f"and {fixed[name]}; set it back to {shown(saved[name])} or start afresh with another --save."
        )


def changed_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The options that differ from a checkpoint's, as one line: `--lr 0.0001 → 5e-05, …`; empty where none does."""
    names = changed(saved, now, [name for name in now if name not in NOT_SAID])
    return ", ".join(f"{flag(name)} {shown(saved[name])} → {shown(now[name])}" for name in names)


def changed(saved: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of the options that a checkpoint knows and that have another value now."""
    return [name for name in names if name in saved and saved[name] != now[name]]


def shown(value: Any) -> str:
    """A value as messages quote it: escaped, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of an annotated type, one level deep; True is not a number."""
    if get_origin(hint) in (dict, list):
        return isinstance(value, get_origin(hint))
    kinds = get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in kinds
    return any(isinstance(value, (int, float) if kind is float else kind) for kind in kinds)
