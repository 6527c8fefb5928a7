"""The in-process rollout engine: batched decoding with transformers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.collectives import map_over_ranks
from slime_tis.trainer.data.sample import STATUS, Prompt, Sample, Sampling, response_limit
from slime_tis.trainer.engines.engine import SentRows, WeightSource
from slime_tis.trainer.engines.functions import FunctionBatch, FunctionCall, calls_over_ranks, new_groups
from slime_tis.trainer.engines.generation import Generation, RolloutFunction
from slime_tis.trainer.engines.local.checkpoint import (
    eos_token_ids,
    linear_weight_names,
    load_model,
    weights_by_file_name,
)
from slime_tis.trainer.engines.local.continuous_batching import ContinuousBatching
from slime_tis.trainer.engines.local.decode import Decoded, decode
from slime_tis.trainer.engines.local.sampling import log_softmax, prompt_uniforms
from slime_tis.trainer.engines.quantize import round_bits, round_fp8, round_int8
from slime_tis.trainer.engines.tasks import CANCELLED, cancel_and_wait, run
from slime_tis.trainer.engines.weight_rounding import Precision
from slime_tis.trainer.engines.weight_updates import OUTPUT_LAYER
from slime_tis.trainer.storage.checkpoints import ROLLOUT_WEIGHTS

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float32,
    "int8": torch.float32,
}
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {"fp8": round_fp8, "int8": round_int8}
NAME = "the local engine"
"""What messages call it."""


def roundings(model: PreTrainedModel, precision: str, router_bits: int | None) -> dict[str, Callable[[Tensor], Tensor]]:
    """Returns the rounding function of each rounded weight, by name.

    Args:
        model: Model with the weights.
        precision: Precision of the linear layers.
        router_bits: Precision of mixture-of-experts routers; None leaves them unchanged.

    Raises:
        ValueError: Routers are to be rounded and the model has none.
    """
    by_name: dict[str, Callable[[Tensor], Tensor]] = {}
    if precision in ROUNDINGS:
        by_name = dict.fromkeys(linear_weight_names(model), ROUNDINGS[precision])
    if router_bits is not None:
        routers = [name for name, _ in model.named_parameters() if name.endswith(".mlp.gate.weight")]
        if not routers:
            raise ValueError(f"--rollout-router-bits is {router_bits} but the model has no routers; remove the flag.")
        by_name |= dict.fromkeys(routers, partial(round_bits, bits=router_bits))
    return by_name


@dataclass(frozen=True)
class CompletedRollout:
    """A completed rollout."""

    groups: list[list[Sample]]

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers of complete and of all responses."""
        total = sum(map(len, self.groups))
        return total, total

    def result(self) -> list[list[Sample]]:
        """The groups."""
        return self.groups


@dataclass(frozen=True, kw_only=True)
class _Request:
    prompt: Prompt
    occurrence: int  # earlier occurrences of the same prompt in the batch
    limit: int  # maximum response tokens


