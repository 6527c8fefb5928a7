"""Operations whose result for a row depends only on this row, in every bit.

A rollout engine decodes one token of many sequences at a time, and training computes complete
sequences. Libraries choose a kernel by the number of rows, and each kernel adds in its own order.
With the functions of this module both engines add the same numbers in the same order. Then
log-probs of equal weights are equal in every bit (`--true-on-policy`).

The rules, each with what breaks without it:

1. Products of matrices have a padded number of rows (`Tiles`). Below some number of rows, MKL and
   oneDNN add in another order; with AMX, bf16 products of 16, 64 and 2,048 rows all differ. The
   number of output features matters only if it is small (`MIN_OUTPUTS`).
2. A sum never changes its length. A row-parallel layer adds the products of two halves, so the
   rollout engine does the same (`parts`). A bias is added after the product, because a fused
   product starts its sum with the bias.
3. Attention adds keys in blocks of `KEYS`, then the blocks in order. A block of masked keys adds an
   exact 0, so padding changes nothing.
4. torch's silu computes the last elements of a tensor with another exp. It is used only if all
   rows end with a complete vector; otherwise silu is composed of exp and a division.
5. A sum over the vocabulary has one block per tensor-parallel rank, also in the rollout engine.
6. Norms and rotary embeddings round where transformers rounds, so that its code need not be
   replaced.

These are observations of libraries, not guarantees. `self_check` tests them on the machine and on
the shapes of the model before a run, and the run compares every trained token.

Backward passes are plain: gradients need no bitwise equality with another engine.

Shapes: B sequences, H heads, G groups of heads with common keys, T queries, S keys, d features of a
head; K input and N output features of a linear layer; V vocabulary, suffix _B one value per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce

KEYS = 64
"""Keys of a block in attention."""
VECTORS = 64
"""Elements of the longest loop of vectors in torch's silu: 2 · 32 in bf16 with AVX512."""
MIN_OUTPUTS = 16
"""Fewest output features of a product. On AMD Zen 5, fp32 products with 11 or fewer add in another
order."""
QUERY_ROWS = 16
"""Rows to which the queries of an attention product are padded."""
QUERIES = 64
"""Queries of a sequence that are computed together, over the keys up to the last query. This halves
the work of causal attention."""


@dataclass(frozen=True)
class Tiles:
    """How the rows of a matrix product are divided.

    Every product has a multiple of `base` rows, at most `most`.
    """

    base: int
    most: int


# Linear layers


def product(x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """Returns x [..., K] times the transpose of weight [N, K], [..., N], without gradient.

    Rule 1: rows of zeros fill the last tile, and the weight of few output features.
    """
    rows = x.reshape(-1, x.shape[-1])
    features = len(weight)
    if features < MIN_OUTPUTS:
        weight = _padded_rows(weight, MIN_OUTPUTS)
    transposed = weight.t()
    count = len(rows)
    if count <= tiles.most:
        output = torch.mm(_padded_rows(rows, tiles.base), transposed)[:count]
    else:
        output = rows.new_empty(count, len(weight))
        for start in range(0, count, tiles.most):
            tile = rows[start : start + tiles.most]
            tile_output = output[start : start + tiles.most]
            if len(tile) % tiles.base == 0:
                torch.mm(tile, transposed, out=tile_output)
            else:
                padded_output = torch.mm(_padded_rows(tile, tiles.base), transposed)
                tile_output.copy_(padded_output[: len(tile)])
    return output[:, :features].reshape(*x.shape[:-1], features)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles, parts: int = 1) -> Tensor:
    """Returns x Wᵀ + b, [..., N], without gradient.

    Rule 2: with `parts` > 1 the sum over K is divided as row-parallel ranks divide it. Each part is
    rounded to the type of x and the parts are added, as in the all-reduce of two ranks.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N], or None.
        tiles: Rows of the product.
        parts: Number of ranks that divide K.
    """
    if parts == 1:
        output = product(x, weight, tiles)
    else:
        inputs = x.chunk(parts, -1)
        weights = weight.chunk(parts, -1)
        output = product(inputs[0], weights[0], tiles)
        for x_part, weight_part in zip(inputs[1:], weights[1:], strict=True):
            output = output + product(x_part, weight_part, tiles)
    if bias is not None:
        output = output + bias
    return output


