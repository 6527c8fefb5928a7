"""What the first rank holds: the servers, the way of their weights, and the thread that asks them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch

from slime_tis.rollout.engine import RolloutUnavailable, WeightSource
from slime_tis.rollout.sample import Sampling
from slime_tis.rollout.sglang.batch import Batch
from slime_tis.rollout.sglang.client import make_client
from slime_tis.rollout.sglang.config import SGLangConfig
from slime_tis.rollout.sglang.job import Job
from slime_tis.rollout.sglang.launch import LaunchedServers
from slime_tis.rollout.sglang.loop_thread import LoopThread
from slime_tis.rollout.sglang.member import Patience
from slime_tis.rollout.sglang.messages import MalformedAnswer, parse_scores, scoring_payload
from slime_tis.rollout.sglang.pool import Pool
from slime_tis.rollout.sglang.router import workers_of
from slime_tis.rollout.sglang.server import MalformedResponse, RequestRefused, Server, ServerError
from slime_tis.rollout.sglang.tasks import end, within
from slime_tis.rollout.sglang.weights import WeightSync, build_weight_sync

logger = logging.getLogger(__name__)

POLL_INTERVAL = 1.0
"""Time between two looks at whether the servers that were started still run, in seconds."""
ROUTER_TIMEOUT = 60.0
"""Longest wait for a router to name its servers, in seconds."""
WAIT = 1.0
"""Longest time, in seconds, before a change that was missed is noticed."""


class Fleet:
    """Servers, and the thread that talks to them. Its methods are for the thread that made it."""

    def __init__(
        self,
        config: SGLangConfig,
        hf_checkpoint: str | Path,
        *,
        log_dir: Path,
        device: torch.device | str,
        vocab_size: int | None = None,
        patience: Patience | None = None,
        weight_sync: WeightSync | None = None,
    ) -> None:
        """Starts servers where that is asked for, and waits for all of them.

        Args:
          config: which servers.
          hf_checkpoint: of the model.
          log_dir: for the output of servers that are started.
          device: of this process.
          vocab_size: ids of the model, which no answer may exceed; None does not look.
          patience: how long to wait for servers; None is as the config says.
          weight_sync: the way of new weights; None is as the config says.

        Raises:
          RolloutUnavailable: none of them comes up.
          ValueError: they refuse the key, or there is no room for them.
        """
        config.check_has_servers()
        self._config, self._patience = config, patience or Patience(recovery=config.sglang_recovery_timeout)
        self._vocab_size = vocab_size
        self._launched: LaunchedServers | None = None
        self._changed = threading.Event()
        self._needing: set[Server] = set()
        self._batches: set[Batch] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()  # one exchange of weights at a time
        with ExitStack() as stack:
            urls = config.server_urls
            if config.sglang_launch is not None:
                self._launched = LaunchedServers(config, hf_checkpoint, log_dir)
                stack.callback(self._launched.stop)
                urls = self._launched.start()
            client = make_client(config.api_key, config.admin_api_key)
            self._loop = LoopThread("sglang")
            stack.callback(self._loop.close)
            stack.callback(lambda: self._loop.run(client.aclose()))
            if config.router_url is not None:
                urls = self._loop.run(_workers_of(client, config.router_url))
            self._sync = weight_sync or build_weight_sync(config, hf_checkpoint, urls, device=device)
            stack.callback(lambda: self._loop.run(self._sync.close()))
            self._servers, self._pool = self._assemble(client, urls)
            stack.callback(lambda: self._loop.run(self._stop_asking()))
            self._loop.run(self._open())
            self._stack = stack.pop_all()

    @property
    def longest_input(self) -> int | None:
        """Most tokens that all servers take, where they tell."""
        return self._pool.longest_input

    def start(
        self, name: str, groups: Sequence[Sequence[Job]], sampling: Sampling, num_groups: int | None
    ) -> tuple[Batch, Future[None]]:
        """Starts sampling; the future is done when the batch is."""
        batch = Batch(
            name,
            groups,
            sampling,
            self._pool,
            num_groups=num_groups,
            longest_input=self.longest_input,
            vocab_size=self._vocab_size,
        )
        future = self._loop.start(self._run(batch))
        future.add_done_callback(lambda _: self._changed.set())
        return batch, future

    def wait(
        self,
        future: Future[None],
        weights: WeightSource,
        version: Callable[[], int],
        safe_point: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for a batch, and meanwhile brings weights to servers that come back without.

        Args:
          future: of `start`.
          weights: what to bring.
          version: of these weights.
          safe_point: called every second or so; what it raises ends the wait, while the batch goes on.

        Raises:
          RolloutUnavailable: no server is left, or one says that a request is wrong.
        """
        while not future.done():
            self._changed.wait(WAIT)
            self._changed.clear()
            safe_point()
            if self._needing and not future.done():
                self._loop.run(self._bring_back(weights, version()))
        try:
            future.result()
        except CancelledError:
            raise RuntimeError("the engine was closed while a rollout was in flight.") from None
        except RequestRefused as error:
            raise RolloutUnavailable(str(error)) from None

    def update(self, weights: WeightSource, version: int) -> None:
        """Gives all servers that answer new weights; those that fail are taken out."""
        self._loop.run(self._update(weights, version))

    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs of all tokens but the first, by the URL of each server that may be asked.

        Raises:
          RolloutUnavailable: a server gives none that could be used.
        """
        return self._loop.run(self._score(token_ids))

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        restarts = {} if self._launched is None else {"restarts": float(self._launched.restarts)}
        return self._pool.metrics() | restarts

    def close(self) -> None:
        """Ends what is in flight, stops servers that were started here, and the thread."""
        self._stack.close()

    def _assemble(self, client: httpx.AsyncClient, urls: Sequence[str]) -> tuple[list[Server], Pool]:
        config, timeout = self._config, self._config.sglang_request_timeout
        servers = [Server(url, client, timeout=timeout) for url in urls]
        router = config.router_url and Server(config.router_url, client, timeout=timeout, behind=servers)
        pool = Pool(
            servers,
            router=router or None,
            concurrency=config.sglang_concurrency,
            max_retries=config.sglang_max_retries,
            patience=self._patience,
            on_return=lambda server: self._spawn(self._restore(server)),
        )
        return [*servers, *([router] if router else [])], pool

    async def _open(self) -> None:
        await self._pool.start(self._config.sglang_startup_timeout)
        if self._launched is not None:
            self._spawn(self._look_after(self._launched))

    async def _stop_asking(self) -> None:
        await end(self._tasks)
        await self._pool.close()
        await asyncio.gather(*(server.close() for server in self._servers))

    async def _run(self, batch: Batch) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._batches.add(batch)
        try:
            await batch.run()
        finally:
            self._batches.discard(batch)
            self._tasks.discard(task)

    async def _update(self, weights: WeightSource, version: int) -> None:
        async with self._lock, self._pool.updating(version):
            # Servers that do not tell the version of every token answer before it changes.
            await asyncio.gather(*(batch.interrupt(lambda server: not server.has_spans) for batch in self._batches))
            await self._push(self._pool.reachable_servers(), weights, version)
            self._pool.require(version)

    async def _bring_back(self, weights: WeightSource, version: int) -> None:
        async with self._lock:
            servers = [server for server in self._pool.returned_servers() if server in self._needing]
            if servers:
                await self._push(servers, weights, version)

    async def _restore(self, server: Server) -> None:
        """The weights for a server that came back: by itself, or when the trainer waits for the rollout next."""
        async with self._lock:
            if server not in self._pool.returned_servers():
                return
            self._pool.expect(self._pool.version)
            if await self._sync.restore(server):
                self._pool.mark_current(server, self._pool.version)
            elif server.url in self._sync.reasons:
                self._pool.take_out(server, self._sync.reasons[server.url])
            else:
                self._needing.add(server)
                self._changed.set()

    async def _push(self, servers: Sequence[Server], weights: WeightSource, version: int) -> None:
        self._needing.difference_update(servers)
        self._pool.expect(version)
        try:
            failed = await self._sync.push(servers, weights, version)
        except BaseException:
            for server in servers:
                self._pool.take_out(server, "the update of its weights broke off.")
            raise
        for server in servers:
            if server in failed:
                self._pool.take_out(server, self._sync.reasons[server.url])
            else:
                self._pool.mark_current(server, version)

    async def _score(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        async def score(server: Server) -> list[float] | None:
            try:
                return parse_scores(await server.generate(scoring_payload(token_ids)), token_ids)
            except MalformedAnswer as error:
                raise RolloutUnavailable(str(server.malformed("/generate", str(error)))) from None
            except (MalformedResponse, RequestRefused) as error:
                raise RolloutUnavailable(str(error)) from None
            except ServerError as error:
                logger.warning("a probe of the weights failed: %s", error)
                return None

        servers = self._pool.live_servers()
        scores = await asyncio.gather(*map(score, servers))
        return {server.url: found for server, found in zip(servers, scores, strict=True) if found is not None}

    async def _look_after(self, launched: LaunchedServers) -> None:
        while True:
            for sentence in launched.poll():
                logger.warning(sentence)
            await asyncio.sleep(POLL_INTERVAL)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _workers_of(client: httpx.AsyncClient, router_url: str) -> tuple[str, ...]:
    try:
        return await within(ROUTER_TIMEOUT, workers_of(client, router_url))
    except TimeoutError:
        raise ValueError(
            f"the SGLang router at {router_url} does not name its servers within {ROUTER_TIMEOUT:g} s; look into its "
            "output, or give the servers with --sglang-url."
        ) from None
