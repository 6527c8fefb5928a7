"""The contract of a custom TIS function, which is slime's, held before the first call and at every call.

fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs)
    -> (pg_loss, modified_response_masks, metrics)
"""

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.user_functions.loading import load_function
from slime_tis.user_functions.messages import calling, check_plain, check_signature, describe
from slime_tis.user_functions.state import kept_state

TisResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]

ARGUMENTS = ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
"""What slime passes by keyword, besides `args`."""
MORE_ARGUMENTS = (
    *("log_probs", "advantages", "cp_group"),
    *("batch_norm_factor", "second_moment_limit", "adaptive_bounds"),
)
"""What this program passes besides, to functions that take it."""

OF_THE_GLOBAL_BATCH = {
    "second_moment_limit": ("rs_second_moment_bound",),
    "adaptive_bounds": ("rs_z_score", "rs_target_fraction"),
}
"""Arguments without which a function, which sees a micro-batch, cannot follow these options."""

LONGEST_NAME = 100
"""Characters of a metric's name."""


def load_custom_tis(path: str, args: Namespace) -> Callable[..., Any]:
    """Loads a custom TIS function and checks all that can be checked before there is anything to call it with.

    Args:
        path: `package.module.function` or `path/file.py:function`.
        args: The program's options. Where the function's module has a function `check_args`, it is called with them,
            and refuses options that the function does not follow by raising ValueError.

    Raises:
        CustomFunctionError: if it cannot be loaded or called as the contract says, or refuses the options.
    """
    function = load_function(path)
    check_plain(function)
    check_signature(function, *_call_of(function, ARGUMENTS))
    _check_global_batch(function, args)
    check_args = getattr(inspect.unwrap(function), "__globals__", {}).get("check_args")
    if callable(check_args):
        try:
            check_args(args)
        except ValueError as error:
            raise CustomFunctionError(f"--custom-tis-function-path {path}: {error}") from error
    return function


