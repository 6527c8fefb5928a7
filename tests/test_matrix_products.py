"""Products by oneDNN and by MKL against float64, on any processor."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slime_tis.trainer import matrix_products
from slime_tis.trainer.matrix_products import (
    linear,
    multiply,
    prefers_onednn,
    trained_linear,
    use_fast_linear_layers,
)


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"], autouse=True)
def library(request, monkeypatch):
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN")
    monkeypatch.setattr(matrix_products, "prefers_onednn", lambda: request.param)
    monkeypatch.setattr(matrix_products, "MIN_MULTIPLICATIONS", 0)


SHAPES = {
    "rows": (5, 7),
    "one row": (1, 7),
    "no row": (0, 7),
    "batch": (2, 3, 7),
    "empty batch": (0, 3, 7),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_linear_layer_equals_float64(shape):
    x = torch.randn(shape)
    weight = torch.randn(4, 7)
    bias = torch.randn(4)
    expected = x.double() @ weight.t().double() + bias.double()
    torch.testing.assert_close(linear(x, weight, bias), expected.float(), atol=1e-5, rtol=1e-5)


def test_transposed_operands_are_multiplied():
    left = torch.randn(6, 5).t()
    right = torch.randn(4, 6).t()
    expected = left.double() @ right.double()
    torch.testing.assert_close(multiply(left, right), expected.float(), atol=1e-5, rtol=1e-5)


def test_gradients_equal_float64():
    x = torch.randn(3, 2, 7, requires_grad=True)
    weight = torch.randn(4, 7, requires_grad=True)
    grad = torch.randn(3, 2, 4)
    trained_linear(x, weight).backward(grad)
    wide_x = x.detach().double().requires_grad_()
    wide_weight = weight.detach().double().requires_grad_()
    (wide_x @ wide_weight.t()).backward(grad.double())
    torch.testing.assert_close(x.grad, wide_x.grad.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weight.grad, wide_weight.grad.float(), atol=1e-5, rtol=1e-5)


def test_a_frozen_weight_keeps_no_input():
    x = torch.randn(3, 7, requires_grad=True)
    output = trained_linear(x, torch.randn(4, 7))
    assert output.grad_fn.saved_tensors[0] is None


def test_infinity_does_not_become_nan():
    x = torch.tensor([[torch.inf, 1.0]])
    weight = torch.tensor([[2.0, 1.0], [-1.0, 1.0]])
    assert linear(x, weight).tolist() == [[torch.inf, -torch.inf]]


def test_bfloat16_keeps_its_type():
    x = torch.randn(3, 8).bfloat16()
    weight = torch.randn(4, 8).bfloat16()
    assert linear(x, weight).dtype == torch.bfloat16


def test_replaced_layers_have_the_parameters_of_the_model():
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))
    parameters = list(model.parameters())
    use_fast_linear_layers(model)
    for replaced, original in zip(model.parameters(), parameters, strict=True):
        assert replaced is original


def test_replaced_layers_take_a_slice_of_every_sequence():
    model = nn.Sequential(nn.Linear(7, 5))
    states = torch.randn(4, 3, 7)
    expected = model(states)[:, -1:]
    use_fast_linear_layers(model)
    torch.testing.assert_close(model(states[:, -1:]), expected, atol=1e-6, rtol=1e-6)


def test_replaced_layers_have_the_gradients_of_the_model():
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))
    states = torch.randn(4, 2, 7)
    model(states).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    use_fast_linear_layers(model)
    model.zero_grad()
    model(states).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-5)


def test_the_choice_depends_on_the_processor(monkeypatch, tmp_path):
    answers = {}
    for vendor in ("GenuineIntel", "AuthenticAMD"):
        path = tmp_path / vendor
        path.write_text(f"vendor_id\t: {vendor}\n")
        monkeypatch.setattr(matrix_products, "CPU_INFO", path)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        answers[vendor] = prefers_onednn.__wrapped__()
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    assert answers == {"GenuineIntel": False, "AuthenticAMD": has_both}


def test_a_torch_without_the_operation_uses_mkl(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert not prefers_onednn.__wrapped__()


MANY_SHAPES = """
import ctypes
import torch
from slime_tis.trainer import matrix_products

matrix_products.prefers_onednn = lambda: True
weight = torch.randn(512, 512)
resident = []
for rows in range(1, 513):
    matrix_products.linear(torch.randn(rows, 512), weight)
    if rows % 256 == 0:
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(open("/proc/self/statm").read().split()[1])
        resident.append(pages * 4096 / 2**20)
print(resident[1] - resident[0])
"""


def test_the_users_cache_size_is_kept(monkeypatch):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    matrix_products._limit_caches.__wrapped__()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"


def test_code_for_many_shapes_is_not_kept():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN")
    program = [sys.executable, "-c", MANY_SHAPES]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 30
