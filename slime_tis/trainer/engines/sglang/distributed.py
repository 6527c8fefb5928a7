"""Weights by broadcast: one torch process group per server, NCCL from a GPU and gloo from a CPU."""

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis.trainer.configs.sglang import SGLangConfig, is_loopback
from slime_tis.trainer.engines.rollout_engine import EngineHost, WeightSource
from slime_tis.trainer.engines.servers.client import RequestRefused, Server, ServerError
from slime_tis.trainer.engines.servers.weights import protocol


class DistributedSync:
    """Broadcasts weights to the servers in buckets; see WeightSync."""

    def __init__(self, config: SGLangConfig, host: EngineHost, urls: Sequence[str]) -> None:
        self._config = config
        self._device = torch.device(host.device)
        self._timeout = config.sglang_request_timeout
        """Seconds for a server to join a group, or to take one bucket."""
        self._groups: dict[Server, UpdateGroup] = {}
        self._weights_thread = protocol.weights_thread(self._device)

    async def push(
        self, servers: Sequence[Server], source: WeightSource, version: int
    ) -> dict[Server, str]:
        """See WeightSync."""
        failed: dict[Server, str] = {}
        loop = asyncio.get_running_loop()
        stream = protocol.buckets(source, self._config.bucket_bytes, self._device)
        try:
            live = await protocol.on_all_servers(servers, protocol.pause, failed)
            live = await protocol.on_all_servers(live, self._open, failed)
            while bucket := await loop.run_in_executor(self._weights_thread, next, stream, None):
                send = partial(self._send, bucket=bucket, version=version)
                live = await protocol.on_all_servers(live, send, failed)
                # Frees the tensors before the next bucket takes memory.
                del bucket, send
            finish = partial(self._finish, version=version)
            await protocol.on_all_servers(live, finish, failed)
        except BaseException:
            await asyncio.gather(*map(self._give_up, servers))
            raise
        await asyncio.gather(*map(self._give_up, failed))
        return failed

    async def restore(self, server: Server) -> bool:
        """Returns False: only the trainer has the weights."""
        return False

    async def close(self) -> None:
        """Leaves all groups."""
        await asyncio.gather(*(self._leave(server) for server in list(self._groups)))
        self._weights_thread.shutdown(wait=False)

    async def _open(self, server: Server) -> None:
        """Joins a group with the server if necessary, and opens the update session."""
        group = self._groups.get(server)
        # With another version, the server restarted since it joined, and has left the group.
        if group is None or group.version != await server.weight_version():
            await self._leave(server)
            await self._join(server)
        try:
            await server.post("/begin_weight_update", {}, timeout=protocol.CONTROL_TIMEOUT)
        except RequestRefused:
            # A run that was killed during an update left its session open.
            await protocol.try_post(server, "/end_weight_update", {})
            await server.post("/begin_weight_update", {}, timeout=protocol.CONTROL_TIMEOUT)

    async def _join(self, server: Server) -> None:
        info = await server.info()
        if (info.dp_size, info.pp_size) != (1, 1):
            raise ServerError(
                f"{server.url} runs with --dp-size {info.dp_size} and --pp-size {info.pp_size}, and"
                " SGLang takes distributed weights with 1 of each; use --sglang-weight-sync disk."
            )
        address = self._config.sglang_sync_address
        if address is None:  # found for each server
            address = await protocol.in_thread(partial(local_address, server.url))
        group = UpdateGroup(
            address, server_ranks=info.tp_size, device=self._device, timeout=self._timeout
        )
        self._groups[server] = group
        body = {
            "master_address": address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": 1 + info.tp_size,
            "group_name": group.name,
            "backend": "nccl" if self._device.type == "cuda" else "gloo",
        }
        request = server.post("/init_weights_update_group", body, timeout=self._timeout)
        await protocol.exchange(request, protocol.in_thread(group.join))

    async def _send(self, server: Server, *, bucket: protocol.Bucket, version: int) -> None:
        group = self._groups[server]
        body: dict[str, object] = {
            "names": bucket.names,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "group_name": group.name,
            "flush_cache": False,  # the pause emptied it
        }
        if bucket.last:
            body["weight_version"] = str(version)
        request = server.post("/update_weights_from_distributed", body, timeout=self._timeout)
        await protocol.exchange(
            request, protocol.in_thread(partial(group.broadcast, bucket.tensors))
        )

    async def _finish(self, server: Server, *, version: int) -> None:
        await server.post("/end_weight_update", {}, timeout=protocol.CONTROL_TIMEOUT)
        await protocol.resume(server, version)
        self._groups[server].version = str(version)

    async def _give_up(self, server: Server) -> None:
        group = self._groups.pop(server, None)
        group_name = None
        if group is not None:
            group.close()
            group_name = group.name
        await protocol.release(server, group_name)

    async def _leave(self, server: Server) -> None:
        group = self._groups.pop(server, None)
        if group is not None:
            group.close()
            await protocol.try_post(
                server, "/destroy_weights_update_group", {"group_name": group.name}
            )


