"""The gated delta rule in chunks against the rule token by token, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime_tis.trainer.megatron.gated_delta_rule import CHUNK, gated_delta_rule

LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 7]
DECAYS = {"forgets little": -1e-6, "usual": -0.3, "forgets much": -30.0, "forgets all": -1e5}
"""Mean of log α."""


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Eq. 10 of https://arxiv.org/abs/2412.06464, as it is written."""
    identity = torch.eye(key.shape[-1], dtype=key.dtype)
    state = torch.zeros(*value.shape[:2], value.shape[-1], key.shape[-1], dtype=value.dtype)
    outputs = []
    for t in range(value.shape[-2]):
        k = key[:, :, t, :, None]
        v = value[:, :, t, :, None]
        alpha = log_decay[:, :, t].exp()[..., None, None]
        rate = beta[:, :, t][..., None, None]
        state = alpha * (state @ (identity - rate * (k @ k.mT))) + rate * (v @ k.mT)
        outputs.append(state @ query[:, :, t, :, None])
    return torch.stack(outputs, 2).squeeze(-1)


def make_inputs(length: int, mean_log_decay: float = -0.3, *, seed: int = 0) -> list[Tensor]:
    """Random inputs of two rows and three heads, d_k = 5 and d_v = 4, with gradients."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, 3, length, *shape, generator=generator, dtype=torch.float64)

    log_decay = mean_log_decay * F.softplus(random())
    inputs = [random(5), F.normalize(random(5), dim=-1), random(4), log_decay, random().sigmoid()]
    return [tensor.requires_grad_() for tensor in inputs]


def gradients(outputs: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a random linear function of the outputs."""
    generator = torch.Generator().manual_seed(1)
    factor = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)
    return torch.autograd.grad((outputs * factor).sum(), inputs)


@pytest.mark.parametrize("mean", DECAYS.values(), ids=list(DECAYS))
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_give_the_outputs_of_single_steps(length, mean):
    inputs = make_inputs(length, mean)
    torch.testing.assert_close(gated_delta_rule(*inputs), token_by_token(*inputs))


@pytest.mark.parametrize("mean", DECAYS.values(), ids=list(DECAYS))
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_give_the_gradients_of_single_steps(length, mean):
    inputs = make_inputs(length, mean)
    actual = gradients(gated_delta_rule(*inputs), inputs)
    expected = gradients(token_by_token(*inputs), inputs)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 1000])
def test_the_size_of_chunks_changes_only_rounding(chunk):
    inputs = make_inputs(37)
    torch.testing.assert_close(gated_delta_rule(*inputs, chunk=chunk), gated_delta_rule(*inputs))


def test_numerical_derivatives_equal_the_gradients():
    inputs = [tensor[:1, :1] for tensor in make_inputs(5)]
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, chunk=2), inputs)


def test_a_decay_of_zero_begins_a_new_sequence():
    inputs = make_inputs(9)
    with torch.no_grad():
        inputs[3][..., 4] = -torch.inf
    after = [tensor[:, :, 4:] for tensor in inputs]
    torch.testing.assert_close(gated_delta_rule(*inputs)[:, :, 4:], gated_delta_rule(*after))


def test_a_decay_of_zero_has_finite_gradients():
    inputs = make_inputs(9)
    with torch.no_grad():
        inputs[3][..., 4] = -torch.inf
    assert all(grad.isfinite().all() for grad in gradients(gated_delta_rule(*inputs), inputs))


def test_a_large_decay_costs_no_digits_of_later_ones():
    inputs = [tensor.detach() for tensor in make_inputs(CHUNK)]
    inputs[3][..., 5] = -1e6
    single = gated_delta_rule(*[tensor.float() for tensor in inputs])
    # A sum from the beginning of the chunk, near -1e6, has only one digit after the point.
    torch.testing.assert_close(single, token_by_token(*inputs).float(), rtol=1e-5, atol=1e-5)


def test_without_updates_the_output_is_zero():
    query, key, value, log_decay, beta = make_inputs(70)
    output = gated_delta_rule(query, key, value, log_decay, torch.zeros_like(beta))
    assert output.abs().max() == 0


def test_one_key_without_decay_remembers_the_last_value():
    query, _, value, log_decay, beta = make_inputs(70)
    key = torch.zeros_like(query)
    key[..., 0] = 1.0
    output = gated_delta_rule(key, key, value, torch.zeros_like(log_decay), torch.ones_like(beta))
    torch.testing.assert_close(output, value)


def test_later_tokens_change_no_output():
    inputs = make_inputs(70)
    beginning = [tensor[:, :, :40] for tensor in inputs]
    torch.testing.assert_close(gated_delta_rule(*inputs)[:, :, :40], gated_delta_rule(*beginning))


def test_bfloat16_is_computed_in_float32():
    inputs = [tensor.detach().bfloat16() for tensor in make_inputs(70)]
    wide = gated_delta_rule(*[tensor.float() for tensor in inputs])
    assert torch.equal(gated_delta_rule(*inputs), wide.bfloat16())
