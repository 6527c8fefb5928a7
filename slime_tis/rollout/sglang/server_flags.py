"""Flags of the command line that are meant for the SGLang servers which a run starts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

PREFIX = "--sglang-"
OWN = {
    "api-key": "put the key into the environment variable that --sglang-api-key-env names",
    "model-path": "servers get the --hf-checkpoint",
    "host": "servers listen on this machine alone",
    "port": "choose the first of the ports with --sglang-base-port",
}
"""Server flags that the run sets itself, and what to do instead."""


def split_server_flags(argv: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Takes `--sglang-NAME [VALUE …]` that are no flags of this program off a command line.

    Args:
      argv: the command line.
      known: flags of this program, which stay.

    Returns:
      the rest of the command line, and the flags as the server spells them: `--NAME`, `VALUE`, …

    Raises:
      ValueError: a server flag that the run sets itself.
    """
    rest: list[str] = []
    passed: list[str] = []
    current = rest
    for token in argv:
        if token.startswith("--"):
            flag = token.split("=")[0]
            current = passed if flag.startswith(PREFIX) and flag not in known else rest
        if current is passed and token.startswith("--"):
            name = flag.removeprefix(PREFIX)
            if name in OWN:
                raise ValueError(f"{flag} is not passed through to the servers; {OWN[name]}.")
            token = f"--{token.removeprefix(PREFIX)}"
        current.append(token)
    return rest, passed
