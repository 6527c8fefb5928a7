"""The rollout engine that samples from SGLang servers over HTTP.

Three things meet here, and nowhere else: the program, which is synchronous; an asyncio loop on a thread of its own,
which talks to the servers, so that rollouts go on while the program trains; and the other ranks of a torch.distributed
job, which return, or raise, what rank 0 does.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import re
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis.errors import CustomFunctionError
from slime_tis.hf_directory import load_config, model_sizes, moe_sizes, read_model_config
from slime_tis.trainer.collectives import portable
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling, response_limit
from slime_tis.trainer.engines.engine import RolloutUnavailable, SentRows, WeightSource
from slime_tis.trainer.engines.functions import FunctionBatch, divided_calls, resumed_groups
from slime_tis.trainer.engines.generation import RolloutFunction
from slime_tis.trainer.engines.sglang.client import Server, make_client, worker_urls
from slime_tis.trainer.engines.sglang.dispatch import Dispatcher
from slime_tis.trainer.engines.sglang.errors import MalformedAnswer, RequestRefused, ServerError, SGLangError
from slime_tis.trainer.engines.sglang.health import HealthMonitor, Timeouts
from slime_tis.trainer.engines.sglang.launch import LaunchedServers
from slime_tis.trainer.engines.sglang.sampling import FunctionRequests, PendingSample, Requests, RolloutBatch
from slime_tis.trainer.engines.sglang.schema import ExpertLayout
from slime_tis.trainer.engines.sglang.weights.disk import DiskSync
from slime_tis.trainer.engines.sglang.weights.distributed import DistributedSync
from slime_tis.trainer.engines.sglang.weights.protocol import WeightSync
from slime_tis.trainer.engines.tasks import CANCELLED, BackgroundTasks, cancel_and_wait, new_loop
from slime_tis.trainer.engines.weight_rounding import Precision
from slime_tis.trainer.engines.weight_updates import BLOCKS, EMBEDDING, OUTPUT_LAYER
from slime_tis.trainer.options.rollout import Rounding
from slime_tis.trainer.options.sglang import SGLangConfig, is_loopback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Groups = list[list[Sample]]
Result = TypeVar("Result")

PRECISIONS: dict[str, Precision] = {
    **dict.fromkeys(("half", "float16"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("float", "float32"), "fp32"),
}
"""By SGLang's names of types."""
JOINED = {
    r"\.experts\.\d+\.(gate|up)_proj\.weight$": ".experts.w13_weight",
    r"\.experts\.\d+\.down_proj\.weight$": ".experts.w2_weight",
    r"\.[qkv]_proj\.": ".qkv_proj.",
    r"\.(gate|up)_proj\.": ".gate_up_proj.",
}
"""SGLang's names by those of the Hugging Face tensors that they join."""
RESTART_INTERVAL = 1.0
"""Time between two looks at whether launched servers still run, in seconds."""
SAFE_POINT_INTERVAL = 1.0
"""Longest time between two safe points while a rollout is waited for, in seconds."""
LONGEST_ROLLOUT = timedelta(days=30)
"""Longest wait of other ranks for rank 0: a rollout may take longer than a collective's usual timeout."""
INPUT_MARGIN = 6
"""SGLang's max_req_input_len is the context less this: it reserves tokens for the response."""
TIES = 4
"""With top-p alone, top-k is the servers' limit on sampling masks less one part in so many: tokens as likely as the
last of them need it, and a server aborts a request whose set is larger."""