class UpdateGroup:
    """Broadcasts tensors from rank 0, this process, to one server, in a separate group.

    Each server has a separate group. In a common group, the others would wait for a member that
    dies in a broadcast, with SGLang for half an hour. Anyone who reaches the store's port can join
    the group, so the port is open only on the loopback if the server is on this machine.
    """

    def __init__(
        self, address: str, *, server_ranks: int, device: torch.device, timeout: float
    ) -> None:
        """Opens the store at an address that the server reaches; `join` makes the group."""
        self.name = f"slime_tis_{secrets.token_hex(8)}"
        self.version: str | None = None
        self._device = device
        self._size = server_ranks + 1
        self._timeout = timedelta(seconds=timeout)
        listener, self._host, self._own_address = _listen(address)
        self.port = listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            self._host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        self._group: Any = None

    def join(self) -> None:
        """Makes the group; blocks until all ranks have joined.

        Raises RuntimeError if `close` is called on another thread meanwhile.
        """
        client = dist.TCPStore(self._host, self.port, is_master=False, timeout=self._timeout)
        # Keys of the server: SGLang's init_custom_process_group adds the name before torch adds
        # name and device.
        store = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, client))
        distributed: Any = dist  # torch's types lack the options of backends
        if self._device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            options.group_name = self.name
            self._group = distributed.ProcessGroupNCCL(
                dist.PrefixStore("cuda/", store), 0, self._size, options
            )
        else:
            gloo = distributed.ProcessGroupGloo
            if self._own_address is None:
                network_device = gloo.create_default_device()
            else:
                network_device = gloo.create_device(hostname=self._own_address)
            options = gloo._Options()
            options._timeout = self._timeout
            options._devices = [network_device]
            self._group = gloo(dist.PrefixStore("cpu/", store), 0, self._size, options)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors in order; blocks until the server has them.

        Raises RuntimeError if the server is gone or too slow.
        """
        with ExitStack() as stack:
            if self._device.type == "cuda":
                # A stream per call, so that no group waits for another.
                stream = torch.cuda.Stream(self._device)
                stream.wait_stream(torch.cuda.default_stream(self._device))
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(stream))
                stack.callback(stream.synchronize)
            # All broadcasts start before the first wait.
            broadcasts = [self._group.broadcast(tensor, 0) for tensor in tensors]
            for broadcast in broadcasts:
                broadcast.wait()

    def close(self) -> None:
        """Leaves the group and shuts the store, which ends a `join` under way on either side."""
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        self._store = None
        self._group = None


def local_address(url: str) -> str:
    """This machine's address as seen from the server at `url`."""
    if is_loopback(url):
        return "127.0.0.1"
    server = urlsplit(url)
    addresses = socket.getaddrinfo(server.hostname or "", server.port or 80, type=socket.SOCK_DGRAM)
    family, _, _, _, address = addresses[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: connecting a datagram socket only selects a route
        return str(probe.getsockname()[0])


def _listen(address: str) -> tuple[socket.socket, str, str | None]:
    """Opens a port, if possible only on `address`.

    Returns the socket, the host by which this process reaches it, and the address to which it is
    bound: None if it is bound to all.
    """
    host = "127.0.0.1" if address == "localhost" else address
    try:
        is_ipv6 = ipaddress.ip_address(host).version == 6
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        return socket.create_server((host, 0), family=family), host, host
    except (ValueError, OSError):  # a name, or an address that is translated on the way here
        return socket.create_server(("", 0)), "127.0.0.1", None