def trained_linear(
    x: Tensor, weight: Tensor, tiles: Tiles, group: ProcessGroup | None = None
) -> Tensor:
    """Returns x Wᵀ with gradient.

    Args:
        x: [..., K].
        weight: [N, K], this rank's part.
        tiles: Rows of the product.
        group: Tensor-parallel ranks over which the gradient of x is summed; None for none.
    """
    output: Tensor = _Linear.apply(x, weight, tiles, group)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tiles: Tiles, group: ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return product(x, weight, tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = None
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if ctx.group is not None:
                all_reduce(grad_x, group=ctx.group)
        if ctx.needs_input_grad[1]:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_x, grad_weight, None, None


def _padded_rows(rows: Tensor, base: int) -> Tensor:
    """Appends rows of zeros to [..., rows, K] until `base` divides their number."""
    missing = -rows.shape[-2] % base
    if missing == 0:
        return rows
    return F.pad(rows, (0, 0, 0, missing))


# Attention


def attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scale: float
) -> Tensor:
    """Returns softmax(scale · q kᵀ) v [B, H, T, d] over the keys that each query sees.

    Rule 3. All sums are in float32, also for bf16 inputs: a block's sum is not rounded to bf16.

    Args:
        query: [B, H, T, d].
        key: [B, G, S, d]; H / G heads share the keys of a group.
        value: [B, G, S, d].
        seen: bool [B or 1, T, S], whether a query sees a key; at least one per query. None for
            causal attention, in which the last query sees all keys.
        scale: Factor of the products.
    """
    if seen is None:
        seen = causal(query.shape[2], key.shape[2])
    if not torch.is_grad_enabled():
        return _attention(query, key, value, seen, scale)[0]
    output: Tensor = _Attention.apply(query, key, value, seen, scale)  # type: ignore[no-untyped-call]
    return output


def causal(queries: int, keys: int) -> Tensor:
    """Returns [1, queries, keys]: the last query sees all keys, the one before all but the last."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None]


@dataclass(frozen=True)
class _QueryChunk:
    """Some queries of every sequence, and the keys that they see."""

    tokens: slice
    keys: int
    """Number of the first keys that contain all keys that a query sees."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float
    ) -> Tensor:
        output, maximum, total = _attention(query, key, value, seen, scale)
        # log Σ e^score [B, H, T]
        normalizer = maximum + total.log()
        ctx.save_for_backward(query, key, value, seen, output, normalizer)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen, output, normalizer = ctx.saved_tensors
        heads_per_group = query.shape[1] // key.shape[1]
        keys = key.float().repeat_interleave(heads_per_group, 1)
        values = value.float().repeat_interleave(heads_per_group, 1)
        grad_query = torch.empty_like(query)
        grad_keys = torch.zeros_like(keys)
        grad_values = torch.zeros_like(values)
        for chunk in _query_chunks(seen):
            tokens = chunk.tokens
            visible = slice(chunk.keys)
            queries = query[:, :, tokens].float()
            grad_output = grad[:, :, tokens].float()
            scores = (queries @ keys[:, :, visible].transpose(-1, -2)).mul_(ctx.scale)
            weights = scores.sub_(normalizer[:, :, tokens, None]).exp_()
            weights.masked_fill_(~seen[:, None, tokens, visible], 0.0)
            grad_values[:, :, visible] += weights.transpose(-1, -2) @ grad_output
            # Σ_s p_s ∂p_s, which equals ∂o · o
            mean = (grad_output * output[:, :, tokens].float()).sum(-1, keepdim=True)
            grad_weights = grad_output @ values[:, :, visible].transpose(-1, -2)
            grad_scores = grad_weights.sub_(mean).mul_(weights).mul_(ctx.scale)
            grad_query[:, :, tokens] = grad_scores @ keys[:, :, visible]
            grad_keys[:, :, visible] += grad_scores.transpose(-1, -2) @ queries
        grouped = (-1, heads_per_group)
        grad_key = grad_keys.unflatten(1, grouped).sum(2).to(key.dtype)
        grad_value = grad_values.unflatten(1, grouped).sum(2).to(value.dtype)
        return grad_query, grad_key, grad_value, None, None


