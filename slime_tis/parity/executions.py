"""The executions that `slime-tis parity` compares, by their names on the command line.

The command line is read before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slime_tis.parity.recording import Recording
    from slime_tis.parity.samples import Samples

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two executions."""

    execution: str
    """Name in EXECUTIONS."""
    checkpoint: str
    """Hugging Face directory."""
    precision: str = "fp32"
    device: str = "cpu"
    chunk_size: int = 16
    """Tokens of a pass of `chunks`."""
    url: str = ""
    """Address of a server."""
    adapter: str = ""
    """Directory of a LoRA adapter of PEFT, which is applied without merging; none if empty."""
    served_adapter: str = ""
    """Name of the LoRA adapter that requests to a server name; none if empty."""
    true_on_policy: bool = False
    """Whether an engine has the operations of --true-on-policy."""


class Record(Protocol):
    """An execution that is ready to run."""

    def __call__(self, samples: Samples, substitutes: Recording | None = None) -> Recording:
        """Computes the samples; results of operations are replaced by those of `substitutes`."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """An entry of EXECUTIONS."""

    title: str
    module: str
    """Name of the module with the functions `check` and `opened`, which get a `Side`."""
    extra: str = "analysis"
    """The extra of the package that the execution needs."""
    is_server: bool = False
    is_engine: bool = False
    """Whether it is an engine of `train.py` in this process, which --true-on-policy changes."""

    def check(self, side: Side) -> None:
        """Refuses a side that cannot run, within seconds and without reading weights.

        Raises:
            ValueError: The model, the adapter or the server does not fit.
        """
        function: Callable[[Side], None] = resolve_name(f"{self.module}:check")
        function(side)

    def open(self, side: Side) -> AbstractContextManager[Record]:
        """Loads the side's model, or connects to its server."""
        function: Callable[[Side], AbstractContextManager[Record]]
        function = resolve_name(f"{self.module}:opened")
        return function(side)


TRANSFORMERS = "slime_tis.parity.transformers_executions"
SERVER = "slime_tis.parity.server_execution"
EXECUTIONS = {
    "full": Execution(title="transformers, one pass per sample", module=TRANSFORMERS),
    "decode": Execution(
        title="transformers, one token at a time with a key/value cache", module=TRANSFORMERS
    ),
    "batch": Execution(
        title="transformers, all samples in one batch with padding", module=TRANSFORMERS
    ),
    "chunks": Execution(
        title="transformers, prefill in chunks of --chunk-size tokens", module=TRANSFORMERS
    ),
    "local": Execution(
        title="the local rollout engine, continuous batching",
        module="slime_tis.parity.local_execution",
        extra="train",
        is_engine=True,
    ),
    "training": Execution(
        title="the training engine, all samples packed",
        module="slime_tis.parity.training_execution",
        extra="train",
        is_engine=True,
    ),
    "sglang": Execution(
        title="the SGLang server at --url, log-probs of a prefill",
        module=SERVER,
        extra="train",
        is_server=True,
    ),
    "vllm": Execution(
        title="the vLLM server at --url, log-probs of a prefill",
        module=SERVER,
        extra="train",
        is_server=True,
    ),
}
"""The table of executions. `slime-tis parity --help` lists its names and titles."""
