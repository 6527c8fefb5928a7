"""Names of the built-in rewards, which the command line and the rows of a prompt file may give."""

from collections.abc import Mapping

RM_TYPES: Mapping[str, tuple[str, ...]] = {
    "exact_match": (),
    "math": (),
    "deepscaler": (),
    "dapo": ("score", "acc"),
    "f1": (),
    "gpqa": (),
    "random": (),
}
"""Built-in rewards by name, and the keys of what each gives; () where it gives a number."""

BOXED = "boxed_"
"""Before a name: what the last \\boxed{} of the response holds is scored in its place."""

ELSEWHERE = {
    "remote_rm": "the call of a reward server",
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


def reward_keys(name: str) -> tuple[str, ...]:
    """Keys of what a built-in reward gives, () for a number."""
    return RM_TYPES[name.removeprefix(BOXED)]
