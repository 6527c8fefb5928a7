"""docs/math.md and docs/choosing.md name functions, presets and flags that exist."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from slime_tis import PRESETS, RolloutCorrectionConfig, correct
from slime_tis.correction import LEVELS, MODES

DOCS = Path(__file__).parents[2] / "docs"
MATH = (DOCS / "math.md").read_text()
CHOOSING = (DOCS / "choosing.md").read_text()


def section(number: int) -> str:
    """A numbered section of docs/choosing.md."""
    return CHOOSING.split(f"## {number}.")[1].split(f"## {number + 1}.")[0]


@pytest.fixture(scope="module")
def correction_metrics() -> set[str]:
    """Names of the metrics of all modes."""
    names: set[str] = set()
    ones = [torch.ones(1)]
    for mode in MODES:
        config = RolloutCorrectionConfig(
            use_tis=True,
            tis_mode=mode,
            tis_batch_normalize=True,
            use_rs=True,
            rs_veto_threshold=1e-4,
            rs_second_moment_bound=0.04,
        )
        names |= set(correct(config, ones, ones, ones).statistics.metrics())
    return names


@pytest.mark.parametrize("function", sorted(set(re.findall(r"`(\w+\.\w+)` \|", MATH))))
def test_functions_exist(function):
    module, name = function.split(".")
    assert hasattr(importlib.import_module(f"slime_tis.correction.{module}"), name)


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:mismatch|mis|nonfinite|gradient)_\w+)`", CHOOSING)))
)
def test_metrics_of_the_guide_exist(name, correction_metrics):
    assert name in correction_metrics


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+)`", section(6)))))
def test_presets_of_the_guide_exist(name):
    assert name in PRESETS


def test_the_guide_has_the_levels_in_their_order():
    levels = re.findall(r"^\| `(\w+)` \|", section(3), re.M)
    assert levels == list(LEVELS)