def _attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output [B, H, T, d], the largest score m and Σ e^(score − m), [B, H, T] each."""
    keys = _key_blocks(key)
    values = _key_blocks(value)
    outputs = []
    maxima = []
    totals = []
    for chunk in _query_chunks(seen):
        output, maximum, total = _attend(query, keys, values, seen, scale, chunk)
        outputs.append(output)
        maxima.append(maximum)
        totals.append(total)
    return torch.cat(outputs, 2), torch.cat(maxima, 2), torch.cat(totals, 2)


def _key_blocks(x: Tensor) -> Tensor:
    """Returns float32 [B·G, S, d] with zeros up to a multiple of `KEYS` keys."""
    batch, groups, keys, features = x.shape
    length = keys + -keys % KEYS
    if length == keys:
        return x.float().flatten(0, 1)
    blocks = x.new_empty(batch, groups, length, features, dtype=torch.float32)
    blocks[:, :, :keys] = x
    blocks[:, :, keys:] = 0.0
    return blocks.flatten(0, 1)


def _query_chunks(seen: Tensor) -> Sequence[_QueryChunk]:
    """Cuts queries into chunks, each with the number of keys that it sees."""
    chunks = []
    count = seen.shape[1]
    for start in range(0, count, QUERIES):
        tokens = slice(start, min(start + QUERIES, count))
        keys = seen.shape[2]
        if count > QUERIES:
            is_seen = seen[:, tokens].flatten(0, 1).any(0)
            keys = int(is_seen.nonzero().max()) + 1
        chunks.append(_QueryChunk(tokens, keys))
    return chunks


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, chunk: _QueryChunk
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the values of `_attention` for some queries."""
    batch, heads, _, features = query.shape
    groups = len(keys) // batch
    heads_per_group = heads // groups
    length = chunk.keys + -chunk.keys % KEYS
    hidden = ~seen[:, chunk.tokens, : chunk.keys]
    if length > chunk.keys:
        hidden = F.pad(hidden, (0, length - chunk.keys), value=True)
    queries = query[:, :, chunk.tokens].float() * scale
    count = queries.shape[2]
    # The heads of a group are rows of one product, so that few rows are padding. Their number does
    # not change a row, because it is padded like the rows of a linear layer (rule 1).
    rows = heads_per_group * count
    queries = _padded_rows(queries.reshape(batch * groups, rows, features), QUERY_ROWS)
    scores = torch.bmm(queries, keys[:, :length].transpose(1, 2))
    by_head = (batch, groups, heads_per_group, count, length)
    scores[:, :rows].view(by_head).masked_fill_(hidden[:, None, None], -torch.inf)
    # The maximum is over all keys that the query sees, also in decoding. Relative to it, the weight
    # of a masked key is exp(−∞) = 0, and adding that 0 changes no sum (rule 3).
    maximum = scores.amax(-1, keepdim=True)
    weights = scores.sub_(maximum).exp_()
    sums = weights.unflatten(-1, (-1, KEYS)).sum(-1, keepdim=True)
    total = sums[:, :, 0]
    output = torch.bmm(weights[:, :, :KEYS], values[:, :KEYS])
    for number in range(1, length // KEYS):
        block = slice(number * KEYS, (number + 1) * KEYS)
        total = total + sums[:, :, number]
        output.add_(torch.bmm(weights[:, :, block], values[:, block]))
    output = output.div_(total)[:, :rows].to(query.dtype)
    by_query = (batch, heads, count)
    return (
        output.reshape(*by_query, features),
        maximum[:, :rows].reshape(by_query),
        total[:, :rows].reshape(by_query),
    )


# Functions of a row


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns weight · round(x / sqrt(mean(x²) + ε)) over the last dimension, with gradient.

    Rule 6: transformers rounds to the type of x before it multiplies.
    """
    output: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # With r = 1 / sqrt(mean(x²) + ε) and g the gradient times the weight,
        # ∂x = r·(g − x·r²·mean(g·x)).
        x, weight, scale = ctx.saved_tensors
        wide = x.float()
        grad_weight = (grad * wide).mul_(scale).flatten(0, -2).sum(0)
        grad_x = grad.float() * weight.float()
        mean = (grad_x * wide).mean(-1, keepdim=True)
        grad_x.addcmul_(wide, mean.mul_(scale).mul_(scale), value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the rotary embedding of x [tokens, heads, d], with gradient.

        y_i = x_i cos − x_{i+d/2} sin,   y_{i+d/2} = x_{i+d/2} cos + x_i sin

    Rule 6: transformers rounds the angles and both products to the type of x.

    Args:
        x: [tokens, heads, d].
        cos: [tokens, 1, d/2], float32.
        sin: The same.
    """
    output: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return output


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None  # the inverse rotation


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half_cos = cos.to(x.dtype)
    half_sin = sin.to(x.dtype)
    first, second = x.chunk(2, -1)
    swapped = torch.cat([-second, first], -1)
    cosines = torch.cat([half_cos, half_cos], -1)
    sines = torch.cat([half_sin, half_sin], -1)
    return (x * cosines).add_(swapped.mul_(sines))


def silu(x: Tensor, *, vectorized: bool) -> Tensor:
    """Returns x / (1 + e^−x) in the type of x, without gradient.

    Rule 4: the vectorized and the scalar exp of torch's silu differ. Which element gets which
    depends on the number of rows, unless vectors fill every row.

    Args:
        x: [..., inner size].
        vectorized: Whether torch's own function is used, see `has_whole_vectors`.
    """
    if vectorized:
        return F.silu(x)
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def has_whole_vectors(width: int) -> bool:
    """Whether torch's silu computes all elements of rows of this width with vectors.

    Several threads cut a tensor anywhere, so this needs one thread.
    """
    return width % VECTORS == 0 and torch.get_num_threads() == 1


def swiglu(x: Tensor, *, vectorized: bool) -> Tensor:
    """Returns silu(gate) · up [..., inner size] of gate and up [..., 2 · inner], with gradient."""
    output: Tensor = _SwiGLU.apply(x, vectorized)  # type: ignore[no-untyped-call]
    return output


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vectorized: bool) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return silu(gate, vectorized=vectorized).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return swiglu_gradient(grad, x), None


def swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of silu(gate) · up with respect to x [..., 2 · inner], gate and up.

    Args:
        grad: Gradient of the result [..., inner size].
        x: Gate and up.
    """
    gate, up = x.chunk(2, -1)
    # Both halves are views of one tensor, which needs no copy.
    grad_x = torch.empty_like(x)
    grad_gate, grad_up = grad_x.chunk(2, -1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    torch.mul(grad, up, out=grad_gate)
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    return grad_x


# Log-probs


def row_sums(x: Tensor) -> Tensor:
    """Returns row sums of x [rows, V].

    With several threads, torch divides the sum of a single row among them, so it gets two rows.
    """
    if len(x) == 1:
        return x.expand(2, -1).sum(-1)[:1]
    return x.sum(-1)


def token_log_probs(z_BV: Tensor, token_B: Tensor, part_size: int) -> Tensor:
    """Returns z_y − m − log Σ_v e^(z_v − m) [B], with m the maximum.

    Rule 5: the sum has one part for each tensor-parallel rank, which is relative to its maximum.

    Args:
        z_BV: float32 logits after temperature; −inf for tokens that cannot be sampled.
        token_B: The tokens y.
        part_size: Columns of a rank.
    """
    parts = z_BV.split(part_size, -1)
    maxima = []
    for part in parts:
        maxima.append(part.amax(-1).clamp_min_(torch.finfo(part.dtype).min))
    maximum = torch.stack(maxima).amax(0)
    normalizer = torch.zeros_like(maximum)
    for part, part_maximum in zip(parts, maxima, strict=True):
        part_sum = row_sums((part - part_maximum[:, None]).exp_())
        normalizer = normalizer + (part_maximum - maximum).exp() * part_sum
    target = z_BV.gather(-1, token_B[:, None]).squeeze(-1)
    return target - maximum - normalizer.log()
