"""The rollout engine that samples from servers over HTTP, in an asyncio loop on rank 0."""

from __future__ import annotations

import ctypes
import hashlib
import pkgutil
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.event_loops import CANCELLED, LoopThread
from slime_tis.trainer.engines.function_requests import Generation, RolloutFunction
from slime_tis.trainer.engines.function_rollouts import (
    FunctionBatch,
    FunctionCall,
    is_complete,
    numbered,
    resumed_groups,
)
from slime_tis.trainer.engines.rollout_engine import (
    EngineHost,
    RolloutUnavailable,
    SentRows,
    WeightSource,
)
from slime_tis.trainer.engines.servers.api import ServerApi, served_model
from slime_tis.trainer.engines.servers.errors import RequestRefused
from slime_tis.trainer.engines.servers.launch import LaunchedServers
from slime_tis.trainer.engines.servers.responses import Limits, PendingSample, RolloutTask, seed_of
from slime_tis.trainer.engines.servers.server_group import ServerGroup, ServerSettings
from slime_tis.trainer.engines.weight_rounding import Precision
from slime_tis.trainer.rank_collectives import RankZero

Groups = list[list[Sample]]
Result = TypeVar("Result")

SAFE_POINT_INTERVAL = 1.0
"""Seconds between two safe points while a rollout is awaited."""


