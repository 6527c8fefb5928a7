"""The simulated device itself; `pytest --device simulated` runs this and the library's tests on it."""

import pytest
import torch

from tests.devices import SIMULATED, SimulatedTensor


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("device") != SIMULATED:
        pytest.skip("tests/slow/test_simulated_device.py starts it")


def test_the_simulated_device_refuses_what_a_gpu_refuses() -> None:
    there, here = torch.arange(3.0), torch.arange(3.0, device="cpu")
    assert isinstance(there, SimulatedTensor) and there.device.type == "simulated"
    assert isinstance(there[1:] * 2 + torch.tensor(1.0, device="cpu"), SimulatedTensor)
    assert (there + 1).tolist() == [1.0, 2.0, 3.0] and there.cpu().tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(RuntimeError, match=r"add.Tensor: expected all tensors to be on the same device"):
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
