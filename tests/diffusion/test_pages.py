"""docs/diffusion.md: its code runs, its names exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import slime_tis
from slime_tis import RolloutCorrectionConfig, diffusion
from slime_tis.correction.modes import CRITERIA

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "diffusion.md").read_text()


BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.fixture(scope="module")
def variables() -> dict[str, Any]:
    """The variables after the code of the page has run."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, names)
    return names


def test_the_page_has_six_blocks_of_code():
    assert len(BLOCKS) == 6


def test_the_page_samples_with_log_probs(variables):
    assert variables["log_prob"].shape == (4,)


def test_the_page_corrects_trajectories(variables):
    assert variables["correction"].folded.shape == (16, 2)
    assert variables["merged"] is variables["correction"].statistics


def test_the_loss_of_the_page_has_a_gradient(variables):
    assert variables["log_probs"].grad.abs().sum() > 0


def test_the_page_measures_each_timestep(variables):
    assert "actor/rollout_corr/logprob_abs_diff/ts_900" in variables["metrics"]


def test_the_code_of_the_page_prints_no_warning(capsys):
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, names)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+)\(", PAGE))))
def test_functions_of_the_page_exist(name):
    # apply_… and compute_… are functions of verl-omni
    is_known = hasattr(diffusion, name) or hasattr(torch.distributed, name)
    assert is_known or name.startswith(("apply_", "compute_"))


@pytest.mark.parametrize("name", diffusion.__all__)
def test_the_page_names_every_public_object(name):
    assert name in PAGE


@pytest.mark.parametrize("name", sorted(set(re.findall(r"preset\(\"(\w+)\"\)", PAGE))))
def test_presets_of_the_page_exist(name):
    assert name in slime_tis.PRESETS


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\b(?:token|seq_\w+)_k\d\b", PAGE))))
def test_criteria_of_the_page_exist(name):
    assert name in CRITERIA


def test_options_of_the_page_exist():
    of_verl_omni = {
        "rollout_rs_masked_fraction",
        "rollout_rs_seq_masked_fraction",
        "rs_masked_fraction",
    }
    options = r"\b(use_tis|tis_\w+|rs_\w+|rollout_rs\w*|rejection_normalizer|nonfinite_policy)\b"
    names = re.findall(options, PAGE)
    unknown = set(names) - RolloutCorrectionConfig.__dataclass_fields__.keys()
    assert len(names) > 10
    assert unknown <= of_verl_omni


@pytest.mark.parametrize("bypass", [False, True], ids=["decoupled", "bypass"])
def test_every_metric_is_in_a_glossary(bypass):
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    config = RolloutCorrectionConfig(
        use_rollout_logprobs=bypass, use_rs=True, rs_veto_threshold=1e-4
    )
    timesteps = torch.tensor([900.0, 600.0])
    corrected = diffusion.correct_trajectories(
        config, torch.zeros(2, 2), torch.ones(2, 2), timesteps=timesteps
    )
    missing = []
    for name in corrected.statistics.metrics():
        bare = name.split("rollout_corr/")[1]
        of_diffusion = re.sub("ts_.*", "ts_VALUE", bare)
        general = re.sub(r"mis_rs_token_(seq_)?masked", r"mis_rs_CRITERION_\1masked", bare)
        if f"`{of_diffusion}`" not in PAGE and f"`train/{general}`" not in glossary:
            missing.append(name)
    assert missing == []
