"""The gated delta rule: attention whose state has a fixed size, in plain torch.

A head keeps a matrix S [d_v, d_k] of the values that belong to the keys so far. Token t forgets a
part of it, corrects the value of its key, and reads the value of its query:

    S_t = α_t S_{t-1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,   o_t = S_t q_t

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule", Yang et al.
(https://arxiv.org/abs/2412.06464), eq. 10, and section 3.3 for chunks.

Shapes: R rows, H heads, N chunks of C tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk. Within a chunk tokens are computed at once, and chunks one after another."""


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """Returns the outputs o_t of independent sequences, which begin with S = 0.

    With γ_ij = α_{j+1} … α_i, and γ_i = α_1 … α_i from the beginning of a chunk, the corrections
    d_i = β_i (v_i − α_i S_{i-1} k_i) of its tokens solve the triangular system

        d_i + Σ_{j<i} β_i γ_ij (k_i·k_j) d_j = β_i (v_i − γ_i S k_i)

    in which S is the state before the chunk. Then

        o_i = γ_i S q_i + Σ_{j≤i} γ_ij (q_i·k_j) d_j,   S' = γ_C S + Σ_j γ_Cj d_j k_jᵀ

    float16 and bfloat16 are computed in float32.

    Args:
        query: q, [R, H, T, d_k].
        key: k, [R, H, T, d_k]; the rule is stable for |k| ≤ 1.
        value: v, [R, H, T, d_v].
        log_decay: log α ≤ 0, [R, H, T]; -inf forgets the state.
        beta: β from 0 to 1, [R, H, T].
        chunk: C, which changes only rounding.

    Returns:
        [R, H, T, d_v] of the type of `value`.
    """
    length = value.shape[-2]
    size = max(min(chunk, length), 1)
    dtype = torch.promote_types(value.dtype, torch.float32)
    query = _in_chunks(query.to(dtype), size)
    key = _in_chunks(key.to(dtype), size)
    values = _in_chunks(value.to(dtype), size)
    log_decay = _in_chunks(log_decay.to(dtype)[..., None], size)[..., 0]
    beta = _in_chunks(beta.to(dtype)[..., None], size)

    between = _decays_between(log_decay)  # γ_ij [R, H, N, C, C]
    since_start = log_decay.cumsum(-1).exp()[..., None]  # γ_i [R, H, N, C, 1]
    until_end = between[..., -1, :, None]  # γ_Cj [R, H, N, C, 1]
    over_chunk = since_start[..., -1:, :]  # γ_C [R, H, N, 1, 1]

    # The solution is linear in S: d = own − reads Sᵀ. Both parts need no S, so that all chunks are
    # solved at once.
    system = beta * (key @ key.mT) * between
    right_sides = torch.cat([beta * values, beta * since_start * key], -1)
    solution = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    own, reads = solution.split([values.shape[-1], key.shape[-1]], -1)
    scores = (query @ key.mT) * between
    decayed_query = since_start * query
    decayed_key = until_end * key

    state = values.new_zeros(*values.shape[:2], key.shape[-1], values.shape[-1])  # Sᵀ
    outputs = []
    for n in range(values.shape[2]):
        corrections = own[:, :, n] - reads[:, :, n] @ state
        outputs.append(decayed_query[:, :, n] @ state + scores[:, :, n] @ corrections)
        state = over_chunk[:, :, n] * state + decayed_key[:, :, n].mT @ corrections
    joined = torch.cat(outputs, -2)
    return joined[..., :length, :].to(value.dtype)


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """[R, H, T, d] → [R, H, N, C, d]; zeros, which change no state, pad the last chunk."""
    padding = -x.shape[-2] % size
    chunks: Tensor = F.pad(x, (0, 0, 0, padding)).unflatten(-2, (-1, size))
    return chunks


def _decays_between(log_decay: Tensor) -> Tensor:
    """Returns γ_ij = α_{j+1} … α_i [R, H, N, C, C] for j ≤ i, and 0 for j > i.

    Each sum of logarithms has only the terms of its product. A difference of two sums from the
    beginning of the chunk would lose digits, and would be NaN after a decay of 0.
    """
    size = log_decay.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=log_decay.device)
    terms = log_decay[..., :, None].expand(*log_decay.shape, size)
    sums = terms.masked_fill(~ones.tril(-1), 0.0).cumsum(-2)
    return sums.exp().masked_fill(~ones.tril(), 0.0)
