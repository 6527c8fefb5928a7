"""The device of tensors: `pytest --device cuda`, or `--device simulated`, which needs no GPU.

Tensors that a test makes without a device are made on the CPU, so that they are equal on every
device, and moved. Tensors that the package makes without a device stay on the CPU, as for a user,
and then meet tensors of the other device.

`simulated` is an accelerator that computes on the CPU. Its tensors refuse the same operations as on
a GPU: operations with CPU tensors other than scalars, and `numpy()`. It also counts how often a GPU
would make the host wait.
"""

import sys
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.library import Library
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TESTS = str(Path(__file__).parent)
MAKERS = {
    *(torch.tensor, torch.as_tensor, torch.from_numpy, torch.arange, torch.linspace, torch.eye),
    *(
        torch.empty,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.rand,
        torch.randn,
        torch.randint,
        torch.randperm,
    ),
}
SIMULATED = "simulated"
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
"""Operations that move values between devices."""
WAITS = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default),
    *(aten.nonzero.default, aten.masked_select.default, aten._unique2.default),
}
"""Operations for which the host waits: it reads values, or the size of the result depends on
values."""
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Operations that accept indices on the CPU, for which the host waits as well."""


@contextmanager
def on_device(device):
    """Puts the tensors of tests on a device."""
    if device == SIMULATED:
        simulate()
    with nullcontext() if device == "cpu" else _TestsOn(device):
        yield


class _TestsOn(TorchFunctionMode):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in MAKERS and kwargs.get("device") is None and _called_by_a_test():
            gradient = kwargs.pop("requires_grad", False)
            return func(*args, **kwargs).to(self.device).requires_grad_(gradient)
        return func(*args, **kwargs)


def _called_by_a_test():
    return sys._getframe(2).f_code.co_filename.startswith(TESTS)


@cache
def simulate():
    """Makes `simulated` the name of a device."""
    _setup_privateuseone_for_python_backend(SIMULATED)
    made = Library("aten", "IMPL")  # its operations end with it
    # most others use the first two; arange resizes their result
    for name in (
        "empty.memory_format",
        "empty_strided",
        "arange",
        "arange.start",
        "arange.start_step",
    ):
        on_cpu = partial(getattr(aten, name.split(".")[0]), device="cpu")
        made.impl(name, partial(_made, on_cpu), "PrivateUse1")
    made.impl("_copy_from", _copy_from, "PrivateUse1")  # torch.tensor(…, device=…) calls it
    return made


def _made(on_cpu, *args, device=None, **kwargs):
    return SimulatedTensor(on_cpu(*args, **kwargs))


def _copy_from(values, target, non_blocking=False):
    SimulatedTensor.waits += not non_blocking
    target.inner.copy_(values)
    return target


class SimulatedTensor(Tensor):
    """A tensor on the CPU that claims another device."""

    inner: Tensor  # type: ignore[assignment]  # Tensor.inner is a method
    waits = 0
    """Number of times that a GPU would have made the host wait."""

    @staticmethod
    def __new__(cls, inner):
        found = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(SIMULATED, 0),
        )
        found.inner = inner
        return found

    def __init__(self, inner):
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    def __repr__(self, **_):
        return f"simulated({self.inner!r})"

    def tolist(self):
        SimulatedTensor.waits += 1
        return self.inner.tolist()

    def numpy(self, **_):
        raise TypeError(
            "can't convert a tensor of a simulated device to numpy; use Tensor.cpu() first"
        )


def dispatch(func, args, kwargs):
    """Runs an operation on the CPU, and sets the device of its results."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    simulated = {id(x.inner): x for x in tensors if isinstance(x, SimulatedTensor)}
    requested = kwargs.get("device")
    kwargs = {**kwargs, "device": torch.device("cpu")} if requested is not None else kwargs
    if simulated:
        _check(func, tensors, args)
    elsewhere = bool(simulated) if requested is None else torch.device(requested).type == SIMULATED
    if func is aten.copy_.default:
        elsewhere = isinstance(args[0], SimulatedTensor)
    SimulatedTensor.waits += func in COPIES and _waits(func, args, kwargs, to_device=elsewhere)
    inner = tree_map_only(SimulatedTensor, lambda x: x.inner, (args, kwargs))
    found = func(*inner[0], **inner[1])

    def wrapped(x):
        original = simulated.get(id(x))
        return original if original is not None else SimulatedTensor(x) if elsewhere else x

    if func is aten.copy_.default:
        return args[0]
    return tree_map_only(Tensor, wrapped, found)


def _waits(func, args, kwargs, *, to_device):
    """Whether a copy makes the host wait: only one to the device, or on it, can do without."""
    is_in_place = func is aten.copy_.default
    if isinstance(args[is_in_place], SimulatedTensor):
        return not to_device
    return to_device and not (
        kwargs.get("non_blocking") or (is_in_place and len(args) > 2 and args[2])
    )


def _check(func, tensors, args):
    """Refuses operations that a GPU refuses."""
    SimulatedTensor.waits += func in WAITS
    if func in COPIES:
        return
    if func in INDEXING and isinstance(args[0], SimulatedTensor):
        indices = [x for x in args[1] if x is not None and not isinstance(x, SimulatedTensor)]
        SimulatedTensor.waits += bool(indices)
        tensors = [x for x in tensors if not any(x is index for index in indices)]
    pointwise = torch.Tag.pointwise in func.tags
    is_written = (
        func._schema.arguments[0].alias_info is not None
        and func._schema.arguments[0].alias_info.is_write
    )
    for index, x in enumerate(tensors):
        scalar = pointwise and x.dim() == 0 and not (index == 0 and is_written)
        if not isinstance(x, SimulatedTensor) and not scalar:
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but one {tuple(x.shape)}"
                " is on the CPU"
            )
