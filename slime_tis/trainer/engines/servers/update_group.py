"""A torch process group with the ranks of one server: NCCL from a GPU and gloo from a CPU."""

import ipaddress
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis.trainer.configs.servers import is_loopback


class TorchGroup:
    """Broadcasts tensors to one server over NCCL or gloo; see `UpdateGroup`.

    Anyone who reaches the store's port can join the group, so the port is open only on the loopback
    if the server is on this machine.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        num_ranks: int,
        device: torch.device,
        timeout: float,
        prefixes: Sequence[str] = (),
    ) -> None:
        """Opens the store at an address that the server reaches; `join` makes the group.

        Args:
            address: Address of this machine.
            name: Name of the group, which no other one has.
            num_ranks: Ranks of the server.
            device: CUDA for NCCL, CPU for gloo.
            timeout: Longest wait for the server, in seconds.
            prefixes: What the server puts before the names of keys, innermost first.
        """
        self.name = name
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.version: str | None = None
        self._device = device
        self._prefixes = prefixes
        self._size = num_ranks + 1
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
        store: dist.Store = dist.TCPStore(
            self._host, self.port, is_master=False, timeout=self._timeout
        )
        for prefix in self._prefixes:
            store = dist.PrefixStore(prefix, store)
        distributed: Any = dist  # torch's types lack the options of backends
        if self._device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            options.group_name = self.name
            self._group = distributed.ProcessGroupNCCL(store, 0, self._size, options)
        else:
            gloo = distributed.ProcessGroupGloo
            if self._own_address is None:
                network_device = gloo.create_default_device()
            else:
                network_device = gloo.create_device(hostname=self._own_address)
            options = gloo._Options()
            options._timeout = self._timeout
            options._devices = [network_device]
            self._group = gloo(store, 0, self._size, options)

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


def new_group_name() -> str:
    """A name that no other group has."""
    return f"slime_tis_{secrets.token_hex(8)}"


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
