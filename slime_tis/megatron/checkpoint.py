"""Training checkpoints (resumable, complete or absent) and Hugging Face directories (for everybody else).

A training checkpoint is `DIR/iter_0000010/`: megatron-core's distributed checkpoint of model, optimizer and scheduler,
and `trainer_state.json`. It is written under another name and renamed when whole, so a directory with that name is
complete; one left by a run that was killed is ignored and overwritten.
"""

import json
import queue
import shutil
from collections.abc import Callable, Iterator
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

from slime_tis.megatron.engine import TrainingEngine

TRAINER_STATE = "trainer_state.json"
SHARD_BYTES = 5 * 2**30  # of one safetensors file, as the Hugging Face hub has them


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is a sentence for the user."""


def save(
    directory: str | Path,
    step: int,
    engine: TrainingEngine,
    trainer_state: dict[str, Any],
    *,
    retain: int,
    write_extra: Callable[[Path], None] | None = None,
) -> Path:
    """Writes `directory/iter_STEP`; a collective.

    Args:
        directory: where checkpoints of this run live.
        step: optimizer steps made so far, which names the checkpoint.
        engine: its model, optimizer, scheduler and random state are saved.
        trainer_state: what else the loop needs to go on, JSON-serialisable.
        retain: how many of the newest checkpoints stay; older ones are removed once this one is complete.
        write_extra: called by the main process with the unfinished directory, to put more files in it.

    Raises:
        CheckpointError: it could not be written (a full disk, say); earlier ones are as they were.
    """
    final = Path(directory) / f"iter_{step:07d}"
    unfinished = Path(directory) / f".iter_{step:07d}.unfinished"
    main = engine.parallel.is_main
    try:
        if main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()
        _use_plain_results_queue()
        dist_checkpointing.save(_sharded_state(engine, is_loading=False), str(unfinished))
        if main:
            if write_extra is not None:
                write_extra(unfinished)
            (unfinished / TRAINER_STATE).write_text(json.dumps(trainer_state, indent=2) + "\n")
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
            for old in _complete(directory)[:-retain]:
                shutil.rmtree(old)
        dist.barrier()
    except (Exception, CheckpointException) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"could not write checkpoint {final}: {_reason(error)}; earlier checkpoints are intact, "
            "make room (or fix the path) and go on with --load"
        ) from error
    return final


def newest(directory: str | Path) -> Path | None:
    """The newest complete checkpoint under `directory`, or None."""
    complete = _complete(directory)
    return complete[-1] if complete else None


def load(checkpoint: Path, engine: TrainingEngine) -> dict[str, Any]:
    """Restores model, optimizer, scheduler and random state; returns the trainer's state. A collective."""
    try:
        with torch.no_grad():
            state = dist_checkpointing.load(_sharded_state(engine, is_loading=True), str(checkpoint))
            engine.model.module.load_state_dict(state["model"])
            engine.optimizer.load_state_dict(_with_step_count(state["optimizer"]))
            _separate_adam_steps(engine.optimizer)
        engine.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random_state"])
        return json.loads((checkpoint / TRAINER_STATE).read_text())
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"could not load checkpoint {checkpoint}: {_reason(error)}; was it saved with another model or layout?"
        ) from error


def save_hf(directory: str | Path, engine: TrainingEngine) -> None:
    """Writes the policy as a Hugging Face directory, under another name until it is whole; a collective."""
    final = Path(directory)
    unfinished = final.parent / f".{final.name}.unfinished"
    tensors = engine.named_hf_tensors()
    if not engine.parallel.is_main:
        for _ in tensors:
            pass
        return
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for file in Path(engine.config.hf_checkpoint).iterdir():
            if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
                shutil.copy(file, unfinished)
        _write_safetensors(unfinished, tensors)
        _set_dtype(unfinished / "config.json", engine.config.bf16)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"could not write {final}: {_reason(error)}") from error


def _complete(directory: str | Path) -> list[Path]:
    return sorted(path.parent for path in Path(directory).glob(f"iter_*/{TRAINER_STATE}"))


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _use_plain_results_queue() -> None:
    """megatron-core collects what its writers did through a manager process, which would import train.py anew.

    That serves saving in the background; here the collecting process is the saving one, and a plain queue does.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _sharded_state(engine: TrainingEngine, *, is_loading: bool) -> dict[str, Any]:
    model = engine.model.module.sharded_state_dict()
    metadata = {}
    if engine.config.use_distributed_optimizer:
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    _make_adam_state(engine.optimizer)
    return {
        "model": model,
        "optimizer": engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
        "scheduler": engine.scheduler.state_dict(),
        "random_state": torch.get_rng_state(),
    }


def _torch_adams(optimizer: Any) -> Iterator[Any]:
    """The megatron-core optimizers that step with torch's Adam, which serves where transformer-engine is not."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.AdamW):
            yield part


def _make_adam_state(optimizer: Any) -> None:
    """Gives torch's Adam the state it has after no step; megatron-core expects one to save and to load into."""
    for part in _torch_adams(optimizer):
        for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            state = part.optimizer.state[parameter]
            state.setdefault("step", torch.tensor(0.0))
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter)
        if isinstance(part, DistributedOptimizer):
            part._set_main_param_and_optimizer_states = MethodType(_copy_saved_state, part)


def _copy_saved_state(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
    """megatron-core's method of this purpose stumbles over Adam's `step`, which is not saved per parameter."""
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    state = {"param": main_param, **self.optimizer.state[main_param]}
    for key in state.keys() & tensors.keys():
        state[key].copy_(tensors[key])


def _with_step_count(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """megatron-core leaves the step count out of a checkpoint where it is 0, and asks for it when loading."""
    parameters = optimizer_state.get("optimizer", optimizer_state).get("state")
    if parameters is not None:
        parameters.setdefault("common_step", torch.tensor(0.0))
    return optimizer_state


def _separate_adam_steps(optimizer: Any) -> None:
    """Parameters share one loaded step count, which each of them would advance."""
    for part in _torch_adams(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).clone()


def _write_safetensors(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    from safetensors.torch import save_file

    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        if held:
            save_file(held, str(directory / f"part-{len(files)}.safetensors"), metadata={"format": "pt"})
            files.append(list(held))
            held.clear()

    for name, tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if size + bytes_ > SHARD_BYTES:
            flush()
            size = 0
        held[name] = tensor.cpu().contiguous().clone()
        size, total = size + bytes_, total + bytes_
    flush()
    if len(files) == 1:
        (directory / "part-0.safetensors").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(files):
        name = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"part-{index}.safetensors").rename(directory / name)
        weight_map.update(dict.fromkeys(names, name))
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2) + "\n")


def _set_dtype(config_file: Path, bf16: bool) -> None:
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16" if bf16 else "float32"
    config_file.write_text(json.dumps(config, indent=2) + "\n")
