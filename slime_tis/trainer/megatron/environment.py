"""This process's ranks in a torchrun job, from environment variables of torchrun or another launcher."""

from collections.abc import Mapping
from dataclasses import dataclass

LAUNCH = "start several ranks with torchrun, or one process without the variables of torchrun"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The launcher's settings; the defaults are one process without a launcher."""

    rank: int = 0
    local_rank: int = 0
    launched: bool = False
    """Whether RANK is set: the ranks meet at MASTER_ADDR and MASTER_PORT."""
    world_size: int = 1
    local_world_size: int = 1


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Reads RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def number(name: str, default: str | None, low: int = 0, high: int = 10**9 - 1) -> int:
        text = environ.get(name, default)
        if text is None:
            raise ValueError(f"RANK is {rank} but {name} is unset; {LAUNCH}.")
        if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
            raise ValueError(f"{name} is {text[:80]!r} but must be an integer from {low} to {high}; {LAUNCH}.")
        return int(text)

    launched = "RANK" in environ
    world_size = number("WORLD_SIZE", "1", 1)
    if world_size > 1 and not launched:
        raise ValueError(f"WORLD_SIZE is {world_size} but RANK is unset; {LAUNCH}.")
    rank = number("RANK", "0", high=world_size - 1)
    if launched:
        if not environ.get("MASTER_ADDR"):
            raise ValueError(f"RANK is {rank} but MASTER_ADDR is unset; {LAUNCH}.")
        number("MASTER_PORT", None, 1, 65535)
    return Environment(
        rank=rank,
        local_rank=number("LOCAL_RANK", "0"),
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", "1", 1),
        launched=launched,
    )
