"""The SGLang servers of rank 0: their connections, their weights and what they must support."""

import asyncio
import logging
import pkgutil
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_tis.hf_directory import load_config, moe_sizes
from slime_tis.trainer.configs.rollout import Rounding
from slime_tis.trainer.configs.sglang import WEIGHT_TRANSPORTS, SGLangConfig
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.event_loops import BackgroundTasks, cancel_and_wait
from slime_tis.trainer.engines.rollout_engine import (
    EngineHost,
    RolloutUnavailable,
    SentRows,
    WeightSource,
)
from slime_tis.trainer.engines.sglang.client import (
    MalformedAnswer,
    RequestRefused,
    Server,
    ServerError,
    SGLangError,
    make_client,
)
from slime_tis.trainer.engines.sglang.dispatcher import Dispatcher
from slime_tis.trainer.engines.sglang.health import HealthMonitor, ServerState, Timeouts
from slime_tis.trainer.engines.sglang.launch import LaunchedServers
from slime_tis.trainer.engines.sglang.responses import RolloutTask
from slime_tis.trainer.engines.sglang.schema import ExpertLayout
from slime_tis.trainer.engines.sglang.weights.protocol import WeightSync
from slime_tis.trainer.engines.weight_rounding import Precision
from slime_tis.trainer.engines.weight_updates import BLOCKS, EMBEDDING, OUTPUT_LAYER

logger = logging.getLogger(__name__)

PRECISIONS: dict[object, Precision] = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
}
TensorChecksums = Mapping[str, Sequence[str]]
"""Checksums of each rank by SGLang's name of the tensor."""
JOINED = {
    r"\.experts\.\d+\.(gate|up)_proj\.weight$": ".experts.w13_weight",
    r"\.experts\.\d+\.down_proj\.weight$": ".experts.w2_weight",
    r"\.[qkv]_proj\.": ".qkv_proj.",
    r"\.(gate|up)_proj\.": ".gate_up_proj.",
}
"""Pattern of Hugging Face names → SGLang's name of the tensor that joins them."""
OLDEST_SGLANG = (0, 5, 23)
"""Reports a weight version per token, sampling masks and checksums."""
RESTART_INTERVAL = 1.0


@dataclass(frozen=True, kw_only=True)
class SGLangSettings:
    """Which servers a run uses, and what they must support."""

    config: SGLangConfig
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

    @property
    def launch_config(self) -> SGLangConfig:
        """The config with the flags that servers need."""
        flags = ("--enable-return-routed-experts",) * self.records_experts
        return replace(
            self.config,
            sglang_server_args=(*(self.config.sglang_server_args or ()), *flags) or None,
        )


