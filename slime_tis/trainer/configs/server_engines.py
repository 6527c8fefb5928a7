"""The engines that sample on servers, by their name in `--rollout-engine`."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerEngineEntry:
    """One engine whose servers answer over HTTP."""

    title: str
    """The engine's name in messages and in --help."""
    api: str
    """Class of its HTTP API, a `slime_tis.trainer.engines.servers.api.ServerApi`."""
    defaults: Mapping[str, object]
    """Defaults of options of `ServerConfig` that differ from engine to engine."""
    absent: tuple[str, ...] = ()
    """Options of `ServerConfig` that the engine does not have."""
    tensor_parallel: str
    """Server flag of the number of GPUs that share a layer, without hyphens."""
    max_adapter_rank: int | None = None
    """Largest rank of a LoRA adapter that the servers load; None if there is no limit."""
    own_flags: Mapping[str, str]
    """Server flags that the run sets itself, and what to do instead."""


SERVER_ENGINES = {
    "sglang": ServerEngineEntry(
        title="SGLang",
        api="slime_tis.trainer.engines.sglang.sglang_api:SGLangApi",
        defaults={
            "api_key_env": "SGLANG_API_KEY",
            "admin_api_key_env": "SGLANG_ADMIN_API_KEY",
        },
        tensor_parallel="tp-size",
        own_flags={
            "api-key": "put the key into the environment variable that --sglang-api-key-env names",
            "admin-api-key": (
                "put the key into the environment variable that --sglang-admin-api-key-env names"
            ),
            "model-path": "servers get the --hf-checkpoint",
            "host": "servers listen only on this machine",
            "port": "choose the first of the ports with --sglang-base-port",
        },
    ),
    "vllm": ServerEngineEntry(
        title="vLLM",
        api="slime_tis.trainer.engines.vllm.vllm_api:VllmApi",
        defaults={"api_key_env": "VLLM_API_KEY", "weight_sync": "disk"},
        absent=("admin_api_key_env",),
        tensor_parallel="tensor-parallel-size",
        max_adapter_rank=512,
        own_flags={
            "api-key": "put the key into the environment variable that --vllm-api-key-env names",
            "model": "servers get the --hf-checkpoint",
            "host": "servers listen only on this machine",
            "port": "choose the first of the ports with --vllm-base-port",
            "logprobs-mode": "training needs processed log-probs",
            "enable-scale-out": "servers get it always",
        },
    ),
}
"""The table of server engines; CONTRIBUTING has the recipe for another one."""
