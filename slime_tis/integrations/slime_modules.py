"""The parts of slime that user functions import.

A finder at the start of `sys.meta_path` provides them.
"""

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from slime_tis.correction import context_parallel_slices
from slime_tis.integrations.slime import context_parallel

Values = TypeVar("Values", Tensor, list[float])


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Returns the complete response [response_length, …] from the ranks' slices [L, …].

    Every context-parallel rank writes its tokens into zeros, and a sum over the group joins them. A
    token's gradient is the sum of its gradients on all ranks.
    """
    context = context_parallel({})
    if context.size == 1:
        return tensor
    scattered = context.slices([total_length], [response_length], None).scatter(tensor)
    gathered: Tensor = all_reduce(scattered, group=context.group or torch.distributed.group.WORLD)
    return gathered


def slice_log_prob_with_cp(log_prob: Values, total_length: int, response_length: int) -> Values:
    """Returns this context-parallel rank's tokens of a complete response.

    Raises:
        ValueError: `log_prob` has another length.
    """
    if len(log_prob) != response_length:
        raise ValueError(
            f"log_prob has {len(log_prob)} values but response_length is {response_length}; pass"
            " the complete response."
        )
    context = context_parallel({})
    if context.size == 1:
        return log_prob
    # A rank has two pieces of a sequence, one from each half, so that all ranks have equal work.
    first, second = context_parallel_slices(
        total_length, response_length, context.rank, context.size
    )
    if isinstance(log_prob, Tensor):
        return torch.cat([log_prob[first], log_prob[second]])
    return log_prob[first] + log_prob[second]


_FILTERS = "slime_tis.trainer.rollout.filter_hub"
_GRADERS = "slime_tis.trainer.rewards.builtin_rewards"
_CLIENT = "slime_tis.trainer.agents.slime_client"
MODULES: dict[str, tuple[str, ...]] = {
    "slime.backends.megatron_utils.cp_utils": (
        __name__,
        "all_gather_with_cp",
        "slice_log_prob_with_cp",
    ),
    "slime.backends.megatron_utils.loss": (
        "slime_tis.trainer.megatron.log_probs",
        "get_log_probs_and_entropy",
    ),
    "slime.rollout.base_types": (
        "slime_tis.trainer.agents.rollout_function",
        "RolloutFnTrainOutput",
    ),
    "slime.rollout.data_source": ("slime_tis.trainer.data.data_source", "DataSource"),
    "slime.rollout.filter_hub.base_types": (_FILTERS, "DynamicFilterOutput"),
    "slime.rollout.filter_hub.dynamic_sampling_filters": (
        _FILTERS,
        "check_reward_nonzero_std",
        "check_reward_nonzero_std_with_fallback",
    ),
    "slime.rollout.rm_hub": (_GRADERS, "async_rm", "batched_async_rm", "grade_answer_verl"),
    "slime.rollout.rm_hub.math_dapo_utils": (_GRADERS, "compute_score"),
    "slime.rollout.rm_hub.math_utils": (_GRADERS, "extract_answer", "grade_answer_verl"),
    "slime.rollout.sglang_rollout": (_CLIENT, "GenerateState"),
    "slime.utils.http_utils": (_CLIENT, "get", "post"),
    "slime.utils.misc": ("slime_tis.user_functions", "load_function"),
    "slime.utils.types": ("slime_tis.trainer.data.sample", "Sample"),
}
"""Module of slime → the module that defines its names here, and the names."""

_PACKAGES = set()
"""Packages of the modules: slime, slime.backends, …"""
for _name in MODULES:
    while "." in _name:
        _name = _name.rpartition(".")[0]
        _PACKAGES.add(_name)


class Finder(MetaPathFinder, Loader):
    """Provides `MODULES`; an installed slime provides its other modules and names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module or package of `MODULES`; None for every other name."""
        if fullname not in MODULES and fullname not in _PACKAGES:
            return None
        # Not importlib.util.find_spec, which would ask this finder again.
        installed = PathFinder.find_spec(fullname, path)
        if fullname not in MODULES and installed is not None:
            return installed
        # A package even if it has no submodules here: an installed slime may have some.
        spec = ModuleSpec(fullname, self, is_package=True)
        if installed is not None and installed.submodule_search_locations is not None:
            spec.submodule_search_locations = list(installed.submodule_search_locations)
        spec.loader_state = installed
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Fills a module with its names of `MODULES`."""
        assert module.__spec__ is not None
        installed: ModuleSpec | None = module.__spec__.loader_state
        source, *names = MODULES.get(module.__name__, ("",))
        for name in names:
            setattr(module, name, getattr(import_module(source), name))
        if installed is None or installed.loader is None:
            return
        execute = installed.loader.exec_module

        # Executed when a name is first needed: slime's modules import ray and sglang.
        @cache
        def original() -> ModuleType:
            theirs = module_from_spec(installed)
            execute(theirs)
            return theirs

        def __getattr__(name: str) -> Any:
            """Returns a name that only the installed module has."""
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(original(), name)

        vars(module)["__getattr__"] = __getattr__


_FINDER = Finder()


def provide() -> None:
    """Makes `import slime…` find `MODULES`, also if slime is installed.

    An installed slime would send requests to servers that this program does not have.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def described(module: str) -> str:
    """Returns the available names of a module, or the available modules, for error messages."""
    if module in MODULES:
        return f"{', '.join(sorted(MODULES[module][1:]))} of {module}"
    return ", ".join(sorted(MODULES))
