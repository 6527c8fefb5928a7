"""Weights through a directory shared with the servers."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from slime_tis.trainer.configs.servers import ServerConfig
from slime_tis.trainer.engines.rollout_engine import EngineHost, WeightSource
from slime_tis.trainer.engines.servers.client import Server
from slime_tis.trainer.engines.servers.weights.protocol import hand_back, hand_out, resume
from slime_tis.trainer.engines.servers.weights.shared_directory import SharedDirectory
from slime_tis.trainer.storage.hf_writer import write_hf_checkpoint


class DiskSync:
    """Writes weights as a Hugging Face checkpoint that the servers read; see WeightSync.

    Raises ValueError as SharedDirectory.
    """

    def __init__(self, config: ServerConfig, host: EngineHost, urls: Sequence[str]) -> None:
        self._directory = SharedDirectory(config, host, urls)
        self._write_checkpoint = partial(
            write_hf_checkpoint, like=Path(host.hf_checkpoint), shard_bytes=config.bucket_bytes
        )
        self._current: tuple[Path, int] | None = None
        """Directory and version of the newest weights."""

    async def push(
        self, servers: Sequence[Server], source: WeightSource, version: int
    ) -> dict[Server, str]:
        """See WeightSync; generation pauses while servers read, not while files are written."""
        written = await self._directory.write(source, version, self._write_checkpoint)
        self._current = (written, version)
        failed = await hand_out(servers, self._load)
        self._directory.remove(but=[written])
        return failed

    async def restore(self, server: Server) -> bool:
        """Makes a server read the newest weights, if any."""
        if self._current is None:
            return False
        await hand_back(server, self._load)
        return True

    async def close(self) -> None:
        """Removes temporary weights; a user's directory keeps the newest ones."""
        self._directory.close()

    async def _load(self, server: Server) -> None:
        assert self._current is not None
        path, version = self._current
        await server.api.pause(server)
        await server.api.load(server, path, version)
        await resume(server, version)
