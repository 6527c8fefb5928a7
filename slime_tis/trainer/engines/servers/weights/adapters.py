"""LoRA adapters that servers load beside their weights, through a shared directory.

Each update is a new adapter with a new name, such as slime_tis-v7-0c1d2e3f. Requests name the
adapter, so nothing pauses: requests in flight keep theirs, and later ones name the new one. An
adapter is unloaded after its last request.
"""

import asyncio
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slime_tis.peft_directory import write_adapter
from slime_tis.trainer.configs.servers import ServerConfig
from slime_tis.trainer.engines.event_loops import BackgroundTasks
from slime_tis.trainer.engines.rollout_engine import EngineHost, WeightSource
from slime_tis.trainer.engines.servers.answers import is_named_by_run
from slime_tis.trainer.engines.servers.api import CONTROL_TIMEOUT, RELEASE_TIMEOUT
from slime_tis.trainer.engines.servers.client import Server
from slime_tis.trainer.engines.servers.errors import RequestError, ServerError
from slime_tis.trainer.engines.servers.weights.protocol import hand_back, hand_out
from slime_tis.trainer.engines.servers.weights.shared_directory import (
    NamedTensors,
    SharedDirectory,
)

OWN_NAME = re.compile(r"slime_tis-v\d+-[0-9a-f]{8}")
"""Names of adapters that this module loads and may unload."""


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """An adapter, and the servers that may have it."""

    name: str
    directory: Path
    servers: set[Server] = field(default_factory=set)


class AdapterSync:
    """Writes adapters in PEFT's format, which the servers load by name; see WeightSync.

    Raises ValueError as SharedDirectory.
    """

    def __init__(self, config: ServerConfig, host: EngineHost, urls: Sequence[str]) -> None:
        self._host = host
        self._directory = SharedDirectory(config, host, urls)
        self._current: LoadedAdapter | None = None
        self._in_use: dict[str, LoadedAdapter] = {}
        """The current adapter, and older ones that requests in flight use, by name."""
        self._retirements = BackgroundTasks()

    async def push(
        self, servers: Sequence[Server], source: WeightSource, version: int
    ) -> dict[Server, str]:
        """See WeightSync; requests in flight keep their adapter."""
        directory = await self._directory.write(source, version, self._write)
        previous = self._current
        # The trial before the first step and the first adapter have the same version.
        name = f"slime_tis-v{version}-{secrets.token_hex(4)}"
        self._current = LoadedAdapter(name=name, directory=directory)
        self._in_use[name] = self._current
        failed = await hand_out(servers, self._load)
        if previous is not None:
            self._retirements.start(self._retire(previous))
        return failed

    async def restore(self, server: Server) -> bool:
        """Makes a server load the current adapter, if any."""
        if self._current is None:
            return False
        await hand_back(server, self._load)
        return True

    async def close(self) -> None:
        """Unloads all adapters, and removes temporary ones; see SharedDirectory."""
        try:
            await self._retirements.cancel()
            await asyncio.gather(*map(_unload_everywhere, self._in_use.values()))
        finally:
            if self._current is not None:
                self._directory.remove(but=[self._current.directory])
            self._directory.close()

    def _write(self, directory: Path, named_tensors: NamedTensors) -> None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in named_tensors}
        settings = self._host.adapter
        assert settings is not None
        write_adapter(directory, tensors, settings, base=str(self._host.hf_checkpoint))

    async def _load(self, server: Server) -> None:
        """Makes a server load the current adapter, which later requests then name."""
        adapter = self._current
        assert adapter is not None
        base = await server.call(server.api.weight_version(), timeout=CONTROL_TIMEOUT)
        if is_named_by_run(base):
            raise ServerError(f"{server.url} got the weights of another run, version {base}.")
        names = await server.adapters()
        for name in names:
            # Left by an earlier run, or by an unloading that failed.
            if OWN_NAME.fullmatch(name) and name not in self._in_use:
                await _unload(server, name)
        # Before the load, whose answer may get lost.
        adapter.servers.add(server)
        # A server that was only out of reach still has it.
        if adapter.name not in names:
            await server.call(server.api.load_adapter(adapter.name, adapter.directory))
        server.api = server.api.with_adapter(adapter.name)
        if not await server.has_adapter():
            raise ServerError(f"{server.url} does not list the adapter {adapter.name} it loaded.")

    async def _retire(self, adapter: LoadedAdapter) -> None:
        """Unloads an adapter after its last request, and removes its files."""
        await asyncio.gather(*(self._unload_idle(server, adapter) for server in adapter.servers))
        del self._in_use[adapter.name]
        shutil.rmtree(adapter.directory, ignore_errors=True)

    async def _unload_idle(self, server: Server, adapter: LoadedAdapter) -> None:
        while server.in_flight[adapter.name]:
            server.ended.clear()
            await server.ended.wait()
        await _unload(server, adapter.name)


async def _unload_everywhere(adapter: LoadedAdapter) -> None:
    await asyncio.gather(*(_unload(server, adapter.name) for server in adapter.servers))


async def _unload(server: Server, name: str) -> None:
    """Unloads an adapter; ignores failures, since a server that restarted does not have it."""
    with suppress(RequestError):
        await server.call(server.api.unload_adapter(name), timeout=RELEASE_TIMEOUT)
