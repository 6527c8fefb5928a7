r"""Lets megatron-core run on a machine without CUDA.

megatron-core 0.16.1 names the CUDA device literally in places that do not need CUDA (a loss
counter, a gradient norm, a checkpoint's `synchronize`), and calls collectives in ways that gloo
does not support. It also wraps some forty functions in `torch.compile` when it is imported. That
loads the compiler, 40 MiB, although the layers here call none of these functions.

Without a CUDA device, `install` adds an import hook that rewrites these places in the sources of
`megatron.core` during their import. Torch is not patched and no file is changed.

A CPU-only path is proposed for some of megatron-core
(https://github.com/NVIDIA/Megatron-LM/pull/6270); a release with that path makes this file
obsolete.
"""

import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

PACKAGE = "megatron.core"
CALL = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
REPLACEMENTS = (
    (r"""(["'])cuda\1""", r"\1cpu\1"),
    (r"""(["'])torch\.cuda\.(\w+Tensor)\1""", r"\1torch.\2\1"),
    (r"\btorch\.cuda\.current_device\(\)", "torch.get_default_device()"),
    (r"\btorch\.cuda\.(synchronize|empty_cache|manual_seed|Stream)" + CALL, "None"),
    # for recomputed activations, which also save the state of the CPU's generator
    (r"(?<!def )\b_[gs]et_cuda_rng_state" + CALL, "None"),
    (r"\bpin_memory=True\b", "pin_memory=False"),
    (r"\bjit_fuser = torch\.compile\b", "jit_fuser = noop_decorator"),
    (r"(?<!\btorch)\.cuda" + CALL, ""),  # tensor.cuda(...)
    # gloo gathers and scatters only tensors of equal sizes. Ranks that divide the matrices of an
    # expert receive different numbers of tokens, unless they also divide the sequence.
    (
        r"torch\.distributed\.all_gather\(output_tensor_list, input_, group=group\)",
        (
            "torch.distributed.all_to_all_single(output, torch.cat([input_] * world_size),"
            " output_split_sizes, [len(input_)] * world_size, group=group)"
        ),
    ),
    (
        r"torch\.distributed\.reduce_scatter\(output, input_tensor_list, group=group\)",
        (
            "received = torch.cat([output] * world_size);"
            " torch.distributed.all_to_all_single(received, input_.contiguous(), [len(output)] *"
            " world_size, input_split_sizes, group=group); torch.sum(received.unflatten(0,"
            " (world_size, -1)), 0, out=output)"
        ),
    ),
    (
        # Copies the numbers of tokens per rank to the host, on a separate stream. On a CPU they are
        # already on the host, but all_to_all_single only takes lists or arrays.
        r"(?s)(def _maybe_dtoh_and_synchronize"
        + CALL
        + r"[^:]*:\n).*?(        return tokens_per_expert\n)",
        r"""\1        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ('input_splits', 'output_splits', 'output_splits_tp'):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
\2""",
    ),
)

REPLACED_WORDS = (b"cuda", b"pin_memory", b"jit_fuser = ")
"""A file without these words has nothing to replace."""


def install() -> None:
    """Installs the import hook, which does nothing with CUDA. Repeated calls are safe."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules and not _has_cuda():
        raise RuntimeError(
            "megatron.core is already imported: import slime_tis.trainer.megatron before it"
        )
    sys.meta_path.insert(0, _Finder())


def rewrite(source: str) -> str:
    """Applies the replacements to a source file of megatron.core."""
    for pattern, replacement in REPLACEMENTS:
        source = re.sub(pattern, replacement, source)
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        data = self.get_data(path)
        if not any(word in data for word in REPLACED_WORDS):  # two thirds of the files
            return importlib.machinery.SourceFileLoader(fullname, path).get_code(fullname)
        # Without the cache: a .pyc file would hold the code before the rewriting.
        return compile(rewrite(data.decode()), path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or _has_cuda():
            return spec
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _has_cuda() -> bool:
    import torch  # late: no device is queried before megatron-core is imported

    return torch.cuda.is_available()
