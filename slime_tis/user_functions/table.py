"""Table of user functions: arguments and return types, as slime has them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Signature:
    """How the program calls a user function."""

    positional: tuple[str, ...] = ()
    """Names of positional arguments, for messages and docs."""
    keywords: tuple[str, ...] = ()
    """Keyword arguments that are always passed."""
    optional: tuple[str, ...] = ()
    """Keyword arguments that are passed if the function accepts them."""
    returns: Any = None
    is_plain: bool = True
    """Whether the function is called without `await`."""
    methods: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For a class: method → names of arguments."""


USER_FUNCTIONS: dict[str, Signature] = {
    "custom_tis_function_path": Signature(
        keywords=(
            "args",
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
        optional=(
            "log_probs",
            "advantages",
            "cp_group",
            "batch_norm_factor",
            "second_moment_limit",
            "adaptive_bounds",
        ),
        returns=tuple[Tensor, list[Tensor], dict[str, Tensor]],
    ),
    "custom_loss_function_path": Signature(
        positional=("args", "batch", "logits", "sum_of_sample_mean"),
        returns=tuple[Tensor, dict[str, Tensor]],
    ),
    "custom_pg_loss_reducer_function_path": Signature(
        positional=("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        optional=("args",),
        returns=Callable[[Tensor], Tensor],
    ),
    "custom_advantage_function_path": Signature(positional=("args", "rollout_data")),
    "custom_rm_path": Signature(
        positional=("args", "sample"), returns=float | dict[str, Any] | list[Any], is_plain=False
    ),
    "custom_generate_function_path": Signature(
        positional=("args", "sample", "sampling_params"),
        optional=("engine", "evaluation"),
        returns=Any,  # a Sample or a list of Samples
        is_plain=False,
    ),
    "rollout_function_path": Signature(
        positional=("args", "rollout_id", "data_source"),
        keywords=("evaluation",),
        returns=tuple[list[list[Any]], dict[str, float] | None],
    ),
    "data_source_path": Signature(
        positional=("args",),
        returns=list[list[Any]],
        methods={
            "get_samples": ("num_samples",),
            "add_samples": ("samples",),
            "save": ("rollout_id",),
            "load": ("rollout_id",),
            "__len__": (),
        },
    ),
    "buffer_filter_path": Signature(
        positional=("args", "rollout_id", "buffer", "num_samples"), returns=list[Any]
    ),
    "dynamic_sampling_filter_path": Signature(positional=("args", "samples"), returns=bool),
    "rollout_sample_filter_path": Signature(positional=("args", "samples")),
    "rollout_all_samples_process_path": Signature(positional=("args", "samples", "data_source")),
    "custom_reward_post_process_path": Signature(
        positional=("args", "samples"), returns=tuple[list[float], list[float]]
    ),
    "custom_rollout_log_function_path": Signature(
        positional=("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
        returns=bool | None,
    ),
    "custom_eval_rollout_log_function_path": Signature(
        positional=("rollout_id", "args", "data", "extra_metrics"), returns=bool | None
    ),
}
"""Option of the run → signature of the user function."""