def _check_global_batch(function: Callable[..., Any], args: Namespace) -> None:
    """Refuses options of the global batch where the function does not name the argument that it would need."""
    try:
        parameters = set(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        parameters = set()
    for argument, options in OF_THE_GLOBAL_BATCH.items():
        for option in options:
            if argument not in parameters and getattr(args, option, None) is not None:
                raise CustomFunctionError(
                    f"--{option.replace('_', '-')} is {getattr(args, option)} and goes by the global batch, which "
                    f"{describe(function)} does not see: it takes no argument {argument}. Remove one of the two."
                )


def call_custom_tis(function: Callable[..., Any], args: Any, *, seed: int = 0, **kwargs: Any) -> TisResult:
    """Calls a custom TIS function and checks what it returns.

    The function gets copies of all tensors, so in-place changes have no effect except
    through what it returns; random numbers follow from `seed`, and torch's global settings are put back.

    Args:
        function: In slime's contract.
        args: The program's options, handed on as they are.
        seed: Of the random numbers that the function may draw.
        kwargs: pg_loss [N] flat over this rank's tokens, train_log_probs and rollout_log_probs (lists of its
            slices), loss_masks (whole responses), total_lengths, response_lengths, and what else is known.

    Returns:
        pg_loss [N] in the dtype that was given, whole-response masks, and metrics [N] each.

    Raises:
        CustomFunctionError: naming the function, its file and line, and what it raised or what is wrong with its
            return value.
    """
    copies = {name: _copy(value) for name, value in kwargs.items()}
    origin = copies["pg_loss"].grad_fn
    positional, keywords = _call_of(function, tuple(kwargs))
    hook = copies["pg_loss"].register_hook(_refuse_backward) if origin is not None else None
    with kept_state(seed), calling(function):
        result = function(
            *([args] if positional else []), **{name: args if name == "args" else copies[name] for name in keywords}
        )
    if hook is not None:
        hook.remove()
    name = describe(function)
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise CustomFunctionError(
            f"{name} returned {_kind(result)}; return the tuple (pg_loss, modified_response_masks, metrics)."
        )
    pg_loss, masks, metrics = result
    pg_loss = _checked_loss(name, pg_loss, kwargs["pg_loss"], origin)
    _check_masks(name, masks, kwargs["loss_masks"])
    _check_metrics(name, metrics, kwargs["pg_loss"])
    return pg_loss, list(masks), dict(metrics)


def check_metric_names(function: Callable[..., Any], names: Mapping[int, Sequence[str]], place: str) -> None:
    """Checks that a custom function returned the same metrics everywhere, since they are added up.

    Args:
        function: The custom function, for the message.
        names: The names that calls returned, sorted, by the number of the call.
        place: What the calls differ in: "micro-batch" or "rank".

    Raises:
        CustomFunctionError: naming two calls that differ, and in what.
    """
    first = min(names)
    for number, found in names.items():
        if list(found) != list(names[first]):
            differing = sorted(set(found) ^ set(names[first]))
            raise CustomFunctionError(
                f"{describe(function)} returned metric {one_line(repr(differing[0]))} for one {place} and not for "
                f"another ({place} {first} and {place} {number}); return the same names in every call, 0 where there "
                "is nothing."
            )


def _call_of(function: Callable[..., Any], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Positional and keyword arguments of a call: `args` as slime passes it, and of ours what the function takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):
        return ["args"], list(names)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    keywords = [name for name in names if takes_any or name in parameters or name not in MORE_ARGUMENTS]
    by_keyword = parameters.get("args")
    if by_keyword is not None and by_keyword.kind is inspect.Parameter.KEYWORD_ONLY:
        return [], ["args", *keywords]
    return ["args"], keywords


def _refuse_backward(grad: Tensor) -> None:
    """Keeps a function from freeing the graph that training needs."""
    raise RuntimeError("pg_loss.backward() belongs to training; return pg_loss instead")


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _checked_loss(name: str, pg_loss: Any, given: Tensor, origin: Any) -> Tensor:
    """The loss in the dtype that was given; `origin` is the node of the autograd graph that made the copy."""
    if not _like(pg_loss, given):
        raise CustomFunctionError(
            f"{name} returned {_kind(pg_loss)} as pg_loss; return {_kind(given)}, one value per token as it was given."
        )
    if pg_loss.dtype not in (given.dtype, torch.float64):
        raise CustomFunctionError(
            f"{name} returned a pg_loss of {pg_loss.dtype}; return {given.dtype}, as it was given: what was rounded "
            f"to another type cannot be made good."
        )
    if given.requires_grad and not leads_to(pg_loss.grad_fn, origin):
        raise CustomFunctionError(
            f"{name} lost the gradient of pg_loss; multiply the pg_loss that it gets with detached weights, and do not "
            f"detach or rebuild it."
        )
    loss: Tensor = pg_loss.to(given.dtype)
    wrong = torch.isfinite(given) & ~torch.isfinite(loss)
    if wrong.any():
        raise CustomFunctionError(
            f"{name} made a finite pg_loss NaN or infinite, at {int(wrong.sum())} of {wrong.numel()} tokens; a rollout "
            f"log-prob can be missing (NaN), and inf · 0 is NaN: choose with torch.where, and clamp before exp."
        )
    return loss


def leads_to(node: Any, origin: Any) -> bool:
    """Whether the autograd graph from a node back reaches the origin."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is origin:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return False


def _check_masks(name: str, masks: Any, given: list[Tensor]) -> None:
    if not isinstance(masks, list | tuple) or len(masks) != len(given):
        raise CustomFunctionError(
            f"{name} returned {_kind(masks)} as masks; return a list of {len(given)}, one per response."
        )
    for i, (mask, original) in enumerate(zip(masks, given, strict=True)):
        if not _like(mask, original):
            raise CustomFunctionError(
                f"{name} returned {_kind(mask)} as mask {i}; return the whole response, {_kind(original)}."
            )
    if not masks:
        return
    flat, original = (torch.cat([mask.detach().to(torch.float64) for mask in some]) for some in (masks, given))
    wrong = flat[(flat != 0) & (flat != 1)]
    if len(wrong):
        raise CustomFunctionError(
            f"{name} returned a mask with {wrong[0].item():g} in it; a mask is 1 at tokens that are trained on "
            f"and 0 at others. Weights go into pg_loss."
        )
    if ((flat != 0) & (original == 0)).any():
        raise CustomFunctionError(
            f"{name} returned a mask with 1 where the loss mask is 0; it can exclude tokens, but not add "
            f"prompts, padding or tool output. Multiply the loss masks that it gets."
        )


def _check_metrics(name: str, metrics: Any, pg_loss: Tensor) -> None:
    if not isinstance(metrics, dict):
        raise CustomFunctionError(f"{name} returned {_kind(metrics)} as metrics; return a dict of names to tensors.")
    for key, value in metrics.items():
        if not isinstance(key, str) or not key or not key.isprintable() or len(key) > LONGEST_NAME:
            raise CustomFunctionError(
                f"{name} returned a metric named {one_line(repr(key))}; name it with 1 to {LONGEST_NAME} printable "
                f"characters."
            )
        if not _like(value, pg_loss):
            raise CustomFunctionError(
                f"{name} returned {_kind(value)} as metric {one_line(repr(key))}; return a tensor of shape "
                f"{tuple(pg_loss.shape)}, one value per token."
            )


def _like(value: Any, given: Tensor) -> bool:
    """Whether a value is a dense real tensor with the shape and device of another."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_complex():
        return False
    return value.shape == given.shape and value.device == given.device


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        layout = "" if value.layout is torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"a{layout} tensor of shape {tuple(value.shape)}{device}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
