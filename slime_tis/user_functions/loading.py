"""Loads user functions from `package.module.function` or `path/file.py:function`.

A file is executed once, also for several functions. It can import modules from the same directory
(`from helper import x`, `from .helper import x`); `sys.path` does not change.
"""

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.integrations import slime_modules
from slime_tis.integrations.slime import GLOBAL_BATCH_OPTIONS
from slime_tis.user_functions.calling import (
    TRACEBACK_HINT,
    accepted,
    check_signature,
    describe,
    failure,
    last_line,
)
from slime_tis.user_functions.table import USER_FUNCTIONS


def load_user_function(option: str, path: str) -> Callable[..., Any]:
    """Returns the function at a path.

    Raises:
        CustomFunctionError: The function cannot be called as `USER_FUNCTIONS` describes.
    """
    function = load_function(path)
    signature = USER_FUNCTIONS[option]
    is_plain = not (inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function))
    if signature.is_plain and not is_plain:
        raise CustomFunctionError(
            f"{describe(function)} is a coroutine or a generator; write a plain `def` with a"
            " `return`."
        )
    keywords = [*signature.keywords, *accepted(function, signature.optional)]
    check_signature(function, signature.positional, keywords)
    for method, arguments in signature.methods.items():
        if not callable(getattr(function, method, None)):
            raise CustomFunctionError(
                f"{one_line(path)} has no method {method}; write {', '.join(signature.methods)}."
            )
        check_signature(getattr(function, method), ("self", *arguments), ())
    return function


def load_custom_tis(path: str, args: Namespace) -> Callable[..., Any]:
    """Returns the custom TIS function at a path.

    The function's module may define `check_args(args)`, which raises ValueError for options that
    the function does not follow.

    Raises:
        CustomFunctionError: The function does not follow an option of the run.
    """
    function = load_user_function("custom_tis_function_path", path)
    parameters = inspect.signature(function).parameters
    for option, argument in GLOBAL_BATCH_OPTIONS.items():
        value = getattr(args, option, None)
        if value is not None and argument not in parameters:
            raise CustomFunctionError(
                f"--{option.replace('_', '-')} is {value}, which needs statistics of the global"
                f" batch, but {describe(function)} gets micro-batches and takes no argument"
                f" {argument}; remove one of the two."
            )
    check_args = getattr(inspect.unwrap(function), "__globals__", {}).get("check_args")
    if callable(check_args):
        try:
            check_args(args)
        except ValueError as error:
            raise CustomFunctionError(f"--custom-tis-function-path {path}: {error}") from error
    return function


def load_function(path: str) -> Callable[..., Any]:
    """Returns the function at `package.module.function` or `path/file.py:function`.

    A file's path is relative to the working directory and may begin with `~`. `slime_modules`
    provides slime's modules.

    Raises:
        CustomFunctionError: The path has neither form, or the file, module or function is missing
            or fails to import.
    """
    # Before any import: the user's module may begin with `from slime.utils.types import Sample`.
    slime_modules.provide()
    shown = repr(one_line(path))
    is_file = ":" in path
    source, _, name = path.rpartition(":" if is_file else ".")
    is_relative_module = source.startswith(".") and not is_file
    if not source or not name or is_relative_module or name == "py":
        raise CustomFunctionError(
            f"{shown} names no module and function; write package.module.function or"
            " path/file.py:function."
        )
    if is_file:
        module = _module_of_file(shown, source)
    else:
        module = _module_of_name(shown, source)
    function: Any = module
    for attribute in name.split("."):
        function = getattr(function, attribute, None)
    if not callable(function):
        names = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        available = one_line(", ".join(names), 200) or "none"
        raise CustomFunctionError(
            f"{shown}: {one_line(source)} has no function {name!r}; it has {available}."
        )
    result: Callable[..., Any] = function
    return result


