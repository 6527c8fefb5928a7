"""Names of the built-in rewards, which the command line and the rows of a prompt file may give, and their weights."""

import math
from collections.abc import Mapping

RM_TYPES: Mapping[str, tuple[str, ...]] = {
    "exact_match": (),
    "math": (),
    "deepscaler": (),
    "dapo": ("score", "acc"),
    "f1": (),
    "gpqa": (),
    "random": (),
    "remote_rm": (),
}
"""Built-in rewards by name, and the keys of their dictionaries; () for a number."""

REMOTE = "remote_rm"
"""The reward that a server gives, a number or a dict of numbers."""

BOXED = "boxed_"
"""Before a name: what the last \\boxed{} of the response holds is scored in its place."""

ELSEWHERE = {
    "ifbench": "a benchmark that slime downloads while it runs",
}
"""Rewards of slime that are not built in."""


def check_rm_type(source: str, name: str) -> None:
    """Checks the name of a built-in reward.

    Args:
        source: What gives it, to begin the message with.
        name: With or without `boxed_` before it.

    Raises:
        ValueError: there is no such reward.
    """
    kind = name.removeprefix(BOXED)
    if kind in RM_TYPES:
        return
    known = f"{', '.join(RM_TYPES)}, each also as {BOXED}NAME"
    if kind in ELSEWHERE:
        raise ValueError(
            f"{source} is {name!r}, {ELSEWHERE[kind]}, which is not built in; write a function for --custom-rm-path, "
            f"or choose one of {known}."
        )
    raise ValueError(f"{source} is {name[:80]!r} but must be one of {known}.")


def is_remote(name: str) -> bool:
    """Whether a server gives the reward of that name."""
    return name.removeprefix(BOXED) == REMOTE


def reward_keys(name: str) -> tuple[str, ...]:
    """Returns the keys of a built-in reward's dictionary; () for a number."""
    return RM_TYPES[name.removeprefix(BOXED)]


def parse_weights(text: str) -> dict[str, float]:
    """The weights of --reward-weights, KEY=WEIGHT,KEY=WEIGHT, by key.

    Raises:
        ValueError: the text has another form, names a key twice, or a weight is not a finite number.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not equals or not math.isfinite(weight):
            raise ValueError(
                f"--reward-weights is {text[:80]!r} but must be KEY=WEIGHT,KEY=WEIGHT with finite weights."
            )
        if name in weights:
            raise ValueError(f"--reward-weights names {name[:80]!r} twice; give each key once.")
        weights[name] = weight
    return weights
