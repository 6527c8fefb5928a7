"""vLLM's own NCCL group with the ranks of one server.

Written from vLLM's source and not run: there was no GPU. It follows
`NCCLTrainerWeightTransferEngine` with `packed` off: one broadcast per tensor, in the order of the
request's names.
"""

import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class NcclGroup:
    """Broadcasts tensors over NCCL to the ranks of one server; see `UpdateGroup`."""

    def __init__(self, address: str, *, name: str, num_ranks: int, device: torch.device) -> None:
        """Chooses a free port; raises ValueError if vllm is not installed here."""
        try:
            import vllm  # noqa: F401
        except ImportError:
            raise ValueError(
                "--vllm-weight-sync is distributed and weights are on a GPU, which needs vllm in"
                " this Python environment for its NCCL groups; install it, or use"
                " --vllm-weight-sync disk."
            ) from None
        self.name = name
        self.backend = "nccl"
        self.version: str | None = None
        self._address = address
        self._device = device
        self._size = num_ranks + 1
        self._communicator: Any = None
        # vLLM's group opens the port itself, so the port is only chosen here.
        with socket.create_server(("", 0)) as listener:
            self.port = listener.getsockname()[1]

    def join(self) -> None:
        """Makes the group; blocks until all ranks have joined."""
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        with torch.cuda.device(self._device):
            self._communicator = stateless_init_process_group(
                self._address, self.port, 0, self._size, self._device.index
            )

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors in order; blocks until the server has them."""
        stream = torch.cuda.Stream(self._device)
        # The tensors were written on the default stream.
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.device(self._device):
            for tensor in tensors:
                self._communicator.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def close(self) -> None:
        """Leaves the group."""
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None
