"""The rollout engine that samples from SGLang servers over HTTP.

It connects the synchronous program, an asyncio loop in a background thread that talks to the servers, and the other
ranks of a torch.distributed job, which return or raise rank 0's outcome.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx

from slime_tis.errors import CustomFunctionError
from slime_tis.hf_directory import model_sizes, read_model_config
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling, response_limit
from slime_tis.trainer.engines.engine import EngineHost, RolloutUnavailable, SentRows, WeightSource
from slime_tis.trainer.engines.functions import FunctionBatch, divided_calls, resumed_groups
from slime_tis.trainer.engines.generation import RolloutFunction
from slime_tis.trainer.engines.sglang.errors import RequestRefused
from slime_tis.trainer.engines.sglang.launch import LaunchedServers
from slime_tis.trainer.engines.sglang.loop_thread import LoopThread
from slime_tis.trainer.engines.sglang.rank_zero import RankZero
from slime_tis.trainer.engines.sglang.sampling import FunctionRequests, PendingSample, Requests, RolloutBatch
from slime_tis.trainer.engines.sglang.server_group import ServerGroup, SGLangSettings
from slime_tis.trainer.engines.tasks import CANCELLED
from slime_tis.trainer.engines.weight_rounding import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Groups = list[list[Sample]]
Result = TypeVar("Result")

SAFE_POINT_INTERVAL = 1.0
"""Seconds between two safe points while a rollout is awaited."""
INPUT_MARGIN = 6
"""SGLang's max_req_input_len is this much shorter than the context: it reserves tokens for the response."""
TOP_K_TIE_MARGIN = 4
"""With top-p only, top-k is the servers' limit on sampling masks minus 1/4 of it. Tokens as likely as the last one also
enter the mask, and a server aborts a request whose mask is larger than its limit."""


