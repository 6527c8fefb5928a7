"""Servers, an engine on them, and what every sample has to be."""

import asyncio
from contextlib import contextmanager
from pathlib import Path

import torch

from slime_tis.trainer.configs.servers import server_config
from slime_tis.trainer.data.sample import STATUS, Prompt, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.rollout_engine import EngineHost
from slime_tis.trainer.engines.servers.api import ServedModel
from slime_tis.trainer.engines.servers.client import Server, make_client
from slime_tis.trainer.engines.servers.health import Timeouts
from slime_tis.trainer.engines.servers.server_engine import ServerEngine
from slime_tis.trainer.engines.servers.server_group import ServerSettings
from slime_tis.trainer.engines.sglang.sglang_api import SGLangApi, control
from tests.rollout.sglang.fake_sglang import STOP, continuation, log_prob
from tests.samples import flat

QUICK = Timeouts(recovery=30.0, first_retry=0.005, max_retry=0.02, health_interval=0.01)
LIMIT = 20
MODEL = ServedModel(directory=Path("m"), config={}, vocab_size=None, context_len=None)
API = SGLangApi(model=MODEL)
SAMPLING = Sampling(max_response_len=LIMIT, n_samples=3)


def prompt(index):
    return Prompt(index=index, text=f"p{index}", token_ids=(1, 3 + index % 60, 4 + index // 60))


PROMPTS = [prompt(index) for index in range(12)]
EARLY = [p for p in map(prompt, range(300)) if len(continuation(list(p.token_ids), 60)) <= 5]
LATE = [p for p in map(prompt, range(300)) if len(continuation(list(p.token_ids), 60)) == 60]


def with_clients(servers, work, *keys, **options):
    """Runs a coroutine with a client of each server."""

    async def run():
        flags = ("--sglang-api-key-env", "--sglang-admin-api-key-env")
        given = dict.fromkeys(flags) | dict(zip(flags, keys, strict=False))
        client = make_client(given, API.user_endpoints)
        async with client.session:
            clients = [
                Server(server.url, client, API, **{"timeout": 10.0, **options})
                for server in servers
            ]
            try:
                return await work(clients)
            finally:
                await asyncio.gather(*(each.close() for each in clients))

    return asyncio.run(run())


class Weights:
    """A policy's weights, and how often they were iterated."""

    def __init__(self):
        self.iterated = 0

    def __call__(self):
        self.iterated += 1
        yield "model.norm.weight", torch.ones(2)


class ByHand:
    """A way of weights that needs the trainer each time, as the distributed one does."""

    def __init__(self):
        self.pushes = []
        self.between = lambda: None
        """Called while servers are paused."""

    async def push(self, servers, source, version):
        failed = {}
        self.pushes.append(([server.url for server in servers], version))
        assert [name for name, _ in source()] == ["model.norm.weight"]
        for server in servers:
            try:
                await server.call(control("/pause_generation", {"mode": "retract"}))
                self.between()
                body = {"weight_version": str(version)}
                await server.call(control("/update_weights_from_disk", body))
                await server.call(control("/continue_generation"))
            except Exception as error:
                failed[server] = str(error)
        return failed

    async def restore(self, server):
        return False

    async def close(self):
        pass


def make_engine(checkpoint, weights, **options):
    """An engine with short timeouts; `options` are fields of EngineHost, ServerSettings and
    ServerConfig with the prefix sglang_."""
    tokenizer = options.pop("tokenizer", None) or load_tokenizer(checkpoint)
    host_fields = ("weights_version", "check_interrupts", "output_dir", "adapter")
    host = {name: options.pop(name) for name in host_fields if name in options}
    given = [name for name in options if name.startswith("sglang_")]
    config = server_config(
        "sglang", **{name.removeprefix("sglang_"): options.pop(name) for name in given}
    )
    return ServerEngine(
        ServerSettings(config=config, **{"timeouts": QUICK, **options}),
        tokenizer,
        EngineHost(
            **{"hf_checkpoint": checkpoint, "weights": weights, "output_dir": checkpoint, **host}
        ),
    )


class Run:
    """Servers, an engine on them, and what it was made of."""

    def __init__(self, servers, checkpoint, **options):
        self.servers, self.weights, self.sync = servers, Weights(), ByHand()
        if options.get("sglang_weight_sync") != "disk":
            options = {"weight_sync": self.sync, **options}
        options = {
            "sglang_url": tuple(server.url for server in servers),
            "sglang_request_timeout": 30.0,
            **options,
        }
        self.engine = make_engine(checkpoint, self.weights, **options)

    def update(self, version):
        self.engine.update_weights(self.weights, version)

    @property
    def requests(self):
        return [body for server in self.servers for body in server.requests]

    @property
    def num_held(self):
        """Requests that have all tokens up to their server's `stop_after`."""
        return sum(
            tokens >= (server.stop_after or 0)
            for server in self.servers
            for tokens in list(server.held.values())
        )

    def release(self):
        """Lets held requests continue."""
        for server in self.servers:
            server.stop_after = None


def assert_exact(groups, prompts, sampling=SAMPLING):
    """Every sample is there once, in its place, and is what the model says."""
    assert [[sample.row for sample in group] for group in groups] == [
        [p] * sampling.n_samples for p in prompts
    ]
    for number, sample in enumerate(flat(groups)):
        assert (sample.group_index, sample.index) == (number // sampling.n_samples, number)
        assert sample.response_ids == continuation(
            list(sample.row.token_ids), sampling.max_response_len
        )
        assert sample.status is STATUS["stop" if sample.response_ids[-1] == STOP else "length"]
        assert_log_probs(sample)


def versions_of(groups):
    """Versions of the weights that sampled any token."""
    return {version for sample in flat(groups) for version in sample.weight_versions}


def assert_log_probs(sample):
    assert sample.rollout_log_probs == [
        log_prob(token, version)
        for token, version in zip(sample.response_ids, sample.weight_versions, strict=True)
    ]
    assert (
        sample.loss_mask
        == [1] * len(sample.response_ids)
        == [1 for worker in sample.rollout_workers]
    )


@contextmanager
def held(run, tokens):
    for server in run.servers:
        server.stop_after = tokens
    yield
    run.release()
