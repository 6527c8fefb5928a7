"""verl's `rollout_corr_helper.py`, run as it is published, without what else verl depends on.

The file needs three small functions of `verl.utils.torch_functional`, which are taken from verl's
own source, and three names for its type hints and its return value, which are replaced by empty
ones.
"""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FUNCTIONS = ("masked_sum", "masked_mean", "distributed_masked_mean")


def load_verl_helper(site_packages: Path) -> ModuleType:
    """Returns `verl.trainer.ppo.rollout_corr_helper` of the verl in `site_packages`."""
    root = site_packages / "verl"
    _register(
        "verl",
        "verl.utils",
        "verl.trainer",
        "verl.trainer.config",
        "verl.workers",
        "verl.workers.config",
    )
    functional = _register("verl.utils.torch_functional")
    _define_functions(functional, root / "utils" / "torch_functional.py")
    sys.modules["verl.utils"].torch_functional = functional  # type: ignore[attr-defined]
    _register("verl.protocol").DataProto = _Proto  # type: ignore[attr-defined]
    _register("verl.trainer.config.algorithm").RolloutCorrectionConfig = object  # type: ignore[attr-defined]
    _register("verl.workers.config.actor").PolicyLossConfig = object  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location(
        "verl_rollout_corr_helper", root / "trainer/ppo/rollout_corr_helper.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Proto:
    """Replaces DataProto: the tensors under `.batch`."""

    batch: dict[str, torch.Tensor]

    @classmethod
    def from_dict(cls, tensors: dict[str, torch.Tensor]) -> "_Proto":
        proto = cls()
        proto.batch = tensors
        return proto


def _register(*names: str) -> Any:
    for name in names:
        sys.modules[name] = ModuleType(name)
    return sys.modules[names[-1]]


def _define_functions(module: ModuleType, source: Path) -> None:
    tree = ast.parse(source.read_text())
    tree.body = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS
    ]
    vars(module)["torch"] = torch
    exec(compile(tree, str(source), "exec"), vars(module))
