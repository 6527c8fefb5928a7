"""The source rewriting that lets megatron-core run without CUDA."""

import ast
import subprocess
import sys

import pytest

from slime_tis.megatron.cpu_support import rewrite

REWRITTEN = [
    ("x = torch.zeros(1, device='cuda')", "x = torch.zeros(1, device='cpu')"),
    ("a = t.type() == 'torch.cuda.FloatTensor'", "a = t.type() == 'torch.FloatTensor'"),
    ("d = torch.cuda.current_device()", "d = torch.device('cpu')"),
    ("torch.cuda.synchronize()", "None"),
    ("y = x.cuda(non_blocking=True) + 1", "y = x + 1"),
    ("z = torch.empty(1, pin_memory=True)", "z = torch.empty(1, pin_memory=False)"),
    ("ok = torch.cuda.is_available() and 'cudagraph'", "ok = torch.cuda.is_available() and 'cudagraph'"),
]


@pytest.mark.parametrize(("source", "expected"), REWRITTEN)
def test_rewrites_cuda_literals_and_nothing_else(source: str, expected: str) -> None:
    assert ast.unparse(rewrite(source, "<test>")) == expected


def test_line_numbers_stay() -> None:
    tree = rewrite("a = 1\nb = x.cuda()\n", "<test>")
    assert tree.body[1].lineno == 2


def test_options_are_read_without_megatron_core() -> None:
    code = "import sys, slime_tis.megatron.config; sys.exit('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_importing_megatron_core_first_is_refused_where_there_is_no_cuda() -> None:
    code = "import torch, warnings; warnings.simplefilter('ignore'); import megatron.core\nimport slime_tis.megatron"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    import torch

    if torch.cuda.is_available():
        assert result.returncode == 0
    else:
        assert "import slime_tis.megatron before it" in result.stderr
