"""Responses of servers, each by one or more requests."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from slime_tis.trainer.data.sample import (
    Numbers,
    Prompt,
    Sample,
    Sampling,
    SamplingMask,
    check_room,
)
from slime_tis.trainer.engines.event_loops import cancel_and_wait
from slime_tis.trainer.engines.function_requests import (
    Generation,
    Request,
    RequestOptions,
    StopStrings,
    response_text,
    sample_of,
)
from slime_tis.trainer.engines.function_rollouts import FunctionBatch
from slime_tis.trainer.engines.servers.api import GenerateRequest
from slime_tis.trainer.engines.servers.client import ABORT_INTERVAL, ABORT_TIMEOUT, Server
from slime_tis.trainer.engines.servers.dispatcher import Dispatcher
from slime_tis.trainer.engines.servers.errors import (
    RequestRefused,
    ServerError,
    UnexpectedWeights,
)
from slime_tis.trainer.engines.servers.health import ServerState

ABORTED_PAUSE = 0.01
"""Seconds before a request is answered with abort, so that functions which retry do not block the
loop."""
TOP_K_TIE_MARGIN = 4
"""With top-p only, top-k is set to 3/4 of the servers' mask limit: 1 / TOP_K_TIE_MARGIN stays free.

Tokens as likely as the last one also enter the mask, and a server aborts a request whose mask is
larger than its limit."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The lengths, tokens and masks that the servers can sample."""

    context_len: int | None
    vocab_size: int | None
    max_input_len: int | None
    """Longest input of all servers."""
    max_total_len: int | None
    """Longest input and response of all servers, which may have a shorter context."""
    mask_tokens: int | None
    """Largest sampling mask that all servers report; None if the run samples without masks."""

    def for_prompt(self, prompt: Prompt, sampling: Sampling) -> int:
        """Maximum length of the response; raises ValueError if it is below 1."""
        check_room(prompt, sampling, self.context_len, self.max_input_len)
        return max(self.after(len(prompt.token_ids), sampling), 1)

    def after(self, length: int, sampling: Sampling) -> int:
        """Maximum number of tokens after an input of this length; below 1 if none fit."""
        if self.max_input_len is not None and length > self.max_input_len:
            return 0
        lengths = [sampling.max_response_len]
        if sampling.max_context_len is not None:
            lengths.append(sampling.max_context_len - length)
        if self.context_len is not None:
            # SGLang may refuse a request that fills the context.
            lengths.append(self.context_len - 1 - length)
        if self.max_total_len is not None:
            lengths.append(self.max_total_len - length)
        return min(lengths)

    def with_reported_masks(self, sampling: Sampling) -> Sampling:
        """Replaces top-k so that servers report the sampling masks, or disables masks."""
        limit = self.mask_tokens
        if limit is None or not sampling.return_sampling_mask:
            return replace(sampling, return_sampling_mask=False)
        if sampling.top_k != -1:
            return sampling
        return replace(sampling, top_k=limit - limit // TOP_K_TIE_MARGIN)


NOTHING = Generation.of(Sample())
"""A response without tokens."""


@dataclass(eq=False, kw_only=True)
class PendingSample:
    """A partial response. Experts that do not cover it are dropped."""

    prompt_ids: list[int]
    max_new_tokens: int
    seed: int | None = None
    session: str | None = None
    """Hash of the sample's number and its conversation's name; None for a sample with one
    answer."""
    answer: Generation = NOTHING
    """The response so far; incomplete while its finish reason is abort."""
    num_requests: int = 0
    request: tuple[Server, str] | None = None
    """Server and id of the request in flight; a new tuple per request."""

    def __post_init__(self) -> None:
        experts = self.answer.routed_experts
        if experts is not None and len(experts) != len(self.input_ids) - 1:
            self.answer = replace(self.answer, routed_experts=None)
        self.finish_if_full()

    @property
    def input_ids(self) -> list[int]:
        """Prompt and sampled tokens."""
        return self.prompt_ids + self.answer.token_ids

    @property
    def is_complete(self) -> bool:
        """Whether the response has ended."""
        return self.answer.finish_reason != "abort"

    @property
    def remaining_tokens(self) -> int:
        """Maximum number of tokens that may still be sampled."""
        return self.max_new_tokens - len(self.answer.token_ids)

    @property
    def first_experts(self) -> int | None:
        """First token whose experts must be recorded; None if earlier experts are missing."""
        if not self.answer.token_ids:
            return 0
        if self.answer.routed_experts is None:
            return None
        return len(self.answer.routed_experts)

    @property
    def unrecorded_layer(self) -> int | None:
        """First layer whose kernels record nothing: all tokens have expert 0. Else None."""
        experts = self.answer.routed_experts
        # For k > 1, ExpertText already checks that a token's experts are distinct.
        if not self.is_complete or experts is None or not len(experts) or experts.shape[-1] > 1:
            return None
        is_unrecorded = (experts == 0).all(-1).all(0)  # [sparse layers]
        if not is_unrecorded.any():
            return None
        return int(is_unrecorded.nonzero()[0])

    def append(self, later: Generation) -> None:
        """Adds the tokens of a request; after an aborted request the response is incomplete."""
        first = self.answer
        if not later.token_ids:
            experts = first.routed_experts
        elif not first.token_ids:
            experts = later.routed_experts
        elif first.routed_experts is None or later.routed_experts is None:
            experts = None
        else:
            experts = torch.cat([first.routed_experts, later.routed_experts])
        mask = None
        if first.sampling_mask is not None or later.sampling_mask is not None:
            mask = SamplingMask.cat([first.candidates, later.candidates])
        self.answer = replace(
            later,
            token_ids=first.token_ids + later.token_ids,
            log_probs=first.log_probs + later.log_probs,
            weight_versions=first.weight_versions + later.weight_versions,
            workers=first.workers + later.workers,
            routed_experts=experts,
            sampling_mask=mask,
        )
        self.finish_if_full()

    def finish_if_full(self, max_input_len: int | None = None) -> None:
        """Ends the response with reason length if no token may follow.

        Either none remains, or the response has tokens and the input is too long for the servers.
        """
        if self.is_complete:
            return
        is_too_long = (
            max_input_len is not None
            and len(self.input_ids) > max_input_len
            and len(self.answer.token_ids) > 0
        )
        if self.remaining_tokens < 1 or is_too_long:
            self.answer = replace(self.answer, finish_reason="length")

    def stop_after(self, length: int) -> None:
        """Truncates the response to its first tokens, and ends it with reason stop."""
        answer = self.answer
        experts = answer.routed_experts
        if experts is not None:
            # The last token was not fed, so it has no experts.
            experts = experts[: len(self.prompt_ids) + length - 1].clone()
        mask = answer.sampling_mask
        if mask is not None:
            mask = mask.select(torch.arange(length))
        self.answer = replace(
            answer,
            token_ids=answer.token_ids[:length],
            log_probs=answer.log_probs[:length],
            weight_versions=answer.weight_versions[:length],
            workers=answer.workers[:length],
            finish_reason="stop",
            routed_experts=experts,
            sampling_mask=mask,
        )

    def generation(self, tokenizer: PreTrainedTokenizerBase, options: RequestOptions) -> Generation:
        """Returns the answer with its text; omits experts if a layer was not recorded."""
        text = response_text(tokenizer, self.answer.token_ids, options, self.answer.finish_reason)
        experts = self.answer.routed_experts
        if self.unrecorded_layer is not None:
            experts = None
        return replace(self.answer, text=text, routed_experts=experts)


@dataclass(eq=False, kw_only=True)
class RolloutTask:
    """Calls of a function in flight, and their requests. It belongs to one loop."""

    name: str
    """Unique prefix of the request ids, of equal width for all rollouts."""
    dispatcher: Dispatcher
    tokenizer: PreTrainedTokenizerBase
    limits: Limits
    responses: dict[int, PendingSample]
    """Responses that are sampled without a function, by the number of the sample."""
    batch: FunctionBatch = field(init=False)
    task: asyncio.Task[None] | None = None
    """The task of `run`."""
    stopping: bool = False
    """Whether requests are aborted and no new ones are sent."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _responses: dict[asyncio.Task[None], PendingSample] = field(default_factory=dict)
    _interrupted: set[PendingSample] = field(default_factory=set)

    async def run(self) -> None:
        """Calls the function until enough groups are complete."""
        self.task = asyncio.current_task()
        await self.batch.run()

    async def complete(self, sample: Sample, _: object) -> list[Sample]:
        """Samples the response of a sample without a function."""
        assert sample.index is not None
        response = self.responses[sample.index]
        sampling = self.batch.sampling
        options = RequestOptions(sampling=sampling, stop=sampling.stop, no_stop_trim=True)
        await self.finish(response, options)
        return [sample_of(sample.row, response.generation(self.tokenizer, options))]

    async def answer(self, request: Request) -> Generation:
        """Answers one request; aborts it once enough groups are complete."""
        if self.stopping:
            await asyncio.sleep(ABORTED_PAUSE)
        sampling = self.limits.with_reported_masks(request.options.sampling)
        options = replace(request.options, sampling=sampling)
        # The session becomes a header, which must be ASCII.
        session = hashlib.blake2b(repr(request.session).encode(), digest_size=8).hexdigest()
        response = PendingSample(
            prompt_ids=request.token_ids,
            max_new_tokens=self.limits.after(len(request.token_ids), sampling),
            seed=seed_of(request.key),
            session=session,
        )
        try:
            await self.finish(response, options)
        except Exception as error:  # functions may catch and ignore it
            self.batch.fail(error)
            raise
        return response.generation(self.tokenizer, options)

    async def finish(self, response: PendingSample, options: RequestOptions) -> None:
        """Samples a response until it ends or requests are aborted; raises the errors of `run`."""
        request_id = f"{self.name}-{next(self._numbers) % 10**8:08d}"
        task = asyncio.create_task(self._finish(response, options, request_id))
        self._responses[task] = response
        try:
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()
        finally:
            await cancel_and_wait([task])
            del self._responses[task]
        # A server searches stop strings only in the tokens of one request.
        if options.stop and response.num_requests > 1:
            end = StopStrings(self.tokenizer, options.stop).first(response.answer.token_ids)
            if end is not None:
                response.stop_after(end)

    async def stop(self) -> None:
        """Aborts all requests in flight, which return partial responses, and sends no more."""
        self.stopping = True

        def in_flight() -> list[tuple[Server, str]]:
            requests = []
            for task, response in self._responses.items():
                if response.request is None:  # it waits for a server
                    task.cancel()
                elif not task.done():
                    requests.append(response.request)
            return requests

        await _abort_all(in_flight)

    async def end_before_update(self) -> None:
        """Aborts requests for experts before an update.

        After the update, servers would feed their earlier tokens again, which would get other
        experts. The aborted responses continue with new requests.
        """
        if not self.batch.sampling.return_routed_experts:
            return
        requests: dict[PendingSample, tuple[Server, str]] = {}
        for response in self._responses.values():
            if response.request is not None:
                requests[response] = response.request
        self._interrupted.update(requests)

        def in_flight() -> list[tuple[Server, str]]:
            # A response may have sent its next request meanwhile, which has another tuple.
            return [
                request for response, request in requests.items() if response.request is request
            ]

        await _abort_all(in_flight)

    async def _finish(
        self, response: PendingSample, options: RequestOptions, request_id: str
    ) -> None:
        failed_on: list[ServerState] = []
        while not response.is_complete and not self.stopping:
            response.finish_if_full(self.limits.max_input_len)
            if not response.is_complete:
                async with self.dispatcher.server(failed_on) as state:
                    number = response.num_requests % 1000
                    await self._request(response, options, state, f"{request_id}-t{number:03d}")

    async def _request(
        self, response: PendingSample, options: RequestOptions, state: ServerState, request_id: str
    ) -> None:
        server = state.server
        health = self.dispatcher.health
        first_version = health.version_of(state)
        # Without a conversation, the common prefix of the response's request ids is the session.
        session = request_id.rpartition("-")[0]
        if response.session is not None:
            session = f"{self.name}-{response.session}"
        takes_seeds = health.takes_seeds(state)
        # Updates of an adapter leave the weights below it, which keep their name.
        initial_version = 0 if server.api.adapter is not None else health.initial_version(state)
        records_experts = options.sampling.return_routed_experts
        request = GenerateRequest(
            input_ids=response.input_ids,
            sampling=options.sampling,
            max_new_tokens=response.remaining_tokens,
            request_id=request_id,
            session=session,
            seed=response.seed if takes_seeds else None,
            first_experts=response.first_experts if records_experts else None,
            stop=options.stop,
            initial_version=initial_version,
        )
        self._interrupted.discard(response)
        response.num_requests += 1
        response.request = (server, request_id)
        try:
            completion, problem = await server.generate(request)
        except RequestRefused as error:
            if not await server.has_adapter():
                raise UnexpectedWeights(f"{server.url} has lost its LoRA adapter.") from error
            raise
        finally:
            response.request = None
        if server.api.adapter is None:
            health.check_versions(state, first_version, completion.weight_versions)
        else:
            # The server reports the version of the weights below the adapter, which is 0 as long
            # as no run replaces them.
            if any(completion.weight_versions):
                raise UnexpectedWeights(f"{server.url} got the weights of another run.")
            # The request named the adapter, and keeps it over an update.
            versions = Numbers("q", [first_version] * len(completion.token_ids))
            completion = replace(completion, weight_versions=versions)
        if problem is not None:
            health.note_missing_experts(server, problem)
        workers = Numbers("i", [state.index] * len(completion.token_ids))
        response.append(replace(completion, workers=workers))
        if response.unrecorded_layer is not None:
            problem = (
                "every token of a response went to expert 0 of sparse layer"
                f" {response.unrecorded_layer}, as if it were not recorded"
            )
            health.note_missing_experts(server, problem)
        if not completion.token_ids and not self.stopping and response not in self._interrupted:
            raise ServerError(f"{server.url} aborted a request before its first token.")


def seed_of(key: bytes) -> int:
    """The seed of a request, below 2^63."""
    return int.from_bytes(key[:8], "big") >> 1


async def _abort_all(in_flight: Callable[[], Iterable[tuple[Server, str]]]) -> None:
    """Aborts requests repeatedly: a server ignores the abort of a request that it has not read."""
    wait = 0.01
    with suppress(TimeoutError):
        async with asyncio.timeout(ABORT_TIMEOUT):
            while requests := list(in_flight()):
                await asyncio.gather(*(server.abort(request_id) for server, request_id in requests))
                await asyncio.sleep(wait)
                wait = min(2 * wait, ABORT_INTERVAL)
