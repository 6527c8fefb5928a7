"""Flags of runs of train.py that launch a server."""

from tests.real_servers.servers import ENGINE
from tests.runs import free_port


def without_engine(flags: list[str]) -> list[str]:
    """The flags of `make_task` without the precision of the local engine, which servers refuse."""
    precision = flags.index("--rollout-precision")
    return [*flags[:precision], *flags[precision + 2 :]]


def server_flags(*, dtype: str) -> list[str]:
    """Flags that launch one server with weights of this type."""
    prefix = f"--{ENGINE.name}"
    flags = ["--rollout-engine", ENGINE.name]
    flags += [f"{prefix}-launch", "1"]
    flags += [f"{prefix}-python", str(ENGINE.python)]
    flags += [f"{prefix}-base-port", str(free_port())]
    flags += [f"{prefix}-config", str(ENGINE.flags)]
    flags += [f"{prefix}-dtype", dtype]
    return flags
