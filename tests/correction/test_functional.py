"""The traced function against `correct`, for every preset and every floating-point dtype, and what
it refuses."""

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct, functional
from slime_tis.correction import PRESETS
from tests.correction.strategies import policy_batch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NAMES = ("train_log_probs", "rollout_log_probs", "current_log_probs", "advantages")


def preset(name):
    """The preset's configuration, with the policy that needs no look at the values."""
    return RolloutCorrectionConfig.preset(name, nonfinite_policy="reject")


def rounded(dtype):
    """The batch in a dtype, without the values that overflow in it."""
    batch = policy_batch()
    return {name: values.to(dtype) if name in NAMES else values for name, values in batch.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in PRESETS if not preset(name).batch_options])
def test_every_preset_equals_correct(name, dtype):
    batch = rounded(dtype)
    expected = correct(preset(name), **batch)
    found = functional.correct(preset(name), **batch)
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(found.mask, expected.mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_traced_program_computes_in_float32_too(dtype):
    """The tracer does not know the dtype of the tensors that its program is run with."""

    def weights_and_mask(train, rollout, mask):
        return tuple(functional.correct(preset("decoupled_token_is"), train, rollout, mask))

    traced = torch.fx.symbolic_trace(weights_and_mask)
    train, rollout, mask, *_ = rounded(dtype).values()
    expected = correct(preset("decoupled_token_is"), train, rollout, mask)
    found_weights, found_mask = traced(train, rollout, mask)
    torch.testing.assert_close(found_weights, expected.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(found_mask, expected.mask)


@pytest.mark.parametrize("name", [name for name in PRESETS if preset(name).batch_options])
def test_a_preset_on_the_batch_is_refused(name):
    with pytest.raises(
        ValueError, match=r"needs the values of the batch; call slime_tis.correct instead"
    ):
        functional.correct(preset(name), **policy_batch())


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", [correct, functional.correct], ids=["correct", "functional"])
def test_float8_is_refused_by_name(function, name, dtype):
    config = RolloutCorrectionConfig.preset("dppo_tv", use_tis=True)
    batch = rounded(torch.float32)
    batch[name] = batch[name].nan_to_num(0.0, 0.0, 0.0).clamp(-50, 50).to(dtype)
    with pytest.raises(
        ValueError, match=f"^{name} has dtype {dtype}, which has too few digits; pass float32"
    ):
        function(config, **batch)


@pytest.mark.parametrize("in_list", [True, False], ids=["list", "padded"])
def test_meta_tensors_are_refused(in_list):
    tensor = torch.zeros(2, 3, device="meta")
    inputs = [list(tensor)] * 3 if in_list else [tensor] * 3
    with pytest.raises(
        ValueError,
        match=r"^train_log_probs.* is on the meta device, which has no values; pass it on",
    ):
        correct(RolloutCorrectionConfig(use_tis=True), *inputs)


def test_functional_gives_the_shapes_of_meta_tensors():
    tensor = torch.zeros(2, 3, device="meta")
    found = functional.correct(RolloutCorrectionConfig(use_tis=True), tensor, tensor, tensor)
    assert found.weights.device.type == "meta"
    assert found.weights.shape == found.mask.shape == (2, 3)
