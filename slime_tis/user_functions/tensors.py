"""Checks of tensors that user functions return."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.user_functions.calling import accepted, call, describe
from slime_tis.user_functions.table import USER_FUNCTIONS

TisResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]
"""Loss, masks and metrics."""
MAX_NAME_LENGTH = 100
"""Longest metric name, in characters."""


def call_custom_tis(
    function: Callable[..., Any], args: Any, *, seed: int = 0, **kwargs: Any
) -> TisResult:
    """Calls a custom TIS function with copies of all tensors, and checks the returned values.

    Args:
        function: The user function.
        args: Options of the program.
        seed: Seed of the random numbers that the function may draw.
        kwargs: The other arguments of `USER_FUNCTIONS`.

    Returns:
        pg_loss [N] in the dtype of the argument, masks of complete responses, and metrics [N].
    """
    signature = USER_FUNCTIONS["custom_tis_function_path"]
    names = [*signature.keywords, *accepted(function, signature.optional)]
    # Copies, because a function may change its arguments in place.
    copies = {name: _copy(value) for name, value in kwargs.items() if name in names}
    pg_loss: Tensor = copies["pg_loss"]
    # Stored now: an operation in place would give the copy another node.
    origin = pg_loss.grad_fn
    if origin is None:
        result = call(function, seed=seed, args=args, **copies)
    else:
        hook = pg_loss.register_hook(_refuse_backward)
        result = call(function, seed=seed, args=args, **copies)
        hook.remove()
    name = describe(function)
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise CustomFunctionError(
            f"{name} returned {kind(result)}; return the tuple (pg_loss, modified_response_masks,"
            " metrics)."
        )
    loss, masks, metrics = result
    check_metrics(name, metrics)
    for key, value in metrics.items():
        _check_like(name, value, kwargs["pg_loss"], f"metric {key!r}")
    _check_masks(name, masks, kwargs["loss_masks"])
    return _checked_loss(name, loss, kwargs["pg_loss"], origin), list(masks), dict(metrics)


def check_metrics(name: str, metrics: Any) -> None:
    """Checks that metrics are a dict with printable names."""
    if not isinstance(metrics, Mapping):
        raise CustomFunctionError(
            f"{name} returned {kind(metrics)} as metrics; return a dict of names to tensors."
        )
    for key in metrics:
        is_name = isinstance(key, str) and key.isprintable() and 0 < len(key) <= MAX_NAME_LENGTH
        if not is_name:
            raise CustomFunctionError(
                f"{name} returned a metric named {one_line(repr(key))}; use {MAX_NAME_LENGTH}"
                " printable characters."
            )


def check_metric_names(
    function: Callable[..., Any], names: Sequence[Sequence[str]], where: str
) -> None:
    """Checks that all calls returned the same metrics, because their values are summed.

    Args:
        function: The user function.
        names: Metric names per call.
        where: How calls differ, for the message: "micro-batch" or "rank".
    """
    all_names = set().union(*names)
    common_names = set(names[0]).intersection(*names)
    differing = all_names - common_names
    if differing:
        raise CustomFunctionError(
            f"{describe(function)} returned metric {one_line(repr(min(differing)))} for one {where}"
            " and not for another; return the same names in every call."
        )


def check_gradient(name: str, value: Tensor, source: Tensor, source_name: str, origin: Any) -> None:
    """Checks that a returned loss depends on the tensor that the function got.

    Args:
        name: The function, for the message.
        value: The returned loss.
        source: The tensor.
        source_name: Name of the tensor, for the message.
        origin: Node of the autograd graph that made the tensor.
    """
    if source.requires_grad and not _leads_to(value.grad_fn, origin):
        raise CustomFunctionError(
            f"{name} returned a loss that lost the gradient of {source_name}; do not detach or"
            f" rebuild {source_name}."
        )


def kind(value: Any) -> str:
    """Returns a short description of a value."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        text = f"tensor of shape {tuple(value.shape)} and type {dtype}"
        if value.layout is not torch.strided:
            layout = str(value.layout).removeprefix("torch.")
            text = f"{layout} {text}"
        if value.device.type != "cpu":
            text += f" on {value.device}"
        return f"a {text}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def _refuse_backward(grad: Tensor) -> None:
    """Prevents a function from freeing the graph that training needs."""
    raise RuntimeError("pg_loss.backward() belongs to training; return pg_loss instead")


def _copy(value: Any) -> Any:
    """Returns a value whose tensors are cloned, with gradients."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def _checked_loss(name: str, pg_loss: Any, source: Tensor, origin: Any) -> Tensor:
    """Returns the loss in the dtype of the source; `origin` is the autograd node of its copy."""
    _check_like(name, pg_loss, source, "pg_loss")
    if pg_loss.dtype not in (source.dtype, torch.float64):
        raise CustomFunctionError(
            f"{name} returned a pg_loss of {pg_loss.dtype}; return {source.dtype}, like the input."
        )
    check_gradient(name, pg_loss, source, "pg_loss", origin)
    loss: Tensor = pg_loss.to(source.dtype)
    wrong = torch.isfinite(source) & ~torch.isfinite(loss)
    if wrong.any():
        raise CustomFunctionError(
            f"{name} made a finite pg_loss NaN or infinite, at {int(wrong.sum())} of"
            f" {wrong.numel()} tokens; a rollout log-prob can be missing (NaN), and inf · 0 is NaN:"
            " choose with torch.where, and clamp before exp."
        )
    return loss


def _leads_to(node: Any, origin: Any) -> bool:
    """Whether the autograd graph leads from a node back to the origin."""
    # A loop, because a graph can be deeper than Python's recursion limit.
    seen = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is origin:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return False


def _check_masks(name: str, masks: Any, originals: list[Tensor]) -> None:
    """Checks that masks are 0 or 1, fit the responses, and add no token to the loss."""
    if not isinstance(masks, list | tuple) or len(masks) != len(originals):
        raise CustomFunctionError(
            f"{name} returned {kind(masks)} as masks; return a list of {len(originals)}, one per"
            " response."
        )
    for i, (mask, original) in enumerate(zip(masks, originals, strict=True)):
        _check_like(name, mask, original, f"mask {i}")
    if not masks:
        return
    # All masks at once: each comparison makes the host wait for a GPU.
    flat_mask = torch.cat([mask.detach().to(torch.float64) for mask in masks])
    flat_original = torch.cat([mask.to(torch.float64) for mask in originals])
    wrong = flat_mask[(flat_mask != 0) & (flat_mask != 1)]
    if len(wrong):
        raise CustomFunctionError(
            f"{name} returned a mask with {wrong[0].item():g} in it; masks are 0 or 1. Weights go"
            " into pg_loss."
        )
    if ((flat_mask != 0) & (flat_original == 0)).any():
        raise CustomFunctionError(
            f"{name} returned a mask with 1 where the loss mask is 0; multiply the loss masks that"
            " it gets."
        )


def _check_like(name: str, value: Any, source: Tensor, role: str) -> None:
    """Checks that a value is a dense real tensor with the shape and device of `source`."""
    is_dense = (
        isinstance(value, Tensor) and value.layout is torch.strided and not value.is_complex()
    )
    if not is_dense or value.shape != source.shape or value.device != source.device:
        raise CustomFunctionError(
            f"{name} returned {kind(value)} as {role}; return {kind(source)}."
        )
