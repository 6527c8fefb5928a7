"""Training checkpoints: files, checksums, owners, trainer state, and options that resumption fixes.

`DIR/iter_0000010/` holds megatron-core's files, `trainer_state.json`, and `SHA256SUMS` of all
files, which `sha256sum -c SHA256SUMS` also checks. It is written as `DIR/.iter_0000010.unfinished/`
and renamed when complete.
"""

import errno
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from slime_tis.atomic_files import free_name
from slime_tis.errors import quoted
from slime_tis.health import HealthState
from slime_tis.options.fields import flag
from slime_tis.trainer.storage.directories import (
    SAFETENSORS_PARTIAL,
    exchange,
    make_private,
    make_public,
    remove_files,
)

TRAINER_STATE = "trainer_state.json"
"""JSON of a `TrainerState`."""
MANIFEST = "SHA256SUMS"
"""Checksums of all other files."""
ROLLOUT_WEIGHTS = "rollout_weights.safetensors"
"""Rounded weights of the local rollout engine."""
UPDATE_SAMPLES = "weight_update_samples.pt"
"""Samples of the weights that were sent last, for the metrics of a resumed run's first update."""
IN_FLIGHT = "rollouts_in_flight.jsonl"
"""Complete rollouts that wait for training."""
COMMON = "common.pt"
"""Megatron-core's file with the state that all ranks share."""
METADATA = ".metadata"
"""Megatron-core's list of tensors."""
SHARD_FILE = r"__[0-9]+_[0-9]+\.distcp"
"""Pattern of megatron-core's files with tensors."""
NAME = re.compile(r"iter_([0-9]{1,18})")
LEFT_OVER = re.compile(r"\.iter_[0-9]{1,18}\.(unfinished|removed)")
"""Names of directories that a killed run may leave."""
OWN_FILE = re.compile(
    rf"{SHARD_FILE}|(__[0-9]+)?\.metadata(\.tmp)?|common\.pt|metadata\.json|"
    rf"{SAFETENSORS_PARTIAL}|{re.escape(TRAINER_STATE)}|{MANIFEST}|"
    rf"{re.escape(ROLLOUT_WEIGHTS)}|{re.escape(UPDATE_SAMPLES)}|{re.escape(IN_FLIGHT)}"
)
"""Names of files in unfinished checkpoints, which later runs remove."""
LINE = re.compile(r"([0-9a-f]{64})  (.+)")
"""A line of sha256sum: checksum, two spaces, name."""
FIXED_OPTIONS = {
    "seed": "the random state is the checkpoint's",
    "bf16": "the optimizer's state has another form",
    "fp16": "the optimizer's state has another form",
    "use_distributed_optimizer": "the optimizer's state has another form",
    "expert_model_parallel_size": "the optimizer's state of the experts has another form",
    "freeze_params_name_list": "the optimizer's state is of other weights",
    "only_train_params_name_list": "the optimizer's state is of other weights",
    "lora_rank": "the saved adapters have another shape",
    "lora_alpha": "the saved adapters were trained with that scale",
    "lora_target_modules": "the saved adapters are of other layers",
    "lora_adapter_path": "the saved adapters began with that one",
    "ref_update_interval": "the reference policy is part of the checkpoint",
    "rollout_shuffle": "prompts of the current epoch would be repeated or skipped",
}
"""Options that a resumed run must keep, and the reason."""

UNREPORTED_OPTIONS = {
    "load",
    "save",
    "save_hf",
    "save_interval",
    "async_save",
    "output_dir",
    "progress",
    "num_threads",
    "custom_config_path",
}
"""Options whose change is not reported."""


class Damaged(ValueError):
    """A file of a checkpoint has changed or is missing; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Content of `trainer_state.json`."""

    run: str
    """Identity of the run, also in its dumps and run directories."""
    step: int
    """Optimizer steps so far."""
    rollout_id: int
    """Rollouts trained on so far."""
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
    """Tokens of a micro-batch if free memory decided it; bitwise resumption needs the same
    number."""
    options: dict[str, Any]
    """The effective configuration."""
    model: str
    """SHA-256 of the model's config.json."""
    in_flight: list[int] = field(default_factory=list)
    """Prompts of each complete rollout in flight, whose samples are in `IN_FLIGHT`. Checkpoints of
    earlier versions have none: a resumed run samples these rollouts again, with newer weights."""
    health: HealthState = field(default_factory=HealthState)
    """Counters of the health warnings; earlier versions did not save them."""


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """Returns the path of the checkpoint of an optimizer step."""
    return Path(directory) / f"iter_{step:07d}"


