"""The token budget of a micro-batch where none is given: the memory that is free, over what a token takes of it.

Also gives memory back to the system between micro-batches, on a CPU.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

SHARE = 0.5
"""Of the free memory that a micro-batch may take: the rest is for caches of sampling, buckets and fragmentation."""
CGROUP = Path("/sys/fs/cgroup")
KEPT = 256 * 2**20
"""Bytes of freed memory that the C library may keep, which saves the time to take them from the system again."""


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """How many tokens a micro-batch may have on one rank."""

    tokens: int
    """A sequence that has more is a micro-batch of its own."""
    reason: str | None = None
    """How it was found; None where the options give it."""

    def __str__(self) -> str:
        """For the user."""
        return (
            f"at most {self.tokens} tokens on a rank ({self.reason}); "
            "--micro-batch-size N, or --use-dynamic-batch-size --max-tokens-per-gpu N, sets another size"
        )

    @classmethod
    def that_fits(cls, free: int, per_token: int) -> "TokenBudget":
        """The budget for so many free bytes, at so many for each token.

        It is a power of two, so that two runs of the same command, which never find the same memory free to the byte,
        seldom differ in their micro-batches.
        """
        tokens = max(int(SHARE * free) // per_token, 1)
        return cls(
            tokens=1 << (tokens.bit_length() - 1),
            reason=f"{free / 2**30:.1f} GiB free, {per_token / 2**20:.2f} MiB per token",
        )


def free_memory(device: torch.device, processes: int) -> int:
    """Bytes that this process may still take: of its GPU, or its share of the machine's or its container's memory.

    Args:
        device: that tensors are on.
        processes: of the job on this machine, which share its memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(psutil.virtual_memory().available, _left_in_the_container()) // processes


def bytes_per_token(config: TransformerConfig, logits: int, chunk_size: int) -> int:
    """Bytes that a token of a micro-batch takes at the peak of a training step: activations, and logits.

    Per layer what autograd saves: inputs and outputs of both norms (4 hidden vectors); queries, keys and values
    repeated for them, and the output of the attention twice (5 vectors of all queries), fewer with shared prompts; keys
    and values (2); gate and up of the MLP (2 inner vectors; 4 with an expert's product, before and after its
    probability; 5 with transformer-engine, whose MLP saves silu(gate), a copy of up and the product, too). With
    pipeline parallelism the first stage holds as many micro-batches as there are stages: again all layers of one.
    Log-probs take the hidden state that the output layer gets, a copy in fp32 and its gradient in fp32; the logits that
    they are computed from exist in tiles of a fixed size. Where all logits are asked for they are one fp32 tensor that
    is saved, one that a user's loss gets, and two that log-probs are computed through. Every token is taken to be one
    of a response.

    Args:
        config: of the model, with its parallel sizes.
        logits: of each token, that is the whole vocabulary; 0 where logits of all tokens are not asked for.
        chunk_size: tokens whose log-probs are computed at a time from logits; -1 for all, and then the temporaries are
            as large.
    """
    size, tensor = config.params_dtype.itemsize, config.tensor_model_parallel_size
    queries = config.num_attention_heads * config.kv_channels
    groups = config.num_query_groups * config.kv_channels
    inner = (2 if config.use_te_activation_func else 5) * config.ffn_hidden_size
    if config.num_moe_experts is not None:
        sparse = config.moe_router_topk * config.moe_ffn_hidden_size + (config.moe_shared_expert_intermediate_size or 0)
        inner = max(inner if 0 in config.moe_layer_freq else 0, 4 * sparse)
    split = (
        4 * config.hidden_size / (tensor if config.sequence_parallel else 1)
        + (5 * queries + 2 * groups + inner) / tensor
    )
    layers = config.num_layers * split
    if config.recompute_granularity == "full":
        layers = config.num_layers * config.hidden_size + split
    log_probs = (size + 8) * config.hidden_size
    of_logits = (8 if size == 4 else 8 + size) + (8 if chunk_size == -1 else 0)
    return int(size * layers + log_probs + of_logits * logits / tensor)


def return_freed_memory(device: torch.device, freed: int) -> None:
    """Gives memory that was freed back to the system.

    glibc keeps freed blocks of less than 32 MiB, and those of one micro-batch fit the next one badly, whose tensors
    have other sizes: half as much again was resident as was in use. Does nothing with other C libraries, nor where
    tensors are on a GPU.

    Args:
        device: that tensors are on.
        freed: bytes that were freed, about; nothing is done for less than `KEPT`.
    """
    libc = _glibc() if device.type == "cpu" and freed > KEPT else None
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return None
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc


def _left_in_the_container() -> int:
    """Bytes to the limit of the control group that this process is in; endless where there is none (cgroup v2)."""
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = [
            line for line in (CGROUP / "memory.stat").read_text().splitlines() if line.startswith("inactive_file")
        ]
    except OSError:
        return 2**63
    if limit == "max":
        return 2**63
    return max(int(limit) - int(used) + sum(int(line.split()[1]) for line in cached), 0)
