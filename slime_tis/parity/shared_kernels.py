"""The operations that both engines share under --true-on-policy."""

from functools import cache

from slime_tis.families import FAMILIES
from slime_tis.hf_directory import moe_sizes
from slime_tis.parity.executions import Side
from slime_tis.parity.transformers_executions import DTYPES
from slime_tis.trainer.invariant.self_check import Kernels, choose_kernels
from slime_tis.trainer.megatron.architecture import invariant_shapes, read_hf_config


def kernels_of(side: Side, device_type: str) -> Kernels | None:
    """Returns the operations of a side; None without --true-on-policy.

    Args:
        side: The side.
        device_type: Where its engine computes: cpu or cuda.

    Raises:
        ValueError: The engine is on a GPU, the model is a mixture of experts, or an operation fails
            its test on this machine.
    """
    if not side.true_on_policy:
        return None
    if device_type != "cpu":
        raise ValueError(
            f"--true-on-policy has operations for a CPU, but the execution {side.execution} uses a"
            " GPU; hide it with CUDA_VISIBLE_DEVICES='' and remove --device, or remove the flag."
        )
    return _kernels(side.checkpoint, side.precision)


@cache
def _kernels(checkpoint: str, precision: str) -> Kernels:
    """Cached, because the test of the operations takes seconds and both sides need it."""
    hf = read_hf_config(checkpoint)
    architecture = hf.architectures[0]
    if FAMILIES[architecture].experts is None and not FAMILIES[architecture].true_on_policy:
        raise ValueError(
            f"--true-on-policy does not work with {architecture}, whose operations were not"
            " compared; remove the flag."
        )
    if moe_sizes(hf) is not None:
        raise ValueError(
            "--true-on-policy does not work with a mixture of experts; remove the flag."
        )
    return choose_kernels(invariant_shapes(hf, 1), DTYPES[precision])
