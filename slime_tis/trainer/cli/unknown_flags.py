"""Flags that a command line has and this program lacks: all of them refused in one message, or checked and accepted.

Flags of slime and Megatron-core are known by name (`slime_flags`): some repeat the checkpoint's config.json and are
accepted where they agree with it, some have another name here, some have none. The rest are typing errors.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_tis.errors import quoted
from slime_tis.trainer.cli.options import SWITCHES, nearest, similar
from slime_tis.trainer.cli.slime_flags import FIXED, RENAMED, RESTATED, Restated, advice_for, checkpoint_facts

SERVER_PREFIX = "--sglang-"
MOST = 200
"""Unknown flags that one message looks at."""

TOLERANCE = 1e-9
"""Relative difference of two numbers that are the same, such as 1e-6 and 0.000001."""


@dataclass(frozen=True)
class UnknownFlag:
    """A flag that is not this program's, with the values that follow it."""

    name: str
    """With its dashes."""

    values: tuple[str, ...]
    """As they were given."""

    @property
    def is_checked(self) -> bool:
        """Whether it repeats what config.json or this program says."""
        return self.name in RESTATED or self.name in FIXED


def split_unknown_flags(argv: Sequence[str], known: Collection[str]) -> tuple[list[str], list[UnknownFlag]]:
    """Takes the flags that are not known, and the values that follow each, off a command line.

    Args:
        argv: the command line.
        known: flags of this program, which stay.

    Returns:
        the rest of the command line, and the unknown flags in their order.
    """
    rest: list[str] = []
    unknown: list[tuple[str, list[str]]] = []
    current = rest
    for token in argv:
        name, equals, value = token.partition("=")
        if not token.startswith("--") or token == "--":
            current.append(token)
        elif name in known:
            current = rest
            rest.append(token)
        else:
            current = [value] if equals else []
            unknown.append((name, current))
    return rest, [UnknownFlag(name, tuple(values)) for name, values in unknown]


def refusal(unknown: Sequence[UnknownFlag], known: Collection[str], model: Mapping[str, Any] | None = None) -> str:
    """The message about all flags that are refused, in groups; empty where every one is accepted.

    Args:
        unknown: the flags that are not this program's.
        known: flags of this program.
        model: config.json of the checkpoint; None omits the comparison with it.
    """
    groups: dict[str, list[str]] = {}
    for flag in unknown[:MOST]:
        group, message = _judge(flag, known, model)
        if message:
            groups.setdefault(group, []).append(message)
    messages = [message for found in groups.values() for message in found]
    if len(messages) < 2:
        return "".join(messages)
    count = f"more than {MOST}" if len(unknown) > MOST else str(len(messages))
    lines = [f"{count} flags are refused (slime-tis port SCRIPT rewrites a launch script of slime):"]
    for title in (CHECKED, RENAMES, UNSUPPORTED, TYPING):
        if title in groups:
            lines += [f"{title}:", *(f"  {message}" for message in groups[title])]
    return "\n".join(lines)


CHECKED = "read from config.json, or fixed"
RENAMES = "renamed"
UNSUPPORTED = "not supported"
TYPING = "not known"


def _judge(flag: UnknownFlag, known: Collection[str], model: Mapping[str, Any] | None) -> tuple[str, str]:
    """The group of a flag and the message that refuses it, empty where it is accepted."""
    if flag.is_checked:
        return CHECKED, disagreement(flag, model)
    if flag.name in RENAMED:
        new = RENAMED[flag.name]
        return RENAMES, f"{flag.name} is {new.name} here{', ' * bool(new.note)}{new.note}."
    advice = advice_for(flag.name)
    if advice is not None:
        return UNSUPPORTED, f"{flag.name} is not supported: {advice.reason}; {advice.instead}."
    if flag.name.startswith(SERVER_PREFIX) and similar(flag.name, known) is None:
        return UNSUPPORTED, (
            f"{flag.name} is a flag of SGLang servers, which this run does not start; add --rollout-engine sglang "
            "--sglang-launch N."
        )
    return TYPING, f"{quoted(flag.name)[1:-1]} is not a flag; {nearest(flag.name, known)}"


def disagreement(flag: UnknownFlag, model: Mapping[str, Any] | None) -> str:
    """How a flag of RESTATED or FIXED differs from what it repeats; empty where it agrees, or nothing can be said.

    Args:
        flag: one of these.
        model: config.json of the checkpoint, or None.
    """
    if flag.name in FIXED:
        return _differs_from_fixed(flag, FIXED[flag.name])
    restated = RESTATED[flag.name]
    facts = {} if model is None else checkpoint_facts(model)
    expected = facts.get(restated.fact)
    if restated.switch is not None:
        on = _switch(flag)
        if on is None:
            return f"{flag.name} is {_shown(flag)} but is a switch; remove it."
        if expected is None or not on or expected in restated.switch:
            return ""
        return (
            f"{flag.name} is set but {restated.fact} of config.json is {_words(expected)}; remove it, or give the "
            "directory of that model."
        )
    return _differs_from_value(flag, restated, expected)


def _differs_from_value(flag: UnknownFlag, restated: Restated, expected: Any) -> str:
    if len(flag.values) != 1:
        return f"{flag.name} has {len(flag.values)} values but needs one; remove it, config.json says it."
    if expected is None or _same(flag.values[0], expected):
        return ""
    return (
        f"{flag.name} is {_shown(flag)} but {restated.fact} of config.json is {_words(expected)}; remove it, or "
        "give the directory of that model."
    )


def _differs_from_fixed(flag: UnknownFlag, allowed: tuple[str, ...]) -> str:
    if not allowed:
        return "" if _switch(flag) else f"{flag.name} is {_shown(flag)} but cannot be turned off; remove it."
    if len(flag.values) == 1 and any(_same(flag.values[0], value) for value in allowed):
        return ""
    return f"{flag.name} is {_shown(flag)} but always {' or '.join(allowed)} here; remove it."


def _switch(flag: UnknownFlag) -> bool | None:
    """What a switch says; None where its value is none of a switch."""
    if not flag.values:
        return True
    return SWITCHES.get(flag.values[0].lower()) if len(flag.values) == 1 else None


def _same(text: str, value: Any) -> bool:
    """Whether a text is a value: the same number, or the same word."""
    try:
        number, expected = float(text), float(value)
    except (TypeError, ValueError, OverflowError):
        return text.lower() == str(value).lower()
    return abs(number - expected) <= TOLERANCE * max(abs(number), abs(expected))


def _shown(flag: UnknownFlag) -> str:
    return repr(" ".join(flag.values)[:80]) if flag.values else "without a value"


def _words(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)[:80]
