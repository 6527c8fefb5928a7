"""Training checkpoints and exports: complete or absent, their files checked before they are loaded.

A checkpoint holds megatron-core's distributed checkpoint of model, optimizer, scheduler and random
state, and the trainer's state; `slime_tis.trainer.storage.checkpoint_files` has the names of its
files. All functions except `remove_older` are collectives. The second half works around
megatron-core 0.16.1 and uses its private names: check it after an upgrade.
"""

import json
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from slime_tis.torch_files import UnsafeFile
from slime_tis.trainer.megatron.checkpoint_reader import (
    SafeCommonStrategy,
    SafeShardedStrategy,
    check_extra_state,
)
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.rank_collectives import on_every_rank
from slime_tis.trainer.storage import checkpoint_files as files
from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.hf_writer import SHARD_BYTES, write_hf_checkpoint

SET_BY_STATE = ("params", "step", "lr", "weight_decay")
"""Entries of an optimizer's parameter groups that are not options: parameters, and values that the
scheduler sets."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is for the user."""


def save(
    directory: str | Path,
    step: int,
    engine: TrainingEngine,
    trainer_state: dict[str, Any],
    *,
    retain: int,
    write_extra: Callable[[Path], object] = lambda directory: None,
    before_it_counts: Callable[[], object] = lambda: None,
) -> None:
    """Writes the checkpoint `directory/iter_STEP`, and removes all but the run's `retain` newest checkpoints.

    `before_it_counts` is called when all files are written, before the checkpoint gets the name
    under which a run resumes it.
    """
    final = files.checkpoint_path(directory, step)
    path = final.with_name(f".{final.name}.unfinished")
    is_main, run = engine.parallel.is_main, trainer_state["run"]

    def on_main(action: Callable[[], object]) -> None:
        on_every_rank(action if is_main else lambda: None)

    def write_state() -> None:
        write_extra(path)
        (path / files.TRAINER_STATE).write_text(
            json.dumps(trainer_state, indent=2) + "\n", encoding="utf-8"
        )

    try:
        with engine.timer("save"), _naming_the_checkpoint(final):
            on_main(lambda: files.begin(final))
            _save_sharded(_sharded_state(engine, is_loading=False), path)
            on_main(write_state)
            names = files.files_of(path)
            assert all(files.OWN_FILE.fullmatch(name) for name in names), (
                names
            )  # others would never be removed
            shares = on_every_rank(lambda: files.checksums(path, _share(names)))
            sums = {name: value for share in shares for name, value in share.items()}
            on_main(lambda: files.write_manifest(path, sums))
        before_it_counts()
        with _naming_the_checkpoint(final):
            on_main(lambda: files.finish(path, final, run))
    except BaseException:
        if is_main:
            files.discard(path)
        raise
    if is_main:
        remove_older(final, run, retain)


@contextmanager
def _naming_the_checkpoint(final: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"could not write checkpoint {final}: {_reason(error)}; earlier checkpoints are intact,"
            " free space (or fix the path) and resume with --load"
        ) from error


def latest_complete_checkpoint(directory: str | Path) -> tuple[Path, list[str]] | None:
    """The newest undamaged checkpoint under `directory`, and the newer damaged ones; None without checkpoints."""
    candidates, *_ = on_every_rank(lambda: files.checkpoints(directory))
    damaged: list[str] = []
    for checkpoint in reversed(candidates):
        damages = [
            damage for damage in on_every_rank(partial(_damage, checkpoint)) if damage is not None
        ]
        if not damages:
            return checkpoint, damaged
        damaged.append(f"{checkpoint.name}: {damages[0]}")
    if damaged:
        raise CheckpointError(
            f"no checkpoint under {directory} is complete ({'; '.join(damaged)}); restore one, or"
            " start from the beginning without --load and with another --save"
        )
    return None


def load(checkpoint: Path, engine: TrainingEngine) -> None:
    """Restores model, optimizer, scheduler and random state; the optimizer keeps the engine's options."""
    options = [
        {name: value for name, value in group.items() if name not in SET_BY_STATE}
        for group in engine.optimizer.param_groups
    ]
    try:
        with torch.no_grad():
            state = dist_checkpointing.load(
                _sharded_state(engine, is_loading=True),
                str(checkpoint),
                sharded_strategy=SafeShardedStrategy(),
                common_strategy=SafeCommonStrategy(),
            )
            check_extra_state(state["model"], checkpoint)
            engine.model.module.load_state_dict(state["model"])
            optimizer = state[
                "optimizer"
            ]  # megatron-core does not save the step count, but expects it
            optimizer.get("optimizer", optimizer).get("state", {}).setdefault(
                "common_step", torch.tensor(0.0)
            )
            engine.optimizer.load_state_dict(optimizer)
            _separate_adam_steps(engine.optimizer)
        for group, current in zip(engine.optimizer.param_groups, options, strict=True):
            group.update(
                current
            )  # megatron-core restores the saved learning rates, betas and epsilon
        engine.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random_state"])
    except (Exception, CheckpointException) as error:
        cause = _innermost(error)
        advice = "restore it from a copy that you trust, or start without --load"
        if not isinstance(cause, UnsafeFile):
            advice = "was it saved with another model or layout?"
        raise CheckpointError(
            f"could not load checkpoint {checkpoint}: {_reason(cause)}; {advice}"
        ) from error


