"""Servers, an engine on them, and what every sample has to be."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from slime_tis.trainer.data.sample import STATUS, Prompt, Sample, Sampling
from slime_tis.trainer.engines.engine import EngineHost, WeightSource
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.sglang.client import Server, make_client
from slime_tis.trainer.engines.sglang.engine import SGLangEngine
from slime_tis.trainer.engines.sglang.health import Timeouts
from slime_tis.trainer.engines.sglang.server_group import SGLangSettings
from slime_tis.trainer.options.sglang import SGLangConfig
from tests.rollout.sglang.fake_sglang import STOP, FakeSGLang, continuation, log_prob
from tests.samples import flat

Result = TypeVar("Result")
QUICK = Timeouts(recovery=30.0, first_retry=0.005, max_retry=0.02, health_interval=0.01)
LIMIT = 20
SAMPLING = Sampling(max_response_len=LIMIT, n_samples=3)


def prompt(index: int) -> Prompt:
    return Prompt(index=index, text=f"p{index}", token_ids=(1, 3 + index % 60, 4 + index // 60))


PROMPTS = [prompt(index) for index in range(12)]
EARLY = [p for p in map(prompt, range(300)) if len(continuation(list(p.token_ids), 60)) <= 5]
LATE = [p for p in map(prompt, range(300)) if len(continuation(list(p.token_ids), 60)) == 60]


def with_clients(
    servers: Sequence[FakeSGLang], work: Callable[[list[Server]], Awaitable[Result]], *keys: str | None, **options: Any
) -> Result:
    """Runs a coroutine with a client of each server."""

    async def run() -> Result:
        async with make_client(*keys) as client:
            clients = [Server(server.url, client, **{"timeout": 10.0, **options}) for server in servers]
            try:
                return await work(clients)
            finally:
                await asyncio.gather(*(each.close() for each in clients))

    return asyncio.run(run())


class Weights:
    """A policy's weights, and how often they were iterated."""

    def __init__(self) -> None:
        self.iterated = 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        self.iterated += 1
        yield "model.norm.weight", torch.ones(2)


class ByHand:
    """A way of weights that needs the trainer each time, as the distributed one does."""

    def __init__(self) -> None:
        self.pushes: list[tuple[list[str], int]] = []
        self.between: Callable[[], None] = lambda: None
        """Called while servers are paused."""

    async def push(self, servers: Sequence[Server], source: WeightSource, version: int) -> dict[Server, str]:
        failed: dict[Server, str] = {}
        self.pushes.append(([server.url for server in servers], version))
        assert [name for name, _ in source()] == ["model.norm.weight"]
        for server in servers:
            try:
                await server.post("/pause_generation", {"mode": "retract"})
                self.between()
                await server.post("/update_weights_from_disk", {"weight_version": str(version)})
                await server.post("/continue_generation", {})
            except Exception as error:
                failed[server] = str(error)
        return failed

    async def restore(self, server: Server) -> bool:
        return False

    async def close(self) -> None:
        pass


def make_engine(checkpoint: Path, weights: WeightSource, **options: Any) -> SGLangEngine:
    """An engine with short timeouts; `options` are fields of EngineHost, SGLangSettings and SGLangConfig."""
    tokenizer = options.pop("tokenizer", None) or load_tokenizer(checkpoint)
    host = {name: options.pop(name) for name in ("weights_version", "output_dir") if name in options}
    config = SGLangConfig(**{name: options.pop(name) for name in list(options) if name.startswith("sglang_")})
    return SGLangEngine(
        SGLangSettings(config=config, **{"timeouts": QUICK, **options}),
        tokenizer,
        EngineHost(**{"hf_checkpoint": checkpoint, "weights": weights, "output_dir": checkpoint, **host}),
    )


class Run:
    """Servers, an engine on them, and what it was made of."""

    def __init__(self, servers: list[FakeSGLang], checkpoint: Path, **options: Any) -> None:
        self.servers, self.weights, self.sync = servers, Weights(), ByHand()
        if options.get("sglang_weight_sync") != "disk":
            options = {"weight_sync": self.sync, **options}
        options = {"sglang_url": tuple(server.url for server in servers), "sglang_request_timeout": 30.0, **options}
        self.engine = make_engine(checkpoint, self.weights, **options)

    def update(self, version: int) -> None:
        self.engine.update_weights(self.weights, version)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [body for server in self.servers for body in server.requests]

    @property
    def num_held(self) -> int:
        """Requests that have all tokens up to their server's `stop_after`."""
        return sum(
            tokens >= (server.stop_after or 0) for server in self.servers for tokens in list(server.held.values())
        )

    def release(self) -> None:
        """Lets held requests continue."""
        for server in self.servers:
            server.stop_after = None


def assert_exact(groups: list[list[Sample]], prompts: Sequence[Prompt], sampling: Sampling = SAMPLING) -> None:
    """Every sample is there once, in its place, and is what the model says."""
    assert [[sample.row for sample in group] for group in groups] == [[p] * sampling.n_samples for p in prompts]
    for number, sample in enumerate(flat(groups)):
        assert (sample.group_index, sample.index) == (number // sampling.n_samples, number)
        assert sample.response_ids == continuation(list(sample.row.token_ids), sampling.max_response_len)
        assert sample.status is STATUS["stop" if sample.response_ids[-1] == STOP else "length"]
        assert_log_probs(sample)


def versions_of(groups: list[list[Sample]]) -> set[int]:
    """Versions of the weights that sampled any token."""
    return {version for sample in flat(groups) for version in sample.weight_versions}


def assert_log_probs(sample: Sample) -> None:
    assert sample.rollout_log_probs == [
        log_prob(token, version) for token, version in zip(sample.response_ids, sample.weight_versions, strict=True)
    ]
    assert sample.loss_mask == [1] * len(sample.response_ids) == [1 for worker in sample.rollout_workers]


@contextmanager
def held(run: Run, tokens: int) -> Iterator[None]:
    for server in run.servers:
        server.stop_after = tokens
    yield
    run.release()
