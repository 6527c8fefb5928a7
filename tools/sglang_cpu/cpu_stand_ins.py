"""Lets SGLang be imported where compiled packages that it imports do not exist: on a machine without a GPU.

`build.sh` puts this file and a `.pth` line that imports it into the environment, so that it runs at the start of
every Python process there, the server's workers included. On a CPU a dense model needs none of what these
packages do; only their names have to import. A stand-in that is called after all raises.

    triton       decorates kernels at import time, so its calls hand back what they decorate
    sgl_kernel   compiled kernels; every call raises
    torchvision  image processors; PyPI's build does not load beside a CPU build of torch
"""

import importlib.abc
import importlib.machinery
import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

VERSIONS = {"triton": "3.0.0", "sgl_kernel": "0.0.0", "torchvision": "0.28.0"}
"""What each package says it is; torch and transformers ask."""


class ClassStandIn(type):
    """Makes classes that take any arguments and have any members, each of which is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return object.__new__(cls)


class StandIn(ModuleType):
    """A module whose every name exists: a class where it is written as one, else another stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = ClassStandIn(name, (), {}) if name[0].isupper() else import_module(f"{self.__name__}.{name}")
        setattr(self, name, child)
        return child

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.__name__.startswith("triton"):
            raise NotImplementedError(f"{self.__name__} was called, but this environment has no compiled kernels.")
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda decorated: decorated

    def __contains__(self, item: object) -> bool:
        return False  # where torch looks for a backend, there is none


class TritonStandIn(StandIn):
    """`triton` itself, of which SGLang calls two helpers while it imports."""

    @staticmethod
    def cdiv(number: int, divisor: int) -> int:
        """The quotient, rounded up."""
        return -(number // -divisor)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        """The smallest power of two that is not below `number`."""
        return 1 << max(number - 1, 0).bit_length()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers `import` for the packages above and whatever lies below them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """A stand-in's specification, or None where the name is no business of ours."""
        if name.split(".")[0] not in VERSIONS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The stand-in."""
        return TritonStandIn(spec.name) if spec.name == "triton" else StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Puts a version on the package itself; nothing else is left to run."""
        if module.__name__ in VERSIONS:
            module.__version__ = VERSIONS[module.__name__]  # type: ignore[attr-defined]


os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # SGLang asks for it, and this environment is for nothing else
sys.meta_path.append(Finder())  # the last: a package that is really installed comes first
