"""The servers of rank 0: connections, weights and required features."""

import asyncio
import itertools
import logging
import pkgutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from slime_tis.trainer.configs.rollout import Rounding
from slime_tis.trainer.configs.servers import WEIGHT_TRANSPORTS, ServerConfig, normalized_url
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.event_loops import BackgroundTasks, cancel_and_wait
from slime_tis.trainer.engines.rollout_engine import (
    EngineHost,
    RolloutUnavailable,
    SentRows,
    WeightSource,
)
from slime_tis.trainer.engines.servers.api import Call, ServerApi
from slime_tis.trainer.engines.servers.client import Server, make_client
from slime_tis.trainer.engines.servers.dispatcher import Dispatcher
from slime_tis.trainer.engines.servers.errors import (
    MalformedAnswer,
    RequestError,
    RequestRefused,
    ServerError,
)
from slime_tis.trainer.engines.servers.health import HealthMonitor, ServerState, Timeouts
from slime_tis.trainer.engines.servers.launch import LaunchedServers
from slime_tis.trainer.engines.servers.responses import RolloutTask
from slime_tis.trainer.engines.servers.weights.adapters import AdapterSync
from slime_tis.trainer.engines.servers.weights.checksums import TensorChecksums, stale_weights
from slime_tis.trainer.engines.servers.weights.protocol import WeightSync
from slime_tis.trainer.engines.weight_rounding import Precision

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

RESTART_INTERVAL = 1.0
"""Seconds between two looks for launched servers that ended."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The servers of a run and their required features."""

    config: ServerConfig
    sampling: Sampling | None = None
    """How training samples are drawn: whether servers must record experts or report sampling
    masks."""
    allow_truncation_bias: bool = False
    rounding: Rounding = "nearest"
    timeouts: Timeouts | None = None
    weight_sync: WeightSync | None = None

    @property
    def records_experts(self) -> bool:
        """Whether servers must return experts."""
        return self.sampling is not None and self.sampling.return_routed_experts


