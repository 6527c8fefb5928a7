"""The source rewriting that lets megatron-core run without CUDA."""

import importlib
import subprocess
import sys

import pytest
import torch

import slime_tis.trainer.megatron.parallel  # and with it megatron.core
from slime_tis.trainer.megatron.cpu_support import rewrite

REWRITTEN = [
    ("x = torch.zeros(1, device='cuda')", "x = torch.zeros(1, device='cpu')"),
    ('a = t.type() == "torch.cuda.FloatTensor"', 'a = t.type() == "torch.FloatTensor"'),
    ("d = torch.cuda.current_device()", "d = torch.get_default_device()"),
    ("torch.cuda.synchronize()", "None"),
    ("y = x.cuda(non_blocking=f(g(1))) + 1", "y = x + 1"),
    ("z = torch.empty(1, pin_memory=True)", "z = torch.empty(1, pin_memory=False)"),
    ("stream = torch.cuda.Stream()", "stream = None"),
    ("ok = torch.cuda.is_available() and 'cudagraph'", "ok = torch.cuda.is_available() and 'cudagraph'"),
]


@pytest.mark.parametrize(("source", "expected"), REWRITTEN, ids=[source for source, _ in REWRITTEN])
def test_rewrites_cuda_literals_and_nothing_else(source, expected):
    assert rewrite(source) == expected


def test_options_are_read_without_megatron_core():
    code = "import sys, slime_tis.trainer.options.megatron; sys.exit('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is rewritten")
def test_importing_megatron_core_first_is_refused_without_cuda(monkeypatch):
    finders = [finder for finder in sys.meta_path if finder.__module__ != rewrite.__module__]
    monkeypatch.setattr(sys, "meta_path", finders)
    with pytest.raises(RuntimeError, match="already imported"):
        importlib.reload(slime_tis.trainer.megatron)
