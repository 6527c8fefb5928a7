"""The interface of weight transports, buckets of weights, and the steps of an update."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slime_tis.errors import first_line
from slime_tis.trainer.engines.event_loops import THREADS
from slime_tis.trainer.engines.rollout_engine import WeightSource
from slime_tis.trainer.engines.servers.api import RELEASE_TIMEOUT, Bucket
from slime_tis.trainer.engines.servers.client import Server
from slime_tis.trainer.engines.servers.errors import RequestError, ServerError

Result = TypeVar("Result")


class WeightSync(Protocol):
    """A weight transport; `WEIGHT_TRANSPORTS` lists their classes.

    The constructor takes a ServerConfig, an EngineHost and the servers' URLs. It raises ValueError
    if these servers cannot use the transport.
    """

    async def push(
        self, servers: Sequence[Server], source: WeightSource, version: int
    ) -> dict[Server, str]:
        """Sends new weights under the name `version`; returns the servers that failed, and why.

        Requests in flight pause and continue with the new weights, or are aborted on a failed
        server. `source` is called once and iterated to its end on one thread, even if all servers
        fail: it may contain collectives.
        """

    async def restore(self, server: Server) -> bool:
        """Sends the weights of the last `push` to a server that came back.

        Returns False if the transport does not keep them: then the server needs another `push`.
        """

    async def close(self) -> None:
        """Frees the resources of both sides."""


def buckets(source: WeightSource, max_bytes: int, device: torch.device) -> Iterator[Bucket]:
    """Groups weights lazily into buckets on a device.

    A bucket has at most `max_bytes`, or a single larger tensor.
    """
    names: list[str] = []
    tensors: list[Tensor] = []
    size = 0
    for name, weight in source():
        tensor = weight.detach().to(device).contiguous()
        if names and size + tensor.nbytes > max_bytes:
            yield Bucket(names=names, tensors=tensors, last=False)
            names = []
            tensors = []
            size = 0
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
        # Frees the source's tensor before the next one is made.
        del weight, tensor
    yield Bucket(names=names, tensors=tensors, last=True)


def weights_thread(device: torch.device) -> ThreadPoolExecutor:
    """The single thread that iterates weights, set to the device of this process."""
    initializer = None
    if device.type == "cuda":
        initializer = partial(torch.cuda.set_device, device)
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights", initializer=initializer)


async def on_all_servers(
    servers: Sequence[Server], step: Callable[[Server], Awaitable[None]], failed: dict[Server, str]
) -> list[Server]:
    """Runs a step of an update on all servers; returns the servers that passed.

    Adds the other servers to `failed`, with the reason.
    """
    outcomes = await asyncio.gather(*(step(server) for server in servers), return_exceptions=True)
    passed = []
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, RequestError):
            failed[server] = server.quoted(str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            passed.append(server)
    return passed


async def hand_out(
    servers: Sequence[Server], load: Callable[[Server], Awaitable[None]]
) -> dict[Server, str]:
    """Gives all servers weights, and releases those that fail; returns these, and why."""
    failed: dict[Server, str] = {}
    await on_all_servers(servers, load, failed)
    await asyncio.gather(*(server.api.release(server) for server in failed))
    return failed


async def hand_back(server: Server, load: Callable[[Server], Awaitable[None]]) -> None:
    """Gives a server weights that it lost; raises ServerError and releases it if it fails."""
    failed = await hand_out([server], load)
    if server in failed:
        raise ServerError(failed[server])


async def resume(server: Server, version: int) -> None:
    """Resumes generation; raises ServerError unless the server reports the new version."""
    reported = await server.call(server.api.weight_version())
    if reported != str(version):
        raise ServerError(f"{server.url} took weights {version} but reports weights {reported!r}.")
    await server.api.resume(server)


async def exchange(request: Awaitable[None], local_side: asyncio.Future[None]) -> None:
    """Waits for both sides of an exchange; the first failure raises RequestError."""
    server_side: asyncio.Future[None] = asyncio.ensure_future(request)
    try:
        await asyncio.wait({server_side, local_side}, return_when=asyncio.FIRST_EXCEPTION)
        # If this side failed: the server's message is often more precise.
        if not server_side.done():
            await asyncio.wait({server_side}, timeout=RELEASE_TIMEOUT)
        if server_side.done():
            server_side.result()
        await local_side
    except RuntimeError as error:
        raise ServerError(f"the connection for weights broke: {first_line(error)}") from error
    finally:
        server_side.cancel()
        local_side.cancel()


def in_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Runs a blocking function in a daemon thread.

    The program can exit even if the function never returns.
    """
    return asyncio.wrap_future(THREADS.submit(function))
