"""User functions for correction, loss, loss reduction and advantages, in slime's signatures."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from slime_tis.correction import GlobalBatch, is_log_prob
from slime_tis.errors import CustomFunctionError
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.response_tokens import ResponseTokens
from slime_tis.user_functions import accepted, call, calling, describe, load_user_function
from slime_tis.user_functions.calling import isolated_global_state
from slime_tis.user_functions.tensors import (
    call_custom_tis,
    check_gradient,
    check_metric_names,
    check_metrics,
    kind,
)

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ObjectiveFunctions:
    """The user's functions for the objective; None for unset options."""

    args: Namespace = field(default_factory=Namespace)
    """Options of the program."""
    loss: Function | None = None
    reducer: Function | None = None
    advantage: Function | None = None

    @classmethod
    def load(cls, config: PolicyConfig, args: Namespace) -> Self:
        """Loads the functions of the options.

        Raises:
            CustomFunctionError: A function cannot be loaded or called.
        """

        def load(option: str) -> Any:
            path = getattr(config, option)
            if path is None:
                return None
            return load_user_function(option, path)

        return cls(
            args=args,
            loss=load("custom_loss_function_path"),
            reducer=load("custom_pg_loss_reducer_function_path"),
            advantage=load("custom_advantage_function_path"),
        )


