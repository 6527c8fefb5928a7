"""Flags of the command line that are meant for the SGLang servers which a run starts."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence

PREFIX = "--sglang-"
OWN = {
    "api-key": "put the key into the environment variable that --sglang-api-key-env names",
    "admin-api-key": "put the key into the environment variable that --sglang-admin-api-key-env names",
    "model-path": "servers get the --hf-checkpoint",
    "host": "servers listen on this machine alone",
    "port": "choose the first of the ports with --sglang-base-port",
}
"""Server flags that the run sets itself, and what to do instead."""
SECRET = re.compile(
    r"(.*-)?(api-?key|keyfile-p\w*|watermark-key\w*|(private|secret|access|auth)-key|passw\w*|passphrase|secret|"
    r"credentials?|(auth|access|hf|bearer|api)-token)s?(-\w)?"
)
"""Names of server flags whose value nobody may see."""
VARIABLE = "-env"
"""What follows the name of such a flag when its value is the name of an environment variable."""


def split_server_flags(argv: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Takes `--sglang-NAME [VALUE …]` that are no flags of this program off a command line.

    Args:
      argv: the command line.
      known: flags of this program, which stay.

    Returns:
      the rest of the command line, and the flags as the server spells them: `--NAME`, `VALUE`, …

    Raises:
      ValueError: a server flag that the run sets itself, or a secret, whose value is not repeated.
    """
    rest: list[str] = []
    passed: list[str] = []
    current = rest
    for token, following in zip(argv, [*argv[1:], ""], strict=True):
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            current = passed if flag.startswith(PREFIX) and flag not in known else rest
        if current is passed and token.startswith("--"):
            name = flag.removeprefix(PREFIX)
            if name in OWN:
                raise ValueError(f"{flag} is not passed through to the servers; {OWN[name]}.")
            check_server_flag(f"{flag} is given", name, value if equals else following)
            token = f"--{token.removeprefix(PREFIX)}"
        current.append(token)
    return rest, passed


def check_server_flag(given: str, name: str, value: str) -> None:
    """Refuses a secret as the value of a server's flag, and a variable for one that is not there.

    Args:
      given: how the message begins: where the flag stands.
      name: of the flag, without dashes before it.
      value: given with it.

    Raises:
      ValueError: as said, without the value.
    """
    spelled = name.replace("_", "-").lower()
    if SECRET.fullmatch(spelled) and spelled not in OWN:
        raise ValueError(
            f"{given}, but a secret would be seen in the list of processes, in config.yaml and in reports; put it into "
            f"an environment variable and name that: --sglang-{spelled}{VARIABLE} VARIABLE."
        )
    if spelled.endswith(VARIABLE) and SECRET.fullmatch(spelled.removesuffix(VARIABLE)):
        if not value.isidentifier():
            raise ValueError(f"{given}, but what follows is not the name of an environment variable; give its name.")
        if not os.environ.get(value):
            raise ValueError(f"{given}, but the environment variable {value} is not set; set it to the secret.")