class ServerGroup:
    """The servers of rank 0: their health, their requests and their weights. It belongs to one asyncio loop."""

    def __init__(
        self,
        settings: SGLangSettings,
        host: EngineHost,
        vocab_size: int | None,
        launched: LaunchedServers | None,
    ) -> None:
        """Connects to nothing yet; restarts `launched` servers that end."""
        self.changed = threading.Event()
        """Set when a batch is done, or a server waits for weights."""
        self.waiting_for_source: set[Server] = set()
        """Servers that came back and need weights that only the trainer has."""
        self.rollouts: set[RolloutTask] = set()
        self._settings, self._host, self._vocab_size, self._launched = (
            settings,
            host,
            vocab_size,
            launched,
        )
        self._layout = expert_layout(host.hf_checkpoint) if settings.records_experts else None
        self._checksums: dict[Server, TensorChecksums] = {}
        self._tasks = BackgroundTasks()
        self._one_update = asyncio.Lock()

    async def connect(self) -> None:
        """Waits for the servers; raises RolloutUnavailable if none comes up, and ValueError if they refuse."""
        config = self._settings.config
        client = make_client(config.api_key, config.admin_api_key)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(client.session)

            async def server(url: str) -> Server:
                server = Server(
                    url, client, config.sglang_request_timeout, self._vocab_size, self._layout
                )
                stack.push_async_callback(server.close)
                return server

            urls, router = (
                (config.server_urls if self._launched is None else self._launched.urls),
                None,
            )
            if config.router_url is not None:
                router = await server(config.router_url)
                urls = await router.worker_urls()
            servers = [await server(url) for url in urls]
            if router is not None:
                router.workers = servers
            transport = pkgutil.resolve_name(WEIGHT_TRANSPORTS[config.sglang_weight_sync])
            self._sync: WeightSync = self._settings.weight_sync or transport(
                config, self._host, urls
            )
            stack.push_async_callback(self._sync.close)
            self.health = HealthMonitor(
                servers,
                router,
                self._settings.timeouts or Timeouts(recovery=config.sglang_recovery_timeout),
                lambda returned: self._tasks.start(self._restore(returned)),
            )
            stack.push_async_callback(self.health.close)
            self.dispatcher = Dispatcher(self.health, config)
            stack.push_async_callback(self._end_tasks)
            await self.health.start(config.sglang_startup_timeout)
            if self._launched is not None:
                self._tasks.start(self._restart(self._launched))
            self._stack = stack.pop_all()

    @property
    def url(self) -> str:
        """The router's URL, else the first server's."""
        router = self.health.router
        return (router or next(iter(self.health.states.values()))).server.url

    @property
    def names(self) -> tuple[str, ...]:
        """The servers' URLs; none behind a router, whose answers do not name the server."""
        return () if self.health.router else tuple(server.url for server in self.health.states)

    @property
    def max_input_len(self) -> int | None:
        """The longest input that all servers take, in tokens; None if no server reports a limit."""
        lengths = (state.info.max_req_input_len for state in self.health.states.values())
        return min((length - 1 for length in lengths if length is not None), default=None)

    @property
    def _seen(self) -> list[ServerState]:
        return [state for state in self.health.states.values() if state.seen]

    def check_features(self) -> None:
        """Raises ValueError if a server is too old, or the run needs experts that it was not started to return."""
        for state in self._seen:
            numbers = tuple(map(int, re.findall("[0-9]{1,9}", state.info.version)[:3]))
            if (0, 0, 0) < numbers < OLDEST_SGLANG:
                raise ValueError(
                    f"{state.server.url} runs SGLang {state.info.version}; update it to 0.5.23 or"
                    " newer."
                )
        lacking = [
            state.server.url
            for state in self._seen
            if state.info.enable_return_routed_experts is not True
        ]
        if lacking and self._settings.records_experts:
            raise ValueError(
                "--use-rollout-routing-replay or --measure-routing-mismatch is on but"
                f" {', '.join(lacking)} does not return experts; start it with"
                " --enable-return-routed-experts."
            )

    def sampling_mask_tokens(self) -> int | None:
        """The largest sampling mask that all servers report; None if the run samples without masks."""
        sampling = self._settings.sampling
        if sampling is None or not sampling.return_sampling_mask:
            return None
        limit = min(state.info.sampling_mask_max_tokens or 0 for state in self._seen)
        if limit >= max(sampling.top_k, 2):
            return limit
        message = (
            f"--rollout-top-p is {sampling.top_p} and --rollout-top-k {sampling.top_k}, but a"
            f" server reports at most {limit} of the tokens they keep; start it with a larger"
            " --sampling-mask-max-tokens."
        )
        if self._settings.allow_truncation_bias:
            logger.warning(
                "%s Training uses the whole vocabulary (--allow-truncation-bias).", message
            )
            return None
        raise ValueError(f"{message} Or remove the two flags, or add --allow-truncation-bias.")

    def precision(self, model: Mapping[str, Any]) -> Precision | None:
        """The precision of all servers' weights; None if it is unknown, differs or is quantized."""
        dtypes = {
            None if state.info.quantization is not None else state.info.dtype
            for state in self._seen
        }
        precision = server_precision(dtypes.pop(), model) if len(dtypes) == 1 else None
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
            servers = [
                server
                for server in self.health.needing_weights()
                if server in self.waiting_for_source
            ]
            if servers:
                await self._push(servers, source, version)

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs of all tokens but the first, by the URL of each available server."""
        answers: dict[str, list[float]] = {}

        async def ask(server: Server) -> None:
            try:
                answers[server.url] = await server.prompt_log_probs(token_ids)
            except (MalformedAnswer, RequestRefused) as error:
                raise RolloutUnavailable(str(error)) from None
            except ServerError as error:
                logger.warning("a probe of the weights failed: %s", error)

        await asyncio.gather(*(ask(state.server) for state in self.health.available()))
        return answers

    async def top_log_probs(
        self, texts: Sequence[Sequence[int]], sampling: Sampling, count: int
    ) -> list[dict[int, float]]:
        """The likeliest next tokens of each text; the available servers take turns. Empty if a server fails."""
        servers = [state.server for state in self.health.available()]

        async def ask(number: int, text: Sequence[int]) -> dict[int, float]:
            try:
                return await servers[number % len(servers)].top_log_probs(text, sampling, count)
            except SGLangError as error:
                logger.warning("a probe of the likeliest tokens failed: %s", error)
                return {}

        return list(
            await asyncio.gather(*(ask(*each) for each in enumerate(texts if servers else ())))
        )

    async def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors that did not change in the update; see `SGLangEngine.wrong_weights`."""
        before, self._checksums = self._checksums, {}

        async def ask(server: Server) -> None:
            try:
                self._checksums[server] = await server.weight_checksums()
            except SGLangError as error:
                logger.warning("%s Its weights are checked by log-probs only.", error)

        await asyncio.gather(*(ask(state.server) for state in self.health.available()))
        compared = before.keys() & self._checksums.keys()
        return {
            each.url: stale_weights(self._checksums[each], before[each], sent) for each in compared
        }

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        restarts = {} if self._launched is None else {"restarts": float(self._launched.restarts)}
        return {"retries": self.dispatcher.retries} | self.health.metrics() | restarts

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
        """Sends weights to a server that came back, now or when the trainer next waits for a rollout."""
        async with self._one_update:
            if server not in self.health.needing_weights():
                return
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
        while True:
            for message in launched.poll():
                logger.warning(message)
            await asyncio.sleep(RESTART_INTERVAL)

    async def _end_tasks(self) -> None:
        await cancel_and_wait(
            [rollout.task for rollout in self.rollouts if rollout.task]
        )  # aborts their requests
        await self._tasks.cancel()