def step_of(checkpoint: Path) -> int:
    """Returns the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("iter_"))


def checkpoints(directory: str | Path) -> list[Path]:
    """Returns all checkpoints in a directory by step, including damaged ones."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    paths = [path for path in directory.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def unfinished_path(checkpoint: Path) -> Path:
    """Returns the path that a checkpoint has until it is complete."""
    return checkpoint.with_name(f".{checkpoint.name}.unfinished")


def begin(checkpoint: Path) -> Path:
    """Makes the directory of an unfinished checkpoint and removes the files of killed runs."""
    unfinished = unfinished_path(checkpoint)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    sweep(checkpoint.parent)
    if unfinished.exists():
        raise FileExistsError(
            errno.EEXIST, "holds files that this program did not write", str(unfinished)
        )
    # Nobody else may put a file into a checkpoint that is not checked yet.
    make_private(unfinished)
    return unfinished


def sweep(directory: Path) -> None:
    """Removes the unfinished and half-removed checkpoints of killed runs."""
    for left in directory.iterdir():
        # A link may lead anywhere, so its target is never emptied.
        if LEFT_OVER.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            discard(left)


def discard(left_over: Path) -> None:
    """Removes only the own files of an unfinished checkpoint, if it exists."""
    if left_over.is_dir():
        names = [path.name for path in left_over.iterdir() if OWN_FILE.fullmatch(path.name)]
        remove_files(left_over, names)


def finish(unfinished: Path, checkpoint: Path, run: str) -> None:
    """Renames a complete checkpoint to its final name.

    It atomically replaces an earlier checkpoint of this run. An existing checkpoint that another or
    unknown run wrote, or that has other files, is renamed to `….replaced`.
    """
    make_public(unfinished)
    if checkpoint.exists() and not _is_own(checkpoint, run):
        checkpoint.rename(free_name(checkpoint.with_name(f"{checkpoint.name}.replaced")))
    if not checkpoint.exists():
        unfinished.rename(checkpoint)
        return
    # One system call: at every moment a complete checkpoint has the final name.
    exchange(unfinished, checkpoint)
    _remove(unfinished)


def prune(newest: Path, run: str, retain: int) -> None:
    """Removes this run's old checkpoints, so that `retain` remain, including `newest`.

    Checkpoints of other runs, of later steps, or with files that this program did not write are
    kept.
    """
    before = [path for path in checkpoints(newest.parent) if step_of(path) < step_of(newest)]
    own = [path for path in before if run_of(path) == run]
    # `newest` is one of the checkpoints that remain.
    superfluous = max(len(own) - (retain - 1), 0)
    for old in own[:superfluous]:
        if _is_own(old, run):
            # Renamed first: a run that is killed meanwhile leaves nothing that looks complete.
            removed = old.with_name(f".{old.name}.removed")
            old.rename(removed)
            _remove(removed)


def run_of(checkpoint: Path) -> object:
    """Returns the identity of the run that wrote a checkpoint, or None if it cannot be read."""
    try:
        return read_state(checkpoint).get("run")
    except Damaged:
        return None


def files_of(checkpoint: Path) -> list[str]:
    """Returns the sorted relative names of all files of a checkpoint except the manifest."""
    names = []
    for path in checkpoint.rglob("*"):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and name != MANIFEST:
            names.append(name)
    return sorted(names)