class SGLangEngine:
    """Samples with SGLang servers; see `engine.RolloutEngine`.

    Servers draw their own random numbers: an equal run gets other samples, unless servers are started with
    --enable-deterministic-inference; then each response has its own seed.
    """

    can_checkpoint_weights = False

    precision: Precision | None
    """Precision of the servers' weights, the same on every rank; None if it is unknown, differs or is quantized."""

    _servers: ServerGroup
    """On rank 0 only."""

    def __init__(self, settings: SGLangSettings, tokenizer: PreTrainedTokenizerBase, host: EngineHost) -> None:
        """Launches servers if configured, and waits for all servers; a collective.

        Raises:
            RolloutUnavailable: No server comes up.
            ValueError: The config names no server, or the servers refuse the key or lack what the settings need.
        """
        self.weight_version = 0
        self._settings, self._tokenizer, self._host = settings, tokenizer, host
        self._model = read_model_config(host.hf_checkpoint)
        self._sizes = model_sizes(self._model)
        self._run_id, self._num_batches = secrets.token_hex(4), 0
        self._unfinished: Groups = []
        self._partial_in_flight = False
        self._stack = ExitStack()
        self._rank_zero = RankZero()
        connected = self._rank_zero.run(lambda _: self._connect(), host.weights)
        self._max_input_len, self._mask_tokens, self.precision = connected
        lengths = (self._sizes.context_len, self._max_input_len)
        self.max_context_len = min((length for length in lengths if length is not None), default=None)

    def _connect(self) -> tuple[int | None, int | None, Precision | None]:
        """Connects rank 0; returns the longest input, the largest sampling mask and the precision of the servers."""
        settings, config = self._settings, self._settings.config
        config.check_has_servers()
        with ExitStack() as stack:
            launched = None
            if config.sglang_launch is not None:
                launched = LaunchedServers(
                    config, self._host.hf_checkpoint, self._host.output_dir, records_experts=settings.records_experts
                )
                stack.callback(launched.stop)
                launched.start()
            self._loop = stack.enter_context(LoopThread("sglang"))
            self._servers = servers = ServerGroup(settings, self._host, self._sizes.vocab_size, launched)
            self._loop.run(servers.connect())
            stack.callback(lambda: self._loop.run(servers.close()))
            servers.check_routed_experts()
            mask_tokens, precision = servers.sampling_mask_tokens(), servers.precision(self._model)
            self._stack = stack.pop_all()
        return servers.max_input_len, mask_tokens, precision

    def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int = 0, *, num_groups: int | None = None
    ) -> SGLangRollout:
        """Starts sampling; see `engine.RolloutEngine`.

        With `num_groups` the rollout is the first groups to complete. The next call with `num_groups` resumes the
        others before its own prompts. Only servers that take seeds use `seed`.

        Raises:
            ValueError: A prompt leaves no room for a response or has unknown tokens, or fewer than `num_groups` groups
                are in flight.
        """
        sampling = self._with_reported_masks(sampling)
        groups = [[self._pending(prompt, sampling) for _ in range(sampling.n_samples)] for prompt in prompts]
        if num_groups is not None:
            groups[:0] = [
                [PendingSample.from_sample(s, self._pending(s.row, sampling).max_new_tokens) for s in group]
                for group in self._unfinished
            ]
            self._check_num_groups(num_groups, len(groups))
        for group_index, group in enumerate(groups):
            for index, response in enumerate(group):
                response.seed = response_seed(seed, group_index, index)
        batch = None
        if self._rank_zero.is_self:
            batch = RolloutBatch(self._batch_name, groups, sampling, self._requests(sampling), num_groups=num_groups)
        return self._start(batch, lambda: self._divide(groups, num_groups), num_groups, sum(map(len, groups)))

    def submit_function(
        self,
        prompts: Sequence[Prompt],
        function: RolloutFunction,
        sampling: Sampling,
        seed: int = 0,
        *,
        concurrency: int,
        num_groups: int | None = None,
    ) -> SGLangRollout:
        """Starts calling the function on rank 0, in the loop of the servers' requests; see `engine.RolloutEngine`.

        Raises:
            ValueError: Fewer than `num_groups` groups are in flight.
        """
        unfinished = self._unfinished if num_groups is not None else []
        groups = resumed_groups(unfinished, prompts, sampling.n_samples, seed)
        if num_groups is not None:
            self._check_num_groups(num_groups, len(groups))
        requests = None
        if self._rank_zero.is_self:
            requests = FunctionRequests(
                self._batch_name,
                self._requests(sampling),
                self._tokenizer,
                sampling_of=self._with_reported_masks,
                limit_of=self._limit_after,
            )
            requests.batch = FunctionBatch(
                groups,
                function,
                requests.answer,
                sampling,
                concurrency=concurrency,
                vocab_size=self._sizes.vocab_size,
                num_groups=num_groups,
                end_requests=requests.requests.stop if num_groups is not None else None,
            )
        return self._start(requests, lambda: divided_calls(groups, num_groups), num_groups, sum(map(len, groups)))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int = 0) -> Groups:
        """`submit` and its result, in the prompts' order."""
        return self.submit(prompts, sampling, seed).result()

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Sends new weights to the servers; requests in flight pause, then continue with the new weights.

        A server that fails is marked down, and gets the weights when it comes back.
        """
        self._rank_zero.run(lambda weights: self._loop.run(self._servers.update_weights(weights, version)), source)
        self.weight_version = version

    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs at temperature 1 of all tokens but the first, by server URL."""
        return self._rank_zero.run(
            lambda _: self._loop.run(self._servers.prompt_log_probs(token_ids)), self._host.weights
        )

    def weight_precision(self, name: str) -> Precision | None:
        """The precision of all servers; None if it is unknown, and on other ranks."""
        return self.precision if self._rank_zero.is_self else None

    def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors that the update changed but whose checksum on a server stayed the same.

        By the URL of each server that returned checksums for both updates; SGLang does since 0.5.23.
        """
        return self._rank_zero.run(lambda _: self._loop.run(self._servers.wrong_weights(sent)), self._host.weights)

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the router, else the first server; see `engine.RolloutEngine`."""
        if not self._rank_zero.is_self:
            return None
        url = httpx.URL(self._servers.url)
        return (url.host, url.port or 80) if url.scheme == "http" else None

    def unfinished(self) -> Groups:
        """Aborted groups to resume; a rollout in flight adds its groups when it completes."""
        return self._unfinished

    def resume_unfinished(self, groups: Groups) -> None:
        """Restores the groups that `unfinished` returned in an earlier process."""
        self._unfinished = groups

    def metrics(self) -> dict[str, float]:
        """rollout/sglang_… counts since the start, on rank 0."""
        metrics = self._servers.metrics() if self._rank_zero.is_self else {}
        return {f"rollout/sglang_{name}": value for name, value in metrics.items()}

    def save_weights(self, directory: Path) -> None:
        """Writes nothing: checkpoints do not contain the servers' weights."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Sends the policy's current weights to the servers."""
        self.update_weights(self._host.weights, version)

    def close(self) -> None:
        """Ends all requests and stops launched servers; metrics and `unfinished` remain."""
        self._stack.close()
        self._rank_zero.close()

    def collect(self, rollout: SGLangRollout) -> Groups:
        """Waits for a rollout; a collective, for `SGLangRollout`."""

        def wait(weights: WeightSource) -> tuple[Groups, Groups]:
            assert rollout.future is not None
            self._wait(rollout.future, weights)
            return rollout.divide()

        is_partial = rollout.num_groups is not None
        self._partial_in_flight &= not is_partial
        groups, unfinished = self._rank_zero.run(wait, self._host.weights)
        self._unfinished = unfinished if is_partial else self._unfinished
        return groups

    @property
    def _weights_version(self) -> int:
        version = self._host.weights_version
        return self.weight_version if version is None else version()

    @property
    def _batch_name(self) -> str:
        return f"{self._run_id}-r{self._num_batches:08d}"

    def _requests(self, sampling: Sampling) -> Requests:
        return Requests(
            self._servers.health,
            self._servers.dispatcher,
            max_input_len=self._servers.max_input_len,  # of the servers as they are by now
            records_experts=sampling.return_routed_experts,
        )

    def _start(
        self,
        batch: RolloutBatch | FunctionRequests | None,
        divide: Callable[[], tuple[Groups, Groups]],
        num_groups: int | None,
        total: int,
    ) -> SGLangRollout:
        """Starts a batch in the background, on rank 0."""
        future = None
        if batch is not None:
            self._servers.batches.add(batch)
            future = self._loop.submit(batch.run())

            def done(_: object) -> None:
                self._servers.batches.discard(batch)
                self._servers.changed.set()

            future.add_done_callback(done)
        self._num_batches += 1
        self._partial_in_flight |= num_groups is not None
        return SGLangRollout(self, batch, future, divide, num_groups, total)

    def _wait(self, future: Future[None], weights: WeightSource) -> None:
        """Waits for a batch, and sends weights to servers that come back without them.

        Raises:
            RolloutUnavailable: No server is left, or a server refuses a request.
        """
        while not future.done():
            self._servers.changed.wait(SAFE_POINT_INTERVAL)
            self._servers.changed.clear()
            self._host.check_interrupts()
            if self._servers.waiting_for_source and not future.done():
                self._loop.run(self._servers.update_returned(weights, self._weights_version))
        try:
            future.result()
        except CancelledError:
            message = f"the engine was closed while a rollout was in flight, or {CANCELLED}"
            raise CustomFunctionError(message) from None
        except RequestRefused as error:
            raise RolloutUnavailable(str(error)) from None

    def _divide(self, groups: Sequence[Sequence[PendingSample]], num_groups: int | None) -> tuple[Groups, Groups]:
        """Returns the groups to train on, numbered from 0, and the groups to resume."""
        complete = [group for group in groups if all(response.finish_reason for response in group)][:num_groups]
        taken = set(map(id, complete))
        return self._samples(complete), self._samples([group for group in groups if id(group) not in taken])

    def _samples(self, groups: Sequence[Sequence[PendingSample]]) -> Groups:
        numbers = itertools.count()
        return [
            [response.to_sample(self._tokenizer, group_index, next(numbers)) for response in group]
            for group_index, group in enumerate(groups)
        ]

    def _pending(self, prompt: Prompt, sampling: Sampling) -> PendingSample:
        vocab_size = self._sizes.vocab_size
        limit = response_limit(prompt, sampling, self._sizes.context_len, self._max_input_len)
        if vocab_size is not None and not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocab_size:
            raise ValueError(
                f"prompt {prompt.index} has token {max(prompt.token_ids)}, but the model's vocabulary ends at "
                f"{vocab_size - 1}; use the tokenizer of --hf-checkpoint."
            )
        lengths = [max(length, 1) for length in self._server_limits(len(prompt.token_ids))]
        return PendingSample(prompt=prompt, max_new_tokens=min([limit, *lengths]))

    def _limit_after(self, length: int, sampling: Sampling) -> int:
        """Maximum number of tokens after an input of this length; below 1 if none fit."""
        limits = [sampling.max_response_len, *self._server_limits(length)]
        if sampling.max_context_len is not None:
            limits.append(sampling.max_context_len - length)
        if self._max_input_len is not None and length > self._max_input_len:
            return 0
        return min(limits)

    def _server_limits(self, length: int) -> list[int]:
        """Maximum numbers of tokens that servers sample after an input of this length."""
        limits = []
        if self._sizes.context_len is not None:  # SGLang 0.5.9 refuses a request for the whole context
            limits.append(self._sizes.context_len - 1 - length)
        if self._max_input_len is not None:  # a server may have been started with a shorter context
            limits.append(self._max_input_len + INPUT_MARGIN - length)
        return limits

    def _with_reported_masks(self, sampling: Sampling) -> Sampling:
        """Replaces top-k so that servers report the sampling masks, or disables masks."""
        if not sampling.return_sampling_mask:
            return sampling
        limit, vocab_size = self._mask_tokens, self._sizes.vocab_size
        cuts_nothing = sampling.top_p == 1 and vocab_size is not None and sampling.top_k >= vocab_size
        if limit is None or cuts_nothing:
            return replace(sampling, return_sampling_mask=False)
        return replace(sampling, top_k=limit - limit // TOP_K_TIE_MARGIN if sampling.top_k == -1 else sampling.top_k)

    def _check_num_groups(self, num_groups: int, in_flight: int) -> None:
        if not 0 < num_groups <= in_flight:
            raise ValueError(f"num_groups is {num_groups} but {in_flight} groups are in flight; submit more prompts.")
        if self._partial_in_flight:
            raise ValueError("a partial rollout is in flight already; wait for its result first.")


@dataclass(eq=False)
class SGLangRollout:
    """A rollout in flight; batch and future are None on all ranks but rank 0."""

    engine: SGLangEngine
    batch: RolloutBatch | FunctionRequests | None
    future: Future[None] | None
    divide: Callable[[], tuple[Groups, Groups]]
    """Returns the groups to train on and the groups to resume, once the batch is done."""
    num_groups: int | None
    total: int
    groups: Groups | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers of complete and of all responses; on rank 0, from any thread."""
        return (0, self.total) if self.batch is None else self.batch.progress

    def result(self) -> Groups:
        """Waits for the groups; a collective.

        Raises:
            RolloutUnavailable: No server is left, or a server refuses a request.
        """
        if self.groups is None:
            self.groups = self.engine.collect(self)
        return self.groups


def response_seed(seed: int, group_index: int, index: int) -> int:
    """The 63-bit seed of one response of a rollout; equal seeds would give a group equal responses."""
    digest = hashlib.sha256(f"{seed} {group_index} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
