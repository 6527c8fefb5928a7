"""Starts servers of `weight_server.py` and talks to them from a test."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import torch
from torch import Tensor

from slime_tis.trainer.engines.sglang.client import Server, make_client
from tests.rollout.sglang import weight_server
from tests.runs import fork_server

Result = TypeVar("Result")


class WeightServer:
    """One process, and what is known of it here."""

    def __init__(self, *, session: bool = True, tp_size: int = 1) -> None:
        context = fork_server()
        self.port, port = context.Pipe(duplex=False)
        self.process = context.Process(target=weight_server.serve, args=(port, session, tp_size), daemon=True)
        self.process.start()
        port.close()

    @property
    def url(self) -> str:
        if not hasattr(self, "_url"):
            self._url = f"http://127.0.0.1:{self.port.recv()}"
        return self._url

    def behave(self, **how: Any) -> None:
        """Forgets what was called, and behaves in this way from now on."""
        httpx.post(f"{self.url}/behave", json=how, trust_env=False).raise_for_status()

    def state(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/state", trust_env=False).json()

    def calls(self) -> list[str]:
        return [endpoint.removeprefix("/") for endpoint, _ in self.state()["calls"]]

    def bodies(self, endpoint: str) -> list[dict[str, Any]]:
        return [body for called, body in self.state()["calls"] if called == endpoint]

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def running(*servers: WeightServer) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            server.stop()


def with_clients(
    servers: list[WeightServer], work: Callable[[list[Server]], Awaitable[Result]], timeout: float = 60.0
) -> Result:
    """Runs a coroutine with a `Server` for each."""

    async def run() -> Result:
        async with make_client(None) as client:
            return await work([Server(server.url, client, timeout=timeout) for server in servers])

    return asyncio.run(run())


def digests(named: dict[str, Tensor]) -> dict[str, Any]:
    return {name: weight_server.digest(tensor) for name, tensor in named.items()}


def some_weights(seed: int) -> dict[str, Tensor]:
    """Tensors of odd shapes and several types, one that is not contiguous, and one with values beyond bf16."""
    make = torch.Generator().manual_seed(seed)
    weights = {
        "embed": torch.randn(37, 11, generator=make),
        "scalar": torch.randn((), generator=make),
        "half": torch.randn(5, 3, 2, generator=make).bfloat16(),
        "turned": torch.randn(8, 6, generator=make).T,
        "one": torch.randn(1, generator=make),
        "extreme": torch.tensor([float("inf"), -0.0, 1e-45, 3.4e38, float("-inf")]),
        "count": torch.randint(0, 9, (3,), generator=make),
        "half_again": torch.randn(64, generator=make).bfloat16(),
    }
    return weights