class ServerGroup:
    """The servers of rank 0: health, requests and weights; belongs to one asyncio loop."""

    def __init__(
        self,
        settings: ServerSettings,
        host: EngineHost,
        api: ServerApi,
        launched: LaunchedServers | None,
    ) -> None:
        """Connects to nothing yet; restarts `launched` servers that end."""
        self.changed = threading.Event()
        """Set when a batch is done, or a server waits for weights."""
        self.waiting_for_source: set[Server] = set()
        """Servers that came back and need weights that only the trainer has."""
        self.rollouts: set[RolloutTask] = set()
        self._settings = settings
        self._host = host
        self.api = api
        self._launched = launched
        self._checksums: dict[Server, TensorChecksums] = {}
        self._tasks = BackgroundTasks()
        self._one_update = asyncio.Lock()

    async def connect(self) -> None:
        """Waits for servers; raises RolloutUnavailable without any, ValueError if they refuse."""
        config = self._settings.config
        client = make_client(config.keys, self.api.user_endpoints)
        # The stack closes in reverse order: requests end before their servers and connections.
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(client.session)

            def server_at(url: str) -> Server:
                server = Server(url, client, self.api, config.request_timeout)
                stack.push_async_callback(server.close)
                return server

            router = None
            if self._launched is not None:
                urls = self._launched.urls
            elif config.router_url is not None:
                router = server_at(config.router_url)
                urls = await router_workers(router, config)
            else:
                urls = config.server_urls
            servers = [server_at(url) for url in urls]
            if router is not None:
                router.workers = servers
            self._sync = self._settings.weight_sync or self._make_transport(urls)
            stack.push_async_callback(self._sync.close)
            self.health = HealthMonitor(
                servers,
                router,
                self._settings.timeouts or Timeouts(recovery=config.recovery_timeout),
                lambda returned: self._tasks.start(self._restore(returned)),
                config.entry.title,
            )
            stack.push_async_callback(self.health.close)
            self.dispatcher = Dispatcher(self.health, config)
            stack.push_async_callback(self._end_tasks)
            # Launched servers are known to need some time.
            warns_at_once = self._launched is None
            await self.health.start(config.startup_timeout, warns_at_once=warns_at_once)
            if self._launched is not None:
                self._tasks.start(self._restart(self._launched))
            self._stack = stack.pop_all()

    def _make_transport(self, urls: Sequence[str]) -> WeightSync:
        config = self._settings.config
        if self._host.adapter is not None:
            return AdapterSync(config, self._host, urls)
        transport = pkgutil.resolve_name(WEIGHT_TRANSPORTS[config.weight_sync])
        sync: WeightSync = transport(config, self._host, urls)
        return sync

    @property
    def url(self) -> str:
        """The router's URL, else the first server's."""
        if self.health.router is not None:
            return self.health.router.server.url
        return next(iter(self.health.states)).url

    @property
    def names(self) -> tuple[str, ...]:
        """The servers' URLs; none behind a router, whose answers do not name the server."""
        if self.health.router is not None:
            return ()
        return tuple(server.url for server in self.health.states)

    def shortest(self, name: str) -> int | None:
        """The smallest value of a length in `ServerInfo`; None if no server reports one."""
        lengths = [getattr(state.info, name) for state in self.health.states.values()]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def _seen(self) -> list[ServerState]:
        """Servers that have answered; a missing server is not described yet."""
        return [state for state in self.health.states.values() if state.seen]

    def check_features(self) -> None:
        """Raises ValueError if a server is unusable, or does not record the required experts."""
        for state in self._seen:
            if state.info.problem is not None:
                raise ValueError(f"{state.server.url} {state.info.problem}")
        if not self._settings.records_experts:
            return
        lacking = []
        for state in self._seen:
            if not state.info.returns_experts:
                lacking.append(state.server.url)
        if lacking:
            raise ValueError(
                "--use-rollout-routing-replay or --measure-routing-mismatch is on but"
                f" {', '.join(lacking)} does not return experts; {self.api.experts_advice}."
            )

    def sampling_mask_tokens(self) -> int | None:
        """The largest sampling mask of all servers; None if the run samples without masks."""
        sampling = self._settings.sampling
        if sampling is None or not sampling.return_sampling_mask:
            return None
        limit = min(state.info.max_mask_tokens for state in self._seen)
        if limit >= max(sampling.top_k, 2):
            return limit
        message = (
            f"--rollout-top-p is {sampling.top_p} and --rollout-top-k {sampling.top_k}, but a"
            f" server reports at most {limit} of the tokens they keep; {self.api.masks_advice}."
        )
        if self._settings.allow_truncation_bias:
            logger.warning(
                "%s Training uses the whole vocabulary (--allow-truncation-bias).", message
            )
            return None
        raise ValueError(f"{message} Or remove the two flags, or add --allow-truncation-bias.")

    def precision(self) -> Precision | None:
        """The precision of all servers' weights; None if it is unknown, differs or is quantized."""
        precisions = {state.info.precision for state in self._seen}
        precision = None
        if len(precisions) == 1:
            precision = precisions.pop()
        rounding = self._settings.rounding
        if rounding != "nearest" and precision in ("fp32", None):
            problem = (
                "compute in float32, or do not all report the same --dtype without --quantization"
            )
            raise ValueError(
                f"--weight-update-rounding is {rounding} but servers {problem}; remove the flag."
            )
        return precision

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Sends new weights to all reachable servers; a server that fails is marked down."""
        async with self._one_update, self.health.updating():
            await asyncio.gather(*(rollout.end_before_update() for rollout in list(self.rollouts)))
            await self._push(self.health.reachable(), source, version)
            self.health.version = version

    async def update_returned(self, source: WeightSource, version: int) -> None:
        """Sends weights to servers that came back without them."""
        async with self._one_update:
            # A server may have gone down, or got the weights of a push, since it was noted.
            needing = self.health.needing_weights()
            servers = [server for server in needing if server in self.waiting_for_source]
            if servers:
                await self._push(servers, source, version)

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs of all tokens but the first, by the URLs of the available servers."""
        return await self._ask_all(lambda api: api.score(token_ids))

    async def cached_tokens(self, token_ids: Sequence[int]) -> dict[str, int]:
        """Tokens of a text whose keys and values servers have kept, by URL.

        Servers that do not report the number are left out.
        """
        answers = await self._ask_all(lambda api: api.cached_tokens(token_ids))
        return {url: count for url, count in answers.items() if count is not None}

    async def _ask_all(self, make_call: Callable[[ServerApi], Call[Result]]) -> dict[str, Result]:
        """The answers of the available servers, by URL; a server that fails is left out."""
        answers: dict[str, Result] = {}

        async def ask(server: Server) -> None:
            try:
                answers[server.url] = await server.call(make_call(server.api))
            except (MalformedAnswer, RequestRefused) as error:
                raise RolloutUnavailable(str(error)) from None
            except ServerError as error:
                logger.warning("a probe of the weights failed: %s", error)

        await asyncio.gather(*(ask(state.server) for state in self.health.available()))
        return answers

    async def top_log_probs(
        self, texts: Sequence[Sequence[int]], sampling: Sampling, count: int
    ) -> list[dict[int, float]]:
        """The likeliest next tokens of the texts; the available servers take turns.

        A text whose server fails has no tokens. Without servers the list is empty.
        """
        servers = [state.server for state in self.health.available()]
        if not servers:
            return []

        async def ask(server: Server, text: Sequence[int]) -> dict[int, float]:
            try:
                return await server.call(server.api.top(text, sampling, count))
            except RequestError as error:
                logger.warning("a probe of the likeliest tokens failed: %s", error)
                return {}

        return await asyncio.gather(*map(ask, itertools.cycle(servers), texts))

    async def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors that did not change in the update; see `ServerEngine.wrong_weights`."""
        before = self._checksums
        self._checksums = {}

        async def ask(server: Server) -> None:
            try:
                self._checksums[server] = await server.call(self.api.checksums())
            except RequestError as error:
                logger.warning("%s Its weights are checked by log-probs only.", error)

        await asyncio.gather(*(ask(state.server) for state in self.health.available()))
        wrong: dict[str, list[str]] = {}
        for server, checksums in self._checksums.items():
            if server in before:
                wrong[server.url] = stale_weights(checksums, before[server], sent)
        return wrong

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        metrics = {"retries": self.dispatcher.retries, **self.health.metrics()}
        if self._launched is not None:
            metrics["restarts"] = self._launched.restarts
        return metrics

    async def close(self) -> None:
        """Ends all requests, and disconnects from the servers."""
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
        """Sends weights to a server that came back, now or at the trainer's next wait."""
        async with self._one_update:
            if server not in self.health.needing_weights():
                return
            try:
                restored = await self._sync.restore(server)
            except RequestError as error:
                self.health.mark_down(server, str(error))
                return
            if restored:
                self.health.mark_current(server, self.health.version)
            else:
                self.waiting_for_source.add(server)
                self.changed.set()

    async def _restart(self, launched: LaunchedServers) -> None:
        while True:
            for message in launched.poll():
                logger.warning(message)
            await asyncio.sleep(RESTART_INTERVAL)

    async def _end_tasks(self) -> None:
        # Cancelled rollouts abort their requests.
        await cancel_and_wait([rollout.task for rollout in self.rollouts if rollout.task])
        await self._tasks.cancel()


async def router_workers(router: Server, config: ServerConfig) -> tuple[str, ...]:
    """Returns the URLs of a router's servers; raises ValueError if they are unknown."""
    title = config.entry.title

    def unknown(problem: str) -> ValueError:
        return ValueError(
            f"the servers of the {title} router are unknown: {problem} Check"
            f" {config.flag('router_ip')} and {config.flag('router_port')}, or name the servers"
            f" with {config.flag('url')}."
        )

    try:
        workers = await router.call(router.api.workers())
    except RequestError as error:
        raise unknown(str(error)) from None
    try:
        urls = [normalized_url(url, config.flag("url")) for url in workers]
    except ValueError:
        raise unknown(f"{router.url} lists an invalid URL.") from None
    if not urls:
        raise ValueError(f"the {title} router at {router.url} has no servers; add some to it.")
    return tuple(dict.fromkeys(urls))
