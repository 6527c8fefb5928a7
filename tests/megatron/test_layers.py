"""RMSNorm and SwiGLU against torch: values to the bit, gradients, and saved tensors."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from slime_tis.trainer.megatron.layers import TorchRMSNorm, swiglu, with_recomputed_input

TOKENS, HIDDEN = 5, 48


def norm(dtype):
    layer = TorchRMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), HIDDEN, 1e-6)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(HIDDEN).exp())
    return layer


def plain_swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gradients(function, x, grad, *more):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x), [x, *more], grad)


def saved(function, x):
    """Elements that are saved for the backward pass, the input and parameters among them."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = (
            tensor.untyped_storage().nbytes() // tensor.itemsize
        )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(x.detach().requires_grad_())
    assert output.requires_grad
    return sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_norm_equals_torch(dtype, scale):
    torch.manual_seed(0)
    layer, x = norm(dtype), (torch.randn(TOKENS, 1, HIDDEN) * scale).to(dtype)
    grad = torch.randn(TOKENS, 1, HIDDEN).to(dtype)

    def reference(x):
        return F.rms_norm(x, (HIDDEN,), layer.weight, layer.eps)

    assert torch.equal(layer(x), reference(x))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    expected = gradients(reference, x, grad, layer.weight)
    for gradient, other in zip(gradients(layer, x, grad, layer.weight), expected, strict=True):
        assert gradient.dtype == dtype and gradient.shape == other.shape
        difference = (gradient.double() - other.double()).norm() / other.double().norm()
        assert difference < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_equals_torch(dtype):
    torch.manual_seed(1)
    x, grad = (
        (torch.randn(TOKENS, 1, 2 * HIDDEN) * 3).to(dtype),
        torch.randn(TOKENS, 1, HIDDEN).to(dtype),
    )
    assert torch.equal(swiglu(x), plain_swiglu(x))
    torch.testing.assert_close(*gradients(swiglu, x, grad), *gradients(plain_swiglu, x, grad))


def test_only_inputs_are_saved_for_the_backward_pass():
    x = torch.randn(TOKENS, HIDDEN)
    assert (
        saved(norm(torch.float32), x) == TOKENS * HIDDEN + TOKENS + HIDDEN
    )  # x, a number per token, the weight
    assert saved(swiglu, x) == TOKENS * HIDDEN
    assert saved(plain_swiglu, x) == TOKENS * HIDDEN * 3 // 2  # for comparison


def test_a_recomputed_input_gives_the_same_gradients():
    torch.manual_seed(3)
    weight = torch.randn(HIDDEN, HIDDEN, requires_grad=True)
    x = torch.randn(TOKENS, 2 * HIDDEN)
    grad = torch.randn(TOKENS, HIDDEN)

    def layer(inputs):
        return inputs @ weight

    def recomputing(x):
        return with_recomputed_input(layer, swiglu, x)

    def plain(x):
        return layer(swiglu(x))

    expected = gradients(plain, x, grad, weight)
    for gradient, reference in zip(gradients(recomputing, x, grad, weight), expected, strict=True):
        assert torch.equal(gradient, reference)


def test_the_input_of_a_layer_is_recomputed():
    weight = torch.randn(HIDDEN, HIDDEN, requires_grad=True)
    x = torch.randn(TOKENS, 2 * HIDDEN, requires_grad=True)
    has_gradient = []
    references = []

    def counted(x):
        inputs = swiglu(x)
        has_gradient.append(torch.is_grad_enabled())
        references.append(weakref.ref(inputs))
        return inputs

    output = with_recomputed_input(lambda inputs: inputs @ weight, counted, x)
    assert references[0]() is None  # nothing refers to the layer's input
    output.sum().backward()
    assert has_gradient == [True, False]
