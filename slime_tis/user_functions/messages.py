"""One error message for every failure of user code: the error, the function, file and line."""

import asyncio
import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from slime_tis.errors import CustomFunctionError, one_line

LONGEST_REASON = 300
"""Characters of an exception's own text that are shown: torch's name the tensors at their end."""

TRACEBACK_HINT = "SLIME_TIS_TRACEBACK=1 shows the traceback."

DELIVERED = (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)
"""Exceptions that a signal, an event loop or a generator's end raises in running code."""


def describe(function: Callable[..., Any]) -> str:
    """`NAME (FILE, line N)` of a function, its name alone where it has no source."""
    code, name = _code(function), _name(function)
    return name if code is None else f"{name} ({code.co_filename}, line {code.co_firstlineno})"


@contextmanager
def calling(function: Callable[..., Any]) -> Iterator[None]:
    """Turns every exception of a call into one CustomFunctionError.

        with calling(function):
            result = function(args, sample)       # or `await function(args, sample)`

    The message names the function, the exception and the last line of the function's file (or of a file next to it)
    that was being run. `sys.exit` is an exception like any other. A signal or a cancelled task that happens to arrive
    during the call passes through, since the function did not raise it.

    Raises:
        CustomFunctionError: for every exception of the function.
    """
    code = _code(function)
    file = None if code is None else code.co_filename
    try:
        yield
    except BaseException as error:
        if delivered(error, file):
            raise
        place = _last_line(error.__traceback__, file)
        where = describe(function) if place is None else f"{_name(function)} ({place})"
        raise CustomFunctionError(f"{where} {happened(error)}. {TRACEBACK_HINT}") from error


def check_signature(function: Callable[..., Any], positional: Sequence[str], keywords: Sequence[str]) -> None:
    """Checks that a function can be called with these arguments, without calling it.

    Args:
        function: The user function.
        positional: Names of the positional arguments, for the message.
        keywords: Names of the keyword arguments.

    Raises:
        CustomFunctionError: if its signature does not take them; the message shows the call.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # a function in C that has none
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*positional, *(f"{name}=…" for name in keywords)])
        raise CustomFunctionError(
            f"{describe(function)} cannot be called as {_name(function)}({call}): {one_line(str(error))}; "
            "take these parameters, or **kwargs for unused parameters."
        ) from None


def check_plain(function: Callable[..., Any]) -> None:
    """Checks that a function returns its result, and no coroutine or generator.

    Raises:
        CustomFunctionError: it is declared with `async def`, or has a `yield`.
    """
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise CustomFunctionError(
            f"{describe(function)} is a coroutine or a generator; write a plain `def` with a `return`."
        )


def happened(error: BaseException) -> str:
    """`raised TYPE: text`, or `called sys.exit(status)`."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({one_line(repr(error.code))}); return a value, or raise an exception to stop the run"
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # a user-defined __str__
        text = ""
    text = one_line(text, LONGEST_REASON).rstrip(".")
    return f"raised {type(error).__name__}: {text}" if text else f"raised {type(error).__name__}"


def _inner(function: Callable[..., Any]) -> Any:
    """What decorators, partial applications and methods are made of."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__func__", function)


def _name(function: Callable[..., Any]) -> str:
    inner = _inner(function)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _code(function: Callable[..., Any]) -> CodeType | None:
    inner = _inner(function)
    code = getattr(inner, "__code__", None)
    if code is None and not inspect.isclass(inner):  # an object that can be called
        code = getattr(_inner(type(inner).__call__), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _last_line(trace: TracebackType | None, file: str | None) -> str | None:
    """Returns `FILE, line N` of the innermost frame in the file or in a file next to it."""
    found = None
    while trace is not None and file is not None:
        name = trace.tb_frame.f_code.co_filename
        if name == file or (not name.startswith("<") and Path(name).parent == Path(file).parent):
            found = f"{name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def delivered(error: BaseException, file: str | None) -> bool:
    """Whether a signal, a cancellation or the end of a generator arrived, and no `raise` statement of the file."""
    if not isinstance(error, DELIVERED):
        return False
    trace = error.__traceback__
    if trace is None or file is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return not (code.co_filename == file and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS")
