"""Training checkpoints and exports: complete or absent, with files that are checked before loading.

`checkpoint_saving` writes checkpoints; this module has what they contain, and reads them.

A checkpoint contains the trainer's state, and megatron-core's distributed checkpoint of model,
optimizer, scheduler and random state. `slime_tis.trainer.storage.checkpoint_files` names the files.
All functions except `remove_older` are collectives. The second half works around megatron-core
0.16.1 and uses private names: check it after an upgrade.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from slime_tis.peft_directory import write_adapter
from slime_tis.progress import print_line
from slime_tis.torch_files import UnsafeFile
from slime_tis.trainer.megatron.checkpoint_reader import (
    SafeCommonStrategy,
    SafeShardedStrategy,
    check_extra_state,
)
from slime_tis.trainer.megatron.hf_weights import copied_weights, replaced_weights
from slime_tis.trainer.megatron.lora import is_adapter_parameter
from slime_tis.trainer.megatron.lora_weights import adapter_config, named_adapter_tensors
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.rank_collectives import on_every_rank
from slime_tis.trainer.storage import checkpoint_files as files
from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.hf_writer import SHARD_BYTES, write_hf_checkpoint

SET_BY_STATE = ("params", "step", "lr", "weight_decay")
"""Entries of an optimizer's parameter groups that options do not set: the parameters, and values
that the scheduler sets."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is for the user."""


def latest_complete_checkpoint(directory: str | Path) -> tuple[Path, list[str]] | None:
    """Finds the newest undamaged checkpoint under `directory`.

    Returns:
        The checkpoint, and descriptions of newer damaged checkpoints; None without checkpoints.

    Raises:
        CheckpointError: All checkpoints are damaged.
    """
    # All ranks use the first rank's list.
    candidates, *_ = on_every_rank(lambda: files.checkpoints(directory))
    damaged: list[str] = []
    for checkpoint in reversed(candidates):
        damages = list(filter(None, on_every_rank(partial(_damage, checkpoint))))
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
    """Restores model, optimizer, scheduler and random state.

    The optimizer keeps the options of the engine.

    Raises:
        CheckpointError: The checkpoint could not be loaded.
    """
    options = [_options_of(group) for group in engine.optimizer.param_groups]
    try:
        with torch.no_grad():
            state = dist_checkpointing.load(
                sharded_state(engine, is_loading=True),
                str(checkpoint),
                sharded_strategy=SafeShardedStrategy(),
                common_strategy=SafeCommonStrategy(),
            )
            check_extra_state(state["model"], checkpoint)
            # With LoRA, the model's own weights come from --hf-checkpoint.
            engine.model.module.load_state_dict(
                state["model"], strict=not engine.config.trains_adapters
            )
            if engine.saves_reference:
                check_extra_state(state["reference"], checkpoint)
                _load_reference(state["reference"], engine)
            optimizer = state["optimizer"]
            # megatron-core does not save the common step count, but expects it
            adam = optimizer.get("optimizer", optimizer)
            adam.get("state", {}).setdefault("common_step", torch.tensor(0.0))
            engine.optimizer.load_state_dict(optimizer)
            _separate_adam_steps(engine.optimizer)
        # megatron-core has restored the saved learning rates, betas and epsilon
        for group, current in zip(engine.optimizer.param_groups, options, strict=True):
            group.update(current)
        engine.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random_state"])
    except (Exception, CheckpointException) as error:
        cause = _innermost(error)
        advice = "restore it from a copy that you trust, or start without --load"
        if not isinstance(cause, UnsafeFile):
            advice = "was it saved with another model or layout?"
        raise CheckpointError(
            f"could not load checkpoint {checkpoint}: {reason(cause)}; {advice}"
        ) from error


def _load_reference(state: dict[str, Any], engine: TrainingEngine) -> None:
    """Restores the reference policy; the module is only the way, and keeps the policy."""
    module = engine.model.module
    with replaced_weights(module, copied_weights(module)):
        module.load_state_dict(state)
        engine.update_reference()


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in SET_BY_STATE}


def remove_older(newest: Path, run: str, retain: int) -> None:
    """Removes unfinished checkpoints, and all but the `retain` newest checkpoints of the run.

    Only the main process may call it.
    """
    try:
        files.sweep(newest.parent)
        files.prune(newest, run, retain)
    except OSError as error:
        print_line(f"warning: an earlier checkpoint could not be removed: {error}", sys.stderr)


def save_hf(directory: str | Path, engine: TrainingEngine) -> Path | None:
    """Writes the policy as a Hugging Face directory, with merged LoRA adapters.

    The directory has another name until it is complete.

    Returns:
        The directory; None except on the main process.

    Raises:
        CheckpointError: The directory could not be written.
    """
    tensors = engine.named_hf_tensors(rounds_merged=True)
    like = Path(engine.config.hf_checkpoint)

    def write(unfinished: Path) -> None:
        write_hf_checkpoint(unfinished, tensors, like=like, shard_bytes=SHARD_BYTES)

    return _export(directory, engine, tensors, write)


