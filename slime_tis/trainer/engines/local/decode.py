"""Batched decoding of a Hugging Face causal language model, each prompt run once for all of its samples.

Requests of user functions use continuous batching instead. For whole batches that takes 1.11 times the CPU time of this
module (16 prompts, 8 samples each, 96 tokens), which is why both exist.

Shape suffixes: P prompts, B samples (grouped by prompt), A active samples, T tokens of the longest prompt or response,
V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.engines.local.kv_cache import growing_cache
from slime_tis.trainer.engines.local.routing import Routing, RoutingRecorder
from slime_tis.trainer.engines.local.sampling import sample_tokens

DROP_BELOW = 0.9
"""Share of active samples below which finished samples leave the batch. Leaving copies the cache, which takes as long
as decoding two tokens of a tenth of the batch (SmolLM2-135M on a CPU)."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A decoded batch; entries past a sample's length are undefined."""

    tokens_BT: Tensor
    """Sampled tokens, int64."""

    log_probs_BT: Tensor
    """Their log-probs, float32."""

    lengths_B: Tensor
    """Tokens of each response, including its stop token."""

    stopped_B: Tensor
    """True where a stop token ended the response."""

    routing: list[Routing] | None
    """[prompt + response − 1, layers, k] of each sample; None if not recorded."""

    sampling_masks: list[SamplingMask] | None
    """Candidate tokens at each token of each response; None if not recorded."""


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    uniforms_BT: Tensor,
    sampling: Sampling,
    stop_token_ids: Sequence[int],
    check_interrupts: Callable[[], None] = lambda: None,
) -> Decoded:
    """Samples `sampling.n_samples` responses to each prompt.

    Args:
        model: In evaluation mode.
        prompts: P lists of token ids, padded on the left to the longest.
        limits: P maximum response lengths.
        uniforms_BT: [B, T] float64 in [0, 1) with T the largest limit; sample b draws token t with [b, t].
        sampling: Temperature, top-p, top-k, the number of samples, and whether to record routing.
        stop_token_ids: Tokens that end a response and are part of it.
        check_interrupts: Called before each token; an exception ends the decoding.

    Returns:
        B samples, grouped by prompt, on the model's device.

    Raises:
        ValueError: Routing is recorded and the model has no experts.
    """
    device, n_samples = model.device, sampling.n_samples
    uniforms_BT = uniforms_BT.to(device)
    stops = torch.tensor(stop_token_ids, device=device)
    limits_A = torch.tensor(limits, device=device).repeat_interleave(n_samples)
    recorder = RoutingRecorder(model) if sampling.records_routing else None
    batch = _Batch(model, prompts, limits, n_samples, recorder)
    routing = None if recorder is None else _RoutingOfSamples(recorder.take(len(prompts)), prompts, n_samples)
    tokens_BT = torch.zeros_like(uniforms_BT, dtype=torch.int64)
    log_probs_BT = torch.zeros_like(uniforms_BT, dtype=torch.float32)
    lengths_B = torch.zeros_like(limits_A)
    stopped_B = torch.zeros_like(limits_A, dtype=torch.bool)
    rows_A = torch.arange(len(limits_A), device=device)
    alive_A = torch.ones_like(stopped_B)
    sets = _SampledSets() if sampling.return_sampling_mask else None
    for step in range(uniforms_BT.shape[1]):
        check_interrupts()
        tokens_A, log_probs_A, drawn_from_AV = sample_tokens(
            batch.logits_AV,
            uniforms_BT[rows_A, step],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        tokens_BT[rows_A, step], log_probs_BT[rows_A, step] = tokens_A, log_probs_A
        lengths_B[rows_A] += alive_A
        if sets is not None:
            sets.append(rows_A[alive_A], (drawn_from_AV > -torch.inf)[alive_A])
        stop_A = (tokens_A[:, None] == stops).any(-1)
        stopped_B[rows_A] |= stop_A & alive_A
        alive_A = alive_A & ~stop_A & (limits_A > step + 1)
        n_alive = int(alive_A.sum())
        if n_alive == 0:
            break
        if n_alive < DROP_BELOW * len(alive_A):
            kept = alive_A.nonzero().squeeze(-1)
            batch.keep(kept)
            rows_A, limits_A, alive_A, tokens_A = rows_A[kept], limits_A[kept], alive_A[kept], tokens_A[kept]
        batch.extend(tokens_A)
        if recorder is not None and routing is not None:
            routing.append(rows_A, recorder.take(len(rows_A)))
    return Decoded(
        tokens_BT=tokens_BT,
        log_probs_BT=log_probs_BT,
        lengths_B=lengths_B,
        stopped_B=stopped_B,
        routing=None if routing is None else routing.of_samples(lengths_B),
        sampling_masks=None if sets is None else sets.of_responses(lengths_B.tolist()),
    )


class _RoutingOfSamples:
    """The routing of samples, concatenated from their prompts and sampled tokens."""

    def __init__(self, padded: Routing, prompts: Sequence[Sequence[int]], n_samples: int) -> None:
        """Takes the rows of the prompts, padded on the left; the samples of a prompt share them."""
        self._prompts = [padded[index, -len(prompt) :] for index, prompt in enumerate(prompts)]
        self._n_samples = n_samples
        self._rows: list[Tensor] = []
        self._steps: list[Routing] = []

    def append(self, rows_A: Tensor, step: Routing) -> None:
        """Adds the next token of each active sample, [A, 1, layers, k]."""
        self._rows.append(rows_A)
        self._steps.append(step)

    def of_samples(self, lengths_B: Tensor) -> list[Routing]:
        """The rows of every token of a sample except the last, which was not fed."""
        if self._steps:
            row_of_each = torch.cat(self._rows)
            sampled = Routing.cat(self._steps)[row_of_each.argsort(stable=True), 0]  # the steps of each stay in order
            ends = row_of_each.bincount(minlength=len(lengths_B)).cumsum(0).tolist()
        routing = []
        for sample, length in enumerate(lengths_B.tolist()):
            parts = [self._prompts[sample // self._n_samples]]
            if self._steps:
                start = ends[sample - 1] if sample else 0
                parts.append(sampled[start : start + length - 1])
            routing.append(Routing.cat(parts))  # a copy: pickling a view would send its whole storage to other ranks
        return routing


class _SampledSets:
    """The sampling masks of a batch, added step by step and returned by response."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._steps: list[SamplingMask] = []

    def append(self, rows_A: Tensor, allowed_AV: Tensor) -> None:
        """Adds the masks [A, V] of the next token of samples `rows_A`; an empty set means the whole vocabulary."""
        self._rows.append(rows_A.cpu())
        allowed_AV = allowed_AV & ~allowed_AV.all(-1, keepdim=True)
        token_ids = allowed_AV.nonzero()[:, 1].to(torch.int32)
        self._steps.append(SamplingMask(token_ids.cpu(), allowed_AV.sum(-1, dtype=torch.int32).cpu()))

    def of_responses(self, lengths: list[int]) -> list[SamplingMask]:
        """The masks of responses with these lengths."""
        order = torch.cat(self._rows).argsort(stable=True)  # by response; the steps of each stay in order
        return SamplingMask.cat(self._steps).select(order).split(lengths)


class _Batch:
    """The active samples: their key/value cache and the logits of the next token.

    Prompts of equal length need neither attention mask nor position ids; models are faster without them.
    """

    logits_AV: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        n_samples: int,
        recorder: RoutingRecorder | None,
    ) -> None:
        """Runs each prompt once and shares its cache among its samples."""
        self._recorder = recorder
        self._model, self._cache = model, growing_cache(model.config)
        self._length = max(len(prompt) for prompt in prompts)
        padding = [self._length - len(prompt) for prompt in prompts]
        ids_PT = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
        self._padding_A: Tensor | None = torch.tensor(padding, device=model.device) if any(padding) else None
        # Finished samples are decoded until they are dropped; their positions must stay inside the context.
        self._last_position = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)) - 1
        self._forward(ids_PT.to(model.device))
        self._cache.batch_repeat_interleave(n_samples)
        self.logits_AV = self.logits_AV.repeat_interleave(n_samples, 0)
        if self._padding_A is not None:
            self._padding_A = self._padding_A.repeat_interleave(n_samples)

    def extend(self, tokens_A: Tensor) -> None:
        """Appends one token to each sample."""
        self._length += 1
        self._forward(tokens_A[:, None])

    def keep(self, kept: Tensor) -> None:
        """Keeps only the samples at these indices; `extend` then computes new logits."""
        self._cache.batch_select_indices(kept)
        if self._padding_A is not None:
            self._padding_A = self._padding_A[kept]

    def _forward(self, ids_AT: Tensor) -> None:
        """Runs the last T of the `_length` tokens that each sample has, and replaces `logits_AV`."""
        masking: dict[str, Tensor] = {}
        if self._padding_A is not None:
            positions_AT = torch.arange(self._length, device=ids_AT.device) - self._padding_A[:, None]
            masking["attention_mask"] = positions_AT >= 0
            masking["position_ids"] = positions_AT[:, -ids_AT.shape[1] :].clamp(0, self._last_position)
        with self._recorder or nullcontext():
            output = self._model(
                input_ids=ids_AT, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **masking
            )
        self.logits_AV = output.logits[:, -1]
