"""User functions for the objective, in slime's signatures, held to a contract at every call.

custom_loss_function(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)
custom_pg_loss_reducer_function(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)
    -> (pg_loss -> loss)
custom_advantage_function(args, rollout_data) -> None, which sets rollout_data["advantages"]
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slime_tis.correction import TokenPassFunction, torch_token_pass
from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.tokens import ResponseTokens
from slime_tis.user_functions import calling, check_metric_names, describe, leads_to, load_function, load_hook
from slime_tis.user_functions.state import kept_state

LONGEST_NAME = 100
"""Characters of a metric's name."""
Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ObjectiveFunctions:
    """The user's functions for the objective; None where an option is not given."""

    args: Namespace
    """The program's options, which the functions get."""
    loss: Function | None = None
    reducer: Function | None = None
    advantage: Function | None = None
    token_pass: TokenPassFunction = torch_token_pass

    @classmethod
    def load(cls, config: PolicyConfig, args: Namespace) -> ObjectiveFunctions:
        """Loads the functions that the options name.

        Raises:
            CustomFunctionError: one cannot be loaded, or be called as it will be.
        """
        loss, reducer, advantage = (
            config.custom_loss_function_path,
            config.custom_pg_loss_reducer_function_path,
            config.custom_advantage_function_path,
        )
        lengths = ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss")
        return cls(
            args=args,
            loss=None if loss is None else load_hook(loss, ("args", "batch", "logits", "sum_of_sample_mean")),
            reducer=None if reducer is None else load_hook(reducer, lengths, _takes_args(reducer)),
            advantage=None if advantage is None else load_hook(advantage, ("args", "rollout_data")),
            token_pass=torch_token_pass
            if config.token_pass_path is None
            else load_hook(config.token_pass_path, ("config", "packed")),
        )


