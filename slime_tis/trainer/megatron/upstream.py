"""Workarounds for megatron-core 0.16.1 that use its private names; check this file after an upgrade."""

import queue
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def save_sharded(state: dict[str, Any], directory: Path) -> None:
    """Saves a state of megatron-core's sharded tensors in an existing directory that all ranks share; a collective.

    This process writes its files. `dist_checkpointing.save` forks a process per file, and waits forever if one of them
    is killed.
    """
    # Without this queue, megatron-core starts a manager process, which imports the program's main module again.
    filesystem_async._results_queue = queue.Queue()
    request = dist_checkpointing.save(state, str(directory), async_sharded_save=True)
    assert request is not None
    if request.async_fn is not None:  # this rank has something to write
        transforms, _ = request.async_fn.args
        request = request._replace(async_fn=partial(_write_buckets, transforms))
    request.execute_sync()


def _write_buckets(transforms: list[Any], rank: int, buckets: list[Any], results: "queue.Queue[Any]") -> None:
    """Writes this rank's files one by one and puts the outcomes into `results`, as megatron-core expects."""
    written: queue.Queue[tuple[int, Any]] = queue.Queue()
    for number, bucket in enumerate(buckets):
        under_way: queue.Queue[int] = queue.Queue()
        under_way.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, written, under_way, use_fsync=True
        )
    outcomes = dict(written.get() for _ in buckets)
    failure = next((outcome for outcome in outcomes.values() if isinstance(outcome, Exception)), None)
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


def make_adam_state(optimizer: Any) -> None:
    """Gives torch's Adam its initial state, which megatron-core expects when it saves and loads.

    Also replaces the distributed optimizer's method that copies a loaded state, see `_copy_saved_state`.
    """
    for part in torch_adams(optimizer):
        for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            state = part.optimizer.state[parameter]
            state.setdefault("step", torch.tensor(0.0))
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter)
        if isinstance(part, DistributedOptimizer):
            part._set_main_param_and_optimizer_states = MethodType(_copy_saved_state, part)


def _copy_saved_state(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
    """Copies a loaded state into a parameter's state.

    DistributedOptimizer's method fails on Adam's `step`, which is not saved per parameter.
    """
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    state = {"param": main_param, **self.optimizer.state[main_param]}
    for key in state.keys() & tensors.keys():
        state[key].copy_(tensors[key])


def with_step_count(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """Adds the step count 0, which megatron-core does not save but expects when it loads."""
    parameters = optimizer_state.get("optimizer", optimizer_state).get("state")
    if parameters is not None:
        parameters.setdefault("common_step", torch.tensor(0.0))
    return optimizer_state


def separate_adam_steps(optimizer: Any) -> None:
    """Gives each parameter a separate step count; after loading, all share one, which each would advance."""
    for part in torch_adams(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).clone()
