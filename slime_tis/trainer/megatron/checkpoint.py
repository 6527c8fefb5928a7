"""Training checkpoints: resumable, complete or absent, their files checked before they are loaded.

A checkpoint holds megatron-core's distributed checkpoint of model, optimizer, scheduler and random state, and the
trainer's state; `slime_tis.trainer.storage.checkpoints` has the names of its files. All functions here are collectives.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from slime_tis.trainer.megatron import upstream
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.storage import checkpoints as files

T = TypeVar("T")

SET_BY_STATE = ("params", "step", "lr", "weight_decay")
"""Entries of an optimizer's parameter groups that are not options: parameters, and what the scheduler sets."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A checkpoint whose files are all written, which counts once it is finished.

    A process that ends before leaves a directory that no run goes on from, and that the next save removes.
    """

    path: Path
    final: Path
    """The name that it will have."""
    run: str
    is_main: bool

    def finish(self, retain: int) -> Path:
        """Gives the checkpoint its name, and removes older ones of the run; a collective.

        Args:
            retain: how many of the run's newest checkpoints stay.

        Raises:
            CheckpointError: it could not be renamed, on every rank; earlier ones are as they were.
        """
        with self.discarded_on_error():
            _on_main(self.is_main, lambda: files.finish(self.path, self.final, self.run))
        if self.is_main:
            remove_older(self.final, self.run, retain)
        return self.final

    def discard(self) -> None:
        """Removes its files."""
        if self.is_main:
            files.discard(self.path)

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Removes its files where the block raises.

        Raises:
            CheckpointError: in place of an error of files or of megatron-core.
        """
        try:
            yield
        except (Exception, CheckpointException) as error:
            self.discard()
            raise CheckpointError(
                f"could not write checkpoint {self.final}: {_reason(error)}; earlier checkpoints are intact, "
                "free space (or fix the path) and go on with --load"
            ) from error


def write(
    directory: str | Path,
    step: int,
    engine: TrainingEngine,
    trainer_state: dict[str, Any],
    *,
    run: str,
    write_extra: Callable[[Path], None] | None = None,
) -> Unfinished:
    """Writes all files of `directory/iter_STEP`, which counts as a checkpoint once it is finished.

    Args:
        directory: where checkpoints of this run live.
        step: optimizer steps made so far, which names the checkpoint.
        engine: its model, optimizer, scheduler and random state are saved.
        trainer_state: what else the loop needs to go on, JSON-serialisable.
        run: identity of the run, written into the checkpoint; only checkpoints that contain it are removed.
        write_extra: called by the main process with the unfinished directory, to put more files in it.

    Raises:
        CheckpointError: it could not be written (a full disk, say), on every rank; earlier ones are as they were.
    """
    final = files.checkpoint_path(directory, step)
    path = final.with_name(f".{final.name}.unfinished")
    unfinished = Unfinished(path=path, final=final, run=run, is_main=engine.parallel.is_main)

    def write_state() -> None:
        if write_extra is not None:
            write_extra(path)
        state = json.dumps({"run": run, **trainer_state}, indent=2)
        (path / files.TRAINER_STATE).write_text(state + "\n", encoding="utf-8")

    with unfinished.discarded_on_error():
        _on_main(unfinished.is_main, lambda: files.begin(final))
        upstream.save_sharded(_sharded_state(engine, is_loading=False), path)
        _on_main(unfinished.is_main, write_state)
        names = files.files_of(path)
        assert all(files.OWN_FILE.fullmatch(name) for name in names), names  # or a killed run's would never be removed
        shares = _on_every_rank(lambda: files.checksums(path, _share(names)))
        sums = {name: value for share in shares for name, value in share.items()}
        _on_main(unfinished.is_main, lambda: files.write_manifest(path, sums))
    return unfinished


@dataclass(frozen=True, kw_only=True)
class Found:
    """The checkpoint that a run goes on from."""

    checkpoint: Path
    damaged: tuple[str, ...]
    """Newer checkpoints that are passed over: of each, its name and what is wrong with it."""


def newest_whole(directory: str | Path) -> Found | None:
    """The newest checkpoint under `directory` of which every file is as it was written; None where there is none.

    Every rank reads its share of the files and compares their SHA-256; all ranks come to the same answer.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    (candidates, *_) = _on_every_rank(lambda: files.checkpoints(directory))
    damaged: list[str] = []
    for checkpoint in reversed(candidates):
        problem = next((found for found in _on_every_rank(partial(_damage, checkpoint)) if found is not None), None)
        if problem is None:
            return Found(checkpoint=checkpoint, damaged=tuple(damaged))
        damaged.append(f"{checkpoint.name}: {problem}")
    if damaged:
        raise CheckpointError(
            f"no checkpoint under {directory} is whole ({'; '.join(damaged)}); restore one, or start afresh by "
            "leaving --load out and giving another --save"
        )
    return None


def load(checkpoint: Path, engine: TrainingEngine) -> None:
    """Restores model, optimizer, scheduler and random state; options of the optimizer are those of the engine.

    Raises:
        CheckpointError: it is of another model or layout.
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
        for group, own in zip(engine.optimizer.param_groups, options, strict=True):
            group.update(own)  # megatron-core restores the learning rates, betas and epsilon of then
        engine.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random_state"])
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"could not load checkpoint {checkpoint}: {_reason(error)}; was it saved with another model or layout?"
        ) from error


def remove_older(newest: Path, run: str, retain: int) -> None:
    """Removes a run's checkpoints before `newest` but for the last `retain` counting it, and what killed runs left.

    Warns where that fails. For the main process alone.
    """
    try:
        files.sweep(newest.parent)
        files.prune(newest, run, retain)
    except OSError as error:
        print(f"warning: an earlier checkpoint could not be removed: {error}", file=sys.stderr)


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with this rank's share of the files of a checkpoint."""
    try:
        sums = files.read_manifest(checkpoint)
        files.check(checkpoint, {name: sums[name] for name in _share(sorted(sums))})
    except files.Damaged as error:
        return str(error)
    return None


def _share(names: list[str]) -> list[str]:
    """Those of the names that this rank takes care of."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _on_main(main: bool, action: Callable[[], object]) -> None:
    """Lets the main process act while the others wait; raises on every rank where it fails."""
    _on_every_rank(action if main else lambda: None)


def _on_every_rank(action: Callable[[], T]) -> list[T]:
    """What `action` returned on each rank; raises on every rank where it failed on one."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcomes: list[Any] = [(result, None if failure is None else _reason(failure))]
    if dist.get_world_size() > 1:
        outcomes *= dist.get_world_size()
        dist.all_gather_object(outcomes, outcomes[0])
    if failure is not None:
        raise failure
    problem = next((problem for _, problem in outcomes if problem is not None), None)
    if problem is not None:
        raise CheckpointError(problem)
    return [result for result, _ in outcomes]


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
