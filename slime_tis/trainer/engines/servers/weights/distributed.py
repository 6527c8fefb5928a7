"""Weights by broadcast, with one process group per server."""

import asyncio
from collections.abc import Sequence
from functools import partial

import torch

from slime_tis.trainer.configs.servers import ServerConfig
from slime_tis.trainer.engines.rollout_engine import EngineHost, WeightSource
from slime_tis.trainer.engines.servers.api import Bucket, UpdateGroup, answers
from slime_tis.trainer.engines.servers.client import Server
from slime_tis.trainer.engines.servers.update_group import local_address
from slime_tis.trainer.engines.servers.weights import protocol


class DistributedSync:
    """Broadcasts weights to the servers in buckets; see WeightSync.

    Each server has a separate group. In a common group, the others would wait for a member that
    dies in a broadcast, with SGLang for half an hour.
    """

    def __init__(self, config: ServerConfig, host: EngineHost, urls: Sequence[str]) -> None:
        self._config = config
        self._device = torch.device(host.device)
        self._timeout = config.request_timeout
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
            live = await protocol.on_all_servers(
                servers, lambda server: server.api.pause(server), failed
            )
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
        if group is None or group.version != await server.call(server.api.weight_version()):
            await self._leave(server)
            await self._join(server)
        await server.api.begin_update(server)

    async def _join(self, server: Server) -> None:
        num_ranks = await server.api.num_ranks(server)
        address = self._config.sync_address
        if address is None:  # found for each server
            address = await protocol.in_thread(partial(local_address, server.url))
        group = server.api.make_group(
            address, num_ranks=num_ranks, device=self._device, timeout=self._timeout
        )
        self._groups[server] = group
        request = server.call(server.api.join(group, address, num_ranks), timeout=self._timeout)
        await protocol.exchange(request, protocol.in_thread(group.join))

    async def _send(self, server: Server, *, bucket: Bucket, version: int) -> None:
        group = self._groups[server]
        request = server.call(server.api.receive(group, bucket, version), timeout=self._timeout)
        await protocol.exchange(
            request, protocol.in_thread(partial(group.broadcast, bucket.tensors))
        )

    async def _finish(self, server: Server, *, version: int) -> None:
        await server.api.end_update(server, version)
        await protocol.resume(server, version)
        self._groups[server].version = str(version)

    async def _give_up(self, server: Server) -> None:
        group = self._groups.pop(server, None)
        group_name = None
        if group is not None:
            group.close()
            group_name = group.name
        await server.api.release(server, group_name)

    async def _leave(self, server: Server) -> None:
        group = self._groups.pop(server, None)
        if group is not None:
            group.close()
            await answers(server, server.api.leave(group))
