"""The source rewriting that lets megatron-core run without CUDA."""

import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy
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
def test_rewrites_cuda_literals_and_nothing_else(source: str, expected: str) -> None:
    assert rewrite(source) == expected


def test_a_function_about_streams_gives_numbers_of_tokens_as_arrays() -> None:
    source = """
def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
    with torch.cuda.stream(self.cuda_dtoh_stream):
        self.input_splits = maybe_move_tensor_to_cpu(self.input_splits, as_numpy=True)
        return tokens_per_expert
"""
    names: dict[str, Any] = {"torch": torch}
    exec(rewrite(source), names)
    splits = {"input_splits": torch.tensor([3, 1]), "output_splits": torch.tensor([2, 2]), "output_splits_tp": None}
    tokens = torch.tensor([1, 2])
    dispatcher = SimpleNamespace(drop_and_pad=False, cuda_dtoh_point="here", **splits)
    assert names["_maybe_dtoh_and_synchronize"](dispatcher, "elsewhere", tokens) is tokens
    assert dispatcher.input_splits is splits["input_splits"]
    assert names["_maybe_dtoh_and_synchronize"](dispatcher, "here", tokens) is tokens
    assert (dispatcher.input_splits.tolist(), dispatcher.output_splits.tolist()) == ([3, 1], [2, 2])
    assert isinstance(dispatcher.input_splits, numpy.ndarray) and dispatcher.output_splits_tp is None


def test_options_are_read_without_megatron_core() -> None:
    code = "import sys, slime_tis.trainer.options.megatron; sys.exit('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is rewritten")
def test_importing_megatron_core_first_is_refused_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = [finder for finder in sys.meta_path if finder.__module__ != rewrite.__module__]
    monkeypatch.setattr(sys, "meta_path", finders)
    with pytest.raises(RuntimeError, match="already imported"):
        importlib.reload(slime_tis.trainer.megatron)
