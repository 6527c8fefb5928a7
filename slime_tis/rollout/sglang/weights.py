"""New weights for SGLang servers: what a way of bringing them is, and the one over process groups."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slime_tis.rollout.engine import WeightSource
from slime_tis.rollout.sglang.buckets import Bucket, buckets, source_thread
from slime_tis.rollout.sglang.config import SGLangConfig, is_loopback
from slime_tis.rollout.sglang.control import (
    UpdateFailed,
    begin_session,
    each,
    end_session,
    in_thread,
    leave_group,
    pause,
    release,
    resume,
    together,
)
from slime_tis.rollout.sglang.messages import Capabilities
from slime_tis.rollout.sglang.server import Server
from slime_tis.rollout.sglang.update_group import UpdateGroup, local_address
from slime_tis.rollout.sglang.weight_files import DiskSync


class WeightSync(Protocol):
    """Brings weights to servers."""

    reasons: dict[str, str]
    """Why servers failed in the last `push`, by URL."""

    async def push(self, servers: Sequence[Server], source: WeightSource, version: int) -> list[Server]:
        """Gives servers new weights, and names these `version`.

        Requests in flight are held back meanwhile and go on with the new weights. `source` is called once, and what
        it yields is iterated to its end on one thread, whatever becomes of the servers: it may hold collectives
        that other ranks take part in.

        Returns:
          the servers that failed; what they were answering is aborted.

        Raises:
          Exception: whatever `source` raises; the servers are let go then, with weights that are not to be used.
        """

    async def restore(self, server: Server) -> bool:
        """Gives a server that came back the weights of the last `push`; False where that needs a `source`."""

    async def close(self) -> None:
        """Gives back what is held on either side."""


class DistributedSync:
    """Broadcasts weights to the servers in buckets, over NCCL from a GPU and gloo from a CPU."""

    def __init__(
        self, *, device: torch.device | str, bucket_bytes: int, timeout: float, address: str | None = None
    ) -> None:
        """Opens nothing yet.

        Args:
          device: of this process; tensors that are elsewhere are moved to it, a bucket at a time.
          bucket_bytes: sent at once.
          timeout: longest wait for a server to join a group or to take one bucket, in seconds.
          address: at which servers reach this process; None finds it out for each.
        """
        self.reasons: dict[str, str] = {}
        self._device, self._bucket_bytes = torch.device(device), bucket_bytes
        self._timeout, self._address = timeout, address
        self._groups: dict[str, tuple[Server, UpdateGroup]] = {}
        self._source_thread = source_thread(self._device)

    async def push(self, servers: Sequence[Server], source: WeightSource, version: int) -> list[Server]:
        """See WeightSync."""
        self.reasons = {}
        loop = asyncio.get_running_loop()
        stream = buckets(source, self._bucket_bytes, self._place)
        try:
            live = await each(servers, pause, self.reasons)
            live = await each(live, self._open, self.reasons)
            while bucket := await loop.run_in_executor(self._source_thread, next, stream, None):
                live = await each(live, partial(self._send, bucket=bucket, version=version), self.reasons)
                del bucket
            await each(live, partial(self._finish, version=version), self.reasons)
        except BaseException:
            await asyncio.gather(*map(self._give_up, servers))
            raise
        failed = [server for server in servers if server.url in self.reasons]
        await asyncio.gather(*map(self._give_up, failed))
        return failed

    async def restore(self, server: Server) -> bool:
        """No: the weights are in the trainer alone."""
        return False

    async def close(self) -> None:
        """Leaves all groups."""
        await asyncio.gather(*(self._leave(server) for server, _ in list(self._groups.values())))
        self._source_thread.shutdown(wait=False)

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device).contiguous()

    async def _open(self, server: Server) -> None:
        """Sees to a group with the server, and opens its session."""
        info = await server.info()
        _, group = self._groups.get(server.url, (server, None))
        if group is None or group.version != info.weight_version:  # it is not the process that joined
            await self._leave(server)
            await self._join(server, info)
        await begin_session(server)

    async def _join(self, server: Server, info: Capabilities) -> None:
        if (info.dp_size, info.pp_size) != (1, 1):
            raise UpdateFailed(
                f"{server.url} runs with --dp-size {info.dp_size} and --pp-size {info.pp_size}, and SGLang takes "
                "distributed weights with 1 of each; use --sglang-weight-sync disk."
            )
        address = self._address
        if address is None:
            address = await in_thread(partial(local_address, server.url))
        group = UpdateGroup(address, server_ranks=info.tp_size, device=self._device, timeout=self._timeout)
        self._groups[server.url] = server, group
        request = server.post("/init_weights_update_group", group.request, timeout=self._timeout)
        await together(request, in_thread(group.join))

    async def _send(self, server: Server, *, bucket: Bucket, version: int) -> None:
        _, group = self._groups[server.url]
        body: dict[str, object] = {
            "names": bucket.names,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "group_name": group.name,
            "flush_cache": False,  # it is empty since the pause
        }
        if bucket.last:
            body["weight_version"] = str(version)
        request = server.post("/update_weights_from_distributed", body, timeout=self._timeout)
        await together(request, in_thread(partial(group.broadcast, bucket.tensors)))

    async def _finish(self, server: Server, *, version: int) -> None:
        await end_session(server)
        await resume(server, version)
        _, group = self._groups[server.url]
        group.version = str(version)

    async def _give_up(self, server: Server) -> None:
        _, group = self._groups.pop(server.url, (server, None))
        if group is not None:
            group.close()
        await release(server, None if group is None else group.name)

    async def _leave(self, server: Server) -> None:
        if server.url in self._groups:
            _, group = self._groups.pop(server.url)
            group.close()
            await leave_group(server, group.name)


def build_weight_sync(
    config: SGLangConfig, hf_checkpoint: str | Path, urls: Sequence[str], *, device: torch.device | str
) -> WeightSync:
    """The way of weights that `--sglang-weight-sync` names.

    Args:
      config: of the engine.
      hf_checkpoint: whose configuration and tokenizer go along with weights on disk.
      urls: of the servers.
      device: of this process.

    Raises:
      ValueError: weights on disk that servers elsewhere could not see, or a directory that cannot be used.
    """
    bucket_bytes, timeout = config.sglang_bucket_mb * 2**20, config.sglang_request_timeout
    if config.sglang_weight_sync == "distributed":
        return DistributedSync(
            device=device, bucket_bytes=bucket_bytes, timeout=timeout, address=config.sglang_sync_address
        )
    away = [url for url in urls if not is_loopback(url)]
    if config.sglang_weight_dir is None and away:
        raise ValueError(
            f"--sglang-weight-sync is disk but {away[0]} may not see a temporary directory of this machine; give one "
            "that both see with --sglang-weight-dir."
        )
    return DiskSync(
        config.sglang_weight_dir,
        hf_checkpoint=hf_checkpoint,
        device=device,
        bucket_bytes=bucket_bytes,
        timeout=timeout,
    )
