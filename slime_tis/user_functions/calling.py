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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from slime_tis.errors import CustomFunctionError, one_line

MAX_REASON_LENGTH = 300
"""Shown characters of an exception's text; torch names the tensors at the end of its messages."""
TRACEBACK_HINT = "SLIME_TIS_TRACEBACK=1 shows the traceback."
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
"""Getter and setter of each setting that `isolated_global_state` restores."""


def call(
    function: Callable[..., Any], *arguments: Any, seed: int | None = None, **keywords: Any
) -> Any:
    """Calls a user function; see `calling`. With a seed the call runs in `isolated_global_state`."""
    with nullcontext() if seed is None else isolated_global_state(seed), calling(function):
        return function(*arguments, **keywords)


@contextmanager
def calling(function: Callable[..., Any]) -> Iterator[None]:
    """Turns every exception of a call into one CustomFunctionError.

        with calling(function):
            result = await function(args, sample)

    The message names the function, the exception, and the last executed line of the function's
    directory. `sys.exit` is an exception like any other. Ctrl-C and a task's cancellation pass
    through.
    """
    code = _code(function)
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, CustomFunctionError):
        raise
    except BaseException as error:
        line = None if code is None else last_line(error, Path(code.co_filename).parent)
        where = describe(function) if line is None else f"{_name(function)} ({line})"
        raise CustomFunctionError(f"{where} {failure(error)}. {TRACEBACK_HINT}") from error


@contextmanager
def isolated_global_state(seed: int) -> Iterator[None]:
    """Seeds the generators of torch, Python and numpy; restores generators and `SETTINGS` afterwards."""
    before = [getter() for getter, _ in SETTINGS]
    numpy = sys.modules.get("numpy")
    generators = random.getstate(), None if numpy is None else numpy.random.get_state()
    on_gpu = torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(generators[0])
            if numpy is not None:
                numpy.random.set_state(generators[1])
            for (getter, setter), value in zip(SETTINGS, before, strict=True):
                if getter() != value:
                    setter(value)


def describe(function: Callable[..., Any]) -> str:
    """Returns `NAME (FILE, line N)` of a function; the name alone without Python source."""
    code, name = _code(function), _name(function)
    return name if code is None else f"{name} ({code.co_filename}, line {code.co_firstlineno})"


def accepted(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Returns the keyword arguments that a function accepts."""
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # a function in C without a signature
        return []
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return [name for name in names if takes_any or name in parameters]


def check_signature(
    function: Callable[..., Any], positional: Sequence[str], keywords: Sequence[str]
) -> None:
    """Checks that a function can be called with these arguments; raises CustomFunctionError if not."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a function in C without a signature
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        arguments = ", ".join([*positional, *(f"{name}=…" for name in keywords)])
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
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # a user-defined __str__
        text = ""
    text = one_line(text, MAX_REASON_LENGTH).rstrip(".")
    if isinstance(error, AttributeError) and isinstance(
        error.obj, Namespace
    ):  # an option of the function itself
        text += (
            f"; add {error.name} to the YAML file of --custom-config-path, or in Python to the"
            " Namespace of the argument args="
        )
    return f"raised {type(error).__name__}: {text}" if text else f"raised {type(error).__name__}"


def last_line(error: BaseException, directory: Path | None) -> str | None:
    """Returns `FILE, line N` of the innermost frame in a directory; without a directory, outside of importlib."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno or 1}"
    line, trace = None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        is_imported = directory is None and not name.startswith(
            (str(Path(__file__).parent), importlib.__file__)
        )
        if not name.startswith("<") and (is_imported or Path(name).parent == directory):
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
    inner = _inner(function)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _code(function: Callable[..., Any]) -> CodeType | None:
    inner = _inner(function)
    code = getattr(inner, "__code__", None)
    if code is None and not inspect.isclass(inner):  # an object with __call__
        code = getattr(_inner(type(inner).__call__), "__code__", None)
    return code if isinstance(code, CodeType) else None
