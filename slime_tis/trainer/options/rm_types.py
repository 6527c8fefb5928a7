"""Names of the built-in rewards, and weights of their components."""

import math
from collections.abc import Mapping

from slime_tis.errors import quoted

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
BOXED = "boxed_"
"""Prefix of a name: scores the content of the response's last \\boxed{}."""


def check_rm_type(source: str, name: str) -> None:
    """Refuses an unknown reward, with or without `boxed_`; the message begins with `source`."""
    if base_name(name) not in RM_TYPES:
        raise ValueError(
            f"{source} is {quoted(name)} but must be one of {', '.join(RM_TYPES)}, each also as {BOXED}NAME; "
            "for another reward write a function for --custom-rm-path."
        )


def base_name(name: str) -> str:
    """Returns the name of a reward without `boxed_`."""
    return name.removeprefix(BOXED)


def parse_weights(text: str) -> dict[str, float]:
    """Returns the weights of --reward-weights by key."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not equals or not math.isfinite(weight) or name in weights:
            raise ValueError(
                f"--reward-weights is {quoted(text)} but must be KEY=WEIGHT,KEY=WEIGHT with finite weights and "
                "different keys."
            )
        weights[name] = weight
    return weights
