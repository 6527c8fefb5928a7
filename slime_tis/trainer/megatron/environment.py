"""This process's ranks in a torchrun job, from environment variables of torchrun or another launcher."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The launcher's settings; the defaults are one process without a launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Processes on this machine."""
    launched: bool = False
    """Whether RANK is set: the ranks meet at MASTER_ADDR and MASTER_PORT."""


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Reads RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: RANK is set and another one is missing, or a value is impossible.
    """
    launched = "RANK" in environ
    world_size = _count(environ, "WORLD_SIZE", 1, smallest=1)
    if world_size > 1 and not launched:
        raise ValueError(f"WORLD_SIZE is {world_size} but RANK is unset; {LAUNCH}.")
    rank = _count(environ, "RANK", 0)
    if rank >= world_size:
        raise ValueError(f"RANK is {rank} but WORLD_SIZE is {world_size}, so ranks end at {world_size - 1}; {LAUNCH}.")
    local_rank = _count(environ, "LOCAL_RANK", 0)
    local_world_size = _count(environ, "LOCAL_WORLD_SIZE", 1, smallest=1)
    if launched:
        if not environ.get("MASTER_ADDR"):
            raise ValueError(f"RANK is {rank} but MASTER_ADDR is unset; {LAUNCH}.")
        port = _count(environ, "MASTER_PORT", None, smallest=1)
        if port > 65535:
            raise ValueError(f"the environment variable MASTER_PORT is {port} but a port is at most 65535; {LAUNCH}.")
    return Environment(
        rank=rank, local_rank=local_rank, world_size=world_size, local_world_size=local_world_size, launched=launched
    )


LAUNCH = "start several ranks with torchrun, or one process without the variables of torchrun"


def _count(environ: Mapping[str, str], name: str, default: int | None, smallest: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"RANK is {environ['RANK']} but {name} is unset; {LAUNCH}.")
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= smallest):
        raise ValueError(
            f"the environment variable {name} is {text[:80]!r} but must be an integer of at least {smallest}; {LAUNCH}."
        )
    return int(text)
