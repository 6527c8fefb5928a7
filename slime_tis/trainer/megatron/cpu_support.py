"""Lets megatron-core run on a machine without CUDA.

megatron-core 0.16.1 names the CUDA device literally in places that have nothing to do with CUDA (a loss counter,
a gradient norm, a checkpoint's `synchronize`). Where no CUDA device exists, `install` adds an import hook that
rewrites those literals in the sources of `megatron.core` while they are imported. Nothing in torch is patched, no
file is changed, and where CUDA exists the sources are imported as they are.

Why not less than that:

* Options of megatron-core (`use_cpu_initialization`, the gloo backend) reach only some of these places; a CPU-only path
  is proposed for parts of it (https://github.com/NVIDIA/Megatron-LM/pull/6270). Once it is released, this file can go.
* Replacing `torch.cuda.current_device` and the like in torch changes them for every other library of the process, and
  does not reach the literals: a checkpoint of the distributed optimizer under tensor parallelism fails.
* A `TorchFunctionMode` that moves "cuda" tensors to the CPU costs time at each torch function, and once ended a process
  with an abort at its exit.

`tests/megatron/test_hf_parity.py` and `test_layouts.py` hold what runs through the hook to transformers' numbers.
"""

import ast
import importlib.abc
import importlib.machinery
import re
import sys
import textwrap
from bisect import bisect_left
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "megatron.core"
LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
REPLACED_CALLS = {
    "torch.cuda.current_device": "torch.device('cpu')",
    "torch.cuda.synchronize": "None",
    "torch.cuda.empty_cache": "None",
    "torch.cuda.manual_seed": "None",
    "torch.cuda.Stream": "None",
    # of recomputed activations: the state of the CPU's generator is saved beside it
    "_get_cuda_rng_state": "None",
    "_set_cuda_rng_state": "None",
}

REPLACED_FUNCTIONS = {
    # token_dispatcher.py: copies the numbers of tokens per rank to the host, on a stream of its own. On a CPU they are
    # there, but all_to_all_single takes them as lists or arrays alone.
    "_maybe_dtoh_and_synchronize": """
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ('input_splits', 'output_splits', 'output_splits_tp'):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert
    """,
}
"""Bodies of functions that are about CUDA streams throughout, by the function's name."""
MARKS = re.compile(rb"cuda|pin_memory|" + "|".join(REPLACED_FUNCTIONS).encode())
"""What a line that is rewritten contains. Two thirds of megatron-core's files have no such line."""


def install() -> None:
    """Installs the import hook, which does nothing where there is CUDA. Safe to call again.

    Raises:
        RuntimeError: megatron.core was imported before, with its CUDA literals in place.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules and not _has_cuda():
        raise RuntimeError("megatron.core is already imported: import slime_tis.trainer.megatron before it")
    sys.meta_path.insert(0, _Finder())


def rewrite(source: str | bytes, path: str) -> ast.Module:
    """Parses a megatron.core source file and returns its tree with the CUDA literals replaced."""
    data = source.encode() if isinstance(source, str) else source
    lines = [number for number, line in enumerate(data.split(b"\n"), start=1) if MARKS.search(line)]
    tree: ast.Module = _CudaToCpu(lines).visit(ast.parse(source, path))
    return tree


class _CudaToCpu(ast.NodeTransformer):
    def __init__(self, lines: Sequence[int]) -> None:
        self.lines = lines

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt):  # each node that is looked at costs time at every start of a process
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            index = bisect_left(self.lines, first)
            if index == len(self.lines) or self.lines[index] > (node.end_lineno or node.lineno):
                return node
        return super().visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and node.value in LITERALS:
            return ast.copy_location(ast.Constant(LITERALS[node.value]), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        if node.arg == "pin_memory":
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if node.name in REPLACED_FUNCTIONS:
            node.body = ast.parse(textwrap.dedent(REPLACED_FUNCTIONS[node.name])).body
            return node
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = _dotted(node.func)
        if name in REPLACED_CALLS:
            replacement = ast.parse(REPLACED_CALLS[name], mode="eval").body
            return ast.copy_location(replacement, node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda" and name != "torch.cuda":
            return node.func.value  # tensor.cuda(...) → tensor
        return node


def _dotted(node: ast.expr) -> str:
    """The name `a.b.c` of an expression; of another expression what follows its last call or index."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(  # type: ignore[override]  # typeshed has parameters that importlib does not pass
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> CodeType:
        return compile(rewrite(data, str(path)), path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        data = self.get_data(path)
        if not MARKS.search(data):
            return importlib.machinery.SourceFileLoader(fullname, path).get_code(fullname)
        # Straight from the source: a cached .pyc would hold the code of the file before it is rewritten.
        return self.source_to_code(data, path)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if not _has_cuda() and spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _has_cuda() -> bool:
    import torch  # late: nothing is asked of the device until megatron-core is imported

    return torch.cuda.is_available()
