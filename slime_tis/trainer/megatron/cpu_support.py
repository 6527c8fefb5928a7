"""Lets megatron-core run on a machine without CUDA.

megatron-core 0.16.1 names the CUDA device literally in places that do not need CUDA (a loss counter, a gradient norm,
a checkpoint's `synchronize`). Without a CUDA device, `install` adds an import hook that rewrites those literals in the
sources of `megatron.core` during their import. Torch is not patched and no file is changed.

Simpler ways fail:

* Options of megatron-core (`use_cpu_initialization`, the gloo backend) reach only some of these places. A CPU-only path
  is proposed for parts of it (https://github.com/NVIDIA/Megatron-LM/pull/6270); its release makes this file obsolete.
* Replacing `torch.cuda.current_device` and similar functions affects every other library of the process, and does not
  reach the literals: a checkpoint of the distributed optimizer under tensor parallelism fails.
* A `TorchFunctionMode` that moves "cuda" tensors to the CPU slows each torch function, and once aborted a process at
  its exit.

`tests/megatron/test_hf_parity.py` and `test_layouts.py` compare the rewritten code with transformers.
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
    # for recomputed activations, which also save the state of the CPU's generator
    "_get_cuda_rng_state": "None",
    "_set_cuda_rng_state": "None",
}

REPLACED_FUNCTIONS = {
    # token_dispatcher.py: copies the numbers of tokens per rank to the host, on a separate stream. On a CPU they are
    # already on the host, but all_to_all_single only takes lists or arrays.
    "_maybe_dtoh_and_synchronize": """
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ('input_splits', 'output_splits', 'output_splits_tp'):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert
    """,
}
"""New bodies of functions that only handle CUDA streams, by the function's name."""
MARKS = re.compile(rb"cuda|pin_memory|" + "|".join(REPLACED_FUNCTIONS).encode())
"""Every rewritten line matches. Two thirds of megatron-core's files have no such line."""


def install() -> None:
    """Installs the import hook, which does nothing with CUDA. Repeated calls are safe.

    Raises:
        RuntimeError: megatron.core is already imported, with its CUDA literals.
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
        if isinstance(node, ast.stmt):  # each visited node costs time at every start of a process
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
    """The name `a.b.c` of an expression, from its last call or index on."""
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
        # Without the cache: a .pyc file would hold the code before the rewriting.
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
    import torch  # late: no device is queried before megatron-core is imported

    return torch.cuda.is_available()
