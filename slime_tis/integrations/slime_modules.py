"""The parts of slime that custom functions import, for where slime is not installed.

slime's example `mis.py` imports two helpers from `slime.backends.megatron_utils.cp_utils`. A finder at the very end of
`sys.meta_path` provides them: an installed slime is found before it, and nothing else is changed.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from slime_tis.correction import response_slices
from slime_tis.integrations.slime import ContextParallel, context_parallel


class _SumOverRanks(torch.autograd.Function):
    """Sum over the context-parallel group, of values and of gradients."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, place: ContextParallel) -> Tensor:
        context.place = place
        return place.ranks.over_context(tensor.clone())

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        place: ContextParallel = context.place
        return place.ranks.over_context(gradients[0].clone()), None


Values = TypeVar("Values", Tensor, list[float])


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """The whole response from the slices of all context-parallel ranks, the same on each.

    Every rank puts its tokens at their places among zeros, and a sum over the group joins them. The gradient of a
    token is the sum of its gradients on all ranks.

    Args:
        tensor: [L, …], this rank's tokens of the response.
        total_length: Tokens of prompt and response.
        response_length: Tokens of the response.

    Returns:
        [response_length, …]; the tensor itself without context parallelism.
    """
    place = context_parallel({})
    if place.size == 1:
        return tensor
    scattered = place.slices([total_length], [response_length], None).scatter(tensor)
    gathered: Tensor = _SumOverRanks.apply(scattered, place)  # type: ignore[no-untyped-call]  # torch's
    return gathered


def slice_log_prob_with_cp(log_prob: Values, total_length: int, response_length: int) -> Values:
    """This context-parallel rank's tokens of a whole response.

    Args:
        log_prob: Values of all tokens of the response, as a tensor [response_length, …] or a list.
        total_length: Tokens of prompt and response.
        response_length: Tokens of the response.

    Returns:
        What was given, without the tokens of other ranks.

    Raises:
        ValueError: if there is not one value per token of the response.
    """
    if len(log_prob) != response_length:
        raise ValueError(
            f"log_prob has {len(log_prob)} values but response_length is {response_length}; pass the whole response."
        )
    place = context_parallel({})
    if place.size == 1:
        return log_prob
    slices = response_slices([total_length], [response_length], place.rank, place.size)
    if isinstance(log_prob, Tensor):
        return slices.slice_flat(log_prob)
    gap, first, middle, second, _ = slices.pieces
    start = gap + first + middle
    return log_prob[gap : gap + first] + log_prob[start : start + second]


MODULES: dict[str, dict[str, Callable[..., Any]]] = {
    "slime": {},
    "slime.backends": {},
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.cp_utils": {
        "all_gather_with_cp": all_gather_with_cp,
        "slice_log_prob_with_cp": slice_log_prob_with_cp,
    },
}
"""Module of slime → what this program has of it."""


class Finder(MetaPathFinder, Loader):
    """Makes the modules of `MODULES`, all of them packages so that their submodules are asked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module of `MODULES`, None for every other name."""
        return ModuleSpec(fullname, self, is_package=True) if fullname in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        """Fills a module with what `MODULES` has for it."""
        vars(module).update(MODULES[module.__name__])


_FINDER = Finder()


def provide() -> None:
    """Makes `import slime…` find `MODULES` where nothing else provides slime; again makes no difference."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def described(module: str) -> str:
    """What can be imported from a module that is here, or else which modules are here, for error messages."""
    if names := MODULES.get(module):
        return f"{', '.join(sorted(names))} of {module}"
    return ", ".join(sorted(name for name, names in MODULES.items() if names))