def expert_layout(hf_checkpoint: str | Path) -> ExpertLayout:
    """The layout of routed experts in answers of a model with experts."""
    hf = load_config(hf_checkpoint)
    moe = moe_sizes(hf)
    assert moe is not None  # file_checks refuses options of experts for other models
    return ExpertLayout(num_hidden_layers=hf.num_hidden_layers, moe=moe)


def server_precision(dtype: str | None, model: Mapping[str, Any]) -> Precision | None:
    """The precision of an SGLang `--dtype`, which is float16 for `auto` and a float32 checkpoint; None if unknown."""
    if dtype == "auto":
        checkpoint_dtype = model.get("dtype") or model.get("torch_dtype") or "float32"
        dtype = "float16" if checkpoint_dtype == "float32" else checkpoint_dtype
    return PRECISIONS.get(dtype)


def stale_weights(
    now: TensorChecksums, before: TensorChecksums, sent: Mapping[str, SentRows]
) -> list[str]:
    """Returns the Hugging Face names of tensors that the update changed but the server did not."""
    joined: dict[str, list[SentRows]] = {}
    for name, rows in sent.items():
        joined.setdefault(server_name(name), []).append(rows)
    stale = {
        name
        for name, shards in joined.items()
        if is_stale(
            now.get(name, []),
            before.get(name, []),
            on_every_rank=name not in (EMBEDDING, OUTPUT_LAYER)
            and all(shard.changed_everywhere for shard in shards),
        )
    }
    return [name for name, rows in sent.items() if rows.changed and server_name(name) in stale]


def server_name(name: str) -> str:
    """SGLang's name of the tensor that contains a Hugging Face tensor; SGLang joins matrices with the same input."""
    for pattern, joined in JOINED.items():
        name = re.sub(pattern, joined, name)
    return name


def is_stale(now: Sequence[str], before: Sequence[str], *, on_every_rank: bool) -> bool:
    """Whether a tensor that an update changed kept its checksums; `now` is empty if the server has no such tensor.

    `on_every_rank` says whether the shard of each of up to `BLOCKS` / 2 ranks must have changed.
    Vocabularies are padded, so their last rank may hold only padding.
    """
    same = [current == earlier for current, earlier in zip(now, before, strict=False)]
    if not same or len(now) != len(before):
        return False
    return all(same) or (on_every_rank and len(same) <= BLOCKS // 2 and any(same))
