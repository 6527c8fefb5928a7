"""The default token budget of a micro-batch, which depends on free memory.

On a CPU, this module also trims the heap between passes.
"""

import ctypes
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from slime_tis.trainer.megatron.model_config import ModelConfig

BUDGET_SHARE = 0.5
"""Share of the free memory for a micro-batch: the rest is for caches, buckets and
fragmentation."""
CGROUP = Path("/sys/fs/cgroup")
MIN_TRIMMED_BYTES = 256 * 2**20
"""Less freed memory stays in the heap, which saves the time to allocate it again."""
NO_LIMIT = 2**63
"""Bytes that are free if the container has no limit."""


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """Largest number of tokens of a micro-batch on one rank.

    A longer sequence is the only one in its micro-batch.
    """

    tokens: int
    reason: str | None = None

    def __str__(self) -> str:
        return (
            f"at most {self.tokens} tokens on a rank ({self.reason}); --micro-batch-size N, or"
            " --use-dynamic-batch-size --max-tokens-per-gpu N, sets another size"
        )

    @classmethod
    def that_fits(cls, free: int, per_token: int) -> "TokenBudget":
        """Returns the budget for these numbers of bytes.

        A power of two, so that it rarely differs between repeated runs.
        """
        tokens = max(int(BUDGET_SHARE * free) // per_token, 1)
        return cls(
            tokens=1 << (tokens.bit_length() - 1),
            reason=f"{free / 2**30:.1f} GiB free, {per_token / 2**20:.2f} MiB per token",
        )


def free_memory(device: torch.device, processes: int) -> int:
    """Returns free bytes of this process's GPU, or this process's share of free main memory.

    `processes` is the number of processes on the machine.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(psutil.virtual_memory().available, _free_in_container()) // processes


def _free_in_container() -> int:
    """Returns free bytes under the limit of the control group; the file cache counts as free."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = (CGROUP / "memory.stat").read_text()
    except OSError:
        return NO_LIMIT
    if limit == "max":
        return NO_LIMIT
    file_cache = re.search(r"^inactive_file (\d+)$", statistics, re.MULTILINE)
    if file_cache is not None:
        used -= int(file_cache[1])
    return max(int(limit) - used, 0)


def bytes_per_token(config: ModelConfig, logits: int, chunk_size: int) -> int:
    """Returns bytes per token of a micro-batch at the peak of a training step.

    * The layers save for autograd what `_saved_values` counts. With pipeline parallelism the first
      stage holds one micro-batch per stage, hence all layers' activations.
    * Log-probs need the last hidden state, a copy in fp32 and its gradient in fp32. The output
      layer has them for all tokens, also under sequence parallelism. Their logits exist in small
      tiles.
    * Requested logits are one saved fp32 tensor, one that the loss gets, and two temporaries.
    * Every token is counted as a response token.

    Args:
        config: The model's configuration, with the layers and the micro-batches
            (`pipeline_model_parallel_size`) that a pipeline stage holds at once.
        logits: 0 or, if logits are requested, the size of the vocabulary.
        chunk_size: `--log-probs-chunk-size`.
    """
    size = config.params_dtype.itemsize
    log_probs = (size + 8) * config.hidden_size  # hidden state, its fp32 copy, its fp32 gradient
    bytes_per_logit = 8 if size == 4 else 8 + size
    if chunk_size == -1:  # both fp32 temporaries have all rows
        bytes_per_logit += 8
    logits_bytes = bytes_per_logit * logits / config.tensor_model_parallel_size
    return int(size * _saved_values(config) + log_probs + logits_bytes)


def _saved_values(config: ModelConfig) -> float:
    """Returns values per token that the layers keep for the backward pass, over all micro-batches.

    With full recomputation, a layer (`block`), or a group of layers (`uniform`), keeps its input.
    One layer or group at a time is computed again, and then keeps everything. A block is the first
    layers of a stage, which are computed again when the layers after them are finished.
    """
    layers: int = config.num_layers
    per_layer = _values_of_a_layer(config)
    if config.recompute_granularity != "full":
        return layers * per_layer
    inputs = _hidden_values(config)
    count: int = min(config.recompute_num_layers, layers)
    if config.recompute_method == "uniform":
        return math.ceil(layers / count) * inputs + count * per_layer
    micro_batches: int = config.pipeline_model_parallel_size
    recomputed = min(count * micro_batches, layers)
    complete = max(layers - recomputed, 1)
    return recomputed * inputs + complete * per_layer


def _values_of_a_layer(config: ModelConfig) -> float:
    """Returns values per token that one layer saves for autograd.

    * Inputs and outputs of both norms: 4 hidden vectors. Inputs of norms of outputs: 2 more.
    * Queries, keys and values repeated for them, and the output of the attention twice: 5 vectors
      of all queries. Keys and values: 2 vectors of all groups. The attention in plain torch repeats
      the keys and values of all context-parallel ranks.
    * With norms of queries and keys, whose inputs are views of queries, keys and values as they
      leave their layer: these too.
    * Instead of these, with latent attention `_latent_values`, and the latent vectors.
    * With output gates: 3 vectors of all queries. If a gated delta net saves more, its values, in
      float32 and for the tokens of all context-parallel ranks.
    * Gate and up of the MLP: 2 inner vectors, 4 for an expert, 5 with transformer-engine.
    * The inputs of the experts, sorted by expert: one hidden vector for each chosen expert.
    """
    tensor: int = config.tensor_model_parallel_size
    queries: int = config.num_attention_heads * config.kv_channels
    groups: int = config.num_query_groups * config.kv_channels
    repeated = 2
    inner_vectors = 5
    if config.use_te_activation_func:  # False with transformer-engine's layers
        repeated = 2 * config.context_parallel_size
        inner_vectors = 2
    attention = (3 + repeated) * queries + 2 * groups
    latents = 0.0
    if config.latent_query_channels is not None:
        attention = _latent_values(config)
        latents = config.latent_width * _hidden_values(config) / config.hidden_size
    if config.qk_layernorm or config.norms_all_heads:
        attention += queries + 2 * groups
    if config.attention_output_gate:
        attention += 3 * queries
    delta_net = config.delta_net_values * config.context_parallel_size * 4
    attention = max(attention, delta_net // config.params_dtype.itemsize)
    inner = inner_vectors * config.ffn_hidden_size
    expert_inputs: float = 0
    if config.num_moe_experts is not None:
        sparse = config.moe_router_topk * config.moe_ffn_hidden_size
        sparse += config.moe_shared_expert_intermediate_size or 0
        has_dense_layers = 0 in config.moe_layer_freq
        inner = max(inner if has_dense_layers else 0, 4 * sparse)
        expert_tensor = config.expert_tensor_parallel_size or tensor
        expert_inputs = config.moe_router_topk * config.hidden_size * expert_tensor / tensor
    norms = 6 if config.norms_outputs else 4
    values: float = norms * _hidden_values(config) + (attention + inner) / tensor + expert_inputs
    values += latents
    return values


def _latent_values(config: ModelConfig) -> int:
    """Returns values per token that latent attention saves, over all tensor-parallel ranks.

    Queries, keys and values of all heads, and the output twice. The keys and values are those of
    all context-parallel ranks.
    """
    assert config.latent_query_channels is not None
    ranks: int = config.context_parallel_size
    queries: int = config.num_attention_heads * config.latent_query_channels
    values: int = config.num_attention_heads * config.kv_channels
    return (1 + ranks) * queries + (2 + ranks) * values


def _hidden_values(config: ModelConfig) -> float:
    """Returns values per token of a hidden state on one rank."""
    hidden: float = config.hidden_size
    if config.sequence_parallel:  # which divides the tokens
        hidden /= config.tensor_model_parallel_size
    return hidden


def trim_before_gradient(
    token_bytes: int, _module: torch.nn.Module, _inputs: Any, output: Tensor
) -> None:
    """Forward hook of the embedding: trims the heap before its weight's gradient is allocated."""
    if output.requires_grad:
        output.register_hook(lambda grad: trim_heap(grad.device, token_bytes * len(grad)))


def trim_heap(device: torch.device, freed: int) -> None:
    """Returns about `freed` bytes to the system, if glibc manages them and they are worth the time.

    glibc keeps freed blocks of less than 32 MiB, which rarely fit the next micro-batch, whose
    tensors have other sizes: resident memory was 1.5 times the used memory.
    """
    if device.type != "cpu" or freed <= MIN_TRIMMED_BYTES:
        return
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """Returns the C library if it is glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return None
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc
