"""Exceptions that end a run with one message, and their exit statuses.

    ValueError
     ├── CommandLineError         a flag does not fit the files that it names: status 2
     └── CustomFunctionError      a user function cannot be loaded or breaks its contract: status 2
    RuntimeError
     ├── NonFiniteGradient        a gradient is NaN or infinite: status 1
     ├── OtherRankFailed          another rank raised an error: status 1
     ├── HealthAlarm              an alarm ended a run inside another trainer (on_alarm="stop")
     └── RunStopped               the run ended early and saved: the exception's status

Other errors end with status 1, a refused command line with 2, a signal with 128 + its number.
"""


class CommandLineError(ValueError):
    """A flag does not fit the prompts or the model, which is known only after files were read."""


class CustomFunctionError(ValueError):
    """A user-defined function could not be loaded, raised an error, or returned an invalid value.

    The message names the function, its file and line, and the fix.
    """


class NonFiniteGradient(RuntimeError):
    """The gradient of a step is NaN or infinite; the weights are unchanged.

    `rows` has the metrics of the rollout's steps; the failed step is last.
    """

    def __init__(self, message: str, rows: list[dict[str, float]]) -> None:
        super().__init__(message)
        self.rows = rows


class OtherRankFailed(RuntimeError):
    """Another rank raised an error; the message is the same."""


class HealthAlarm(RuntimeError):
    """A health alarm began inside another trainer, and `on_alarm="stop"` ends the run.

    The message has the alarms with evidence and advice.
    """


class RunStopped(RuntimeError):
    """The run ended before its last rollout.

    The message has the reason, the checkpoint and how to resume.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def one_line(text: str, limit: int = 80) -> str:
    """Returns the text on one line, with control characters escaped, cut to `limit` characters."""
    # Cut before the escapes, which make a long binary text four times longer.
    words = " ".join(text.split())[: limit + 1]
    escaped = ""
    for character in words:
        escaped += character if character.isprintable() else repr(character)[1:-1]
    if len(escaped) <= limit:
        return escaped
    return escaped[: limit - 1] + "…"


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text without a full stop, or else its type."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return one_line(lines[0], 300).rstrip(".")


def quoted(value: object, length: int = 80) -> str:
    """Returns the repr of a value, cut to about `length` characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or a number of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"
    if len(text) <= length:
        return text
    return f"{text[: length - 20]}… ({len(text)} characters)"


def quoted_path(path: object) -> str:
    """Returns the repr of a path, without the middle if it is longer than 160 characters."""
    text = repr(str(path))
    if len(text) <= 160:
        return text
    return f"{text[:60]}…{text[-90:]}"
