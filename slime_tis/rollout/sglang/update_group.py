"""A torch process group of this process and the ranks of one server, made outside of the default group."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis.rollout.sglang.config import is_loopback


class Backend(Protocol):
    """What is used of ProcessGroupGloo and ProcessGroupNCCL, which torch's own types leave out."""

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...

    def abort(self) -> None: ...


class UpdateGroup:
    """Broadcasts tensors from this process, rank 0, to the ranks of one server.

    A server joins by `torch.distributed`'s own rendezvous: a TCP store that this process keeps, in which all keys of
    a group stand under the group's name. Nothing of the default group is used or changed, so that a trainer in a job
    of its own can hold groups with servers too.

    A group per server, not one for all: a member that dies in a broadcast leaves the others of its group waiting
    for their own timeout, half an hour with SGLang.

    Anyone who reaches the store's port can join, so it is open on the loopback alone where the server is there.
    """

    def __init__(self, address: str, *, server_ranks: int, device: torch.device, timeout: float) -> None:
        """Opens the store; `join` makes the group once the server is told of it.

        Args:
          address: at which the server reaches this process, a name or an IP address.
          server_ranks: processes of the server, a count.
          device: of the tensors; NCCL is used on a GPU and gloo elsewhere.
          timeout: of the rendezvous and of each broadcast, in seconds.
        """
        self.name = f"slime_tis_{secrets.token_hex(8)}"
        self.version: str | None = None
        self._address, self._device, self._size = address, device, server_ranks + 1
        self._timeout = timedelta(seconds=timeout)
        listener, self._host, self._own_address = _listen(address)
        self._port = listener.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            self._host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        self._group: Backend | None = None

    @property
    def request(self) -> dict[str, object]:
        """What the server is told at /init_weights_update_group."""
        return {
            "master_address": self._address,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._size,
            "group_name": self.name,
            "backend": "nccl" if self._device.type == "cuda" else "gloo",
        }

    def join(self) -> None:
        """Makes the group; blocks until all ranks are there or `close` is called on another thread.

        Raises:
          RuntimeError: they did not come in time, or the store was closed.
        """
        client = dist.TCPStore(self._host, self._port, is_master=False, timeout=self._timeout)
        # SGLang puts the name before torch does.
        store = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, client))
        if self._device.type == "cuda":
            self._group = _nccl(dist.PrefixStore("cuda/", store), self._size, self.name, self._timeout)
        else:
            self._group = _gloo(dist.PrefixStore("cpu/", store), self._size, self._own_address, self._timeout)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors in order; blocks until the server has them.

        Raises:
          RuntimeError: the server went away, or the timeout passed.
        """
        group = self._group
        assert group is not None
        if self._device.type != "cuda":
            for work in [group.broadcast(tensor, 0) for tensor in tensors]:
                work.wait()
            return
        stream = torch.cuda.Stream(self._device)  # its own, so that no group waits for another
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for work in [group.broadcast(tensor, 0) for tensor in tensors]:
                work.wait()
            stream.synchronize()

    def close(self) -> None:
        """Leaves the group and shuts the store, which ends a `join` under way on either side."""
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        self._store = self._group = None


def local_address(url: str) -> str:
    """The address of this machine that a server at `url` can reach it at."""
    if is_loopback(url):
        return "127.0.0.1"
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: a datagram socket only looks its route up
        return str(probe.getsockname()[0])


def _listen(address: str) -> tuple[socket.socket, str, str | None]:
    """An open port, on nothing but `address` where that is an IP address of this machine.

    Returns:
      the socket, the host to reach it at from here, and the address it is bound to (None for all).
    """
    host = "127.0.0.1" if address == "localhost" else address
    try:
        version = ipaddress.ip_address(host).version
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        return socket.create_server((host, 0), family=family), host, host
    except (ValueError, OSError):  # a name, or an address that is translated on the way here
        return socket.create_server(("", 0)), "127.0.0.1", None


def _gloo(store: dist.PrefixStore, size: int, address: str | None, timeout: timedelta) -> Backend:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
    return gloo(store, 0, size, options)


def _nccl(store: dist.PrefixStore, size: int, name: str, timeout: timedelta) -> Backend:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    options.group_name = name
    return nccl(store, 0, size, options)
