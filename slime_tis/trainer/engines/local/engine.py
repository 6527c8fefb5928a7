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
from slime_tis.trainer.data.sample import STATUS, FinishReason, Prompt, Sample, Sampling, response_limit
from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.engines.engine import SentRows, WeightSource
from slime_tis.trainer.engines.functions import FunctionBatch, FunctionCall, calls_over_ranks, new_groups
from slime_tis.trainer.engines.generation import RolloutFunction
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
    """How each weight is rounded, by its name, where it is.

    Args:
        model: whose weights they are.
        precision: of the linear layers.
        router_bits: of the routers of mixture-of-experts layers; None leaves them.

    Raises:
        ValueError: routers are to be rounded, and there are none.
    """
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    if precision in ROUNDINGS:
        found = dict.fromkeys(linear_weight_names(model), ROUNDINGS[precision])
    if router_bits is not None:
        routers = [name for name, _ in model.named_parameters() if name.endswith(".mlp.gate.weight")]
        if not routers:
            raise ValueError(f"--rollout-router-bits is {router_bits} but the model has no routers; leave it out.")
        found |= dict.fromkeys(routers, partial(round_bits, bits=router_bits))
    return found


@dataclass(frozen=True)
class CompletedRollout:
    """A rollout that is there already."""

    groups: list[list[Sample]]

    @property
    def progress(self) -> tuple[int, int]:
        """Responses that are complete, and all."""
        total = sum(map(len, self.groups))
        return total, total

    def result(self) -> list[list[Sample]]:
        """The groups."""
        return self.groups


@dataclass(frozen=True, kw_only=True)
class _Request:
    prompt: Prompt
    occurrence: int  # how often the same prompt occurs earlier in the batch
    limit: int  # tokens that a response may have


