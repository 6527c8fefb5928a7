"""What the ways of bringing weights to servers have in common: their interface, buckets, and the steps of an update.

The way of the weights from Megatron to a server:

    SGLangEngine.update_weights(TrainingEngine.named_hf_tensors, version)       on every rank
      ServerGroup.update_weights       rank 0, on the loop: no request is started meanwhile
        WeightSync.push
          pause                        the server stops generating and drops keys and values of the old weights
          source()                     on the weights thread of rank 0, on the main thread of the others: whole tensors
                                       under Hugging Face names, one by one; a collective
          buckets → broadcast          DistributedSync; DiskSync writes files before the pause, which the server reads
          resume                       the server goes on generating once it reports the new version
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slime_tis.errors import first_line
from slime_tis.trainer.engines.engine import WeightSource
from slime_tis.trainer.engines.sglang.client import UNKNOWN_ENDPOINT, Server
from slime_tis.trainer.engines.sglang.errors import RequestRefused, ServerError, SGLangError

Result = TypeVar("Result")

CONTROL_TIMEOUT = 60.0
"""Longest wait for a server to pause, flush or go on, in seconds: a batch under way is finished first."""
RELEASE_TIMEOUT = 5.0
"""Longest wait for a server that has failed already, in seconds."""


class WeightSync(Protocol):
    """A way of bringing weights to servers."""

    async def push(self, servers: Sequence[Server], source: WeightSource, version: int) -> dict[Server, str]:
        """Gives servers new weights, and names these `version`.

        Requests in flight are held back meanwhile and go on with the new weights. `source` is called once, and what
        it yields is iterated to its end on one thread, whatever becomes of the servers: it may hold collectives
        that other ranks take part in.

        Returns:
            The servers that failed, and why; what they were answering is aborted.

        Raises:
            Exception: Whatever `source` raises; the servers are released then, with weights that are not to be used.
        """

    async def restore(self, server: Server) -> bool:
        """Gives a server that came back the weights of the last `push`; False where that needs a `source`.

        Raises:
            SGLangError: The server failed.
        """

    async def close(self) -> None:
        """Frees what is held on either side."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Some weights that travel together."""

    names: list[str]
    """Hugging Face names."""

    tensors: list[Tensor]
    """Whole tensors, contiguous, one per name."""

    last: bool
    """Whether no bucket follows."""


def buckets(source: WeightSource, max_bytes: int, place: Callable[[Tensor], Tensor]) -> Iterator[Bucket]:
    """Groups weights into buckets of at most `max_bytes`; a larger tensor has one of its own.

    The source is called at the first bucket, and consumed as far as the tensor after each and no further. No reference
    remains to what was yielded before.

    Args:
        source: Yields the weights.
        max_bytes: Size of a bucket, in bytes.
        place: Moves a tensor to where it is needed, contiguous.

    Raises:
        ValueError: There are no weights.
    """
    names: list[str] = []
    tensors: list[Tensor] = []
    size = 0
    for name, whole in source():
        tensor = place(whole)
        if names and size + tensor.nbytes > max_bytes:
            yield Bucket(names=names, tensors=tensors, last=False)
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
        del whole, tensor
    if not names:
        raise ValueError("there are no weights to send: the model has no parameters.")
    yield Bucket(names=names, tensors=tensors, last=True)


def weights_thread(device: torch.device) -> ThreadPoolExecutor:
    """The one thread that weights are iterated on, with the device of this process as its own."""

    def use_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights", initializer=use_device)


async def on_all_servers(
    servers: Sequence[Server], step: Callable[[Server], Awaitable[None]], failed: dict[Server, str]
) -> list[Server]:
    """Takes a step of an update on all servers at once.

    Args:
        servers: The servers.
        step: What to do with one.
        failed: Error message of each server that failed; those that fail in this step are added.

    Returns:
        The servers that did not fail.
    """
    outcomes = await asyncio.gather(*(step(server) for server in servers), return_exceptions=True)
    passed = []
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, SGLangError):
            failed[server] = server.redactor.quoted(str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            passed.append(server)
    return passed


async def pause(server: Server) -> None:
    """Stops generation, sends running requests back to the queue, and drops keys and values of the old weights."""
    await server.post("/pause_generation", {"mode": "retract"}, timeout=CONTROL_TIMEOUT)
    deadline = asyncio.get_running_loop().time() + CONTROL_TIMEOUT
    wait = 0.05
    while True:
        try:
            return await server.post("/flush_cache", {}, timeout=CONTROL_TIMEOUT)
        except RequestRefused:  # a batch under way, or a copy to host memory
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(wait)
        wait = min(2 * wait, 1.0)


async def resume(server: Server, version: int) -> None:
    """Lets generation go on, once the server reports that it has the weights.

    Raises:
        ServerError: It reports another version.
    """
    found = await server.weight_version()
    if found != str(version):
        raise ServerError(f"{server.url} took weights {version} but says that it has {found!r}.")
    await server.post("/continue_generation", {}, timeout=CONTROL_TIMEOUT)


async def release(server: Server, group_name: str | None = None) -> None:
    """Gets a server out of an update that failed, as far as it still answers, and lets it go on.

    What it was answering is aborted, so that no answer mixes weights.
    """
    reachable = await try_post(server, "/end_weight_update", {})
    if reachable and group_name is not None:
        await try_post(server, "/destroy_weights_update_group", {"group_name": group_name})
    if reachable and await try_post(server, "/abort_request", {"abort_all": True}):
        await try_post(server, "/continue_generation", {})


async def begin_session(server: Server) -> None:
    """Opens the session that newer servers want around an update; 0.5.9 has none.

    One that a trainer left open is closed first.
    """
    try:
        await post_if_known(server, "/begin_weight_update")
    except RequestRefused:
        await try_post(server, "/end_weight_update", {})
        await post_if_known(server, "/begin_weight_update")


async def exchange(request: Awaitable[None], own_part: asyncio.Future[None]) -> None:
    """Waits for a server's answer and for this side's part of the same exchange; the first failure ends the wait.

    Raises:
        ServerError: This side's part failed.
        SGLangError: The server's part failed.
    """
    asked = asyncio.ensure_future(request)
    both: set[asyncio.Future[None]] = {asked, own_part}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if not asked.done():  # the server's message is often the better one
            await asyncio.wait({asked}, timeout=RELEASE_TIMEOUT)
        if asked.done():
            asked.result()
        await own_part
    except RuntimeError as error:
        raise ServerError(f"the connection for weights broke: {first_line(error)}") from error
    finally:
        asked.cancel()
        own_part.cancel()


def in_thread(function: Callable[[], Result]) -> asyncio.Future[Result]:
    """Runs a blocking function in a daemon thread, which does not keep the program from ending if it never returns."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(outcome: Result | Exception) -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def run() -> None:
        try:
            outcome: Result | Exception = function()
        except Exception as error:
            outcome = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return future


async def try_post(server: Server, endpoint: str, body: dict[str, object]) -> bool:
    """Posts where a refusal does no harm; returns whether the server answers at all."""
    try:
        await server.post(endpoint, body, timeout=RELEASE_TIMEOUT)
    except RequestRefused:
        return True
    except ServerError:
        return False
    return True


async def post_if_known(server: Server, endpoint: str) -> None:
    """Posts to an endpoint that older servers do not have."""
    try:
        await server.post(endpoint, {}, timeout=CONTROL_TIMEOUT)
    except RequestRefused as error:
        if error.status not in UNKNOWN_ENDPOINT:
            raise
