"""Draws tokens from logits, with log-probs of exactly the sampled distribution.

Shape suffixes: B rows, V vocabulary, C chunks of the vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from slime_tis.trainer.invariant.operations import row_sums, token_log_probs

CDF_CHUNK = 512
"""Tokens per chunk of the two-level search; a vocabulary of 150k tokens has 300 chunks."""


def sample_tokens(
    logits_BV: Tensor,
    uniforms_B: Tensor,
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    vocabulary_part: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws one token per row by inverse CDF.

    Temperature 0 takes the most likely token, with its log-prob at temperature 1.

    Args:
        logits_BV: The model's logits.
        uniforms_B: One number in [0, 1) per row.
        temperature: Divides the logits.
        top_p: Nucleus probability.
        top_k: Number of likeliest tokens; −1 for all.
        vocabulary_part: Tokens of a tensor-parallel rank of training. Log-probs are then summed as
            the ranks do.

    Returns:
        Tokens [B], log-probs [B] float32, and the logits [B, V] of the sampled distribution, up to
        a constant per row and −inf at removed tokens.
    """
    if temperature == 0.0:
        log_probs_BV = log_softmax(logits_BV)
        tokens_B = log_probs_BV.argmax(-1)
        log_probs_B = log_probs_BV.gather(-1, tokens_B[:, None]).squeeze(-1)
        return tokens_B, log_probs_B, log_probs_BV
    filtered_BV = filtered_logits(logits_BV, temperature=temperature, top_p=top_p, top_k=top_k)
    shifted_BV = filtered_BV - filtered_BV.amax(-1, keepdim=True)
    # Unnormalized: probabilities would need another pass over the vocabulary.
    weights_BV = shifted_BV.exp()
    tokens_B = inverse_cdf(weights_BV, uniforms_B)
    if vocabulary_part is not None and vocabulary_part < filtered_BV.shape[-1]:
        log_probs_B = token_log_probs(filtered_BV, tokens_B, vocabulary_part)
    else:
        sampled_B = shifted_BV.gather(-1, tokens_B[:, None]).squeeze(-1)
        log_probs_B = sampled_B - row_sums(weights_BV).log()
    return tokens_B, log_probs_B, shifted_BV


def filtered_logits(logits_BV: Tensor, *, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Logits after temperature, then top-k, then top-p over the remaining tokens.

      where(kept, logits / temperature, -inf)

    Sources: "Hierarchical Neural Story Generation", Fan et al. (https://arxiv.org/abs/1805.04833),
    section 5 for top-k; "The Curious Case of Neural Text Degeneration", Holtzman et al.
    (https://arxiv.org/abs/1904.09751), eq. 2-3 for top-p. transformers uses the same order.
    """
    scaled_BV = logits_BV.float()
    if temperature != 1.0:
        scaled_BV = scaled_BV / temperature
    if 0 < top_k < scaled_BV.shape[-1]:
        kth_B1 = scaled_BV.topk(top_k, dim=-1).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < kth_B1, -torch.inf)
    if top_p < 1.0:
        ordered_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
        probs_BV = ordered_BV.softmax(-1)
        # The sum over more likely tokens: the most likely token is always kept.
        above_BV = probs_BV.cumsum(-1, dtype=torch.float64) - probs_BV
        removed_BV = torch.zeros_like(order_BV, dtype=torch.bool)
        removed_BV = removed_BV.scatter(-1, order_BV, above_BV >= top_p)
        scaled_BV = scaled_BV.masked_fill(removed_BV, -torch.inf)
    return scaled_BV


def log_softmax(logits_BV: Tensor) -> Tensor:
    """Row-wise log softmax in float32: z − max z − log Σ_v exp(z_v − max z).

    torch's log_softmax loses digits of that sum on a CPU: with a vocabulary of 150k all log-probs
    are 1e-5 to 2e-5 too high. `Tensor.sum` adds in pairs and leaves unbiased rounding errors. The
    training engine computes log-probs in the same way.
    """
    logits_BV = logits_BV.float()
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    return shifted_BV.sub_(shifted_BV.exp().sum(-1, keepdim=True).log_())


def inverse_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u · Σ p.

    Searches chunks of tokens, then the tokens of one chunk, both with float64 sums: the draw is
    exact for any vocabulary without a [B, V] table of cumulative sums. A token of probability 0 is
    never drawn.
    """
    rows, vocab = probs_BV.shape
    if vocab <= CDF_CHUNK:
        targets_B = uniforms_B * probs_BV.sum(-1, dtype=torch.float64)
        tokens_B, _ = _search(probs_BV.double(), targets_B)
        return tokens_B
    if vocab % CDF_CHUNK:
        probs_BV = torch.nn.functional.pad(probs_BV, (0, -vocab % CDF_CHUNK))
    chunks_BCV = probs_BV.view(rows, -1, CDF_CHUNK)
    sums_BC = chunks_BCV.sum(-1, dtype=torch.float64)
    chunk_B, rest_B = _search(sums_BC, uniforms_B * sums_BC.sum(-1))
    row_B = torch.arange(rows, device=probs_BV.device)
    within_BV = chunks_BCV[row_B, chunk_B].double()
    tokens_B, _ = _search(within_BV, rest_B)
    return chunk_B * CDF_CHUNK + tokens_B


def _search(weights_BV: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the first column whose cumulative weight exceeds the target.

    Returns:
        Columns [B], and the target minus the weights before the column [B].
    """
    cumulative_BV = weights_BV.cumsum(-1)
    total_B = cumulative_BV[:, -1]
    # Rounding may lift u · Σ to Σ, which no cumulative weight exceeds.
    below_total_B = torch.nextafter(total_B, torch.zeros_like(total_B))
    targets_B = torch.minimum(targets_B, below_total_B)
    columns_B = (cumulative_BV <= targets_B[:, None]).sum(-1)
    before_BV = torch.nn.functional.pad(cumulative_BV, (1, 0))
    return columns_B, targets_B - before_BV.gather(-1, columns_B[:, None]).squeeze(-1)


def prompt_uniforms(seed: int, index: int, occurrence: int, n_samples: int, length: int) -> Tensor:
    """The uniforms of all samples of one prompt, which depend on neither batch nor rank."""
    key = np.array([seed, index], dtype=np.int64).astype(np.uint64)
    counter = np.array([0, 0, 0, occurrence], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return torch.from_numpy(generator.random((n_samples, length)))
