"""Builds the rollout engine and the sampling settings that the options ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.engine import RolloutEngine, WeightSource
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.options.sglang import SGLangConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_engine(
    config: RolloutConfig,
    sglang: SGLangConfig,
    hf_checkpoint: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    weights: WeightSource,
    weights_version: Callable[[], int],
    output_dir: str,
    device: torch.device | str = "cpu",
    safe_point: Callable[[], None] = lambda: None,
) -> RolloutEngine:
    """The engine that `--rollout-engine` names.

    Args:
        config: which engine, and how it rounds.
        sglang: its servers, where it is SGLang.
        hf_checkpoint: the weights that it begins with.
        tokenizer: of the checkpoint.
        weights: the policy's present weights, for servers that come back without any; a collective.
        weights_version: their version.
        output_dir: where logs of servers go.
        device: of this process.
        safe_point: called while a rollout is sampled or waited for; raises where it is to be given up.
    """
    if config.rollout_engine == "sglang":
        from slime_tis.trainer.engines.sglang.engine import SGLangEngine

        return SGLangEngine(
            sglang,
            hf_checkpoint,
            tokenizer,
            weights=weights,
            weights_version=weights_version,
            output_dir=Path(output_dir),
            device=device,
            safe_point=safe_point,
            sampling=training_sampling(config),
            allow_truncation_bias=config.allow_truncation_bias,
            rounding=config.weight_update_rounding,
        )
    from slime_tis.trainer.engines.local.engine import LocalEngine

    return LocalEngine(
        hf_checkpoint,
        tokenizer,
        precision=config.rollout_precision,
        router_bits=config.rollout_router_bits,
        device=device,
        safe_point=safe_point,
    )


def training_sampling(config: RolloutConfig) -> Sampling:
    """How the samples that are trained on are drawn."""
    return Sampling(
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        return_sampling_mask=config.truncates_sampling,
        max_response_len=config.rollout_max_response_len,
        max_context_len=config.rollout_max_context_len,
        n_samples=config.n_samples_per_prompt,
        stop_token_ids=config.rollout_stop_token_ids or (),
        return_routed_experts=config.records_routed_experts,
        return_routing_weights=config.routing_replay_weights,
        for_training=True,
    )


def evaluation_sampling(config: RolloutConfig) -> Sampling:
    """How the answers to held-out prompts are drawn."""
    return Sampling(
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        max_response_len=config.eval_max_response_len or config.rollout_max_response_len,
        max_context_len=config.rollout_max_context_len,
        n_samples=config.n_samples_per_eval_prompt,
        stop_token_ids=config.rollout_stop_token_ids or (),
    )
