"""Weights through a directory shared with the servers."""

import asyncio
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from slime_tis.errors import quoted_path
from slime_tis.trainer.configs.servers import ServerConfig, is_loopback
from slime_tis.trainer.engines.rollout_engine import EngineHost, RolloutUnavailable, WeightSource
from slime_tis.trainer.engines.servers.client import Server
from slime_tis.trainer.engines.servers.errors import ServerError
from slime_tis.trainer.engines.servers.weights.protocol import (
    on_all_servers,
    resume,
    weights_thread,
)
from slime_tis.trainer.storage.directories import LOCK, held, make_private, make_public
from slime_tis.trainer.storage.hf_writer import write_hf_checkpoint

FINISHED = "weights_"
"""Prefix of directories with complete weights."""
UNFINISHED = "unfinished_"
"""Prefix of directories that are being written."""
OWN = re.compile(rf"({FINISHED}|{UNFINISHED})\d{{8}}_[0-9a-f]{{8}}")
"""Names of directories that this module writes and may remove."""


class DiskSync:
    """Writes weights as a Hugging Face checkpoint that the servers read; see WeightSync.

    Locks the directory, and removes the weights of earlier runs. Raises ValueError if another run
    uses the directory, or it is not writable.
    """

    def __init__(self, config: ServerConfig, host: EngineHost, urls: Sequence[str]) -> None:
        directory = host.output_dir / f"{config.engine}_weights"
        directory_flag = config.flag("weight_dir")
        if config.weight_dir is not None:
            directory = Path(config.weight_dir)
        else:
            for url in urls:
                if not is_loopback(url):
                    raise ValueError(
                        f"{config.flag('weight_sync')} is disk but {url} may not see the output"
                        f" directory; set {directory_flag}."
                    )
        self._config = config
        self._hf_checkpoint = Path(host.hf_checkpoint)
        self._directory = directory.absolute()
        self._lock = ExitStack()
        subject = f"{directory_flag} is {quoted_path(self._directory)}"
        self._lock.enter_context(held({self._directory / LOCK: subject}))
        self._weights_thread = weights_thread(torch.device(host.device))
        self._current: tuple[Path, int] | None = None
        """Directory and version of the newest weights."""
        _remove_own(self._directory)

    async def push(
        self, servers: Sequence[Server], source: WeightSource, version: int
    ) -> dict[Server, str]:
        """See WeightSync; generation pauses while servers read, not while files are written."""
        loop = asyncio.get_running_loop()
        written = await loop.run_in_executor(self._weights_thread, self._write, source, version)
        self._current = (written, version)
        failed = await self._hand_out(servers)
        _remove_own(self._directory, but=written)
        return failed

    async def restore(self, server: Server) -> bool:
        """Makes a server read the newest weights, if any."""
        if self._current is None:
            return False
        failed = await self._hand_out([server])
        if server in failed:
            raise ServerError(failed[server])
        return True

    async def close(self) -> None:
        """Removes temporary weights; a user's directory keeps the newest ones."""
        self._weights_thread.shutdown(wait=False)
        if self._config.weight_dir is None:
            _remove_own(self._directory)
        self._lock.close()

    def _write(self, source: WeightSource, version: int) -> Path:
        """Writes a checkpoint into a new subdirectory, which gets its final name when complete."""
        name = f"{version:08d}_{secrets.token_hex(4)}"
        unfinished = self._directory / f"{UNFINISHED}{name}"
        finished = self._directory / f"{FINISHED}{name}"
        weights = iter(source())
        try:
            make_private(unfinished)
            write_hf_checkpoint(
                unfinished, weights, like=self._hf_checkpoint, shard_bytes=self._config.bucket_bytes
            )
            make_public(unfinished)
            unfinished.rename(finished)
        except OSError as error:
            # Iterating may gather weights from the other ranks, which would wait forever.
            for _ in weights:
                pass
            raise RolloutUnavailable(
                f"the weights of version {version} could not be written to {self._directory}"
                f" ({error}); free space or choose another {self._config.flag('weight_dir')}."
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return finished

    async def _hand_out(self, servers: Sequence[Server]) -> dict[Server, str]:
        failed: dict[Server, str] = {}
        await on_all_servers(servers, self._load, failed)
        await asyncio.gather(*(server.api.release(server) for server in failed))
        return failed

    async def _load(self, server: Server) -> None:
        assert self._current is not None
        path, version = self._current
        await server.api.pause(server)
        await server.api.load(server, path, version)
        await resume(server, version)


def _remove_own(directory: Path, but: Path | None = None) -> None:
    """Removes this module's directories, except for `but`."""
    for path in directory.iterdir():
        if path != but and OWN.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