@dataclass(kw_only=True)
class CustomLoss:
    """The calls of a user's loss function in one optimizer step, micro-batch by micro-batch."""

    function: Function
    args: Namespace
    seed: int
    """Of the random numbers that the function may draw in the first micro-batch."""
    metric_names: list[list[str]] = field(default_factory=list)
    """Names of the metrics that each call returned."""

    def __call__(
        self,
        tokens: ResponseTokens,
        weights_L: Tensor,
        sequences: Sequence[Tensor],
        logits: Tensor,
        sum_of_sample_mean: Function,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Calls the function on a micro-batch.

        Args:
            tokens: of the micro-batch; `loss_mask_N` without the tokens that the correction rejects.
            weights_L: importance weights of the correction: 1 without weights, 0 where masked.
            sequences: prompt and response of each sample, int64.
            logits: [1, L, V] logits that predict the response tokens, with gradient.
            sum_of_sample_mean: the sum over samples of the mean over their accepted tokens, or over tokens.

        Returns:
            The loss, a scalar with gradient that is a sum over samples (or tokens), and sums to be reported.

        Raises:
            CustomFunctionError: the function raised, or returned what its contract does not allow.
        """
        batch = loss_batch(tokens, sequences)
        batch["rollout_is_weights"] = list(weights_L.clone().split(tokens.lengths))
        with kept_state(self.seed + len(self.metric_names)), calling(self.function):
            returned = self.function(self.args, batch, logits, sum_of_sample_mean)
        name = describe(self.function)
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
            raise CustomFunctionError(f"{name} returned {_kind(returned)}; return the tuple (loss, dict of metrics).")
        loss = checked_scalar(returned[0], logits, name, "loss", "logits")
        metrics = {self._metric_name(key): _metric(name, key, value, logits) for key, value in returned[1].items()}
        self.metric_names.append(sorted(metrics))
        last = len(self.metric_names) - 1
        compared = {0: self.metric_names[0], last: self.metric_names[last]}
        check_metric_names(self.function, compared, "micro-batch")
        return loss, metrics

    def check_ranks(self, names: Sequence[Sequence[str]]) -> None:
        """Compares the metrics that the function returned on each rank.

        Raises:
            CustomFunctionError: they have other names on another rank.
        """
        check_metric_names(self.function, dict(enumerate(names)), "rank")

    def _metric_name(self, key: Any) -> str:
        if not isinstance(key, str) or not key or not key.isprintable() or len(key) > LONGEST_NAME:
            raise CustomFunctionError(
                f"{describe(self.function)} returned a metric named {one_line(repr(key))}; name it with 1 to "
                f"{LONGEST_NAME} printable characters."
            )
        return key


def loss_batch(tokens: ResponseTokens, sequences: Sequence[Tensor]) -> dict[str, Any]:
    """Copies under slime's keys: lists with one tensor per sample, this rank's slices but for masks and sequences."""
    found: dict[str, Any] = {
        "unconcat_tokens": [sequence.clone() for sequence in sequences],
        "total_lengths": list(tokens.total_lengths),
        "response_lengths": list(tokens.response_lengths),
        "loss_masks": list(tokens.loss_mask_N.clone().split(tokens.response_lengths)),
    }
    values = {
        "rollout_log_probs": tokens.rollout_log_probs_L,
        "log_probs": tokens.old_log_probs_L,
        "ref_log_probs": tokens.ref_log_probs_L,
        "advantages": tokens.advantages_L,
    }
    for key, value in values.items():
        if value is not None:
            found[key] = list(value.clone().split(tokens.lengths))
    return found


def reduced_loss(
    functions: ObjectiveFunctions,
    tokens: ResponseTokens,
    loss_L: Tensor,
    mask_N: Tensor,
    *,
    per_token: bool,
    seed: int,
) -> Tensor:
    """The policy loss of a micro-batch, reduced by the user's function.

    Args:
        functions: with the reducer.
        tokens: of the micro-batch.
        loss_L: losses, with gradient, 0 where a token is not accepted.
        mask_N: the accepted tokens of whole responses.
        per_token: --calculate-per-token-loss.
        seed: of the random numbers that the function may draw.

    Raises:
        CustomFunctionError: the function raised, or returned what its contract does not allow.
    """
    function = functions.reducer
    assert function is not None
    masks = list(mask_N.clone().split(tokens.response_lengths))
    more = {"args": functions.args} if "args" in _keyword_names(function) else {}
    with kept_state(seed), calling(function):
        reduce = function(list(tokens.total_lengths), list(tokens.response_lengths), masks, per_token, **more)
        if not callable(reduce):
            raise TypeError(f"it returned {_kind(reduce)}, and not a function of the loss")
        returned = reduce(loss_L)
    return checked_scalar(returned, loss_L, describe(function), "reduced loss", "pg_loss")


def token_advantages(
    functions: ObjectiveFunctions,
    rollout_data: dict[str, Any],
    lengths: Sequence[int],
    mask_L: Tensor,
    *,
    seed: int,
) -> Tensor:
    """Advantages [L] of a rollout's tokens on this rank, by the user's function.

    Args:
        functions: with the function for advantages.
        rollout_data: what the function gets, and puts its advantages into.
        lengths: response tokens of each sample on this rank.
        mask_L: the loss mask of these tokens.
        seed: of the random numbers that the function may draw.

    Raises:
        CustomFunctionError: the function raised, or left what its contract does not allow.
    """
    function = functions.advantage
    assert function is not None
    with kept_state(seed), calling(function), torch.no_grad():
        function(functions.args, rollout_data)
    name, found = describe(function), rollout_data.get("advantages")
    if not isinstance(found, list | tuple) or len(found) != len(lengths):
        raise CustomFunctionError(
            f"{name} left {_kind(found)} as rollout_data['advantages']; leave a list of {len(lengths)} tensors."
        )
    for place, (value, length) in enumerate(zip(found, lengths, strict=True)):
        if not isinstance(value, Tensor) or value.shape != (length,) or not value.is_floating_point():
            raise CustomFunctionError(
                f"{name} left {_kind(value)} as the advantages of sample {place}; leave a float tensor of shape "
                f"({length},), one value per response token."
            )
    advantages_L = torch.cat([value.detach().float().to(mask_L.device) for value in found])
    wrong = int((~advantages_L.isfinite() & (mask_L > 0)).sum())
    if wrong:
        raise CustomFunctionError(f"{name} left {wrong} advantages that are NaN or infinite; leave finite numbers.")
    return advantages_L.nan_to_num(0.0, 0.0, 0.0)


def checked_scalar(value: Any, given: Tensor, name: str, what: str, source: str) -> Tensor:
    """A loss that a function returned, as a scalar.

    Args:
        value: what it returned.
        given: the tensor that the gradient has to reach.
        name: of the function.
        what: is returned, for messages.
        source: name of the tensor that was given.

    Raises:
        CustomFunctionError: it is no finite scalar, or has no gradient.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise CustomFunctionError(f"{name} returned {_kind(value)} as the {what}; return a scalar tensor.")
    if given.requires_grad and not leads_to(value.grad_fn, given.grad_fn):
        raise CustomFunctionError(
            f"{name} returned a {what} without a gradient to the {source} that it gets; do not detach or rebuild it."
        )
    if given.detach().isfinite().all() and not value.detach().isfinite():
        raise CustomFunctionError(f"{name} returned {float(value.detach())} as the {what}; return a finite number.")
    return value.reshape(()).float()


def _metric(name: str, key: str, value: Any, logits: Tensor) -> Tensor:
    scalar = value.detach() if isinstance(value, Tensor) else value
    try:
        number = float(scalar)
    except (TypeError, ValueError, RuntimeError):
        raise CustomFunctionError(
            f"{name} returned {_kind(value)} as metric {one_line(repr(key))}; return a scalar."
        ) from None
    return torch.tensor(number, dtype=torch.float64, device=logits.device)


def _takes_args(path: str) -> tuple[str, ...]:
    return ("args",) if "args" in _keyword_names(load_function(path)) else ()


def _keyword_names(function: Function) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function in C without a signature
        return []


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
