"""docs/math.md and docs/choosing.md name functions, presets and flags that exist."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from slime_tis import PRESETS, RolloutCorrectionConfig, correct
from slime_tis.correction import LEVELS, MODES

DOCS = Path(__file__).parents[2] / "docs"
MATH, CHOOSING = (DOCS / "math.md").read_text(), (DOCS / "choosing.md").read_text()


def all_metrics():
    names = set()
    for mode in MODES:
        config = RolloutCorrectionConfig(
            use_tis=True,
            tis_mode=mode,
            tis_batch_normalize=True,
            use_rs=True,
            rs_veto_threshold=1e-4,
            rs_second_moment_bound=0.04,
        )
        ones = [torch.ones(1)]
        names |= set(correct(config, ones, ones, ones).statistics.metrics())
    return names


@pytest.mark.parametrize("function", sorted(set(re.findall(r"`(\w+\.\w+)` \|", MATH))))
def test_functions_exist(function):
    module, name = function.split(".")
    assert hasattr(importlib.import_module(f"slime_tis.correction.{module}"), name)


def test_metrics_presets_and_levels_of_the_guide_exist():
    known = all_metrics()
    for name in re.findall(r"`((?:mismatch|mis|nonfinite|gradient)_\w+)`", CHOOSING):
        assert name in known, name
    table = CHOOSING.split("## 6.")[1].split("## 7.")[0]
    for name in re.findall(r"`(\w+)`", table):
        assert name in PRESETS, name
    levels = CHOOSING.split("## 3.")[1].split("## 4.")[0]
    assert re.findall(r"^\| `(\w+)` \|", levels, re.M) == list(LEVELS)