@dataclass(kw_only=True)
class CustomTis:
    """The calls of a user's function in one optimizer step, micro-batch by micro-batch."""

    function: Function
    args: Namespace
    """Options of the program."""
    seed: int
    """Seed of the first micro-batch."""
    context_group: ProcessGroup | None = None
    metric_names: list[list[str]] = field(default_factory=list)
    """Metric names per call."""

    def __call__(
        self,
        tokens: ResponseTokens,
        *,
        loss_L: Tensor,
        log_probs_L: Tensor,
        train_log_probs_L: Tensor,
        global_batch: GlobalBatch,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Calls the function for one micro-batch.

        Args:
            tokens: Tokens of the micro-batch.
            loss_L: Loss per token, with gradient.
            log_probs_L: log π_θ.
            train_log_probs_L: log π_train, the numerator of the ratio.
            global_batch: Statistics of the global batch.

        Returns:
            The function's loss [L], accepted tokens bool [L], numbers of accepted tokens per
            sequence [S], and metrics [L].

        Raises:
            CustomFunctionError: The function returns invalid values.
        """
        assert tokens.advantages_L is not None
        lengths = tokens.lengths
        # slime's functions multiply by the mask, which a NaN survives: slime has log-prob 0 at
        # tokens that were not sampled.
        missing_L = (tokens.loss_mask_L <= 0) & ~is_log_prob(tokens.rollout_log_probs_L)
        rollout_log_probs_L = tokens.rollout_log_probs_L.masked_fill(missing_L, 0.0)
        new_loss_L, masks, metrics = call_custom_tis(
            self.function,
            self.args,
            seed=self.seed + len(self.metric_names),
            pg_loss=loss_L,
            train_log_probs=list(train_log_probs_L.split(lengths)),
            rollout_log_probs=list(rollout_log_probs_L.split(lengths)),
            loss_masks=list(tokens.loss_mask_N.split(tokens.response_lengths)),
            total_lengths=list(tokens.total_lengths),
            response_lengths=list(tokens.response_lengths),
            log_probs=list(log_probs_L.detach().split(lengths)),
            advantages=list(tokens.advantages_L.split(lengths)),
            cp_group=self.context_group,
            batch_norm_factor=global_batch.batch_norm_factor,
            second_moment_limit=global_batch.second_moment_limit,
            adaptive_bounds=global_batch.adaptive_bounds,
        )
        self.metric_names.append(sorted(metrics))
        check_metric_names(
            self.function, [self.metric_names[0], self.metric_names[-1]], "micro-batch"
        )
        # The masks cover complete responses, so counting needs no collective.
        accepted_S = torch.stack([(mask > 0).sum() for mask in masks]).double()
        mask_L = torch.cat(tokens.slices.slice_list(masks)) > 0
        return new_loss_L, mask_L, accepted_S, metrics


@dataclass(kw_only=True)
class CustomLoss:
    """The calls of a user's loss function in one optimizer step, micro-batch by micro-batch."""

    function: Function
    args: Namespace
    seed: int
    """Seed of the first micro-batch."""
    metric_names: list[list[str]] = field(default_factory=list)
    """Metric names per call."""

    def __call__(
        self,
        tokens: ResponseTokens,
        weights_L: Tensor,
        sequences: Sequence[Tensor],
        logits: Tensor,
        sum_of_sample_mean: Function,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Calls the function for one micro-batch.

        Args:
            tokens: Tokens of the micro-batch; `loss_mask_N` excludes tokens that the correction
                rejects.
            weights_L: Importance weights of the correction: 1 without weights, 0 at masked tokens.
            sequences: Tokens of prompt and response per sample, int64.
            logits: [1, L, V] logits that predict the response tokens, with gradient.
            sum_of_sample_mean: Reduces [L]: the sum of samples' means over accepted tokens, or the
                sum over accepted tokens.

        Returns:
            The loss, a scalar that is a sum over samples (or tokens), and sums for metrics.

        Raises:
            CustomFunctionError: The function returns invalid values.
        """
        batch = loss_batch(tokens, sequences)
        # Copies, because a user's function may change its arguments in place.
        batch["rollout_is_weights"] = list(weights_L.clone().split(tokens.lengths))
        seed = self.seed + len(self.metric_names)
        returned = call(self.function, self.args, batch, logits, sum_of_sample_mean, seed=seed)
        name = describe(self.function)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise CustomFunctionError(
                f"{name} returned {kind(returned)}; return the tuple (loss, dict of metrics)."
            )
        loss = checked_scalar(returned[0], logits, name, "loss", "logits")
        check_metrics(name, returned[1])
        metrics = {}
        for key, value in returned[1].items():
            if isinstance(value, Tensor):
                value = value.detach()
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError):
                message = f"{name} returned {kind(value)} as metric {key!r}; return a scalar."
                raise CustomFunctionError(message) from None
            metrics[key] = torch.tensor(number, dtype=torch.float64, device=logits.device)
        self.metric_names.append(sorted(metrics))
        check_metric_names(
            self.function, [self.metric_names[0], self.metric_names[-1]], "micro-batch"
        )
        return loss, metrics


def loss_batch(tokens: ResponseTokens, sequences: Sequence[Tensor]) -> dict[str, Any]:
    """Returns copies under slime's keys, one tensor per sample.

    Masks and sequences are complete; other values are this rank's slices.
    """
    batch: dict[str, Any] = {
        "unconcat_tokens": [sequence.clone() for sequence in sequences],
        "total_lengths": list(tokens.total_lengths),
        "response_lengths": list(tokens.response_lengths),
        "loss_masks": list(tokens.loss_mask_N.clone().split(tokens.response_lengths)),
    }
    values = {
        "rollout_log_probs": tokens.rollout_log_probs_L,
        "log_probs": tokens.old_log_probs_L,
        "entropy": tokens.old_entropy_L,
        "ref_log_probs": tokens.ref_log_probs_L,
        "advantages": tokens.advantages_L,
    }
    for key, value in values.items():
        if value is not None:
            batch[key] = list(value.clone().split(tokens.lengths))
    return batch


def reduced_loss(
    functions: ObjectiveFunctions,
    tokens: ResponseTokens,
    loss_L: Tensor,
    mask_N: Tensor,
    *,
    per_token: bool,
    seed: int,
) -> Tensor:
    """Returns the policy loss of a micro-batch, reduced by the user's function.

    Args:
        functions: The user's functions.
        tokens: Tokens of the micro-batch.
        loss_L: Loss per token with gradient, 0 at rejected tokens.
        mask_N: Accepted tokens of complete responses.
        per_token: Whether the trainer divides by tokens instead of sequences.
        seed: Seed of the random numbers that the function may draw.
    """
    function = functions.reducer
    assert function is not None
    masks = list(mask_N.clone().split(tokens.response_lengths))
    # slime's reducers have no parameter `args`; the reducers of this library read options.
    options = {}
    if accepted(function, ("args",)):
        options["args"] = functions.args
    total_lengths = list(tokens.total_lengths)
    response_lengths = list(tokens.response_lengths)
    with isolated_global_state(seed), calling(function):
        reducer = function(total_lengths, response_lengths, masks, per_token, **options)
        loss = reducer(loss_L)
    return checked_scalar(loss, loss_L, describe(function), "reduced loss", "pg_loss")


def token_advantages(
    functions: ObjectiveFunctions,
    rollout_data: dict[str, Any],
    lengths: Sequence[int],
    mask_L: Tensor,
    *,
    seed: int,
) -> Tensor:
    """Returns the advantages [L] that the user's function sets in `rollout_data`.

    Args:
        functions: The user's functions.
        rollout_data: Data of a rollout under slime's keys.
        lengths: Response tokens on this rank per sample.
        mask_L: Nonzero at trained tokens.
        seed: Seed of the random numbers that the function may draw.
    """
    function = functions.advantage
    assert function is not None
    with torch.no_grad():
        call(function, functions.args, rollout_data, seed=seed)
    name = describe(function)
    values = rollout_data.get("advantages")
    if not isinstance(values, list | tuple) or len(values) != len(lengths):
        raise CustomFunctionError(
            f"{name} left {kind(values)} as rollout_data['advantages']; leave a list of"
            f" {len(lengths)} tensors."
        )
    for index, (value, length) in enumerate(zip(values, lengths, strict=True)):
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if not is_float or value.shape != (length,):
            raise CustomFunctionError(
                f"{name} left {kind(value)} as the advantages of sample {index}; leave a float"
                f" tensor of shape ({length},), one value per response token."
            )
    advantages_L = torch.cat([value.detach().float().to(mask_L.device) for value in values])
    wrong = int((~advantages_L.isfinite() & (mask_L > 0)).sum())
    if wrong:
        raise CustomFunctionError(
            f"{name} left {wrong} advantages that are NaN or infinite; leave finite numbers."
        )
    # Only masked tokens are left, and 0 · NaN in the loss is NaN.
    return advantages_L.nan_to_num(0.0, 0.0, 0.0)


def checked_scalar(value: Any, source: Tensor, name: str, role: str, source_name: str) -> Tensor:
    """Returns a function's loss as a scalar.

    Raises:
        CustomFunctionError: The loss is not finite or has no gradient.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise CustomFunctionError(
            f"{name} returned {kind(value)} as the {role}; return a scalar tensor."
        )
    check_gradient(name, value, source, source_name, source.grad_fn)
    # If the inputs are not finite already, the learner's check of the gradient reports it.
    if source.detach().isfinite().all() and not value.detach().isfinite():
        raise CustomFunctionError(
            f"{name} returned {float(value.detach())} as the {role}; return a finite number."
        )
    return value.reshape(()).float()
