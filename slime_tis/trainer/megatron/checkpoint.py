"""Training checkpoints: resumable, complete or absent, their files checked before they are loaded.

A checkpoint holds megatron-core's distributed checkpoint of model, optimizer, scheduler and random state, and the
trainer's state; `slime_tis.trainer.storage.checkpoints` has the names of its files. All functions except
`remove_older` are collectives.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from slime_tis.trainer.collectives import on_every_rank
from slime_tis.trainer.megatron import upstream
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.storage import checkpoints as files

SET_BY_STATE = ("params", "step", "lr", "weight_decay")
"""Entries of an optimizer's parameter groups that are not options: parameters, and values that the scheduler sets."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class UnfinishedCheckpoint:
    """A checkpoint whose files are all written, but which no run resumes until it is finished.

    If the process ends before, the next save removes the directory.
    """

    path: Path
    final: Path
    """Its later name."""
    run: str
    is_main: bool

    def finish(self, retain: int) -> Path:
        """Renames the checkpoint, and removes all but the run's `retain` newest checkpoints.

        Raises:
            CheckpointError: it could not be renamed, on every rank; earlier checkpoints are intact.
        """
        with self.discarded_on_error():
            self.on_main(lambda: files.finish(self.path, self.final, self.run))
        if self.is_main:
            remove_older(self.final, self.run, retain)
        return self.final

    def discard(self) -> None:
        """Removes its files."""
        if self.is_main:
            files.discard(self.path)

    def on_main(self, action: Callable[[], object]) -> None:
        """Runs `action` on the main process while the others wait; raises on every rank if it fails."""
        on_every_rank(action if self.is_main else lambda: None)

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Removes its files and raises a CheckpointError if the block raises."""
        try:
            yield
        except (Exception, CheckpointException) as error:
            self.discard()
            raise CheckpointError(
                f"could not write checkpoint {self.final}: {_reason(error)}; earlier checkpoints are intact, "
                "free space (or fix the path) and resume with --load"
            ) from error


def write(
    directory: str | Path,
    step: int,
    engine: TrainingEngine,
    trainer_state: dict[str, Any],
    write_extra: Callable[[Path], object] = lambda directory: None,
) -> UnfinishedCheckpoint:
    """Writes all files of the checkpoint `directory/iter_STEP`.

    Args:
        directory: of the run's checkpoints.
        step: optimizer steps made so far.
        engine: its model, optimizer, scheduler and random state are saved.
        trainer_state: the loop's state, JSON-serializable. Its entry `run` identifies the run; only checkpoints of
            that run are removed.
        write_extra: called by the main process with the unfinished directory, to add files.

    Raises:
        CheckpointError: it could not be written (a full disk, say), on every rank; earlier checkpoints are intact.
    """
    final = files.checkpoint_path(directory, step)
    path = final.with_name(f".{final.name}.unfinished")
    is_main = engine.parallel.is_main
    unfinished = UnfinishedCheckpoint(path=path, final=final, run=trainer_state["run"], is_main=is_main)

    def write_state() -> None:
        write_extra(path)
        (path / files.TRAINER_STATE).write_text(json.dumps(trainer_state, indent=2) + "\n", encoding="utf-8")

    with unfinished.discarded_on_error():
        unfinished.on_main(lambda: files.begin(final))
        upstream.save_sharded(_sharded_state(engine, is_loading=False), path)
        unfinished.on_main(write_state)
        names = files.files_of(path)
        assert all(files.OWN_FILE.fullmatch(name) for name in names), names  # others would never be removed
        shares = on_every_rank(lambda: files.checksums(path, _share(names)))
        sums = {name: value for share in shares for name, value in share.items()}
        unfinished.on_main(lambda: files.write_manifest(path, sums))
    return unfinished


@dataclass(frozen=True, kw_only=True)
class LatestCheckpoint:
    """The checkpoint to resume from."""

    checkpoint: Path
    damaged: tuple[str, ...]
    """Newer damaged checkpoints: each one's name and damage."""


def latest_complete_checkpoint(directory: str | Path) -> LatestCheckpoint | None:
    """The newest undamaged checkpoint under `directory`; None if there are no checkpoints.

    Every rank compares the SHA-256 of its share of the files; all ranks get the same result.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    (candidates, *_) = on_every_rank(lambda: files.checkpoints(directory))
    damaged: list[str] = []
    for checkpoint in reversed(candidates):
        damages = [damage for damage in on_every_rank(partial(_damage, checkpoint)) if damage is not None]
        if not damages:
            return LatestCheckpoint(checkpoint=checkpoint, damaged=tuple(damaged))
        damaged.append(f"{checkpoint.name}: {damages[0]}")
    if damaged:
        raise CheckpointError(
            f"no checkpoint under {directory} is complete ({'; '.join(damaged)}); restore one, or start from the "
            "beginning without --load and with another --save"
        )
    return None


def load(checkpoint: Path, engine: TrainingEngine) -> None:
    """Restores model, optimizer, scheduler and random state; the optimizer keeps the engine's options.

    Raises:
        CheckpointError: the checkpoint has another model or layout.
    """
    options = [
        {name: value for name, value in group.items() if name not in SET_BY_STATE}
        for group in engine.optimizer.param_groups
    ]
    try:
        with torch.no_grad():
            state = dist_checkpointing.load(_sharded_state(engine, is_loading=True), str(checkpoint))
            engine.model.module.load_state_dict(state["model"])
            engine.optimizer.load_state_dict(upstream.with_step_count(state["optimizer"]))
            upstream.separate_adam_steps(engine.optimizer)
        for group, current in zip(engine.optimizer.param_groups, options, strict=True):
            group.update(current)  # megatron-core restores the saved learning rates, betas and epsilon
        engine.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random_state"])
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"could not load checkpoint {checkpoint}: {_reason(error)}; was it saved with another model or layout?"
        ) from error


def remove_older(newest: Path, run: str, retain: int) -> None:
    """Removes all but the run's `retain` newest checkpoints, and unfinished ones of killed runs.

    Prints a warning if that fails. Only the main process may call it.
    """
    try:
        files.sweep(newest.parent)
        files.prune(newest, run, retain)
    except OSError as error:
        print(f"warning: an earlier checkpoint could not be removed: {error}", file=sys.stderr)


def _damage(checkpoint: Path) -> str | None:
    """The first damage among this rank's share of the files."""
    try:
        sums = files.read_manifest(checkpoint)
        files.check(checkpoint, {name: sums[name] for name in _share(sorted(sums))})
    except files.Damaged as error:
        return str(error)
    return None


def _share(names: list[str]) -> list[str]:
    """The files that this rank checks."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _reason(error: BaseException) -> str:
    """The last line of an error's innermost cause: torch's CheckpointException has tracebacks in its text."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _sharded_state(engine: TrainingEngine, *, is_loading: bool) -> dict[str, Any]:
    model = engine.model.module.sharded_state_dict()
    metadata = {}
    if engine.config.use_distributed_optimizer:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    upstream.make_adam_state(engine.optimizer)
    return {
        "model": model,
        "optimizer": engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
        "scheduler": engine.scheduler.state_dict(),
        "random_state": torch.get_rng_state(),
    }
