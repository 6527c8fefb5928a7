"""Calls of user functions: each failure is one message, and global state is isolated."""

import asyncio
import functools
import importlib
import inspect
import os
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from slime_tis.errors import CustomFunctionError, one_line

MAX_REASON_LENGTH = 300
"""Characters of an exception's text that are shown; torch names the tensors at the end."""
TRACEBACK_HINT = "SLIME_TIS_TRACEBACK=1 shows the traceback."
"""Last sentence of messages."""
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (os.getcwd, os.chdir),
)
"""Getters and setters of the global settings that `isolated_global_state` restores."""


def call(
    function: Callable[..., Any], *arguments: Any, seed: int | None = None, **keywords: Any
) -> Any:
    """Calls a user function; see `calling`. With a seed, it runs in `isolated_global_state`."""
    if seed is None:
        with calling(function):
            return function(*arguments, **keywords)
    with isolated_global_state(seed), calling(function):
        return function(*arguments, **keywords)


@contextmanager
def calling(function: Callable[..., Any]) -> Iterator[None]:
    """Turns every exception of a call into one CustomFunctionError.

        with calling(function):
            result = await function(args, sample)

    The message names the function, the exception, and the last executed line of the function's
    directory. `sys.exit` counts as an exception. Ctrl-C and a task's cancellation pass through.
    """
    code = _code(function)
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, CustomFunctionError):
        raise
    # BaseException, because sys.exit in a user function must not end one rank silently.
    except BaseException as error:
        where = describe(function)
        if code is not None:
            line = last_line(error, Path(code.co_filename).parent)
            if line is not None:
                where = f"{_name(function)} ({line})"
        raise CustomFunctionError(f"{where} {failure(error)}. {TRACEBACK_HINT}") from error


@contextmanager
def isolated_global_state(seed: int) -> Iterator[None]:
    """Seeds torch, Python and numpy; restores their generators and `SETTINGS` afterwards."""
    before = [getter() for getter, _ in SETTINGS]
    python_state = random.getstate()
    # Without an import of numpy, the user function cannot have numbers from its generator.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy_state = numpy.random.get_state()
    devices = []
    # Asking for the device would start CUDA in a process that does not use it.
    if torch.cuda.is_initialized():
        devices.append(torch.cuda.current_device())
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)  # numpy takes 32 bits
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
            for (getter, setter), value in zip(SETTINGS, before, strict=True):
                if getter() != value:
                    setter(value)


def describe(function: Callable[..., Any]) -> str:
    """Returns `NAME (FILE, line N)` of a function, or only the name if it has no Python source."""
    name = _name(function)
    code = _code(function)
    if code is None:
        return name
    return f"{name} ({code.co_filename}, line {code.co_firstlineno})"


def accepted(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Returns the keyword arguments that a function accepts."""
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # a function in C without a signature
        return []
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return list(names)
    return [name for name in names if name in parameters]


def check_signature(
    function: Callable[..., Any], positional: Sequence[str], keywords: Sequence[str]
) -> None:
    """Checks that a function can be called with these arguments.

    Raises:
        CustomFunctionError: The function does not take these arguments.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a function in C without a signature
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        arguments = ", ".join([*positional, *[f"{name}=…" for name in keywords]])
        raise CustomFunctionError(
            f"{describe(function)} cannot be called as {_name(function)}({arguments}):"
            f" {one_line(str(error))}; take these parameters, or **kwargs for unused parameters."
        ) from None


def failure(error: BaseException) -> str:
    """Returns `raised TYPE: text`, or `called sys.exit(status)`."""
    if isinstance(error, SystemExit):
        return (
            f"called sys.exit({one_line(repr(error.code))}); return a value, or raise an exception"
            " to stop the run"
        )
    try:
        text = str(error)
        # str of a SyntaxError repeats file and line, which the message has already.
        if isinstance(error, SyntaxError):
            text = error.msg
    except Exception:  # a user-defined __str__
        text = ""
    text = one_line(text, MAX_REASON_LENGTH).rstrip(".")
    if isinstance(error, AttributeError) and isinstance(error.obj, Namespace):
        # The function reads an option of args that the run does not have.
        text += (
            f"; add {error.name} to the YAML file of --custom-config-path, or in Python to the"
            " Namespace of the argument args="
        )
    name = type(error).__name__
    if not text:
        return f"raised {name}"
    return f"raised {name}: {text}"


def last_line(error: BaseException, directory: Path | None) -> str | None:
    """Returns `FILE, line N` of the innermost frame in a directory.

    Without a directory, it is the innermost frame outside of importlib and of this package.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno or 1}"
    importers = (str(Path(__file__).parent), importlib.__file__)
    line = None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if directory is None:
            is_user_code = not name.startswith(importers)
        else:
            is_user_code = Path(name).parent == directory
        # Code without a file has a name such as <frozen importlib._bootstrap> or <string>.
        if is_user_code and not name.startswith("<"):
            line = f"{name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _inner(function: Callable[..., Any]) -> Any:
    """Returns the function inside decorators, partial applications and methods."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__func__", function)


def _name(function: Callable[..., Any]) -> str:
    """Returns the name of a function, without the functions that enclose it."""
    inner = _inner(function)
    # An object with __call__ has no name; its class has one.
    name: str = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return name.rpartition("<locals>.")[2]


def _code(function: Callable[..., Any]) -> CodeType | None:
    """Returns the compiled Python code of a function; None if it is in C, or a class."""
    inner = _inner(function)
    code = getattr(inner, "__code__", None)
    if code is None and not inspect.isclass(inner):  # an object with __call__
        code = getattr(_inner(type(inner).__call__), "__code__", None)
    return code if isinstance(code, CodeType) else None
