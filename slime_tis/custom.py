"""Loads a user's function from a path, and holds a custom TIS function to its contract.

The contract is slime's: `fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths,
response_lengths, **kwargs) -> (pg_loss, modified_response_masks, metrics)`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

TisResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]


def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module.function` or `path/file.py:function`.

    Raises:
        ValueError: if the path has neither form, or the file, the module or the function is not there.
    """
    if ":" in path:
        place, _, name = path.rpartition(":")
        module = _module_of_file(path, Path(place))
    else:
        place, _, name = path.rpartition(".")
        if not place:
            raise ValueError(f"{path!r} names no module; write package.module.function or path/file.py:function.")
        module = _module_of_name(path, place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path!r}: {place} has no function {name!r}; it has {_functions_of(module)}.")
    return function


def call_custom_tis(function: Callable[..., Any], args: Any, **kwargs: Any) -> TisResult:
    """Calls a custom TIS function and checks what it returns.

    Args:
        function: In slime's contract.
        args: The program's options, handed on as they are.
        kwargs: pg_loss [N] flat over this rank's tokens, train_log_probs and rollout_log_probs (lists of its
            slices), loss_masks (whole responses), total_lengths, response_lengths, and what else is known.

    Returns:
        pg_loss [N], whole-response masks, and metrics [N] each.

    Raises:
        ValueError: naming the function and what is wrong with its return value.
    """
    result = function(args, **kwargs)
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
    if not isinstance(result, tuple) or len(result) != 3:
        raise ValueError(
            f"{name} returned {_kind(result)}; return the tuple (pg_loss, modified_response_masks, metrics)."
        )
    pg_loss, masks, metrics = result
    _check_loss(name, pg_loss, kwargs["pg_loss"])
    _check_masks(name, masks, kwargs["loss_masks"])
    _check_metrics(name, metrics, kwargs["pg_loss"])
    return pg_loss, list(masks), metrics


def _module_of_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"{path!r}: there is no file {file}.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path!r}: {file} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module_of_name(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path!r}: there is no module {error.name!r}; is its directory on PYTHONPATH? "
            f"For a file, write path/file.py:function."
        ) from error


def _functions_of(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return ", ".join(names) or "none"


def _check_loss(name: str, pg_loss: Any, given: Tensor) -> None:
    if not isinstance(pg_loss, Tensor) or pg_loss.shape != given.shape:
        raise ValueError(
            f"{name} returned {_kind(pg_loss)} as pg_loss; return a tensor of shape {tuple(given.shape)}, "
            f"one value per token as it was given."
        )
    if not pg_loss.is_floating_point():
        raise ValueError(f"{name} returned a pg_loss of {pg_loss.dtype}; return a floating-point tensor.")
    if given.requires_grad and not pg_loss.requires_grad:
        raise ValueError(f"{name} lost the gradient of pg_loss; multiply it with detached weights, do not rebuild it.")
    if (torch.isfinite(given) & ~torch.isfinite(pg_loss)).any():
        raise ValueError(f"{name} made a finite pg_loss NaN or infinite; mask with torch.where, for inf · 0 is NaN.")


def _check_masks(name: str, masks: Any, given: list[Tensor]) -> None:
    if not isinstance(masks, list | tuple) or len(masks) != len(given):
        raise ValueError(f"{name} returned {_kind(masks)} as masks; return a list of {len(given)}, one per response.")
    for i, (mask, original) in enumerate(zip(masks, given, strict=True)):
        if not isinstance(mask, Tensor) or mask.shape != original.shape:
            raise ValueError(
                f"{name} returned {_kind(mask)} as mask {i}; return the whole response, shape {tuple(original.shape)}."
            )


def _check_metrics(name: str, metrics: Any, pg_loss: Tensor) -> None:
    if not isinstance(metrics, dict):
        raise ValueError(f"{name} returned {_kind(metrics)} as metrics; return a dict of names to tensors.")
    for key, value in metrics.items():
        if not isinstance(key, str) or not isinstance(value, Tensor) or value.shape != pg_loss.shape:
            raise ValueError(
                f"{name} returned {_kind(value)} as metric {key!r}; return a tensor of shape "
                f"{tuple(pg_loss.shape)}, one value per token."
            )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
