"""Makes SGLang importable on a machine without a GPU, which lacks compiled packages.

`build.sh` puts this file and a `.pth` line that imports it into the environment, so that it runs at
the start of every Python process there, including the server's workers. On a CPU a model does not
use these packages; only their names must be importable. Calling a stand-in raises an error.

    triton       decorates kernels at import time, so its calls return the decorated function
    sgl_kernel   compiled kernels; every call raises
    torchvision  image processors; PyPI's build does not load with a CPU build of torch

Two of SGLang's functions for mixtures of experts need a GPU; `REPLACEMENTS` implements them in
torch. Its LoRA layers ask for pinned memory, which does not exist without a GPU.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

VERSIONS = {"triton": "3.0.0", "sgl_kernel": "0.0.0", "torchvision": "0.28.0"}
"""The version of each package; torch and transformers read it."""


class ClassStandIn(type):
    """Makes classes that accept any arguments and have any members, whose value is their name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return object.__new__(cls)  # type: ignore[arg-type]  # a class as its own instance


class StandIn(ModuleType):
    """A module that has every name: a class if it is written as one, else another stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = (
            ClassStandIn(name, (), {})
            if name[0].isupper()
            else import_module(f"{self.__name__}.{name}")
        )
        setattr(self, name, child)
        return child

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.__name__.startswith("triton"):
            raise NotImplementedError(
                f"{self.__name__} was called, but this environment has no compiled kernels."
            )
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda decorated: decorated

    def __contains__(self, item: object) -> bool:
        return False  # torch finds no backend


class TritonStandIn(StandIn):
    """`triton`; SGLang calls two of its helpers during its import."""

    @staticmethod
    def cdiv(number: int, divisor: int) -> int:
        """The quotient, rounded up."""
        return -(number // -divisor)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        """The smallest power of two that is not below `number`."""
        return 1 << max(number - 1, 0).bit_length()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Handles `import` of the packages above and their submodules."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A stand-in's specification, or None where the name does not concern it."""
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


def allocate_host_memory(module: ModuleType) -> None:
    """Takes host memory as it is: without CUDA there is nobody to register it with.

    It holds the experts that `--enable-return-routed-experts` records.
    """

    def allocate(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def gate_shared_expert(module: ModuleType) -> None:
    """Adds Qwen2-MoE's shared expert, times the sigmoid of its gate, to the output in place."""

    def add(
        hidden_states: Any, gate_weight: Any, shared_output: Any, final_hidden_states: Any
    ) -> None:
        final_hidden_states += (hidden_states @ gate_weight).sigmoid().unsqueeze(-1) * shared_output

    module.fused_gate_sigmoid_mul_add = add  # type: ignore[attr-defined]


def leave_memory_unpinned(module: ModuleType) -> None:
    """Ignores `pin_memory` in the server's process, where torch refuses it without a GPU.

    SGLang's layers with LoRA adapters, and its backend torch_native, pass it to these functions.
    """
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return make(*arguments, **options)

        return call

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment, method-assign]


REPLACEMENTS: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": allocate_host_memory,
    "sglang.kernels.ops.elementwise.elementwise": gate_shared_expert,
    "sglang.srt.lora.layers": leave_memory_unpinned,
}
"""Modules of SGLang, and what is replaced in each as soon as it is imported."""


class ReplacingLoader(importlib.abc.Loader):
    """Runs a module as its own loader does, and then its entry of `REPLACEMENTS`."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The module that its own loader makes."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Fills it, and replaces what needs a GPU."""
        self._loader.exec_module(module)
        REPLACEMENTS[module.__name__](module)


class ReplacingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `REPLACEMENTS` where they are."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own specification with another loader, or None for all other modules."""
        spec = (
            importlib.machinery.PathFinder.find_spec(name, path) if name in REPLACEMENTS else None
        )
        if spec is not None and spec.loader is not None:
            spec.loader = ReplacingLoader(spec.loader)
        return spec


os.environ.setdefault(
    "SGLANG_USE_CPU_ENGINE", "1"
)  # SGLang asks for it, and this environment is for nothing else
sys.meta_path.insert(0, ReplacingFinder())
sys.meta_path.append(Finder())  # the last: a package that is really installed comes first
