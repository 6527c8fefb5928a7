"""Loads a user's function from `package.module.function` or `path/file.py:function`.

Each file is a separate module, with any name and in any directory. It runs once, for any number of functions
from it, is found in `sys.modules` under a unique name (dataclasses and `typing.get_type_hints` look there), imports
files of its directory (`from helper import x`, `from .helper import x`), and `sys.path` does not change.
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_tis.errors import CustomFunctionError, one_line
from slime_tis.integrations import slime_modules
from slime_tis.user_functions.messages import TRACEBACK_HINT, check_plain, check_signature, delivered, happened

_SHOWN_NAMES = 200
"""Characters of the list of functions that a module has."""


def load_function(path: str) -> Callable[..., Any]:
    """The function at `package.module.function` or `path/file.py:function`.

    A file's path is relative to the working directory, may begin with `~` and may be a symbolic link. Where slime is
    not installed, what `slime_modules` has of it can be imported, now and when the function is called.

    Raises:
        CustomFunctionError: if the path has neither form, the file, the module or the function is not there, or the
            module cannot be imported; the message has the file and the line.
    """
    slime_modules.provide()
    shown = repr(one_line(path))
    if ":" not in path and path.endswith(".py"):
        raise CustomFunctionError(f"{shown} names a file and no function in it; write {one_line(path)}:function.")
    place, separator, name = path.rpartition(":" if ":" in path else ".")
    if not place or not name:
        raise CustomFunctionError(
            f"{shown} names no module and function; write package.module.function or path/file.py:function."
        )
    module = _module_of_file(shown, Path(place)) if separator == ":" else _module_of_name(shown, place)
    missing = object()
    function: Any = module
    for attribute in name.split("."):
        function = getattr(function, attribute, missing)
    if function is missing:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        has = one_line(", ".join(names), _SHOWN_NAMES) or "none"
        raise CustomFunctionError(f"{shown}: {place} has no function {name!r}; it has {has}.")
    if not callable(function):
        raise CustomFunctionError(f"{shown}: {name} in {place} is a {type(function).__name__}, and cannot be called.")
    found: Callable[..., Any] = function
    return found


def load_hook(path: str, arguments: Sequence[str], keywords: Sequence[str] = ()) -> Callable[..., Any]:
    """The function at a path, which is called and returns; see `load_function`.

    Args:
        path: `package.module.function` or `path/file.py:function`.
        arguments: names of its positional arguments.
        keywords: names of its keyword arguments.

    Raises:
        CustomFunctionError: it cannot be loaded, cannot be called with these, or is a coroutine or a generator.
    """
    function = load_function(path)
    check_plain(function)
    check_signature(function, arguments, keywords)
    return function


@contextmanager
def _importing(shown: str, file: Path | None) -> Iterator[None]:
    """Turns every exception of an import into one CustomFunctionError."""
    try:
        yield
    except BaseException as error:
        if delivered(error, None if file is None else str(file)):
            raise
        place, hint = _place(error, file), _hint(error)
        raise CustomFunctionError(
            f"{shown} could not be loaded: importing it {happened(error)}{f' ({place})' if place else ''}; {hint}"
        ) from error


def _module_of_file(shown: str, given: Path) -> ModuleType:
    file = _existing(shown, given)
    if file.suffix != ".py":
        raise CustomFunctionError(f"{shown}: {given} is not a Python file; its name must end in .py.")
    package, name = _unique_names(file)
    if name in sys.modules:
        return sys.modules[name]
    if package not in sys.modules:  # makes `from .helper import x` find files of the same directory
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(file.parent)]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a file that ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _FINDER.add(file.parent)
        with _importing(shown, file):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _existing(shown: str, given: Path) -> Path:
    try:
        file = given.expanduser().resolve()
        exists, directory = file.is_file(), file.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an unknown user, a null byte
        raise CustomFunctionError(f"{shown}: {one_line(str(given))} is not a path: {one_line(str(error))}.") from None
    if directory:
        raise CustomFunctionError(f"{shown}: {given} is a directory; write path/file.py:function.")
    if not exists:
        absolute = "" if given.is_absolute() or str(given).startswith("~") else f" in {one_line(str(Path.cwd()))}"
        raise CustomFunctionError(f"{shown}: there is no file {one_line(str(given))}{absolute}.")
    return file


def _unique_names(file: Path) -> tuple[str, str]:
    """Returns unique module names for a file's directory and for the file."""
    digest = hashlib.sha256(str(file.parent).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    package = f"_custom_function_{digest}"
    stem = file.stem if file.stem.isidentifier() else re.sub(r"\W", "_", file.stem) + f"_{len(file.stem)}"
    return package, f"{package}.{stem}"


class _SiblingFinder(MetaPathFinder):
    """Finds modules next to a user's file, for import statements in that directory only."""

    def __init__(self) -> None:
        self.directories: set[Path] = set()
        """Directories of the loaded files."""
        self.found: dict[str, Path] = {}
        """Modules that came from one of them, by name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's place, where a file of one of the directories imports it."""
        directory = None if path is not None else self._importer()
        spec = None if directory is None else PathFinder.find_spec(fullname, [str(directory)])
        if directory is None or spec is None or spec.origin is None:
            return None
        self.found[fullname] = directory
        return spec

    def add(self, directory: Path) -> None:
        """Adds a directory; its modules replace modules of the same name from other directories."""
        self.directories.add(directory)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in [name for name, place in self.found.items() if place != directory]:
            sys.modules.pop(name, None)
            del self.found[name]
        importlib.invalidate_caches()

    def _importer(self) -> Path | None:
        """The directory of the code whose import statement is being carried out, if it is one of ours."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(
            ("<frozen importlib", importlib.__file__)
        ):
            frame = frame.f_back
        place = Path(frame.f_code.co_filename).parent
        return place if place in self.directories else None


_FINDER = _SiblingFinder()


def _module_of_name(shown: str, name: str) -> ModuleType:
    for_file = "For a file, write path/file.py:function."
    if not all(part.isidentifier() for part in name.split(".")):
        raise CustomFunctionError(f"{shown}: {one_line(name)} is not a module's name. {for_file}")
    try:
        with _importing(shown, None):
            return importlib.import_module(name)
    except CustomFunctionError as error:
        cause = error.__cause__
        if (
            not isinstance(cause, ModuleNotFoundError)
            or cause.name is None
            or not f"{name}.".startswith(f"{cause.name}.")
        ):
            raise
        ours = " Here slime's mis.py is custom_tis.mis." if name.endswith(".mis") else ""
        raise CustomFunctionError(
            f"{shown}: there is no module {cause.name!r}; is its directory on PYTHONPATH? {for_file}{ours}"
        ) from None


def _place(error: BaseException, file: Path | None) -> str | None:
    """Returns `FILE, line N` of a syntax error, or of the innermost line outside of the import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}" if error.lineno else error.filename
    found, inside = None, None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith("<") and name not in (__file__, importlib.__file__):
            found = f"{name}, line {trace.tb_lineno}"
            if file is not None and Path(name).parent == file.parent:
                inside = found
        trace = trace.tb_next
    return inside or found or (None if file is None else str(file))


def _hint(error: BaseException) -> str:
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "slime":
        here = slime_modules.described(error.name or "")
        return f"slime is not installed, and of its modules this program has {here} alone."
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "for imports beyond the file's own directory write package.module.function, and set PYTHONPATH."
    if isinstance(error, ModuleNotFoundError):
        return "install it, copy it to the file's directory, or set PYTHONPATH."
    return "correct the file." if isinstance(error, SyntaxError) else TRACEBACK_HINT