def _module_of_file(shown: str, source: str) -> ModuleType:
    """Returns the module of a Python file, which is executed once; `shown` begins messages."""
    try:
        file = Path(source).expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise CustomFunctionError(
            f"{shown}: there is no file {one_line(source)} ({one_line(str(error))}); the working"
            f" directory is {one_line(str(Path.cwd()))}."
        ) from None
    if file.suffix != ".py" or not file.is_file():
        raise CustomFunctionError(
            f"{shown}: {source} is not a Python file; write path/file.py:function."
        )
    # A name for each directory, so that files of the same name do not replace each other.
    digest = hashlib.sha256(bytes(file.parent)).hexdigest()[:12]
    package = f"_custom_function_{digest}"
    stem = file.stem
    if not stem.isidentifier():
        stem = re.sub(r"\W", "_", stem) + f"_{len(stem)}"
    name = f"{package}.{stem}"
    if name in sys.modules:
        return sys.modules[name]
    if package not in sys.modules:
        # `from .helper import x` imports files of the same directory.
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(file.parent)]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a file that ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    # Before the execution, as import does: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        _FINDER.add(file.parent)
        with _importing(shown, file):
            spec.loader.exec_module(module)
    except BaseException:
        # A second load would otherwise return the half-executed module.
        del sys.modules[name]
        raise
    return module


def _module_of_name(shown: str, name: str) -> ModuleType:
    """Imports a module; a missing module gets a separate message."""
    try:
        with _importing(shown, None):
            return importlib.import_module(name)
    except CustomFunctionError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        # If it is not the module or one of its packages, the user's module imports it.
        if not f"{name}.".startswith(f"{cause.name}."):
            raise
        hint = ""
        if name.endswith(".mis"):
            hint = " Here slime's mis.py is custom_tis.mis."
        raise CustomFunctionError(
            f"{shown}: there is no module {cause.name!r}; set PYTHONPATH to its directory, or write"
            f" path/file.py:function.{hint}"
        ) from None


@contextmanager
def _importing(shown: str, file: Path | None) -> Iterator[None]:
    """Turns every exception of an import into one CustomFunctionError."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        line = None
        if file is not None:
            line = last_line(error, file.parent)
        where = line or last_line(error, None) or file
        reason = failure(error)
        if where:
            reason += f" ({where})"
        raise CustomFunctionError(
            f"{shown} could not be loaded: importing it {reason}; {_hint(error)}"
        ) from error


def _hint(error: BaseException) -> str:
    """Returns advice about a failed import."""
    if not isinstance(error, ImportError):
        return TRACEBACK_HINT
    name = error.name or ""
    if name.split(".")[0] == "slime":
        return (
            "slime is not installed; of slime, this program only provides"
            f" {slime_modules.described(name)}."
        )
    return "install it, copy it to the file's directory, or set PYTHONPATH."


class _SiblingFinder(MetaPathFinder):
    """Finds modules next to a user's file, for import statements of that directory only."""

    def __init__(self) -> None:
        self.directories: set[Path] = set()
        self.modules: dict[str, Path] = {}
        """Imported module → directory."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module in the directory of the importing file."""
        if path is not None:  # a module in a package, which has been found already
            return None
        directory = self._importer()
        if directory is None:
            return None
        spec = PathFinder.find_spec(fullname, [str(directory)])
        if spec is None or spec.origin is None:  # a directory without __init__.py has no origin
            return None
        self.modules[fullname] = directory
        return spec

    def add(self, directory: Path) -> None:
        """Adds a directory; its modules replace modules of the same name from other directories."""
        self.directories.add(directory)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        # Two users' directories may both have a helper.py: the next import must find the right one.
        for name, other in list(self.modules.items()):
            if other != directory:
                sys.modules.pop(name, None)
                del self.modules[name]
        # Finders cache directory listings, and a file may be newer than its directory's listing.
        importlib.invalidate_caches()

    def _importer(self) -> Path | None:
        """Returns the directory of the innermost frame outside of importlib, if it was added."""
        importers = ("<frozen importlib", importlib.__file__)
        frame = sys._getframe(2)  # the frame that called find_spec
        while frame.f_back is not None and frame.f_code.co_filename.startswith(importers):
            frame = frame.f_back
        directory = Path(frame.f_code.co_filename).parent
        if directory in self.directories:
            return directory
        return None


_FINDER = _SiblingFinder()
