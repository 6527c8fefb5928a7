"""The simulated device itself; `pytest --device simulated` runs this and the library's tests on
it."""

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction import LEVELS
from slime_tis.correction.api import AGGREGATIONS
from slime_tis.policy.step_sums import STALENESS, sums_by
from tests.devices import SIMULATED, SimulatedTensor


@pytest.fixture(autouse=True)
def device(request):
    if request.config.getoption("device") != SIMULATED:
        pytest.skip("tests/slow/test_programs.py starts it")


def test_the_simulated_device_refuses_what_a_gpu_refuses():
    there, here = torch.arange(3.0), torch.arange(3.0, device="cpu")
    assert isinstance(there, SimulatedTensor) and there.device.type == "simulated"
    assert isinstance(there[1:] * 2 + torch.tensor(1.0, device="cpu"), SimulatedTensor)
    assert (there + 1).tolist() == [1.0, 2.0, 3.0] and there.cpu().tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(
        RuntimeError, match=r"add.Tensor: expected all tensors to be on the same device"
    ):
        there + here
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([there, here])
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros((), device="cpu").add_(there.sum())
    with pytest.raises(TypeError, match="to numpy"):
        there.numpy()
    weight = there.clone().requires_grad_()
    (weight.square().sum()).backward()
    assert isinstance(weight.grad, SimulatedTensor) and weight.grad.tolist() == [0.0, 2.0, 4.0]
    waits = SimulatedTensor.waits
    here.to("simulated", non_blocking=True).sum().add_(1)
    assert SimulatedTensor.waits == waits
    torch.tensor([1.0], device="simulated")  # is built on the host, and its copy blocks
    assert SimulatedTensor.waits == waits + 1
    there.sum().item()
    assert SimulatedTensor.waits == waits + 2


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_correction_and_loss_leave_the_host_alone(level, aggregation):
    config = RolloutCorrectionConfig(
        use_tis=True,
        tis_level=level,
        use_rs=True,
        rs_level="geometric",
        rs_z_score=3.0,
        rs_veto_threshold=1e-4,
    )
    rollout = -torch.arange(1.0, 41.0) / 40
    train, mask = rollout + 0.1 * torch.sin(torch.arange(40.0)), torch.ones(40)
    waits = SimulatedTensor.waits
    found = correct(config, train, rollout, mask, lengths=[10, 0, 25, 5])
    found.mean(train, aggregation=aggregation)
    sums_by(STALENESS, train, rollout, mask, torch.arange(40, device=SIMULATED))
    assert SimulatedTensor.waits == waits
