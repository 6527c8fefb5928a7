"""A directory from which servers read weights."""

import asyncio
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from slime_tis.errors import quoted_path
from slime_tis.trainer.configs.servers import ServerConfig, is_loopback
from slime_tis.trainer.engines.rollout_engine import EngineHost, RolloutUnavailable, WeightSource
from slime_tis.trainer.engines.servers.weights.protocol import weights_thread
from slime_tis.trainer.storage.directories import LOCK, held, make_private, make_public

NamedTensors = Iterator[tuple[str, Tensor]]

FINISHED = "weights_"
"""Prefix of directories with complete weights."""
UNFINISHED = "unfinished_"
"""Prefix of directories that are being written."""
OWN = re.compile(rf"({FINISHED}|{UNFINISHED})\d{{8}}_[0-9a-f]{{8}}")
"""Names of directories that this module writes and may remove."""


class SharedDirectory:
    """A directory with one subdirectory for each version of the weights.

    Locks it, and removes the weights of earlier runs. Raises ValueError if another run uses the
    directory, it is not writable, or servers may not see it.
    """

    def __init__(self, config: ServerConfig, host: EngineHost, urls: Sequence[str]) -> None:
        directory = host.output_dir / f"{config.engine}_weights"
        self._flag = config.flag("weight_dir")
        self._is_temporary = config.weight_dir is None
        if config.weight_dir is not None:
            directory = Path(config.weight_dir)
        else:
            for url in urls:
                if not is_loopback(url):
                    raise ValueError(
                        f"{config.flag('weight_sync')} is disk but {url} may not see the output"
                        f" directory; set {self._flag}."
                    )
        self._path = directory.absolute()
        self._lock = ExitStack()
        subject = f"{self._flag} is {quoted_path(self._path)}"
        self._lock.enter_context(held({self._path / LOCK: subject}))
        self._weights_thread = weights_thread(torch.device(host.device))
        self.remove()

    async def write(
        self, source: WeightSource, version: int, write: Callable[[Path, NamedTensors], None]
    ) -> Path:
        """Writes weights into a new subdirectory, which gets its final name when complete.

        Runs on the thread of weights, so that requests continue.

        Args:
            source: Called once, and iterated to its end even if the disk is full.
            version: Version of the weights.
            write: Writes files into an empty directory; raises OSError.

        Returns:
            The subdirectory.

        Raises:
            RolloutUnavailable: A file could not be written.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._weights_thread, self._write, source, version, write)

    def remove(self, but: Collection[Path] = ()) -> None:
        """Removes this module's subdirectories, except for `but`."""
        # Unlike iterdir, glob finds nothing if somebody removed the directory.
        for path in self._path.glob("*"):
            if path in but or not OWN.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Removes temporary weights; a user's directory keeps the newest ones."""
        self._weights_thread.shutdown(wait=False)
        if self._is_temporary:
            self.remove()
        self._lock.close()

    def _write(
        self, source: WeightSource, version: int, write: Callable[[Path, NamedTensors], None]
    ) -> Path:
        name = f"{version:08d}_{secrets.token_hex(4)}"
        unfinished = self._path / f"{UNFINISHED}{name}"
        finished = self._path / f"{FINISHED}{name}"
        weights = iter(source())
        try:
            make_private(unfinished)
            write(unfinished, weights)
            make_public(unfinished)
            unfinished.rename(finished)
        except OSError as error:
            # Iterating may gather weights from the other ranks, which would wait forever.
            for _ in weights:
                pass
            raise RolloutUnavailable(
                f"the weights of version {version} could not be written to {self._path}"
                f" ({error}); free space or choose another {self._flag}."
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return finished