@dataclass(frozen=True, kw_only=True)
class _Response:
    """One sample without its prompt, which the other ranks have."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    text: str
    routed_experts: Tensor | None
    routing_weights: Tensor | None
    sampling_mask: SamplingMask | None


class LocalEngine:
    """Samples with a Hugging Face model held in this process, as `engine.RolloutEngine` asks.

    Each prompt is run once and its cache shared by its samples. What a sample is depends on nothing but the
    seed, its prompt and the weights: neither on the batch nor on the rank it is made in. In a
    torch.distributed job every rank holds the whole model and samples its share of the prompts.

    Precisions: fp32; bf16 runs the whole model in bfloat16; fp8 and int8 round the weights of the linear
    layers and experts (not embeddings, norms, biases, routers and the output layer) and compute in float32,
    which emulates the weight rounding of such engines and not their rounding of activations.
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
            hf_checkpoint: directory with config.json and weights of a causal language model.
            tokenizer: of the checkpoint.
            precision: fp32, bf16, fp8 or int8.
            router_bits: width that the routers of mixture-of-experts layers are rounded to; None leaves them as the
              precision has them.
            max_batch: most samples decoded at a time, which bounds the memory of logits.
            max_batch_tokens: most prompt and response tokens of samples decoded at a time, which bounds that of
              the key/value cache. The samples of one prompt are decoded together whatever the bounds.
            device: where the model lives.
            check_interrupts: called before each token, and raises where sampling is to be given up.
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
        """Samples at once: there is nothing in the background, and no straggler to leave out."""
        if num_groups is not None:
            raise ValueError("the local engine decodes whole batches: it has no stragglers to leave out.")
        return CompletedRollout(self.generate(prompts, sampling, seed))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[list[Sample]]:
        """Samples `sampling.n_samples` responses to each prompt; see `engine.RolloutEngine`.

        Raises:
            ValueError: a prompt leaves no tokens for a response in the context.
        """
        requests = self._requests(prompts, sampling)
        groups = map_over_ranks(lambda share: self._respond(share, sampling, seed), requests)
        return [
            [
                self._sample(prompt, response, group_index, group_index * sampling.n_samples + place)
                for place, response in enumerate(responses)
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
        """Calls the function at once, in an event loop of this thread; see `engine.RolloutEngine`.

        Requests are batched continuously, in slots of a cache that lasts for this call; a function that blocks the
        loop holds up all others. What a sample is follows from the seed, its prompt, the weights and what the function
        does: how many are made at once, and on which rank, does not matter.

        Raises:
            ValueError: The model cannot be batched so, or `num_groups` is given.
        """
        if num_groups is not None:
            raise ValueError("the local engine makes all groups of a rollout: it has no stragglers to leave out.")

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
        """Takes a whole set of weights.

        Args:
            source: Yields Hugging Face names and whole tensors; each is rounded as it arrives. The output layer may be
                missing where it is tied to the embedding.
            version: Version that the tokens sampled from now on carry.

        Raises:
            ValueError: an unknown name, a shape that differs from the checkpoint's, or a missing parameter.
            RuntimeError: functions are asking the engine, whose caches are of the weights in use.
        """
        if self._is_asked:
            raise RuntimeError("weights cannot change while functions ask the local engine; update them afterwards.")
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
        """8 bits where the tensor is rounded to them, else its type: some, such as routers' biases, stay in float32."""
        rounding, held = ROUNDINGS.get(self._precision), self._weights.get(name)
        if rounding is not None and self._roundings.get(name) is rounding:
            return self._precision
        return "bf16" if held is not None and held.dtype == torch.bfloat16 else "fp32"

    def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors whose rows differ in any bit, but for routers that are rounded on their own."""
        rounding = ROUNDINGS.get(self._precision)
        comparable = {name: one for name, one in sent.items() if self._roundings.get(name) in (None, rounding)}
        held = self._weights | {OUTPUT_LAYER: self._model.get_output_embeddings().weight}  # also where it is tied
        return {
            NAME: [
                name
                for name, one in comparable.items()
                if not torch.equal(held[name][one.first :: one.stride].float().cpu(), one.rows)
            ]
        }

    @torch.no_grad()
    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs of a text's tokens but the first; see `engine.RolloutEngine`."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        log_probs = log_softmax(self._model(ids).logits[0, :-1])
        return {NAME: log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist()}

    def unfinished(self) -> list[list[Sample]]:
        """An empty list: every response is complete."""
        return []

    def resume_unfinished(self, groups: list[list[Sample]]) -> None:
        """Refuses what another engine left."""
        if groups:
            raise ValueError(
                f"the checkpoint has {len(groups)} unfinished groups of a partial rollout; resume with "
                "--rollout-engine sglang --partial-rollout."
            )

    def metrics(self) -> dict[str, float]:
        """Counts of the engine: it has none."""
        return {}

    def save_weights(self, directory: Path) -> None:
        """Writes the weights in use, rounded as they are, into a checkpoint."""
        save_file({name: weight.cpu() for name, weight in self._tensors()}, directory / ROLLOUT_WEIGHTS)

    def load_weights(self, directory: Path, version: int) -> None:
        """Takes up the weights that `save_weights` wrote, which are not rounded again."""
        with safe_open(str(directory / ROLLOUT_WEIGHTS), "pt") as file, torch.no_grad():
            for name, weight in self._tensors():
                weight.copy_(file.get_tensor(name))
        self.weight_version = version

    def close(self) -> None:
        """Lets the model go."""
        del self._model, self._weights

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that hold the weights, each once."""
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

    def _respond(self, requests: Sequence[_Request], sampling: Sampling, seed: int) -> list[list[_Response]]:
        """The responses to some of the prompts, decoded in batches of prompts of like length."""
        groups: dict[int, list[_Response]] = {}
        for places in self._batches(requests, sampling.n_samples):
            responses = self._respond_batch([requests[place] for place in places], sampling, seed)
            groups.update(zip(places, responses, strict=True))
        return [groups[place] for place in range(len(requests))]

    def _batches(self, requests: Sequence[_Request], n_samples: int) -> Iterator[list[int]]:
        """Places of prompts, shortest first, cut where a batch would pass one of the two bounds."""
        batch: list[int] = []
        limit = 0
        for place in sorted(range(len(requests)), key=lambda place: len(requests[place].prompt.token_ids)):
            request, samples = requests[place], (len(batch) + 1) * n_samples
            limit = max(limit, request.limit)
            tokens = samples * (len(request.prompt.token_ids) + limit)
            if batch and (samples > self._max_batch or tokens > self._max_batch_tokens):
                yield batch
                batch, limit = [], request.limit
            batch.append(place)
        if batch:
            yield batch

    def _respond_batch(self, requests: list[_Request], sampling: Sampling, seed: int) -> list[list[_Response]]:
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

    def _responses(self, decoded: Decoded, sampling: Sampling) -> list[_Response]:
        lengths, stopped = decoded.lengths_B.tolist(), decoded.stopped_B.tolist()
        responses = []
        for sample, length in enumerate(lengths):
            routing = None if decoded.routing is None else decoded.routing[sample]
            ids = decoded.tokens_BT[sample, :length].tolist()  # the tensors are as long as a response may be
            responses.append(
                _Response(
                    token_ids=ids,
                    log_probs=decoded.log_probs_BT[sample, :length].tolist(),
                    finish_reason="stop" if stopped[sample] else "length",
                    text=self._tokenizer.decode(ids, skip_special_tokens=True),
                    sampling_mask=None if decoded.sampling_masks is None else decoded.sampling_masks[sample],
                    routed_experts=routing.experts.cpu() if routing and sampling.return_routed_experts else None,
                    routing_weights=routing.weights.cpu() if routing and sampling.return_routing_weights else None,
                )
            )
        return responses

    def _sample(self, prompt: Prompt, response: _Response, group_index: int, index: int) -> Sample:
        return Sample(
            prompt=prompt,
            group_index=group_index,
            index=index,
            tokens=[*prompt.token_ids, *response.token_ids],
            response=response.text,
            response_length=len(response.token_ids),
            rollout_log_probs=response.log_probs,
            loss_mask=[1] * len(response.token_ids),
            weight_versions=[self.weight_version] * len(response.token_ids),
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
    """Calls a function while its requests are answered; a failure of the model ends both.

    Args:
        batching: Answers requests.
        groups: Calls for each prompt, which get their samples.
        function: Makes one rollout.
        sampling: The run's own.
        concurrency: Most calls at once.
        vocab_size: Number of token ids of the model.
    """
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
