"""megatron-core's Adam, its learning-rate schedule, and a step that is skipped if the gradient is not finite."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime_tis.trainer.options.megatron import MegatronConfig


def build_optimizer(config: MegatronConfig, model: DistributedDataParallel) -> Any:
    """Adam for the model's parameters."""
    options = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.bf16,
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
    )
    return get_megatron_optimizer(options, [model], use_gloo_process_groups=False)


def build_scheduler(config: MegatronConfig, optimizer: Any, total_steps: int) -> OptimizerParamScheduler:
    """Warm-up and decay of the learning rate, by default over `total_steps`."""
    decay_steps = max(config.lr_decay_iters or total_steps, config.lr_warmup_iters + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_iters,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def step_if_finite(optimizer: Any, scheduler: OptimizerParamScheduler, max_norm: float) -> float:
    """Clips the gradient and steps, unless the gradient's norm is not finite; returns the norm before clipping.

    These are the parts of megatron-core's `step`, with a check of the norm between them. The norm is reduced over all
    ranks with different gradients, so that all ranks decide identically, and clipping needs it on the host anyway.
    """
    found_inf = optimizer.prepare_grads()
    norm = math.nan if found_inf else float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm
    scheduler.step(1)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = [] if part.is_stub_optimizer else part.get_parameters()
        if parameters and max_norm > 0:
            clip_grad_by_total_norm_fp32(parameters, max_norm, norm)
    optimizer.step_with_ready_grads()
    return norm
