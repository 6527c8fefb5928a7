"""The trainer's state in a checkpoint, and the options that a resumed run must keep."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tis.errors import quoted
from slime_tis.limits import flag
from slime_tis.trainer.storage.checkpoints import TRAINER_STATE

FIXED_OPTIONS = {
    "seed": "the random state is the checkpoint's",
    "bf16": "the optimizer's state has another form",
    "fp16": "the optimizer's state has another form",
    "use_distributed_optimizer": "the optimizer's state has another form",
    "expert_model_parallel_size": "the optimizer's state of the experts has another form",
    "rollout_shuffle": "prompts of the current epoch would be repeated or skipped",
}
"""Options that a resumed run must keep, and the reason."""

UNREPORTED_OPTIONS = {
    *("load", "save", "save_hf", "save_interval", "output_dir", "progress", "num_threads"),
    "custom_config_path",
}
"""Options whose change is not reported."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Content of `trainer_state.json`; `run` is the identity of the run, also in its dumps and run directories."""

    run: str
    step: int
    rollout_id: int
    """Optimizer steps made, and rollouts trained on."""
    dataset: dict[str, Any]
    """Position in the data."""
    unfinished: list[list[dict[str, Any]]]
    """Groups of samples of a partial rollout."""
    evaluation_due: bool
    """Whether a signal ended an evaluation; the resumed run repeats it."""
    sampler_weight_version: int
    """Optimizer steps of the rollout engine's weights."""
    first_accuracy: float | None
    """Held-out accuracy before training."""
    token_budget: int | None
    """Tokens of a micro-batch if free memory decided it; bitwise resumption needs the same number."""
    options: dict[str, Any]
    """The effective configuration."""
    model: str
    """SHA-256 of the model's config.json."""


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Reads `trainer_state.json` of a checkpoint; raises ValueError if it is damaged or lacks a field."""
    from pydantic import TypeAdapter, ValidationError  # the command line uses this module where pydantic is missing

    path = checkpoint / TRAINER_STATE
    try:
        return TypeAdapter(TrainerState).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"])) or "content"
        raise ValueError(f"{path}: {field}: {problem['msg']}; did another version save it?") from None


def check_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError with both values if an option has changed that a resumed run must keep."""
    fixed = dict(FIXED_OPTIONS)
    if saved.get("rollout_shuffle"):
        fixed["rollout_seed"] = FIXED_OPTIONS["rollout_shuffle"]
    if saved.get("partial_rollout"):
        fixed["n_samples_per_prompt"] = "unfinished groups have this number of samples"
    for name in changed(saved, now, fixed):
        raise ValueError(
            f"{flag(name)} is {quoted(now[name])} but the run that --load resumes has {quoted(saved[name])}, "
            f"and {fixed[name]}; set it back to {quoted(saved[name])} or start afresh with another --save."
        )


def changed_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the changed options in one line, `--lr 0.0001 → 5e-05, …`, or an empty string."""
    names = changed(saved, now, [name for name in now if name not in UNREPORTED_OPTIONS])
    return ", ".join(f"{flag(name)} {quoted(saved[name])} → {quoted(now[name])}" for name in names)


def changed(saved: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns the names of options whose values differ from the checkpoint's."""
    return [name for name in names if name in saved and saved[name] != now[name]]