class SGLangEngine:
    """Samples with SGLang servers; see `engine.RolloutEngine`.

    Servers draw their own random numbers, so that samples are not the same again in an equal run, unless they are
    started with --enable-deterministic-inference: then each response has a seed of its own.
    """

    can_checkpoint_weights = False

    precision: Precision | None
    """In which the servers hold weights, the same on every rank; None where they do not say, differ or quantize."""

    _servers: ServerGroup
    """Of rank 0 alone."""

    def __init__(
        self,
        config: SGLangConfig,
        hf_checkpoint: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        output_dir: Path,
        weights: WeightSource,
        device: torch.device | str = "cpu",
        weights_version: Callable[[], int] | None = None,
        timeouts: Timeouts | None = None,
        weight_sync: WeightSync | None = None,
        safe_point: Callable[[], None] = lambda: None,
        sampling: Sampling | None = None,
        allow_truncation_bias: bool = False,
        rounding: Rounding = "nearest",
    ) -> None:
        """Waits for the servers, and starts them where the config says so; a collective.

        Args:
            config: Which servers, and how they are asked.
            hf_checkpoint: Weights that servers begin with.
            tokenizer: Of the checkpoint.
            output_dir: Directory for the logs of servers that are started here.
            weights: Yields the policy's current weights, for servers that come back without; a collective.
            device: Of this process.
            weights_version: Returns the version of what `weights` yields; None where that is always the one in use.
            timeouts: How long to wait for servers; None is as the config says.
            weight_sync: How new weights reach the servers; None is as the config says.
            safe_point: Called while a rollout is waited for; raises where it is to be given up.
            sampling: How samples for training will be drawn; servers are checked for what it asks of them.
            allow_truncation_bias: Go on without sampling masks where servers do not report those that `sampling` needs.
            rounding: How weights are rounded before they are sent; servers are checked for a precision to round to.

        Raises:
            RolloutUnavailable: No server comes up.
            ValueError: The servers refuse the key, the config names none, or they do not return the routed experts or
                sampling masks that `sampling` asks for, or do not round weights that are to be rounded for them.
        """
        self.weight_version = 0
        self._tokenizer, self._weights, self._safe_point = tokenizer, weights, safe_point
        self._weights_version = weights_version or (lambda: self.weight_version)
        model = read_model_config(hf_checkpoint)
        self._sizes = model_sizes(model)
        self._run_id, self._num_batches = secrets.token_hex(4), 0
        self._unfinished: Groups = []
        self._partial_in_flight = False
        self._stack = ExitStack()
        self._rank_zero = RankZero()

        records_experts = sampling is not None and sampling.return_routed_experts
        layout = expert_layout(hf_checkpoint) if records_experts else None

        def connect(_: WeightSource) -> tuple[int | None, int | None, Precision | None]:
            config.check_has_servers()
            with ExitStack() as stack:
                launched = None
                if config.sglang_launch is not None:
                    launched = LaunchedServers(config, hf_checkpoint, output_dir, records_experts=records_experts)
                    stack.callback(launched.stop)
                    launched.start()
                self._loop = stack.enter_context(LoopThread("sglang"))
                self._servers = ServerGroup(config, timeouts, self._sizes.vocab_size, layout, launched)
                self._loop.run(self._servers.connect(weight_sync, hf_checkpoint, device))
                stack.callback(lambda: self._loop.run(self._servers.close()))
                if records_experts:
                    self._servers.check_return_routed_experts()
                mask_tokens = None
                if sampling is not None and sampling.return_sampling_mask:
                    mask_tokens = self._servers.sampling_mask_tokens(sampling, allow_truncation_bias)
                precision = self._servers.precision(model)
                check_rounding(rounding, precision)
                self._stack = stack.pop_all()
            return self._servers.max_input_len, mask_tokens, precision

        self._max_input_len, self._mask_tokens, self.precision = self._rank_zero.run(connect, weights)
        lengths = (self._sizes.context_len, self._max_input_len)
        self.max_context_len = min((length for length in lengths if length is not None), default=None)

    def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int = 0, *, num_groups: int | None = None
    ) -> SGLangRollout:
        """Starts sampling; see `engine.RolloutEngine`.

        Args:
            prompts: Each is answered by a group of responses.
            sampling: How to sample.
            seed: Of the rollout; used by servers that take a seed with each request.
            num_groups: Number of groups that are waited for, the earliest that are complete. The others are aborted,
                become `unfinished`, and are continued by the next call with a `num_groups`, before its own prompts.

        Raises:
            ValueError: A prompt leaves no tokens for a response or has unknown ones, or fewer groups are in flight than
                `num_groups`.
        """
        sampling = self._with_reported_masks(sampling)
        groups = [[self._pending(prompt, sampling) for _ in range(sampling.n_samples)] for prompt in prompts]
        if num_groups is not None:
            groups[:0] = [
                [PendingSample.from_sample(one, self._pending(one.row, sampling).max_new_tokens) for one in group]
                for group in self._unfinished
            ]
            self._check_num_groups(num_groups, len(groups))
        for index, group in enumerate(groups):
            for place, response in enumerate(group):
                response.seed = response_seed(seed, index, place)
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
            ValueError: Fewer groups are in flight than `num_groups`.
        """
        unfinished = self._unfinished if num_groups is not None else []
        groups = resumed_groups(unfinished, prompts, sampling.n_samples, seed)
        if num_groups is not None:
            self._check_num_groups(num_groups, len(groups))
        asked = None
        if self._rank_zero.is_self:
            asked = FunctionRequests(
                self._batch_name,
                self._requests(sampling),
                self._tokenizer,
                sampling_of=self._with_reported_masks,
                limit_of=self._limit_after,
            )
            asked.batch = FunctionBatch(
                groups,
                function,
                asked.answer,
                sampling,
                concurrency=concurrency,
                vocab_size=self._sizes.vocab_size,
                num_groups=num_groups,
                end_requests=asked.requests.stop if num_groups is not None else None,
            )
        return self._start(asked, lambda: divided_calls(groups, num_groups), num_groups, sum(map(len, groups)))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int = 0) -> Groups:
        """`submit` and its result, in the prompts' order."""
        return self.submit(prompts, sampling, seed).result()

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Gives the servers new weights; requests in flight pause, and continue with them.

        A server that fails is marked down, and given the weights when it comes back.

        Args:
            source: Yields Hugging Face names and whole tensors; called once on every rank, a collective.
            version: Version that tokens sampled from now on carry.
        """
        self._rank_zero.run(lambda weights: self._loop.run(self._servers.update_weights(weights, version)), source)
        self.weight_version = version

    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs at temperature 1 of all tokens but the first, by the URL of each server."""
        return self._rank_zero.run(lambda _: self._loop.run(self._servers.prompt_log_probs(token_ids)), self._weights)

    def weight_precision(self, name: str) -> Precision | None:
        """That of the dtype of all servers; None where they do not say, differ or quantize, and on other ranks."""
        return self.precision if self._rank_zero.is_self else None

    def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors that the update changed, and whose checksum on a server is that of the update before.

        By the URL of each server that gave checksums both times; SGLang does from 0.5.23 on.
        """
        return self._rank_zero.run(lambda _: self._loop.run(self._servers.wrong_weights(sent)), self._weights)

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the router, else of the first server; see `engine.RolloutEngine`."""
        if not self._rank_zero.is_self:
            return None
        url = httpx.URL(self._servers.url)
        return (url.host, url.port or 80) if url.scheme == "http" else None

    def unfinished(self) -> Groups:
        """Groups that were aborted, and are to be continued; those of a rollout in flight once it is complete."""
        return self._unfinished

    def resume_unfinished(self, groups: Groups) -> None:
        """Takes up what `unfinished` returned, in another process."""
        self._unfinished = groups

    def metrics(self) -> dict[str, float]:
        """rollout/sglang_… counts since the start, on rank 0."""
        metrics = self._servers.metrics() if self._rank_zero.is_self else {}
        return {f"rollout/sglang_{name}": value for name, value in metrics.items()}

    def save_weights(self, directory: Path) -> None:
        """Writes nothing: weights that servers hold are not part of checkpoints."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Gives the servers the policy's current weights, in place of the older ones that they had."""
        self.update_weights(self._weights, version)

    def close(self) -> None:
        """Ends what is in flight, and stops the servers that were started here; metrics and `unfinished` stay."""
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
        groups, unfinished = self._rank_zero.run(wait, self._weights)
        self._unfinished = unfinished if is_partial else self._unfinished
        return groups

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
        """Waits for a batch, and meanwhile gives weights to servers that come back without.

        Raises:
            RolloutUnavailable: No server is left, or one says that a request is wrong.
        """
        while not future.done():
            self._servers.changed.wait(SAFE_POINT_INTERVAL)
            self._servers.changed.clear()
            self._safe_point()
            if self._servers.waiting_for_source and not future.done():
                self._loop.run(self._servers.update_returned(weights, self._weights_version()))
        try:
            future.result()
        except CancelledError:
            message = f"the engine was closed while a rollout was in flight, or {CANCELLED}"
            raise CustomFunctionError(message) from None
        except RequestRefused as error:
            raise RolloutUnavailable(str(error)) from None

    def _divide(self, groups: Sequence[Sequence[PendingSample]], num_groups: int | None) -> tuple[Groups, Groups]:
        """The groups to train on, numbered from 0, and those to continue."""
        complete = [group for group in groups if all(response.finish_reason for response in group)][:num_groups]
        taken = set(map(id, complete))
        return self._samples(complete), self._samples([group for group in groups if id(group) not in taken])

    def _samples(self, groups: Sequence[Sequence[PendingSample]]) -> Groups:
        numbers = itertools.count()
        return [
            [response.to_sample(self._tokenizer, place, next(numbers)) for response in group]
            for place, group in enumerate(groups)
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
        """Most tokens that may follow so many; below 1 where none may."""
        limits = [sampling.max_response_len, *self._server_limits(length)]
        if sampling.max_context_len is not None:
            limits.append(sampling.max_context_len - length)
        if self._max_input_len is not None and length > self._max_input_len:
            return 0
        return min(limits)

    def _server_limits(self, length: int) -> list[int]:
        """Most tokens that servers sample after so many."""
        limits = []
        if self._sizes.context_len is not None:  # SGLang 0.5.9 refuses a request for the whole context
            limits.append(self._sizes.context_len - 1 - length)
        if self._max_input_len is not None:  # a server may have been started with a shorter context
            limits.append(self._max_input_len + INPUT_MARGIN - length)
        return limits

    def _with_reported_masks(self, sampling: Sampling) -> Sampling:
        """The same sampling, with a top-k whose sampling masks servers report, or without masks."""
        if not sampling.return_sampling_mask:
            return sampling
        limit, vocab_size = self._mask_tokens, self._sizes.vocab_size
        cuts_nothing = sampling.top_p == 1 and vocab_size is not None and sampling.top_k >= vocab_size
        if limit is None or cuts_nothing:
            return replace(sampling, return_sampling_mask=False)
        return replace(sampling, top_k=limit - limit // TIES if sampling.top_k == -1 else sampling.top_k)

    def _check_num_groups(self, num_groups: int, in_flight: int) -> None:
        if not 0 < num_groups <= in_flight:
            raise ValueError(
                f"{num_groups} groups are wanted of {in_flight} in flight; submit more prompts or want fewer."
            )
        if self._partial_in_flight:
            raise ValueError("a partial rollout is in flight already; wait for its result first.")


@dataclass(eq=False)
class SGLangRollout:
    """A rollout that servers are sampling; batch and future are None on all ranks but rank 0."""

    engine: SGLangEngine
    batch: RolloutBatch | FunctionRequests | None
    future: Future[None] | None
    divide: Callable[[], tuple[Groups, Groups]]
    """Returns the groups to train on, and those to continue, once the batch is done."""
    num_groups: int | None
    total: int
    groups: Groups | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """Number of responses that are complete, and of all; on rank 0, and from any thread."""
        return (0, self.total) if self.batch is None else self.batch.progress

    def result(self) -> Groups:
        """Waits for the groups; a collective.

        Raises:
            RolloutUnavailable: No server is left to finish it, or one says that a request is wrong.
        """
        if self.groups is None:
            self.groups = self.engine.collect(self)
        return self.groups


class ServerGroup:
    """The servers of rank 0: their health, their requests and their weights. It belongs to one asyncio loop."""

    def __init__(
        self,
        config: SGLangConfig,
        timeouts: Timeouts | None,
        vocab_size: int | None,
        layout: ExpertLayout | None = None,
        launched: LaunchedServers | None = None,
    ) -> None:
        """Asks nothing yet.

        Args:
            config: Which servers, and how they are asked.
            timeouts: How long to wait for servers; None is as the config says.
            vocab_size: Number of token ids of the model, which no answer may exceed; None checks none.
            layout: What routed experts in answers have to be; None where none are recorded.
            launched: Servers that were started here, which are started again when they end.
        """
        self.changed = threading.Event()
        """Set when a batch is done, or a server waits for weights."""
        self.waiting_for_source: set[Server] = set()
        """Servers that came back and need weights that the trainer has."""
        self.batches: set[RolloutBatch | FunctionRequests] = set()
        """Rollouts that are being sampled."""
        self._config, self._vocab_size, self._layout, self._launched = config, vocab_size, layout, launched
        self._timeouts = timeouts or Timeouts(recovery=config.sglang_recovery_timeout)
        self._checksums: dict[Server, dict[str, list[str]] | None] = {}  # of the update before
        self._without_checksums: set[Server] = set()
        self._tasks = BackgroundTasks()
        self._one_update = asyncio.Lock()

    async def connect(
        self, weight_sync: WeightSync | None, hf_checkpoint: str | Path, device: torch.device | str
    ) -> None:
        """Waits for the servers; the arguments are those of `build_weight_sync`, unless a `weight_sync` is given.

        Raises:
            RolloutUnavailable: None of them comes up.
            ValueError: They refuse the key, or a router names none.
        """
        config = self._config
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(make_client(config.api_key, config.admin_api_key))

            def server(url: str, workers: Sequence[Server] = ()) -> Server:
                timeout = config.sglang_request_timeout
                return Server(
                    url,
                    client,
                    timeout=timeout,
                    vocab_size=self._vocab_size,
                    expert_layout=self._layout,
                    workers=workers,
                )

            urls = config.server_urls if self._launched is None else self._launched.urls
            if config.router_url is not None:
                urls = await worker_urls(server(config.router_url))
            servers = [server(url) for url in urls]
            router = server(config.router_url, workers=servers) if config.router_url else None
            self._sync = weight_sync or build_weight_sync(config, hf_checkpoint, urls, device=device)
            stack.push_async_callback(self._sync.close)
            for one in (*servers, *([router] if router else [])):
                stack.push_async_callback(one.close)
            self.health = HealthMonitor(
                servers, router, self._timeouts, on_return=lambda one: self._tasks.start(self._restore(one))
            )
            stack.push_async_callback(self.health.close)
            self.dispatcher = Dispatcher(
                self.health, concurrency=config.sglang_concurrency, max_retries=config.sglang_max_retries
            )
            stack.push_async_callback(self._end_tasks)
            await self.health.start(config.sglang_startup_timeout)
            if self._launched is not None:
                self._tasks.start(self._restart(self._launched))
            self._stack = stack.pop_all()

    @property
    def url(self) -> str:
        """Of the router, else of the first server."""
        router = self.health.router
        return (router or next(iter(self.health.states.values()))).server.url

    @property
    def max_input_len(self) -> int | None:
        """Longest input that all servers take, in tokens, where they say."""
        return min((s.max_input_len for s in self.health.states.values() if s.max_input_len), default=None)

    def check_return_routed_experts(self) -> None:
        """Refuses servers that do not record routed experts, and ignore requests for them.

        Raises:
            ValueError: A server that answers was started without the flag.
        """
        lacking = [s.server.url for s in self.health.states.values() if s.seen and not s.server.returns_routed_experts]
        if lacking:
            raise ValueError(
                "--use-rollout-routing-replay or --measure-routing-mismatch is on but "
                f"{', '.join(lacking)} would not return the experts that it chose; start such servers with "
                "--enable-return-routed-experts, or leave the flags out."
            )

    def sampling_mask_tokens(self, sampling: Sampling, allow_truncation_bias: bool) -> int | None:
        """Most tokens of a sampling mask that all servers report; None where the bias of sampling without is allowed.

        Raises:
            ValueError: A server reports none, or fewer than top-k has, and the bias is not allowed.
        """
        limits = {s.server.url: s.sampling_mask_tokens or 1 for s in self.health.states.values() if s.seen}
        url, limit = min(limits.items(), key=lambda item: item[1])
        if limit >= max(sampling.top_k, 2):
            return limit
        if limit < 2:
            problem = f"{url} does not report which tokens they leave; SGLang does from 0.5.23 on"
        else:
            problem = (
                f"{url} reports at most {limit} of the tokens they leave; start it with --sampling-mask-max-tokens "
                f"{sampling.top_k} or more"
            )
        message = f"--rollout-top-p is {sampling.top_p} and --rollout-top-k {sampling.top_k}, but {problem}."
        if allow_truncation_bias:
            logger.warning("%s Training goes on over the whole vocabulary (--allow-truncation-bias).", message)
            return None
        raise ValueError(
            f"{message} Else training could not use the distribution that is sampled from; leave the two out, or add "
            "--allow-truncation-bias."
        )

    def precision(self, model: Mapping[str, Any]) -> Precision | None:
        """The precision in which all servers hold weights; None where they do not say, differ or quantize.

        Args:
            model: config.json of the checkpoint.
        """
        dtypes = {state.dtype for state in self.health.states.values() if state.seen}
        return server_precision(dtypes.pop(), model) if len(dtypes) == 1 else None

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Gives all servers that answer new weights; those that fail are marked down."""
        async with self._one_update, self.health.updating(version):
            await asyncio.gather(*(batch.requests.end_before_update() for batch in list(self.batches)))
            await self._push(self.health.reachable(), source, version)
            self.health.version = version

    async def update_returned(self, source: WeightSource, version: int) -> None:
        """Gives weights to servers that came back without."""
        async with self._one_update:
            servers = [server for server in self.health.needing_weights() if server in self.waiting_for_source]
            if servers:
                await self._push(servers, source, version)

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs of all tokens but the first, by the URL of each server that may be asked.

        Raises:
            RolloutUnavailable: A server gives none that could be used.
        """

        async def ask(server: Server) -> list[float] | None:
            try:
                return await server.prompt_log_probs(token_ids)
            except (MalformedAnswer, RequestRefused) as error:
                raise RolloutUnavailable(str(error)) from None
            except ServerError as error:
                logger.warning("a probe of the weights failed: %s", error)
                return None

        servers = [state.server for state in self.health.available()]
        answers = await asyncio.gather(*map(ask, servers))
        return {server.url: found for server, found in zip(servers, answers, strict=True) if found is not None}

    async def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors that did not change with the update; see `SGLangEngine.wrong_weights`."""

        async def ask(server: Server) -> dict[str, list[str]] | None:
            try:
                return await server.weight_checksums()
            except RequestRefused as error:
                self._without_checksums.add(server)
                logger.warning("%s Its weights are checked by their log-probs alone.", error)
            except ServerError as error:
                logger.warning("checksums of the weights failed: %s", error)
            return None

        servers = [state.server for state in self.health.available() if state.server not in self._without_checksums]
        answers = await asyncio.gather(*map(ask, servers))
        before, self._checksums = self._checksums, dict(zip(servers, answers, strict=True))
        joined: dict[str, list[SentRows]] = {}
        for name, rows in sent.items():
            joined.setdefault(server_name(name), []).append(rows)
        wrong = {}
        for server, now in self._checksums.items():
            earlier = before.get(server)
            if now is None or earlier is None:
                continue
            stale = {
                name
                for name, parts in joined.items()
                if is_stale(
                    now.get(name, []),
                    earlier.get(name, []),
                    on_every_rank=name not in (EMBEDDING, OUTPUT_LAYER)
                    and all(part.changed_everywhere for part in parts),
                )
            }
            wrong[server.url] = [name for name, rows in sent.items() if rows.changed and server_name(name) in stale]
        return wrong

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        restarts = {} if self._launched is None else {"restarts": float(self._launched.restarts)}
        return {"retries": self.dispatcher.retries} | self.health.metrics() | restarts

    async def close(self) -> None:
        """Ends what is in flight, and leaves the servers."""
        await self._stack.aclose()

    async def _push(self, servers: Sequence[Server], source: WeightSource, version: int) -> None:
        self.waiting_for_source.difference_update(servers)
        self.health.expect(version)
        try:
            failed = await self._sync.push(servers, source, version)
        except BaseException:
            for server in servers:
                self.health.mark_down(server, "the update of its weights broke off.")
            raise
        for server in servers:
            if server in failed:
                self.health.mark_down(server, failed[server])
            else:
                self.health.mark_current(server, version)

    async def _restore(self, server: Server) -> None:
        """Gives a server that came back its weights, now or when the trainer next waits for a rollout."""
        async with self._one_update:
            if server not in self.health.needing_weights():
                return
            self.health.expect(self.health.version)
            try:
                restored = await self._sync.restore(server)
            except SGLangError as error:
                return self.health.mark_down(server, str(error))
            if restored:
                self.health.mark_current(server, self.health.version)
            else:
                self.waiting_for_source.add(server)
                self.changed.set()

    async def _restart(self, launched: LaunchedServers) -> None:
        """Starts launched servers again when they end."""
        while True:
            for message in launched.poll():
                logger.warning(message)
            await asyncio.sleep(RESTART_INTERVAL)

    async def _end_tasks(self) -> None:
        await asyncio.gather(*(batch.close() for batch in list(self.batches)))
        await self._tasks.cancel()


class RankZero:
    """Has all ranks return, or raise, what rank 0 does.

    The ranks talk over gloo, in a group of their own: it works beside whatever else the job has in flight, without a
    device, and from the thread on which weights are iterated.
    """

    def __init__(self) -> None:
        """A collective, where there are several ranks."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_ROLLOUT) if several else None
        self.is_self = not several or dist.get_rank() == 0
        """Whether this process is rank 0."""

    def run(self, work: Callable[[WeightSource], Result], source: WeightSource) -> Result:
        """Runs work on rank 0 and returns its result on all ranks.

        Args:
            work: For rank 0. It gets a source of weights to iterate as often as it needs.
            source: Weights of this rank, a collective: wherever the work on rank 0 iterates its own, the other ranks
                iterate theirs.

        Raises:
            Exception: What the work raises; on the other ranks RolloutUnavailable, Interrupted, ValueError, or
                OtherRankFailed for any other.
        """

        def shared_source() -> Iterable[tuple[str, Tensor]]:
            self._send("weights", None)
            return source()

        if not self.is_self:
            sent: Result = self._follow(source)
            return sent
        try:
            result = work(shared_source)
        except Exception as error:
            with suppress(RuntimeError):  # the others may have failed, too, and be gone
                self._send("error", portable(error))
            raise
        self._send("result", result)
        return result

    def close(self) -> None:
        """Frees the process group; a collective."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _follow(self, source: WeightSource) -> Any:
        """Does what rank 0 sends, until its result."""
        while True:
            received: list[tuple[str, Any]] = [("", None)]
            dist.broadcast_object_list(received, src=0, group=self._group)
            kind, content = received[0]
            if kind == "result":
                return content
            if kind == "error":
                raise content
            for _ in source():
                pass

    def _send(self, kind: str, content: Any) -> None:
        if self._group is not None:
            dist.broadcast_object_list([(kind, content)], src=0, group=self._group)


class LoopThread:
    """An asyncio loop on a thread of its own, which does not keep the program from ending."""

    def __init__(self, name: str) -> None:
        self._loop, self._ends = new_loop(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> LoopThread:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Cancels the tasks that still run, waits for their end, and ends the thread."""

        async def end_tasks() -> None:
            await cancel_and_wait(asyncio.all_tasks())

        self.run(end_tasks())
        self._ends = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if not asyncio.all_tasks(self._loop):  # else threads that hang report to it when they end
            self._loop.close()

    def _run(self) -> None:
        while not self._ends:  # a user's function may stop the loop
            self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Starts work, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs work and waits for it; an interrupt of the wait cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def build_weight_sync(
    config: SGLangConfig, hf_checkpoint: str | Path, urls: Sequence[str], *, device: torch.device | str
) -> WeightSync:
    """The way of weights that `--sglang-weight-sync` names.

    Args:
        config: Of the engine.
        hf_checkpoint: Directory whose configuration and tokenizer are copied beside weights on disk.
        urls: Of the servers.
        device: Of this process.

    Raises:
        ValueError: Weights on disk that servers elsewhere could not see, or a directory that cannot be used.
    """
    bucket_bytes, timeout = config.sglang_bucket_mb * 2**20, config.sglang_request_timeout
    if config.sglang_weight_sync == "distributed":
        address = config.sglang_sync_address
        return DistributedSync(device=device, bucket_bytes=bucket_bytes, timeout=timeout, address=address)
    remote = [url for url in urls if not is_loopback(url)]
    if config.sglang_weight_dir is None and remote:
        raise ValueError(
            f"--sglang-weight-sync is disk but {remote[0]} may not see a temporary directory of this machine; give one "
            "that both see with --sglang-weight-dir."
        )
    return DiskSync(
        config.sglang_weight_dir,
        hf_checkpoint=hf_checkpoint,
        device=device,
        bucket_bytes=bucket_bytes,
        timeout=timeout,
    )


def expert_layout(hf_checkpoint: str | Path) -> ExpertLayout:
    """What routed experts of a model have to be.

    Args:
        hf_checkpoint: Directory of the model.

    Raises:
        ValueError: It has no experts.
    """
    hf = load_config(hf_checkpoint)
    moe = moe_sizes(hf)
    if moe is None:
        raise ValueError("--use-rollout-routing-replay is given but the model has no experts; leave it out.")
    return ExpertLayout(num_hidden_layers=hf.num_hidden_layers, moe=moe)


def server_name(name: str) -> str:
    """What SGLang calls the tensor that has a Hugging Face one in it: it joins matrices that read the same input."""
    for parts, joined in JOINED.items():
        name = re.sub(parts, joined, name)
    return name


def is_stale(now: Sequence[str], before: Sequence[str], *, on_every_rank: bool) -> bool:
    """Whether a tensor that an update changed has the checksums of the update before.

    Args:
        now: Checksums by rank; empty where the server has no such tensor.
        before: Those after the update before.
        on_every_rank: Whether the shard of each rank must have changed, for up to `BLOCKS` / 2 ranks. Vocabularies
            are padded, so that the last rank may hold padding alone.
    """
    same = [one == other for one, other in zip(now, before, strict=False)]
    if not same or len(now) != len(before):
        return False
    return all(same) or (on_every_rank and len(same) <= BLOCKS // 2 and any(same))


def server_precision(dtype: str | None, model: Mapping[str, Any]) -> Precision | None:
    """The precision that a `--dtype` of SGLang means; None for one that is not known.

    `auto` is the checkpoint's own type, and float16 for one in float32 (sglang/srt/configs/model_config.py).

    Args:
        dtype: What a server says; None where it does not.
        model: config.json of the checkpoint.
    """
    if dtype == "auto":
        own = model.get("dtype") or model.get("torch_dtype") or "float32"
        dtype = "float16" if own == "float32" else own
    return PRECISIONS.get(dtype) if isinstance(dtype, str) else None


def check_rounding(rounding: Rounding, precision: Precision | None) -> None:
    """Checks that servers hold weights in a precision that these can be rounded to.

    Raises:
        ValueError: Weights are to be rounded, and it is float32 or not known.
    """
    if rounding == "nearest" or precision not in ("fp32", None):
        return
    if precision == "fp32":
        problem = "servers compute in float32, which holds the weights as they are"
    else:
        problem = "servers do not report one and the same --dtype without --quantization"
    raise ValueError(f"--weight-update-rounding is {rounding} but {problem}; leave it out.")


def response_seed(seed: int, group: int, place: int) -> int:
    """The seed of one response of a rollout, 63 bits of a hash: equal seeds would give a group equal responses."""
    digest = hashlib.sha256(f"{seed} {group} {place}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