def save_adapter(directory: str | Path, engine: TrainingEngine) -> Path | None:
    """Writes the LoRA adapters as a directory of PEFT; otherwise as `save_hf`."""
    tensors = named_adapter_tensors(engine.model, engine.parallel)
    config = adapter_config(engine.model)
    base = str(Path(engine.config.hf_checkpoint).resolve())

    def write(unfinished: Path) -> None:
        complete = {}
        for name, tensor in tensors:
            complete[name] = tensor.detach().to("cpu", copy=True).contiguous()
        write_adapter(unfinished, complete, config, base=base)

    return _export(directory, engine, tensors, write)


def _export(
    directory: str | Path,
    engine: TrainingEngine,
    tensors: Iterator[tuple[str, Tensor]],
    write: Callable[[Path], None],
) -> Path | None:
    """Writes an export on the main process, and takes part in the collective on the others."""
    if not engine.parallel.is_main:
        for _ in tensors:
            pass
        return None
    final = Path(directory).resolve()
    unfinished = None
    try:
        unfinished = exports.begin(final)
        write(unfinished)
        return exports.finish(unfinished, final)
    except OSError as error:
        for _ in tensors:  # the other ranks are still in the collective
            pass
        if unfinished is not None:
            exports.discard(unfinished)
        raise CheckpointError(f"could not write {final}: {error}") from error


def _damage(checkpoint: Path) -> str | None:
    """Describes damage in this rank's share of a checkpoint's files; None without damage."""
    try:
        sums = files.read_manifest(checkpoint)
        share = {name: sums[name] for name in files_of_this_rank(sorted(sums))}
        files.check(checkpoint, share)
    except files.Damaged as error:
        return str(error)
    return None


def files_of_this_rank(names: list[str]) -> list[str]:
    """Returns the files that this rank reads."""
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


def reason(error: BaseException) -> str:
    """Returns the last line of the innermost cause's text, or its type if it has no text."""
    cause = _innermost(error)
    lines = str(cause).strip().splitlines()
    if not lines:
        return type(cause).__name__
    return lines[-1]


def sharded_state(engine: TrainingEngine, *, is_loading: bool) -> dict[str, Any]:
    """Returns the state that megatron-core saves, or loads into."""
    model = engine.model.module.sharded_state_dict()
    if engine.config.trains_adapters:
        model = {name: value for name, value in model.items() if is_adapter_parameter(name)}
    metadata = {}
    if engine.config.use_distributed_optimizer:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    _make_adam_state(engine.optimizer)
    reference = {}
    if engine.saves_reference:
        reference["reference"] = _sharded_reference(engine)
    return reference | {
        "model": model,
        "optimizer": engine.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        ),
        "scheduler": engine.scheduler.state_dict(),
        "random_state": torch.get_rng_state(),
    }


def _sharded_reference(engine: TrainingEngine) -> dict[str, Any]:
    """Returns the reference policy's state under other names, as copies on the CPU."""

    def as_reference(value: Any) -> Any:
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            value.data = value.data.detach().to("cpu", copy=True)
        if isinstance(value, ShardedBase):
            value.key = f"reference.{value.key}"
        return value

    assert engine.reference is not None  # kept for a KL, without which the interval is refused
    # The module holds the reference only inside the block.
    with replaced_weights(engine.model.module, engine.reference):
        state: dict[str, Any] = engine.model.module.sharded_state_dict()
        dict_list_map_inplace(as_reference, state)
    return state


def torch_adams(optimizer: Any) -> Iterator[Any]:
    """Yields megatron-core's optimizers that use torch's Adam: all without transformer-engine."""
    for wrapper in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(wrapper.optimizer, torch.optim.AdamW):
            yield wrapper


def _make_adam_state(optimizer: Any) -> None:
    """Gives torch's Adam its initial state, which megatron-core expects when it saves and loads."""
    for wrapper in torch_adams(optimizer):
        for group in wrapper.optimizer.param_groups:
            for parameter in group["params"]:
                state = wrapper.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
        if isinstance(wrapper, DistributedOptimizer):
            wrapper._set_main_param_and_optimizer_states = MethodType(_copy_saved_state, wrapper)


def _copy_saved_state(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
    """Replaces DistributedOptimizer's method, which expects a saved `step` for each parameter."""
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    state = {"param": main_param, **self.optimizer.state[main_param]}
    for key in state.keys() & tensors.keys():
        state[key].copy_(tensors[key])


def _separate_adam_steps(optimizer: Any) -> None:
    """Gives each parameter a separate step count.

    After loading, all parameters share one tensor, and each would advance it.
    """
    for wrapper in torch_adams(optimizer):
        for state in wrapper.optimizer.state.values():
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).clone()
