"""Flags of runs of train.py that launch a server."""

from tests.runs import free_port
from tests.sglang_server.servers import FLAGS, PYTHON


def without_engine(flags: list[str]) -> list[str]:
    """The flags of `make_task` without the precision of the local engine, which servers refuse."""
    precision = flags.index("--rollout-precision")
    return [*flags[:precision], *flags[precision + 2 :]]


def server_flags(*, dtype: str) -> list[str]:
    """Flags that launch one server with weights of this type."""
    return [
        "--rollout-engine",
        "sglang",
        "--sglang-launch",
        "1",
        "--sglang-python",
        str(PYTHON),
        "--sglang-base-port",
        str(free_port()),
        "--sglang-config",
        str(FLAGS),
        "--sglang-dtype",
        dtype,
    ]
