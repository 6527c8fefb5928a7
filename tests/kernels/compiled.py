"""Compiles the kernels for a GPU that need not be there: `python tests/kernels/compiled.py`, without TRITON_INTERPRET.

Prints one line per kernel: its name, registers per thread, spilled bytes, loads of several values at a time.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from experimental import triton_kernels, triton_token_pass
from slime_tis import RolloutCorrectionConfig
from slime_tis.correction.layout import INPUTS, as_layout

HOPPER = GPUTarget("cuda", 90, 32)
CONFIGS = {
    "token": RolloutCorrectionConfig(use_tis=True, use_rs=True, rs_level="geometric", rs_veto_threshold=1e-4),
    "everything": RolloutCorrectionConfig(
        use_tis=True,
        tis_mode="mask",
        tis_upper_bound=1.37,
        use_rs=True,
        rs_level="geometric",
        rs_z_score=3.0,
        rs_veto_threshold=0.173,
        rs_veto_upper_threshold=4.19,
        rollout_rs="token_k1,token_k3,seq_sum_k2,seq_mean_k3,seq_max_k2",
        rollout_rs_threshold="0.61_1.93,0.0523,1.0,0.1,1.0",
        rs_second_moment_bound=0.0719,
    ),
}


class Recorder:
    """Takes the place of a kernel, and compiles it for what it is launched with."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **constants):
        names = self.kernel.arg_names
        values = dict(zip(names, args, strict=False)) | constants
        kinds = {name: mangle_type(value) for name, value in values.items() if name not in constants}
        signature = {name: kinds.get(name, "constexpr") for name in names}
        fixed = {name: values[name] for name in names if signature[name] == "constexpr"}
        sixteens = [
            name for name, kind in kinds.items() if kind[0] == "*" or (kind == "i32" and values[name] % 16 == 0)
        ]
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in sixteens}
        found = triton.compile(ASTSource(self.kernel, signature, fixed, aligned), target=HOPPER)
        print(self.kernel.__name__, *_usage(found.asm["cubin"]), found.asm["ptx"].count("ld.global.v"))


def _usage(cubin):
    """Registers and bytes of local memory, by the assembler's own tool beside triton."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    return [int(number) for name in ("REG", "LOCAL") for number in re.findall(rf"\b{name}:(\d+)", text)]


def main():
    for name in ("token_pass_kernel", "table_kernel"):
        setattr(triton_token_pass, name, Recorder(getattr(triton_kernels, name)))
    for name, dtype in (("token", torch.float32), ("everything", torch.bfloat16), ("everything", torch.float64)):
        print(f"# {name}, {dtype}")
        lengths = [4096, 1016, 8]
        tokens = [torch.zeros(sum(lengths), dtype=kind) for kind in (dtype, dtype, torch.bool)]
        for chunk in as_layout(dict(zip(INPUTS, tokens, strict=False)), lengths).chunks():
            triton_token_pass.token_pass(CONFIGS[name], chunk)


if __name__ == "__main__":
    main()
