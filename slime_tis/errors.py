"""Exceptions that end a run with one message, and the exit status of each.

    ValueError
     └── CustomFunctionError      a function of the user's own cannot be loaded or breaks its contract: status 2
    RuntimeError
     ├── NonFiniteGradient        a gradient is NaN or infinite, and no step was made: status 1
     ├── OtherRankFailed          another rank raised what this one has to stop for: status 1
     └── RunStopped               the run ended early and says where it saved: a status of its own

Everything else that the program reports ends with status 1, a refused command line with 2, a signal with 128 + its
number.
"""


class CustomFunctionError(ValueError):
    """A function of the user's own could not be loaded, raised, or returned what its contract does not allow.

    The message names the function, the file and line where there is one, and how to fix it.
    """


class NonFiniteGradient(RuntimeError):
    """The gradient of a step is NaN or infinite; the weights are those of the step before.

    `rows` are the metrics of the rollout's steps, those of the failed one last.
    """

    def __init__(self, message: str, rows: list[dict[str, float]]) -> None:
        super().__init__(message)
        self.rows = rows


class OtherRankFailed(RuntimeError):
    """Another rank raised an error in work that the ranks share; the message is that error's."""


class RunStopped(RuntimeError):
    """The run ended before its last rollout; the message says why, where it was saved and how to go on."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def one_line(text: str, limit: int = 80) -> str:
    """The text for use inside an error message: on one line, control characters escaped, cut to `limit` characters."""
    text = " ".join(text.split())[: limit + 1]
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def first_line(error: BaseException) -> str:
    """The first line of an exception's text without the full stop at its end; its type where the text is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return one_line(lines[0], 300).rstrip(".")


def quoted(value: object, length: int = 80) -> str:
    """The repr of a value, escaped and cut to about `length` characters, for an error message."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or a number of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"
    if len(text) <= length:
        return text
    return f"{text[: length - 20]}… ({len(text)} characters)"


def quoted_path(path: object) -> str:
    """The repr of a path, escaped, without its middle where it is longer than 160 characters."""
    text = repr(str(path))
    return text if len(text) <= 160 else f"{text[:60]}…{text[-90:]}"