class ServerEngine:
    """Samples with the servers of one engine; see `RolloutEngine`."""

    can_checkpoint_weights = False

    precision: Precision | None
    """Precision of the servers' weights, the same on every rank; None if it is unknown, differs or
    is quantized."""

    _servers: ServerGroup

    def __init__(
        self, settings: ServerSettings, tokenizer: PreTrainedTokenizerBase, host: EngineHost
    ) -> None:
        """Launches servers if configured, and waits for all servers; a collective."""
        self.weight_version = 0
        self._settings = settings
        self._tokenizer = tokenizer
        self._host = host
        self._run_id = secrets.token_hex(4)
        self._num_batches = 0
        self._unfinished: Groups = []
        self._partial_in_flight = False
        self._stack = ExitStack()
        self._rank_zero = RankZero()
        self._limits, self.precision, self.workers = self._rank_zero.run(
            lambda _: self._connect(), host.weights
        )
        limits = (self._limits.context_len, self._limits.max_input_len)
        lengths = [length for length in limits if length is not None]
        self.max_context_len = min(lengths, default=None)

    def _connect(self) -> tuple[Limits, Precision | None, tuple[str, ...]]:
        """Launches and connects on rank 0; a failure closes all that was opened."""
        settings = self._settings
        config = settings.config
        config.check_has_servers()
        model = served_model(
            self._host.hf_checkpoint,
            records_experts=settings.records_experts,
            adapter=self._host.adapter,
        )
        api: ServerApi = pkgutil.resolve_name(config.entry.api)(model=model)
        with ExitStack() as stack:
            launched = None
            if config.launch is not None:
                directory = config.log_dir or self._host.output_dir
                launched = LaunchedServers(config, api, directory)
                stack.callback(launched.stop)
                launched.start()
            self._loop = stack.enter_context(LoopThread("servers"))
            self._servers = servers = ServerGroup(settings, self._host, api, launched)
            self._loop.run(servers.connect())
            stack.callback(lambda: self._loop.run(servers.close()))
            servers.check_features()
            limits = Limits(
                context_len=api.model.context_len,
                vocab_size=api.model.vocab_size,
                max_input_len=servers.shortest("max_input_len"),
                max_total_len=servers.shortest("max_total_len"),
                mask_tokens=servers.sampling_mask_tokens(),
            )
            precision = servers.precision()
            self._stack = stack.pop_all()
        return limits, precision, servers.names

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int = 0,
        *,
        function: RolloutFunction | None = None,
        concurrency: int = 1,
        num_groups: int | None = None,
    ) -> ServerRollout:
        """Starts sampling, or calling the function on rank 0, in the loop of the servers' requests.

        See `RolloutEngine`. Responses without a function use `seed` only with servers that
        take seeds.
        """
        is_partial = num_groups is not None
        if is_partial and self._partial_in_flight:
            raise ValueError("a partial rollout is in flight already; wait for its result first.")
        unfinished = self._unfinished if is_partial else []
        calls = resumed_groups(unfinished, prompts, sampling.n_samples, seed)
        if num_groups is not None and not 0 < num_groups <= len(calls):
            raise ValueError(
                f"num_groups is {num_groups} but {len(calls)} groups are in flight; submit more"
                " prompts."
            )
        responses: dict[int, PendingSample] = {}
        if function is None:
            # On every rank, so that all ranks raise if a prompt is too long.
            sampling = self._limits.with_reported_masks(sampling)
            responses = self._pending_samples(calls, sampling, seed)
            concurrency = max(len(responses), 1)
        rollout = ServerRollout(self, calls, num_groups, makes_segments=function is not None)
        if self._rank_zero.is_self:
            servers = self._servers
            task = RolloutTask(
                name=f"{self._run_id}-r{self._num_batches:08d}",
                dispatcher=servers.dispatcher,
                tokenizer=self._tokenizer,
                limits=self._limits,
                responses=responses,
            )
            task.batch = FunctionBatch(
                calls,
                function or task.complete,
                task.answer,
                sampling,
                concurrency,
                vocab_size=self._limits.vocab_size,
                num_groups=num_groups,
                end_requests=task.stop if is_partial else None,
            )
            servers.rollouts.add(task)
            rollout.future = self._loop.submit(task.run())

            def done(_: object) -> None:
                servers.rollouts.discard(task)
                servers.changed.set()
                return_memory()

            rollout.future.add_done_callback(done)
        self._num_batches += 1
        if is_partial:
            self._partial_in_flight = True
        return rollout

    def _pending_samples(
        self, groups: Sequence[Sequence[FunctionCall]], sampling: Sampling, seed: int
    ) -> dict[int, PendingSample]:
        """The responses to sample, by the number of the call."""
        responses: dict[int, PendingSample] = {}
        for call in chain(*groups):
            if call.complete:
                continue
            key = f"{seed} {call.group_index} {call.key.sample}"
            responses[call.number] = PendingSample(
                prompt_ids=list(call.prompt.token_ids),
                answer=Generation.of(call.first_sample()),
                max_new_tokens=self._limits.for_prompt(call.prompt, sampling),
                seed=seed_of(hashlib.sha256(key.encode()).digest()),
            )
        return responses

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int = 0) -> Groups:
        """`submit` and its result, in the prompts' order."""
        return self.submit(prompts, sampling, seed).result()

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Sends new weights to the servers; a collective.

        A server that fails is marked down, and gets the weights when it comes back.
        """
        self._rank_zero.run(
            lambda weights: self._loop.run(self._servers.update_weights(weights, version)), source
        )
        self.weight_version = version

    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs at temperature 1 of all tokens but the first, by server URL."""
        return self._run(lambda: self._servers.prompt_log_probs(token_ids))

    def cached_tokens(self, token_ids: Sequence[int]) -> dict[str, int]:
        """Tokens of a text whose keys and values servers have kept, by server URL."""
        return self._run(lambda: self._servers.cached_tokens(token_ids))

    def top_log_probs(
        self, texts: Sequence[Sequence[int]], sampling: Sampling, count: int
    ) -> list[dict[int, float]]:
        """The likeliest next tokens of the texts; see `RolloutEngine`."""
        return self._run(lambda: self._servers.top_log_probs(texts, sampling, count))

    def weight_precision(self, name: str) -> Precision | None:
        """The precision of all servers; None if it is unknown, and on other ranks."""
        return self.precision if self._rank_zero.is_self else None

    def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors whose checksums stayed the same, by server URL.

        Only servers that returned checksums now and after the previous update have an entry.
        """
        return self._run(lambda: self._servers.wrong_weights(sent))

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the router, else the first server; see `RolloutEngine`."""
        if not self._rank_zero.is_self or not self._servers.api.answers_generate:
            return None
        if self._host.adapter is not None:
            return None  # a function's own request to it would not name the adapter
        url = urlsplit(self._servers.url)
        if url.scheme != "http":
            return None
        return url.hostname or "", url.port or 80

    def unfinished(self) -> Groups:
        """Aborted groups to resume; a rollout in flight adds its groups when it completes."""
        return self._unfinished

    def resume_unfinished(self, groups: Groups) -> None:
        """Restores the groups that `unfinished` returned in an earlier process."""
        self._unfinished = groups

    def metrics(self) -> dict[str, float]:
        """rollout/ENGINE_… counts since the start, on rank 0."""
        if not self._rank_zero.is_self:
            return {}
        prefix = f"rollout/{self._settings.config.engine}_"
        return {prefix + name: value for name, value in self._servers.metrics().items()}

    def save_weights(self, directory: Path) -> None:
        """Writes nothing: checkpoints do not contain the servers' weights."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Sends the policy's current weights to the servers."""
        self.update_weights(self._host.weights, version)

    def close(self) -> None:
        """Ends all requests and stops launched servers; metrics and `unfinished` remain."""
        self._stack.close()
        self._rank_zero.close()

    def is_done(self, rollout: ServerRollout) -> bool:
        """Whether all responses of a rollout arrived without an error; a collective."""

        def ask(_: WeightSource) -> bool:
            future = rollout.future
            assert future is not None
            return future.done() and not future.cancelled() and future.exception() is None

        return self._rank_zero.run(ask, self._host.weights)

    def collect(self, rollout: ServerRollout) -> Groups:
        """Waits for a rollout; a collective. Only rank 0 gets the samples' experts."""
        experts: list[tuple[Sample, Tensor]] = []

        def wait(weights: WeightSource) -> tuple[Groups, Groups]:
            assert rollout.future is not None
            self._wait(rollout.future, weights)
            complete: list[list[FunctionCall]] = []
            others = []
            for group in rollout.calls:
                is_taken = rollout.num_groups is None or len(complete) < rollout.num_groups
                if is_taken and is_complete(group):
                    complete.append(group)
                else:
                    others.append(group)
            groups = numbered(complete)
            unfinished = numbered(others)
            for sample in chain(*groups, *unfinished):
                if not rollout.makes_segments:
                    sample.rollout_id = None
                # Experts are large, and other ranks do not need them: they are not broadcast.
                if sample.rollout_routed_experts is not None:
                    experts.append((sample, sample.rollout_routed_experts))
                    sample.rollout_routed_experts = None
            return groups, unfinished

        is_partial = rollout.num_groups is not None
        if is_partial:
            self._partial_in_flight = False
        groups, unfinished = self._rank_zero.run(wait, self._host.weights)
        for sample, sampled in experts:
            sample.rollout_routed_experts = sampled
        if is_partial:
            self._unfinished = unfinished
        return groups

    def _run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        return self._rank_zero.run(lambda _: self._loop.run(work()), self._host.weights)

    def _wait(self, future: Future[None], weights: WeightSource) -> None:
        """Waits for a rollout, and sends weights to servers that come back without them."""
        while not future.done():
            self._host.check_interrupts()
            # Before the wait: a server may have come back too late for the previous rollout.
            if self._servers.waiting_for_source:
                # The source yields the policy's current weights, which may be newer than the last
                # update.
                version = self.weight_version
                if self._host.weights_version is not None:
                    version = self._host.weights_version()
                self._loop.run(self._servers.update_returned(weights, version))
            self._servers.changed.wait(SAFE_POINT_INTERVAL)
            self._servers.changed.clear()
        try:
            future.result()
        except CancelledError:
            message = f"the engine was closed while a rollout was in flight, or {CANCELLED}"
            raise CustomFunctionError(message) from None
        except RequestRefused as error:
            raise RolloutUnavailable(str(error)) from None


@dataclass(eq=False)
class ServerRollout:
    """A rollout in flight."""

    engine: ServerEngine
    calls: list[list[FunctionCall]]
    num_groups: int | None
    makes_segments: bool
    future: Future[None] | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers of complete and of all responses; on rank 0, from any thread."""
        calls = list(chain(*self.calls))
        num_complete = sum(call.complete for call in calls)
        return num_complete, len(calls)

    def is_done(self) -> bool:
        """Whether `result` returns samples without waiting; a collective."""
        return self.engine.is_done(self)

    def result(self) -> Groups:
        """Waits for the groups; a collective.

        Raises:
            RolloutUnavailable: No server is left, or a server refuses a request.
        """
        return self.engine.collect(self)


def return_memory() -> None:
    """Returns the memory of freed answers to the system.

    Samples that are kept lie between the freed answers, so glibc would hold up to 3 times their
    memory. Other C libraries have no `malloc_trim`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