def checksums(checkpoint: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of files of a checkpoint, by name."""
    sums = {}
    for name in names:
        with open(checkpoint / name, "rb") as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def write_manifest(checkpoint: Path, sums: Mapping[str, str]) -> None:
    """Writes `SHA256SUMS`."""
    lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
    (checkpoint / MANIFEST).write_text("".join(lines), encoding="utf-8")


def read_manifest(checkpoint: Path) -> dict[str, str]:
    """Returns the checksums in the manifest, by name.

    Raises:
        Damaged: The manifest is missing or damaged.
    """
    try:
        lines = (checkpoint / MANIFEST).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error})") from None
    sums = {}
    for number, line in enumerate(lines, start=1):
        match = LINE.fullmatch(line)
        if match is None or not _is_inside(match[2]):
            raise Damaged(f"line {number} of {MANIFEST} is not a checksum and a name")
        sums[match[2]] = match[1]
    if TRAINER_STATE not in sums:
        raise Damaged(f"{MANIFEST} does not list {TRAINER_STATE}")
    return sums


def _is_inside(name: str) -> bool:
    """Returns whether a name of a manifest stays in its directory.

    Files that a manifest names are removed with the checkpoint, and anybody may write a manifest.
    """
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def check(checkpoint: Path, sums: Mapping[str, str]) -> None:
    """Compares files with their checksums.

    Raises:
        Damaged: A file is missing, unreadable or different.
    """
    for name, expected in sums.items():
        try:
            checksum = checksums(checkpoint, [name])[name]
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from None
        if checksum != expected:
            raise Damaged(f"{name} is not as it was written (its SHA-256 differs)")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Returns the JSON object in `trainer_state.json`, with unchecked fields.

    Raises:
        Damaged: The file is unreadable or is not a JSON object.
    """
    try:
        state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{TRAINER_STATE} cannot be read ({error})") from None
    if not isinstance(state, dict):
        raise Damaged(f"{TRAINER_STATE} is not a JSON object")
    return state


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Reads `trainer_state.json` of a checkpoint.

    Raises:
        ValueError: The file is damaged or lacks a field.
    """
    # Here, because the command line imports this module without pydantic, too.
    from pydantic import TypeAdapter, ValidationError

    path = checkpoint / TRAINER_STATE
    try:
        return TypeAdapter(TrainerState).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        location = ".".join(map(str, problem["loc"])) or "content"
        raise ValueError(
            f"{path}: {location}: {problem['msg']}; did another version save it?"
        ) from None


def check_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError with both values if an option has changed that a resumed run must keep."""
    # Some options are fixed only because of others.
    fixed = dict(FIXED_OPTIONS)
    if saved.get("rollout_shuffle"):
        fixed["rollout_seed"] = FIXED_OPTIONS["rollout_shuffle"]
    if saved.get("partial_rollout"):
        fixed["n_samples_per_prompt"] = "unfinished groups have this number of samples"
    for name in changed(saved, now, fixed):
        repair = f"set it back to {quoted(saved[name])}"
        if saved[name] is None:
            repair = "remove it"
        if name == "bf16" and now.get("bf16_if_fast"):
            repair = _precision_repair(saved)
        raise ValueError(
            f"{flag(name)} is {_value_text(now[name])} but was {_value_text(saved[name])} in the"
            f" run that --load resumes, and {fixed[name]}; {repair} or start afresh with another"
            " --save."
        )


def _precision_repair(saved: Mapping[str, Any]) -> str:
    """Returns advice to add the flags of the saved precision, which decide over --bf16-if-fast."""
    words = "--no-bf16"
    if saved["bf16"]:
        words = "--bf16"
        if saved.get("rollout_engine") == "local":
            # Sampling would otherwise change to its default precision.
            words += f" --rollout-precision {saved['rollout_precision']}"
    return f"add {words}, because --bf16-if-fast depends on the machine,"


def _value_text(value: Any) -> str:
    """Returns an option's value as text for an error message."""
    if value is None:
        return "unset"
    return quoted(value)


def changed_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the changed options in one line, `--lr 0.0001 → 5e-05, …`, or an empty string."""
    reported = [name for name in now if name not in UNREPORTED_OPTIONS]
    changes = []
    for name in changed(saved, now, reported):
        changes.append(f"{flag(name)} {quoted(saved[name])} → {quoted(now[name])}")
    return ", ".join(changes)


def changed(saved: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Returns the names of options whose values differ from the checkpoint's."""
    return [name for name in names if name in saved and saved[name] != now[name]]


def _is_own(checkpoint: Path, run: str) -> bool:
    """Returns whether the run wrote the checkpoint and every file in it."""
    try:
        if run_of(checkpoint) != run:
            return False
        return set(files_of(checkpoint)) <= set(read_manifest(checkpoint))
    except Damaged:
        return False


def _remove(checkpoint: Path) -> None:
    """Removes the files that a manifest lists, and the directory if it is then empty."""
    remove_files(checkpoint, [*read_manifest(checkpoint), MANIFEST])
