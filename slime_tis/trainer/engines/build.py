"""Builds the rollout engine and the sampling settings that the options ask for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from slime_tis.trainer.configs.eval_config import EvalSet
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.configs.servers import ServerConfig
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.rollout_engine import EngineHost, RolloutEngine


def build_engine(
    config: RolloutConfig,
    servers: Mapping[str, ServerConfig],
    tokenizer: PreTrainedTokenizerBase,
    host: EngineHost,
) -> RolloutEngine:
    """Builds the engine that `--rollout-engine` names."""
    # Imported here, because each engine has dependencies that the other does not need.
    if config.rollout_engine != "local":
        from slime_tis.trainer.engines.servers.server_engine import ServerEngine
        from slime_tis.trainer.engines.servers.server_group import ServerSettings

        settings = ServerSettings(
            config=servers[config.rollout_engine],
            sampling=training_sampling(config),
            allow_truncation_bias=config.allow_truncation_bias,
            rounding=config.weight_update_rounding,
        )
        return ServerEngine(settings, tokenizer, host)
    from slime_tis.trainer.engines.local.local_engine import LocalEngine

    return LocalEngine(
        host.hf_checkpoint,
        tokenizer,
        precision=config.rollout_precision,
        emulation_dtype=host.dtype,
        router_bits=config.rollout_router_bits,
        kernels=host.kernels,
        lora_scale=None if host.adapter is None else host.adapter.scale,
        device=host.device,
        check_interrupts=host.check_interrupts,
    )


def training_sampling(config: RolloutConfig) -> Sampling:
    """Returns the settings of training samples."""
    return Sampling(
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        max_response_len=config.rollout_max_response_len,
        max_context_len=config.rollout_max_context_len,
        stop_token_ids=config.rollout_stop_token_ids or (),
        stop=config.rollout_stop or (),
        n_samples=config.n_samples_per_prompt,
        return_sampling_mask=config.truncates_sampling,
        return_routed_experts=config.records_routed_experts,
        return_routing_weights=config.routing_replay_weights,
        for_training=True,
    )


def evaluation_sampling(config: RolloutConfig, held_out: EvalSet) -> Sampling:
    """Returns the settings of samples of a held-out set; its own values replace the run's."""
    sampling = Sampling(
        n_samples=config.n_samples_per_eval_prompt,
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        top_k=config.eval_top_k,
        max_response_len=config.eval_max_response_len or config.rollout_max_response_len,
        stop_token_ids=config.rollout_stop_token_ids or (),
        stop=config.rollout_stop or (),
        max_context_len=config.rollout_max_context_len,
    )
    own: dict[str, Any] = {"n_samples": held_out.n_samples_per_eval_prompt}
    for name in ("temperature", "top_p", "top_k", "max_response_len", "stop_token_ids", "stop"):
        own[name] = getattr(held_out, name)
    changes = {name: value for name, value in own.items() if value is not None}
    return replace(sampling, **changes)