def remove_older(newest: Path, run: str, retain: int) -> None:
    """Removes all but the run's `retain` newest checkpoints, and unfinished ones; only the main process may call it."""
    try:
        files.sweep(newest.parent)
        files.prune(newest, run, retain)
    except OSError as error:
        print(f"warning: an earlier checkpoint could not be removed: {error}", file=sys.stderr)


def save_hf(directory: str | Path, engine: TrainingEngine) -> Path | None:
    """Writes the policy as a Hugging Face directory, under another name until it is complete."""
    tensors = engine.named_hf_tensors()
    if not engine.parallel.is_main:
        for _ in tensors:
            pass
        return None
    final, like = Path(directory).resolve(), Path(engine.config.hf_checkpoint)
    unfinished = None
    try:
        unfinished = exports.begin(final)
        write_hf_checkpoint(unfinished, tensors, like=like, shard_bytes=SHARD_BYTES)
        return exports.finish(unfinished, final)
    except OSError as error:
        for _ in tensors:  # the collective continues for the other ranks
            pass
        if unfinished is not None:
            exports.discard(unfinished)
        raise CheckpointError(f"could not write {final}: {error}") from error


def _damage(checkpoint: Path) -> str | None:
    try:
        sums = files.read_manifest(checkpoint)
        files.check(checkpoint, {name: sums[name] for name in _share(sorted(sums))})
    except files.Damaged as error:
        return str(error)
    return None


def _share(names: list[str]) -> list[str]:
    return names[dist.get_rank() :: dist.get_world_size()]


def _innermost(error: BaseException) -> BaseException:
    """Returns the innermost cause of an error, on the first rank that has one."""
    while True:
        if isinstance(error, CheckpointException) and error.failures:
            _, (error, _traceback) = min(error.failures.items())
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


def _reason(error: BaseException) -> str:
    """Returns the last line of the innermost cause's text, or its type if it has no text."""
    cause = _innermost(error)
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]


def _sharded_state(engine: TrainingEngine, *, is_loading: bool) -> dict[str, Any]:
    model = engine.model.module.sharded_state_dict()
    metadata = {}
    if engine.config.use_distributed_optimizer:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    _make_adam_state(engine.optimizer)
    return {
        "model": model,
        "optimizer": engine.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        ),
        "scheduler": engine.scheduler.state_dict(),
        "random_state": torch.get_rng_state(),
    }


def _save_sharded(state: dict[str, Any], directory: Path) -> None:
    """Saves a state in this process: `dist_checkpointing.save` forks, and waits forever if a child is killed."""
    # Without this queue, megatron-core starts a manager process, which imports the program's main
    # module again.
    filesystem_async._results_queue = queue.Queue()
    request = dist_checkpointing.save(state, str(directory), async_sharded_save=True)
    assert request is not None
    if request.async_fn is not None:  # this rank has something to write
        transforms, _ = request.async_fn.args
        request = request._replace(async_fn=partial(_write_buckets, transforms))
    request.execute_sync()


def _write_buckets(
    transforms: list[Any], rank: int, buckets: list[Any], results: "queue.Queue[Any]"
) -> None:
    written: queue.Queue[tuple[int, Any]] = queue.Queue()
    for number, bucket in enumerate(buckets):
        under_way: queue.Queue[int] = queue.Queue()
        under_way.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, written, under_way, use_fsync=True
        )
    outcomes = dict(written.get() for _ in buckets)
    failure = next(
        (outcome for outcome in outcomes.values() if isinstance(outcome, Exception)), None
    )
    results.put(outcomes if failure is None else _os_error(failure))


def _os_error(error: Exception) -> BaseException:
    """The OSError behind an error, else the error: for a full disk, torch only says that file positions differ."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return link or error


def torch_adams(optimizer: Any) -> Iterator[Any]:
    """Yields the megatron-core optimizers that use torch's Adam: without transformer-engine, all."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.AdamW):
            yield part


def _make_adam_state(optimizer: Any) -> None:
    """Gives torch's Adam its initial state, which megatron-core expects when it saves and loads."""
    for part in torch_adams(optimizer):
        for parameter in (
            parameter for group in part.optimizer.param_groups for parameter in group["params"]
        ):
            state = part.optimizer.state[parameter]
            if not state:
                moments = {
                    moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")
                }
                state.update(step=torch.tensor(0.0), **moments)
        if isinstance(part, DistributedOptimizer):
            part._set_main_param_and_optimizer_states = MethodType(_copy_saved_state, part)


def _copy_saved_state(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
    """Replaces DistributedOptimizer's method, which fails on Adam's `step`, not saved per parameter."""
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    state = {"param": main_param, **self.optimizer.state[main_param]}
    for key in state.keys() & tensors.keys():
        state[key].copy_(tensors[key])


def _separate_adam_steps(optimizer: Any) -> None:
    """Gives each parameter a separate step count; after loading, all share one, which each would advance."""
    for part in torch_adams(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).clone()