class LocalEngine:
    """Samples with a Hugging Face model in this process; see `engine.RolloutEngine`.

    Each prompt is run once, and its samples share the cache. A sample depends only on the seed, its prompt and the
    weights, not on its batch or rank. In a torch.distributed job every rank holds the whole model and samples its share
    of the prompts.

    Precisions: fp32; bf16 runs the whole model in bfloat16; fp8 and int8 round the weights of linear layers and experts
    (not embeddings, norms, biases, routers and the output layer) and compute in float32, which emulates rounded weights
    but not rounded activations.
    """

    can_checkpoint_weights = True
    http_address: tuple[str, int] | None = None

    def __init__(
        self,
        hf_checkpoint: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        precision: Precision = "fp32",
        router_bits: int | None = None,
        max_batch: int = 512,
        max_batch_tokens: int = 131072,
        device: torch.device | str = "cpu",
        check_interrupts: Callable[[], None] = lambda: None,
    ) -> None:
        """Loads the checkpoint as weight version 0.

        Args:
            hf_checkpoint: Directory with config.json and weights of a causal language model.
            tokenizer: Tokenizer of the checkpoint.
            precision: fp32, bf16, fp8 or int8.
            router_bits: Width to which mixture-of-experts routers are rounded; None rounds them by the precision.
            max_batch: Maximum samples per batch; bounds the memory of logits.
            max_batch_tokens: Maximum tokens per batch; bounds the key/value cache. A single prompt may exceed both.
            device: Device of the model.
            check_interrupts: Called before each token; raises to end sampling.
        """
        if precision not in COMPUTE_DTYPES:
            raise ValueError(f"rollout precision is {precision!r} but must be one of {', '.join(COMPUTE_DTYPES)}.")
        self.weight_version = 0
        self._is_asked = False
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._check_interrupts = check_interrupts
        self._max_batch_tokens = max_batch_tokens
        self._model = load_model(hf_checkpoint, COMPUTE_DTYPES[precision]).to(device)
        self._weights = weights_by_file_name(self._model)
        self._precision: Precision = precision
        self._roundings = roundings(self._model, precision, router_bits)
        for name in self._roundings:
            self._assign(name, self._weights[name])
        self._eos_token_ids = eos_token_ids(self._model, tokenizer)
        self.max_context_len = getattr(self._model.config, "max_position_embeddings", None)

    def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, *, num_groups: int | None = None
    ) -> CompletedRollout:
        """Samples immediately; `num_groups` is not supported."""
        if num_groups is not None:
            raise ValueError("the local engine completes all groups of a rollout; use --rollout-engine sglang.")
        return CompletedRollout(self.generate(prompts, sampling, seed))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[list[Sample]]:
        """See `engine.RolloutEngine`; raises ValueError if a prompt leaves no room for a response."""
        requests = self._requests(prompts, sampling)
        groups = map_over_ranks(lambda share: self._respond(share, sampling, seed), requests)
        return [
            [
                self._sample(prompt, response, group_index, group_index * sampling.n_samples + index)
                for index, response in enumerate(responses)
            ]
            for group_index, (prompt, responses) in enumerate(zip(prompts, groups, strict=True))
        ]

    def submit_function(
        self,
        prompts: Sequence[Prompt],
        function: RolloutFunction,
        sampling: Sampling,
        seed: int,
        *,
        concurrency: int,
        num_groups: int | None = None,
    ) -> CompletedRollout:
        """Calls the function immediately, in an event loop of this thread; see `engine.RolloutEngine`.

        Continuous batching answers the requests; a function that blocks the loop delays all others. A sample depends
        only on the seed, its prompt, the weights and the function, not on the concurrency or the rank.

        Raises:
            ValueError: The model does not support continuous batching, or `num_groups` is given.
        """
        if num_groups is not None:
            raise ValueError("the local engine completes all groups of a rollout; use --rollout-engine sglang.")

        def make(groups: Sequence[Sequence[FunctionCall]]) -> None:
            batching = ContinuousBatching(
                self._model,
                self._tokenizer,
                eos_token_ids=self._eos_token_ids,
                context_len=self.max_context_len,
                weight_version=self.weight_version,
                records_routing=sampling.records_routing,
                max_batch=self._max_batch,
                max_batch_tokens=self._max_batch_tokens,
                check_interrupts=self._check_interrupts,
            )
            vocab_size = self._model.get_input_embeddings().num_embeddings
            self._is_asked = True
            try:
                run(make_rollouts(batching, groups, function, sampling, concurrency, vocab_size))
            finally:
                self._is_asked = False

        groups = calls_over_ranks(make, new_groups(prompts, sampling.n_samples, seed))
        return CompletedRollout(groups)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Loads all weights and rounds them.

        Args:
            source: Yields Hugging Face names and whole tensors, without the output layer if it is tied.
            version: Version of tokens sampled from now on.

        Raises:
            ValueError: An unknown name, a wrong shape, or a missing parameter.
            RuntimeError: Functions have requests in flight, whose caches belong to the current weights.
        """
        if self._is_asked:
            raise RuntimeError("weights cannot change while functions use the local engine; update them afterwards.")
        arrived = set()
        for name, tensor in source():
            self._check(name, tensor, version)
            self._assign(name, tensor)
            arrived.add(self._weights[name].data_ptr())
        missing = [name for name, weight in self._weights.items() if weight.data_ptr() not in arrived]
        if missing:
            raise ValueError(
                f"weight update {version} lacks {len(missing)} parameters of the rollout model, the first of "
                f"them {missing[0]!r}."
            )
        self.weight_version = version

    def weight_precision(self, name: str) -> Precision:
        """The 8-bit precision of rounded tensors, else the tensor's dtype; router biases stay in float32."""
        rounding, held = ROUNDINGS.get(self._precision), self._weights.get(name)
        if rounding is not None and self._roundings.get(name) is rounding:
            return self._precision
        return "bf16" if held is not None and held.dtype == torch.bfloat16 else "fp32"

    def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors whose rows differ in any bit, except routers with their own rounding."""
        rounding = ROUNDINGS.get(self._precision)
        comparable = {name: rows for name, rows in sent.items() if self._roundings.get(name) in (None, rounding)}
        held = self._weights | {OUTPUT_LAYER: self._model.get_output_embeddings().weight}  # also if it is tied
        return {
            NAME: [
                name
                for name, rows in comparable.items()
                if not torch.equal(held[name][rows.first :: rows.stride].float().cpu(), rows.rows)
            ]
        }

    @torch.no_grad()
    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """See `engine.RolloutEngine`."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        log_probs = log_softmax(self._model(ids).logits[0, :-1])
        return {NAME: log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist()}

    def unfinished(self) -> list[list[Sample]]:
        """An empty list: every response is complete."""
        return []

    def resume_unfinished(self, groups: list[list[Sample]]) -> None:
        """Raises ValueError if another engine left unfinished groups."""
        if groups:
            raise ValueError(
                f"the checkpoint has {len(groups)} unfinished groups of a partial rollout; resume with "
                "--rollout-engine sglang --partial-rollout."
            )

    def metrics(self) -> dict[str, float]:
        """An empty dict."""
        return {}

    def save_weights(self, directory: Path) -> None:
        """Writes the rounded weights into a checkpoint."""
        save_file({name: weight.cpu() for name, weight in self._tensors()}, directory / ROLLOUT_WEIGHTS)

    def load_weights(self, directory: Path, version: int) -> None:
        """Loads the weights that `save_weights` wrote, without rounding them again."""
        with safe_open(str(directory / ROLLOUT_WEIGHTS), "pt") as file, torch.no_grad():
            for name, weight in self._tensors():
                weight.copy_(file.get_tensor(name))
        self.weight_version = version

    def close(self) -> None:
        """Frees the model."""
        del self._model, self._weights

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weight tensors, each once."""
        persistent = self._model.state_dict().keys()
        yield from self._model.named_parameters()
        yield from ((name, buffer) for name, buffer in self._model.named_buffers() if name in persistent)

    def _check(self, name: str, tensor: Tensor, version: int) -> None:
        if name not in self._weights:
            raise ValueError(f"weight update {version} has {name!r}, which the rollout model does not have.")
        expected = self._weights[name].shape
        if tensor.shape != expected:
            raise ValueError(
                f"weight update {version} has {name!r} of shape {tuple(tensor.shape)}, but the rollout model "
                f"has it of shape {tuple(expected)}."
            )

    def _assign(self, name: str, tensor: Tensor) -> None:
        with torch.no_grad():
            rounding = self._roundings.get(name)
            self._weights[name].copy_(tensor if rounding is None else rounding(tensor))

    def _requests(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[_Request]:
        seen: Counter[int] = Counter()
        requests = []
        for prompt in prompts:
            limit = response_limit(prompt, sampling, self.max_context_len)
            requests.append(_Request(prompt=prompt, occurrence=seen[prompt.index], limit=limit))
            seen[prompt.index] += 1
        return requests

    def _respond(self, requests: Sequence[_Request], sampling: Sampling, seed: int) -> list[list[Generation]]:
        """The responses to this rank's prompts, decoded in batches of prompts of similar length."""
        groups: dict[int, list[Generation]] = {}
        for indices in self._batches(requests, sampling.n_samples):
            responses = self._respond_batch([requests[index] for index in indices], sampling, seed)
            groups.update(zip(indices, responses, strict=True))
        return [groups[index] for index in range(len(requests))]

    def _batches(self, requests: Sequence[_Request], n_samples: int) -> Iterator[list[int]]:
        """Indices of prompts, shortest first, in batches within the two bounds."""
        batch: list[int] = []
        limit = 0
        for index in sorted(range(len(requests)), key=lambda index: len(requests[index].prompt.token_ids)):
            request, samples = requests[index], (len(batch) + 1) * n_samples
            limit = max(limit, request.limit)
            tokens = samples * (len(request.prompt.token_ids) + limit)
            if batch and (samples > self._max_batch or tokens > self._max_batch_tokens):
                yield batch
                batch, limit = [], request.limit
            batch.append(index)
        if batch:
            yield batch

    def _respond_batch(self, requests: list[_Request], sampling: Sampling, seed: int) -> list[list[Generation]]:
        n_samples, longest = sampling.n_samples, max(request.limit for request in requests)
        uniforms = [
            prompt_uniforms(seed, request.prompt.index, request.occurrence, n_samples, sampling.max_response_len)[
                :, :longest
            ]
            for request in requests
        ]
        decoded = decode(
            self._model,
            [request.prompt.token_ids for request in requests],
            [request.limit for request in requests],
            torch.cat(uniforms),
            sampling,
            [*self._eos_token_ids, *sampling.stop_token_ids],
            self._check_interrupts,
        )
        responses = self._responses(decoded, sampling)
        return [responses[start : start + n_samples] for start in range(0, len(responses), n_samples)]

    def _responses(self, decoded: Decoded, sampling: Sampling) -> list[Generation]:
        lengths, stopped = decoded.lengths_B.tolist(), decoded.stopped_B.tolist()
        responses = []
        for sample, length in enumerate(lengths):
            routing = None if decoded.routing is None else decoded.routing[sample]
            ids = decoded.tokens_BT[sample, :length].tolist()  # the tensors are as long as a response may be
            responses.append(
                Generation(
                    token_ids=ids,
                    log_probs=decoded.log_probs_BT[sample, :length].tolist(),
                    weight_versions=[self.weight_version] * length,
                    finish_reason="stop" if stopped[sample] else "length",
                    text=self._tokenizer.decode(ids, skip_special_tokens=True),
                    sampling_mask=None if decoded.sampling_masks is None else decoded.sampling_masks[sample],
                    routed_experts=routing.experts.cpu() if routing and sampling.return_routed_experts else None,
                    routing_weights=routing.weights.cpu() if routing and sampling.return_routing_weights else None,
                )
            )
        return responses

    def _sample(self, prompt: Prompt, response: Generation, group_index: int, index: int) -> Sample:
        return Sample(
            prompt=prompt,
            group_index=group_index,
            index=index,
            tokens=[*prompt.token_ids, *response.token_ids],
            response=response.text,
            response_length=len(response.token_ids),
            rollout_log_probs=response.log_probs,
            loss_mask=[1] * len(response.token_ids),
            weight_versions=response.weight_versions,
            status=STATUS[response.finish_reason],
            rollout_routed_experts=response.routed_experts,
            rollout_routing_weights=response.routing_weights,
            sampling_mask=response.sampling_mask,
        )


async def make_rollouts(
    batching: ContinuousBatching,
    groups: Sequence[Sequence[FunctionCall]],
    function: RolloutFunction,
    sampling: Sampling,
    concurrency: int,
    vocab_size: int,
) -> None:
    """Calls a function and answers its requests; a failure of the model ends both. The calls receive their samples."""
    batch = FunctionBatch(
        groups,
        function,
        batching.answer,
        sampling,
        concurrency=concurrency,
        vocab_size=vocab_size,
        end_sample=batching.end_sample,
    )

    def ended(task: asyncio.Task[None]) -> None:
        error = CustomFunctionError(CANCELLED) if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            batch.fail(error)

    answering = asyncio.create_task(batching.run())
    answering.add_done_callback(ended)
    try:
        await batch.run()
    finally:
        await cancel_and_wait([answering])
